// Products of a few rows with weights in torch's own order: one row of weights for each output.
//
// A tile of M rows of the input by O outputs keeps a vector of partial sums for each pair of row and output. It runs
// along the inputs, and adds up the lanes of each vector at the end. So each weight is read once, in memory order, for
// up to TILE rows of the input, and no weights are reordered. If the rows of a tile are too long for the processor's
// first cache, the tile goes along a part of the inputs for some outputs, then along the next part: its vectors wait in
// memory. So a sum is the same to the last bit, however many rows are multiplied. Weights may be of the input's type;
// bytes with a scale for each output or for each group of inputs; or codes of 4 bits with a scale and an offset for each
// group. Those are read as they are and converted on the way.

#pragma once

#include <algorithm>
#include <type_traits>
#include <utility>

#include "vectors.h"

namespace products {

#ifdef __AVX512F__
constexpr int L = 16, REGISTERS = 32, TILE = 12;
#else
constexpr int L = 8, REGISTERS = 16, TILE = 6;
#endif
constexpr int MAX_OUTPUTS = 4;      // outputs of a tile, at most
constexpr long AHEAD = 12 * 1024;   // bytes between a weight and the one that is prefetched with it
constexpr long NEAR = 27 * 1024;    // bytes of a tile's input that stay in the first cache, beside weights and sums
constexpr long WAITING = 24;        // outputs whose vectors wait in memory, at most
typedef Lanes<L>::Floats Floats;
typedef Lanes<L>::Ints Ints;

template <class T>
using Unaligned __attribute__((aligned(1), may_alias)) = T;

// A byte that is multiplied by the scale of its group of inputs.
struct Grouped {
    int8_t byte;
};

// Two codes of 4 bits. The weight is code * scale + offset.
struct Codes {
    uint8_t two;
};

template <class Weight>
constexpr unsigned long PACKED = std::is_same_v<Weight, Codes> ? 2 : 1;  // weights in a Weight

#define UNROLL _Pragma("GCC unroll 64")
#define INLINE inline __attribute__((always_inline))

// L bytes as integers. GCC's own conversion takes them one by one.
static INLINE Ints widened(const int8_t* x) {
#if defined(__AVX512F__)
    return (Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)x));
#elif defined(__AVX2__)
    return (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)x));
#else
    return __builtin_convertvector(*(const Unaligned<Lanes<L>::Bytes>*)x, Ints);
#endif
}

// L codes are the bits of a word that is in all lanes: each lane shifts its own code down. Other bits stay above it.
#ifdef __AVX512F__
typedef uint64_t Word;
static const Ints SHIFTS = {0, 0, 4, 4, 8, 8, 12, 12, 16, 16, 20, 20, 24, 24, 28, 28};
#else
typedef uint32_t Word;
static const Ints SHIFTS = {0, 4, 8, 12, 16, 20, 24, 28};
#endif
typedef Word Words __attribute__((vector_size(4 * L)));

static INLINE void pack(Ints codes, Codes* to) {
    const Words shifted = (Words)(codes << SHIFTS);
    Word all = 0;
    UNROLL for (int i = 0; i < 8; i++) all |= shifted[i];
    memcpy(to, &all, sizeof all);
}

static INLINE Ints codes(const Codes* x) {
    Word all;
    memcpy(&all, x, sizeof all);
    return (Ints)(Words{} + all) >> SHIFTS;
}

// The weights of L codes, rounded once if the processor can, else twice: then a scale must have few digits. AVX-512 looks
// them up in a table of the weights of all codes.
#ifdef __AVX512F__
static INLINE Floats table_of(float scale, float offset) {
    const __m512 numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return (Floats)_mm512_fmadd_ps(numbers, _mm512_set1_ps(scale), _mm512_set1_ps(offset));
}
static INLINE Floats looked_up(const Codes* x, Floats table) {
    return (Floats)_mm512_permutexvar_ps((__m512i)codes(x), (__m512)table);
}
static INLINE Floats weights(const Codes* x, float scale, float offset) { return looked_up(x, table_of(scale, offset)); }
#else
static INLINE Floats weights(const Codes* x, float scale, float offset) {
    const Floats numbers = __builtin_convertvector(codes(x) & 15, Floats);
#ifdef __AVX2__
    return (Floats)_mm256_fmadd_ps((__m256)numbers, _mm256_set1_ps(scale), _mm256_set1_ps(offset));
#else
    return numbers * scale + offset;
#endif
}
#endif

