// GEMM by panels: a lane of a vector of weights is an output, and numbers of the input are broadcast (as in BLIS: Van Zee &
// van de Geijn 2015). Weights in 12 bits (indexed.h) lie in this order, and are unpacked for any number of rows: in registers,
// where these suffice. Other weights are packed into a panel, which is worth it for many rows.
//
// A sum is that of the other kernels (gemm.h) to the last bit. There, lane l of a vector adds every L-th product from the
// l-th on, and then neighbouring lanes are added in pairs. Here, a register tile adds the products of one lane after the
// other, and adds their sums in the same pairs. So a panel has a part for each lane, and so have the rows of a tile.

#pragma once

#include <algorithm>
#include <climits>

#include "matrix.h"

namespace gemm {

// A register tile has up to PANEL_ROWS rows by PANEL_VECTORS vectors of outputs. Of 32 registers, 12 * 2 sums, two weights
// and a number of the input take 27, which leaves five to unpack weights in; of 16, 6 * 2 + 2 + 1 take 15.
#ifdef __AVX512F__
constexpr int PANEL_ROWS = 12, PANEL_VECTORS = 2, LEVELS = 4;
#else
constexpr int PANEL_ROWS = 6, PANEL_VECTORS = 2, LEVELS = 3;
#endif
constexpr long PANEL_OUTPUTS = PANEL_VECTORS * L;
// For fewer rows, packing takes longer than it earns, by trial. With 32 registers, tiles of rows (gemm.h) are nearly as
// fast as panels where weights need no unpacking, or the input is floats.
template <class By>
static long least_rows(Format format) {
    if (L < 16) return 16;
    return format == FLOATS ? 48 : sizeof(typename By::Prepared) == 4 ? 32 : 16;
}
static_assert(1 << LEVELS == L && PANEL_ROWS <= L);
// With 32 registers, each tile unpacks lines of weights for itself: that is hidden behind its products. With 16, up to
// MOST_UNPACKING rows do so, in tiles of UNPACKING_ROWS, which leave registers to unpack in. For more rows, a lane is
// unpacked once for all tiles, to memory that stays in L1; for more than TOGETHER tiles, a whole panel is.
constexpr long UNPACKING_ROWS = L == 16 ? PANEL_ROWS : 5, MOST_UNPACKING = L == 16 ? LONG_MAX : 8, TOGETHER = 8;

// Vectors of a row of the input as it is multiplied: numbers of 4 bytes, or pairs of two.
template <class By>
constexpr long vectors_of(long inputs) {
    return inputs * (long)sizeof(typename By::Prepared) / (long)sizeof(Ints);
}

// Vectors from lane to lane of a panel. One is left out, lest lanes come to stand in one set of a cache.
static inline long stride_of(long vectors) { return vectors * PANEL_VECTORS + 1; }
template <class By>
static inline long bytes_of_panel(long inputs) {
    return aligned(L * stride_of(vectors_of<By>(inputs)) * sizeof(Ints));
}

// Call f with a number of rows that is known only at run time, as a constant.
template <int M = PANEL_ROWS, class F>
static INLINE void of_rows(long rows, F f) {
    if constexpr (M > 0) {
        if (rows == M)
            f(std::integral_constant<int, M>());
        else
            of_rows<M - 1>(rows, f);
    }
}

// Bring the rows of a tile into the order of lanes: to[lane][vector][row]. f(row, v) gives vector v of a row.
template <class F>
static void order_by_lanes(long rows, long vectors, int32_t* to, F f) {
    of_rows(rows, [&](auto m) {
        for (long v = 0; v < vectors; v++) {
            Ints some[L];
            UNROLL for (int row = 0; row < L; row++) some[row] = row < m ? f(row, v) : Ints{};
            transpose(some);
            UNROLL for (int lane = 0; lane < L; lane++) memcpy(to + (lane * vectors + v) * m, some + lane, m * sizeof(int32_t));
        }
    });
}

// An output whose weights are packed.
template <class By, class Weight>
struct Packed {
    const char* row;
    const float *scales, *offsets;

