// Attention in bf16 by the processor's matrix unit (`amx.h`), with the arguments and the sums of `attention.h`.
//
// The lanes of a vector are SIDE queries that share a key head. The unit multiplies them by SIDE keys. The scores
// become weights, which are rounded to bf16. The unit multiplies these by SIDE columns of the values.

#pragma once

#include <new>

#include "attention.h"
#include "amx.h"

namespace attention {

#ifdef HAS_AMX

using gemm::DEPTH, gemm::repeat, gemm::SIDE;

struct TileBlock {
    static constexpr long KEYS = 256, GROUPS = TILE_QUERIES / SIDE, STEPS = MAX_SIZE / DEPTH, PLACES = MAX_SIZE / SIDE;
    typedef Ints Tile[SIDE];

    const Attention<BFloat16>& all;
    const long head, first, size = all.size, value_size = all.value_size;
    const bool is_causal = all.is_causal();
    const long free = all.free();
    const BFloat16* key;  // the first key of this block
    long lead;            // empty places before it, so that a position's place in a tile never changes
    alignas(64) Tile queries[GROUPS][STEPS];             // pairs of numbers by queries
    alignas(64) Tile values[KEYS / DEPTH][PLACES];       // pairs of keys by numbers
    alignas(64) Tile weights[KEYS / DEPTH];              // queries by pairs of keys
    alignas(64) BFloat16 last_keys[SIDE * MAX_SIZE];     // a copy of the last keys if they do not fill a tile
    alignas(64) Floats scores[KEYS + 4 * SIDE], products[4][SIDE];  // by queries; by numbers
    alignas(64) Floats sums[GROUPS][SIDE][PLACES], largest[GROUPS], total[GROUPS];
    int row[GROUPS][SIDE];

    TileBlock(const Attention<BFloat16>& all, long head, long first) : all(all), head(head), first(first) {}

    int groups() const { return std::min<long>(GROUPS, (all.queries() - first + SIDE - 1) / SIDE); }
    int lanes(int group) const { return std::min<long>(SIDE, all.queries() - first - group * SIDE); }
    long head_of(int group, int lane) const {
        return head * (all.heads / all.key_heads) + (first + group * SIDE + lane) / all.rows;
    }

    void take_queries(int group) {
        for (int lane = 0; lane < SIDE; lane++) row[group][lane] = (first + group * SIDE + lane) % all.rows;
        for (long step = 0; step < size / DEPTH; step++) {
            Ints v[SIDE] = {};
            for (int lane = 0; lane < lanes(group); lane++) {
                const long offset = head_of(group, lane) * all.head_stride + row[group][lane] * all.row_stride;
                v[lane] = *(const gemm::Unaligned<Ints>*)(all.query + offset + step * DEPTH);
            }
            transpose(v);
            memcpy(queries[group][step], v, sizeof v);
        }
        for (auto& of_lane : sums[group]) std::fill(of_lane, of_lane + value_size / SIDE, Floats{});
        largest[group] = Floats{} + HIDDEN, total[group] = Floats{};
    }

    // n keys and values from key `begin` on.
    void take_keys(long begin, long n) {
        const BFloat16* const value = all.value + head * all.value_stride + begin * value_size;
        key = all.key + head * all.key_stride + begin * size, lead = (all.start + begin) % DEPTH;
        memcpy(last_keys, key + n / SIDE * SIDE * size, n % SIDE * size * sizeof(BFloat16));
        const long end = lead + n;
        for (long j = 0; j < (end + DEPTH - 1) / DEPTH * DEPTH; j += 2) {
            const BFloat16* const a = lead <= j && j < end ? value + (j - lead) * value_size : nullptr;
            const BFloat16* const b = lead <= j + 1 && j + 1 < end ? value + (j + 1 - lead) * value_size : nullptr;
            for (long place = 0; place < value_size / SIDE; place += 2)
                pair(a ? a + place * SIDE : a, b ? b + place * SIDE : b, &values[j / DEPTH][place][j % DEPTH / 2]);
        }
    }

