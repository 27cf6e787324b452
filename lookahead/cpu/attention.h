// Attention of a step's or a prompt's tokens to the cache and to each other, for one sequence.
//
// It takes blocks of KEYS keys, with a running maximum and sum (Milakov & Gimelshein 2018, arXiv 1805.02867; Dao et al.
// 2022, arXiv 2205.14135, algorithm 1). In a vector of scores, each lane is a key: keys are transposed, and unpacked to
// float32, once for all queries that share their head. In a vector of sums, each lane is a number of a value. So both
// GEMMs have queries as rows, and no lane is idle, however few queries there are. Sums are in float32.
//
// The bits of a sum depend on its order, and between the rows of a tree there are rows that they do not see. So the
// order of a step's keys depends on their positions alone. A row's near keys are those of its last NEAR to NEAR + KEYS
// - 1 positions. They are one block, added one by one in their order; a key that the row does not see has the weight 0
// and changes nothing. All others are far keys, of the cache or of the chain of a prompt. Their blocks, and the parts
// for threads, end at multiples of KEYS, and the lane of a key follows from its position. So a row's attention has the
// same bits, whatever other rows a step has and wherever in the text it begins.

#pragma once

#include <algorithm>
#include <limits>

#include "vectors.h"

namespace attention {

typedef Lanes<WIDTH>::Floats Floats;
typedef Lanes<WIDTH>::Ints Ints;

constexpr int KEYS = 64, MAX_SIZE = 576;
constexpr long NEAR = 64;    // depth of the deepest guess; so only in chains are some of a step's own keys far
constexpr long PART = 256;   // least number of far keys in a thread's part
constexpr int QUERIES = 48;  // queries of a block. Transposing keys takes a thirtieth of the time of their GEMMs
constexpr int TILE_QUERIES = 128;  // queries that share the tiles of keys and values
// The register tile has ROWS queries by VECTORS. An FMA takes 4 cycles, and each cycle starts two: 8 sums hide that.
#ifdef __AVX512F__
constexpr int ROWS = 6, VECTORS = 4;  // 24 sums, 4 vectors of b, a number of a: 29 of 32 registers
#else
constexpr int ROWS = 6, VECTORS = 2;  // 12, 2 and 1: 15 of 16 registers
#endif
#ifdef HAS_AMX
constexpr bool HAS_TILE_UNIT = true;
#else
constexpr bool HAS_TILE_UNIT = false;
#endif
constexpr float HIDDEN = std::numeric_limits<float>::lowest();
constexpr float ABSENT = -std::numeric_limits<float>::infinity();  // the score of a lane without a key: its weight is 0

// n, rounded up to whole vectors.
static inline long padded(long n) { return (n + WIDTH - 1) / WIDTH * WIDTH; }

// a * b + sum for each lane. For pairs, both products are added, in float32.
static INLINE Floats multiply_add(float a, Floats b, Floats sum) { return a * b + sum; }

#ifdef __AVX512BF16__
typedef int32_t Pair __attribute__((may_alias, aligned(2)));

static INLINE Floats multiply_add(Pair a, Ints b, Floats sum) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(Ints{} + a), (__m512bh)b);
}
#endif

// A GEMM: c[i] = scaling * the sum of a[i][j] * b[j] over j < k, in this order; or c[i] += this sum, without scaling,
// if it ADDS. c_row, a_row, b_row: numbers from a row to the next.
template <class By, class B = typename By::Factor>
struct Gemm {
    float* c;
    const typename By::Factor* a;
    const B* b;  // factors, or values that become factors in registers
    long c_row, a_row, b_row, k;
    float scaling = 1;
    Wanted wanted = {};  // prefetched at each j of the first tile

    // For m rows, in register tiles of about equal size, and n vectors.
    template <bool ADDS>
    void run(long m, long n) const {
        const long tiles = (m + ROWS - 1) / ROWS, rows = (m + tiles - 1) / tiles;
        for (long v = 0; v < n; v += v + VECTORS <= n ? VECTORS : 1)
            for (long i = 0; i < m; i += rows) {
                const Gemm some = {c + i * c_row + v * WIDTH, a + i * a_row, b + v * WIDTH, c_row, a_row, b_row, k,
                                   scaling, i + v ? Wanted{} : wanted};
                if (v + VECTORS <= n)
                    some.template tile_of<ADDS, VECTORS>(std::min(rows, m - i));
                else
                    some.template tile_of<ADDS, 1>(std::min(rows, m - i));
            }
    }