    // The factors from input i on.
    INLINE Ints read(long i, [[maybe_unused]] long group) const {
        const char* const at = row + bytes_of_row<Weight>(i);
        if constexpr (gguf::IS_BLOCK<Weight>) {
            const long begin = i / Weight::SIZE * Weight::SIZE;
            const uint8_t* const block = (const uint8_t*)row + bytes_of_row<Weight>(begin);
            return (Ints)gguf::factors<By, Weight>(block, i - begin, Weight::read(block));
        } else if constexpr (std::is_same_v<Weight, Codes>) {
            return (Ints)By::factors((const Codes*)at, scales[i / group], offsets[i / group]);
        } else if constexpr (std::is_same_v<Weight, Grouped>) {
            return (Ints)By::factors((const Grouped*)at, scales[i / group]);
        } else {
            return (Ints)By::factors((const Weight*)at);
        }
    }
};

// Pack outputs first..first+PANEL_OUTPUTS-1. In the place of outputs from `end` on, the last one stands again. Pairs of bf16
// numbers that are multiplied as floats are split.
template <class By, class Weight>
static void pack_panel(const Matrix<typename By::Number>& matrix, long first, long end, long inputs, Ints* panel) {
    constexpr bool IN_PAIRS = !std::is_same_v<typename By::Factors, Floats>;
    constexpr int PARTS = IN_PAIRS && sizeof(typename By::Prepared) == 4 ? 2 : 1;
    const long stride = stride_of(vectors_of<By>(inputs));
    for (int o = 0; o < PANEL_VECTORS; o++) {
        Packed<By, Weight> outputs[L];
        for (int lane = 0; lane < L; lane++) {
            const long output = std::min(first + o * L + lane, end - 1);
            outputs[lane] = {(const char*)matrix.template row<Weight>(output, inputs),
                             matrix.of_groups(matrix.group_scales, output, inputs),
                             matrix.of_groups(matrix.group_offsets, output, inputs)};
        }
        Ints* out = panel + o;
        for (long i = 0; i < inputs; i += IN_PAIRS ? 2 * L : L, out += PARTS * PANEL_VECTORS) {
            Ints v[L];
            for (int lane = 0; lane < L; lane++) v[lane] = outputs[lane].read(i, matrix.group);
            transpose(v);
            UNROLL for (int lane = 0; lane < L; lane++) {
                out[lane * stride] = PARTS == 1 ? v[lane] : (Ints)low(v[lane]);
                if constexpr (PARTS == 2) out[lane * stride + PANEL_VECTORS] = (Ints)high(v[lane]);
            }
        }
    }
}

// Add to the sums of a row what vectors of a panel make of a number, or a pair, of its input.
template <class By>
static INLINE void add_products(int32_t number, const Ints* w, Floats* sums) {
    const Ints numbers = number - Ints{};
    UNROLL for (int o = 0; o < PANEL_VECTORS; o++) {
#ifdef __AVX512BF16__
        if constexpr (sizeof(typename By::Prepared) == 2) {
            sums[o] = (Floats)_mm512_dpbf16_ps((__m512)sums[o], (__m512bh)numbers, (__m512bh)w[o]);
            continue;
        }
#endif
        sums[o] += (Floats)numbers * (Floats)w[o];
    }
}

// A panel in memory.
template <class By>
struct PanelInMemory {
    const Ints* const panel;
    const long vectors, stride;  // from lane to lane, or 0 if there is only one at a time

    long steps() const { return L; }
    // Add to the sums of M rows the products of a lane.
    template <int M>
    INLINE void add_lane(const int32_t* x, long lane, Wanted wanted, Floats (*sums)[PANEL_VECTORS]) const {
        const Ints* w = panel + lane * stride;
        x += lane * vectors * M;
        wanted.prefetch(lane);
        for (long v = 0; v < vectors; v++, w += PANEL_VECTORS, x += M)
            UNROLL for (int m = 0; m < M; m++) add_products<By>(x[m], w, sums[m]);
    }
};

#if defined(__AVX2__) && !defined(HAS_AMX)
#define READS_LINES

// A panel of indexed weights, which are unpacked line by line.
template <class By>
struct PanelOfLines {
    static constexpr int PARTS = sizeof(typename By::Prepared) / 2, VECTORS = 2 * PARTS;  // of a line
    typedef Indexed::Rows<const uint8_t> Rows;

