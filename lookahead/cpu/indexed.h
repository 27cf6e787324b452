// Matrices of bf16 numbers in 12 bits each.
//
// Trained weights have few exponents, so the upper bytes of a row are seldom more than sixteen. Held are the lower bytes of
// all weights; codes of 4 bits, which say where the upper bytes stand in a table; the tables; and upper bytes that are in
// no table, which are patched. Rows in which too many are not in a table are read from the matrix that they were made of.
// That may be float32, if its weights are bf16 numbers.
//
// Rows lie together, as many as a vector has lanes. A line has a pair of inputs of each of them, and their pair 2 * L inputs
// further on: bytes and codes of BLOCK weights, which are unpacked to two vectors. Its L lines make a block of the rows.

#pragma once

#include <algorithm>

#include "weights.h"

namespace gemm {

struct Indexed {
    static constexpr long BLOCK = 4 * L;     // inputs of a block, and weights of a line
    static constexpr long TOGETHER = L;      // rows, and lines of a block
#ifdef HAS_AMX
    static constexpr long OF_TABLE = L;  // rows with one table
#else
    static constexpr long OF_TABLE = 4;  // those in 16 bytes of a vector, which are looked up in 16 bytes of tables
#endif
    static constexpr long TABLES = TOGETHER / OF_TABLE;

    static INLINE long bytes(long inputs) { return aligned(inputs * 3 / 2 + 16 + inputs / BLOCK); }

    // Where the parts of TOGETHER rows stand, of which `row` is one. What is in no table of theirs has a patch.
    template <class Byte>
    struct Rows {
        Byte* const first;
        const long inputs;

        Rows(Byte* matrix, long row, long inputs)
            : first(matrix + row / TOGETHER * TOGETHER * bytes(inputs)), inputs(inputs) {}
        Byte* tables() const { return first + inputs * 3 / 2 * TOGETHER; }
        Byte* end() const { return first + TOGETHER * bytes(inputs); }

#ifdef HAS_AMX
        // Block after block, for a block is a tile of weights for two steps. Each has patches, or is read from the matrix.
        static constexpr int ALL = 255;
        struct Patch {
            uint8_t place[2], byte;  // the place in the first vectors of all lines, or in the second behind them
        };

        Byte* lower(long line, long i) const { return first + i * 3 / 2 * TOGETHER + line * BLOCK; }
        Byte* codes(long line, long i) const { return first + (i * 3 / 2 + BLOCK) * TOGETHER + line * BLOCK / 2; }
        // How many patches the block has that begins at input i.
        Byte* exceptions(long i) const { return tables() + 16 * TABLES + i / BLOCK; }
        bool are_read(long i) const { return *exceptions(i) == ALL; }
        // The patches of all blocks in turn, and how many there may be: as many as fit behind the rest.
        Patch* patches() const { return (Patch*)exceptions(inputs); }
        long room() const { return (end() - (Byte*)patches()) / (long)sizeof(Patch); }
        // Patch a block whose lines are unpacked to these vectors.
        void patch(long i, Ints* firsts, Ints* seconds) const {
            if (!*exceptions(i)) return;
            const Patch* patch = patches();
            for (long before = 0; before < i; before += BLOCK)
                if (!are_read(before)) patch += *exceptions(before);
            for (const Patch* end = patch + *exceptions(i); patch < end; patch++) {
                const int place = patch->place[0] | patch->place[1] << 8, half = TOGETHER * sizeof(Ints);
                (place < half ? (uint8_t*)firsts : (uint8_t*)seconds - half)[place] = patch->byte;
            }
        }
#else
        // The first lines of all blocks, then the second ones: in the order in which a panel is multiplied.
        static constexpr int32_t ALL = -1;
        struct Patch {
            uint32_t line;         // of all lines in their order
            uint8_t vector, byte;  // the vector, and the place in it
            uint8_t upper;         // what stands there
        };

