// Attention of a step's or a prompt's tokens to the cache and to each other, for one sequence.
//
// Query heads that share a key head are computed together. A vector holds L of their queries; W vectors are computed at
// a time. So one number of a key or a value serves all of them, nothing is transposed, and maxima and sums are computed
// lane by lane. Keys are taken KEYS at a time, with a running maximum and sum (Milakov & Gimelshein 2018, arXiv
// 1805.02867; Dao et al. 2022, arXiv 2205.14135, algorithm 1). Sums are in float32.
//
// The bits of a sum depend on its order, and rows of a tree stand between others that they do not see. So in a step, keys
// go by their positions. A row's near keys are those of its last NEAR to NEAR + KEYS - 1 positions. They are one block,
// added up one by one in their order: there, a key that the row does not see has the weight 0 and leaves no trace. All
// others are far keys, of the cache alone. Their blocks, and the parts that threads take, end at multiples of KEYS. So what
// a row attends to is the same to the bit, whatever other rows a step has and wherever in the text it begins.

#pragma once

#include <algorithm>
#include <limits>

#include "vectors.h"

namespace attention {

constexpr int KEYS = 64, MAX_SIZE = 576;
constexpr long NEAR = 64;   // a guess is at most so deep, so that no far key is one of the step's own
constexpr long PART = 256;  // far keys that a thread takes at a time, at least
constexpr int TILE_QUERIES = 128;  // queries that share the tiles of keys and values
// Lanes of a vector, at most: a wider one than the processor's would stay in memory. Then vectors for sums, and lanes that
// are computed at a time.
#ifdef __AVX512F__
constexpr int WIDEST = 16, REGISTERS = 24, LANES = 48;
#elif defined(__AVX2__)
constexpr int WIDEST = 8, REGISTERS = 8, LANES = 32;
#else
constexpr int WIDEST = 4, REGISTERS = 8, LANES = 32;
#endif
#ifdef HAS_TILES
constexpr bool HAS_TILE_UNIT = true;
#else
constexpr bool HAS_TILE_UNIT = false;
#endif
constexpr float HIDDEN = std::numeric_limits<float>::lowest();

// a * b + sum, lane by lane. For pairs, both products are added, in float32.
template <class Floats>
static inline Floats multiply_add(float a, Floats b, Floats sum) {
    return a * b + sum;
}

#ifdef __AVX512BF16__
typedef int32_t Pair __attribute__((may_alias, aligned(2)));

static inline Lanes<8>::Floats multiply_add(Pair a, Lanes<8>::Ints b, Lanes<8>::Floats sum) {
    return (Lanes<8>::Floats)_mm256_dpbf16_ps((__m256)sum, (__m256bh)(Lanes<8>::Ints{} + a), (__m256bh)b);
}

static inline Lanes<16>::Floats multiply_add(Pair a, Lanes<16>::Ints b, Lanes<16>::Floats sum) {
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

// How queries, keys, values and their weights become the factors of products. Here a product takes its numbers one by
// one, in float32.
struct BySingles {
    static constexpr int TOGETHER = 1;
    typedef float Factor;
    template <int L>
    using Factors = typename Lanes<L>::Floats;

    template <class Floats, class T>
    static void put(T x, long, int lane, Floats& to) {
        ((float*)&to)[lane] = number(x);
    }

    // n keys, or values, of this size as factors. They are converted into room if necessary.
    static const float* keys(const float* x, long, long, float*) { return x; }
    static const float* values(const float* x, long, long, float*) { return x; }
    static const float* keys(const BFloat16* x, long n, long size, float* room) { return values(x, n, size, room); }

    static const float* values(const BFloat16* x, long n, long size, float* room) {
        long i = 0;
        for (; i + 16 <= n * size; i += 16) {
            const Lanes<16>::Ints some = bits<16>(x + i) << 16;
            memcpy(room + i, &some, sizeof some);
        }
        for (; i < n * size; i++) room[i] = number(x[i]);
        return room;
    }

    template <int W, class Floats>
    static const Floats* weights(Floats* p, long, Floats*) {
        return p;
    }
};

#ifdef __AVX512BF16__
// Here a product takes two bf16 numbers at a time, and adds them up in float32. A pair is two neighbouring numbers of a
// key, or the values of two keys. The weights of the values are rounded to bf16 for this, as in torch's kernel.
struct ByPairs {
    static constexpr int TOGETHER = 2;
    typedef Pair Factor;
    template <int L>
    using Factors = typename Lanes<L>::Ints;

    template <class Ints>
    static void put(BFloat16 x, long d, int lane, Ints& to) {
        ((uint32_t*)&to)[lane] |= uint32_t(x) << 16 * (d % 2);
    }

    static const Factor* keys(const BFloat16* x, long, long, Factor*) { return (const Factor*)x; }

    // size is a multiple of 16. If n is odd, the last value is paired with zeros.
    static const Factor* values(const BFloat16* x, long n, long size, Factor* room) {
        for (long j = 0; j < n; j += 2)
            for (long d = 0; d < size; d += 16) {
                Lanes<16>::Ints pairs = bits<16>(x + j * size + d);
                if (j + 1 < n) pairs |= bits<16>(x + (j + 1) * size + d) << 16;
                memcpy(room + j / 2 * size + d, &pairs, sizeof pairs);
            }
        return room;
    }

    template <int W, class Ints, class Floats>
    static const Ints* weights(Floats* p, long n, Ints* room) {
        std::fill(p + n * W, p + (n + 1) * W, Floats{});
        for (long i = 0; i < (n + 1) / 2 * W; i++) {
            const Floats* two = p + i / W * 2 * W + i % W;
            room[i] = rounded<Ints>(two[0]) | rounded<Ints>(two[W]) << 16;
        }
        return room;
    }
};
#endif

// `multiply_tile` for m rows of c. Meanwhile, `bytes` bytes from `next` on are prefetched.
template <class By, int W, class Floats, class Factors>
static inline void multiply(Floats* c, const typename By::Factor* a, long row, long column, const Factors* b, long m,
                            long k, const void* next, long bytes) {
    constexpr int TILE = std::min(8, REGISTERS / W);
    long i = 0;
    for (; i + TILE <= m; i += TILE) {
        for (long byte = bytes * i / m; byte < bytes * (i + TILE) / m; byte += 64)
            __builtin_prefetch((const char*)next + byte, 0, 2);
        multiply_tile<By, W, TILE>(c + i * W, a + i * row, row, column, b, k);
    }
    for (; i < m; i++) multiply_tile<By, W, 1>(c + i * W, a + i * row, row, column, b, k);
}

// Scores that are capped: cap * tanh(score / cap).
template <int L, class Floats>
static inline Floats capped(Floats score, float cap) {
    const Floats power = exponential<L>((score < 0 ? score : -score) * (2 / cap));
    const Floats size = cap * (1.0f - power) / (1.0f + power);
    return score < 0 ? -size : size;
}

// The queries of some lanes over some of the keys: unnormalised sums, to be joined with those over the other keys.
struct Part {
    float* largest;  // [queries]
    float* total;    // [queries]
    float* sums;     // [queries][value_size]
};

// What `Attention::run` needs beside registers. It lies in the caller's room, for a thread's stack may be small.
template <class By, int L, int W>
struct Space {
    typedef typename Lanes<L>::Floats Floats;
    typedef typename By::template Factors<L> Factors;

    Floats sums[MAX_SIZE * W];
    Factors q[MAX_SIZE / By::TOGETHER * W], weights[KEYS / By::TOGETHER * W];
    typename By::Factor room[KEYS / By::TOGETHER * MAX_SIZE];
    Floats p[(KEYS + 1) * W];  // and further ones behind, if there are more near keys: see `room_for`
};

// The end of the part of far keys in which position `from` lies. There are two parts for each doubling of a text.
static inline long end_of_part(long from) {
    long size = PART;
    while (4 * size <= from) size *= 2;
    return from / size * size + size;
}

template <class T>
struct Attention;

#ifdef HAS_TILES
static void block_in_tiles(const Attention<BFloat16>& all, long head, long first, long begin, long end,
                           const Part* part, void* room);  // tile_attention.h
#endif

template <class T>
struct Attention {
    const T *query, *key, *value;
    const T* mask;       // [rows][masked], added to the scores of the last keys
    const bool* hidden;  // in place of a mask: which of them are not seen. With neither, attention is causal
    T* out;
    long heads, key_heads, rows, keys, masked;
    long size, value_size;  // numbers of a head of queries and keys, and of values and results
    long head_stride, row_stride, key_stride, value_stride;
    float scaling;
    long start = 0;              // position of the first key
    const long* near = nullptr;  // [rows]: the first of a row's near keys. Without it, all keys are far
    float cap = 0;               // of scores, or 0
    const T* sinks = nullptr;    // [heads]: the score of a key without a value, of which `join` knows; or null
    const T* more = nullptr;     // the last more_size numbers of each key, which lie apart; or null
    long more_size = 0, more_stride = 0;

    long key_size() const { return size - more_size; }  // numbers that lie together
    long queries() const { return heads / key_heads * rows; }  // of a key head
    bool is_causal() const { return !mask && !hidden; }
    long free() const { return keys - (is_causal() ? rows : masked); }  // number of first keys, which all rows see
    bool in_tiles() const {
        return HAS_TILE_UNIT && sizeof(T) == 2 && size % 32 == 0 && value_size % 32 == 0 && !more;
    }
    long lanes() const { return in_tiles() ? TILE_QUERIES : LANES; }
    long blocks() const { return (queries() + lanes() - 1) / lanes(); }

    // Queries of a key head, from `first` on, `lanes` at most, over keys begin..end-1, the far ones. Without a part, these
    // are all keys, and the result goes to `out`. room: this thread's own, `room_for` bytes, aligned to 64 bytes.
    void block(long head, long first, long begin, long end, const Part* part, void* room) const {
#ifdef HAS_TILES
        if constexpr (sizeof(T) == 2)
            if (in_tiles()) return block_in_tiles(*this, head, first, begin, end, part, room);
#endif
#ifdef __AVX512BF16__
        if constexpr (sizeof(T) == 2)
            if (key_size() % 16 == 0 && more_size % 16 == 0 && value_size % 16 == 0 && !floats_are_faster())
                return block_by<ByPairs>(head, first, begin, end, part, room);
#endif
        block_by<BySingles>(head, first, begin, end, part, room);
    }

    // The same over the near keys, for LANES queries at most.
    void near_block(long head, long first, const Part* part, void* room) const {
        block_by<BySingles, true>(head, first, 0, keys, part, room);
    }

    // Join `count` parts of a query of a key head. Those of all its queries lie behind those of the part before.
    void join(long head, long query, const Part& parts, long count) const {
        const long n = queries(), of = head * (heads / key_heads) + query / rows;
        const float sink = sinks ? number(sinks[of]) : HIDDEN;
        float largest = sink, total = 0, sums[MAX_SIZE] = {};
        for (long i = 0; i < count; i++) largest = std::max(largest, parts.largest[i * n + query]);
        for (long i = 0; i < count; i++) {
            const float share = exponential<8>(Lanes<8>::Floats{} + parts.largest[i * n + query] - largest)[0];
            total += share * parts.total[i * n + query];
            for (long d = 0; d < value_size; d++) sums[d] += share * parts.sums[(i * n + query) * value_size + d];
        }
        if (sinks) total += exponential<8>(Lanes<8>::Floats{} + sink - largest)[0];
        T* to = out + (query % rows * heads + of) * value_size;
        for (long d = 0; d < value_size; d++) store(sums[d] / total, to + d);
    }

   private:
    // What is added to the score of key j of a row.
    template <bool IS_NEAR>
    float added(long row, long j) const {
        if (near && (j < near[row]) == IS_NEAR) return HIDDEN;
        const long masked_key = j - free();
        if (masked_key < 0) return 0;
        const long place = row * masked + masked_key;
        return mask ? number(mask[place]) : (hidden ? hidden[place] : masked_key > row) ? HIDDEN : 0.0f;
    }

    template <class By, bool IS_NEAR = false>
    void block_by(long head, long first, long begin, long end, const Part* part, void* room) const {
        const long left = queries() - first;
        constexpr int NARROW = std::min(8, WIDEST);
        if (left <= 8)
            run<By, NARROW, 8 / NARROW, IS_NEAR>(head, first, begin, end, part, room);
        else if (left <= 16)
            run<By, WIDEST, 16 / WIDEST, IS_NEAR>(head, first, begin, end, part, room);
        else if (left <= 32)
            run<By, WIDEST, 32 / WIDEST, IS_NEAR>(head, first, begin, end, part, room);
        else
            run<By, WIDEST, LANES / WIDEST, IS_NEAR>(head, first, begin, end, part, room);
    }

    template <class By, int L, int W, bool IS_NEAR>
    void run(long head, long first, long begin, long end, const Part* part, void* of_thread) const {
        typedef typename Lanes<L>::Floats Floats;
        constexpr int TOGETHER = By::TOGETHER;
        auto& [sums, q, weights, room, first_p] = *(Space<By, L, W>*)of_thread;
        Floats* const p = first_p;
        const long groups = heads / key_heads;
        const int lanes = std::min<long>(L * W, queries() - first);
        const T *keys_here = key + head * key_stride, *values_here = value + head * value_stride;
        const T* const more_here = more + head * more_stride;
        const long of_key = key_size();
        Floats largest[W], total[W] = {};
        memset(q, 0, sizeof q);
        std::fill(sums, sums + value_size * W, Floats{});
        std::fill(largest, largest + W, Floats{} + HIDDEN);
        long row[L * W], least_near = keys, most_near = 0;
        T* outs[L * W];
        for (int lane = 0; lane < lanes; lane++) {
            const long of = head * groups + (first + lane) / rows;
            row[lane] = (first + lane) % rows;
            const T* x = query + of * head_stride + row[lane] * row_stride;
            for (long d = 0; d < size; d++) By::put(x[d], d, lane % L, q[d / TOGETHER * W + lane / L]);
            outs[lane] = out + (row[lane] * heads + of) * value_size;
            if (near) least_near = std::min(least_near, near[row[lane]]), most_near = std::max(most_near, near[row[lane]]);
        }
        long from = free();  // the first key that some row does not see; near ones, behind the first that all rows have
        if (is_causal()) {
            end = std::min(end, from + *std::max_element(row, row + lanes) + 1);
            from += *std::min_element(row, row + lanes) + 1;
        }
        if (IS_NEAR)
            begin = least_near;
        else
            from = std::min(from, least_near);
        for (long n; begin < end; begin += n) {
            n = IS_NEAR ? end - begin : std::min<long>(KEYS - (start + begin) % KEYS, end - begin);
            std::fill(p, p + n * W, Floats{});
            for (long j = 0; j < n; j += KEYS) {
                const long m = std::min<long>(KEYS, n - j);
                multiply<By, W>(p + j * W, By::keys(keys_here + (begin + j) * of_key, m, of_key, room), of_key / TOGETHER,
                                1, q, m, of_key / TOGETHER, values_here + (begin + j) * value_size,
                                m * value_size * sizeof(T));
                if (more)
                    multiply<By, W>(p + j * W, By::keys(more_here + (begin + j) * more_size, m, more_size, room),
                                    more_size / TOGETHER, 1, q + of_key / TOGETHER * W, m, more_size / TOGETHER, nullptr, 0);
            }
            for (long j = 0; j < n * W; j++) p[j] *= scaling;
            if (cap)
                for (long j = 0; j < n * W; j++) p[j] = capped<L>(p[j], cap);
            const auto hide = [&](long j, long last) {
                for (; j < last; j++)
                    for (int lane = 0; lane < lanes; lane++)
                        ((float*)(p + (j - begin) * W))[lane] += added<IS_NEAR>(row[lane], j);
            };
            if (IS_NEAR && least_near < most_near) hide(begin, std::min(from, most_near));
            hide(std::max(begin, from), begin + n);
            for (int w = 0; w < W; w++) {
                const Floats before = largest[w];
                for (long j = w; j < n * W; j += W) largest[w] = p[j] > largest[w] ? p[j] : largest[w];
                const Floats fade = exponential<L>(before - largest[w]);
                total[w] *= fade;
                for (long d = w; d < value_size * W; d += W) sums[d] *= fade;
                for (long j = w; j < n * W; j += W) total[w] += p[j] = exponential<L>(p[j] - largest[w]);
            }
            for (long j = 0; j < n; j += KEYS) {
                const long m = std::min<long>(KEYS, n - j);
                multiply<By, W>(sums, By::values(values_here + (begin + j) * value_size, m, value_size, room), 1,
                                value_size, By::template weights<W>(p + j * W, m, weights), value_size,
                                (m + TOGETHER - 1) / TOGETHER,
                                keys_here + (begin + j + KEYS) * of_key, m * of_key * sizeof(T));
            }
        }
        const float *const of_lanes = (const float*)sums, *const totals = (const float*)total;
        if (!part) {
            for (int lane = 0; lane < lanes; lane++)
                for (long d = 0; d < value_size; d++) store(of_lanes[d * W * L + lane] / totals[lane], outs[lane] + d);
            return;
        }
        memcpy(part->largest + first, largest, lanes * sizeof(float));
        memcpy(part->total + first, total, lanes * sizeof(float));
        for (int lane = 0; lane < lanes; lane++)
            for (long d = 0; d < value_size; d++)
                part->sums[(first + lane) * value_size + d] = of_lanes[d * W * L + lane];
    }
};

}  // namespace attention
