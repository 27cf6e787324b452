// The blocks of GGUF files, which the kernels read directly. A weight is a small whole number times the scale of its
// group, plus an offset in some formats. Scales have few digits, so the products are exact: weights are rounded as if
// they had been unpacked first. Weights that were unpacked from MXFP4 are packed into such blocks again (`blocks.cpp`).

#pragma once

#include "weights.h"

namespace gguf {
using namespace gemm;

// A number in IEEE's half precision, from two bytes.
static INLINE float half(const uint8_t* x) {
    uint16_t bits;
    memcpy(&bits, x, sizeof bits);
#ifdef __AVX512F__
    return _mm512_cvtss_f32(_mm512_cvtph_ps(_mm256_castsi128_si256(_mm_cvtsi32_si128(bits))));
#endif
    const uint32_t sign = (bits & 0x8000u) << 16, exponent = bits & 0x7c00, others = (bits & 0x7fffu) << 13;
    const bool is_small = exponent == 0;  // subnormal
    uint32_t wide = others + ((exponent == 0x7c00 ? 255 - 31 : 127 - 15 + is_small) << 23) ;
    float y;
    memcpy(&y, &wide, sizeof y);
    if (is_small) y -= 0x1p-14f;
    memcpy(&wide, &y, sizeof y);
    wide |= sign;
    memcpy(&y, &wide, sizeof y);
    return y;
}

// L unsigned bytes as integers.
static INLINE Ints widened(const uint8_t* x) {
#if defined(__AVX512F__)
    return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)x));
#elif defined(__AVX2__)
    return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)x));
#else
    return gemm::widened((const int8_t*)x) & 255;
#endif
}

// The numbers of lanes.
#ifdef __AVX512F__
static const Ints LANES = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#else
static const Ints LANES = {0, 1, 2, 3, 4, 5, 6, 7};
#endif

// Common to all formats: a block has WEIGHTS weights in BYTES_ bytes, and a scale for each GROUP_ weights.
template <long WEIGHTS, long BYTES_, long GROUP_>
struct Shape {
    static constexpr long SIZE = WEIGHTS, BYTES = BYTES_, GROUP = GROUP_;
    struct Scales {
        float scale[SIZE / GROUP], offset[SIZE / GROUP];
        INLINE Floats weights(Ints numbers, long i) const {
            const Floats exact = __builtin_convertvector(numbers, Floats);
            return exact * scale[i / GROUP] + offset[i / GROUP];
        }
        // Weights of codes of 4 bits, whose lanes may hold other bits above them.
        INLINE Floats of_codes(Ints codes, long i) const {
#ifdef __AVX512F__
            return (Floats)_mm512_permutexvar_ps((__m512i)codes, (__m512)table_of(scale[i / GROUP], offset[i / GROUP]));
#else
            return weights(codes & 15, i);
#endif
        }
        // The same for codes of 5 bits. The fifth bits are stored together: `fifth` points to those of a group.
        INLINE Floats of_codes(Ints codes, const uint8_t* fifth, long i) const {
#ifdef __AVX512F__
            const float scale = this->scale[i / GROUP], offset = this->offset[i / GROUP];
            const Floats upper = __builtin_convertvector(LANES + 16, Floats) * scale + offset;
            __mmask16 has_fifth;
            memcpy(&has_fifth, fifth + i % GROUP / 8, sizeof has_fifth);
            return (Floats)_mm512_mask_permutexvar_ps((__m512)of_codes(codes, i), has_fifth, (__m512i)codes, (__m512)upper);
#else
            const Ints its = (Ints{} + fifth[i % GROUP / 8]) & (Ints{} + 1) << LANES;
            return weights((codes & 15) + (its != 0 ? Ints{} + 16 : Ints{}), i);
#endif
        }
    };
};

// The numbers of IQ4_NL and IQ4_XS for codes of 4 bits.
#define IQ4 -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113
static INLINE Floats numbers_of_iq4(const uint8_t* codes, int shift) {
#if defined(__AVX512F__)
    return (Floats)_mm512_permutexvar_ps((__m512i)(widened(codes) >> shift), (__m512)Floats{IQ4});
#elif defined(__AVX2__)
    const __m128i its = _mm_and_si128(_mm_srli_epi16(_mm_loadl_epi64((const __m128i*)codes), shift), _mm_set1_epi8(15));
    return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_shuffle_epi8((__m128i)Lanes<16>::Bytes{IQ4}, its)));