   private:
    template <bool ADDS, int N, int M = ROWS>
    INLINE void tile_of(long rows) const {
        if constexpr (M > 0) {
            if (rows == M)
                tile<ADDS, M, N>();
            else
                tile_of<ADDS, N, M - 1>(rows);
        }
    }

    template <bool ADDS, int M, int N>
    void tile() const {
        Floats sums[M][N];
        UNROLL for (int i = 0; i < M; i++)
            UNROLL for (int v = 0; v < N; v++) sums[i][v] = ADDS ? load(c + i * c_row + v * WIDTH) : Floats{};
        for (long j = 0; j < k; j++) {
            typename By::Factors factors[N];
            wanted.prefetch(j);
            UNROLL for (int v = 0; v < N; v++) factors[v] = By::load(b + j * b_row + v * WIDTH);
            UNROLL for (int i = 0; i < M; i++)
                UNROLL for (int v = 0; v < N; v++) sums[i][v] = multiply_add(a[i * a_row + j], factors[v], sums[i][v]);
        }
        UNROLL for (int i = 0; i < M; i++)
            UNROLL for (int v = 0; v < N; v++)
                store(ADDS ? sums[i][v] : sums[i][v] * scaling, c + i * c_row + v * WIDTH);
    }
};

// The bits of the first n numbers, at most WIDTH floats or 2 * WIDTH bf16 numbers, followed by zeros.
template <class T>
static INLINE Ints some_bits(const T* x, long n) {
    Ints some = {};
    if (n >= long(sizeof some / sizeof(T))) {
        memcpy(&some, x, sizeof some);
        return some;
    }
#ifdef __AVX512F__
    if constexpr (sizeof(T) == 2) return (Ints)_mm512_maskz_loadu_epi16((1u << n) - 1, x);
    return (Ints)_mm512_maskz_loadu_epi32((1u << n) - 1, x);
#else
    memcpy(&some, x, n * sizeof(T));
    return some;
#endif
}

// How queries, keys, values and weights become factors of products. Here, each lane multiplies one number, in float32.
struct BySingles {
    static constexpr int TOGETHER = 1;
    typedef float Factor;
    typedef Floats Factors;

    // A query of this size as factors.
    template <class T>
    static void take(const T* x, long size, float* to) {
        for (long d = 0; d < size; d++) to[d] = number(x[d]);
    }

    // Store lanes of keys: a float32 number of each in one row; or two bf16 numbers of each, the second in the next
    // row.
    static INLINE void put(Ints lanes, const float*, float* to) { memcpy(to, &lanes, sizeof lanes); }
    static INLINE void put(Ints lanes, const BFloat16*, float* to) {
        const Ints low = lanes << 16, high = lanes & ~0xffff;
        memcpy(to, &low, sizeof low), memcpy(to + KEYS, &high, sizeof high);
    }

    // n values of this size as factors, in rows of `padded` numbers, unpacked into `room` if necessary. wanted:
    // prefetched at each value, or at each pair of values.
    static const float* values(const float* x, long n, long size, long, float* room, Wanted) {
        if (padded(size) == size) return x;
        for (long j = 0; j < n; j++) std::copy_n(x + j * size, size, room + j * padded(size));
        return room;
    }
    static const float* values(const BFloat16* x, long n, long size, long, float* room, Wanted wanted) {
        for (long j = 0; j < n; j++, x += size, room += padded(size)) {
            wanted.prefetch(j);
            long d = 0;
            for (; d + WIDTH <= size; d += WIDTH) store(load(x + d), room + d);
            for (; d < size; d++) room[d] = number(x[d]);
        }
        return room - n * padded(size);
    }

    static void round_weights(float*, long) {}
    template <class T>
    static INLINE Floats load(const T* x) {
        return ::load(x);
    }
};

#ifdef __AVX512BF16__
// Here, each lane multiplies two bf16 numbers and adds the products in float32. A pair is two adjacent elements of a
// key, or the values of two keys. So weights are rounded to bf16, as in torch's kernel.
struct ByPairs {
    static constexpr int TOGETHER = 2;
    typedef Pair Factor;
    typedef Ints Factors;

    static void take(const BFloat16* x, long size, Pair* to) { memcpy(to, x, size * sizeof *x); }

