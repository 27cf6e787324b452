// A whole pass over the rows of one step, for decoders built like Llama: in one parallel region, so that threads meet at
// a spinning barrier a few times in a layer, and nothing is called in between.
//
//     x = embedding[ids]
//     each layer   x += o(attention(rope(q(norm(x))), rope(k(norm(x))), v(norm(x))))
//                  x += down(activation(gate(norm(x))) * up(norm(x)))
//     logits = head(norm(x)), of the last rows that are to be shown, and the likeliest tokens of the first of these
//
// Families differ in which norms there are, in factors, and in where they round. Every thread keeps x and computes its
// norms for itself, which costs less than to meet. It multiplies with a share of the outputs of each matrix. Wherever
// the model's own code rounds to its dtype, so does this.

#include <sched.h>

#include <atomic>

#include "peaks.h"
#include "products.h"
#include "threads.h"
#include "tile_attention.h"

using namespace products;

constexpr long BLOCK = 48;  // outputs that a thread takes at a time, by vectors
#ifdef HAS_TILES
constexpr long GATED = 192;  // outputs of an MLP's halves that a thread takes at a time
#else
constexpr long GATED = BLOCK;
#endif
constexpr long MOST_PARTS = 512;  // of keys, for texts of any length
constexpr long LOOKED_AT = 512;   // logits of a row that are looked at as soon as they are there
constexpr int SPINS = 4096;

template <class T>
struct Layer {
    Matrix<T> q, k, v, o, gate, up, down;
    const T *input_norm, *mlp_norm;                 // of what attention and the MLP take, or null
    const T *q_norm, *k_norm, *o_norm, *down_norm;  // of what these products give, or null
    const float *cos, *sin;                         // [positions][rotary], or null: without rotary embedding
    T *keys, *values;                               // [key_heads][..][size]: the first key that the pass shows
    long key_stride;                                // from head to head
    long held;                                      // keys before those of the pass
    const bool* hidden;                             // [rows][masked]: which of the last keys are not seen
    long masked;
    T* output;  // [rows][hidden]: the output of the layer goes here too, if it is asked for
};

template <class T>
struct Pass {
    const Layer<T>* layers;
    Matrix<T> head;
    const long* ids;                  // [rows]
    const T *embedding, *norm;        // [vocabulary][hidden], [hidden]
    const long* positions;            // [rows]
    T *product, *q, *attended, *mlp;  // [rows] of hidden, heads * size, heads * size, intermediate
    T* first_hidden;                  // [rows][hidden]: the embedding goes here too, if it is asked for
    float *largest, *total, *sums;    // parts of attention (`attention::Part`), for all heads
    void* room;                       // what a thread needs for itself, `room_bytes` for each: see `sizes`
    void* peaks;                      // the likeliest tokens that threads find, of each row: see `sizes`
    long* tokens;                     // [said][likeliest]: the likeliest tokens of rows that are shown
    float* probabilities;             // of these
    long room_bytes, layer_count, rows, shown, said, likeliest;
    long length, keys_of_step;  // positions before the step, and keys of it that the caches hold after this pass
    long has_near;              // whether near keys are summed apart (`attention.h`), as those of steps must be
    long hidden, heads, key_heads, size, rotary, intermediate, threads;
    long is_gelu;                              // the activation: GELU as approximated by tanh, or SiLU
    long norms_round_once;                     // not before they multiply with their weights
    long rotary_rounds_once;                   // not before products are added up
    long norms_of_rows;                        // q_norm and k_norm are of all heads of a row together, not of each
    double epsilon, scaling;                   // of norms, and of attention
    double norm_offset;                        // added to the weights of norms
    double embedding_factor, residual_factor;  // of what the embedding gives, and of what is added to x
    double temperature;                        // of the probabilities
};

// Threads wait for each other in turns of the processor, and give it away if that takes long. Between two barriers, they
// may take items in turn.
struct Barrier {
    alignas(64) std::atomic<long> arrived{0};
    alignas(64) std::atomic<long> phase{0};
    alignas(64) std::atomic<long> taken{0};

