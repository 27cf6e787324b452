// GEMM by AMX (`amx.h`), for weights in all formats except 12 bits (`amx_gemm_indexed.h`).
//
// A tile of weights is SIDE rows of the matrix, either read from memory directly or unpacked. Rows of the input become
// columns of tiles, once for all outputs. A float32 number of the input is the sum of three bf16 numbers, each with 8
// of its 24 binary digits. So a float32 row takes three columns: neighbours, or the same column of three tiles if the
// rows fill three. Then float32 inputs can be multiplied by bytes. A row is rounded the same alone and among others.

#pragma once

#include "matrix.h"
#include "amx.h"

namespace gemm {

#ifdef HAS_AMX

constexpr int MOST = 4;                     // most tiles of the input at a time: their sums take 4 of 8 tile registers
constexpr long PLAIN_AHEAD = 256 * 1024;    // most bytes by which weights are prefetched if they are not unpacked
constexpr long IN_TURN = 192;               // outputs whose weights stay in L2 for all rows: 600 KB of 1,536 inputs in bf16
constexpr int FEW = 4;                      // most columns that are cheaper to gather than to transpose

// PARTS: bf16 numbers that add up to a number of the input. ROWS: rows of the input whose sums fit into the registers.
// TILES: their tiles.
template <class T>
constexpr int PARTS = sizeof(T) == 4 ? 3 : 1;
template <class T>
constexpr long ROWS = MOST / PARTS<T> * SIDE;

template <class T>
constexpr int TILES = ROWS<T> / SIDE * PARTS<T>;

// Number of tiles of the input at each step.
template <class T>
static INLINE long tiles_of(long rows) {
    return rows / ROWS<T> * TILES<T> + (rows % ROWS<T> * PARTS<T> + SIDE - 1) / SIDE;
}

template <class T>
static INLINE long bytes_of_tiles(long rows, long inputs) {
    return tiles_of<T>(rows) * (inputs / DEPTH) * TILE_BYTES;
}

// Whether each part of a number has its own tile, if the rows take this many tiles. Otherwise parts are neighbours.
template <class T>
static INLINE constexpr bool are_apart(long tiles) {
    return PARTS<T> > 1 && tiles == PARTS<T>;
}

// DEPTH numbers of a row as PARTS vectors of pairs of bf16 numbers, in the order of `Indexed::pairs`.
static INLINE void split(const BFloat16* x, Ints* to) { *to = *(const Unaligned<Ints>*)x; }
static INLINE void split(const float* x, Ints* to) {
    Floats first = *(const Unaligned<Floats>*)x, second = *(const Unaligned<Floats>*)(x + L);
    UNROLL for (int part = 0; part < PARTS<float>; part++) {
        const Ints a = (Ints)first & ~0xffff, b = (Ints)second & ~0xffff;  // truncated to bf16, not rounded
        to[part] = (a >> 16 & 0xffff) | b;
        first = first == (Floats)a ? Floats{} : first - (Floats)a;  // infinity minus infinity would be NaN
        second = second == (Floats)b ? Floats{} : second - (Floats)b;
    }
}

// Pack the inputs of one step, of all rows, into tiles: [steps][tiles][pairs of inputs][columns].
template <class T>
static void fill_tiles(const T* x, long rows, long inputs, long step, Ints* tiles) {
    tiles += step * tiles_of<T>(rows) * SIDE;
    for (; rows > 0; rows -= ROWS<T>, x += ROWS<T> * inputs) {
        const long some = std::min(rows, ROWS<T>), count = tiles_of<T>(some);
        Ints columns[TILES<T> * SIDE];
        std::fill_n(columns, count * SIDE, Ints{});
        for (long row = 0; row < some; row++) {
            Ints parts[PARTS<T>];
            split(x + row * inputs + step * DEPTH, parts);
            for (int part = 0; part < PARTS<T>; part++)
                columns[are_apart<T>(count) ? part * SIDE + row : row * PARTS<T> + part] = parts[part];
        }
        for (long tile = 0; tile < count; tile++, tiles += SIDE) {
            transpose(columns + tile * SIDE);
            memcpy(tiles, columns + tile * SIDE, TILE_BYTES);
        }
    }
}

// Whether AMX serves this matrix.
template <class T>
static INLINE bool takes_tiles(const Matrix<T>& matrix, long inputs) {
    return inputs % DEPTH == 0 && (sizeof(T) == 2 || matrix.format == INDEXED || matrix.format == BYTES);
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
    } else if constexpr (gguf::IS_BLOCK<Weight>) {
        const uint8_t* const block = (const uint8_t*)row + bytes_of_row<Weight>(i);
        return Weight::pairs(block, 0, Weight::read(block));
    } else if constexpr (sizeof(typename By::Number) == 4) {
        const Floats two[] = {By::factors(row + i), By::factors(row + i + L)};
        return Indexed::pairs((const float*)two);
    } else {
        return By::factors(row + i);
    }
}

