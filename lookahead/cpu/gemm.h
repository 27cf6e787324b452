// GEMM of a few rows of the input with weights in torch's own order: one row of weights for each output.
//
// The microkernel computes a register tile of M rows by O outputs. A vector register holds partial sums of one row and one
// output; its lanes are added when the tile is complete. So weights are read once, in memory order, for up to MR rows, and
// are not packed anew. Where the rows of a tile are too long for the first cache (L1), the inputs are cut into K blocks: a
// few outputs go through one K block, then through the next, and their partial sums are spilled in between. A sum is the
// same to the last bit, however many rows are multiplied, and in whatever format the weights are.

#pragma once

#include <algorithm>
#include <utility>

#include "amx_gemm_indexed.h"
#include "panel_gemm.h"

namespace gemm {

// A register tile of M rows by O outputs takes M * O registers for sums, O for weights and one for the input. MR is the
// largest M. With 16 registers it is the last with two outputs, 6 * 2 + 2 + 1 = 15; with 32, 12 * 2 + 2 + 1 = 27, which leaves
// five to unpack weights in. MR_OF_SEVERAL is the M of input that needs several tiles, where nothing is unpacked: 8 * 3 sums take
// 11 loads, where 12 * 2 take 14.
#ifdef __AVX512F__
constexpr int REGISTERS = 32, MR = 12, MR_OF_SEVERAL = 8;
#else
constexpr int REGISTERS = 16, MR = 6, MR_OF_SEVERAL = 6;
#endif
constexpr int NR = 4;  // outputs of a tile, at most: 4 FMAs of 4 cycles take a vector of weights a cycle, more than memory gives
constexpr long AHEAD = 12 * 1024;     // bytes between weights in use and prefetched ones, by trial; 100 ns * 20 GB/s are 2,000
constexpr long L1_INPUT = 27 * 1024;  // bytes of L1, of 32 KiB, for the tile's input; the rest is for weights and sums
constexpr long MAX_SPILLED = 24;      // outputs that go through a K block together: their sums, 18 KiB at most, stay in L2

// Join two vectors of partial sums. In a and in b, each block of STEP lanes holds partial sums of STEP vectors.
// Neighbouring blocks are added. A block of the result has 2 * STEP lanes: those of a, then those of b.
template <int STEP, int... I>
static INLINE Floats merged(Floats a, Floats b, std::integer_sequence<int, I...>) {
#define FIRST(I) (I / (2 * STEP) * 2 * STEP + I % STEP + (I / STEP % 2) * L)
#ifdef __clang__
    return __builtin_shufflevector(a, b, FIRST(I)...) + __builtin_shufflevector(a, b, (FIRST(I) + STEP)...);
#else
    return __builtin_shuffle(a, b, Ints{FIRST(I)...}) + __builtin_shuffle(a, b, Ints{(FIRST(I) + STEP)...});
#endif
}

// The sum of all lanes of each of the vectors BEGIN, BEGIN + 1, ..., COUNT - 1: one lane each, L at most, in order.
template <int COUNT, int BEGIN, int STEP = L / 2>
static INLINE Floats horizontal_sums(const Floats* v) {
    if constexpr (BEGIN >= COUNT)
        return Floats{};
    else if constexpr (STEP == 0)
        return v[BEGIN];
    else
        return merged<STEP>(horizontal_sums<COUNT, BEGIN, STEP / 2>(v), horizontal_sums<COUNT, BEGIN + STEP, STEP / 2>(v),
                            std::make_integer_sequence<int, L>());
}

// The prefetching of a tile. While it reads weights at `from`, those at `to` are prefetched, and so on from there, at the
// speed of reading or at half of it.
struct Ahead {
    const char *from, *to;
    int halvings = 0;

