// GEMM by AMX (`amx.h`) with weights in 12 bits (`indexed.h`).
//
// The columns of a tile of weights are SIDE outputs, in the order of the packed bytes. The rows of a tile of the input
// are rows of the input, and those of a tile of sums are rows of the output. So nothing is transposed, and the fewer
// rows there are, the less time the unit takes. Parts of a float32 number (`split`) have their own rows.
//
// Weights are fetched, unpacked and multiplied. These take about equally long, so none may wait for another. But a
// processor looks only some hundreds of instructions ahead. So the three alternate in small portions: while the unit
// multiplies by one block, the next block is unpacked and a later one is prefetched.

#pragma once

#include "amx_gemm.h"

namespace gemm {

#ifdef HAS_AMX

constexpr long AHEAD_OF_UNPACKED = 48 * 1024;  // bytes between the weights being unpacked and those prefetched

// The layout of the input, with a line for each part of each row: [steps][turns][tiles][lines][pairs of inputs].
template <class T>
struct Lines {
    long turns, rows;   // passes over the weights, and rows in each, whose sums fit into the registers
    long tiles, lines;  // tiles of a turn's rows, and lines in each

    explicit Lines(long all)
        : turns(std::max(1L, (all + ROWS<T> - 1) / ROWS<T>)),
          rows(std::max(1L, (all + turns - 1) / turns)),
          tiles(PARTS<T> == 1 || rows * PARTS<T> <= SIDE ? (rows + SIDE - 1) / SIDE : PARTS<T>),
          lines(PARTS<T> == 1 ? (rows + tiles - 1) / tiles : tiles == 1 ? rows * PARTS<T> : rows) {}

    // Number of vectors of a turn in a step, and of all turns in a step.
    long of_turn() const { return tiles * lines; }
    long of_step() const { return turns * of_turn(); }
    long bytes(long inputs) const { return inputs / DEPTH * of_step() * sizeof(Ints); }

    // Pack the inputs of one step, of all rows, into lines. Parts of a row are neighbours, or each has its own tile.
    void fill(const T* x, long all, long inputs, long step, Ints* to) const {
        x += step * DEPTH, to += step * of_step();
        const long to_part = tiles == 1 ? 1 : lines, to_row = tiles == 1 ? PARTS<T> : 1;
        for (long first = 0; first < all; first += rows, to += of_turn())
            for (long row = 0; row < std::min(rows, all - first); row++) {
                Ints parts[PARTS<T>];
                split(x + (first + row) * inputs, parts);
                for (int part = 0; part < PARTS<T>; part++) to[row * to_row + part * to_part] = parts[part];
            }
    }
};

// GEMM of the rows of a turn, which take N tiles.
template <class T, int N>
struct IndexedProducts {
    static constexpr int O = N < 4 ? 2 : 1;  // tiles of outputs at a time
    static constexpr int INPUT = 7, PORTION = SIDE / 2;

    const Ints* const x;  // the lines of the turn at the first step
    const Lines<T>& shape;
    const Matrix<T>& matrix;
    const long row, rows, inputs;
    const uint8_t* const end_of_weights;       // end of this thread's weights in this matrix
    const uint8_t* const weights_then;         // weights that this thread reads next
    alignas(64) Ints unpacked[2][2][O][SIDE];  // this block and the next: [steps][tiles of outputs]
    alignas(64) Floats sums[O * N][SIDE];      // lines by outputs

    // Unpack PORTION lines of the block that begins at input i, from line FIRST of all tiles of outputs on.
    template <int FIRST>
    INLINE void unpack(long output, long i, Ints (*to)[O][SIDE]) const {
        constexpr int of = FIRST / SIDE, line = FIRST % SIDE;
        output += of * SIDE;
        const Indexed::Rows<const uint8_t> rows((const uint8_t*)matrix.weights, output, inputs);
        if (rows.are_read(i)) {
            const long count = std::min<long>(SIDE, matrix.outputs - output);
            if (line == 0)
                Indexed::take_block(matrix.whole + output * inputs + i, count, inputs, to[0][of], to[1][of]);
            return;
        }
        const Indexed::Table table = in_register(Indexed::table_of(rows.tables()));
        const uint8_t* const lower = rows.lower(line, i);
        const uint8_t* const codes = rows.codes(line, i);
        const uint8_t* ahead = rows.lower(0, i) + AHEAD_OF_UNPACKED;
        ahead = (ahead < end_of_weights ? ahead : weights_then + (ahead - end_of_weights)) + line * 96;
        UNROLL for (int k = 0; k < PORTION; k++) {
            Ints two[2];
            Indexed::look_up(lower + k * Indexed::BLOCK, codes + k * Indexed::BLOCK / 2, table, two);
            to[0][of][line + k] = two[0], to[1][of][line + k] = two[1];
            prefetch_in_turn(ahead + k * 96);
            if (k % 2) prefetch_in_turn(ahead + k * 96 + 64);
        }
        if (line + PORTION == SIDE) rows.patch(i, to[0][of], to[1][of]);
    }