    static INLINE void put(Ints lanes, const BFloat16*, Pair* to) { memcpy(to, &lanes, sizeof lanes); }

    // size is a multiple of WIDTH. lone: 1 if the first value is the second of its pair, otherwise 0.
    static const Pair* values(const BFloat16* x, long n, long size, long lone, Pair* room, Wanted wanted) {
        for (long j = -lone, pair = 0; j < n; j += 2, pair++) {
            Pair* const to = room + pair * size;
            long d = 0;
            wanted.prefetch(pair);
            for (; d + 2 * WIDTH <= size && 0 <= j && j + 1 < n; d += 2 * WIDTH) {
                const Ints first = some_bits(x + j * size + d, 2 * WIDTH);
                const Ints second = some_bits(x + (j + 1) * size + d, 2 * WIDTH);
                const Ints low = interleaved<0>(first, second), high = interleaved<1>(first, second);
                memcpy(to + d, &low, sizeof low), memcpy(to + d + WIDTH, &high, sizeof high);
            }
            for (; d < size; d += WIDTH) {
                Ints both = {};
                if (j >= 0) both |= bits<WIDTH>(x + j * size + d);
                if (j + 1 < n) both |= bits<WIDTH>(x + (j + 1) * size + d) << 16;
                memcpy(to + d, &both, sizeof both);
            }
        }
        return room;
    }

    // Interleave two vectors' first halves, or their second halves.
    template <int HALF>
    static INLINE Ints interleaved(Ints first, Ints second) {
        constexpr Ints LANES = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        constexpr Ints PLACES = (LANES + HALF * WIDTH) * 0x10001 + (2 * WIDTH << 16);  // of a number of each, in a lane
        return (Ints)_mm512_permutex2var_epi16((__m512i)first, (__m512i)PLACES, (__m512i)second);
    }

    static INLINE Ints load(const Pair* x) {
        Ints some;
        memcpy(&some, x, sizeof some);
        return some;
    }

    // Round n weights to bf16, in place.
    static void round_weights(float* p, long n) {
        for (long j = 0; j < n; j += WIDTH) {
            const __m256bh some = _mm512_cvtneps_pbh(_mm512_loadu_ps(p + j));
            memcpy((BFloat16*)p + j, &some, sizeof some);
        }
    }
};
#endif

// Scores that are capped: cap * tanh(score / cap).
static inline Floats capped(Floats score, float cap) {
    const Floats power = exponential<WIDTH>((score < 0 ? score : -score) * (2 / cap));
    const Floats size = cap * (1.0f - power) / (1.0f + power);
    return score < 0 ? -size : size;
}

// Write n keys of this size as columns, the first as column `lead`: a row of KEYS factors holds number d (or pair d) of
// each key. Other columns of the same vectors become 0. wanted: prefetched at each transposition.
template <class By, class T>
static void transpose_keys(const T* x, long n, long size, long lead, typename By::Factor* to, Wanted wanted) {
    constexpr long OF_LANE = sizeof(float) / sizeof(T), TOGETHER = OF_LANE * WIDTH;  // numbers
    long step = 0;
    for (long column = 0; column < lead + n; column += WIDTH)
        for (long d = 0; d < size; d += TOGETHER) {
            const T* const from = x + (column - lead) * size + d;
            typename By::Factor* const rows = to + d / By::TOGETHER * KEYS + column;
            Ints v[WIDTH];
            if (lead <= column && column + WIDTH <= lead + n && d + TOGETHER <= size) {
                const T* key = from;
                UNROLL for (int i = 0; i < WIDTH; i += 4, key += 4 * size) {
                    asm("" : "+r"(key));  // otherwise all addresses are kept, and no registers are left for vectors
                    UNROLL for (int j = 0; j < 4; j++) v[i + j] = some_bits(key + j * size, TOGETHER);
                }
                wanted.prefetch(step++);
                transpose(v);
                UNROLL for (int i = 0; i < WIDTH; i++) By::put(v[i], x, rows + i * OF_LANE / By::TOGETHER * KEYS);
                continue;
            }
            for (int i = 0; i < WIDTH; i++) {
                const long key = column - lead + i;
                v[i] = 0 <= key && key < n ? some_bits(from + i * size, size - d) : Ints{};
            }
            transpose(v);
            for (int i = 0; i < WIDTH && d + i * OF_LANE < size; i++)
                By::put(v[i], x, rows + i * OF_LANE / By::TOGETHER * KEYS);
        }
}