#else
    static const float numbers[] = {IQ4};
    Floats found;
    UNROLL for (int lane = 0; lane < L; lane++) found[lane] = numbers[codes[lane] >> shift & 15];
    return found;
#endif
}
#undef IQ4

// In each format, `read` returns the scales of a block, and `weights` returns L weights from weight i on.
struct Q4_0 : Shape<32, 18, 32> {
    static INLINE Scales read(const uint8_t* block) {
        const float scale = half(block);
        return {{scale}, {-8 * scale}};
    }
    static INLINE Floats weights(const uint8_t* block, long i, const Scales& scales) {
        return scales.of_codes(widened(block + 2 + i % 16) >> int(i / 16 * 4), i);
    }
};

struct Q4_1 : Shape<32, 20, 32> {
    static INLINE Scales read(const uint8_t* block) { return {{half(block)}, {half(block + 2)}}; }
    static INLINE Floats weights(const uint8_t* block, long i, const Scales& scales) {
        return scales.of_codes(widened(block + 4 + i % 16) >> int(i / 16 * 4), i);
    }
};

struct Q5_0 : Shape<32, 22, 32> {
    static INLINE Scales read(const uint8_t* block) {
        const float scale = half(block);
        return {{scale}, {-16 * scale}};
    }
    static INLINE Floats weights(const uint8_t* block, long i, const Scales& scales) {
        return scales.of_codes(widened(block + 6 + i % 16) >> int(i / 16 * 4), block + 2, i);
    }
};

struct Q5_1 : Shape<32, 24, 32> {
    static INLINE Scales read(const uint8_t* block) { return {{half(block)}, {half(block + 2)}}; }
    static INLINE Floats weights(const uint8_t* block, long i, const Scales& scales) {
        return scales.of_codes(widened(block + 8 + i % 16) >> int(i / 16 * 4), block + 4, i);
    }
};

struct Q8_0 : Shape<32, 34, 32> {
    static INLINE Scales read(const uint8_t* block) { return {{half(block)}, {0}}; }
    static INLINE Floats weights(const uint8_t* block, long i, const Scales& scales) {
        return __builtin_convertvector(gemm::widened((const int8_t*)block + 2 + i), Floats) * scales.scale[0];
    }
};

struct Q2_K : Shape<256, 84, 16> {
    static INLINE Scales read(const uint8_t* block) {
        const float scale = half(block + 80), offset = -half(block + 82);
        Scales found;
        UNROLL for (int j = 0; j < 16; j += L) {
            const Ints both = widened(block + j);
            *(Unaligned<Floats>*)(found.scale + j) = __builtin_convertvector(both & 15, Floats) * scale;
            *(Unaligned<Floats>*)(found.offset + j) = __builtin_convertvector(both >> 4, Floats) * offset;
        }
        return found;
    }
    static INLINE Floats weights(const uint8_t* block, long i, const Scales& scales) {
        return scales.weights(widened(block + 16 + i / 128 * 32 + i % 32) >> int(i % 128 / 32 * 2) & 3, i);
    }
};

struct Q3_K : Shape<256, 110, 16> {
    static INLINE Scales read(const uint8_t* block) {
        uint32_t packed[3], numbers[4];  // of 6 bits each
        memcpy(packed, block + 96, sizeof packed);
        UNROLL for (int j = 0; j < 4; j++)
            numbers[j] = (packed[j % 2] >> j / 2 * 4 & 0x0f0f0f0f) | (packed[2] >> 2 * j & 0x03030303) << 4;
        const float scale = half(block + 108);
        Scales found;
        UNROLL for (int j = 0; j < 16; j += L) {
            const Floats its = __builtin_convertvector(widened((const uint8_t*)numbers + j) - 32, Floats) * scale;
            *(Unaligned<Floats>*)(found.scale + j) = its, *(Unaligned<Floats>*)(found.offset + j) = its * -4;
        }
        return found;
    }
    static INLINE Floats weights(const uint8_t* block, long i, const Scales& scales) {
        const Ints lower = widened(block + 32 + i / 128 * 32 + i % 32) >> int(i % 128 / 32 * 2) & 3;
        const Ints third = widened(block + i % 32) & 1 << int(i / 32);  // if 0, the number is 4 less
        const Floats offset = third != 0 ? Floats{} : Floats{} + scales.offset[i / 16];
        return __builtin_convertvector(lower, Floats) * scales.scale[i / 16] + offset;
    }
};

