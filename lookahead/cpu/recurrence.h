// Layers that keep a state of all positions together, over the rows of a step, which are a forest: before a row come its
// own ancestors, then what the state holds. So a row is computed alike in any company, and rejected rows leave no
// trace. The state itself changes only when the accepted rows are committed.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "vectors.h"

namespace recurrence {

constexpr long MOST_TAPS = 8;  // inputs that a convolution reads, or that a state holds of each channel

typedef Lanes<WIDTH>::Floats Floats;

// n numbers, up to WIDTH, and zeros after them.
template <class T>
static inline Floats some(const T* from, long n) {
    if (n >= WIDTH) return load(from);
    T few[WIDTH] = {};
    if (n > 0) std::copy_n(from, n, few);
    return load(few);
}

template <class T>
static inline Floats some(Weights<T> from, long begin, long n) {
    return from.are_floats ? some((const float*)from.numbers + begin, n) : some((const T*)from.numbers + begin, n);
}

// Store the first n of these numbers, up to WIDTH.
template <class T>
static inline void store_some(Floats x, T* to, long n) {
    T rounded[WIDTH];
    store(x, rounded);
    if (n > 0) std::copy_n(rounded, std::min<long>(n, WIDTH), to);
}

// The last inputs of the convolutions of a layer, and where those of the rows of a step go until they are committed.
template <class T>
struct Inputs {
    T* held;  // [channels][columns], the newest last
    T* of_rows;  // [rows][channels]; null if all rows are committed, one after the other
    long channels;
    long columns;

    // Take the inputs of some rows, in this order. of(row): those of a channel.
    template <class F>
    void take(long channel, const long* rows, long count, F of) const {
        T* const now = held + channel * columns;
        for (long i = 0; i < columns; i++) {
            const long from = i + count;  // of what is held, followed by the new ones
            now[i] = from < columns ? now[from] : of(rows[from - columns]);
        }
    }
};

// A convolution of each channel (`Convolve` in states.py) over the rows of one sequence.
template <class T>
struct Convolution {
    const T* x;               // [rows][width], and so is `out`
    const Weights<T> weight;  // [width][taps]
    const Weights<T> bias;    // [width], or null
    T* out;
    long width, taps, rows;
    const long* parents;    // [rows]: of each row; -1: what is held comes before it
    Inputs<T> inputs;
    long first;             // channel of these that belongs to the first number of a row
    Floats (*activated)(Floats);  // of sums. One call for WIDTH of them takes less than it would to compile this for each

    // Channels begin..end-1.
    void compute(long begin, long end) const {
        for (; begin < end; begin += WIDTH) block(begin, std::min<long>(WIDTH, end - begin));
    }

    void block(long begin, long n) const {
        Floats weights[MOST_TAPS], held[MOST_TAPS];
        for (long i = 0; i < taps; i++) {
            float of_tap[WIDTH] = {};
            T of_column[WIDTH] = {};
            for (long c = 0; c < n; c++) {
                const long channel = first + begin + c, column = inputs.columns - taps + i;
                of_tap[c] = weight[(begin + c) * taps + i];
                of_column[c] = column < 0 ? T{} : inputs.held[channel * inputs.columns + column];
            }
            weights[i] = load(of_tap), held[i] = load(of_column);
        }
        const Floats added = bias.numbers ? some(bias, begin, n) : Floats{};
        for (long row = 0; row < rows; row++) {
            const T* const now = x + row * width + begin;
            Floats sum = added;
            for (long i = taps - 1, at = row; i >= 0; i--) {
                sum += weights[i] * (at < 0 ? held[taps + at] : some(x + at * width + begin, n));
                at = at < 0 ? at - 1 : parents[at];
            }
            store_some(activated(sum), out + row * width + begin, n);
            if (inputs.of_rows) std::copy_n(now, n, inputs.of_rows + row * inputs.channels + first + begin);
        }
        if (inputs.of_rows) return;
        for (long c = begin; c < begin + n; c++) {
            const long before = std::max(rows - inputs.columns, 0L);
            long last[MOST_TAPS];
            for (long i = before; i < rows; i++) last[i - before] = i;
            inputs.take(first + c, last, rows - before, [&](long row) { return x[row * width + c]; });
        }
    }
};

constexpr long VECTORS = 4;
constexpr long BLOCK = VECTORS * WIDTH;  // values of a head that are computed together: each column of a state by itself
constexpr long MOST_KEYS = 256;          // of a head of a state

// The state of a recurrence, S, and what the rows of a step do to it until they are committed:
// S = decay * S of the row before + key update^T. A head has one decay, or one for each of its keys.
struct State {
    float* held;     // [heads][keys][values], or [heads][values][keys]
    bool is_by_values;
    float* of_rows;  // [rows][heads] of decays, keys and an update; null if all rows are committed, one after the other
    long heads, keys, values, decays;

