// The processor's matrix unit (Intel's AMX). One instruction multiplies 16 rows of one matrix by 16 rows of another,
// over 32 columns: bf16 numbers, summed in float32. So for up to some dozens of rows, arithmetic takes less time than
// reading the weights.

#pragma once

#include "weights.h"

namespace gemm {

#ifdef HAS_AMX

constexpr int SIDE = 16;   // outputs in a tile of weights, and rows in a tile of the input
constexpr int DEPTH = 32;  // inputs in a tile, two in each lane
constexpr long TILE_BYTES = 1024;
static const __m512i PLACES = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);

// Instructions of the unit. The numbers of registers must be constants.
#ifdef EMULATED_AMX  // `make test-native`
#include "emulated_amx.h"
#else
template <int TO>
static INLINE void clear_tile() {
    asm volatile("tilezero %%tmm%c0" ::"i"(TO));
}
template <int TO>
static INLINE void load_tile(const void* from, long stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(TO) : "memory");
}
template <int FROM>
static INLINE void store_tile(void* to) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(TILE_BYTES / SIDE), "i"(FROM) : "memory");
}
template <int SUM, int A, int B>
static INLINE void add_tiles() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(A), "i"(B));
}
template <class Configuration>
static INLINE void configure_tiles(const Configuration* configuration) {
    asm volatile("ldtilecfg %0" ::"m"(*configuration));
}
static INLINE void release_tiles() { asm volatile("tilerelease"); }
#endif

// Prefetch a line into L2. Being assembly, it stays where it is written.
static INLINE void prefetch_in_turn(const void* x) { asm volatile("prefetcht2 %0" ::"m"(*(const char*)x) : "memory"); }

constexpr int WEIGHTS = 6;  // the register for a tile of weights, which always has SIDE rows

// Configure the registers: rows of 64 bytes, SIDE of them in the register WEIGHTS and `rows` in the other seven.
static INLINE void set_up_tiles(long rows = SIDE) {
    struct {
        uint8_t palette = 1, rest[15] = {};
        uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16];
    } configuration;
    for (int i = 0; i < 16; i++) configuration.rows[i] = i >= 8 ? 0 : i == WEIGHTS ? SIDE : rows;
    configure_tiles(&configuration);
}

// Releases this thread's unit at the end. Code that uses the registers configures them first.
struct AmxUnit {
    AmxUnit() {}  // so that it counts as used
    ~AmxUnit() { release_tiles(); }
    AmxUnit(const AmxUnit&) = delete;
};

// Call f(integral_constant<int, 0>), f(integral_constant<int, 1>), ..., N times.
template <class F, int... I>
static INLINE void repeat(F f, std::integer_sequence<int, I...>) {
    (f(std::integral_constant<int, I>()), ...);
}
template <int N, class F>
static INLINE void repeat(F f) {
    repeat(f, std::make_integer_sequence<int, N>());
}

#else

struct AmxUnit {
    AmxUnit() {}  // so that it counts as used
};

#endif

}  // namespace gemm