// A block of queries over some of the keys: unnormalised sums, to be joined with those over the other keys.
struct Part {
    float* largest;  // [queries]
    float* total;    // [queries]
    float* sums;     // [queries][value_size]
};

// Memory of `Attention::run`. The caller provides it, because a thread's stack may be small.
template <class By>
struct Space {
    float sums[QUERIES * MAX_SIZE];         // [queries][padded value_size]
    typename By::Factor q[QUERIES * MAX_SIZE];  // [queries][size]
    typename By::Factor room[KEYS * MAX_SIZE];  // of keys, [size][KEYS], then of values, [keys][padded value_size]
    float p[QUERIES * KEYS];  // scores, then weights. More near keys need more room after it: see `room_for`
};

// The end of the part of far keys that contains position `from`. Each doubling of a text adds two parts.
static inline long end_of_part(long from) {
    long size = PART;
    while (4 * size <= from) size *= 2;
    return from / size * size + size;
}

template <class T>
struct Attention;

#ifdef HAS_AMX
static void block_in_tiles(const Attention<BFloat16>& all, long head, long first, long begin, long end,
                           const Part* part, void* room);  // amx_attention.h
#endif

template <class T>
struct Attention {
    const T *query, *key, *value;
    const T* mask;       // [rows][masked], added to the scores of the last keys
    const bool* hidden;  // [rows][masked], instead of a mask: which keys are hidden. With neither, attention is causal
    T* out;
    long heads, key_heads, rows, keys, masked;
    long size, value_size;  // numbers of a head of queries and keys, and of values and results
    long head_stride, row_stride, key_stride, value_stride;
    float scaling;
    long start = 0;              // position of the first key
    const long* near = nullptr;  // [rows]: the first of a row's near keys. Without it, all keys are far
    float cap = 0;               // bound of scores, or 0
    Weights<T> sinks = {};       // [heads]: the score of a key without a value, which only `join` adds; or null
    const T* more = nullptr;     // the last more_size numbers of each key, if they are stored separately; or null
    long more_size = 0, more_stride = 0;
    const float* biases = nullptr;  // [heads][bias_count], added to the scores of keys by their position; or null
    const long* places = nullptr;   // [rows]: their positions, if there are biases
    long bias_count = 0;
    bool by_distance = false;    // whether biases are by the distance from the row, whose own is the last
    bool rounds_scores = false;  // whether scores with biases are rounded to T
    const T *next_keys = nullptr, *next_values = nullptr;  // what this thread reads after a block; or null

    long key_size() const { return size - more_size; }  // numbers of a key in `key`
    long queries() const { return heads / key_heads * rows; }  // of a key head
    bool is_causal() const { return !mask && !hidden; }
    long free() const { return keys - (is_causal() ? rows : masked); }  // number of first keys, which all rows see
    bool in_tiles() const {
        return HAS_TILE_UNIT && sizeof(T) == 2 && size % 32 == 0 && value_size % 32 == 0 && !more && !biases;
    }
    long lanes() const { return in_tiles() ? TILE_QUERIES : QUERIES; }
    long blocks() const { return (queries() + lanes() - 1) / lanes(); }

    // At most `lanes` queries of a key head, from `first` on, over far keys begin..end-1. Without `part`, these are all
    // keys, and the result goes to `out`. room: this thread's own, `room_for` bytes, aligned to 64 bytes.
    void block(long head, long first, long begin, long end, const Part* part, void* room) const {
#ifdef HAS_AMX
        if constexpr (sizeof(T) == 2)
            if (in_tiles()) return block_in_tiles(*this, head, first, begin, end, part, room);
#endif
#ifdef __AVX512BF16__
        if constexpr (sizeof(T) == 2)
            if (key_size() % 16 == 0 && more_size % 16 == 0 && value_size % 16 == 0 && !floats_are_faster())
                return run<ByPairs>(head, first, begin, end, part, room);
#endif
        run<BySingles>(head, first, begin, end, part, room);
    }

    // The same over the near keys, for at most QUERIES queries.
    void near_block(long head, long first, const Part* part, void* room) const {
        run<BySingles, true>(head, first, 0, keys, part, room);
    }