    float* update_of(long row, long head) const { return of_rows + (row * heads + head) * (decays + keys + values); }

    // Call f(number of a state by values, place in the block) for n values of a head, from `first` on. A few keys at a
    // time, for one of the two lies across.
    template <class F>
    void for_block(long head, long first, long n, F f) const {
        float* const at = held + (head * values + first) * keys;
        for (long begin = 0; begin < keys; begin += WIDTH)
            for (long i = 0; i < n; i++)
                for (long key = begin; key < std::min(begin + WIDTH, keys); key++) f(at[i * keys + key], key * BLOCK + i);
    }

    // n values of a head, from `first` on, as a block [keys][BLOCK], and back.

    void load(long head, long first, long n, float* block) const {
        if (n < BLOCK) std::fill_n(block, keys * BLOCK, 0.0f);
        if (is_by_values) return for_block(head, first, n, [=](float x, long i) { block[i] = x; });
        const float* from = held + head * keys * values + first;
        for (long key = 0; key < keys; key++, from += values, block += BLOCK) std::copy_n(from, n, block);
    }

    void store(long head, long first, long n, const float* block) const {
        if (is_by_values) return for_block(head, first, n, [=](float& x, long i) { x = block[i]; });
        float* to = held + head * keys * values + first;
        for (long key = 0; key < keys; key++, to += values, block += BLOCK) std::copy_n(block, n, to);
    }

    // Take the updates of some rows, in this order.
    void take(long head, const long* rows, long count) const;
};

// What a block holds for a key: sum over i of key[i] * from[i]. Rounded alike wherever it is called, as is the next one.
static __attribute__((noinline)) void recall(const float* from, long keys, const float* key, float* sums) {
    Floats sum[VECTORS] = {};
    for (long i = 0; i < keys; i++)
        for (long j = 0; j < VECTORS; j++) sum[j] += ::load(from + i * BLOCK + j * WIDTH) * key[i];
    for (long j = 0; j < VECTORS; j++) ::store(sum[j], sums + j * WIDTH);
}

// Update a block, which may stay where it is. count: of decays. sums: what it then holds for the query.
static __attribute__((noinline)) void advance(const float* from, float* to, long keys, const float* decays, long count,
                                              const float* key, const float* update, const float* query, float* sums) {
    Floats sum[VECTORS] = {}, added[VECTORS];
    const long step = count > 1;
    for (long j = 0; j < VECTORS; j++) added[j] = ::load(update + j * WIDTH);
    for (long i = 0; i < keys; i++)
        for (long j = 0; j < VECTORS; j++) {
            const Floats now = ::load(from + i * BLOCK + j * WIDTH) * decays[i * step] + added[j] * key[i];
            ::store(now, to + i * BLOCK + j * WIDTH);
            sum[j] += now * query[i];
        }
    for (long j = 0; j < VECTORS; j++) ::store(sum[j], sums + j * WIDTH);
}

inline void State::take(long head, const long* rows, long count) const {
    alignas(64) float block[MOST_KEYS * BLOCK], update[BLOCK] = {}, unused[BLOCK];
    for (long first = 0; first < values; first += BLOCK) {
        const long n = std::min(BLOCK, values - first);
        load(head, first, n, block);
        for (long i = 0; i < count; i++) {
            const float *const of_row = update_of(rows[i], head), *const key = of_row + decays;
            std::copy_n(key + keys + first, n, update);
            advance(block, block, keys, of_row, decays, key, update, key, unused);
        }
        store(head, first, n, block);
    }
}

// Where the blocks of a step's rows lie: a row takes the place of its parent if no later row needs that. Place 0 is that
// of the state, which is the parent of the first rows.
struct BlockPlaces {
    long* of;  // [rows + 1]: of the state, then of each row