// How numbers of a type are multiplied: STRIDE numbers at a time, loaded as Factors. Prepared is the type of the input
// after `prepare`, if the kernel does not take it as it is. A byte is exactly a number of either type; times a scale,
// it is rounded to one.
struct ByFloats {
    typedef float Number;
    typedef float Prepared;
    typedef Floats Factors;
    static constexpr int STRIDE = L;
    static INLINE Floats factors(const float* x) { return *(const Unaligned<Floats>*)x; }
    static INLINE Floats factors(const int8_t* x) { return __builtin_convertvector(widened(x), Floats); }
    static INLINE Floats factors(const Grouped* x, float scale) { return factors(&x->byte) * scale; }
    static INLINE Floats factors(const Codes* x, float scale, float offset) { return weights(x, scale, offset); }
    static INLINE void pack(const int8_t* codes, Codes* to) { products::pack(widened(codes), to); }
    static INLINE void add(Floats& sum, const float* x, Floats w) { sum += factors(x) * w; }
};

#ifdef __AVX512BF16__
struct ByPairs {
    typedef BFloat16 Number;
    typedef BFloat16 Prepared;
    typedef Ints Factors;
    static constexpr int STRIDE = 2 * L;
    static INLINE Ints factors(const BFloat16* x) { return *(const Unaligned<Ints>*)x; }
    template <class Byte, class... Scale>
    static INLINE Ints factors(const Byte* x, Scale... scale) {
        const Floats low = ByFloats::factors(x, scale...), high = ByFloats::factors(x + L / PACKED<Byte>, scale...);
        return (Ints)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
    }
    static INLINE void pack(const int8_t* codes, Codes* to) {
        ByFloats::pack(codes, to);
        ByFloats::pack(codes + L, to + L / 2);
    }
    static INLINE void add(Floats& sum, const BFloat16* x, Ints w) {
        sum = (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)factors(x), (__m512bh)w);
    }
};
#else
// A lane holds two bf16 numbers. Each is a float once the bits of the other are cleared. The input is split beforehand:
// of each STRIDE numbers, first those at even places, then those at odd places.
struct ByPairs {
    typedef BFloat16 Number;
    typedef float Prepared;
    typedef Ints Factors;
    static constexpr int STRIDE = 2 * L;
    static INLINE Floats low(Ints pairs) { return (Floats)(pairs << 16); }
    static INLINE Floats high(Ints pairs) { return (Floats)(pairs & ~0xffff); }
    static INLINE void prepare(const BFloat16* x, float* to) {
        *(Unaligned<Floats>*)to = low(factors(x));
        *(Unaligned<Floats>*)(to + L) = high(factors(x));
    }
    static INLINE Ints factors(const BFloat16* x) { return *(const Unaligned<Ints>*)x; }
    static INLINE Floats even(Ints pairs) { return __builtin_convertvector(pairs << 24 >> 24, Floats); }
    static INLINE Floats odd(Ints pairs) { return __builtin_convertvector(pairs >> 8, Floats); }
    static INLINE Ints pairs(const int8_t* x) {
        return __builtin_convertvector(*(const Unaligned<Lanes<L>::Shorts>*)x, Ints);
    }
    static INLINE Ints factors(const int8_t* x) {
        return ((Ints)even(pairs(x)) >> 16 & 0xffff) | (Ints)odd(pairs(x));
    }
    static INLINE Ints factors(const Grouped* x, float scale) {
        const Ints some = pairs(&x->byte);
        return rounded<Ints>(even(some) * scale) | rounded<Ints>(odd(some) * scale) << 16;
    }
    static INLINE Ints factors(const Codes* x, float scale, float offset) {  // first those at even places
#ifdef __AVX512F__
        const Floats table = (Floats)(rounded<Ints>(table_of(scale, offset)) << 16);
        return ((Ints)looked_up(x, table) >> 16 & 0xffff) | (Ints)looked_up(x + L / 2, table);
#else
        return rounded<Ints>(weights(x, scale, offset)) | rounded<Ints>(weights(x + L / 2, scale, offset)) << 16;
#endif
    }
    static INLINE void pack(const int8_t* codes, Codes* to) {
        const Ints some = pairs(codes);
        products::pack(some & 0xff, to);
        products::pack(some >> 8, to + L / 2);
    }
    static INLINE void add(Floats& sum, const float* x, Ints w) {
        sum += *(const Unaligned<Floats>*)x * low(w);
        sum += *(const Unaligned<Floats>*)(x + L) * high(w);
    }
};
#endif