    INLINE const char* of(const void* at) const { return to + (((const char*)at - from) >> halvings); }
};

// Add to partial[m][o] the products of row m of x with the weights of output first + o, from input `begin` to `end`.
// Rows of x are `inputs` numbers apart. If the weights are grouped, begin and end are multiples of `group`.
template <class By, int M, int O, class Weight>
static INLINE void microkernel(const typename By::Prepared* x, const Matrix<typename By::Number>& matrix,
                               const Weight* rows, long first, long inputs, long begin, long end, Ahead ahead,
                               Floats* partial) {
    const long bytes = bytes_of_row<Weight>(inputs), group = matrix.group, groups = inputs / group;
    const float* const scales = matrix.of_groups(matrix.group_scales, first, inputs);
    const float* const offsets = matrix.of_groups(matrix.group_offsets, first, inputs);
    const long size = IS_GROUPED<Weight> ? group : end - begin;
    for (long g = begin / group; begin < end; begin += size, g++)
        for (long i = begin; i < begin + size; i += By::STRIDE) {
            typename By::Factors w[O][1];
            UNROLL for (int o = 0; o < O; o++) {
                const char* const row = (const char*)rows + o * bytes;
                const char* const at = row + bytes_of_row<Weight>(i);
                if constexpr (std::is_same_v<Weight, Codes>)
                    w[o][0] = By::factors((const Codes*)at, scales[o * groups + g], offsets[o * groups + g]);
                else if constexpr (std::is_same_v<Weight, Grouped>)
                    w[o][0] = By::factors((const Grouped*)at, scales[o * groups + g]);
                else
                    w[o][0] = By::factors((const Weight*)at);
                __builtin_prefetch(ahead.of(at), 0, 1);
            }
            UNROLL for (int m = 0; m < M; m++) By::template add<O>(partial + m * O, x + m * inputs + i, w, 0);
        }
}

// The microkernel for blocks of GGUF; begin and end are multiples of their size.
template <class By, int M, int O, class Block>
static INLINE void gguf_microkernel(const typename By::Prepared* x, const uint8_t* rows, long inputs, long begin, long end,
                                    Ahead ahead, Floats* partial) {
    constexpr long LINE = 64;
    const long bytes = bytes_of_row<Block>(inputs);
    for (; begin < end; begin += Block::SIZE) {
        const uint8_t* const at = rows + bytes_of_row<Block>(begin);
        typename Block::Scales scales[O];
        UNROLL for (int o = 0; o < O; o++) {
            scales[o] = Block::read(at + o * bytes);
            const char* const then = ahead.of(at + o * bytes);
            for (long i = 0; i < Block::BYTES; i += LINE) __builtin_prefetch(then + i, 0, 1);
        }
        for (long i = 0; i < Block::SIZE; i += By::STRIDE) {
            typename By::Factors w[O][1];
            UNROLL for (int o = 0; o < O; o++) w[o][0] = gguf::factors<By, Block>(at + o * bytes, i, scales[o]);
            UNROLL for (int m = 0; m < M; m++)
                By::template add<O>(partial + m * O, x + m * inputs + begin + i, w, 0);
        }
    }
}

// The microkernel for this type of weights, over a K block.
template <class By, int M, int O, class Weight>
static INLINE void add_k_block(const typename By::Prepared* x, const Matrix<typename By::Number>& matrix, long first,
                                long inputs, long begin, long end, Ahead ahead, Floats* partial) {
    const Weight* const rows = matrix.template row<Weight>(first, inputs);
    if constexpr (gguf::IS_BLOCK<Weight>)
        gguf_microkernel<By, M, O, Weight>(x, (const uint8_t*)rows, inputs, begin, end, ahead, partial);
    else
        microkernel<By, M, O>(x, matrix, rows, first, inputs, begin, end, ahead, partial);
}

// The size of a K block for tiles of M rows: whole groups or blocks of weights, of which M rows of the input fit into L1.
template <class By, class Weight, int M>
static INLINE long k_block_of(long inputs, long group) {
    const long parts = (M * inputs * (long)sizeof(typename By::Prepared) + L1_INPUT - 1) / L1_INPUT;
    long unit = IS_GROUPED<Weight> ? group : By::STRIDE;
    if constexpr (gguf::IS_BLOCK<Weight>) unit = Weight::SIZE;
    return ((inputs + parts - 1) / parts + unit - 1) / unit * unit;
}

// Compute outputs begin..end-1 of M rows, O at a time; there are at least O. then: prefetch from here on half as many bytes
// as are read. If null, prefetch what is read next.
template <class By, class Weight, int M, int O>
static INLINE void multiply_tile(const typename By::Prepared* x, const Matrix<typename By::Number>& matrix, long row,
                                 long inputs, long begin, long end, const char* then) {
    constexpr int N = M * O;
    const long k_block = k_block_of<By, Weight, M>(inputs, matrix.group);
    const long outputs = k_block < inputs ? MAX_SPILLED / O * O : O;  // that go through a K block together
    const long bytes = bytes_of_row<Weight>(inputs);
    const long far = std::max<long>(O, (AHEAD + bytes - 1) / bytes);  // outputs; with fewer, some would never be prefetched
    const char* const start = (const char*)matrix.template row<Weight>(begin, inputs);
    Floats spilled[MAX_SPILLED / O][N];
    for (long first = begin; first < end; first += outputs) {
        const long last = std::min(first + outputs, end);
        for (long from = 0; from < inputs; from += k_block) {
            const long to = std::min(from + k_block, inputs);
            const long distance = k_block >= inputs ? far * bytes  // a single K block
                                  : to < inputs     ? bytes_of_row<Weight>(k_block)
                                                    : outputs * bytes - bytes_of_row<Weight>(from);
            const Ahead ahead = then ? Ahead{start, then, 1} : Ahead{start, start + distance};
            for (long next = first; next < last; next += O) {
                const long o = std::min(next, end - O);  // the last ones may be computed twice
                Floats partial[N] = {};
                Floats* const before = spilled[(next - first) / O];
                if (from > 0) memcpy(partial, before, sizeof partial);
                add_k_block<By, M, O, Weight>(x, matrix, o, inputs, from, to, ahead, partial);
                if (to < inputs) {
                    memcpy(before, partial, sizeof partial);
                    continue;
                }
                float sums[32];
                *(Unaligned<Floats>*)sums = horizontal_sums<N, 0>(partial);
                if constexpr (N > L) *(Unaligned<Floats>*)(sums + L) = horizontal_sums<N, L>(partial);
                matrix.template put<M, O>(sums, row, o);
            }
        }
    }
}

// The same for a number of rows that is known only at run time, with as many outputs as the registers leave room for.
template <class By, class Weight, int M = MR>
static void multiply_tile_of(int rows, const typename By::Prepared* x, const Matrix<typename By::Number>& matrix, long row,
                          long inputs, long begin, long end, const char* then) {
    if constexpr (M > 0) {
        constexpr int fitting = (REGISTERS - 2) / (M + 1), O = fitting < NR ? fitting : NR;
        if (rows == M && end - begin >= O)
            multiply_tile<By, Weight, M, O>(x, matrix, row, inputs, begin, end, then);
        else if constexpr (M == 1)  // with fewer outputs
            multiply_tile<By, Weight, 1, 1>(x, matrix, row, inputs, begin, end, then);
        else if (rows == M)
            for (long m = 0; m < M; m++)
                multiply_tile_of<By, Weight, 1>(1, x + m * inputs, matrix, row + m, inputs, begin, end, then);
        else
            multiply_tile_of<By, Weight, M - 1>(rows, x, matrix, row, inputs, begin, end, then);
    }
}

// An input of a GEMM as the kernels take it. What is not taken as it is, is made ready in a number of parts.
template <class By>
struct Input {
    typedef typename By::Number T;
    typedef typename By::Prepared Prepared;
    static constexpr bool IS_CONVERTED = sizeof(Prepared) != sizeof(T);
    enum Forms { IN_ROWS = 1, IN_LANES = 2, IN_COLUMNS = 4, IN_LINES = 8 };  // for tiles, panels, and tiles of the unit