// The scales and offsets of Q4_K and Q5_K: a number of 6 bits for each group, times a factor of the block.
template <class Scales>
static INLINE Scales scales_of_k(const uint8_t* block) {
    uint32_t first[3], numbers[4];
    memcpy(first, block + 4, sizeof first);
    numbers[0] = first[0] & 0x3f3f3f3f, numbers[2] = first[1] & 0x3f3f3f3f;
    numbers[1] = (first[2] & 0x0f0f0f0f) | (first[0] >> 2 & 0x30303030);
    numbers[3] = (first[2] >> 4 & 0x0f0f0f0f) | (first[1] >> 2 & 0x30303030);
    uint8_t bytes[16];
    memcpy(bytes, numbers, sizeof bytes);
    const float scale = half(block), offset = -half(block + 2);
    Scales found;
    static_assert(sizeof found == 16 * sizeof(float));  // eight scales, then as many offsets
    UNROLL for (int j = 0; j < 16; j += L) {
        const Floats factors = LANES + j < 8 ? Floats{} + scale : Floats{} + offset;
        ((Unaligned<Floats>*)&found)[j / L] = __builtin_convertvector(widened(bytes + j), Floats) * factors;
    }
    return found;
}

struct Q4_K : Shape<256, 144, 32> {
    static INLINE Scales read(const uint8_t* block) { return scales_of_k<Scales>(block); }
    static INLINE Floats weights(const uint8_t* block, long i, const Scales& scales) {
        return scales.of_codes(widened(block + 16 + i / 64 * 32 + i % 32) >> int(i % 64 / 32 * 4), i);
    }
};

struct Q5_K : Shape<256, 176, 32> {
    static INLINE Scales read(const uint8_t* block) { return scales_of_k<Scales>(block); }
    static INLINE Floats weights(const uint8_t* block, long i, const Scales& scales) {
        const Ints lower = widened(block + 48 + i / 64 * 32 + i % 32) >> int(i % 64 / 32 * 4) & 15;
        const Ints upper = widened(block + 16 + i % 32) >> int(i / 32) & 1;
        return scales.weights(lower | upper << 4, i);
    }
};

struct Q6_K : Shape<256, 210, 16> {
    static INLINE Scales read(const uint8_t* block) {
        const float scale = half(block + 208);
        Scales found;
        UNROLL for (int j = 0; j < 16; j += L) {
            const Ints numbers = gemm::widened((const int8_t*)block + 192 + j);
            *(Unaligned<Floats>*)(found.scale + j) = __builtin_convertvector(numbers, Floats) * scale;
        }
        return found;
    }
    static INLINE Floats weights(const uint8_t* block, long i, const Scales& scales) {
        const Ints lower = widened(block + i / 128 * 64 + i % 64) >> int(i % 128 / 64 * 4) & 15;
        const Ints upper = widened(block + 128 + i / 128 * 32 + i % 32) >> int(i % 128 / 32 * 2) & 3;
        return __builtin_convertvector((lower | upper << 4) - 32, Floats) * scales.scale[i / 16];
    }
};

struct IQ4_NL : Shape<32, 18, 32> {
    static INLINE Scales read(const uint8_t* block) { return {{half(block)}, {0}}; }
    static INLINE Floats weights(const uint8_t* block, long i, const Scales& scales) {
        return numbers_of_iq4(block + 2 + i % 16, int(i / 16 * 4)) * scales.scale[0];
    }
};

