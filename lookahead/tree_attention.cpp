// Attention of a step's or a prompt's tokens to the cache and to each other, for one sequence.
//
// Query heads that share a key head are taken together, and LANES of their queries side by side in a vector: a key, and
// a value, is then one number for all of them, nothing has to be transposed, and maxima and sums are those of vectors.
// Keys are taken KEYS at a time, with a running maximum and sum (Milakov & Gimelshein 2018, arXiv 1805.02867; Dao et al.
// 2022, arXiv 2205.14135, algorithm 1), all in float32.

#include <algorithm>
#include <cstdint>
#include <cstring>

constexpr int LANES = 16, KEYS = 64, TILE = 8, WIDEST = 256;
constexpr float HIDDEN = -3.4e38f;
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint16_t BFloat16;
typedef BFloat16 BFloat16s __attribute__((vector_size(2 * LANES)));

static inline float number(float x) { return x; }

static inline float number(BFloat16 x) {
    uint32_t bits = uint32_t(x) << 16;
    float y;
    memcpy(&y, &bits, sizeof y);
    return y;
}

static inline void store(float& to, float x) { to = x; }

static inline void store(BFloat16& to, float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    to = x != x ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;  // to nearest, ties to even
}

static const float* floats(const float* x, long, float*) { return x; }

static const float* floats(const BFloat16* x, long n, float* room) {
    long i = 0;
    for (; i + LANES <= n; i += LANES) {
        BFloat16s some;
        memcpy(&some, x + i, sizeof some);
        Ints bits = __builtin_convertvector(some, Ints) << 16;
        memcpy(room + i, &bits, sizeof bits);
    }
    for (; i < n; i++) room[i] = number(x[i]);
    return room;
}

// exp(x) for x <= 0 to 2 units in the last place; 0 where it would be next to nothing; NaN stays NaN.
static inline Floats exponential(Floats x) {
    Floats least = Floats{} - 87.0f;
    Ints gone = x < least;
    Floats within = gone ? least : x;
    Ints power = __builtin_convertvector(within * 1.44269504f - 0.5f, Ints);
    Floats n = __builtin_convertvector(power, Floats);
    Floats r = within - n * 0.693359375f + n * 2.12194440e-4f;  // |r| <= ln(2) / 2
    Floats y = r * 1.98756915e-4f + 1.39819995e-3f;             // Cephes, expf
    y = y * r + 8.33345191e-3f;
    y = y * r + 4.16657959e-2f;
    y = y * r + 1.66666655e-1f;
    y = y * r + 5.00000012e-1f;
    y = y * r * r + r + 1.0f;
    return gone ? Floats{} : (Floats)((Ints)y + (power << 23));
}

// c[i] += a[i * row + j * column] * b[j], summed over j < k, for M rows i.
template <int M>
static inline void multiply_tile(Floats* c, const float* a, long row, long column, const Floats* b, long k) {
    Floats sums[M];
    for (int i = 0; i < M; i++) sums[i] = c[i];
    for (long j = 0; j < k; j++)
        for (int i = 0; i < M; i++) sums[i] += a[i * row + j * column] * b[j];
    for (int i = 0; i < M; i++) c[i] = sums[i];
}

static inline void multiply(Floats* c, const float* a, long row, long column, const Floats* b, long m, long k) {
    long i = 0;
    for (; i + TILE <= m; i += TILE) multiply_tile<TILE>(c + i, a + i * row, row, column, b, k);
    for (; i < m; i++) multiply_tile<1>(c + i, a + i * row, row, column, b, k);
}

// query [heads][rows][size], by strides; key, value [key_heads][keys][size], their heads key_stride apart; size is at
// most WIDEST. mask [rows][masked] is added to the scores of the last `masked` keys; without one,
// row i of the last `rows` keys is seen by rows i and later. out [rows][heads][size].
template <class T>
static void attend(const T* query, const T* key, const T* value, const T* mask, T* out, long heads, long key_heads,
                   long rows, long keys, long masked, long size, long head_stride, long row_stride, long key_stride,
                   long threads, float scaling) {
    const long groups = heads / key_heads, queries = groups * rows, blocks = (queries + LANES - 1) / LANES;
    const long free = keys - (mask ? masked : rows);  // keys that all rows see
#pragma omp parallel for num_threads(threads)
    for (long item = 0; item < key_heads * blocks; item++) {
        const long head = item / blocks, first = item % blocks * LANES;
        const int lanes = std::min<long>(LANES, queries - first);
        const T *keys_here = key + head * key_stride, *values_here = value + head * key_stride;
        float room[KEYS * WIDEST];
        Floats q[WIDEST], sums[WIDEST], p[KEYS];
        long row[LANES];
        T* outs[LANES];
        std::fill(q, q + size, Floats{});
        std::fill(sums, sums + size, Floats{});
        for (int lane = 0; lane < lanes; lane++) {
            const long of = head * groups + (first + lane) / rows;
            row[lane] = (first + lane) % rows;
            const T* x = query + of * head_stride + row[lane] * row_stride;
            for (long d = 0; d < size; d++) q[d][lane] = number(x[d]) * scaling;
            outs[lane] = out + (row[lane] * heads + of) * size;
        }
        const long from = mask ? free : free + *std::min_element(row, row + lanes) + 1;  // first key hidden from any
        const long end = mask ? keys : free + *std::max_element(row, row + lanes) + 1;
        Floats largest = Floats{} + HIDDEN, total = {};
        for (long begin = 0; begin < end; begin += KEYS) {
            const long n = std::min<long>(KEYS, end - begin);
            std::fill(p, p + n, Floats{});
            multiply(p, floats(keys_here + begin * size, n * size, room), size, 1, q, n, size);
            for (long j = std::max(begin, from); j < begin + n; j++)
                for (int lane = 0; lane < lanes; lane++)
                    p[j - begin][lane] += mask ? number(mask[row[lane] * masked + j - free])
                                               : (j - free > row[lane] ? HIDDEN : 0.0f);
            const Floats before = largest;
            for (long j = 0; j < n; j++) largest = p[j] > largest ? p[j] : largest;
            const Floats fade = exponential(before - largest);
            total *= fade;
            for (long d = 0; d < size; d++) sums[d] *= fade;
            for (long j = 0; j < n; j++) total += p[j] = exponential(p[j] - largest);
            multiply(sums, floats(values_here + begin * size, n * size, room), 1, size, p, size, n);
        }
        for (int lane = 0; lane < lanes; lane++)
            for (long d = 0; d < size; d++) store(outs[lane][d], sums[d][lane] / total[lane]);
    }
}

#define FOR(NAME, T)                                                                                                 \
    extern "C" void NAME(const T* query, const T* key, const T* value, const T* mask, T* out, long heads,            \
                         long key_heads, long rows, long keys, long masked, long size, long head_stride,             \
                         long row_stride, long key_stride, long threads, float scaling) {                            \
        attend(query, key, value, mask, out, heads, key_heads, rows, keys, masked, size, head_stride, row_stride,    \
               key_stride, threads, scaling);                                                                        \
    }

FOR(attend_float32, float)
FOR(attend_bfloat16, BFloat16)