    long take() { return taken.fetch_add(1, std::memory_order_relaxed); }

    void wait(long threads) {
        const long now = phase.load(std::memory_order_relaxed);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
            arrived.store(0, std::memory_order_relaxed);
            taken.store(0, std::memory_order_relaxed);
            phase.store(now + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; phase.load(std::memory_order_acquire) == now;)
            if (++spins < SPINS) {
#if defined(__x86_64__)
                __builtin_ia32_pause();
#endif
            } else {
                sched_yield();
            }
    }
};

// The nearest number of type T, as a float.
template <class T>
static INLINE float rounded_to(float x) {
    T nearest;
    store(x, &nearest);
    return number(nearest);
}

// RMSNorm (Zhang & Sennrich 2019, arXiv 1910.07467) of n numbers.
template <class T>
static void normalize(const Pass<T>& pass, const T* x, const T* weight, long n, T* out) {
    float partial[16] = {}, sum = 0;
    long i = 0;
    for (; i + 16 <= n; i += 16)
        for (int l = 0; l < 16; l++) partial[l] += number(x[i + l]) * number(x[i + l]);
    for (; i < n; i++) sum += number(x[i]) * number(x[i]);
    for (int l = 0; l < 16; l++) sum += partial[l];
    const float scale = 1 / __builtin_sqrtf(sum / n + float(pass.epsilon)), offset = pass.norm_offset;
    for (i = 0; i < n; i++) {
        const float y = number(x[i]) * scale;
        store((number(weight[i]) + offset) * (pass.norms_round_once ? y : rounded_to<T>(y)), out + i);
    }
}

// Rotary embedding (Su et al. 2021, arXiv 2104.09864) of one head, in place: number i turns with number i + n / 2.
// Products are rounded to type By before they are added up.
template <class By, class T>
static void rotate(T* x, const float* cos, const float* sin, long n) {
    for (long i = 0; i < n / 2; i++) {
        const long j = i + n / 2;
        const float a = number(x[i]), b = number(x[j]);
        store(rounded_to<By>(a * cos[i]) + rounded_to<By>(-b * sin[i]), x + i);
        store(rounded_to<By>(b * cos[j]) + rounded_to<By>(a * sin[j]), x + j);
    }
}

// up = activation(gate) * up, of WIDTH numbers. SiLU is x * sigmoid(x). GELU as approximated by tanh (Hendrycks & Gimpel
// 2016, arXiv 1606.08415) is x * sigmoid(y) with y = sqrt(8 / pi) * (x + 0.044715 * x^3), as 1 + tanh(z) is
// 2 * sigmoid(2 * z).
template <class T>
static void activate(bool is_gelu, const T* gate, T* up) {
    typedef Lanes<WIDTH>::Floats Floats;
    const Floats x = load(gate);
    const Floats y = is_gelu ? x * (1.5957691216f + 0.0713548163f * x * x) : x;
    const Floats power = exponential<WIDTH>(y < 0 ? y : -y);
    T activated[WIDTH];
    store(x * (y < 0 ? power : Floats{} + 1.0f) / (1.0f + power), activated);
    store(load(activated) * load(up), up);
}

// The same of n numbers.
template <class T>
static void activate(bool is_gelu, const T* gate, T* up, long n) {
    for (; n >= WIDTH; n -= WIDTH, gate += WIDTH, up += WIDTH) activate(is_gelu, gate, up);
    if (!n) return;
    T last_gate[WIDTH] = {}, last_up[WIDTH] = {};
    std::copy_n(gate, n, last_gate), std::copy_n(up, n, last_up);
    activate(is_gelu, last_gate, last_up);
    std::copy_n(last_up, n, up);
}

// Where a thread's parts of the room lie, in bytes: x, normed, prepared, scratch, of attention, near; and where it ends.
template <class By>
struct Places {
    long at[7] = {};

