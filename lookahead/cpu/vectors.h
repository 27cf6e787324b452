// Vectors of numbers, and conversions of bf16 to and from float32.

#pragma once

#include <cstdint>
#include <cstring>
#include <utility>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#define UNROLL _Pragma("GCC unroll 64")
#define INLINE inline __attribute__((always_inline))

typedef uint16_t BFloat16;

// L: numbers in a register. The compiler keeps wider vectors in memory.
#if defined(__AVX512F__)
constexpr int WIDTH = 16;
#elif defined(__AVX2__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif

template <int L>
struct Lanes {
    typedef float Floats __attribute__((vector_size(4 * L)));
    typedef int32_t Ints __attribute__((vector_size(4 * L)));
    typedef BFloat16 BFloat16s __attribute__((vector_size(2 * L)));
    typedef int16_t Shorts __attribute__((vector_size(2 * L)));
    typedef int8_t Bytes __attribute__((vector_size(L)));
};

#ifdef __AVX512BF16__
// Whether products of floats are faster than products of pairs of bf16 numbers. In the time of one vector of pairs,
// Intel's processors multiply more than two vectors of floats, AMD's one (from Zen 4 on: iree-org/iree, pull request
// 15089).
static inline bool floats_are_faster() { return __builtin_cpu_is("intel"); }
#endif

// Memory that is read next. Each step prefetches some bytes of it, between products and shuffles, because a core can
// have only a few dozen cache lines in flight. They go to L2: L1 is full of what is read now, and has fewer in flight.
struct Wanted {
    const char* begin = nullptr;
    long bytes = 0;

    INLINE void prefetch(long step) const {
        for (long i = 0; i < bytes; i += 64) __builtin_prefetch(begin + step * bytes + i, 0, 1);
    }
};

// A number of bytes, rounded up to whole cache lines.
static inline long aligned(long bytes) { return (bytes + 63) / 64 * 64; }

static inline float number(float x) { return x; }

static inline float number(BFloat16 x) {
    uint32_t bits = uint32_t(x) << 16;
    float y;
    memcpy(&y, &bits, sizeof y);
    return y;
}

// The bits of L numbers, each in the lower half of its lane. GCC's own conversion splits the vector.
template <int L>
static inline typename Lanes<L>::Ints bits(const BFloat16* x) {
#if defined(__AVX512F__)
    if constexpr (L == 16) return (typename Lanes<L>::Ints)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)x));
#elif defined(__AVX2__)
    if constexpr (L == 8) return (typename Lanes<L>::Ints)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)x));
#endif
    typename Lanes<L>::BFloat16s some;
    memcpy(&some, x, sizeof some);
    return __builtin_convertvector(some, typename Lanes<L>::Ints);
}

// The bits of the nearest bf16 number (ties to even), in the lower half of each lane. NaN is not supported.
template <class Ints, class Floats>
static inline Ints rounded(Floats x) {
    return ((Ints)x + 0x7fff + ((Ints)x >> 16 & 1)) >> 16 & 0xffff;
}

static inline void store(float x, float* to) { *to = x; }

static inline void store(float x, BFloat16* to) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    *to = x != x ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

template <class Floats>
static inline void store(Floats x, float* to) {
    memcpy(to, &x, sizeof x);
}

template <class Floats>
static inline void store(Floats x, BFloat16* to) {
    typedef Lanes<sizeof x / sizeof(float)> Of;
    typedef typename Of::Ints Ints;
    const Ints bits = x != x ? Ints{} + 0x7fc0 : rounded<Ints>(x);
    const typename Of::BFloat16s some = __builtin_convertvector(bits, typename Of::BFloat16s);
    memcpy(to, &some, sizeof some);
}

// The nearest number of type T, as a float.
template <class T>
static INLINE float rounded_to(float x) {
    T nearest;
    store(x, &nearest);
    return number(nearest);
}

// Weights in float32, or else of type T. Null if there are none.
template <class T>
struct Weights {
    const void* numbers = nullptr;
    bool are_floats = false;

    float operator[](long i) const { return are_floats ? ((const float*)numbers)[i] : number(((const T*)numbers)[i]); }
};

// WIDTH numbers.
static inline Lanes<WIDTH>::Floats load(const float* x) {
    Lanes<WIDTH>::Floats some;
    memcpy(&some, x, sizeof some);
    return some;
}

static inline Lanes<WIDTH>::Floats load(const BFloat16* x) { return (Lanes<WIDTH>::Floats)(bits<WIDTH>(x) << 16); }