    // room: 3 * (rows + 1) numbers.
    BlockPlaces(const long* parents, long rows, long* room) : of(room) {
        long *const last = room + rows + 1, *const free = last + rows + 1, free_count = 0, taken = 1;
        std::fill(last, last + rows + 1, 0);
        for (long row = 0; row < rows; row++) last[parents[row] + 1] = row + 1;
        of[0] = 0;
        for (long row = 1; row <= rows; row++) {
            const long parent = parents[row - 1] + 1;
            of[row] = last[parent] == row ? of[parent] : free_count ? free[--free_count] : taken++;
            if (!last[row]) free[free_count++] = of[row];
        }
    }
};

// The floats that a thread needs for a recurrence over so many rows.
static inline long room_for(long rows, long keys) { return keys ? (rows + 1) * (keys * (BLOCK + 4) + 1 + 6) + 16 : 0; }

// The rows of one sequence, as a recurrence goes over them for one head.
template <class T>
struct Followed {
    const State& state;
    const long head, rows;
    const long* const parents;  // as for `Convolution`
    const BlockPlaces places;
    float *const scalars, *const decays;  // [rows] of a further number, [rows][decays]
    float *const keys, *const queries;    // [rows][keys]
    float *const sought;                  // [rows][keys]: what an update recalls of the block before
    float* const blocks;                  // [places][keys][BLOCK]

    // room: `room_for` floats.
    Followed(const State& state, long head, long rows, const long* parents, float* room)
        : state(state), head(head), rows(rows), parents(parents), places(parents, rows, (long*)room),
          scalars(room + 6 * (rows + 1)), decays(scalars + rows + 1), keys(decays + (rows + 1) * state.keys),
          queries(keys + (rows + 1) * state.keys), sought(queries + (rows + 1) * state.keys),
          blocks((float*)(((uintptr_t)(sought + (rows + 1) * state.keys) + 63) / 64 * 64)) {}

    float* decays_of(long row) const { return decays + row * state.decays; }

    // Go from row to row, and write T* out [rows][heads][values]. updates(row, first, n, block of the row before, to): the
    // update of n values, from `first` on; zeros after them.
    template <class F>
    void follow(T* out, F updates) const {
        const long size = state.keys, values = state.values;
        for (long first = 0; first < values; first += BLOCK) {
            const long n = std::min(BLOCK, values - first);
            state.load(head, first, n, blocks);
            for (long row = 0; row < rows; row++) {
                const float* const from = blocks + places.of[parents[row] + 1] * size * BLOCK;
                float* const to = blocks + places.of[row + 1] * size * BLOCK;
                alignas(64) float sums[BLOCK], update[BLOCK];
                updates(row, first, n, from, update);
                const float *const key = keys + row * size, *const query = queries + row * size;
                advance(from, to, size, decays_of(row), state.decays, key, update, query, sums);
                T* const to_out = out + (row * state.heads + head) * values + first;
                for (long i = 0; i < n; i += WIDTH) store_some(::load(sums + i), to_out + i, n - i);
                if (state.of_rows) std::copy_n(update, n, state.update_of(row, head) + state.decays + size + first);
            }
            if (!state.of_rows) state.store(head, first, n, blocks + places.of[rows] * size * BLOCK);
        }
        for (long row = 0; row < rows && state.of_rows; row++) {
            float* const to = state.update_of(row, head);
            std::copy_n(decays_of(row), state.decays, to);
            std::copy_n(keys + row * size, size, to + state.decays);
        }
    }
};

static inline float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

template <class T>
static inline float nearest(float x) {
    T rounded;
    ::store(x, &rounded);
    return number(rounded);
}

// The gated delta rule (`Delta` and `DeltaByKey` in states.py) over the rows of one sequence.
template <class T>
struct Delta {
    const T *queries, *keys;           // [rows][key heads][keys]
    const T* values;                   // [rows][heads][values]
    const T *decays, *rates;           // [rows][heads][decays], [rows][heads]
    const Weights<T> log_speeds, biases;  // [heads], [heads][decays]
    T* out;                            // [rows][heads][values]
    long key_heads, rows;
    float factor, limit;               // of rates, and of the logarithms of decays; or 0
    const long* parents;               // as for `Convolution`
    State state;