    // Join `count` parts of a query of a key head. Parts follow each other, each with all queries of the head.
    void join(long head, long query, const Part& parts, long count) const {
        const long n = queries(), of = head * (heads / key_heads) + query / rows;
        const float sink = sinks.numbers ? sinks[of] : HIDDEN;
        float largest = sink, total = 0, sums[MAX_SIZE];
        std::fill_n(sums, value_size, 0.0f);
        for (long i = 0; i < count; i++) largest = std::max(largest, parts.largest[i * n + query]);
        for (long i = 0; i < count; i++) {
            const float share = exponential<8>(Lanes<8>::Floats{} + parts.largest[i * n + query] - largest)[0];
            total += share * parts.total[i * n + query];
            for (long d = 0; d < value_size; d++) sums[d] += share * parts.sums[(i * n + query) * value_size + d];
        }
        if (sinks.numbers) total += exponential<8>(Lanes<8>::Floats{} + sink - largest)[0];
        T* to = out + (query % rows * heads + of) * value_size;
        for (long d = 0; d < value_size; d++) store(sums[d] / total, to + d);
    }

   private:
    // Mask the scores of n keys from `begin` on for a row.
    template <bool IS_NEAR>
    void hide(long row, long begin, long n, float* scores) const {
        if (near) {
            const long at = std::min(std::max(0L, near[row] - begin), n);
            std::fill(scores + (IS_NEAR ? 0 : at), scores + (IS_NEAR ? at : n), HIDDEN);
        }
        const long from = std::max(0L, free() + (is_causal() ? row + 1 : 0) - begin);
        const long of = row * masked + begin - free();
        if (is_causal()) return std::fill(scores + std::min(from, n), scores + n, HIDDEN);
        for (long j = from; j < n && mask; j++) scores[j] += number(mask[of + j]);
        for (long j = from; j < n && hidden; j++) scores[j] = hidden[of + j] ? HIDDEN : scores[j];
    }

    // Add the biases of n keys from `begin` on to the scores of a row of a head. No key is after the row.
    void bias(long of, long row, long begin, long n, float* scores) const {
        const long before = std::max(0L, std::min(n, keys - rows - begin));  // keys before those of the rows
        const float* const own = biases + of * bias_count + (by_distance ? bias_count - 1 - places[row] : 0);
        const float* const cached = own + start + begin;
        for (long j = 0; j < before; j++) scores[j] += cached[j];
        for (long j = before; j < n; j++) scores[j] += own[std::min(places[begin + j - (keys - rows)], places[row])];
        for (long j = 0; j < n && rounds_scores; j++) scores[j] = rounded_to<T>(scores[j]);
    }

    // Turn the scores of a query into weights, and add them to its total. largest: the largest score of earlier blocks.
    // Returns the factor for the sums of earlier blocks.
    template <bool IS_NEAR>
    static float weigh(float* scores, long n, float& largest, Floats& total) {
        const float before = largest;
        Floats most = Floats{} + before;
        for (long j = 0; j < n; j += WIDTH) {
            const Floats some = load(scores + j);
            most = some > most ? some : most;
        }
        most = over_lanes(most, [](Floats a, Floats b) { return a > b ? a : b; });
        largest = most[0];
        const float fade = largest > before ? exponential<WIDTH>(before - most)[0] : 1;
        total *= fade;
        for (long j = 0; j < n; j += WIDTH) {
            const Floats weights = exponential<WIDTH>(load(scores + j) - most);
            store(weights, scores + j);
            if (!IS_NEAR) total += weights;
        }
        if (IS_NEAR)
            for (long j = 0; j < n; j++) total[0] += scores[j];
        return fade;
    }

    // The keys or values that this thread reads after those before `after`. x: those of a head, `size` numbers each.
    // Half of a block is prefetched while the block before is transposed or unpacked, and half during its products.
    static const char* wanted_after(const T* x, long size, const T* next, long after, long end) {
        return (const char*)(after < end || !next ? x + after * size : next);
    }

