// The likeliest tokens of rows of logits, and their probabilities at a temperature.

#include <algorithm>
#include <cmath>

#include "vectors.h"

constexpr int L = 16, MAX_COUNT = 32;
typedef Lanes<L>::Floats Floats;
typedef Lanes<L>::Ints Ints;

static inline Floats load(const float* x) {
    Floats some;
    memcpy(&some, x, sizeof some);
    return some;
}

static inline Floats load(const BFloat16* x) { return (Floats)(bits(x) << 16); }

// The largest numbers so far, in descending order, and their places. Of equal ones, the first.
struct Largest {
    float numbers[MAX_COUNT];
    long places[MAX_COUNT];
    const long count;

    explicit Largest(long count) : count(count) {
        for (long i = 0; i < count; i++) numbers[i] = -INFINITY, places[i] = i;
    }

    void offer(float x, long place) {
        long i = count;
        if (!(x > numbers[count - 1])) return;
        for (i--; i > 0 && x > numbers[i - 1]; i--) numbers[i] = numbers[i - 1], places[i] = places[i - 1];
        numbers[i] = x, places[i] = place;
    }
};

template <class T>
static void find(const T* x, long n, float temperature, Largest& largest, float* probabilities, long* tokens) {
    long i = 0;
    for (; i + L <= n; i += L) {
        const Floats some = load(x + i);
        const Ints above = some > Floats{} + largest.numbers[largest.count - 1];
        typedef int64_t Halves __attribute__((vector_size(sizeof above)));
        const Halves halves = (Halves)above;
        int64_t any = 0;
        for (int l = 0; l < L / 2; l++) any |= halves[l];
        if (any)
            for (int l = 0; l < L; l++) largest.offer(some[l], i + l);
    }
    for (; i < n; i++) largest.offer(number(x[i]), i);
    const float scale = 1 / temperature, top = largest.numbers[0];
    Floats sums = {};
    for (i = 0; i + L <= n; i += L) sums += exponential<L>((load(x + i) - top) * scale);
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