struct IQ4_XS : Shape<256, 136, 32> {
    static INLINE Scales read(const uint8_t* block) {
        typedef Lanes<8>::Ints Eight;
        const Eight shifts = {0, 2, 4, 6, 8, 10, 12, 14};
        int32_t lower;
        memcpy(&lower, block + 4, sizeof lower);
        const int upper = block[2] | block[3] << 8;
        const Eight numbers = ((Eight{} + lower) >> 2 * shifts & 15) | ((Eight{} + upper) >> shifts & 3) << 4;
        Scales found;
        *(Unaligned<Lanes<8>::Floats>*)found.scale = __builtin_convertvector(numbers - 32, Lanes<8>::Floats) * half(block);
        return found;
    }
    static INLINE Floats weights(const uint8_t* block, long i, const Scales& scales) {
        return numbers_of_iq4(block + 8 + i / 32 * 16 + i % 16, int(i % 32 / 16 * 4)) * scales.scale[i / 32];
    }
};

// Numbers with two binary digits, times a power of two (OCP Microscaling Formats, E2M1 and E8M0). Only this format is
// also read as pairs of bf16 numbers. Then two neighbours share a byte; otherwise, as in files, two numbers that are 16
// apart.
struct MXFP4 {
    static constexpr long SIZE = 32, BYTES = 17;
    typedef Floats Scales;  // with AVX2, a table of the weights of codes; otherwise half the power of two in all lanes

    static INLINE Scales read(const uint8_t* block) {
        const uint32_t power = block[0], bits = power < 2 ? 0x200000u << power : (power - 1) << 23;  // half of it
        float scale;
        memcpy(&scale, &bits, sizeof scale);
#if defined(__AVX512F__)
        return Floats{0, 1, 2, 3, 4, 6, 8, 12, -0.0f, -1, -2, -3, -4, -6, -8, -12} * scale;
#elif defined(__AVX2__)
        return Floats{0, 1, 2, 3, 4, 6, 8, 12} * scale;
#else
        return Floats{} + scale;
#endif
    }
    // The weights of codes. Their lanes may hold other bits above them.
    static INLINE Floats numbers(Ints codes, const Scales& scales) {
#if defined(__AVX512F__)
        return (Floats)_mm512_permutexvar_ps((__m512i)codes, (__m512)scales);
#else
        const Ints signs = codes >> 3 << 31;
#if defined(__AVX2__)
        const Floats sizes = (Floats)_mm256_permutevar8x32_ps((__m256)scales, (__m256i)codes);
#else
        const Ints exponents = codes >> 1 & 3, digits = codes & 1;
        const Ints whole = (exponents == 0 ? digits << 1 : digits | 2) << exponents >> 1;
        const Floats sizes = __builtin_convertvector(whole, Floats) * scales;
#endif
        return (Floats)((Ints)sizes | signs);
#endif
    }
    static INLINE Floats weights(const uint8_t* block, long i, const Scales& scales) {
        return numbers(widened(block + 1 + i % 16) >> int(i / 16 * 4), scales);
    }
    // 2 * L weights.
    static INLINE Ints pairs(const uint8_t* block, long i, const Scales& scales) {
        const Ints two = widened(block + 1 + i / 2);
        return ((Ints)numbers(two, scales) >> 16 & 0xffff) | (Ints)numbers(two >> 4, scales);
    }
};

// Whether weights are in blocks. If so, their type has BYTES.
template <class Weight, class = void>
constexpr bool IS_BLOCK = false;
template <class Weight>
constexpr bool IS_BLOCK<Weight, std::void_t<decltype(Weight::BYTES)>> = true;

// By::STRIDE weights of a block, from weight i on.
template <class By, class Block>
static INLINE typename By::Factors factors(const uint8_t* block, long i, const typename Block::Scales& scales) {
    if constexpr (std::is_same_v<typename By::Factors, Floats>)
        return Block::weights(block, i, scales);
    else
        return Block::pairs(block, i, scales);
}

// Unpack n weights of a row.
template <class Block>
static void unpack(const uint8_t* row, long n, float* to) {
    for (; n > 0; n -= Block::SIZE, row += Block::BYTES) {
        const auto scales = Block::read(row);
        for (long i = 0; i < Block::SIZE; i += L, to += L) *(Unaligned<Floats>*)to = Block::weights(row, i, scales);
    }
}

}  // namespace gguf
