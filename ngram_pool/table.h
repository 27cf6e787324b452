// The table of a pool: the keys of contexts, and entries with what followed them. `table.py` explains the arrays and
// constants, `reference.py` the functions, which it has in Python.

#pragma once

#include <algorithm>
#include <cassert>
#include <cstdint>
#include <cstring>

namespace pool {

constexpr int KINDS = 8, LONGEST = 16, WIDTH = 8, WAYS = 4, ORIGINS = 5;
constexpr int SKIPS[KINDS] = {0, 0, 0, 0, 1, 0, 1, 0};
constexpr int LENGTHS[KINDS] = {16, 8, 3, 2, 3, 1, 2, 0};
constexpr int AMOUNTS = 6, PEAKS = 4, CLASSES = 6;
constexpr double RATES[ORIGINS] = {0.25, 0.25, 0.65, 0.15, 0.1};
constexpr double SLOW_RATE = 0.02;
constexpr int64_t TEXT = 1, LOGITS = 2;
constexpr double ROUNDING = 0.001;
constexpr uint64_t EMPTY = 0;
constexpr uint64_t MULTIPLIERS[LONGEST] = {
    0x435f9d954dd2f8db, 0x5936b47590906bff, 0x7f5bfc234f973999, 0xe887fedcd185f995,
    0xfa6e8d380b37860f, 0x3556b2bf815de45b, 0x14c97c519f59c541, 0x1174374f85fafcc5,
    0x62ef456243625859, 0x710f1a51e8cc3b33, 0xbfc81e7129157e95, 0x1c9b0cb1c755a1d5,
    0x3d14ecd72dcf3917, 0x4f1a6aabc22d6ae7, 0xdc1981e527516317, 0x8ba272d7a7f213c1,
};
constexpr uint64_t SALTS[KINDS] = {
    0xe63374fa161a8ed7, 0x9c9557270bdf1eb2, 0xf8d79eb435bfa3b6, 0x85f95c89fce3396d,
    0x63e18c17035ac378, 0xd8a34f6706961215, 0x8b290503648da9d4, 0xf17471f55e39db6e,
};

// An array that belongs to the caller.
template <class T>
struct Span {
    T* first;
    int64_t size;

    T& operator[](int64_t index) const {
        assert(0 <= index && index < size);
        return first[index];
    }

    Span part(int64_t begin, int64_t count) const {
        assert(0 <= begin && 0 <= count && begin + count <= size);
        return {first + begin, count};
    }
};

using Tokens = Span<const int64_t>;

// Pointers to the arrays of a pool; `native.py` has the same fields.
struct Pool {
    uint64_t* keys;         // [entries]
    uint32_t* learned_at;   // [entries]
    uint8_t* counts;        // [entries][2]
    int32_t* tokens;        // [entries][WIDTH], like the next two
    float* weights;
    uint8_t* sources;
    double* belief;         // [KINDS][AMOUNTS][PEAKS][2]
    double* votes;          // [KINDS][AMOUNTS][CLASSES]
    int64_t entries;
    // The system's functions, which Python calls, too. Linking with them would need glibc 2.29, which is newer than
    // everything else in the package needs.
    double (*exp)(double);
    double (*pow)(double, double);

    uint64_t& key_of(int64_t entry) const { return keys[checked(entry)]; }
    uint32_t& learned_at_of(int64_t entry) const { return learned_at[checked(entry)]; }
    uint8_t* counts_of(int64_t entry) const { return counts + 2 * checked(entry); }
    int32_t* tokens_of(int64_t entry) const { return tokens + WIDTH * checked(entry); }
    float* weights_of(int64_t entry) const { return weights + WIDTH * checked(entry); }
    uint8_t* sources_of(int64_t entry) const { return sources + WIDTH * checked(entry); }

    double* belief_of(int kind, int amount, int peak) const {
        assert(0 <= kind && kind < KINDS && 0 <= amount && amount < AMOUNTS && 0 <= peak && peak < PEAKS);
        return belief + ((kind * AMOUNTS + amount) * PEAKS + peak) * 2;
    }

