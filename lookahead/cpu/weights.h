// How the kernels read weights and multiply by them. Weights may be numbers of the input's type, float32 or bf16; bytes
// with a scale for each output or for each group of inputs; codes of 4 bits with a scale and an offset for each group;
// or bf16 numbers in 12 bits. They are unpacked in registers.

#pragma once

#include <type_traits>

#include "vectors.h"

namespace gemm {

#ifdef __AVX512F__
constexpr int L = 16;
#else
constexpr int L = 8;
#endif
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

// L bytes as integers. GCC's own conversion handles them one by one.
static INLINE Ints widened(const int8_t* x) {
#if defined(__AVX512F__)
    return (Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)x));
#elif defined(__AVX2__)
    return (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)x));
#else
    return __builtin_convertvector(*(const Unaligned<Lanes<L>::Bytes>*)x, Ints);
#endif
}

// L codes are one word. Each lane gets the whole word and shifts its own code down; other bits stay above it.
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

// The weights of L codes. With FMA they are rounded once; otherwise twice, so scales must have few digits. With
// AVX-512, they are looked up in a table of the weights of all codes.
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

// A lane holds two bf16 numbers. Each is a float once the bits of the other are cleared.
static INLINE Floats low(Ints pairs) { return (Floats)(pairs << 16); }
static INLINE Floats high(Ints pairs) { return (Floats)(pairs & ~0xffff); }

// Make the compiler keep a vector in a register. Otherwise it reads the vector from memory for each output, and reading
// takes longer than multiplying.
template <class Vector>
static INLINE Vector in_register(Vector x) {
#if defined(__AVX512F__)
    asm("" : "+v"(x));
#elif defined(__AVX2__)
    asm("" : "+x"(x));
#endif
    return x;
}

// How numbers of a type are multiplied: STRIDE numbers at a time, loaded as Factors. Prepared is the type of the packed
// input. Both types represent a byte exactly; a byte times a scale is rounded to the type.
struct ByFloats {
    typedef float Number;
    typedef float Prepared;
    typedef Floats Factors;
    static constexpr int STRIDE = L;
    static INLINE Floats factors(const float* x) { return *(const Unaligned<Floats>*)x; }
    static INLINE Floats factors(const int8_t* x) { return __builtin_convertvector(widened(x), Floats); }
    static INLINE Floats factors(const Grouped* x, float scale) { return factors(&x->byte) * scale; }
    static INLINE Floats factors(const Codes* x, float scale, float offset) { return weights(x, scale, offset); }
    static INLINE void pack(const int8_t* codes, Codes* to) { gemm::pack(widened(codes), to); }
    // Add the product of x and w[o][v] to the sum of each output o.
    template <int O, int V>
    static INLINE void add(Floats* sums, const float* x, const Floats (*w)[V], int v) {
        const Floats numbers = in_register(factors(x));
        UNROLL for (int o = 0; o < O; o++) sums[o] += numbers * w[o][v];
    }
    template <int O, int V>
    static INLINE void add(Floats* sums, const float* x, const Ints (*w)[V], int v) {  // two bf16 numbers in a lane
        const Floats first = in_register(factors(x)), second = in_register(factors(x + L));
        UNROLL for (int o = 0; o < O; o++) {
            sums[o] += first * low(w[o][v]);
            sums[o] += second * high(w[o][v]);
        }
    }
};

// How weights of any kind become pairs of bf16 numbers.
struct Pairs {
    typedef BFloat16 Number;
    typedef Ints Factors;
    static constexpr int STRIDE = 2 * L;
    static INLINE Ints factors(const BFloat16* x) { return *(const Unaligned<Ints>*)x; }
#ifdef __AVX512BF16__
    template <class Byte, class... Scale>
    static INLINE Ints factors(const Byte* x, Scale... scale) {
        constexpr int places = std::is_same_v<Byte, Codes> ? L / 2 : L;
        const Floats low = ByFloats::factors(x, scale...), high = ByFloats::factors(x + places, scale...);
        return (Ints)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
    }
    static INLINE void pack(const int8_t* codes, Codes* to) {
        ByFloats::pack(codes, to);
        ByFloats::pack(codes + L, to + L / 2);
    }
#else
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
    static INLINE Ints factors(const Codes* x, float scale, float offset) {  // even places in the lower halves
#ifdef __AVX512F__
        const Floats table = (Floats)(rounded<Ints>(table_of(scale, offset)) << 16);
        return ((Ints)looked_up(x, table) >> 16 & 0xffff) | (Ints)looked_up(x + L / 2, table);
#else
        return rounded<Ints>(weights(x, scale, offset)) | rounded<Ints>(weights(x + L / 2, scale, offset)) << 16;
#endif
    }
    static INLINE void pack(const int8_t* codes, Codes* to) {
        const Ints some = pairs(codes);
        gemm::pack(some & 0xff, to);
        gemm::pack(some >> 8, to + L / 2);
    }
#endif
};

#ifdef __AVX512BF16__
// Pairs are multiplied directly.
struct ByPairs : Pairs {
    typedef BFloat16 Prepared;
    template <int O, int V>
    static INLINE void add(Floats* sums, const BFloat16* x, const Ints (*w)[V], int v) {
        const Ints pairs = in_register(factors(x));
        UNROLL for (int o = 0; o < O; o++)
            sums[o] = (Floats)_mm512_dpbf16_ps((__m512)sums[o], (__m512bh)pairs, (__m512bh)w[o][v]);
    }
};
#endif

// Pairs are multiplied as floats. The input is packed first: of each STRIDE numbers, those at even places come before
// those at odd places.
struct BySplitPairs : Pairs {
    typedef float Prepared;
    template <int O, int V>
    static INLINE void add(Floats* sums, const float* x, const Ints (*w)[V], int v) {
        ByFloats::add<O>(sums, x, w, v);
    }
};

// Call f with the faster way to multiply bf16 numbers on this processor.
template <class F>
static auto by_pairs(F f) {
#if defined(HAS_AMX)
    return f(ByPairs());
#elif defined(__AVX512BF16__)
    return floats_are_faster() ? f(BySplitPairs()) : f(ByPairs());
#else
    return f(BySplitPairs());
#endif
}

}  // namespace gemm
