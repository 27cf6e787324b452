// Products by the processor's matrix unit (`tiles.h`).
//
// A tile of weights is 16 rows of the matrix, as they stand in memory or as they are unpacked. The input is brought into
// tiles once, for all outputs. A float32 number of the input is the sum of three bf16 numbers, which have 8 of its 24
// binary digits each; so float32 is served where the weights are bf16 numbers or bytes. A row is rounded the same alone
// and among others.

#pragma once

#include "matrix.h"
#include "tiles.h"

namespace products {

#ifdef HAS_TILES

constexpr long AHEAD_OF_TILES = 32 * 1024;  // bytes between unpacked weights and those that are prefetched with them
constexpr long FARTHEST = 256 * 1024;      // the same for weights that are taken as they are, at most
constexpr int FEW_ROWS = 4;

template <class T>
constexpr int PARTS = sizeof(T) == 4 ? 3 : 1;  // bf16 numbers that add up to a number of the input

// DEPTH numbers of a row of the input as pairs of bf16 numbers, in the order of `Indexed::pairs`: v[part][0].
static INLINE void split(const BFloat16* x, Ints (*v)[SIDE]) { v[0][0] = *(const Unaligned<Ints>*)x; }
static INLINE void split(const float* x, Ints (*v)[SIDE]) {
    Floats first = *(const Unaligned<Floats>*)x, second = *(const Unaligned<Floats>*)(x + L);
    UNROLL for (int part = 0; part < PARTS<float>; part++) {
        const Ints a = (Ints)first & ~0xffff, b = (Ints)second & ~0xffff;  // so many digits, not rounded
        v[part][0] = (a >> 16 & 0xffff) | b;
        first = first == (Floats)a ? Floats{} : first - (Floats)a;  // an infinite number leaves nothing
        second = second == (Floats)b ? Floats{} : second - (Floats)b;
    }
}

// Bytes of an input in tiles.
template <class T>
static INLINE long bytes_of_tiles(long rows, long inputs) {
    return (rows + SIDE - 1) / SIDE * PARTS<T> * (inputs / DEPTH) * TILE_BYTES;
}

// Bring inputs DEPTH * step... of all rows into tiles: [steps][groups of rows][parts][pairs of inputs][rows].
template <class T>
static void fill_tiles(const T* x, long rows, long inputs, long step, Ints* tiles) {
    const long groups = (rows + SIDE - 1) / SIDE;
    for (long group = 0; group < groups; group++) {
        Ints v[PARTS<T>][SIDE] = {};
        const T* from = x + group * SIDE * inputs + step * DEPTH;
        for (long row = 0; row < std::min<long>(SIDE, rows - group * SIDE); row++)
            split(from + row * inputs, (Ints(*)[SIDE])&v[0][row]);
        for (int part = 0; part < PARTS<T>; part++) {
            transpose(v[part]);
            memcpy(tiles + ((step * groups + group) * PARTS<T> + part) * SIDE, v[part], sizeof v[part]);
        }
    }
}

// Whether the unit multiplies with this matrix.
template <class T>
static INLINE bool takes_tiles(const Matrix<T>& matrix, long inputs) {
    return inputs % DEPTH == 0 && (sizeof(T) == 2 || matrix.whole || matrix.scales);
}

// DEPTH weights of a row, from input i on, as pairs of bf16 numbers.
template <class By, class Weight>
static INLINE Ints pairs_of(const Weight* row, const Matrix<typename By::Number>& matrix, long output, long inputs,
                            long i) {
    const long group = i / matrix.group;
    if constexpr (std::is_same_v<Weight, Codes>) {
        return By::factors(row + i / 2, matrix.of_groups(matrix.group_scales, output, inputs)[group],
                           matrix.of_groups(matrix.group_offsets, output, inputs)[group]);
    } else if constexpr (std::is_same_v<Weight, Grouped>) {
        return By::factors(row + i, matrix.of_groups(matrix.group_scales, output, inputs)[group]);
    } else if constexpr (sizeof(typename By::Number) == 4) {
        const Floats two[] = {By::factors(row + i), By::factors(row + i + L)};
        return Indexed::pairs((const float*)two);
    } else {
        return By::factors(row + i);
    }
}

// Products of G groups of rows. A unit of work is SIDE outputs by two steps along the inputs: while the unit multiplies,
// the weights of the next are unpacked. Sums are stored after the next unit of work, so that nothing waits for them.
template <class By, class Weight, int G>
struct Products {
    typedef typename By::Number T;
    static constexpr bool IS_PLAIN = std::is_same_v<Weight, BFloat16>;
    static constexpr int O = IS_PLAIN && G < 3 ? 2 : 1;  // tiles of outputs at a time, if nothing is unpacked
    static constexpr int N = G * PARTS<T>, SUMS = O * N;