    const uint8_t *lower[PANEL_VECTORS], *codes[PANEL_VECTORS];
    Indexed::Table tables[PANEL_VECTORS];
    const Rows::Patch *patch[PANEL_VECTORS], *last[PANEL_VECTORS];
    long blocks, patched;  // the next line that has a patch

    // From output `first` on. In the place of outputs from `end` on, some before stand again.
    PanelOfLines(const uint8_t* matrix, long first, long end, long inputs) : blocks(inputs / Indexed::BLOCK) {
        for (int o = 0; o < PANEL_VECTORS; o++) {
            const Rows rows(matrix, std::min(first + o * L, end - 1), inputs);
            lower[o] = rows.lower(0, 0), codes[o] = rows.codes(0, 0), tables[o] = Indexed::table_of(rows.tables());
            patch[o] = rows.patches(), last[o] = patch[o] + rows.patched();
        }
        find_patched();
    }
    static bool are_there(const uint8_t* matrix, long first, long end, long inputs) {
        bool are = true;
        for (long o = first; o < std::min(end, first + PANEL_OUTPUTS); o += L) are &= !Rows(matrix, o, inputs).are_read();
        return are;
    }
    void find_patched() {
        patched = -1;
        for (int o = 0; o < PANEL_VECTORS; o++)
            if (patch[o] < last[o] && (patched < 0 || patch[o]->line < patched)) patched = patch[o]->line;
    }
    void patch_line(Ints (*w)[2]) {
        for (int o = 0; o < PANEL_VECTORS; o++)
            for (; patch[o] < last[o] && patch[o]->line == patched; patch[o]++)
                ((uint8_t*)(w[o] + patch[o]->vector))[patch[o]->byte] = patch[o]->upper;
        find_patched();
    }

    // The pairs of a line.
    INLINE void read(long line, Ints (*w)[2]) {
        UNROLL for (int o = 0; o < PANEL_VECTORS; o++)
            Indexed::look_up(lower[o] + line * Indexed::BLOCK, codes[o] + line * Indexed::BLOCK / 2, tables[o], w[o]);
        if (__builtin_expect(line == patched, 0)) {
            Ints some[PANEL_VECTORS][2];  // so that the others stay in registers
            UNROLL for (int o = 0; o < PANEL_VECTORS; o++) some[o][0] = w[o][0], some[o][1] = w[o][1];
            patch_line(some);
            UNROLL for (int o = 0; o < PANEL_VECTORS; o++) w[o][0] = some[o][0], w[o][1] = some[o][1];
        }
    }
    // Vectors v of them as they are multiplied: only then they take registers.
    static INLINE void take(const Ints (*w)[2], int v, Ints* vectors) {
        UNROLL for (int o = 0; o < PANEL_VECTORS; o++) {
            const Ints pairs = w[o][v / PARTS];
            vectors[o] = PARTS == 1 ? pairs : (Ints)(v % 2 ? high(pairs) : low(pairs));
        }
    }

    long steps() const { return L * blocks; }
    template <int M>
    INLINE void add_lane(const int32_t* x, long lane, Wanted wanted, Floats (*sums)[PANEL_VECTORS]) {
        x += lane * blocks * VECTORS * M;
        for (long line = lane * blocks; line < (lane + 1) * blocks; line++, x += VECTORS * M) {
            Ints w[PANEL_VECTORS][2];
            read(line, w);
            wanted.prefetch(line);
            UNROLL for (int v = 0; v < VECTORS; v++) {
                Ints now[PANEL_VECTORS];
                take(w, v, now);
                UNROLL for (int m = 0; m < M; m++) add_products<By>(x[v * M + m], now, sums[m]);
                if (L < 16 && v % PARTS == PARTS - 1)  // of 16 registers, GCC gives some to constants, and spills sums
                    UNROLL for (int m = 0; m < M; m++)
                        UNROLL for (int o = 0; o < PANEL_VECTORS; o++) sums[m][o] = in_register(sums[m][o]);
            }
        }
    }