    template <class By, bool IS_NEAR = false>
    void run(long head, long first, long begin, long end, const Part* part, void* of_thread) const {
        typedef typename By::Factor Factor;
        constexpr long TOGETHER = By::TOGETHER, bytes = sizeof(T);
        auto& [sums, q, room, first_p] = *(Space<By>*)of_thread;
        float* const p = first_p;
        const int count = std::min<long>(QUERIES, queries() - first);
        const T *keys_here = key + head * key_stride, *values_here = value + head * value_stride;
        const T* const more_here = more + head * more_stride;
        const long of_key = key_size(), width = padded(value_size);
        float largest[QUERIES];
        Floats total[QUERIES];
        long row[QUERIES], most_row = 0, least_near = keys;
        const auto head_of = [&](int i) { return head * (heads / key_heads) + (first + i) / rows; };
        for (int i = 0; i < count; i++) {
            row[i] = (first + i) % rows, largest[i] = HIDDEN, total[i] = Floats{};
            By::take(query + head_of(i) * head_stride + row[i] * row_stride, size, q + i * size / TOGETHER);
            most_row = std::max(most_row, row[i]);
            if (near) least_near = std::min(least_near, near[row[i]]);
        }
        std::fill_n(sums, count * width, 0.0f);
        if (is_causal()) end = std::min(end, free() + most_row + 1);
        if (IS_NEAR) begin = least_near;
        for (long n; begin < end; begin += n) {
            n = IS_NEAR ? end - begin : std::min<long>(KEYS - (start + begin) % KEYS, end - begin);
            const long lead = IS_NEAR ? 0 : (start + begin) % WIDTH, columns = padded(lead + n);
            for (long j = 0; j < n; j += KEYS) {
                const long m = std::min<long>(KEYS, n - j), at = begin + j;
                const long k = size / TOGETHER, half = KEYS * of_key * bytes / 2;
                const char* const then = wanted_after(keys_here, of_key, next_keys, at + m, end);
                transpose_keys<By>(keys_here + at * of_key, m, of_key, lead, room, {then, WIDTH * WIDTH * 4 / 2});
                if (more)
                    transpose_keys<By>(more_here + at * more_size, m, more_size, lead, room + of_key / TOGETHER * KEYS,
                                       {(const char*)(more_here + (at + m) * more_size), WIDTH * WIDTH * 4});
                const Gemm<By> gemm = {p + j, q, room, columns, k, KEYS, k, scaling, {then + half, half / k}};
                gemm.template run<false>(count, padded(lead + m) / WIDTH);
            }
            for (int i = 0; i < count; i++) {
                float *const own = p + i * columns, *const sum = sums + i * width;
                for (long j = 0; j < columns && cap; j += WIDTH) store(capped(load(own + j), cap), own + j);
                if (biases) bias(head_of(i), row[i], begin, n, own + lead);
                std::fill(own, own + lead, ABSENT), std::fill(own + lead + n, own + columns, ABSENT);
                hide<IS_NEAR>(row[i], begin, n, own + lead);
                const float fade = weigh<IS_NEAR>(own, columns, largest[i], total[i]);
                if (fade != 1)
                    for (long d = 0; d < width; d += WIDTH) store(load(sum + d) * fade, sum + d);
                By::round_weights(own, columns);
            }
            for (long j = 0; j < n; j += KEYS) {
                const long m = std::min<long>(KEYS, n - j), lone = lead % TOGETHER;  // 1: the first value has no pair
                const long k = (lone + m + TOGETHER - 1) / TOGETHER, half = KEYS * value_size * bytes / 2;
                const T* const v = values_here + (begin + j) * value_size;
                const char* const then = wanted_after(values_here, value_size, next_values, begin + j + m, end);
                const Factor* const weights = (const Factor*)p + (lead + j) / TOGETHER;
                const auto add = [&](const auto* factors, Wanted wanted) {
                    typedef std::decay_t<decltype(*factors)> B;
                    const Gemm<By, B> gemm = {sums, weights, factors, width, columns, width, k, 1, wanted};
                    gemm.template run<true>(count, width / WIDTH);
                };
                if constexpr (TOGETHER == 1)
                    if (count <= ROWS && width == value_size) {  // otherwise unpacking once for several tiles is faster
                        add(v, {then, 2 * half / KEYS});
                        continue;
                    }
                add(By::values(v, m, value_size, lone, room, {then, half / (KEYS / TOGETHER)}), {then + half, half / k});
            }
        }
        for (int i = 0; i < count; i++) {
            const float all = over_lanes(total[i], [](Floats a, Floats b) { return a + b; })[0];
            const float* const sum = sums + i * width;
            if (part) {
                part->largest[first + i] = largest[i], part->total[first + i] = all;
                std::copy_n(sum, value_size, part->sums + (first + i) * value_size);
            } else {
                T* const to = out + (row[i] * heads + head_of(i)) * value_size;
                for (long d = 0; d < value_size; d++) store(sum[d] / all, to + d);
            }
        }
    }
};

}  // namespace attention