    const Ints* x;      // of the first of the groups
    const long stride;  // from the tiles of a step to those of the next
    const Matrix<T>& matrix;
    const long row, rows, inputs;
    const long steps = inputs / DEPTH;
    alignas(64) Ints unpacked[2][2][SIDE] = {};  // weights of this unit of work and of the next
    alignas(64) Floats sums[SUMS][SIDE];         // of outputs by rows
    long stored = 0, outputs_stored = 0;         // which outputs have sums that are not in the matrix yet, and how many

    // Add the products of a step with OUT tiles of weights.
    template <int OUT>
    INLINE void add(long step, const void* weights, long bytes) const {
        constexpr int FREE = 8 - OUT * N, WEIGHTS = std::min(OUT, FREE - 1), INPUTS = FREE - WEIGHTS;  // registers
        repeat<OUT>([&](auto o) {
            constexpr int WEIGHT = OUT * N + o % WEIGHTS;
            load_tile<WEIGHT>((const char*)weights + o * SIDE * bytes, bytes);
            repeat<N>([&](auto n) {
                constexpr int INPUT = 8 - INPUTS + n % INPUTS;
                if (o == 0 || N > INPUTS) load_tile<INPUT>(x + step * stride + n * SIDE, TILE_BYTES / SIDE);
                add_tiles<o * N + n, WEIGHT, INPUT>();
            });
        });
    }

    // Unpack the weights of some outputs, SIDE at most, at step and step + 1.
    INLINE void unpack(long first, long count, long step, Ints (*to)[SIDE]) const {
        const long i = step * DEPTH;
        const bool both = step + 1 < steps;
        if constexpr (IS_INDEXED<Weight>) {
            const Indexed::Rows rows((const uint8_t*)matrix.weights, first, inputs);
            const uint8_t* const ahead = rows.lower(0, i) + AHEAD_OF_TILES;
            if (*rows.others(i)) {
                for (long o = 0; o < count; o++) {
                    const T* const weights = matrix.whole + (first + o) * inputs + i;
                    to[0][o] = Indexed::pairs(weights), to[1][o] = Indexed::pairs(weights + DEPTH);
                }
                return;
            }
            UNROLL for (int o = 0; o < SIDE; o++) {
                Ints two[2];
                Indexed::look_up(rows.lower(o, i), rows.codes(o, i), rows.table(), two);
                to[0][o] = two[0], to[1][o] = two[1];
                __builtin_prefetch(ahead + o * 96, 0, 1);
                if (o % 2) __builtin_prefetch(ahead + o * 96 + 64, 0, 1);
            }
        } else {
            const long bytes = bytes_of_row<Weight>(inputs);
            for (long o = 0; o < count; o++) {
                const auto* const weights = matrix.template row<Weight>(first + o, inputs);
                __builtin_prefetch((const char*)weights + SIDE * bytes + bytes_of_row<Weight>(i), 0, 1);
                to[0][o] = pairs_of<By>(weights, matrix, first + o, inputs, i);
                if (both) to[1][o] = pairs_of<By>(weights, matrix, first + o, inputs, i + DEPTH);
            }
        }
    }

    void run_unpacked(long first, long end) {
        const auto count = [&] { return std::min<long>(SIDE, end - first); };
        if (first >= end) return;
        unpack(first, count(), 0, unpacked[0]);
        for (long unit = 0, step = 0; first < end; unit++) {
            const Ints(*const weights)[SIDE] = unpacked[unit % 2];
            Ints(*const next)[SIDE] = unpacked[(unit + 1) % 2];
            if (step == 0) repeat<N>([&](auto sum) { clear_tile<sum>(); });
            if (step + 2 < steps)
                unpack(first, count(), step + 2, next);
            else if (first + SIDE < end)
                unpack(first + SIDE, std::min<long>(SIDE, end - first - SIDE), 0, next);
            add<1>(step, weights[0], TILE_BYTES / SIDE);
            if (step + 1 < steps) add<1>(step + 1, weights[1], TILE_BYTES / SIDE);
            put();
            step += 2;
            if (step < steps) continue;
            repeat<N>([&](auto sum) { store_tile<sum>(sums[sum]); });
            stored = first, outputs_stored = count();
            first += SIDE, step = 0;
        }
        put();
    }

