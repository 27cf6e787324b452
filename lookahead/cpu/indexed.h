// Matrices of bf16 numbers in 12 bits each.
//
// Trained weights have few exponents, so the weights of a row seldom have more than sixteen different upper bytes. A
// packed matrix has the lower bytes of all weights; codes of 4 bits, which are indices into a table of upper bytes; the
// tables; and patches, for upper bytes that are not in a table. Rows with too many patches are read from the original
// matrix. It may be float32, if its weights are bf16 numbers.
//
// L rows are packed together, one for each lane of a vector. A line has bytes and codes of BLOCK weights, which are
// unpacked to two vectors: a pair of inputs of each row, and the pair 2 * L inputs later. A block is L such lines.

#pragma once

#include <algorithm>

#include "weights.h"

namespace gemm {

struct Indexed {
    static constexpr long BLOCK = 4 * L;     // inputs of a block, and weights of a line
    static constexpr long TOGETHER = L;      // rows packed together, and lines of a block
#ifdef HAS_AMX
    static constexpr long OF_TABLE = L;  // rows with one table
#else
    static constexpr long OF_TABLE = 4;  // rows in 16 bytes of a vector: a shuffle looks these up in 16 bytes of tables
#endif
    static constexpr long TABLES = TOGETHER / OF_TABLE;

    static INLINE long bytes(long inputs) { return aligned(inputs * 3 / 2 + 16 + inputs / BLOCK); }

    // The layout of TOGETHER rows, of which `row` is one.
    template <class Byte>
    struct Rows {
        Byte* const first;
        const long inputs;

        Rows(Byte* matrix, long row, long inputs)
            : first(matrix + row / TOGETHER * TOGETHER * bytes(inputs)), inputs(inputs) {}
        Byte* tables() const { return first + inputs * 3 / 2 * TOGETHER; }
        Byte* end() const { return first + TOGETHER * bytes(inputs); }

#ifdef HAS_AMX
        // Block after block, because a block is a tile of weights for two steps. Each block has patches, or is read
        // from the original matrix.
        static constexpr int ALL = 255;
        struct Patch {
            uint8_t place[2], byte;  // place: in the first vectors of all lines, followed by all second vectors
        };

        Byte* lower(long line, long i) const { return first + i * 3 / 2 * TOGETHER + line * BLOCK; }
        Byte* codes(long line, long i) const { return first + (i * 3 / 2 + BLOCK) * TOGETHER + line * BLOCK / 2; }
        // Number of patches of the block that begins at input i, or ALL if it is read from the original matrix.
        Byte* exceptions(long i) const { return tables() + 16 * TABLES + i / BLOCK; }
        bool are_read(long i) const { return *exceptions(i) == ALL; }
        // The patches of all blocks, and the number that there is room for.
        Patch* patches() const { return (Patch*)exceptions(inputs); }
        long room() const { return (end() - (Byte*)patches()) / (long)sizeof(Patch); }
        // Apply the patches of a block, whose lines are unpacked to these vectors.
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
        // The first lines of all blocks, then all second lines, and so on: the order in which a panel is multiplied.
        static constexpr int32_t ALL = -1;
        struct Patch {
            uint32_t line;         // number among all lines
            uint8_t vector, byte;  // which vector, and the place in it
            uint8_t upper;         // the upper byte
        };

        long place(long line, long i) const { return line * (inputs / BLOCK) + i / BLOCK; }
        Byte* lower(long line, long i) const { return first + place(line, i) * BLOCK; }
        Byte* codes(long line, long i) const { return first + inputs * TOGETHER + place(line, i) * BLOCK / 2; }
        // Number of patches, which are in the order of lines, or ALL if these rows are read from the original matrix.
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

    // The vector, and the number in it, that place `place` of a line becomes: unpack instructions interleave bytes so.
    static constexpr long vector_of(long place) { return place % 16 / 8; }
    static constexpr long number_of(long place) { return place / 16 * 8 + place % 8; }

    // 2 * L weights as pairs, from a matrix of bf16 numbers. Pairs of bf16 inputs are neighbours, those of floats are L
    // numbers apart.
    static INLINE Ints pairs(const BFloat16* x) { return *(const Unaligned<Ints>*)x; }
    static INLINE Ints pairs(const float* x) {
        const Ints first = *(const Unaligned<Ints>*)x, second = *(const Unaligned<Ints>*)(x + L);
        return (first >> 16 & 0xffff) | (second & ~0xffff);
    }

    // A block of `rows` rows of the original matrix, in the vectors to which its lines would be unpacked.
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
    // Load tables into a vector; unpack a line to two vectors. These need AVX2.
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
    const __m256i twice = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)codes));
    const __m256i down = _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4);  // the upper half
    const __m256i code = _mm256_and_si256(_mm256_srlv_epi32(twice, down), _mm256_set1_epi8(15));
    const __m256i lower = (__m256i)in_register(*(const Unaligned<Ints>*)lower_bytes);
    const __m256i upper = _mm256_shuffle_epi8(table, code);
    two[0] = (Ints)_mm256_unpacklo_epi8(lower, upper), two[1] = (Ints)_mm256_unpackhi_epi8(lower, upper);
#endif
}
#endif

}  // namespace gemm
