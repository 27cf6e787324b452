// Digests of memory. They show whether weights have changed since a copy was made of them, at the speed of reading
// them.
//
// In each lane, a digest is the sum over all vectors of (a + k) * (b + k'), where a and b are the two 32-bit words in
// the lane, and k and k' those of the vector's key: the NH of UMAC (Black et al. 1999, CRYPTO 1999). Each product is
// increased by its two factors with their order swapped, so a change of a single word always changes the digest. Two
// changes cancel only by a coincidence of 64 bits. The order of the vectors does not matter, so threads can share them
// in any way.

#pragma once

#include <algorithm>

#include "weights.h"

namespace digest {
using namespace gemm;

typedef uint64_t Sums __attribute__((vector_size(4 * L)));
constexpr long LANES = 8;  // of a digest in memory; narrower vectors leave some of them zero
constexpr uint64_t FIRST = 0x9e3779b97f4a7c15, STEP = 0xd6e8feb86659fd93;  // keys of vectors: FIRST + i * STEP
constexpr int STREAMS = 4;                                                 // streams that are read side by side
constexpr long AHEAD = 1024;                                               // bytes by which each is prefetched

// The summand of a vector. some: its words. key: the key in all lanes.
static INLINE Sums mixed(Sums some, Sums key) {
    typedef uint32_t Words __attribute__((vector_size(4 * L)));
    const Sums keyed = (Sums)((Words)some + (Words)key), swapped = keyed << 32 | keyed >> 32;
#if defined(__AVX512F__)
    return (Sums)_mm512_mul_epu32((__m512i)keyed, (__m512i)swapped) + swapped;
#elif defined(__AVX2__)
    return (Sums)_mm256_mul_epu32((__m256i)keyed, (__m256i)swapped) + swapped;
#else
    return (keyed & 0xffffffff) * (swapped & 0xffffffff) + swapped;
#endif
}

// The sums of bytes begin..end-1 of some memory. Both are multiples of a vector, or `end` is the end of the memory.
static INLINE Sums of(const char* memory, long begin, long end) {
    constexpr long SIZE = sizeof(Sums);
    const long of_stream = (end - begin) / SIZE / STREAMS * SIZE, whole = begin + of_stream * STREAMS;
    const auto key = [](long at) { return Sums{} + (FIRST + at / SIZE * STEP); };
    Sums sums[STREAMS] = {}, keys[STREAMS];
    UNROLL for (int s = 0; s < STREAMS; s++) keys[s] = key(begin + s * of_stream);
    for (long i = begin; i < begin + of_stream; i += SIZE)
        UNROLL for (int s = 0; s < STREAMS; s++) {
            const char* const at = memory + s * of_stream + i;
            __builtin_prefetch(at + AHEAD);
            sums[s] += mixed(*(const Unaligned<Sums>*)at, keys[s]);
            keys[s] += STEP;
        }
    for (long i = whole; i < end; i += SIZE) {
        Sums rest = {};
        memcpy(&rest, memory + i, std::min(SIZE, end - i));
        sums[0] += mixed(rest, key(i));
    }
    UNROLL for (int s = 1; s < STREAMS; s++) sums[0] += sums[s];
    return sums[0];
}

// Add sums to a digest. Other threads may do so at the same time.
static INLINE void add(Sums sums, uint64_t* to) {
    for (int l = 0; l < L / 2; l++) __atomic_fetch_add(to + l, sums[l], __ATOMIC_RELAXED);
}

}  // namespace digest