    // The same for weights that are taken as they are, and whole tiles. Returns the output that is next.
    long run_plain(long first, long end) {
        const long bytes = inputs * sizeof(Weight), all = O * SIDE * bytes;
        for (; first + O * SIDE <= end; first += O * SIDE) {
            const char* const weights = (const char*)matrix.template row<Weight>(first, inputs);
            const char* const ahead = weights + (all <= FARTHEST ? all : 1024);
            repeat<SUMS>([&](auto sum) { clear_tile<sum>(); });
            for (long step = 0; step < steps; step++) {
                const long at = step * TILE_BYTES / SIDE;
                for (long o = 0; o < O * SIDE; o++) __builtin_prefetch(ahead + o * bytes + at, 0, 1);
                add<O>(step, weights + at, bytes);
                if (step == 0) put();
            }
            repeat<SUMS>([&](auto sum) { store_tile<sum>(sums[sum]); });
            stored = first, outputs_stored = O * SIDE;
        }
        put();
        return first;
    }

    // Store what the sums add up to, with the bias.
    INLINE void put() {
        for (long tile = 0; tile * SIDE < outputs_stored; tile++)
            for (int group = 0; group < G; group++) {
                const Floats(*const of)[SIDE] = sums + tile * N + group * PARTS<T>;
                Floats v[SIDE];
                UNROLL for (int i = 0; i < SIDE; i++)
                    v[i] = PARTS<T> == 1 ? of[0][i] : of[0][i] + (of[1 % PARTS<T>][i] + of[2 % PARTS<T>][i]);
                const long to = row + group * SIDE, height = std::min<long>(SIDE, row + rows - to);
                const long first = stored + tile * SIDE, width = std::min<long>(SIDE, outputs_stored - tile * SIDE);
                if (height > FEW_ROWS) transpose(v);
                for (long i = 0; i < height; i++) {
                    const Floats few = (Floats)_mm512_i32gather_ps(_mm512_slli_epi32(PLACES, 4), (const float*)v + i, 4);
                    put_row(height > FEW_ROWS ? v[i] : few, to + i, first, width);
                }
            }
        outputs_stored = 0;
    }

    INLINE void put_row(Floats sums, long row, long first, long count) const {
        T* const to = matrix.out + row * matrix.outputs + first;
        const bool is_biased = matrix.bias && !matrix.scales;
        if (count == SIDE) {
            if (is_biased) {
                T bias[SIDE];
                memcpy(bias, matrix.bias + first, sizeof bias);
                sums += load(bias);
            }
            if constexpr (sizeof(T) == 2)
                *(Unaligned<__m256bh>*)to = _mm512_cvtneps_pbh((__m512)sums);
            else
                store(sums, to);
        } else {
            for (long i = 0; i < count; i++) store(sums[i] + (is_biased ? number(matrix.bias[first + i]) : 0), to + i);
        }
    }
};

// Outputs begin..end-1 of G groups of rows.
template <class By, class Weight, int G>
static void multiply_groups(const Ints* x, long stride, const Matrix<typename By::Number>& matrix, long row, long rows,
                            long inputs, long begin, long end) {
    Products<By, Weight, G> products = {x, stride, matrix, row, rows, inputs};
    if constexpr (std::is_same_v<Weight, BFloat16>) begin = products.run_plain(begin, end);
    products.run_unpacked(begin, end);
}

// The same for any number of rows.
template <class By, class Weight>
static void multiply_tiles(long rows, const Ints* x, const Matrix<typename By::Number>& matrix, long inputs, long begin,
                           long end) {
    typedef typename By::Number T;
    constexpr int MOST = PARTS<T> == 1 ? 4 : 2;  // groups whose sums the registers hold
    const long groups = (rows + SIDE - 1) / SIDE, stride = groups * PARTS<T> * SIDE;
    for (long group = 0; group < groups; group += MOST) {
        const long left = std::min<long>(groups - group, MOST), row = group * SIDE;
        const auto some = left == 1   ? multiply_groups<By, Weight, 1>
                          : left == 2 ? multiply_groups<By, Weight, 2>
                          : left == 3 ? multiply_groups<By, Weight, std::min(3, MOST)>
                                      : multiply_groups<By, Weight, MOST>;
        some(x + row * PARTS<T>, stride, matrix, row, std::min(rows - row, left * SIDE), inputs, begin, end);
    }
}

// The same for weights of any type.
template <class By>
static void multiply_in_tiles(long rows, const Ints* x, const Matrix<typename By::Number>& matrix, long inputs,
                              long begin, long end) {
    auto some = matrix.whole ? multiply_tiles<By, Indexed> : multiply_tiles<By, int8_t>;
    if constexpr (sizeof(typename By::Number) == 2) {
        if (matrix.group_offsets)
            some = multiply_tiles<By, Codes>;
        else if (matrix.group_scales)
            some = multiply_tiles<By, Grouped>;
        else if (!matrix.whole && !matrix.scales)
            some = multiply_tiles<By, typename By::Number>;
    }
    some(rows, x, matrix, inputs, begin, end);
}

#endif

}  // namespace products