    const T* x;  // [rows][inputs]
    long rows, inputs;
    void* room;   // of `bytes`
    int forms;    // all that are needed
    Ints* panel;  // of `bytes_of_panel`
    const Tiles tiles{rows};

    static Forms form_for([[maybe_unused]] const Matrix<T>& matrix, long rows, [[maybe_unused]] long inputs) {
#ifdef HAS_AMX
        if (takes_tiles(matrix, inputs)) return matrix.format == INDEXED ? IN_LINES : IN_COLUMNS;
#endif
        return rows < least_rows<By>(matrix.format) && matrix.format != INDEXED ? IN_ROWS : IN_LANES;
    }

    // Vector v of a row as it is multiplied.
    static INLINE Ints vector(const T* row, long v) {
        if constexpr (!IS_CONVERTED) return ((const Unaligned<Ints>*)row)[v];
        const Ints pairs = ((const Unaligned<Ints>*)row)[v / 2];
        return (Ints)(v % 2 ? high(pairs) : low(pairs));
    }
    void make_rows(long part) const {
        const long vectors = vectors_of<By>(inputs);
        if (forms & IN_LANES) {
            const long first = tiles.first(part);
            const auto its = [=](long row, long v) { return vector(x + (first + row) * inputs, v); };
            order_by_lanes(tiles.size(part), vectors, (int32_t*)made() + first * vectors * L, its);
        } else {
            Ints* const to = (Ints*)((Prepared*)made() + part * inputs);
            for (long v = 0; v < vectors; v++) ((Unaligned<Ints>*)to)[v] = vector(x + part * inputs, v);
        }
    }
    static long bytes_of_rows(long rows, long inputs) { return rows * inputs * sizeof(Prepared); }
    long parts_of_rows() const { return forms & IN_LANES ? tiles.count : IS_CONVERTED && forms & IN_ROWS ? rows : 0; }

#ifdef HAS_AMX
    const Lines<T> shape{rows};  // of lines
    static long bytes(long rows, long inputs) {
        return bytes_of_tiles<T>(rows, inputs) + Lines<T>(rows).bytes(inputs) + bytes_of_rows(rows, inputs);
    }
    Ints* columns() const { return (Ints*)room; }
    Ints* lines() const { return (Ints*)((char*)room + (forms & IN_COLUMNS ? bytes_of_tiles<T>(rows, inputs) : 0)); }
    void* made() const { return (char*)lines() + (forms & IN_LINES ? shape.bytes(inputs) : 0); }
    long parts() const { return parts_of_rows() + (forms & (IN_COLUMNS | IN_LINES) ? inputs / DEPTH : 0); }
    void make(long part) const {
        if (part < parts_of_rows()) return make_rows(part);
        part -= parts_of_rows();
        if (forms & IN_COLUMNS) fill_tiles(x, rows, inputs, part, columns());
        if (forms & IN_LINES) shape.fill(x, rows, inputs, part, lines());
    }
#else
    static long bytes(long rows, long inputs) { return bytes_of_rows(rows, inputs); }
    void* made() const { return room; }
    long parts() const { return parts_of_rows(); }
    void make(long part) const { make_rows(part); }
#endif
    const Prepared* row(long row) const {
        return (const Prepared*)(IS_CONVERTED ? made() : (const void*)x) + row * inputs;
    }
    const int32_t* lanes() const { return (const int32_t*)made(); }
};

// GEMM of any number of rows, in tiles of about equal size, with weights of any format.
template <class By>
static void multiply_by_vectors(const Input<By>& x, const Matrix<typename By::Number>& matrix, long begin, long end,
                                const void* next) {
    typedef typename By::Number T;
    const long fitting = L1_INPUT / (x.inputs * (long)sizeof(typename By::Prepared));
    const long alone = 2 * fitting < MR ? MR : std::min<long>(fitting, MR);  // smaller tiles spare the spills
    const long most = x.rows > MR && matrix.format == FLOATS ? MR_OF_SEVERAL : alone;
    const long tiles = (x.rows + most - 1) / most, rows_of_tile = (x.rows + tiles - 1) / tiles;
    by_weight<T>(matrix.format, [&](auto weight) {
        typedef decltype(weight) Named;
        constexpr bool IS_READ = !gguf::IS_BLOCK<Named> || sizeof(T) == 4 || std::is_same_v<Named, gguf::MXFP4>;
#ifdef READS_LINES
        constexpr bool IS_SERVED = IS_READ;
#else
        constexpr bool IS_SERVED = IS_READ && !IS_INDEXED<Named>;
#endif
        typedef std::conditional_t<IS_SERVED, Named, T> Weight;
        typedef std::conditional_t<IS_INDEXED<Weight>, T, Weight> OfRows;
        if (x.forms & Input<By>::IN_LANES)
            multiply_by_panels<By, Weight>(x.lanes(), x.tiles, matrix, x.inputs, begin, end, next, x.panel);
        else
            // Each but the first tile finds the weights in L2. So memory would rest, if the first two did not prefetch a half
            // each of the next weights.
            for (long row = 0; row < x.rows; row += rows_of_tile) {
                const long half = (end - begin) * bytes_of_row<OfRows>(x.inputs) / 2;
                const char* const then = tiles > 1 && next ? (const char*)next + (row ? half : 0) : nullptr;
                multiply_tile_of<By, OfRows>(std::min(rows_of_tile, x.rows - row), x.row(row), matrix, row, x.inputs, begin,
                                             end, then);
            }
    });
}

// GEMM of all rows with outputs begin..end-1. next: the weights that this thread wants then, or null.
template <class By>
void multiply(const Input<By>& x, const Matrix<typename By::Number>& matrix, long begin, long end, const void* next) {
#ifdef HAS_AMX
    switch (x.form_for(matrix, x.rows, x.inputs)) {
        case Input<By>::IN_LINES: multiply_in_lines(x.rows, x.shape, x.lines(), matrix, x.inputs, begin, end, next); break;
        case Input<By>::IN_COLUMNS: multiply_in_columns<By>(x.rows, x.columns(), matrix, x.inputs, begin, end); break;
        case Input<By>::IN_ROWS:
        case Input<By>::IN_LANES:
            if constexpr (sizeof(typename By::Number) == 4)  // never bf16
                multiply_by_vectors<By>(x, matrix, begin, end, next);
    }
#else
    multiply_by_vectors<By>(x, matrix, begin, end, next);
#endif
    if (matrix.format == BYTES) matrix.scale(0, x.rows, begin, end);
}

// gemm.cpp instantiates these; no other source compiles them once more.
#define MULTIPLY(BY) template void multiply<BY>(const Input<BY>&, const Matrix<BY::Number>&, long, long, const void*)
#if defined(HAS_AMX)
#define FOR_EACH_WAY(DO) DO(ByFloats); DO(ByPairs)
#elif defined(__AVX512BF16__)
#define FOR_EACH_WAY(DO) DO(ByFloats); DO(BySplitPairs); DO(ByPairs)
#else
#define FOR_EACH_WAY(DO) DO(ByFloats); DO(BySplitPairs)
#endif
#define DECLARED(BY) extern MULTIPLY(BY)
FOR_EACH_WAY(DECLARED);

}  // namespace gemm