    explicit Places(const Pass<typename By::Number>& pass) {
        const long widest = std::max({pass.hidden, pass.heads * pass.size, pass.intermediate});
        const long numbers = pass.rows * (long)sizeof(typename By::Number);
        const long sizes[] = {numbers * pass.hidden, numbers * pass.hidden, Input<By>::bytes(pass.rows, widest),
                              numbers * GATED, attention::room_for(pass.keys_of_step), pass.rows * (long)sizeof(long)};
        for (int i = 0; i < 6; i++) at[i + 1] = at[i] + (sizes[i] + 63) / 64 * 64;
    }
};

template <class By>
struct Thread {
    typedef typename By::Number T;

    const Pass<T>& pass;
    Barrier& barrier;
    const long index;
    T *const x, *const normed;  // [rows][hidden]
    void* const prepared;       // the input of a product, if it is not taken as it is
    T* const scratch;           // [rows][GATED]
    void* const of_attention;
    long* const near;  // [rows], of `attention::Attention`
    peaks::Peaks* const seen = (peaks::Peaks*)pass.peaks;  // [threads][said]

    void meet() { barrier.wait(pass.threads); }

    // The input of products with some matrices, [rows][inputs].
    Input<By> prepare(const T* x, long rows, long inputs, std::initializer_list<const Matrix<T>*> matrices) {
        int forms = 0;
        for (const Matrix<T>* matrix : matrices) forms |= Input<By>::form_for(*matrix, inputs);
        const Input<By> input = {x, rows, inputs, prepared, forms};
        for (long part = 0; part < input.parts(); part++) input.make(part);
        return input;
    }

    // All rows, [rows][hidden], after a norm, if there is one.
    const T* normalize_rows(const T* rows, const T* weight) {
        if (!weight) return rows;
        for (long at = 0; at < pass.rows * pass.hidden; at += pass.hidden)
            normalize(pass, rows + at, weight, pass.hidden, normed + at);
        return normed;
    }

    // Outputs begin..end-1 of all rows. next: the weights that this thread wants then.
    void multiply(const Input<By>& x, const Matrix<T>& matrix, long begin, long end, const void* next) {
        const long size = Input<By>::form_for(matrix, x.inputs) ? end - begin : BLOCK;
        for (long first = begin; first < end; first += size)
            products::multiply(x, matrix, first, std::min(end, first + size), next);
    }

    // This thread's share of n outputs, in whole groups of 16.
    long share(long n, long of) const { return std::min(n, (n + 15) / 16 * of / pass.threads * 16); }

    void multiply_share(const T* x, const Matrix<T>& matrix, long rows, long inputs, const void* next = nullptr) {
        const long begin = share(matrix.outputs, index), end = share(matrix.outputs, index + 1);
        multiply(prepare(x, rows, inputs, {&matrix}), matrix, begin, end, next);
    }

    // The first weights of this thread's share of a matrix.
    const void* share_of(const Matrix<T>& matrix, long inputs) const {
        return matrix.at(share(matrix.outputs, index), inputs);
    }

    // x += product, after a norm, if there is one
    void add_product(const T* norm) {
        const T* from = normalize_rows(pass.product, norm);
        const float factor = pass.residual_factor;
        for (long i = 0; i < pass.rows * pass.hidden; i++)
            store(number(x[i]) + rounded_to<T>(factor * number(from[i])), x + i);
    }

    // Call f(matrix, begin, end, next) for this thread's share of query, key and value together. next: the matrix in
    // which the share goes on, or null.
    template <class F>
    void for_query_key_value(const Layer<T>& layer, F f) const {
        const Matrix<T>* const matrices[] = {&layer.q, &layer.k, &layer.v, nullptr};
        const long n = layer.q.outputs + layer.k.outputs + layer.v.outputs;
        long begin = share(n, index), end = share(n, index + 1);
        for (int i = 0; i < 3 && begin < end; i++) {
            const long outputs = matrices[i]->outputs;
            if (begin < outputs) f(*matrices[i], begin, std::min(end, outputs), end > outputs ? matrices[i + 1] : nullptr);
            begin = std::max(begin - outputs, 0L), end -= outputs;
        }
    }