    // DEPTH numbers of a value, paired with those of the next value: a row of each of two tiles. Null: zeros.
    static INLINE void pair(const BFloat16* x, const BFloat16* next, Ints* to) {
        const __m512i a = x ? _mm512_loadu_si512(x) : _mm512_setzero_si512();
        const __m512i b = next ? _mm512_loadu_si512(next) : _mm512_setzero_si512();
        const __m512i of_b = _mm512_add_epi32(gemm::PLACES, _mm512_set1_epi32(32));
        const __m512i halves = _mm512_or_si512(gemm::PLACES, _mm512_slli_epi32(of_b, 16));  // a0 b0 a1 b1 ...
        to[0] = (Ints)_mm512_permutex2var_epi16(a, halves, b);
        to[SIDE] = (Ints)_mm512_permutex2var_epi16(a, _mm512_add_epi16(halves, _mm512_set1_epi16(16)), b);
    }

    // Add n keys to the attention of a group's queries.
    void see(int group, long begin, long n) {
        const int* const rows = row[group];
        if (is_causal && begin > free + *std::max_element(rows, rows + lanes(group))) return;
        std::fill(scores, scores + lead, Floats{} + HIDDEN);
        for (long j = 0; j < n; j += 4 * SIDE) score(group, j, n);
        const long seen = is_causal ? *std::min_element(rows, rows + lanes(group)) + 1 : 0;  // by all rows, masked
        Floats now = largest[group], *const own = scores + lead;
        for (long j = 0; j < n; j++) own[j] *= all.scaling;
        if (all.cap)
            for (long j = 0; j < n; j++) own[j] = capped(own[j], all.cap);
        for (long j = std::max(0L, free + seen - begin); j < n; j += SIDE) mask(group, begin + j - free, own + j, n - j);
        if (all.near)
            for (int lane = 0; lane < lanes(group); lane++)
                for (long j = std::max(0L, all.near[rows[lane]] - begin); j < n; j++) own[j][lane] = HIDDEN;
        for (long j = 0; j < n; j++) now = own[j] > now ? own[j] : now;
        const Floats fade = exponential<SIDE>(largest[group] - now);
        total[group] *= fade, largest[group] = now;
        const long end = lead + n;
        for (long j = 0; j < end; j += DEPTH) total[group] += weigh(now, j, end);
        for (long place = 0; place < value_size / SIDE;)
            place += value_size / SIDE - place < 4 ? add<2>(group, place, end, fade) : add<4>(group, place, end, fade);
    }

    // The scores of up to four tiles of keys.
    INLINE void score(int group, long j, long n) {
        repeat<4>([](auto tile) { gemm::clear_tile<tile>(); });
        for (long step = 0; step < size / DEPTH; step++) {
            gemm::load_tile<7>(queries[group][step], gemm::TILE_BYTES / SIDE);
            repeat<4>([&](auto tile) {
                const long of = j + tile * SIDE;
                if (of >= n) return;
                constexpr int KEY = 4 + tile % 3;
                const BFloat16* const keys = of + SIDE > n ? last_keys : key + of * size;
                gemm::load_tile<KEY>(keys + step * DEPTH, size * sizeof(BFloat16));
                gemm::add_tiles<tile, KEY, 7>();
            });
        }
        repeat<4>([&](auto tile) { gemm::store_tile<tile>(scores + lead + j + tile * SIDE); });
    }