// Store the sums of a row for outputs first..first+count-1, SIDE at most, with the bias.
template <class T>
static INLINE void put_row(const Matrix<T>& matrix, Floats sums, long row, long first, long count) {
    T* const to = matrix.out + row * matrix.outputs + first;
    const bool is_biased = matrix.bias && matrix.format != BYTES;
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

// GEMM of rows that take N tiles. A unit of work is O tiles of outputs by two steps along the inputs. While the matrix
// unit multiplies, the processor unpacks the weights of the next unit of work. Finished sums are stored one unit of
// work later, so nothing waits for them.
template <class By, class Weight, int N>
struct Products {
    typedef typename By::Number T;
    static constexpr bool IS_PLAIN = std::is_same_v<Weight, BFloat16>;
    static constexpr int O = N < 4 ? 2 : 1;  // tiles of outputs at a time
    static constexpr bool ARE_APART = are_apart<T>(N);

    const Ints* x;      // tiles of the input
    const long stride;  // from the tiles of a step to those of the next
    const Matrix<T>& matrix;
    const long row, rows, inputs;
    const long steps = inputs / DEPTH;
    alignas(64) Ints unpacked[2][2][O * SIDE] = {};  // weights of this unit of work and of the next
    alignas(64) Floats sums[O * N][SIDE];            // outputs by columns
    long stored = 0, outputs_stored = 0;             // first output in `sums` that `put` has not written, and how many

    // Add the products of a step with OUT tiles of weights.
    template <int OUT>
    INLINE void add(long step, const void* weights, long bytes) const {
        constexpr int INPUTS = 8 - OUT * N - OUT;  // registers that are left for the input
        if constexpr (INPUTS < 1)  // weights are in a nearer cache than the input, so they are loaded repeatedly
            repeat<N>([&](auto n) {
                load_tile<7>(x + step * stride + n * SIDE, TILE_BYTES / SIDE);
                repeat<OUT>([&](auto o) {
                    load_tile<6>((const char*)weights + o * SIDE * bytes, bytes);
                    add_tiles<o * N + n, 6, 7>();
                });
            });
        else
            repeat<OUT>([&](auto o) {
                load_tile<OUT * N + o>((const char*)weights + o * SIDE * bytes, bytes);
                repeat<N>([&](auto n) {
                    constexpr int INPUT = 8 - INPUTS + n % INPUTS;
                    if (o == 0) load_tile<INPUT>(x + step * stride + n * SIDE, TILE_BYTES / SIDE);
                    add_tiles<o * N + n, OUT * N + o, INPUT>();
                });
            });
    }

    // Unpack the weights of up to SIDE outputs, for a step and the next.
    INLINE void unpack(long first, long count, long step, Ints* to, Ints* to_next) const {
        const long i = step * DEPTH;
        const bool both = step + 1 < steps;
        const long bytes = bytes_of_row<Weight>(inputs);
        for (long o = 0; o < count; o++) {
            const auto* const weights = matrix.template row<Weight>(first + o, inputs);
            __builtin_prefetch((const char*)weights + SIDE * bytes + bytes_of_row<Weight>(i), 0, 1);
            to[o] = pairs_of<By>(weights, matrix, first + o, inputs, i);
            if (both) to_next[o] = pairs_of<By>(weights, matrix, first + o, inputs, i + DEPTH);
        }
    }

    void run(long first, long end) {
        if constexpr (IS_PLAIN)
            first = run_plain(first, end);
        else if constexpr (O > 1)
            first = run_unpacked<O>(first, end);
        run_unpacked<1>(first, end);
    }

    // Compute outputs first..end-1, OUT tiles at a time. Returns the first output that is left; end if OUT is 1.
    template <int OUT>
    long run_unpacked(long first, long end) {
        constexpr long WIDTH = OUT * SIDE;
        if (OUT > 1) end -= (end - first) % WIDTH;
        if (first >= end) return first;
        const auto take = [&](long first, long step, int buffer) {
            for (long o = 0; o < WIDTH; o += SIDE)
                unpack(first + o, std::min<long>(SIDE, end - first - o), step, unpacked[buffer][0] + o,
                       unpacked[buffer][1] + o);
        };
        take(first, 0, 0);
        for (long unit = 0, step = 0; first < end; unit++) {
            if (step == 0) repeat<OUT * N>([&](auto sum) { clear_tile<sum>(); });
            if (step + 2 < steps)
                take(first, step + 2, (unit + 1) % 2);
            else if (first + WIDTH < end)
                take(first + WIDTH, 0, (unit + 1) % 2);
            add<OUT>(step, unpacked[unit % 2][0], TILE_BYTES / SIDE);
            if (step + 1 < steps) add<OUT>(step + 1, unpacked[unit % 2][1], TILE_BYTES / SIDE);
            put();
            step += 2;
            if (step < steps) continue;
            repeat<OUT * N>([&](auto sum) { store_tile<sum>(sums[sum]); });
            stored = first, outputs_stored = std::min(WIDTH, end - first);
            first += WIDTH, step = 0;
        }
        put();
        return end;
    }

    // The same for bf16 weights, which are not unpacked, in whole tiles. Returns the first output that is left.
    long run_plain(long first, long end) {
        const long bytes = inputs * sizeof(Weight), all = O * SIDE * bytes;
        for (; first + O * SIDE <= end; first += O * SIDE) {
            const char* const weights = (const char*)matrix.template row<Weight>(first, inputs);
            const char* const ahead = weights + (all <= PLAIN_AHEAD ? all : 1024);
            repeat<O * N>([&](auto sum) { clear_tile<sum>(); });
            for (long step = 0; step < steps; step++) {
                const long at = step * TILE_BYTES / SIDE;
                for (long o = 0; o < O * SIDE; o++) __builtin_prefetch(ahead + o * bytes + at, 0, 1);
                add<O>(step, weights + at, bytes);
                if (step == 0) put();
            }
            repeat<O * N>([&](auto sum) { store_tile<sum>(sums[sum]); });
            stored = first, outputs_stored = O * SIDE;
        }
        put();
        return first;
    }

    // Write the stored sums to the output, with the bias.
    INLINE void put() {
        for (long done = 0; done < outputs_stored; done += SIDE) {
            Floats columns[N * SIDE];
            memcpy(columns, sums[done / SIDE * N], sizeof columns);
            if constexpr (ARE_APART)
                UNROLL for (int i = 0; i < SIDE; i++) columns[i] += columns[SIDE + i] + columns[2 * SIDE + i];
            if (rows * PARTS<T> <= FEW)
                collect(columns, rows * PARTS<T>);
            else
                repeat<ARE_APART ? 1 : N>([&](auto tile) { transpose(columns + tile * SIDE); });
            for (long i = 0; i < rows; i++) {
                const Floats* const of = columns + i * (ARE_APART ? 1 : PARTS<T>);
                const Floats sum = PARTS<T> == 1 || ARE_APART ? of[0] : of[0] + (of[1] + of[2]);
                put_row(matrix, sum, row + i, stored + done, std::min<long>(SIDE, outputs_stored - done));
            }
        }
        outputs_stored = 0;
    }

    // `transpose`, for n columns only.
    static INLINE void collect(Floats* columns, long n) {
        Floats few[FEW];
        const __m512i places = _mm512_slli_epi32(PLACES, 4);
        for (long i = 0; i < n; i++) few[i] = (Floats)_mm512_i32gather_ps(places, (float*)columns + i, 4);
        std::copy_n(few, n, columns);
    }
};

// GEMM of any number of rows with outputs begin..end-1.
template <class By, class Weight>
static void multiply_tiles(long rows, const Ints* x, const Matrix<typename By::Number>& matrix, long inputs, long begin,
                           long end) {
    typedef typename By::Number T;
    const long stride = tiles_of<T>(rows) * SIDE, size = rows > ROWS<T> ? IN_TURN : end - begin;
    set_up_tiles();
    for (; begin < end; begin += size)
        for (long row = 0; row < rows; row += ROWS<T>) {
            const Ints* const tiles_of_rows = x + row / ROWS<T> * TILES<T> * SIDE;
            const long some = std::min(ROWS<T>, rows - row), tiles = tiles_of<T>(some);
            repeat<TILES<T>>([&](auto fewer) {
                if (tiles != fewer + 1) return;
                Products<By, Weight, fewer + 1> products = {tiles_of_rows, stride, matrix, row, some, inputs};
                products.run(begin, std::min(end, begin + size));
            });
        }
}

// The same, for the matrix's format. It must not be INDEXED.
template <class By>
static void multiply_in_columns(long rows, const Ints* x, const Matrix<typename By::Number>& matrix, long inputs,
                                long begin, long end) {
    auto some = multiply_tiles<By, int8_t>;
    if constexpr (sizeof(typename By::Number) == 2) {
        if (matrix.format == CODES)
            some = multiply_tiles<By, Codes>;
        else if (matrix.format == GROUPED)
            some = multiply_tiles<By, Grouped>;
        else if (matrix.format == MXFP4)
            some = multiply_tiles<By, gguf::MXFP4>;
        else if (matrix.format == FLOATS)
            some = multiply_tiles<By, typename By::Number>;
    }
    some(rows, x, matrix, inputs, begin, end);
}

#endif

}  // namespace gemm