    void query_key_value(const Layer<T>& layer) {
        const Input<By> taken = prepare(normalize_rows(x, layer.input_norm), pass.rows, pass.hidden,
                                        {&layer.q, &layer.k, &layer.v});
        for_query_key_value(layer, [&](const Matrix<T>& matrix, long begin, long end, const Matrix<T>* next) {
            multiply(taken, matrix, begin, end,
                     next ? next->at(0, pass.hidden) : share_of(layer.o, pass.heads * pass.size));
        });
    }

    // The first weights that this thread wants of layer i, or of the head after the last layer.
    const void* first_of_layer(long i) const {
        const void* first = nullptr;
        if (i == pass.layer_count) return share_of(pass.head, pass.hidden);
        for_query_key_value(pass.layers[i], [&](const Matrix<T>& matrix, long begin, long, const Matrix<T>*) {
            if (!first) first = matrix.at(begin, pass.hidden);
        });
        return first;
    }

    // Norms of all heads of a row together: of queries and of keys, rows in turn.
    void normalize_heads(const Layer<T>& layer) {
        for (long item = index; item < 2 * pass.rows; item += pass.threads) {
            const bool is_key = item % 2;
            const long n = is_key ? layer.k.outputs : layer.q.outputs;
            T* to = (is_key ? layer.k.out : pass.q) + item / 2 * n;
            normalize(pass, to, is_key ? layer.k_norm : layer.q_norm, n, to);
        }
        meet();
    }

    // Norm and rotary embedding of a head of a row's queries or keys.
    void turn(T* to, const Layer<T>& layer, long row, const T* norm) {
        if (norm && !pass.norms_of_rows) normalize(pass, to, norm, pass.size, to);
        if (!layer.cos) return;
        const long turned = pass.positions[row] * pass.rotary;
        const auto rotated = pass.rotary_rounds_once ? rotate<float, T> : rotate<T, T>;
        rotated(to, layer.cos + turned, layer.sin + turned, pass.rotary);
    }

    // Turn queries, and append keys and values to the cache: heads in turn.
    void append(const Layer<T>& layer) {
        const long size = pass.size;
        for (long head = index; head < pass.heads; head += pass.threads)
            for (long row = 0; row < pass.rows; row++)
                turn(pass.q + (row * pass.heads + head) * size, layer, row, layer.q_norm);
        for (long head = index; head < pass.key_heads; head += pass.threads)
            for (long row = 0; row < pass.rows; row++) {
                T* key = layer.keys + head * layer.key_stride + (layer.held + row) * size;
                memcpy(key, layer.k.out + (row * pass.key_heads + head) * size, size * sizeof(T));
                turn(key, layer, row, layer.k_norm);
                memcpy(layer.values + head * layer.key_stride + (layer.held + row) * size,
                       layer.v.out + (row * pass.key_heads + head) * size, size * sizeof(T));
            }
    }

