// The likeliest tokens of rows of logits, and their probabilities at a temperature.

#include "largest.h"

template <class T>
static void find(const T* x, long n, float temperature, Largest& largest, float* probabilities, long* tokens) {
    largest.offer_row(x, n);
    const float scale = 1 / temperature, top = largest.numbers[0];
    Floats sums = {};
    long i = 0;
    for (; i + L <= n; i += L) sums += exponential<L>((load(x + i) - top) * scale);
    float sum = 0;
    for (int l = 0; l < L; l++) sum += sums[l];
    for (; i < n; i++) sum += std::exp((number(x[i]) - top) * scale);
    for (long j = 0; j < largest.count; j++) {
        const float p = std::exp((largest.numbers[j] - top) * scale) / sum;
        probabilities[j] = p == p ? p : 0.0f;  // a row that has overflowed counts for nothing
        tokens[j] = largest.places[j];
    }
}

// logits [rows][vocabulary]. probabilities, tokens [rows][count]; count is at most MAX_COUNT and the vocabulary.
#define FOR(NAME, T)                                                                                              \
    extern "C" void likeliest_##NAME(const T* logits, long rows, long vocabulary, long count, float* probabilities, \
                                     long* tokens, long threads, float temperature) {                              \
        _Pragma("omp parallel for num_threads(threads)") for (long row = 0; row < rows; row++) {                   \
            Largest largest(count);                                                                                \
            find(logits + row * vocabulary, vocabulary, temperature, largest, probabilities + row * count,         \
                 tokens + row * count);                                                                            \
        }                                                                                                          \
    }

FOR(float32, float)
FOR(bfloat16, BFloat16)
