// The k largest logits of a row and their probabilities at a temperature, in one pass over the row: a softmax whose sum
// follows the largest logit so far (Milakov & Gimelshein 2018, "Online normalizer calculation for softmax").

#pragma once

#include <algorithm>

#include "top_k.h"

namespace top_k {

constexpr float LOG2_E = 1.44269504f;
constexpr float LEAST = -32;  // smaller powers of 2 are ignored: 49,152 of them add up to 1e-5 at most
constexpr long PIECE = 4 * BLOCK * L;  // numbers of a row that are read twice while L1 holds them

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

struct TopKSoftmax {
    TopK top;
    const float scale;
    float whole = 0;  // the sum of all numbers, which is NaN or infinite if one of them is
    float sum = 0;    // of 2 to the power of (x - the largest number) * scale

    TopKSoftmax(long count, float temperature) : top(count), scale(LOG2_E / temperature) {}

    // Add n numbers, the first of which is at `place`. Add pieces in their order.
    template <class T>
    void add(const T* x, long n, long place) {
        for (long i = 0; i < n; i += PIECE) add_piece(x + i, std::min(n - i, PIECE), place + i);
    }

    // Add the result of a later piece of the same row.
    void add(const TopKSoftmax& other) {
        const float before = top.numbers[0];
        for (long i = 0; i < other.top.count; i++) top.offer(other.top.numbers[i], other.top.places[i]);
        whole += other.whole;
        sum = rescaled(sum, before) + rescaled(other.sum, other.top.numbers[0]);
    }

    // If the row has overflowed, all probabilities are 0.
    void put(float* probabilities, long* tokens) const {
        for (long j = 0; j < top.count; j++) {
            const float p = std::exp2((top.numbers[j] - top.numbers[0]) * scale) / sum;
            probabilities[j] = whole < INFINITY && p == p ? p : 0.0f;
            tokens[j] = top.places[j];
        }
    }

private:
    // Convert a sum relative to an earlier largest number to one relative to the present largest.
    float rescaled(float earlier, float before) const {
        return before == top.numbers[0] ? earlier : earlier * std::exp2((before - top.numbers[0]) * scale);
    }

    template <class T>
    void add_piece(const T* x, long n, long place) {
        Floats tops[PIECE / (BLOCK * L)];
        const float before = top.numbers[0];
        whole += top.offer_row(x, n, place, tops);
        const float largest = top.numbers[0];
        if (largest == -INFINITY) return;
        Floats sums = {};
        long i = 0;
        for (; i + BLOCK * L <= n; i += BLOCK * L)
            if (any((tops[i / (BLOCK * L)] - largest) * scale > LEAST))
                for (long j = i; j < i + BLOCK * L; j += L) {
                    const Floats power = (load(x + j) - largest) * scale;
                    sums += power_of_2(power > LEAST ? power : Floats{} + LEAST);
                }
        sum = rescaled(sum, before);
        for (int l = 0; l < L; l++) sum += sums[l];
        for (; i < n; i++) sum += std::exp2((number(x[i]) - largest) * scale);
    }
};

}  // namespace top_k
