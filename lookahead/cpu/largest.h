// The largest numbers of a row, and the places where they stand.

#pragma once

#include <cmath>

#include "vectors.h"

constexpr int L = WIDTH, BLOCK = 8, MAX_COUNT = 256;
typedef Lanes<L>::Floats Floats;
typedef Lanes<L>::Ints Ints;

static inline bool any(Ints lanes) {
    typedef int64_t Pairs __attribute__((vector_size(sizeof lanes)));
    const Pairs pairs = (Pairs)lanes;
    int64_t found = 0;
    for (int l = 0; l < L / 2; l++) found |= pairs[l];
    return found;
}

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

    template <class T>
    void offer_row(const T* x, long n) {
        long i = 0;
        for (; i + BLOCK * L <= n; i += BLOCK * L) {  // few blocks have one: to look at each vector takes longer
            Ints found = {};
            for (long b = 0; b < BLOCK; b++) found |= load(x + i + b * L) > numbers[count - 1];
            if (any(found))
                for (long j = i; j < i + BLOCK * L; j += L)
                    if (any(load(x + j) > numbers[count - 1]))
                        for (int l = 0; l < L; l++) offer(number(x[j + l]), j + l);
        }
        for (; i < n; i++) offer(number(x[i]), i);
    }
};
