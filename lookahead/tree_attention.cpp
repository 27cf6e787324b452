// Attention of a step's or a prompt's tokens to the cache and to each other, for one sequence.
//
// Query heads that share a key head are taken together, and L of their queries side by side in a vector, W vectors at a
// time: a key, and a value, is then one number for all of them, nothing has to be transposed, and maxima and sums are
// those of vectors.
// Keys are taken KEYS at a time, with a running maximum and sum (Milakov & Gimelshein 2018, arXiv 1805.02867; Dao et al.
// 2022, arXiv 2205.14135, algorithm 1), all in float32.

#include <algorithm>
#include <cstdint>
#include <cstring>

constexpr int KEYS = 64, TILE = 8, WIDEST = 256;
constexpr float HIDDEN = -3.4e38f;
typedef uint16_t BFloat16;

template <int L>
struct Lanes {
    typedef float Floats __attribute__((vector_size(4 * L)));
    typedef int32_t Ints __attribute__((vector_size(4 * L)));
    typedef BFloat16 BFloat16s __attribute__((vector_size(2 * L)));
};

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

// Reads n numbers in order, for memory then keeps up, into room.
static const float* floats(const float* x, long n, float* room) {
    memcpy(room, x, n * sizeof *x);
    return room;
}

static const float* floats(const BFloat16* x, long n, float* room) {
    long i = 0;
    for (; i + 16 <= n; i += 16) {
        Lanes<16>::BFloat16s some;
        memcpy(&some, x + i, sizeof some);
        Lanes<16>::Ints bits = __builtin_convertvector(some, Lanes<16>::Ints) << 16;
        memcpy(room + i, &bits, sizeof bits);
    }
    for (; i < n; i++) room[i] = number(x[i]);
    return room;
}

// exp(x) for x <= 0 to 2 units in the last place; 0 where it would be next to nothing; NaN stays NaN.
template <int L, class Floats = typename Lanes<L>::Floats, class Ints = typename Lanes<L>::Ints>
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

// c[i] += a[i * row + j * column] * b[j], summed over j < k, for M rows i of c and k rows j of b, of W vectors each.
template <int W, int M, class Floats>
static inline void multiply_tile(Floats* c, const float* a, long row, long column, const Floats* b, long k) {
    Floats sums[M][W];
    for (int i = 0; i < M; i++)
        for (int w = 0; w < W; w++) sums[i][w] = c[i * W + w];
    for (long j = 0; j < k; j++)
        for (int i = 0; i < M; i++)
            for (int w = 0; w < W; w++) sums[i][w] += a[i * row + j * column] * b[j * W + w];
    for (int i = 0; i < M; i++)
        for (int w = 0; w < W; w++) c[i * W + w] = sums[i][w];
}

template <int W, class Floats>
static inline void multiply(Floats* c, const float* a, long row, long column, const Floats* b, long m, long k) {
    long i = 0;
    for (; i + TILE <= m; i += TILE) multiply_tile<W, TILE>(c + i * W, a + i * row, row, column, b, k);
    for (; i < m; i++) multiply_tile<W, 1>(c + i * W, a + i * row, row, column, b, k);
}

template <class T>
struct Attention {
    const T *query, *key, *value, *mask;
    T* out;
    long heads, key_heads, rows, keys, masked, size, head_stride, row_stride, key_stride, threads;
    float scaling;

    template <int L, int W>
    void run() const {
        typedef typename Lanes<L>::Floats Floats;
        const long groups = heads / key_heads, queries = groups * rows, blocks = (queries + L * W - 1) / (L * W);
        const long free = keys - (mask ? masked : rows);  // keys that all rows see
#pragma omp parallel for num_threads(threads)
        for (long item = 0; item < key_heads * blocks; item++) {
            const long head = item / blocks, first = item % blocks * (L * W);
            const int lanes = std::min<long>(L * W, queries - first);
            const T *keys_here = key + head * key_stride, *values_here = value + head * key_stride;
            float room[KEYS * WIDEST];
            Floats q[WIDEST * W] = {}, sums[WIDEST * W] = {}, p[KEYS * W], largest[W], total[W] = {};
            std::fill(largest, largest + W, Floats{} + HIDDEN);
            long row[L * W];
            T* outs[L * W];
            for (int lane = 0; lane < lanes; lane++) {
                const long of = head * groups + (first + lane) / rows;
                row[lane] = (first + lane) % rows;
                const T* x = query + of * head_stride + row[lane] * row_stride;
                for (long d = 0; d < size; d++) q[d * W + lane / L][lane % L] = number(x[d]) * scaling;
                outs[lane] = out + (row[lane] * heads + of) * size;
            }
            const long from = mask ? free : free + *std::min_element(row, row + lanes) + 1;  // first hidden from any
            const long end = mask ? keys : free + *std::max_element(row, row + lanes) + 1;
            for (long begin = 0; begin < end; begin += KEYS) {
                const long n = std::min<long>(KEYS, end - begin);
                std::fill(p, p + n * W, Floats{});
                multiply<W>(p, floats(keys_here + begin * size, n * size, room), size, 1, q, n, size);
                for (long j = std::max(begin, from); j < begin + n; j++)
                    for (int lane = 0; lane < lanes; lane++)
                        p[(j - begin) * W + lane / L][lane % L] += mask ? number(mask[row[lane] * masked + j - free])
                                                                        : (j - free > row[lane] ? HIDDEN : 0.0f);
                for (int w = 0; w < W; w++) {
                    const Floats before = largest[w];
                    for (long j = w; j < n * W; j += W) largest[w] = p[j] > largest[w] ? p[j] : largest[w];
                    const Floats fade = exponential<L>(before - largest[w]);
                    total[w] *= fade;
                    for (long d = w; d < size * W; d += W) sums[d] *= fade;
                    for (long j = w; j < n * W; j += W) total[w] += p[j] = exponential<L>(p[j] - largest[w]);
                }
                multiply<W>(sums, floats(values_here + begin * size, n * size, room), 1, size, p, size, n);
            }
            for (int lane = 0; lane < lanes; lane++)
                for (long d = 0; d < size; d++)
                    store(outs[lane][d], sums[d * W + lane / L][lane % L] / total[lane / L][lane % L]);
        }
    }
};

// query [heads][rows][size], by strides; key, value [key_heads][keys][size], their heads key_stride apart; size is at
// most WIDEST. mask [rows][masked] is added to the scores of the last `masked` keys; without one, row i of the last
// `rows` keys is seen by rows i and later. out [rows][heads][size].
template <class T>
static void attend(const Attention<T>& attention) {
    const long queries = attention.heads / attention.key_heads * attention.rows;
    if (queries <= 8)
        attention.template run<8, 1>();
    else if (queries <= 16)
        attention.template run<16, 1>();
    else
        attention.template run<16, 2>();
}

#define FOR(NAME, T)                                                                                                 \
    extern "C" void NAME(const T* query, const T* key, const T* value, const T* mask, T* out, long heads,            \
                         long key_heads, long rows, long keys, long masked, long size, long head_stride,             \
                         long row_stride, long key_stride, long threads, float scaling) {                            \
        attend(Attention<T>{query, key, value, mask, out, heads, key_heads, rows, keys, masked, size, head_stride,   \
                            row_stride, key_stride, threads, scaling});                                              \
    }

FOR(attend_float32, float)
FOR(attend_bfloat16, BFloat16)