        long place(long line, long i) const { return line * (inputs / BLOCK) + i / BLOCK; }
        Byte* lower(long line, long i) const { return first + place(line, i) * BLOCK; }
        Byte* codes(long line, long i) const { return first + inputs * TOGETHER + place(line, i) * BLOCK / 2; }
        // How many patches there are, or ALL if these rows are read from the matrix. In the order of lines.
        int32_t& patched() const { return *(int32_t*)(tables() + 16 * TABLES); }
        bool are_read(long = 0) const { return patched() == ALL; }
        Patch* patches() const { return (Patch*)(&patched() + 1); }
        long room() const { return (end() - (Byte*)patches()) / (long)sizeof(Patch); }
        void patch(long i, Ints* firsts, Ints* seconds) const {
            for (const Patch* patch = patches(); patch < patches() + patched(); patch++)
                for (long line = 0; line < TOGETHER; line++)
                    if (patch->line == place(line, i))
                        ((uint8_t*)((patch->vector ? seconds : firsts) + line))[patch->byte] = patch->upper;
        }
#endif
    };

    // Which number of which vector of a line has its bytes at a place: so they are unpacked in order.
    static constexpr long vector_of(long place) { return place % 16 / 8; }
    static constexpr long number_of(long place) { return place / 16 * 8 + place % 8; }

    // 2 * L weights as pairs, from a matrix of bf16 numbers. Pairs of bf16 inputs are neighbours, those of floats are L
    // numbers apart.
    static INLINE Ints pairs(const BFloat16* x) { return *(const Unaligned<Ints>*)x; }
    static INLINE Ints pairs(const float* x) {
        const Ints first = *(const Unaligned<Ints>*)x, second = *(const Unaligned<Ints>*)(x + L);
        return (first >> 16 & 0xffff) | (second & ~0xffff);
    }

    // A block of `rows` rows from the matrix that they were made of, as the bytes of its lines are unpacked.
    template <class T>
    static INLINE void take_block(const T* weights, long rows, long inputs, Ints* firsts, Ints* seconds) {
        for (long row = 0; row < TOGETHER; row++) {
            firsts[row] = row < rows ? pairs(weights + row * inputs) : Ints{};
            seconds[row] = row < rows ? pairs(weights + row * inputs + 2 * L) : Ints{};
        }
        transpose(firsts), transpose(seconds);
    }

#if defined(__AVX2__) && !defined(__AVX512F__)
    typedef __m256i Table;
#else
    typedef Ints Table;
#endif
    // The tables in a vector; the two vectors of a line. There is no such way of reading without AVX2.
    static Table table_of(const uint8_t* tables);
    static void look_up(const uint8_t* lower, const uint8_t* codes, Table table, Ints* two);
};

#ifdef __AVX2__
INLINE Indexed::Table Indexed::table_of(const uint8_t* tables) {
#ifdef HAS_AMX
    return (Table)_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)tables));
#else
    return *(const Unaligned<Table>*)tables;
#endif
}

INLINE void Indexed::look_up(const uint8_t* lower_bytes, const uint8_t* codes, Table table, Ints* two) {
#ifdef __AVX512F__
    const __m512i twice = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)codes));
    const __m512i down = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 1);  // the upper half
    const __m512i all = _mm512_srlv_epi16(twice, down), code = _mm512_and_si512(all, _mm512_set1_epi8(15));
    const __m512i lower = (__m512i)in_register(*(const Unaligned<Ints>*)lower_bytes);
    const __m512i upper = _mm512_shuffle_epi8((__m512i)table, code);
    two[0] = (Ints)_mm512_unpacklo_epi8(lower, upper), two[1] = (Ints)_mm512_unpackhi_epi8(lower, upper);
#else
    const __m128i half = _mm_loadu_si128((const __m128i*)codes);
    const __m256i all = _mm256_inserti128_si256(_mm256_castsi128_si256(half), _mm_srli_epi16(half, 4), 1);
    const __m256i code = _mm256_and_si256(all, _mm256_set1_epi8(15));
    const __m256i lower = _mm256_loadu_si256((const __m256i*)lower_bytes);
    const __m256i upper = _mm256_shuffle_epi8(table, code);
    two[0] = (Ints)_mm256_unpacklo_epi8(lower, upper), two[1] = (Ints)_mm256_unpackhi_epi8(lower, upper);
#endif
}
#endif

}  // namespace gemm
