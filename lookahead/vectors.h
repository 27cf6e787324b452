// Numbers side by side in a vector, and bf16, of which processors multiply two at a time.

#include <cstdint>
#include <cstring>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

typedef uint16_t BFloat16;

template <int L>
struct Lanes {
    typedef float Floats __attribute__((vector_size(4 * L)));
    typedef int32_t Ints __attribute__((vector_size(4 * L)));
    typedef BFloat16 BFloat16s __attribute__((vector_size(2 * L)));
};

template <class T>
using Unaligned __attribute__((aligned(1), may_alias)) = T;

// How a product takes its numbers: each by itself, in float32.
struct Singles {
    static constexpr int TOGETHER = 1;
    typedef float Factor;
    template <int L>
    using Factors = typename Lanes<L>::Floats;
};

// Two by two in bf16, next to each other in memory, added up in float32.
struct Pairs {
    static constexpr int TOGETHER = 2;
    typedef int32_t Factor __attribute__((may_alias, aligned(2)));
    template <int L>
    using Factors = typename Lanes<L>::Ints;
};

static inline float number(float x) { return x; }

static inline float number(BFloat16 x) {
    uint32_t bits = uint32_t(x) << 16;
    float y;
    memcpy(&y, &bits, sizeof y);
    return y;
}

// The bits of 16 numbers, each in the lower half of a lane.
static inline Lanes<16>::Ints bits(const BFloat16* x) {
    Lanes<16>::BFloat16s some;
    memcpy(&some, x, sizeof some);
    return __builtin_convertvector(some, Lanes<16>::Ints);
}

// The nearest bf16 number, the even one of two, its bits in the lower half of a lane; not for NaNs.
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

static inline void store(Lanes<16>::Floats x, float* to) { memcpy(to, &x, sizeof x); }

static inline void store(Lanes<16>::Floats x, BFloat16* to) {
    const Lanes<16>::Ints bits = x != x ? Lanes<16>::Ints{} + 0x7fc0 : rounded<Lanes<16>::Ints>(x);
    const Lanes<16>::BFloat16s some = __builtin_convertvector(bits, Lanes<16>::BFloat16s);
    memcpy(to, &some, sizeof some);
}

// a * b + sum, lane by lane; of pairs, both products, added up in float32.
template <class Floats>
static inline Floats multiply_add(float a, Floats b, Floats sum) {
    return a * b + sum;
}

#ifdef __AVX512BF16__
static inline Lanes<8>::Floats multiply_add(Pairs::Factor a, Lanes<8>::Ints b, Lanes<8>::Floats sum) {
    return (Lanes<8>::Floats)_mm256_dpbf16_ps((__m256)sum, (__m256bh)(Lanes<8>::Ints{} + a), (__m256bh)b);
}

static inline Lanes<16>::Floats multiply_add(Pairs::Factor a, Lanes<16>::Ints b, Lanes<16>::Floats sum) {
    return (Lanes<16>::Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(Lanes<16>::Ints{} + a), (__m512bh)b);
}
#endif

// c[i] += a[i * row + j * column] * b[j], summed over j < k, for M rows i of c and k rows j of b, of W vectors each.
template <class By, int W, int M, class Floats, class Factors>
static inline void multiply_tile(Floats* c, const typename By::Factor* a, long row, long column, const Factors* b,
                                 long k) {
    Floats sums[M][W];
    for (int i = 0; i < M; i++)
        for (int w = 0; w < W; w++) sums[i][w] = c[i * W + w];
    for (long j = 0; j < k; j++)
        for (int i = 0; i < M; i++)
            for (int w = 0; w < W; w++) sums[i][w] = multiply_add(a[i * row + j * column], b[j * W + w], sums[i][w]);
    for (int i = 0; i < M; i++)
        for (int w = 0; w < W; w++) c[i * W + w] = sums[i][w];
}
