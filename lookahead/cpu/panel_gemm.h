// GEMM of many rows. The weights of some outputs are packed into a panel: a lane of its vectors is an output. So weights of
// any format are unpacked once for all rows, and numbers of the input are broadcast (as in BLIS: Van Zee & van de Geijn
// 2015).
//
// A sum is that of the other kernels (gemm.h) to the last bit. There, lane l of a vector adds every L-th product from the
// l-th on, and then neighbouring lanes are added in pairs. Here, a register tile adds the products of one lane after the
// other, and adds their sums in the same pairs. So a panel has a part for each lane, and so has a row of the input.

#pragma once

#include <algorithm>

#include "matrix.h"

namespace gemm {

// A register tile has up to PANEL_ROWS rows by PANEL_VECTORS vectors of outputs. Of 32 registers, 8 * 3 sums, three weights
// and a number of the input take 28; of 16, 6 * 2 + 2 + 1 take 15.
#ifdef __AVX512F__
constexpr int PANEL_ROWS = 8, PANEL_VECTORS = 3, LEVELS = 4;
#else
constexpr int PANEL_ROWS = 6, PANEL_VECTORS = 2, LEVELS = 3;
#endif
constexpr long PANEL_OUTPUTS = PANEL_VECTORS * L;
// For fewer rows, packing takes longer than it earns, by trial. With 32 registers, tiles of floats are nearly as fast.
template <class By>
constexpr long LEAST_ROWS = L == 16 && sizeof(typename By::Prepared) == 4 ? 32 : 16;
static_assert(1 << LEVELS == L);

// Vectors of a row of the input as it is multiplied: numbers of 4 bytes, or pairs of two.
template <class By>
constexpr long vectors_of(long inputs) {
    return inputs * (long)sizeof(typename By::Prepared) / (long)sizeof(Ints);
}

// Vectors from lane to lane of a panel. One is left out, lest lanes come to stand in one set of a cache.
static inline long stride_of(long vectors) { return vectors * PANEL_VECTORS + 1; }
template <class By>
static inline long bytes_of_panel(long inputs) {
    return L * stride_of(vectors_of<By>(inputs)) * sizeof(Ints);
}

// Bring the vectors 0..vectors-1 that f gives into the order of lanes: to[lane][vector]. A vector that is stored may reach
// into lanes that are stored after it, but not beyond the last one.
template <class F>
static INLINE void order_by_lanes(long vectors, int32_t* to, F f) {
    for (long first = (vectors - 1) / L * L; first >= 0; first -= L) {
        Ints some[L];
        UNROLL for (int v = 0; v < L; v++) some[v] = first + v < vectors ? f(first + v) : Ints{};
        transpose(some);
        for (int lane = 0; lane < L; lane++) {
            const long at = lane * vectors + first;
            if (at + L <= L * vectors)
                *(Unaligned<Ints>*)(to + at) = some[lane];
            else
                memcpy(to + at, some + lane, std::min<long>(L, vectors - first) * sizeof(int32_t));
        }
    }
}

// An output whose weights are packed.
template <class By, class Weight>
struct Packed {
    typedef typename By::Number T;
    const char* row;
    const float *scales, *offsets;
    const T* whole;