// exp(x) for x <= 0, to 2 units in the last place. 0 for x < -87. NaN stays NaN.
template <int L, class Floats = typename Lanes<L>::Floats, class Ints = typename Lanes<L>::Ints>
static inline Floats exponential(Floats x) {
#ifdef __AVX512F__
    if constexpr (L == 16) {  // rounds by adding 1.5 * 2^23, and scales without a shift
        const Floats shifted = x * 1.44269504f + 0x1.8p23f, n = shifted - 0x1.8p23f;
        const Floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
        Floats y = r * 1.98756915e-4f + 1.39819995e-3f;  // Cephes, expf
        y = y * r + 8.33345191e-3f;
        y = y * r + 4.16657959e-2f;
        y = y * r + 1.66666655e-1f;
        y = y * r + 5.00000012e-1f;
        y = y * r + 1.0f;
        y = y * r + 1.0f;
        const __mmask16 stays = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
        return (Floats)_mm512_maskz_scalef_ps(stays, (__m512)y, (__m512)n);
    }
#endif
    Floats least = Floats{} - 87.0f;
    Ints gone = x < least;
    Floats within = gone ? least : x;
    Ints power = __builtin_convertvector(within * 1.44269504f - 0.5f, Ints);
    Floats n = __builtin_convertvector(power, Floats);
    Floats r = within - n * 0.693359375f + n * 2.12194440e-4f;  // |r| <= ln(2) / 2
    Floats y = r * 1.98756915e-4f + 1.39819995e-3f;             // Cephes, expf
    y = y * r + 8.33345191e-3f;
    y = y * r + 4.16657959e-2f;
    y = y * r + 1.66666655e-1f;
    y = y * r + 5.00000012e-1f;
    y = y * r * r + r + 1.0f;
    return gone ? Floats{} : (Floats)((Ints)y + (power << 23));
}

// x * sigmoid(y).
template <class Floats>
static INLINE Floats times_sigmoid(Floats x, Floats y) {
    const Floats power = exponential<WIDTH>(y < 0 ? y : -y);
    return x * (y < 0 ? power : Floats{} + 1.0f) / (1.0f + power);
}

// Lanes I of the concatenation of vectors a and b.
template <int... I, class Vector>
static INLINE Vector shuffled(Vector a, Vector b) {
#ifdef __clang__
    return __builtin_shufflevector(a, b, I...);
#else
    return __builtin_shuffle(a, b, typename Lanes<sizeof...(I)>::Ints{I...});
#endif
}

// Transpose a square of vectors: lane i of vector j becomes lane j of vector i.
template <int STEP = 1, class Vector, int... I>
static INLINE void transpose(Vector* v, std::integer_sequence<int, I...> lanes) {
    constexpr int N = sizeof...(I);
    if constexpr (STEP < N) {
        UNROLL for (int i = 0; i < N; i++) {
            if (i & STEP) continue;
            const Vector a = v[i], b = v[i + STEP];
            v[i] = shuffled<(I & STEP ? N + I - STEP : I)...>(a, b);
            v[i + STEP] = shuffled<(I & STEP ? N + I : I + STEP)...>(a, b);
        }
        transpose<2 * STEP>(v, lanes);
    }
}

template <class Vector>
static INLINE void transpose(Vector* v) {
    constexpr int N = sizeof(Vector) / sizeof(float);
#ifdef __AVX512F__
    if constexpr (N == 16) {  // with shuffles that need no registers for indices
        __m512i a[N], b[N];
        UNROLL for (int i = 0; i < N; i += 2) {
            a[i] = _mm512_unpacklo_epi32((__m512i)v[i], (__m512i)v[i + 1]);
            a[i + 1] = _mm512_unpackhi_epi32((__m512i)v[i], (__m512i)v[i + 1]);
        }
        UNROLL for (int i = 0; i < N; i += 4) UNROLL for (int j = 0; j < 2; j++) {
            b[i + 2 * j] = _mm512_unpacklo_epi64(a[i + j], a[i + j + 2]);
            b[i + 2 * j + 1] = _mm512_unpackhi_epi64(a[i + j], a[i + j + 2]);
        }
        constexpr int EVEN = 0x88, ODD = 0xdd;  // quarters of two vectors. Those of b[4 * i + j] are of lanes j, 4 + j, ...
        UNROLL for (int j = 0; j < 4; j++) {
            a[0] = _mm512_shuffle_i32x4(b[j], b[4 + j], EVEN), a[1] = _mm512_shuffle_i32x4(b[8 + j], b[12 + j], EVEN);
            a[2] = _mm512_shuffle_i32x4(b[j], b[4 + j], ODD), a[3] = _mm512_shuffle_i32x4(b[8 + j], b[12 + j], ODD);
            v[j] = (Vector)_mm512_shuffle_i32x4(a[0], a[1], EVEN), v[8 + j] = (Vector)_mm512_shuffle_i32x4(a[0], a[1], ODD);
            v[4 + j] = (Vector)_mm512_shuffle_i32x4(a[2], a[3], EVEN);
            v[12 + j] = (Vector)_mm512_shuffle_i32x4(a[2], a[3], ODD);
        }
        return;
    }
#endif
    transpose(v, std::make_integer_sequence<int, N>());
}

// Reduce all lanes by f, which must be commutative and associative. The result is in all lanes.
template <int STEP, class F, int... I>
static INLINE Lanes<WIDTH>::Floats over_lanes(Lanes<WIDTH>::Floats v, F f, std::integer_sequence<int, I...> lanes) {
    if constexpr (STEP == 0)
        return v;
    else
        return over_lanes<STEP / 2>(f(v, shuffled<(I ^ STEP)...>(v, v)), f, lanes);
}

template <class F>
static INLINE Lanes<WIDTH>::Floats over_lanes(Lanes<WIDTH>::Floats v, F f) {
    return over_lanes<WIDTH / 2>(v, f, std::make_integer_sequence<int, WIDTH>());
}