    double* votes_of(int kind, int amount) const {
        assert(0 <= kind && kind < KINDS && 0 <= amount && amount < AMOUNTS);
        return votes + (kind * AMOUNTS + amount) * CLASSES;
    }

private:
    int64_t checked(int64_t entry) const {
        assert(0 <= entry && entry < entries);
        return entry;
    }
};

// The keys of all kinds of contexts at the end of some tokens; EMPTY for kinds with more tokens.
struct Keys {
    uint64_t of[KINDS];

    explicit Keys(Tokens tokens) {
        uint64_t sums[LONGEST + 1] = {0};
        int known = 0;
        for (; known < std::min<int64_t>(tokens.size, LONGEST); known++) {
            const int64_t token = tokens[tokens.size - 1 - known];
            if (token < 0) break;
            sums[known + 1] = sums[known] + (uint64_t)(token + 1) * MULTIPLIERS[known];
        }
        for (int kind = 0; kind < KINDS; kind++) {
            of[kind] = LENGTHS[kind] <= known ? sums[LENGTHS[kind]] - sums[SKIPS[kind]] + SALTS[kind] : EMPTY;
        }
    }
};

// The first entry of a key's bucket.
static inline int64_t bucket(const Pool& pool, uint64_t key) {
    return (int64_t)(((key >> 32) * (uint64_t)(pool.entries / WAYS)) >> 32) * WAYS;
}

// Prefetch all entries that a context may have; otherwise the processor would wait for each in turn. Always inline,
// because GCC removes calls of a function that only prefetches.
__attribute__((always_inline)) static inline void prefetch(const Pool& pool, Tokens context) {
    for (uint64_t key : Keys(context).of) {
        if (key == EMPTY) continue;
        const int64_t first = bucket(pool, key);
        __builtin_prefetch(&pool.key_of(first));
        __builtin_prefetch(&pool.learned_at_of(first));
        __builtin_prefetch(pool.counts_of(first));
        __builtin_prefetch(pool.sources_of(first));
        for (int64_t entry = first; entry < first + WAYS; entry += 2) {  // two share a cache line
            __builtin_prefetch(pool.tokens_of(entry));
            __builtin_prefetch(pool.weights_of(entry));
        }
    }
}

static inline int64_t find(const Pool& pool, uint64_t key) {
    if (key == EMPTY) return -1;
    const int64_t first = bucket(pool, key);
    for (int64_t entry = first; entry < first + WAYS; entry++) {
        if (pool.key_of(entry) == key) return entry;
    }
    return -1;
}

static inline int64_t age(const Pool& pool, int64_t entry, int64_t clock) {
    return (uint32_t)clock - pool.learned_at_of(entry);  // modulo 2**32, as the clock is
}

static inline int64_t entry_for(const Pool& pool, uint64_t key, int64_t clock) {
    const int64_t first = bucket(pool, key);
    int64_t found = first, oldest = -1, seen = 1;
    for (int64_t entry = first; entry < first + WAYS; entry++) {
        if (pool.key_of(entry) == EMPTY) return entry;
        const int64_t its_age = age(pool, entry, clock), its_seen = pool.counts_of(entry)[0];
        if (its_age * seen > oldest * its_seen) found = entry, oldest = its_age, seen = its_seen;
    }
    return found;
}

static inline void assign(const Pool& pool, int64_t entry, uint64_t key) {
    pool.key_of(entry) = key;
    std::fill_n(pool.counts_of(entry), 2, 0);
    std::fill_n(pool.weights_of(entry), WIDTH, 0.0f);
}

// An entry in registers: WIDTH numbers are two vectors of a size that every processor has.
struct Contents {
    typedef int32_t Ints __attribute__((vector_size(16)));
    typedef float Floats __attribute__((vector_size(16)));
    typedef int64_t Longs __attribute__((vector_size(16)));
    typedef uint8_t Bytes __attribute__((vector_size(WIDTH)));
    typedef int32_t OfBytes __attribute__((vector_size(4 * WIDTH)));