// Join two vectors of partial sums. In a and in b, each block of STEP lanes holds partial sums of STEP vectors.
// Neighbouring blocks are added. A block of the result has 2 * STEP lanes: those of a, then those of b.
template <int STEP, int... I>
static INLINE Floats merged(Floats a, Floats b, std::integer_sequence<int, I...>) {
#define FIRST(I) (I / (2 * STEP) * 2 * STEP + I % STEP + (I / STEP % 2) * L)
#ifdef __clang__
    return __builtin_shufflevector(a, b, FIRST(I)...) + __builtin_shufflevector(a, b, (FIRST(I) + STEP)...);
#else
    return __builtin_shuffle(a, b, Ints{FIRST(I)...}) + __builtin_shuffle(a, b, Ints{(FIRST(I) + STEP)...});
#endif
}

// The sum of the lanes of each of the vectors BEGIN, BEGIN + 1, ..., COUNT - 1: one lane each, L at most, in order.
template <int COUNT, int BEGIN, int STEP = L / 2>
static INLINE Floats lanes_added(const Floats* v) {
    if constexpr (BEGIN >= COUNT)
        return Floats{};
    else if constexpr (STEP == 0)
        return v[BEGIN];
    else
        return merged<STEP>(lanes_added<COUNT, BEGIN, STEP / 2>(v), lanes_added<COUNT, BEGIN + STEP, STEP / 2>(v),
                            std::make_integer_sequence<int, L>());
}

// Whether weights have a scale for each group of inputs.
template <class Weight>
constexpr bool IS_GROUPED = std::is_same_v<Weight, Grouped> || std::is_same_v<Weight, Codes>;

// Add to partial[m][o] the products of row m of x with the weights of output o, from input `begin` to `end`. Rows of x
// and of weights are `inputs` numbers apart. scales, offsets: if the weights are grouped, one for each `group` inputs of
// each output; then begin and end are multiples of `group`.
template <class By, int M, int O, class Weight>
static INLINE void add_products(const typename By::Prepared* x, const Weight* weights, const float* scales,
                                const float* offsets, long group, long inputs, long begin, long end, Floats* partial) {
    const long size = IS_GROUPED<Weight> ? group : end - begin, groups = inputs / group, row = inputs / PACKED<Weight>;
    for (long g = begin / group; begin < end; begin += size, g++)
        for (long i = begin; i < begin + size; i += By::STRIDE) {
            typename By::Factors w[O];
            UNROLL for (int o = 0; o < O; o++) {
                const Weight* const at = weights + o * row + i / PACKED<Weight>;
                if constexpr (std::is_same_v<Weight, Codes>)
                    w[o] = By::factors(at, scales[o * groups + g], offsets[o * groups + g]);
                else if constexpr (std::is_same_v<Weight, Grouped>)
                    w[o] = By::factors(at, scales[o * groups + g]);
                else
                    w[o] = By::factors(at);
                __builtin_prefetch((const char*)at + AHEAD, 0, 1);
            }
            UNROLL for (int m = 0; m < M; m++)
                UNROLL for (int o = 0; o < O; o++) By::add(partial[m * O + o], x + m * inputs + i, w[o]);
        }
}

template <class T>
struct Matrix {
    const void* weights;         // [outputs][inputs]: of type T, int8_t if there are scales, Codes if there are offsets
    const T* scales;             // [outputs], or null: what the sum of each output is multiplied by
    const float* group_scales;   // [outputs][inputs / group], or null: what each weight is multiplied by
    const float* group_offsets;  // the same, or null: what is then added to each weight
    const T* bias;               // [outputs], or null
    T* out;                      // [rows][outputs]
    long outputs;
    long group;  // inputs with one scale: all, if there are no group_scales

    // Outputs first..first+count-1 alone, which go elsewhere.
    Matrix part(long first, long count, long inputs, T* to) const {
        const long bits = group_offsets ? 4 : scales || group_scales ? 8 : 8 * sizeof(T);
        return {(const char*)weights + first * inputs * bits / 8, scales ? scales + first : nullptr,
                of_groups(group_scales, first, inputs), of_groups(group_offsets, first, inputs),
                bias ? bias + first : nullptr, to, count, group};
    }