    // Write the weights of DEPTH keys as a tile. Returns their sum.
    INLINE Floats weigh(Floats largest, long j, long n) {
        Floats added[2] = {};
        Ints v[SIDE];
        UNROLL for (int i = 0; i < SIDE; i++) {
            Ints halves[2];
            UNROLL for (int k = 0; k < 2; k++) {
                const Floats weight = j + 2 * i + k < n ? exponential<SIDE>(scores[j + 2 * i + k] - largest) : Floats{};
                added[k] += weight;
                halves[k] = (Ints)_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)weight));
            }
            v[i] = halves[0] | halves[1] << 16;
        }
        transpose(v);
        memcpy(weights[j / DEPTH], v, sizeof v);
        return added[0] + added[1];
    }

    // Add D tiles of the weighted values. Returns D.
    template <int D>
    INLINE int add(int group, long place, long n, Floats fade) {
        repeat<D>([](auto tile) { gemm::clear_tile<tile>(); });
        for (long j = 0; j < n; j += DEPTH) {
            gemm::load_tile<7>(weights[j / DEPTH], gemm::TILE_BYTES / SIDE);
            repeat<D>([&](auto tile) {
                constexpr int VALUE = 4 + tile % 3;
                gemm::load_tile<VALUE>(values[j / DEPTH][place + tile], gemm::TILE_BYTES / SIDE);
                gemm::add_tiles<tile, 7, VALUE>();
            });
        }
        repeat<D>([&](auto tile) { gemm::store_tile<tile>(products[tile]); });
        for (int lane = 0; lane < lanes(group); lane++)
            repeat<D>([&](auto tile) {
                Floats& sum = sums[group][lane][place + tile];
                sum = sum * fade[lane] + products[tile][lane];
            });
        return D;
    }

    // Add the mask to the scores of up to SIDE masked keys, from masked key j on.
    INLINE void mask(int group, long j, Floats* places, long n) const {
        const __mmask16 some = n < SIDE ? (1 << n) - 1 : -1;
        Floats added[SIDE] = {};
        if (is_causal) {
            const Ints rows = *(const gemm::Unaligned<Ints>*)row[group];
            for (int i = 0; i < SIDE; i++) added[i] = Ints{} + int(j + i) > rows ? Floats{} + HIDDEN : Floats{};
        } else {
            for (int lane = 0; lane < lanes(group); lane++) {
                const long of = row[group][lane] * all.masked + j;
                if (all.mask) {
                    const __m256i numbers = _mm256_maskz_loadu_epi16(some, all.mask + of);
                    added[lane] = (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(numbers), 16);
                } else {
                    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(some, all.hidden + of));
                    added[lane] = (Ints)bytes != 0 ? Floats{} + HIDDEN : Floats{};
                }
            }
            transpose(added);
        }
        for (long i = 0; i < std::min<long>(n, SIDE); i++) places[i] += added[i];
    }

    void put(int group, const Part* part) {
        for (int lane = 0; lane < lanes(group); lane++) {
            const long query = first + group * SIDE + lane;
            BFloat16* const out = all.out + (row[group][lane] * all.heads + head_of(group, lane)) * value_size;
            if (part) part->largest[query] = largest[group][lane], part->total[query] = total[group][lane];
            for (long place = 0; place < value_size / SIDE; place++) {
                const Floats sum = sums[group][lane][place];
                if (part)
                    store(sum, part->sums + query * value_size + place * SIDE);
                else
                    store(sum / total[group][lane], out + place * SIDE);
            }
        }
    }

    void run(long begin, long end, const Part* part) {
        gemm::set_up_tiles();
        for (int group = 0; group < groups(); group++) take_queries(group);
        const long rows = first % all.rows + std::min<long>(all.queries() - first, TILE_QUERIES);  // if in one head
        if (is_causal) end = std::min(end, free + std::min(rows, all.rows));
        for (long n; begin < end; begin += n) {
            n = std::min<long>(KEYS - (all.start + begin) % KEYS, end - begin);
            take_keys(begin, n);
            for (int group = 0; group < groups(); group++) see(group, begin, n);
        }
        for (int group = 0; group < groups(); group++) put(group, part);
    }
};

static void block_in_tiles(const Attention<BFloat16>& all, long head, long first, long begin, long end,
                           const Part* part, void* room) {
    (new (room) TileBlock(all, head, first))->run(begin, end, part);
}

#endif

// Bytes of a thread's room for `Attention::block`, and for `near_block`. keys_of_step: number of the step's own keys.
static inline long room_for(long keys_of_step) {
    const long more = padded(std::max(0L, NEAR + keys_of_step));  // in addition to KEYS
    const long bytes = sizeof(Space<BySingles>) + more * QUERIES * (long)sizeof(float);
#ifdef HAS_AMX
    return aligned(std::max<long>(bytes, sizeof(TileBlock)));
#else
    return aligned(bytes);
#endif
}

}  // namespace attention