    void unpack(long lane, Wanted wanted, Ints* to) {
        for (long line = lane * blocks; line < (lane + 1) * blocks; line++) {
            Ints w[PANEL_VECTORS][2];
            read(line, w);
            wanted.prefetch(line);
            UNROLL for (int v = 0; v < VECTORS; v++, to += PANEL_VECTORS) take(w, v, to);
        }
    }
};
#endif

// The rows of an input in tiles of about equal size.
struct Tiles {
    const long rows, count, of_tile;

    explicit Tiles(long rows)
        : rows(rows), count((rows + most() - 1) / most()), of_tile(count ? (rows + count - 1) / count : 0) {}
    long most() const { return rows <= MOST_UNPACKING ? UNPACKING_ROWS : PANEL_ROWS; }
    long first(long tile) const { return std::min(rows, tile * of_tile); }
    long size(long tile) const { return first(tile + 1) - first(tile); }
};

// The sums of a tile's lanes, added up in pairs.
struct LaneSums {
    Floats before[LEVELS][PANEL_ROWS][PANEL_VECTORS];  // of as many lanes as their place says

    // Add those of the next lane, for M rows. After the last lane, `sums` are those of all.
    template <int M>
    INLINE void add(int lane, Floats (*sums)[PANEL_VECTORS]) {
        int level = 0;
        for (; lane >> level & 1; level++)
            UNROLL for (int m = 0; m < M; m++)
                UNROLL for (int o = 0; o < PANEL_VECTORS; o++) sums[m][o] += before[level][m][o];
        if (level < LEVELS)
            UNROLL for (int m = 0; m < M; m++)
                UNROLL for (int o = 0; o < PANEL_VECTORS; o++) before[level][m][o] = sums[m][o];
    }
};

// Store sums of M rows as outputs first..first+count-1.
template <int M, class T>
static INLINE void put_sums(const Matrix<T>& matrix, const Floats (*sums)[PANEL_VECTORS], long row, long first, long count) {
    Floats bias[PANEL_VECTORS] = {};
    for (long i = 0; i < count && matrix.bias && matrix.format != BYTES; i++)
        bias[i / L][i % L] = number(matrix.bias[first + i]);
    UNROLL for (int m = 0; m < M; m++) {
        T numbers[PANEL_OUTPUTS];
        UNROLL for (int o = 0; o < PANEL_VECTORS; o++) store(sums[m][o] + bias[o], numbers + o * L);
        T* const to = matrix.out + (row + m) * matrix.outputs + first;
        if (count == PANEL_OUTPUTS)  // of a known size, it is no call
            memcpy(to, numbers, sizeof numbers);
        else
            memcpy(to, numbers, count * sizeof(T));
    }
}

// Multiply M rows, which stand in the order of lanes, with a panel, and store what becomes of outputs
// first..first+count-1.
template <class By, int M, class Panel>
static void multiply_panel(const int32_t* x, const Matrix<typename By::Number>& matrix, Panel panel, long row, long first,
                           long count, Wanted wanted) {
    Floats sums[M][PANEL_VECTORS];
    LaneSums all;
    for (int lane = 0; lane < L; lane++) {
        UNROLL for (int m = 0; m < M; m++) UNROLL for (int o = 0; o < PANEL_VECTORS; o++) sums[m][o] = Floats{};
        panel.template add_lane<M>(x, lane, wanted, sums);
        all.add<M>(lane, sums);
    }
    put_sums<M>(matrix, sums, row, first, count);
}

// Multiply all rows with a panel. x: the rows of each tile in the order of lanes. Bytes from `next` on are prefetched.
template <class By, class Panel>
static void multiply_tiles_of(const Tiles& tiles, const int32_t* x, const Matrix<typename By::Number>& matrix, Panel panel,
                              long inputs, long first, long count, const char* next, long bytes) {
    const long of_row = vectors_of<By>(inputs) * L, steps = tiles.count * panel.steps();
    Wanted wanted = {next, (bytes + steps - 1) / steps};
    for (long tile = 0; tile < tiles.count; tile++, wanted.begin += wanted.bytes * panel.steps())
        of_rows(tiles.size(tile), [&](auto m) {
            const long row = tiles.first(tile);
            multiply_panel<By, m>(x + row * of_row, matrix, panel, row, first, count, wanted);
        });
}

#ifdef READS_LINES
// The same with a panel of lines, each lane of which is unpacked to `unpacked` for all tiles. There are TOGETHER at most.
template <class By>
static void multiply_tiles_by_lanes(const Tiles& tiles, const int32_t* x, const Matrix<typename By::Number>& matrix,
                                    PanelOfLines<By> lines, long inputs, long first, long count, const char* next, long bytes,
                                    Ints* unpacked) {
    const long vectors = vectors_of<By>(inputs), steps = lines.steps();
    const Wanted wanted = {next, (bytes + steps - 1) / steps};
    const PanelInMemory<By> panel = {unpacked, vectors, 0};
    LaneSums all[TOGETHER];
    for (int lane = 0; lane < L; lane++) {
        lines.unpack(lane, wanted, unpacked);
        for (long tile = 0; tile < tiles.count; tile++)
            of_rows(tiles.size(tile), [&](auto m) {
                const long row = tiles.first(tile);
                Floats sums[m][PANEL_VECTORS] = {};
                panel.template add_lane<m>(x + row * vectors * L, lane, {}, sums);
                all[tile].add<m>(lane, sums);
                if (lane == L - 1) put_sums<m>(matrix, sums, row, first, count);
            });
    }
}
#endif

// GEMM of all rows with outputs begin..end-1. next: the weights that this thread wants then, or null. panel: of
// `bytes_of_panel`, aligned to 64 bytes.
template <class By, class Weight>
static void multiply_by_panels(const int32_t* x, const Tiles& tiles, const Matrix<typename By::Number>& matrix, long inputs,
                               long begin, long end, const void* next, Ints* panel) {
    typedef typename By::Number T;
    const long bytes = PANEL_OUTPUTS * bytes_of_row<Weight>(inputs);
    const long vectors = vectors_of<By>(inputs), stride = stride_of(vectors);
    for (long first = begin; first < end; first += PANEL_OUTPUTS) {
        const long then = first + PANEL_OUTPUTS, count = std::min(end - first, PANEL_OUTPUTS);
        const auto* more = (const char*)(then < end || !next ? matrix.template row<Weight>(then, inputs) : next);
        const auto multiply = [&](auto panel) {
            multiply_tiles_of<By>(tiles, x, matrix, panel, inputs, first, count, more, bytes);
        };
#ifdef READS_LINES
        if constexpr (IS_INDEXED<Weight>) {
            const auto* const lines = (const uint8_t*)matrix.weights;
            PanelOfLines<By> of_lines(lines, first, end, inputs);
            if (!PanelOfLines<By>::are_there(lines, first, end, inputs)) {
                Matrix<T> whole = matrix;
                whole.weights = matrix.whole;
                pack_panel<By, T>(whole, first, end, inputs, panel);
            } else if (tiles.rows <= MOST_UNPACKING) {
                multiply(of_lines);
                continue;
            } else if constexpr (L < 16) {
                if (tiles.count <= TOGETHER) {
                    multiply_tiles_by_lanes(tiles, x, matrix, of_lines, inputs, first, count, more, bytes, panel);
                    continue;
                }
                for (long lane = 0; lane < L; lane++) of_lines.unpack(lane, {}, panel + lane * stride);
            }
        } else
#endif
            pack_panel<By, Weight>(matrix, first, end, inputs, panel);
        multiply(PanelInMemory<By>{panel, vectors, stride});
    }
}

}  // namespace gemm