    // The scales or offsets from an output on.
    const float* of_groups(const float* all, long output, long inputs) const {
        return all ? all + output * (inputs / group) : nullptr;
    }

    // Store outputs first..first+O-1 of M rows from sums[m][o], an array of 32 numbers.
    template <int M, int O>
    INLINE void put(float* sums, long row, long first) const {
        T numbers[32];
        if (bias && !scales)
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

// Inputs in each part of the way along `inputs`, for tiles of M rows: whole groups.
template <class By, class Weight, int M>
static INLINE long inputs_of_part(long inputs, long group) {
    const long parts = (M * inputs * (long)sizeof(typename By::Prepared) + NEAR - 1) / NEAR;
    const long unit = IS_GROUPED<Weight> ? group : By::STRIDE;
    return ((inputs + parts - 1) / parts + unit - 1) / unit * unit;
}

// Compute outputs begin..end-1 of M rows.
template <class By, class Weight, int M, int O>
static INLINE void multiply_rows(const typename By::Prepared* x, const Matrix<typename By::Number>& matrix, long row,
                                 long inputs, long begin, long end) {
    constexpr int N = M * O;
    const long part = inputs_of_part<By, Weight, M>(inputs, matrix.group);
    const long outputs = part < inputs ? WAITING / O * O : O;  // that go along a part together
    Floats waiting[WAITING / O][N];
    long first = begin;
    while (first + O <= end) {
        const long last = std::min(first + outputs, end) - O;
        for (long from = 0; from < inputs; from += part) {
            const long to = std::min(from + part, inputs);
            for (long o = first; o <= last; o += O) {
                Floats partial[N] = {};
                Floats* const kept = waiting[(o - first) / O];
                if (from > 0) memcpy(partial, kept, sizeof partial);
                add_products<By, M, O>(x, (const Weight*)matrix.weights + o * inputs / PACKED<Weight>,
                                       matrix.of_groups(matrix.group_scales, o, inputs),
                                       matrix.of_groups(matrix.group_offsets, o, inputs), matrix.group, inputs, from,
                                       to, partial);
                if (to < inputs) {
                    memcpy(kept, partial, sizeof partial);
                    continue;
                }
                float sums[32];
                *(Unaligned<Floats>*)sums = lanes_added<N, 0>(partial);
                if constexpr (N > L) *(Unaligned<Floats>*)(sums + L) = lanes_added<N, L>(partial);
                matrix.template put<M, O>(sums, row, o);
            }
        }
        first += (last - first) / O * O + O;
    }
    if constexpr (O > 1)
        if (first < end) multiply_rows<By, Weight, M, 1>(x, matrix, row, inputs, first, end);
}

// The same for a number of rows that is known only at run time. A tile has as many outputs as the registers can hold.
template <class By, class Weight, int M = TILE>
static void multiply_some(int rows, const typename By::Prepared* x, const Matrix<typename By::Number>& matrix, long row,
                          long inputs, long begin, long end) {
    if constexpr (M > 0) {
        constexpr int fitting = (REGISTERS - 2) / (M + 1), O = fitting < MAX_OUTPUTS ? fitting : MAX_OUTPUTS;
        if (rows == M)
            multiply_rows<By, Weight, M, O>(x, matrix, row, inputs, begin, end);
        else
            multiply_some<By, Weight, M - 1>(rows, x, matrix, row, inputs, begin, end);
    }
}

// The same for any number of rows, in tiles of about equal size, and for weights of any type.
template <class By>
static void multiply(long rows, const typename By::Prepared* x, const Matrix<typename By::Number>& matrix, long inputs,
                     long begin, long end) {
    const long tiles = (rows + TILE - 1) / TILE, rows_of_tile = (rows + tiles - 1) / tiles;
    const auto some = matrix.group_offsets  ? multiply_some<By, Codes>
                      : matrix.group_scales ? multiply_some<By, Grouped>
                      : matrix.scales       ? multiply_some<By, int8_t>
                                            : multiply_some<By, typename By::Number>;
    for (long row = 0; row < rows; row += rows_of_tile)
        some(std::min(rows_of_tile, rows - row), x + row * inputs, matrix, row, inputs, begin, end);
    if (matrix.scales) matrix.scale(0, rows, begin, end);
}

}  // namespace products
