// The likeliest tokens of rows of logits, and their probabilities at a temperature.

#include <cstdlib>

#include "largest.h"

constexpr float LOG2_E = 1.44269504f;
constexpr float LEAST = -32;  // 2 to the power of less counts for nothing: 49,152 such weights are 1e-5 at most

// 2 to the power of x, to 3e-6, for x in -126 .. 0.
static inline Floats power_of_2(Floats x) {
    const Floats shifted = x + 0x1.8p23f;  // its lowest bits are the nearest integer
    const Floats r = x - (shifted - 0x1.8p23f);
    Floats y = r * 9.58285294e-3f + 5.59064262e-2f;  // minimax
    y = y * r + 2.40240991e-1f;
    y = y * r + 6.93124175e-1f;
    y = y * r + 1.0f;
    return (Floats)((Ints)y + ((Ints)shifted << 23));
}

// tops: room for the highest numbers of each block.
template <class T>
static void find(const T* x, long n, float temperature, Largest& largest, Floats* tops, float* probabilities,
                 long* tokens) {
    const float whole = largest.offer_row(x, n, tops), top = largest.numbers[0], scale = LOG2_E / temperature;
    Floats sums = {};
    long i = 0;
    for (; i + BLOCK * L <= n; i += BLOCK * L)
        if (any((*tops++ - top) * scale > LEAST))
            for (long j = i; j < i + BLOCK * L; j += L) {
                const Floats power = (load(x + j) - top) * scale;
                sums += power_of_2(power > LEAST ? power : Floats{} + LEAST);
            }
    float sum = 0;
    for (int l = 0; l < L; l++) sum += sums[l];
    for (; i < n; i++) sum += std::exp2((number(x[i]) - top) * scale);
    for (long j = 0; j < largest.count; j++) {
        const float p = std::exp2((largest.numbers[j] - top) * scale) / sum;
        probabilities[j] = whole < INFINITY && p == p ? p : 0.0f;  // a row that has overflowed counts for nothing
        tokens[j] = largest.places[j];
    }
}

// logits [rows][vocabulary]. probabilities, tokens [rows][count]; count is at most MAX_COUNT and the vocabulary.
template <class T>
static void find_all(const T* logits, long rows, long vocabulary, long count, float* probabilities, long* tokens,
                     long threads, float temperature) {
    const long bytes = (vocabulary / (BLOCK * L) + 1) * sizeof(Floats);  // no vector: kernels in a wheel need C alone
#pragma omp parallel num_threads(threads)
    {
        Floats* const tops = (Floats*)aligned_alloc(sizeof(Floats), bytes);
#pragma omp for
        for (long row = 0; row < rows; row++) {
            Largest largest(count);
            find(logits + row * vocabulary, vocabulary, temperature, largest, tops, probabilities + row * count,
                 tokens + row * count);
        }
        free(tops);
    }
}

#define FOR(NAME, T)                                                                                                \
    extern "C" void likeliest_##NAME(const T* logits, long rows, long vocabulary, long count, float* probabilities, \
                                     long* tokens, long threads, float temperature) {                               \
        find_all(logits, rows, vocabulary, count, probabilities, tokens, threads, temperature);                     \
    }

FOR(float32, float)
FOR(bfloat16, BFloat16)