    // The factors from input i on: one vector, or two of indexed weights.
    INLINE void read(long i, [[maybe_unused]] long inputs, [[maybe_unused]] long group, Ints* v) const {
        const char* const at = row + bytes_of_row<Weight>(i);
        if constexpr (IS_INDEXED<Weight>) {
            Indexed::read({(const uint8_t*)row, 0, inputs}, whole, i, v);
        } else if constexpr (gguf::IS_BLOCK<Weight>) {
            const long begin = i / Weight::SIZE * Weight::SIZE;
            const uint8_t* const block = (const uint8_t*)row + bytes_of_row<Weight>(begin);
            v[0] = (Ints)gguf::factors<By, Weight>(block, i - begin, Weight::read(block));
        } else if constexpr (std::is_same_v<Weight, Codes>) {
            v[0] = (Ints)By::factors((const Codes*)at, scales[i / group], offsets[i / group]);
        } else if constexpr (std::is_same_v<Weight, Grouped>) {
            v[0] = (Ints)By::factors((const Grouped*)at, scales[i / group]);
        } else {
            v[0] = (Ints)By::factors((const Weight*)at);
        }
    }
};

// Pack outputs first..first+PANEL_OUTPUTS-1. In the place of outputs from `end` on, the last one stands again. Pairs of bf16
// numbers that are multiplied as floats are split.
template <class By, class Weight>
static void pack_panel(const Matrix<typename By::Number>& matrix, long first, long end, long inputs, Ints* panel) {
    constexpr bool IN_PAIRS = !std::is_same_v<typename By::Factors, Floats> || IS_INDEXED<Weight>;
    constexpr int PARTS = IN_PAIRS && sizeof(typename By::Prepared) == 4 ? 2 : 1;
    constexpr int VECTORS = IS_INDEXED<Weight> ? 2 : 1;
    constexpr long STEP = (IN_PAIRS ? 2 * L : L) * VECTORS;
    const long stride = stride_of(vectors_of<By>(inputs));
    for (int o = 0; o < PANEL_VECTORS; o++) {
        Packed<By, Weight> outputs[L];
        for (int lane = 0; lane < L; lane++) {
            const long output = std::min(first + o * L + lane, end - 1);
            outputs[lane] = {(const char*)matrix.template row<Weight>(output, inputs),
                             matrix.of_groups(matrix.group_scales, output, inputs),
                             matrix.of_groups(matrix.group_offsets, output, inputs),
                             IS_INDEXED<Weight> ? matrix.whole + output * inputs : nullptr};
        }
        Ints* out = panel + o;
        for (long i = 0; i < inputs; i += STEP) {
            Ints v[VECTORS][L], some[VECTORS];
            for (int lane = 0; lane < L; lane++) {
                outputs[lane].read(i, inputs, matrix.group, some);
                UNROLL for (int n = 0; n < VECTORS; n++) v[n][lane] = some[n];
            }
            UNROLL for (int n = 0; n < VECTORS; n++, out += PARTS * PANEL_VECTORS) {
                transpose(v[n]);
                UNROLL for (int lane = 0; lane < L; lane++) {
                    out[lane * stride] = PARTS == 1 ? v[n][lane] : (Ints)low(v[n][lane]);
                    if constexpr (PARTS == 2) out[lane * stride + PANEL_VECTORS] = (Ints)high(v[n][lane]);
                }
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

// Memory to prefetch: begin..end-1.
struct Wanted {
    const char *begin, *end;

    // One of so many equal parts.
    Wanted part(long i, long parts) const {
        return {begin + (end - begin) * i / parts, begin + (end - begin) * (i + 1) / parts};
    }
    void prefetch() const {
        for (const char* line = begin; line < end; line += 64) __builtin_prefetch(line, 0, 1);
    }
};

// Multiply M rows, which stand in the order of lanes, with a panel, and store what becomes of outputs
// first..first+count-1.
template <class By, int M>
static void multiply_panel(const int32_t* x, const Matrix<typename By::Number>& matrix, const Ints* panel, long row,
                           long first, long count, long inputs, Wanted wanted) {
    typedef typename By::Number T;
    const long vectors = vectors_of<By>(inputs);
    Floats sums[M][PANEL_VECTORS], before[LEVELS][M][PANEL_VECTORS];  // of as many lanes as their place says
    for (int lane = 0; lane < L; lane++) {
        UNROLL for (int m = 0; m < M; m++) UNROLL for (int o = 0; o < PANEL_VECTORS; o++) sums[m][o] = Floats{};
        const Ints* w = panel + lane * stride_of(vectors);
        wanted.part(lane, L).prefetch();
        for (long v = lane * vectors; v < (lane + 1) * vectors; v++, w += PANEL_VECTORS)
            UNROLL for (int m = 0; m < M; m++) add_products<By>(x[m * vectors * L + v], w, sums[m]);
        int level = 0;
        for (; lane >> level & 1; level++)
            UNROLL for (int m = 0; m < M; m++)
                UNROLL for (int o = 0; o < PANEL_VECTORS; o++) sums[m][o] += before[level][m][o];
        if (level < LEVELS)
            UNROLL for (int m = 0; m < M; m++)
                UNROLL for (int o = 0; o < PANEL_VECTORS; o++) before[level][m][o] = sums[m][o];
    }
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

template <class By, int M = PANEL_ROWS, class... Rest>
static INLINE void multiply_panel_of(long rows, Rest... rest) {
    if constexpr (M > 0) {
        if (rows == M)
            multiply_panel<By, M>(rest...);
        else
            multiply_panel_of<By, M - 1>(rows, rest...);
    }
}

// GEMM of all rows with outputs begin..end-1. x: [rows][L][vectors]. next: the weights that this thread wants then, or null.
// panel: of `bytes_of_panel`, aligned to 64 bytes.
template <class By, class Weight>
static void multiply_by_panels(const int32_t* x, long rows, const Matrix<typename By::Number>& matrix, long inputs,
                               long begin, long end, const void* next, Ints* panel) {
    const long tiles = (rows + PANEL_ROWS - 1) / PANEL_ROWS, rows_of_tile = (rows + tiles - 1) / tiles;
    for (long first = begin; first < end; first += PANEL_OUTPUTS) {
        const long then = first + PANEL_OUTPUTS;
        const void* const more = then < end || !next ? matrix.template row<Weight>(then, inputs) : next;
        const Wanted wanted = {(const char*)more, (const char*)more + PANEL_OUTPUTS * bytes_of_row<Weight>(inputs)};
        pack_panel<By, Weight>(matrix, first, end, inputs, panel);
        for (long tile = 0; tile < tiles; tile++) {
            const long row = tile * rows_of_tile;
            multiply_panel_of<By>(std::min(rows_of_tile, rows - row), x + row * vectors_of<By>(inputs) * L, matrix, panel,
                                  row, first, std::min(end - first, PANEL_OUTPUTS), inputs, wanted.part(tile, tiles));
        }
    }
}

}  // namespace gemm