    Ints tokens[2], sources[2];
    Floats weights[2];

    Contents(const Pool& pool, int64_t entry) {
        memcpy(tokens, pool.tokens_of(entry), sizeof tokens);
        memcpy(weights, pool.weights_of(entry), sizeof weights);
        Bytes bytes;
        memcpy(&bytes, pool.sources_of(entry), sizeof bytes);
        const OfBytes wide = __builtin_convertvector(bytes, OfBytes);
        memcpy(sources, &wide, sizeof sources);
    }

    void put(const Pool& pool, int64_t entry) const {
        memcpy(pool.tokens_of(entry), tokens, sizeof tokens);
        memcpy(pool.weights_of(entry), weights, sizeof weights);
        for (int place = 0; place < WIDTH; place++) pool.sources_of(entry)[place] = sources[place / 4][place % 4];
    }

    // The token's place, and whether its origin changes, are unpredictable. So there is only one branch.
    void add(int32_t token, float weight, int32_t source) {
        Ints found[2];
        for (int half = 0; half < 2; half++) found[half] = (tokens[half] == token) & (weights[half] > 0);
        if (any(found[0] | found[1])) {
            for (int half = 0; half < 2; half++) {
                set(sources[half], found[half] & (weights[half] < weight), Ints{} + source);
                set(weights[half], found[half], weights[half] + weight);
            }
            return;
        }
        float held[WIDTH];
        memcpy(held, weights, sizeof held);
        const int lightest = (int)(std::min_element(held, held + WIDTH) - held);
        if (weight <= held[lightest]) return;
        for (int half = 0; half < 2; half++) {
            const Ints is_lightest = Ints{0, 1, 2, 3} + 4 * half == lightest;
            set(tokens[half], is_lightest, Ints{} + token);
            set(sources[half], is_lightest, Ints{} + source);
            set(weights[half], is_lightest, Floats{} + weight);
        }
    }

private:
    static bool any(Ints mask) {
        const Longs halves = (Longs)mask;
        return halves[0] | halves[1];
    }

    template <class T>
    static void set(T& numbers, Ints mask, T wanted) {
        numbers = (T)((mask & (Ints)wanted) | (~mask & (Ints)numbers));
    }
};

static inline void observe(const Pool& pool, const Keys& keys, Tokens tokens, Span<const double> probabilities,
                           int64_t source, int64_t clock) {
    assert(0 <= source && source < ORIGINS);
    for (int kind = 0; kind < KINDS; kind++) {
        if (keys.of[kind] == EMPTY) continue;
        int64_t entry = find(pool, keys.of[kind]);
        if (entry < 0) {
            entry = entry_for(pool, keys.of[kind], clock);
            assign(pool, entry, keys.of[kind]);
        }
        pool.learned_at_of(entry) = (uint32_t)clock;
        uint8_t* const counts = pool.counts_of(entry);
        const double rate = std::max(LENGTHS[kind] == 0 ? SLOW_RATE : RATES[source], 1.0 / (counts[0] + 1));
        counts[0] = (uint8_t)std::min(counts[0] + 1, 255);
        if (source == LOGITS) counts[1] = (uint8_t)std::min(counts[1] + 1, 255);
        Contents contents(pool, entry);
        const float keep = (float)(1 - rate);
        for (auto& weights : contents.weights) weights *= keep;
        for (int64_t column = 0; column < tokens.size; column++) {
            const float weight = (float)(probabilities[column] * rate);
            if (weight > 0) contents.add((int32_t)tokens[column], weight, (int32_t)source);
        }
        contents.put(pool, entry);
    }
}

static inline float held(const Pool& pool, int64_t entry, int64_t token) {
    const int32_t* const tokens = pool.tokens_of(entry);
    const float* const weights = pool.weights_of(entry);
    float weight = 0;
    for (int place = 0; place < WIDTH; place++) {
        if (tokens[place] == token) weight = std::max(weight, weights[place]);  // empty places may hold it, too
    }
    return weight;
}

}  // namespace pool
