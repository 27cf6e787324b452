// A matrix of weights in any format, and where the results of its GEMM go.

#pragma once

#include <algorithm>
#include <utility>

#include "gguf.h"
#include "indexed.h"

namespace gemm {

// The formats of weights, in the order of `Format` in products.py.
enum Format : long {
    FLOATS, BYTES, GROUPED, CODES, INDEXED,
    Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, MXFP4
};

// Whether weights have a scale for each group of inputs.
template <class Weight>
constexpr bool IS_GROUPED = std::is_same_v<Weight, Grouped> || std::is_same_v<Weight, Codes>;
template <class Weight>
constexpr bool IS_INDEXED = std::is_same_v<Weight, Indexed>;

template <class Weight>
static INLINE long bytes_of_row(long inputs) {
    if (IS_INDEXED<Weight>) return Indexed::bytes(inputs);
    if constexpr (gguf::IS_BLOCK<Weight>) return inputs * Weight::BYTES / Weight::SIZE;
    return std::is_same_v<Weight, Codes> ? inputs / 2 : inputs * sizeof(Weight);
}

// Call f with an object of the type for weights of this format.
template <class T, class F>
static INLINE auto by_weight(Format format, F f) {
    switch (format) {
        case BYTES: return f(int8_t());
        case GROUPED: return f(Grouped());
        case CODES: return f(Codes());
        case INDEXED: return f(Indexed());
        case Q4_0: return f(gguf::Q4_0());
        case Q4_1: return f(gguf::Q4_1());
        case Q5_0: return f(gguf::Q5_0());
        case Q5_1: return f(gguf::Q5_1());
        case Q8_0: return f(gguf::Q8_0());
        case Q2_K: return f(gguf::Q2_K());
        case Q3_K: return f(gguf::Q3_K());
        case Q4_K: return f(gguf::Q4_K());
        case Q5_K: return f(gguf::Q5_K());
        case Q6_K: return f(gguf::Q6_K());
        case IQ4_NL: return f(gguf::IQ4_NL());
        case IQ4_XS: return f(gguf::IQ4_XS());
        case MXFP4: return f(gguf::MXFP4());
        case FLOATS: break;
    }
    return f(T());
}

template <class T>
struct Matrix {
    const void* weights;         // [outputs] rows of the format
    const T* scales;             // [outputs], or null: factors of the sums
    const float* group_scales;   // [outputs][inputs / group], or null: factors of the weights
    const float* group_offsets;  // [outputs][inputs / group], or null: added to the scaled weights
    const T* bias;               // [outputs], or null
    T* out;                      // [rows][outputs]
    long outputs;
    long group;      // inputs with one scale: all, if there are no group_scales
    const T* whole;  // [outputs][inputs]: the original matrix if the weights are indexed, otherwise null
    Format format;

    template <class Weight>
    const Weight* row(long output, long inputs) const {
        return (const Weight*)((const char*)weights + output * bytes_of_row<Weight>(inputs));
    }

    // The weights of an output, of any type.
    const void* at(long output, long inputs) const {
        return by_weight<T>(format, [=](auto weight) -> const void* { return row<decltype(weight)>(output, inputs); });
    }

    // The matrix of outputs first..first+count-1 only, with another output.
    Matrix part(long first, long count, long inputs, T* to) const {
        return {at(first, inputs), scales ? scales + first : nullptr, of_groups(group_scales, first, inputs),
                of_groups(group_offsets, first, inputs), bias ? bias + first : nullptr, to, count, group,
                whole ? whole + first * inputs : nullptr, format};
    }

    // The scales or offsets from an output on.
    const float* of_groups(const float* all, long output, long inputs) const {
        return all ? all + output * (inputs / group) : nullptr;
    }

    // Store outputs first..first+O-1 of M rows from sums[m][o], an array of 32 numbers.
    template <int M, int O>
    INLINE void put(float* sums, long row, long first) const {
        T numbers[32];
        if (bias && format != BYTES)
            UNROLL for (int i = 0; i < M * O; i++) sums[i] += number(bias[first + i % O]);
        UNROLL for (int i = 0; i < M * O; i += 16) store(*(const Unaligned<Lanes<16>::Floats>*)(sums + i), numbers + i);
        UNROLL for (int m = 0; m < M; m++) memcpy(out + (row + m) * outputs + first, numbers + m * O, O * sizeof(T));
    }

    // Multiply stored sums by the scales, and add the bias. Rounds twice, as torchao does.
    void scale(long row, long rows, long begin, long end) const {
        for (; rows > 0; rows--, row++) {
            T* to = out + row * outputs;
            for (long i = begin; i < end; i++) store(number(to[i]) * number(scales[i]), to + i);
            if (bias)
                for (long i = begin; i < end; i++) store(number(to[i]) + number(bias[i]), to + i);
        }
    }
};

}  // namespace gemm
