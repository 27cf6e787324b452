// Product of rows with a matrix that lies in panels of 32 outputs, as in the inner kernel of Goto & van de Geijn 2008,
// "Anatomy of high-performance matrix multiplication".
//
// Input by input (of bf16, two by two), a panel holds the weights of its outputs: two vectors, which are multiplied
// with one number of each of up to TILE rows, whose sums stay in registers. So for few rows all weights are read once,
// in order, as fast as memory gives them.

#include <algorithm>

#include "vectors.h"

constexpr int TILE = 12, L = 16, W = 2, OUTPUTS = L * W;
typedef Lanes<L>::Floats Floats;

// The sums of some rows, n factors apart, with a panel of n factors.
template <class By, int M = TILE>
static inline void multiply_rows(int rows, const typename By::Factor* x, const typename By::template Factors<L>* panel,
                                 long n, Floats* sums) {
    if constexpr (M > 0) {
        if (rows == M)
            multiply_tile<By, W, M>(sums, x, n, 1, panel, n);
        else
            multiply_rows<By, M - 1>(rows, x, panel, n, sums);
    }
}

// x [rows][inputs], panels [outputs / 32, rounded up][inputs / TOGETHER][32][TOGETHER], TOGETHER being 2 in bf16 and 1
// in float32; bias [outputs], or none; out [rows][outputs].
template <class By, class T>
static void multiply(const T* x, const T* panels, const T* bias, T* out, long rows, long inputs, long outputs,
                     long threads) {
    typedef typename By::template Factors<L> Factors;
    const long n = inputs / By::TOGETHER;
#pragma omp parallel for num_threads(threads)
    for (long first = 0; first < outputs; first += OUTPUTS) {
        const Factors* panel = (const Factors*)(panels + first * inputs);
        const int valid = std::min<long>(OUTPUTS, outputs - first);
        Floats start[W] = {};
        if (bias)
            for (int o = 0; o < valid; o++) start[o / L][o % L] = number(bias[first + o]);
        for (long begin = 0; begin < rows; begin += TILE) {
            const int some = std::min<long>(TILE, rows - begin);
            Floats sums[TILE * W];
            for (int i = 0; i < some; i++) std::copy(start, start + W, sums + i * W);
            multiply_rows<By>(some, (const typename By::Factor*)(x + begin * inputs), panel, n, sums);
            for (int i = 0; i < some; i++) {
                T* to = out + (begin + i) * outputs + first;
                if (valid == OUTPUTS)
                    for (int w = 0; w < W; w++) store(sums[i * W + w], to + w * L);
                else
                    for (int o = 0; o < valid; o++) store(sums[i * W + o / L][o % L], to + o);
            }
        }
    }
}

#define FOR(NAME, T, BY)                                                                             \
    extern "C" void NAME(const T* x, const T* panels, const T* bias, T* out, long rows, long inputs, \
                         long outputs, long threads) {                                               \
        multiply<BY>(x, panels, bias, out, rows, inputs, outputs, threads);                          \
    }

FOR(multiply_float32, float, Singles)
#ifdef __AVX512BF16__
FOR(multiply_bfloat16, BFloat16, Pairs)
#endif