    // Threads take parts of the keys of all heads as they come to it, the larger ones first.
    void attend(const Layer<T>& layer) {
        using attention::KEYS, attention::LANES;
        const long heads = pass.key_heads, keys = layer.held + pass.rows;
        const long start = pass.length - (layer.held - (pass.keys_of_step - pass.rows));
        long far = pass.has_near ? 0 : keys;  // so many keys are far from some row
        for (long row = 0; row < pass.rows && pass.has_near; row++) {
            const long begin = std::min(pass.positions[row] - attention::NEAR, pass.length) / KEYS * KEYS;
            near[row] = std::max(0L, begin - start), far = std::max(far, near[row]);
        }
        const attention::Attention<T> all = {
            pass.q, layer.keys, layer.values, nullptr, layer.hidden, pass.attended, pass.heads, heads, pass.rows, keys,
            layer.masked, pass.size, pass.size, pass.heads * pass.size, layer.key_stride, float(pass.scaling), start,
            pass.has_near ? near : nullptr};
        long ends[MOST_PARTS + 1] = {}, far_parts = 0;
        while (ends[far_parts] < far) {
            const long end = std::min(far, attention::end_of_part(start + ends[far_parts]) - start);
            ends[++far_parts] = end;
        }
        const long queries = all.queries(), parts = far_parts + pass.has_near;
        const auto part_of = [&](long i) {
            return attention::Part{pass.largest + i * queries, pass.total + i * queries,
                                   pass.sums + i * queries * pass.size};
        };
        const long blocks = all.blocks(), far_items = far_parts * heads * blocks;
        const long items = far_items + (pass.has_near ? heads * ((queries + LANES - 1) / LANES) : 0);
        for (long item; (item = barrier.take()) < items;) {
            const bool is_near = item >= far_items;
            const long of_kind = is_near ? item - far_items : item, head = of_kind % heads, block = of_kind / heads;
            const long part = is_near ? far_parts : far_parts - 1 - block / blocks;
            const attention::Part place = part_of(head * parts + part), *const to = parts > 1 ? &place : nullptr;
            if (is_near)
                all.near_block(head, block * LANES, to, of_attention);
            else
                all.block(head, block % blocks * all.lanes(), ends[part], ends[part + 1], to, of_attention);
        }
        if (parts > 1) {
            meet();
            for (long item = index; item < heads * queries; item += pass.threads)
                all.join(item / queries, item % queries, part_of(item / queries * parts), parts);
        }
    }

    void gated(const Layer<T>& layer) {
        const Input<By> taken =
            prepare(normalize_rows(x, layer.mlp_norm), pass.rows, pass.hidden, {&layer.gate, &layer.up});
        const long n = pass.intermediate, inputs = pass.hidden;
        const long begin = share(n, index), end = share(n, index + 1);
        for (long first = begin; first < end; first += GATED) {
            const long last = std::min(end, first + GATED), width = last - first;
            multiply(taken, layer.gate.part(first, width, inputs, scratch), 0, width, layer.up.at(first, inputs));
            multiply(taken, layer.up, first, last, last < end ? layer.gate.at(last, inputs) : share_of(layer.down, n));
            for (long row = 0; row < pass.rows; row++)
                activate(pass.is_gelu, scratch + row * width, pass.mlp + row * n + first, width);
        }
    }

    void keep(T* to) {  // the rows of x, if they are asked for
        if (to && index == 0) memcpy(to, x, pass.rows * pass.hidden * sizeof(T));
    }

    void embed() {
        const float factor = pass.embedding_factor;
        for (long row = 0; row < pass.rows; row++)
            for (long i = 0; i < pass.hidden; i++)
                store(factor * number(pass.embedding[pass.ids[row] * pass.hidden + i]), x + row * pass.hidden + i);
    }

    void logits(const T* normed) {
        const Matrix<T>& head = pass.head;
        const Input<By> taken = prepare(normed, pass.shown, pass.hidden, {&head});
        const long begin = share(head.outputs, index), end = share(head.outputs, index + 1);
        peaks::Peaks* const own = seen + index * pass.said;
        for (long row = 0; row < pass.said; row++) new (own + row) peaks::Peaks(pass.likeliest, pass.temperature);
        const long size = pass.said ? LOOKED_AT : end - begin;
        for (long first = begin; first < end; first += size) {
            const long last = std::min(end, first + size);
            multiply(taken, head, first, last, nullptr);
            for (long row = 0; row < pass.said; row++)
                own[row].add(head.out + row * head.outputs + first, last - first, first);
        }
        if (!pass.said) return;
        meet();
        for (long row = index; row < pass.said; row += pass.threads) {
            for (long thread = 1; thread < pass.threads; thread++) seen[row].add(seen[thread * pass.said + row]);
            seen[row].put(pass.probabilities + row * pass.likeliest, pass.tokens + row * pass.likeliest);
        }
    }