    // Divide n numbers by their length, and by another number.
    static void normalize(const T* from, long n, float divisor, float* to) {
        Floats squares = {};
        float sum = 1e-6f;
        for (long i = 0; i < n; i += WIDTH) {
            const Floats x = some(from + i, n - i);
            squares += x * x;
        }
        for (long l = 0; l < WIDTH; l++) sum += squares[l];
        const float scale = 1 / (std::sqrt(sum) * divisor);
        for (long i = 0; i < n; i += WIDTH) store_some(some(from + i, n - i) * scale, to + i, n - i);
    }

    // The decays of a row's head.
    void decay(long at, long head, float* to) const {
        const float speed = std::exp(log_speeds[head]);
        const bool of_keys = state.decays > 1;  // then the sum with 1 is rounded, which a high speed makes much of
        for (long i = 0; i < state.decays; i += WIDTH) {
            const long n = state.decays - i;
            const Floats x = some(decays + at * state.decays + i, n) + some(biases, head * state.decays + i, n);
            if (limit) {
                T logs[WIDTH];
                ::store(times_sigmoid(Floats{} + limit, speed * x), logs);
                store_some(exponential<WIDTH>(::load(logs)), to + i, n);
                continue;
            }
            Floats y = exponential<WIDTH>(x < 0 ? x : -x);
            for (long l = 0; l < std::min<long>(n, WIDTH); l++) y[l] = of_keys ? std::log(1 + y[l]) : std::log1p(y[l]);
            store_some(exponential<WIDTH>(-speed * ((x < 0 ? Floats{} : x) + y)), to + i, n);
        }
    }

    // room: `room_for` floats.
    void compute(long head, float* room) const {
        const Followed<T> all(state, head, rows, parents, room);
        const long size = state.keys, heads = state.heads, step = state.decays > 1;
        for (long row = 0; row < rows; row++) {
            const long of_keys = (row * key_heads + head / (heads / key_heads)) * size, at = row * heads + head;
            float *const of_row = all.decays_of(row), *const key = all.keys + row * size;
            normalize(keys + of_keys, size, 1, key);
            normalize(queries + of_keys, size, std::sqrt((float)size), all.queries + row * size);
            decay(at, head, of_row);
            for (long i = 0; i < size; i++) all.sought[row * size + i] = of_row[i * step] * key[i];
            all.scalars[row] = factor * nearest<T>(1 / (1 + std::exp(-number(rates[at]))));
        }
        all.follow(out, [&](long row, long first, long n, const float* from, float* update) {
            const T* const of_row = values + (row * heads + head) * state.values + first;
            alignas(64) float sums[BLOCK];
            recall(from, size, all.sought + row * size, sums);
            for (long i = 0; i < BLOCK; i += WIDTH)
                ::store(all.scalars[row] * (some(of_row + i, n - i) - ::load(sums + i)), update + i);
        });
    }
};

// The recurrence of Mamba-2 (`Scan` in states.py) over the rows of one sequence.
template <class T>
struct Scan {
    const T *queries, *keys;                // [rows][key heads][keys]
    const T *values, *times;                // [rows][heads][values], [rows][heads]
    const T *log_speeds, *biases, *skips;   // [heads]
    T* out;                                 // [rows][heads][values]
    long key_heads, rows;
    const long* parents;                    // as for `Convolution`
    State state;

    // room: `room_for` floats.
    void compute(long head, float* room) const {
        const Followed<T> all(state, head, rows, parents, room);
        const long size = state.keys, heads = state.heads, width = heads * state.values;
        for (long row = 0; row < rows; row++) {
            const long of_keys = (row * key_heads + head / (heads / key_heads)) * size;
            const float time = nearest<T>(softplus(nearest<T>(number(times[row * heads + head]) + number(biases[head]))));
            all.decays[row] = std::exp(-std::exp(number(log_speeds[head])) * time);
            for (long i = 0; i < size; i++) {
                all.keys[row * size + i] = nearest<T>(time * number(keys[of_keys + i]));
                all.queries[row * size + i] = number(queries[of_keys + i]);
            }
        }
        all.follow(out, [&](long row, long first, long n, const float*, float* update) {
            const T* const of_row = values + row * width + head * state.values + first;
            for (long i = 0; i < BLOCK; i += WIDTH) ::store(some(of_row + i, n - i), update + i);
        });
        for (long row = 0; row < rows; row++)
            for (long i = row * width + head * state.values, end = i + state.values; i < end; i++)
                ::store(number(out[i]) + nearest<T>(number(values[i]) * number(skips[head])), out + i);
    }
};

}  // namespace recurrence
