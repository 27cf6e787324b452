// The largest numbers of a row, and their places.

#pragma once

#include <algorithm>
#include <cmath>

#include "vectors.h"

namespace top_k {

constexpr int L = WIDTH, BLOCK = 8, MAX_COUNT = 256;
typedef Lanes<L>::Floats Floats;
typedef Lanes<L>::Ints Ints;

static inline bool any(Ints lanes) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)lanes, (__m512i)lanes);
#elif defined(__AVX2__)
    return !_mm256_testz_si256((__m256i)lanes, (__m256i)lanes);
#else
    typedef int64_t Pairs __attribute__((vector_size(sizeof lanes)));
    const Pairs pairs = (Pairs)lanes;
    int64_t found = 0;
    for (int l = 0; l < L / 2; l++) found |= pairs[l];
    return found;
#endif
}

// The largest numbers so far, in descending order, and their places. Among equal numbers, the first counts.
struct TopK {
    float numbers[MAX_COUNT];
    long places[MAX_COUNT];
    const long count;

    explicit TopK(long wanted) : count(std::min(wanted, (long)MAX_COUNT)) {
        for (long i = 0; i < count; i++) numbers[i] = -INFINITY, places[i] = i;
    }

    void offer(float x, long place) {
        long i = count;
        if (!(x > numbers[count - 1])) return;
        for (i--; i > 0 && x > numbers[i - 1]; i--) numbers[i] = numbers[i - 1], places[i] = places[i - 1];
        numbers[i] = x, places[i] = place;
    }

    // Add n numbers of a row, the first of which is at `place`. tops: room for the largest numbers of each block in
    // each lane; or null. Returns the sum of all n, which is NaN or infinite if one of them is.
    template <class T>
    float offer_row(const T* x, long n, long place = 0, Floats* tops = nullptr) {
        Floats sums = {};
        long i = 0;
        for (; i + BLOCK * L <= n; i += BLOCK * L) {
            Floats top = load(x + i), sum = top;
            for (long b = 1; b < BLOCK; b++) {
                const Floats some = load(x + i + b * L);
                top = some > top ? some : top;
                sum += some;
            }
            sums += sum;
            if (tops) *tops++ = top;
            if (any(top > numbers[count - 1]))  // true for few blocks, so one test is faster than one for each vector
                for (long j = i; j < i + BLOCK * L; j += L)
                    if (any(load(x + j) > numbers[count - 1]))
                        for (int l = 0; l < L; l++) offer(number(x[j + l]), place + j + l);
        }
        float sum = 0;
        for (int l = 0; l < L; l++) sum += sums[l];
        for (; i < n; i++) offer(number(x[i]), place + i), sum += number(x[i]);
        return sum;
    }
};

}  // namespace top_k