    // Returns whether a row has become NaN before the head.
    bool run() {
        embed();
        keep(pass.first_hidden);
        for (long i = 0; i < pass.layer_count; i++) {
            const Layer<T>& layer = pass.layers[i];
            query_key_value(layer);
            meet();
            if (pass.norms_of_rows) normalize_heads(layer);
            append(layer);
            meet();
            attend(layer);
            meet();
            multiply_share(pass.attended, layer.o, pass.rows, pass.heads * pass.size,
                           share_of(layer.gate, pass.hidden));
            meet();
            add_product(layer.o_norm);
            gated(layer);
            meet();
            multiply_share(pass.mlp, layer.down, pass.rows, pass.intermediate, first_of_layer(i + 1));
            meet();
            add_product(layer.down_norm);
            if (i + 1 < pass.layer_count) keep(layer.output);
        }
        const T* last = normalize_rows(x, pass.norm);
        if (T* to = pass.layers[pass.layer_count - 1].output; to && index == 0)  // the last is given after the norm
            memcpy(to, last, pass.rows * pass.hidden * sizeof(T));
        logits(last + (pass.rows - pass.shown) * pass.hidden);
        return std::count_if(last, last + pass.rows * pass.hidden, [](T x) { return number(x) != number(x); });
    }
};

template <class By>
static long run(const Pass<typename By::Number>& pass) {
    typedef typename By::Number T;
    Barrier barrier;
    bool has_nan = false;
    const Places<By> places(pass);
#pragma omp parallel num_threads(pass.threads)
    {
        const TileUnit unit;
        const long index = omp_get_thread_num();
        Pass<T> here = pass;
        here.threads = omp_get_num_threads();  // may be fewer than were asked for
        char* const own = (char*)pass.room + index * pass.room_bytes;
        const auto part = [&](int i) { return own + places.at[i]; };
        const bool found =
            Thread<By>{here, barrier, index, (T*)part(0), (T*)part(1), part(2), (T*)part(3), part(4), (long*)part(5)}.run();
        if (index == 0) has_nan = found;  // every thread has all rows
    }
    return has_nan;
}

template <class By>
static void measure(const Pass<typename By::Number>& pass, long* sizes) {
    sizes[0] = Places<By>(pass).at[6];
    sizes[1] = pass.threads * pass.rows * sizeof(peaks::Peaks);
    sizes[2] = 2;  // the near keys, and what is left of a part
    for (long end = 0; end < pass.length + pass.rows; end = attention::end_of_part(end)) sizes[2]++;
}

// Returns whether a row has become NaN before the head.
extern "C" long run_float32(const Pass<float>* pass) { return run<ByFloats>(*pass); }
extern "C" long run_bfloat16(const Pass<BFloat16>* pass) {
    return by_pairs([=](auto by) { return run<decltype(by)>(*pass); });
}

// Write the bytes that a thread needs for itself, and those of all peaks, which are to be aligned to 64 bytes; and in how
// many parts attention may be computed.
extern "C" void sizes_float32(const Pass<float>* pass, long* sizes) { measure<ByFloats>(*pass, sizes); }
extern "C" void sizes_bfloat16(const Pass<BFloat16>* pass, long* sizes) {
    by_pairs([=](auto by) { measure<decltype(by)>(*pass, sizes); });
}

// Move rows of `bytes` bytes from the columns `sources` to the columns `targets`, both ascending and targets[i] <=
// sources[i], of each head of each buffer. strides: bytes from head to head, of each buffer.
extern "C" void move_rows_uint8(char* const* buffers, const long* strides, long buffer_count, long heads, long bytes,
                                const long* sources, const long* targets, long count) {
    for (long i = 0; i < buffer_count; i++)
        for (long head = 0; head < heads; head++)
            for (long j = 0; j < count; j++) {
                char* const at = buffers[i] + head * strides[i];
                memcpy(at + targets[j] * bytes, at + sources[j] * bytes, bytes);
            }
}