    // Add the products of the input at a step by tile OF of the weights to the sums from OF * N on. Every other tile of
    // weights takes the tiles of the input in reverse order, because the first one is still loaded.
    template <int OF>
    INLINE void add(const Ints* x, const Ints* weights) const {
        load_tile<WEIGHTS>(weights, sizeof(Ints));
        repeat<N>([&](auto i) {
            constexpr int n = OF % 2 ? N - 1 - i : i;
            if (OF == 0 || i > 0) load_tile<INPUT>(x + n * shape.lines, sizeof(Ints));
            add_tiles<OF * N + n, INPUT, WEIGHTS>();
        });
    }

    void run(long first, long end) {
        if constexpr (O > 1) first = run_tiles<O>(first, end);
        run_tiles<1>(first, end);
    }

    // Compute outputs first..end-1, OUT tiles at a time. Returns the first output that is left; fewer than OUT tiles
    // are.
    template <int OUT>
    long run_tiles(long first, long end) {
        constexpr long WIDTH = OUT * SIDE;
        const auto are_left = [=](long from) { return from + WIDTH - SIDE < end; };
        if (!are_left(first)) return first;
        repeat<2 * OUT>([&](auto part) { unpack<part * PORTION>(first, 0, unpacked[0]); });
        int buffer = 0;
        for (; are_left(first); first += WIDTH) {
            repeat<OUT * N>([&](auto sum) { clear_tile<sum>(); });
            for (long i = 0; i < inputs; i += Indexed::BLOCK) {
                const bool ends = i + Indexed::BLOCK == inputs;
                const long next = ends ? first + WIDTH : first, next_i = ends ? 0 : i + Indexed::BLOCK;
                const bool is_last = !are_left(next);
                repeat<2 * OUT>([&](auto part) {
                    constexpr int step = part / OUT, of = part % OUT;
                    if (!is_last) unpack<part * PORTION>(next, next_i, unpacked[!buffer]);
                    add<of>(x + (i / DEPTH + step) * shape.of_step(), unpacked[buffer][step][of]);
                });
                buffer = !buffer;
            }
            repeat<OUT * N>([&](auto sum) { store_tile<sum>(sums[sum]); });
            for (long of = 0; of < OUT; of++)
                put(sums + of * N, first + of * SIDE, std::min<long>(SIDE, end - first - of * SIDE));
        }
        return std::min(first, end);
    }

    // Store the sums of `count` outputs.
    INLINE void put(const Floats (*sums)[SIDE], long output, long count) const {
        const long tiles = PARTS<T> == 1 ? N : 1;
        for (long tile = 0; tile < tiles; tile++)
            for (long r = 0; r < std::min(shape.lines, rows - tile * shape.lines); r++) {
                Floats sum = sums[tile][N == 1 ? r * PARTS<T> : r];
                if constexpr (PARTS<T> > 1)
                    sum += N == 1 ? sums[0][r * 3 + 1] + sums[0][r * 3 + 2] : sums[1][r] + sums[2][r];
                put_row(matrix, sum, row + tile * shape.lines + r, output, count);
            }
    }
};

// GEMM of any number of rows with outputs begin..end-1. next: the weights that this thread reads next, or null.
template <class T>
static void multiply_in_lines(long rows, const Lines<T>& shape, const Ints* x, const Matrix<T>& matrix, long inputs,
                              long begin, long end, const void* next) {
    const long size = shape.turns > 1 ? IN_TURN : end - begin;
    const uint8_t* const last = (const uint8_t*)matrix.template row<Indexed>((end + SIDE - 1) / SIDE * SIDE, inputs);
    set_up_tiles(shape.lines);
    for (; begin < end; begin += size)
        for (long turn = 0; turn < shape.turns; turn++)
            repeat<MOST>([&](auto fewer) {
                if (shape.tiles != fewer + 1) return;
                const long row = turn * shape.rows, some = std::min(shape.rows, rows - row);
                IndexedProducts<T, fewer + 1> products = {x + turn * shape.of_turn(), shape, matrix, row, some, inputs,
                                                          last, next ? (const uint8_t*)next : last};
                products.run(begin, std::min(end, begin + size));
            });
}

#endif

}  // namespace gemm
