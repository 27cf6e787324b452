// Digests of memory. They say whether weights are still those that a copy was made of, and are as quick as reading them.
//
// In each lane, a digest is the sum over all vectors of (a + k) * (b + k'), where a and b are the two words of 32 bits in
// the lane and k and k' those of the vector's key: the NH of UMAC (Black et al. 1999, CRYPTO 1999). To each product, the
// factors are added with their halves swapped: so a change of a single word always changes the digest. That two changes
// make up for each other takes a coincidence of 64 bits. The order in which vectors are added does not matter, so threads
// share them out as they like.

#pragma once

#include <algorithm>

#include "weights.h"

namespace digest {
using namespace gemm;

typedef uint64_t Sums __attribute__((vector_size(4 * L)));
constexpr long LANES = 8;  // of a digest in memory; narrower vectors leave some of them zero
constexpr uint64_t FIRST = 0x9e3779b97f4a7c15, STEP = 0xd6e8feb86659fd93;  // keys of vectors: FIRST + i * STEP
constexpr int STREAMS = 4;                                                 // that are read side by side
constexpr long AHEAD = 1024;                                               // bytes that are prefetched in each

// What is added for a vector, of which `some` are the words and `key` the key in all lanes.
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

// The sums of bytes begin..end-1 of some memory. Both are multiples of a vector, or the end is that of the memory.
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

// Add sums to those of a digest, to which other threads may add at the same time.
static INLINE void add(Sums sums, uint64_t* to) {
    for (int l = 0; l < L / 2; l++) __atomic_fetch_add(to + l, sums[l], __ATOMIC_RELAXED);
}

}  // namespace digest
