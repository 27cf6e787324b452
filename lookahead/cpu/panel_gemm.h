// GEMM of the many rows of a prompt. The weights of 2 * L outputs are packed into a panel: a lane of its vectors is an
// output, and the vectors are in the order of the inputs. So weights of any format are unpacked once for all rows, numbers of
// the input are broadcast, and no lanes are added at the end. A sum of a row is the same to the last bit, however many rows
// are multiplied, but it is not the sum of the other kernels (gemm.h), which add in another order.

#pragma once

#include <algorithm>

#include "matrix.h"

namespace gemm {

// A register tile has 2 vectors of outputs by up to PANEL_ROWS rows. Of 32 registers, 12 * 2 sums, two weights, the halves
// of both and a number of the input take 29; of 16, 5 * 2 sums, two weights, one half of each and a number take 15.
#ifdef __AVX512F__
constexpr int PANEL_ROWS = 12;
#else
constexpr int PANEL_ROWS = 5;
#endif
constexpr long PANEL_DEPTH = 1024;  // vectors of a panel for L outputs, at most: 128 KiB for both, so it stays in L2
constexpr long LEAST_ROWS = 32;     // for fewer, packing takes longer than it earns

// Whether a lane holds two bf16 weights. Otherwise it holds a float.
template <class By, class Weight>
constexpr bool IN_PAIRS = !std::is_same_v<typename By::Factors, Floats> || IS_INDEXED<Weight>;

// Bytes for a panel, and for the sums of all rows between two parts of the inputs.
static inline long bytes_of_panel(long rows) { return (2 * PANEL_DEPTH + 2 * rows) * sizeof(Floats); }

// The factors of an output from input i on: one vector, or two of indexed weights.
template <class By, class Weight>
static INLINE void read_factors(const Matrix<typename By::Number>& matrix, long output, long inputs, long i, Ints* v) {
    const char* const row = (const char*)matrix.template row<Weight>(IS_INDEXED<Weight> ? 0 : output, inputs);
    const char* const at = row + bytes_of_row<Weight>(i);
    if constexpr (IS_INDEXED<Weight>) {
        Indexed::read({(const uint8_t*)row, output, inputs}, matrix.whole + output * inputs, i, v);
    } else if constexpr (gguf::IS_BLOCK<Weight>) {
        const long begin = i / Weight::SIZE * Weight::SIZE;
        const uint8_t* const block = (const uint8_t*)row + bytes_of_row<Weight>(begin);
        v[0] = (Ints)gguf::factors<By, Weight>(block, i - begin, Weight::read(block));
    } else if constexpr (IS_GROUPED<Weight>) {
        const long g = i / matrix.group;
        const float scale = matrix.of_groups(matrix.group_scales, output, inputs)[g];
        if constexpr (std::is_same_v<Weight, Codes>)
            v[0] = (Ints)By::factors((const Codes*)at, scale, matrix.of_groups(matrix.group_offsets, output, inputs)[g]);
        else
            v[0] = (Ints)By::factors((const Grouped*)at, scale);
    } else {
        v[0] = (Ints)By::factors((const Weight*)at);
    }
}

// Pack inputs from..to-1 of outputs first..first+2*L-1. In the place of outputs from `end` on, the last one stands again.
template <class By, class Weight>
static void pack_panel(const Matrix<typename By::Number>& matrix, long first, long end, long inputs, long from, long to,
                       Ints* panel) {
    constexpr int VECTORS = IS_INDEXED<Weight> ? 2 : 1;
    constexpr long STEP = (IN_PAIRS<By, Weight> ? 2 * L : L) * VECTORS;
    for (int half = 0; half < 2; half++)
        for (long i = from; i < to; i += STEP) {
            Ints v[VECTORS][L], some[VECTORS];
            for (int lane = 0; lane < L; lane++) {
                read_factors<By, Weight>(matrix, std::min(first + half * L + lane, end - 1), inputs, i, some);
                UNROLL for (int n = 0; n < VECTORS; n++) v[n][lane] = some[n];
            }
            Ints* const out = panel + (i - from) / STEP * VECTORS * L * 2 + half;
            UNROLL for (int n = 0; n < VECTORS; n++) {
                transpose(v[n]);
                UNROLL for (int j = 0; j < L; j++) out[(n * L + j) * 2] = v[n][j];
            }
        }
}

// Add to the sums of a row what two vectors of a panel make of its numbers at x.
template <class By, bool IN_PAIRS>
static INLINE void add_lanes(const typename By::Prepared* x, const Ints* w, Floats* sums) {
#ifdef __AVX512BF16__
    if constexpr (std::is_same_v<By, ByPairs>) {
        int32_t pair;
        memcpy(&pair, x, sizeof pair);
        const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
        UNROLL for (int half = 0; half < 2; half++)
            sums[half] = (Floats)_mm512_dpbf16_ps((__m512)sums[half], both, (__m512bh)w[half]);
        return;
    }
#endif
    if constexpr (!std::is_same_v<typename By::Prepared, BFloat16>) {
        const Floats number = x[0] - Floats{};
        UNROLL for (int half = 0; half < 2; half++) sums[half] += number * (IN_PAIRS ? low(w[half]) : (Floats)w[half]);
        if constexpr (IN_PAIRS) {
            const Floats second = x[L] - Floats{};
            UNROLL for (int half = 0; half < 2; half++) sums[half] += second * high(w[half]);
        }
    }
}

// Multiply M rows with a panel of inputs from..to-1, and store what becomes of the outputs first..first+count-1.
template <class By, bool IN_PAIRS, int M>
static void multiply_panel(const typename By::Prepared* x, const Matrix<typename By::Number>& matrix, const Ints* panel,
                           long row, long first, long count, long inputs, long from, long to, Floats* kept) {
    typedef typename By::Number T;
    constexpr long STEP = IN_PAIRS ? 2 * L : L;
    constexpr long NEXT = sizeof(typename By::Prepared) == 2 ? 2 : 1;  // numbers of a row from lane to lane
    Floats sums[M][2] = {};
    if (from > 0) memcpy(sums, kept, sizeof sums);
    for (long i = from; i < to; i += STEP)
        for (int j = 0; j < L; j++, panel += 2)
            UNROLL for (int m = 0; m < M; m++)
                add_lanes<By, IN_PAIRS>(x + m * inputs + i + j * NEXT, panel, sums[m]);
    if (to < inputs) {
        memcpy(kept, sums, sizeof sums);
        return;
    }
    Floats bias[2] = {};
    for (long i = 0; i < count && matrix.bias && matrix.format != BYTES; i++)
        bias[i / L][i % L] = number(matrix.bias[first + i]);
    UNROLL for (int m = 0; m < M; m++) {
        T numbers[2 * L];
        UNROLL for (int half = 0; half < 2; half++) store(sums[m][half] + bias[half], numbers + half * L);
        memcpy(matrix.out + (row + m) * matrix.outputs + first, numbers, count * sizeof(T));
    }
}

template <class By, bool IN_PAIRS, int M = PANEL_ROWS, class... Rest>
static INLINE void multiply_panel_of(long rows, Rest... rest) {
    if constexpr (M > 0) {
        if (rows == M)
            multiply_panel<By, IN_PAIRS, M>(rest...);
        else
            multiply_panel_of<By, IN_PAIRS, M - 1>(rows, rest...);
    }
}

// GEMM of all rows with outputs begin..end-1. room: of `bytes_of_panel`, aligned to 64 bytes.
template <class By, class Weight>
static void multiply_by_panels(const typename By::Prepared* x, long rows, const Matrix<typename By::Number>& matrix,
                               long inputs, long begin, long end, void* room) {
    constexpr bool PAIRS = IN_PAIRS<By, Weight>;
    constexpr long DEPTH = PANEL_DEPTH * (PAIRS ? 2 : 1);  // inputs of a panel
    Ints* const panel = (Ints*)room;
    Floats* const sums = (Floats*)(panel + 2 * PANEL_DEPTH);
    const long tiles = (rows + PANEL_ROWS - 1) / PANEL_ROWS, rows_of_tile = (rows + tiles - 1) / tiles;
    for (long first = begin; first < end; first += 2 * L)
        for (long from = 0; from < inputs; from += DEPTH) {
            const long to = std::min(from + DEPTH, inputs), count = std::min(end - first, 2L * L);
            pack_panel<By, Weight>(matrix, first, end, inputs, from, to, panel);
            for (long row = 0; row < rows; row += rows_of_tile)
                multiply_panel_of<By, PAIRS>(std::min(rows_of_tile, rows - row), x + row * inputs, matrix, panel, row,
                                             first, count, inputs, from, to, sums + 2 * row);
        }
}

}  // namespace gemm
