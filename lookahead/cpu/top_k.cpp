// The top-k tokens of rows of logits, and their probabilities at a temperature.

#include "top_k_softmax.h"

using namespace top_k;

// logits [rows][vocabulary]. probabilities, tokens [rows][count]; count is at most MAX_COUNT and the vocabulary.
template <class T>
static void find_all(const T* logits, long rows, long vocabulary, long count, float* probabilities, long* tokens,
                     long threads, float temperature) {
#pragma omp parallel for num_threads(threads)
    for (long row = 0; row < rows; row++) {
        TopKSoftmax found(count, temperature);
        found.add(logits + row * vocabulary, vocabulary, 0);
        found.put(probabilities + row * count, tokens + row * count);
    }
}

#define FOR(NAME, T)                                                                                            \
    extern "C" void top_k_##NAME(const T* logits, long rows, long vocabulary, long count, float* probabilities, \
                                 long* tokens, long threads, float temperature) {                               \
        find_all(logits, rows, vocabulary, count, probabilities, tokens, threads, temperature);                 \
    }

FOR(float32, float)
FOR(bfloat16, BFloat16)
