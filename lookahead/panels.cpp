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

template <class T>
struct Of;

template <>
struct Of<float> {
    typedef float Factor;
    typedef Floats Factors;
};

template <>
struct Of<BFloat16> {
    typedef Pair Factor;
    typedef Lanes<L>::Ints Factors;
};

// The sums of M rows, `row` apart, with a panel of n factors.
template <class T, int M>
static inline void multiply_tile(const typename Of<T>::Factor* x, long row, const typename Of<T>::Factors* panel,
                                 long n, Floats (*to)[W]) {
    Floats sums[M][W];
    for (int i = 0; i < M; i++)
        for (int w = 0; w < W; w++) sums[i][w] = to[i][w];
    for (long j = 0; j < n; j++)
        for (int i = 0; i < M; i++)
            for (int w = 0; w < W; w++) sums[i][w] = multiply_add(x[i * row + j], panel[j * W + w], sums[i][w]);
    for (int i = 0; i < M; i++)
        for (int w = 0; w < W; w++) to[i][w] = sums[i][w];
}

template <class T, int M = TILE>
static inline void multiply_rows(int rows, const typename Of<T>::Factor* x, long row,
                                 const typename Of<T>::Factors* panel, long n, Floats (*to)[W]) {
    if constexpr (M > 0) {
        if (rows == M)
            multiply_tile<T, M>(x, row, panel, n, to);
        else
            multiply_rows<T, M - 1>(rows, x, row, panel, n, to);
    }
}

// x [rows][inputs], panels [outputs / 32, rounded up][inputs / TOGETHER][32][TOGETHER], TOGETHER being 2 in bf16 and 1
// in float32; bias [outputs], or none; out [rows][outputs].
template <class T>
static void multiply(const T* x, const T* panels, const T* bias, T* out, long rows, long inputs, long outputs,
                     long threads) {
    typedef typename Of<T>::Factor Factor;
    typedef typename Of<T>::Factors Factors;
    const long n = inputs * sizeof(T) / sizeof(Factor);
#pragma omp parallel for num_threads(threads)
    for (long first = 0; first < outputs; first += OUTPUTS) {
        const Factors* panel = (const Factors*)(panels + first * inputs);
        const int valid = std::min<long>(OUTPUTS, outputs - first);
        Floats start[W] = {};
        if (bias)
            for (int o = 0; o < valid; o++) start[o / L][o % L] = number(bias[first + o]);
        for (long begin = 0; begin < rows; begin += TILE) {
            const int some = std::min<long>(TILE, rows - begin);
            Floats sums[TILE][W];
            for (int i = 0; i < some; i++) std::copy(start, start + W, sums[i]);
            multiply_rows<T>(some, (const Factor*)(x + begin * inputs), n, panel, n, sums);
            for (int i = 0; i < some; i++) {
                T* to = out + (begin + i) * outputs + first;
                if (valid == OUTPUTS)
                    for (int w = 0; w < W; w++) store(sums[i][w], to + w * L);
                else
                    for (int o = 0; o < valid; o++) store(sums[i][o / L][o % L], to + o);
            }
        }
    }
}

#define FOR(NAME, T)                                                                                 \
    extern "C" void NAME(const T* x, const T* panels, const T* bias, T* out, long rows, long inputs, \
                         long outputs, long threads) {                                               \
        multiply(x, panels, bias, out, rows, inputs, outputs, threads);                              \
    }

FOR(multiply_float32, float)
#ifdef __AVX512BF16__
FOR(multiply_bfloat16, BFloat16)
#endif
