// A whole pass over rows of one or several sequences, as a program: a list of operations over buffers, which
// `operations.py` describes and `executor.py` lays out in memory. It runs in one parallel region, so nothing is called in
// between. Only the caches know sequences; to all other operations, a row is a row.
//
// Threads run all operations side by side. A buffer is either shared, and each thread computes a part of it, or private:
// every thread keeps all of it for itself, which for sums and norms costs less than to meet. Threads meet at a spinning
// barrier before an operation that needs what others have written; `executor.py` finds where. Wherever the model's own
// code rounds to its dtype, so does this.

#include <sched.h>
#include <time.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <atomic>
#include <climits>

#include "amx_attention.h"
#include "digest.h"
#include "gemm.h"
#include "head_gemm.h"
#include "recurrence.h"
#include "threads.h"
#include "top_k_softmax.h"

using namespace gemm;

constexpr long BLOCK = 48;        // outputs that a thread takes at a time, by vectors
constexpr long MOST_PARTS = 128;  // of keys, for texts of any length
constexpr long LOOKED_AT = 512;   // logits of a row that are looked at as soon as they are there
constexpr int SPINS = 2048;       // 0.1 ms where a pause takes 140 cycles, a tenth of the shortest turn of another program

// The structures that Python fills are described once, here: each field has 8 bytes, and `describe` says its name and
// kind. So are the limits that Python keeps: products of an operation, experts of a layer, outputs that threads share out
// together, bytes of a `Choice`, and inputs that a convolution reads, or that a state holds of each channel,
// keys of a head of a state, and streams that are added to others.
#define LIMITS(DO) DO(MOST_PRODUCTS, 8) DO(MOST_EXPERTS, 512) DO(OUTPUTS_TOGETHER, 16) DO(CHOICE_BYTES, 8) DO(MOST_TAPS, 8) \
    DO(MOST_STATE_KEYS, 256) DO(MOST_STREAMS, 8)
#define KINDS(DO)                                                                                                 \
    DO(EMBED) DO(NORM) DO(NORM_HEADS) DO(PRODUCTS) DO(HEADPRODUCTS) DO(SELECT) DO(JOIN) DO(ROTARY) DO(APPEND) \
    DO(ATTEND) DO(CONVOLVE) DO(DELTA) DO(DELTABYKEY) DO(SCAN) DO(GATE) DO(CLIP) DO(XIELU)                    \
    DO(EXPERTS) DO(WEIGH) DO(SCALE) DO(ADD) DO(BLEND) DO(RESCALE) DO(CUT) DO(KEEP) DO(LOGITS)
#define ACTIVATIONS(DO) DO(SILU) DO(GELU) DO(GELU_TANH) DO(GELU_NEW) DO(GELU_BLOOM) DO(RELU) DO(RELU_SQUARED) \
    DO(SIGMOID) DO(TANH) DO(SOFTPLUS) DO(IDENTITY)

#define OPERATION(FIELD, T)                                                                             \
    FIELD(long, kind)                                                                                   \
    FIELD(long, meets)       /* whether threads meet before it */                                       \
    FIELD(long, x)           /* the buffer that it reads */                                             \
    FIELD(long, y)           /* another buffer that it reads, or -1 */                                  \
    FIELD(long, out)         /* the buffer that it writes */                                            \
    FIELD(long, width)       /* elements of a row of x */                                               \
    FIELD(long, size)        /* elements of a head, or normed together, or read by a router */          \
    FIELD(long, value_size)  /* elements of a head of values, and of attention's output */              \
    FIELD(const T*, weight)  /* of a norm, an embedding, heads, taps, scales or streams; or sinks of attention */ \
    FIELD(long, format)      /* in which the weights of an embedding are (`Format`) */                  \
    FIELD(const T*, bias)    /* of a norm or taps, or an embedding of positions; or null */             \
    FIELD(long, has_wide_weight)  /* taps, log_speeds or sinks are in float32, whatever T is */         \
    FIELD(long, has_wide_bias)    /* their bias is in float32, whatever T is */                          \
    FIELD(const void*, products) /* [count] of `Product`; of experts: the router, then those of each */ \
    FIELD(long, count)                                                                                  \
    FIELD(long, is_each_shared)  /* each product is shared out by itself, not all of them together */   \
    FIELD(long, next)        /* the operation that multiplies next, or -1 */                            \
    FIELD(const long*, temporary) /* buffers that an operation needs beside `out` */                    \
    FIELD(long, is_gated)    /* the first product of an expert gives gates and what they multiply */    \
    FIELD(long, top_k)       /* experts of a row */                                                     \
    FIELD(long, adds_to_one) /* the weights of a row's experts are divided by their sum */              \
    FIELD(long, rounds_weights)  /* the weights of experts are rounded at the end */                    \
    FIELD(long, rounds_steps)  /* they are rounded at each step, too */                                 \
    FIELD(long, rounds_ranks)  /* what experts are chosen by is rounded */                              \
    FIELD(long, ranks_scores)  /* experts are chosen by scores, not by weights */                       \
    FIELD(long, weighs_inputs) /* weights multiply the inputs of experts, not their outputs */          \
    FIELD(long, is_apart)    /* gates of experts have a product of their own */                         \
    FIELD(long, identities)  /* the number of last experts that return their input */                   \
    FIELD(long, is_sigmoid)  /* weights of experts are sigmoids, not a softmax */                       \
    FIELD(long, groups)      /* number of groups of experts */                                          \
    FIELD(long, top_groups)  /* number of groups from which a row's experts come */                     \
    FIELD(long, best_of_group)  /* groups are ranked by the sum of so many of their experts: 1 or 2 */  \
    FIELD(const float*, correction) /* [experts], added where they are chosen; or null */               \
    FIELD(const float*, router) /* [experts][width]; null if it is the first product */                 \
    FIELD(const float*, scales) /* [experts], by which their weights are multiplied; or null */         \
    FIELD(long, taken)       /* number of heads of each `count` that are selected, from `index` on */   \
    FIELD(long, repeats)     /* how often each selected head is repeated */                             \
    FIELD(long, heads)       /* number of selected heads; or of heads that are multiplied or joined */  \
    FIELD(long, is_transposed)  /* rows of a head's weights take its elements, and do not give them */  \
    FIELD(const float*, biases)  /* [heads][positions], added to scores by the positions of keys; or null */ \
    FIELD(long, positions)                                                                              \
    FIELD(long, by_distance)  /* the last bias is that of the row's own position, and not of the last one */ \
    FIELD(long, rounds_scores)                                                                          \
    FIELD(long, is_latent)   /* keys are also values, and what the cache holds as values is more of keys */ \
    FIELD(long, index)       /* of a layer of the cache, a rotary embedding or an output; an offset */  \
    FIELD(long, rounds_once) /* not before a norm multiplies, or rotary products are added up */        \
    FIELD(long, is_centered) /* a norm takes the mean away */                                           \
    FIELD(long, gates_after)  /* a gate multiplies the output of a norm, not its input */               \
    FIELD(long, is_interleaved) /* adjacent elements rotate together */                                 \
    FIELD(long, separates)   /* interleaved elements are written as two halves */                       \
    FIELD(long, taps)        /* number of taps of a convolution */                                      \
    FIELD(long, first)       /* a convolution's first channel among those of its layer; or a first stream */ \
    FIELD(const T*, skips)   /* [heads], by which a recurrence adds its values */                       \
    FIELD(long, activation)                                                                             \
    FIELD(double, factor)    /* of what is embedded, scaled, added, attended with, or of experts */     \
    FIELD(double, cap)       /* of scores of attention or of experts, or 0 */                           \
    FIELD(double, limit)     /* of what is clipped; of gates of experts, or of logarithms of decays; or 0 */ \
    FIELD(double, nearness)  /* of scores that share the weight of an expert which is chosen in its turn; or -1 */ \
    FIELD(double, alpha)     /* of these, or of xIELU */                                                \
    FIELD(double, epsilon)   /* of a norm, or of a sum of weights */                                    \
    FIELD(double, offset)    /* added to the weights of a norm */

#define CACHED(FIELD, T)                                                                                \
    FIELD(T*, keys)          /* [key heads][..][size]: the first key that the pass shows */             \
    FIELD(T*, values)                                                                                   \
    FIELD(long, key_stride)  /* numbers from head to head */                                            \
    FIELD(long, value_stride)                                                                           \
    FIELD(long, held)        /* keys before those of the pass */                                        \
    FIELD(const bool*, hidden)   /* [rows][masked]: which of the last keys are not seen */              \
    FIELD(long, masked)                                                                                 \
    FIELD(T*, inputs)        /* [channels][columns]: the last inputs of convolutions */                 \
    FIELD(T*, inputs_of_rows)    /* where the inputs of this pass's rows go (`recurrence::Inputs`) */   \
    FIELD(long, channels)                                                                               \
    FIELD(long, columns)                                                                                \
    FIELD(float*, state)     /* of its recurrence (`recurrence::State`) */                              \
    FIELD(long, is_by_values)                                                                           \
    FIELD(float*, updates)   /* what the rows do to the state */                                        \
    FIELD(long, state_heads)                                                                            \
    FIELD(long, state_keys)                                                                             \
    FIELD(long, state_values)                                                                           \
    FIELD(long, state_decays)    /* of a head: one, or one for each key */

#define SEQUENCE(FIELD, T)                                                                              \
    FIELD(long, begin)         /* its first row in the pass */                                          \
    FIELD(long, rows)                                                                                   \
    FIELD(long, length)        /* positions before its step */                                          \
    FIELD(long, keys_of_step)  /* keys of the step that its caches hold after this pass */              \
    FIELD(double, temperature) /* of the probabilities of the top-k tokens */

#define ROTARY_TABLE(FIELD, T)                                                                          \
    FIELD(const float*, cos) /* [positions][width] */                                                   \
    FIELD(const float*, sin)                                                                            \
    FIELD(long, width)       /* elements of a head that rotate, the first ones */

#define PASS(FIELD, T)                                                                                  \
    FIELD(const void*, operations)                                                                      \
    FIELD(long, operation_count)                                                                        \
    FIELD(const void*, sequences)  /* [sequence_count] of `Sequence`, in the order of their rows */     \
    FIELD(long, sequence_count)                                                                         \
    FIELD(const void*, caches)     /* [sequence_count][layers] of `Cached` */                           \
    FIELD(long, layers)            /* of a cache */                                                     \
    FIELD(const void*, rotaries)   /* of `RotaryTable` */                                               \
    FIELD(const void*, outputs)    /* [outputs]: where the rows of each go, or null */                  \
    FIELD(const long*, ids)        /* [rows] */                                                         \
    FIELD(const long*, positions)  /* [rows] */                                                         \
    FIELD(const long*, parents)    /* [rows]: of each row, among those of its sequence, or -1 */        \
    FIELD(const long*, places)     /* of each buffer in its room, in bytes, the private ones first */   \
    FIELD(long, private_count)                                                                          \
    FIELD(void*, shared)           /* the room of all threads */                                        \
    FIELD(void*, room)             /* what a thread needs for itself, `room_bytes` for each */          \
    FIELD(long, room_bytes)                                                                             \
    FIELD(long, private_bytes)     /* of which these are private buffers */                             \
    FIELD(float*, largest)         /* parts of attention (`attention::Part`), for all heads */          \
    FIELD(float*, total)                                                                                \
    FIELD(float*, sums)                                                                                 \
    FIELD(void*, tops)             /* the top-k tokens that each thread finds, of each row */           \
    FIELD(T*, logits)              /* [shown][vocabulary] */                                            \
    FIELD(long*, tokens)           /* [said][top_k]: tokens of the rows that are shown */           \
    FIELD(float*, probabilities)   /* of these */                                                       \
    FIELD(long, rows)                                                                                   \
    FIELD(long, shown)                                                                                  \
    FIELD(long, said)                                                                                   \
    FIELD(long, top_k)                                                                                  \
    FIELD(long, longest)           /* the most positions of a sequence before its step */               \
    FIELD(long, most_keys)         /* the most `keys_of_step` of a sequence */                          \
    FIELD(long, has_near)          /* whether near keys are summed apart, as those of steps must be */  \
    FIELD(long, widest)            /* numbers of a row of the widest input of a product */              \
    FIELD(long, state_keys)        /* of the widest state of a recurrence, or 0 */                      \
    FIELD(double*, lost)           /* [threads]: the share of the pass in which each had no processor */ \
    FIELD(long, threads)

#define DECLARE(TYPE, NAME) TYPE NAME;
#define NAMED(TYPE, NAME) #TYPE "|" #NAME ","

#define LIMITED(NAME, VALUE) constexpr long NAME = VALUE;
LIMITS(LIMITED)
#define NUMBERED(NAME) NAME,
static_assert(MOST_TAPS == recurrence::MOST_TAPS && MOST_STATE_KEYS == recurrence::MOST_KEYS);
enum Kind : long { KINDS(NUMBERED) };
enum Activation : long { ACTIVATIONS(NUMBERED) };
template <class T>
struct Operation {
    OPERATION(DECLARE, T)
};
template <class T>
struct Product {
    Matrix<T> matrix;
    long out;          // the buffer that it writes, which takes the place of the matrix's own
    uint64_t* digest;  // what the digest of its weights is added to, or null; these are of type T
};
template <class T>
struct Cached {
    CACHED(DECLARE, T)
};
template <class T>
static Weights<T> weights_of(const Operation<T>& of) {
    return {of.weight, of.has_wide_weight != 0};
}

template <class T>
static Weights<T> biases_of(const Operation<T>& of) {
    return {of.bias, of.has_wide_bias != 0};
}

template <class T>
static recurrence::Inputs<T> inputs_of(const Cached<T>& cache) {
    return {cache.inputs, cache.inputs_of_rows, cache.channels, cache.columns};
}

template <class T>
static recurrence::State state_of(const Cached<T>& cache) {
    return {cache.state, cache.is_by_values != 0, cache.updates, cache.state_heads, cache.state_keys, cache.state_values,
            cache.state_decays};
}

template <class T>
struct Sequence {
    SEQUENCE(DECLARE, T)
};
template <class T>
struct RotaryTable {
    ROTARY_TABLE(DECLARE, T)
};
template <class T>
struct Pass {
    PASS(DECLARE, T)

    const Operation<T>& at(long i) const { return ((const Operation<T>*)operations)[i]; }
};

static double seconds_of(clockid_t clock) {
    timespec now;
    clock_gettime(clock, &now);
    return now.tv_sec + 1e-9 * now.tv_nsec;
}

// Threads wait for each other actively. If that takes long, another program has the processor of one of them. Then they
// sleep, so that the system can move that thread to a processor that is free. Between two barriers, they may take items in
// turn.
struct Barrier {
    alignas(64) std::atomic<long> arrived{0};
    alignas(64) std::atomic<int> phase{0};
    alignas(64) std::atomic<int> asleep{0};
    alignas(64) std::atomic<long> taken{0};

    long take() { return taken.fetch_add(1, std::memory_order_relaxed); }

    // Returns for how many seconds this thread has slept.
    double wait(long threads) {
        const int now = phase.load(std::memory_order_relaxed);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
            arrived.store(0, std::memory_order_relaxed);
            taken.store(0, std::memory_order_relaxed);
            phase.store(now + 1);
            if (asleep.load()) wake();
            return 0;
        }
        for (int spins = 0; spins < SPINS; spins++) {
            if (phase.load(std::memory_order_acquire) != now) return 0;
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
        }
        const double begin = seconds_of(CLOCK_MONOTONIC);
        asleep.fetch_add(1);
        while (phase.load() == now) sleep(now);
        asleep.fetch_sub(1);
        return seconds_of(CLOCK_MONOTONIC) - begin;
    }

   private:
#ifdef __linux__
    void sleep(int now) { syscall(SYS_futex, &phase, FUTEX_WAIT_PRIVATE, now, nullptr, nullptr, 0); }
    void wake() { syscall(SYS_futex, &phase, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0); }
#else
    void sleep(int) { sched_yield(); }
    void wake() {}
#endif
};

// The sum of f(number) over n numbers, in 16 lanes.
template <class T, class F>
static INLINE float sum_of(const T* x, long n, F f) {
    float partial[16] = {}, sum = 0;
    long i = 0;
    for (; i + 16 <= n; i += 16)
        for (int l = 0; l < 16; l++) partial[l] += f(number(x[i + l]));
    for (; i < n; i++) sum += f(number(x[i]));
    for (int l = 0; l < 16; l++) sum += partial[l];
    return sum;
}

// RMSNorm (Zhang & Sennrich 2019, arXiv 1910.07467) of n numbers; if it is centered, layer norm (Ba et al. 2016, arXiv
// 1607.06450), which rounds once.
template <class T>
static void normalize(const Operation<T>& norm, const T* x, long n, T* out) {
    const T *const weight = norm.weight, *const bias = norm.bias;
    const float mean = norm.is_centered ? sum_of(x, n, [](float y) { return y; }) / n : 0;
    const float squares = sum_of(x, n, [=](float y) { return (y - mean) * (y - mean); });
    const float scale = 1 / __builtin_sqrtf(squares / n + float(norm.epsilon)), offset = norm.offset;
    if (norm.is_centered)
        for (long i = 0; i < n; i++) {
            const float y = (number(x[i]) - mean) * scale;
            const float weighed = weight ? y * rounded_to<T>(number(weight[i]) + offset) : y;
            store(bias ? weighed + number(bias[i]) : weighed, out + i);
        }
    else
        for (long i = 0; i < n; i++) {
            const float y = number(x[i]) * scale;
            store(weight ? (number(weight[i]) + offset) * (norm.rounds_once ? y : rounded_to<T>(y)) : y, out + i);
        }
}

// Rotary embedding (Su et al. 2021, arXiv 2104.09864) of one head, in place: element i rotates with element i + n / 2, or if
// they are interleaved, number 2 * i with the next one. Products are rounded to type By before they are added up.
template <class By, bool IS_INTERLEAVED, class T>
static void rotate(T* x, const float* cos, const float* sin, long n) {
    for (long i = 0; i < n / 2; i++) {
        const long j = i + n / 2, first = IS_INTERLEAVED ? 2 * i : i, second = IS_INTERLEAVED ? 2 * i + 1 : j;
        const float a = number(x[first]), b = number(x[second]);
        store(rounded_to<By>(a * cos[i]) + rounded_to<By>(-b * sin[i]), x + first);
        store(rounded_to<By>(b * cos[j]) + rounded_to<By>(a * sin[j]), x + second);
    }
}

// The error function, to 2e-7 (Abramowitz & Stegun 1964, formula 7.1.26).
template <class Floats>
static INLINE Floats error_function(Floats x) {
    const Floats size = x < 0 ? -x : x, t = 1.0f / (1.0f + 0.3275911f * size);
    Floats y = t * 1.061405429f - 1.453152027f;
    y = y * t + 1.421413741f;
    y = y * t - 0.284496736f;
    y = 1.0f - (y * t + 0.254829592f) * t * exponential<WIDTH>(-size * size);
    return x < 0 ? -y : y;
}

// RMSNorm of silu(gate) * x, or silu(gate) times that of x. Its weights are those of a row from `first` on.
template <class T>
static void normalize_gated(const Operation<T>& norm, long first, const T* x, const T* gate, T* out) {
    using recurrence::some;
    const auto factors = [&](long i) {
        const auto y = some(gate + i, norm.size - i);
        return times_sigmoid(y, y);
    };
    const auto taken = [&](long i) {
        const auto y = some(x + i, norm.size - i);
        return norm.gates_after ? y : y * factors(i);
    };
    recurrence::Floats squares = {};
    for (long i = 0; i < norm.size; i += WIDTH) squares += taken(i) * taken(i);
    float sum = 0;
    for (long l = 0; l < WIDTH; l++) sum += squares[l];
    const float scale = 1 / __builtin_sqrtf(sum / norm.size + float(norm.epsilon));
    for (long i = 0; i < norm.size; i += WIDTH) {
        auto y = taken(i) * scale;
        if (!norm.rounds_once) {
            T rounded[WIDTH];
            store(y, rounded);
            y = load(rounded);
        }
        if (norm.weight) y *= some(norm.weight + first + i, norm.size - i);
        if (norm.gates_after) y *= factors(i);
        recurrence::store_some(y, out + i, norm.size - i);
    }
}

// The nearest numbers of type T.
template <class T, class Floats>
static INLINE Floats all_rounded_to(Floats x) {
    T numbers[WIDTH];
    store(x, numbers);
    return load(numbers);
}

// exp(x) - 1 for x <= 0. Near 0, by the first terms of its series.
template <class Floats>
static INLINE Floats exponential_less_1(Floats x) {
    Floats y = x * (1 / 5040.0f) + 1 / 720.0f;
    y = y * x + 1 / 120.0f;
    y = y * x + 1 / 24.0f;
    y = y * x + 1 / 6.0f;
    y = y * x + 0.5f;
    return x < -0.3f ? exponential<WIDTH>(x) - 1.0f : y * x * x + x;
}

// xIELU (Huang & Schlag 2024, arXiv 2411.13010) of WIDTH numbers, rounded to T at each step of the formula.
template <class T, class Floats>
static INLINE Floats xielu(Floats x, float positive, float negative, float beta, float least) {
    const auto rounded = [](Floats y) { return all_rounded_to<T>(y); };
    const Floats below = exponential_less_1(x < least ? x : Floats{} + least);
    return rounded(x > 0 ? rounded(positive * x) * x : negative * rounded(rounded(below) - x)) + rounded(beta * x);
}

// The hyperbolic tangent.
template <class Floats>
static INLINE Floats tangent(Floats x) {
    const Floats power = exponential<WIDTH>(x < 0 ? 2.0f * x : -2.0f * x), size = (1.0f - power) / (1.0f + power);
    return x < 0 ? -size : size;
}

// x * sigmoid(y) with y = sqrt(8 / pi) * (x + 0.044715 * x^3) is GELU (Hendrycks & Gimpel 2016, arXiv 1606.08415) as
// approximated by tanh, for 1 + tanh(z) is 2 * sigmoid(2 * z). This one rounds to T at each step of the formula, as
// transformers' NewGELUActivation does; in the order of Bloom's, if it is that one.
template <class T, bool IS_BLOOM, class Floats>
static INLINE Floats gelu_in_steps(Floats x) {
    const auto rounded = [](Floats y) { return all_rounded_to<T>(y); };
    const Floats z = IS_BLOOM
        ? rounded(rounded(0.79788456f * x) * rounded(1.0f + rounded(rounded(0.044715f * x) * x)))
        : rounded(0.79788456f * rounded(x + rounded(0.044715f * rounded(rounded(x * x) * x))));
    return rounded(0.5f * x) * rounded(1.0f + rounded(tangent(z)));
}

// An activation of WIDTH numbers, not yet rounded to T.
template <long ACTIVATION, class T, class Floats>
static INLINE Floats activated(Floats x) {
    if constexpr (ACTIVATION == SILU) return times_sigmoid(x, x);
    if constexpr (ACTIVATION == GELU) return 0.5f * x * (1.0f + error_function(x * 0.70710678f));
    if constexpr (ACTIVATION == GELU_TANH) return times_sigmoid(x, x * (1.5957691216f + 0.0713548163f * x * x));
    if constexpr (ACTIVATION == GELU_NEW) return gelu_in_steps<T, false>(x);
    if constexpr (ACTIVATION == GELU_BLOOM) return gelu_in_steps<T, true>(x);
    if constexpr (ACTIVATION == SIGMOID) return times_sigmoid(Floats{} + 1.0f, x);
    if constexpr (ACTIVATION == TANH) return tangent(x);
    if constexpr (ACTIVATION == IDENTITY) return x;
    if constexpr (ACTIVATION == SOFTPLUS) {
        for (long l = 0; l < WIDTH; l++) x[l] = recurrence::softplus(x[l]);
        return x;
    }
    const Floats positive = x < 0 ? Floats{} : x;  // NaN stays NaN
    return ACTIVATION == RELU ? positive : positive * positive;
}

// The activation of WIDTH sums that were rounded to T.
template <long ACTIVATION, class T>
static recurrence::Floats of_sums(recurrence::Floats x) {
    return activated<ACTIVATION, T>(all_rounded_to<T>(x));
}

template <class T>
static auto of_sums(long activation) {
    recurrence::Floats (*const all[])(recurrence::Floats) = {
#define OF_SUMS(NAME) of_sums<NAME, T>,
        ACTIVATIONS(OF_SUMS)};
    return all[activation];
}

// The activation of WIDTH numbers, times others if there are any.
template <long ACTIVATION, class T>
static INLINE void activate(const T* gate, const T* up, T* out) {
    T rounded[WIDTH];
    store(activated<ACTIVATION, T>(load(gate)), rounded);
    if (up) store(load(rounded) * load(up), rounded);
    memcpy(out, rounded, sizeof rounded);
}

// The same of n numbers.
template <long ACTIVATION, class T>
static void activate(const T* gate, const T* up, T* out, long n) {
    long i = 0;
    for (; i + WIDTH <= n; i += WIDTH) activate<ACTIVATION>(gate + i, up ? up + i : nullptr, out + i);
    if (i == n) return;
    T last_gate[WIDTH] = {}, last_up[WIDTH] = {}, last[WIDTH];
    std::copy_n(gate + i, n - i, last_gate);
    if (up) std::copy_n(up + i, n - i, last_up);
    activate<ACTIVATION>(last_gate, up ? last_up : nullptr, last);
    std::copy_n(last, n - i, out + i);
}

// The same, where the activation is not rounded before it is multiplied.
template <long ACTIVATION, class T>
static void activate_once(const T* gate, const T* up, T* out, long n) {
    for (long i = 0; i < n; i += WIDTH) {
        const long some = std::min<long>(WIDTH, n - i);
        T gates[WIDTH] = {}, ups[WIDTH] = {}, products[WIDTH];
        std::copy_n(gate + i, some, gates);
        std::copy_n(up + i, some, ups);
        store(activated<ACTIVATION, T>(load(gates)) * load(ups), products);
        std::copy_n(products, some, out + i);
    }
}

// n gates, each of which stands beside its number: all are bounded, and it rounds at each step, as gpt-oss does.
template <class T>
static void activate_bounded(const T* both, float alpha, float limit, T* out, long n) {
    for (long i = 0; i < n; i++) {
        const float gate = std::min(number(both[2 * i]), limit);
        const float up = std::max(std::min(number(both[2 * i + 1]), limit), -limit);
        const float share = rounded_to<T>(1 / (1 + std::exp(-rounded_to<T>(gate * alpha))));
        store(rounded_to<T>(up + 1) * rounded_to<T>(gate * share), out + i);
    }
}

// Where a thread's parts of the room lie beyond its private buffers, in bytes: prepared, of attention, near, of recurrences,
// a panel; and where it ends.
template <class By>
struct Places {
    long at[6];

    explicit Places(const Pass<typename By::Number>& pass) : at{pass.private_bytes} {
        const long sizes[] = {Input<By>::bytes(pass.rows, pass.widest), attention::room_for(pass.most_keys),
                              pass.rows * (long)sizeof(long),
                              recurrence::room_for(pass.rows, pass.state_keys) * (long)sizeof(float),
                              bytes_of_panel<By>(pass.widest)};
        for (int i = 0; i < 5; i++) at[i + 1] = at[i] + aligned(sizes[i]);
    }
};

template <class By>
struct Thread {
    typedef typename By::Number T;

    const Pass<T>& pass;
    Barrier& barrier;
    const long index;
    char* const own;            // its room
    void* const prepared;       // the input of a product, if it is not taken as it is
    void* const of_attention;
    long* const near;  // [rows], of `attention::Attention`
    float* const of_recurrence;
    Ints* const panel;
    top_k::TopKSoftmax* const seen = (top_k::TopKSoftmax*)pass.tops;  // [threads][said]

    double slept = 0;  // seconds

    void meet() { slept += barrier.wait(pass.threads); }

    T* buffer(long i) const { return (T*)((i < pass.private_count ? own : (char*)pass.shared) + pass.places[i]); }

    void embed(const Operation<T>& embed) {
        const float factor = embed.factor;
        T* to = buffer(embed.out);
        for (long row = 0; row < pass.rows; row++, to += embed.width) {
            const T* from = embed.weight + pass.ids[row] * embed.width;
            if constexpr (sizeof(T) == 4)
                by_weight<T>(Format(embed.format), [&](auto weight) {
                    typedef decltype(weight) Weight;
                    if constexpr (gguf::IS_BLOCK<Weight>) {
                        const long bytes = bytes_of_row<Weight>(embed.width);
                        gguf::unpack<Weight>((const uint8_t*)embed.weight + pass.ids[row] * bytes, embed.width, to);
                        from = to;
                    }
                });
            const T* const place = embed.bias ? embed.bias + (pass.positions[row] + embed.index) * embed.width : nullptr;
            for (long i = 0; i < embed.width; i++) store(factor * number(from[i]), to + i);
            for (long i = 0; i < embed.width && place; i++) store(number(to[i]) + number(place[i]), to + i);
        }
    }

    // All rows, for this thread alone.
    void norm(const Operation<T>& norm) {
        const T* const x = buffer(norm.x);
        T* const out = buffer(norm.out);
        for (long at = 0; at < pass.rows * norm.width; at += norm.width) normalize(norm, x + at, norm.width, out + at);
    }

    // Call f(head, row) for this thread's heads, all rows of each. Where there is one head, rows are shared out.
    template <class F>
    void for_heads(long heads, F f) const {
        for_heads(heads, 0, pass.rows, f);
    }

    template <class F>
    void for_heads(long heads, long begin, long end, F f) const {
        for (long head = heads == 1 ? 0 : index; head < heads; head += pass.threads)
            for (long row = begin; row < end; row++)
                if (heads > 1 || row % pass.threads == index) f(head, row);
    }

    void norm_heads(const Operation<T>& norm) {
        T *const x = buffer(norm.x), *const out = buffer(norm.out), *const gate = norm.y < 0 ? nullptr : buffer(norm.y);
        for_heads(norm.width / norm.size, [&](long head, long row) {
            const long at = row * norm.width + head * norm.size;
            if (gate)
                normalize_gated(norm, head * norm.size, x + at, gate + at, out + at);
            else
                normalize(norm, x + at, norm.size, out + at);
        });
    }

    void select(const Operation<T>& of) {
        const T* const x = buffer(of.x);
        T* const out = buffer(of.out);
        const long each = of.taken * of.repeats;  // of a group
        for_heads(of.heads, [&](long head, long row) {
            const long from = head / each * of.count + of.index + head % each / of.repeats;
            std::copy_n(x + row * of.width + from * of.size, of.size, out + (row * of.heads + head) * of.size);
        });
    }

    // The numbers of each head of one input, then those of the other.
    void join(const Operation<T>& of) {
        const T *const x = buffer(of.x), *const more = buffer(of.y);
        T* const out = buffer(of.out);
        const long first = of.width / of.heads, rest = of.size - first;
        for_heads(of.heads, [&](long head, long row) {
            const long at = row * of.heads + head;
            std::copy_n(x + at * first, first, out + at * of.size);
            std::copy_n(more + at * rest, rest, out + at * of.size + first);
        });
    }

    void multiply_heads(const Operation<T>& of) {
        const long width = of.width / of.heads, n = of.is_transposed ? width : of.size;  // n rows of weights for a head
        const long to_width = of.size * of.heads;
        const T* const x = buffer(of.x);
        T* const out = buffer(of.out);
        for (long head = of.heads == 1 ? 0 : index; head < of.heads; head += pass.threads) {
            const T* const w = of.weight + (head * of.count + of.index) * of.value_size;
            const auto rows = [&](auto together, long row) {
                heads::multiply<together>(x + row * of.width + head * width, of.width, w, of.value_size, n, of.is_transposed,
                                          out + row * to_width + head * of.size, to_width);
            };
            long row = 0;
            for (; row + 4 <= pass.rows && of.heads > 1; row += 4) rows(std::integral_constant<int, 4>(), row);
            for (; row < pass.rows; row++)
                if (of.heads > 1 || row % pass.threads == index) rows(std::integral_constant<int, 1>(), row);
        }
    }

    void rotary(const Operation<T>& rotary) {
        const RotaryTable<T>& table = ((const RotaryTable<T>*)pass.rotaries)[rotary.index];
        const bool is_interleaved = rotary.is_interleaved && !rotary.separates;
        const auto rotated = is_interleaved      ? rotary.rounds_once ? rotate<float, true, T> : rotate<T, true, T>
                             : rotary.rounds_once  ? rotate<float, false, T>
                                                 : rotate<T, false, T>;
        T *const x = buffer(rotary.x), *const out = buffer(rotary.out);
        for_heads(rotary.width / rotary.size, [&](long head, long row) {
            const long at = row * rotary.width + head * rotary.size, place = pass.positions[row] * table.width;
            if (out != x) std::copy_n(x + at, rotary.size, out + at);
            if (rotary.separates) {
                T apart[attention::MAX_SIZE];
                for (long i = 0; i < table.width; i++) apart[i % 2 * (table.width / 2) + i / 2] = out[at + i];
                std::copy_n(apart, table.width, out + at);
            }
            rotated(out + at, table.cos + place, table.sin + place, table.width);
        });
    }

    // Call f(sequence, its cache) for all sequences.
    template <class F>
    void for_sequences(const Operation<T>& of, F f) const {
        const auto* const sequences = (const Sequence<T>*)pass.sequences;
        for (long i = 0; i < pass.sequence_count; i++) f(sequences[i], cache_of(of, i));
    }

    const Cached<T>& cache_of(const Operation<T>& of, long sequence) const {
        return ((const Cached<T>*)pass.caches)[sequence * pass.layers + of.index];
    }

    void append(const Operation<T>& append) {
        const T *const keys = buffer(append.x), *const values = buffer(append.y);
        const long heads = append.width / append.size;
        for_sequences(append, [&](const Sequence<T>& sequence, const Cached<T>& cache) {
            const long begin = sequence.begin, end = begin + sequence.rows;
            for_heads(heads, begin, end, [&](long head, long row) {
                const long from = row * heads + head, to = cache.held + row - begin;
                std::copy_n(keys + from * append.size, append.size, cache.keys + head * cache.key_stride + to * append.size);
                std::copy_n(values + from * append.value_size, append.value_size,
                            cache.values + head * cache.value_stride + to * append.value_size);
            });
        });
    }

    // The attention of a sequence's rows, and in how many parts it is computed: those of the far keys, then the near keys.
    struct Attended {
        attention::Attention<T> all;
        long far_parts, parts;
        long ends[MOST_PARTS + 1];  // where each part of the far keys begins, and where the last one ends

        bool is_joined() const { return parts > 1 || all.sinks.numbers; }
        long queries() const { return all.queries() * all.key_heads; }
        long near_blocks() const { return (all.queries() + attention::QUERIES - 1) / attention::QUERIES; }
        long far_items() const { return far_parts * all.key_heads * all.blocks(); }
        long items() const { return far_items() + (parts - far_parts) * all.key_heads * near_blocks(); }
    };

    Attended attended(const Operation<T>& attend, const Sequence<T>& sequence, const Cached<T>& cache) {
        const long rows = sequence.rows, keys = cache.held + rows;
        const long start = sequence.length - (cache.held - (sequence.keys_of_step - rows));
        long* const near_of = near + sequence.begin;
        long far = pass.has_near ? 0 : keys;  // so many keys are far from some row
        for (long row = 0; row < rows && pass.has_near; row++) {
            const long position = pass.positions[sequence.begin + row];
            const long begin = (position - attention::NEAR) / attention::KEYS * attention::KEYS;
            near_of[row] = std::max(0L, begin - start), far = std::max(far, near_of[row]);
        }
        const long heads = attend.width / attend.size, of_out = sequence.begin * heads * attend.value_size;
        attention::Attention<T> all = {
            buffer(attend.x) + sequence.begin * attend.width, cache.keys, cache.values, nullptr, cache.hidden,
            buffer(attend.out) + of_out, heads, attend.count, rows, keys, cache.masked, attend.size, attend.value_size,
            attend.size, attend.width, cache.key_stride, cache.value_stride, float(attend.factor), start,
            pass.has_near ? near_of : nullptr, float(attend.cap), weights_of(attend)};
        if (attend.is_latent) {
            all.more = cache.values, all.more_size = attend.size - attend.value_size, all.more_stride = cache.value_stride;
            all.value = cache.keys, all.value_stride = cache.key_stride;
        }
        all.biases = attend.biases, all.bias_count = attend.positions, all.places = pass.positions + sequence.begin;
        all.by_distance = attend.by_distance, all.rounds_scores = attend.rounds_scores;
        Attended found = {all, 0, pass.has_near, {}};
        for (long end = 0; end < far; found.parts++) {
            end = std::min(far, attention::end_of_part(start + end) - start);
            found.ends[++found.far_parts] = end;
        }
        return found;
    }

    // The parts of a sequence's attention lie beyond those of the sequences before it. of: where these end, in queries.
    attention::Part part_at(const Operation<T>& attend, long of) const {
        return {pass.largest + of, pass.total + of, pass.sums + of * attend.value_size};
    }

    // What a thread takes at a time: the queries of a block of a head over a part of its keys. The larger parts of a
    // sequence come first.
    struct Item {
        long sequence = -1, first = 0, before = 0;  // items, and queries by parts, of the sequences before
        bool is_joined = false, is_near = false;    // is_joined: whether a sequence up to this one is
        long head = 0, block = 0, part = 0;
        Attended of = {};

        long begin() const { return is_near ? of.all.near[block * attention::QUERIES % of.all.rows] : of.ends[part]; }
        const T* keys() const { return of.all.key + head * of.all.key_stride + begin() * of.all.key_size(); }
        const T* values() const { return of.all.value + head * of.all.value_stride + begin() * of.all.value_size; }
    };

    // Go on to the item of this number. Returns whether there is one.
    bool go_on(const Operation<T>& attend, long number, Item& item) {
        Attended& some = item.of;
        while (item.sequence < 0 || number >= item.first + some.items()) {
            if (item.sequence >= 0) item.first += some.items(), item.before += some.queries() * some.parts;
            const long i = ++item.sequence;
            if (i == pass.sequence_count) return false;
            some = attended(attend, ((const Sequence<T>*)pass.sequences)[i], cache_of(attend, i));
            item.is_joined |= some.is_joined();
        }
        const long of_sequence = number - item.first, blocks = some.all.blocks();
        item.is_near = of_sequence >= some.far_items();
        const long of_kind = of_sequence - (item.is_near ? some.far_items() : 0), block = of_kind / some.all.key_heads;
        item.head = of_kind % some.all.key_heads, item.block = item.is_near ? block : block % blocks;
        item.part = item.is_near ? some.far_parts : some.far_parts - 1 - block / blocks;
        return true;
    }

    // Threads take items as they come to it, each one before they compute the one before, whose last products prefetch it.
    void attend(const Operation<T>& attend) {
        Item next;
        for (bool is_there = go_on(attend, barrier.take(), next); is_there;) {
            Item now = next;
            attention::Attention<T>& all = now.of.all;
            if ((is_there = go_on(attend, barrier.take(), next))) all.next_keys = next.keys(), all.next_values = next.values();
            const long queries = now.before + (now.head * now.of.parts + now.part) * all.queries();
            const attention::Part place = part_at(attend, queries);
            const attention::Part* const to = now.of.is_joined() ? &place : nullptr;
            if (now.is_near)
                all.near_block(now.head, now.block * attention::QUERIES, to, of_attention);
            else
                all.block(now.head, now.block * all.lanes(), now.of.ends[now.part], now.of.ends[now.part + 1], to,
                          of_attention);
        }
        if (next.is_joined) join_parts(attend);
    }

    void join_parts(const Operation<T>& attend) {
        meet();
        long first = 0, before = 0;  // queries of all heads, also by parts, of the sequences before
        for_sequences(attend, [&](const Sequence<T>& sequence, const Cached<T>& cache) {
            const Attended some = attended(attend, sequence, cache);
            const long queries = some.all.queries(), parts = some.parts;
            for (long item = 0; item < some.queries() && some.is_joined(); item++)
                if ((first + item) % pass.threads == index)
                    some.all.join(item / queries, item % queries,
                                  part_at(attend, before + item / queries * parts * queries), parts);
            first += some.queries(), before += some.queries() * parts;
        });
    }

    // The input of products with some matrices, [rows][inputs].
    Input<By> prepare(const T* x, long rows, long inputs, const Product<T>* products, long count) {
        int forms = 0;
        for (long i = 0; i < count; i++) forms |= Input<By>::form_for(products[i].matrix, rows, inputs);
        const Input<By> input = {x, rows, inputs, prepared, forms, panel};
        for (long part = 0; part < input.parts(); part++) input.make(part);
        return input;
    }

    // Outputs begin..end-1 of all rows. next: the weights that this thread wants then. digest: as for `Product`. Weights
    // that are multiplied right after they were digested are still in a cache.
    void multiply(const Input<By>& x, const Matrix<T>& matrix, long begin, long end, const void* next,
                  uint64_t* digest = nullptr) {
        const bool in_parts = digest || Input<By>::form_for(matrix, x.rows, x.inputs) == Input<By>::IN_ROWS;
        const long size = in_parts ? BLOCK : end - begin;
        const long bytes = x.inputs * sizeof(T);
        digest::Sums sums = {};
        for (long first = begin; first < end; first += size) {
            const long last = std::min(end, first + size);
            if (digest) sums += digest::of((const char*)matrix.weights, first * bytes, last * bytes);
            if (x.rows) gemm::multiply(x, matrix, first, last, last < end ? matrix.at(last, x.inputs) : next);
        }
        if (digest) digest::add(sums, digest);
    }

    // This thread's share of n outputs, in whole groups.
    static long groups_of(long n) { return (n + OUTPUTS_TOGETHER - 1) / OUTPUTS_TOGETHER; }
    long share(long n, long of) const { return std::min(n, groups_of(n) * of / pass.threads * OUTPUTS_TOGETHER); }

    // Call f(product, begin, end) for this thread's share of the outputs of some products. Each product has groups of its
    // own, for its rows lie together from its first one on.
    template <class F>
    void for_shares(const Operation<T>& of, F f) const {
        static_assert((long)OUTPUTS_TOGETHER % Indexed::TOGETHER == 0);
        const auto* const products = (const Product<T>*)of.products;
        long all = 0;
        for (long i = 0; i < of.count; i++) all += groups_of(products[i].matrix.outputs);
        long before = 0;  // groups of the products before
        for (long i = 0; i < of.count; i++) {
            const long outputs = products[i].matrix.outputs, groups = groups_of(outputs);
            long begin = share(outputs, index), end = share(outputs, index + 1);
            if (!of.is_each_shared) {
                begin = std::max(all * index / pass.threads - before, 0L) * OUTPUTS_TOGETHER;
                end = std::min((all * (index + 1) / pass.threads - before) * OUTPUTS_TOGETHER, outputs);
            }
            if (begin < end) f(products[i], begin, end);
            before += groups;
        }
    }

    // The first weights that this thread wants of an operation.
    const void* first_of(long operation) const {
        const void* first = nullptr;
        if (operation >= 0)
            for_shares(pass.at(operation), [&](const Product<T>& product, long begin, long) {
                if (!first) first = product.matrix.at(begin, pass.at(operation).width);
            });
        return first;
    }

    void multiply_shares(const Operation<T>& of) {
        struct Share {
            Matrix<T> matrix;
            uint64_t* digest;
            long begin, end;
        } shares[MOST_PRODUCTS];
        long count = 0;
        for_shares(of, [&](const Product<T>& product, long begin, long end) {
            shares[count] = {product.matrix, product.digest, begin, end};
            shares[count++].matrix.out = buffer(product.out);
        });
        if (!count) return;
        const Input<By> x = prepare(buffer(of.x), pass.rows, of.width, (const Product<T>*)of.products, of.count);
        for (long i = 0; i < count; i++) {
            const bool is_last = i + 1 == count;
            const void* next = is_last ? first_of(of.next) : shares[i + 1].matrix.at(shares[i + 1].begin, of.width);
            multiply(x, shares[i].matrix, shares[i].begin, shares[i].end, next, shares[i].digest);
        }
    }

    // This thread's share of the channels.
    void convolve(const Operation<T>& of) {
        const long begin = share(of.width, index), end = share(of.width, index + 1);
        const auto activated = of.has_wide_weight ? of_sums<float>(of.activation) : of_sums<T>(of.activation);
        for_sequences(of, [&](const Sequence<T>& sequence, const Cached<T>& cache) {
            const recurrence::Convolution<T> some = {
                buffer(of.x) + sequence.begin * of.width, weights_of(of), biases_of(of),
                buffer(of.out) + sequence.begin * of.width, of.width, of.taps, sequence.rows,
                pass.parents + sequence.begin, inputs_of(cache), of.first, activated};
            some.compute(begin, end);
        });
    }

    // This thread's heads, all rows of each.
    void delta(const Operation<T>& of) {
        const T *const queries = buffer(of.x), *const keys = buffer(of.y), *const values = buffer(of.temporary[0]);
        const T *const decays = buffer(of.temporary[1]), *const rates = buffer(of.temporary[2]);
        const long heads = of.heads, of_values = heads * of.value_size;
        for_sequences(of, [&](const Sequence<T>& sequence, const Cached<T>& cache) {
            const long begin = sequence.begin;
            const recurrence::State state = state_of(cache);
            const recurrence::Delta<T> some = {
                queries + begin * of.width, keys + begin * of.width, values + begin * of_values,
                decays + begin * heads * state.decays, rates + begin * heads, weights_of(of), biases_of(of),
                buffer(of.out) + begin * of_values, of.width / of.size, sequence.rows, float(of.factor),
                float(of.limit), pass.parents + begin, state};
            for (long head = index; head < heads; head += pass.threads) some.compute(head, of_recurrence);
        });
    }

    void scan(const Operation<T>& of) {
        const T *const queries = buffer(of.x), *const keys = buffer(of.y), *const values = buffer(of.temporary[0]);
        const T* const times = buffer(of.temporary[1]);
        const long heads = of.heads, of_values = heads * of.value_size;
        for_sequences(of, [&](const Sequence<T>& sequence, const Cached<T>& cache) {
            const long begin = sequence.begin;
            const recurrence::Scan<T> some = {
                queries + begin * of.width, keys + begin * of.width, values + begin * of_values, times + begin * heads,
                of.weight, of.bias, of.skips, buffer(of.out) + begin * of_values, of.width / of.size, sequence.rows,
                pass.parents + begin, state_of(cache)};
            for (long head = index; head < heads; head += pass.threads) some.compute(head, of_recurrence);
        });
    }

    // This thread's share of the numbers of each row.
    template <long ACTIVATION>
    void gate(const Operation<T>& gate) {
        const long begin = share(gate.width, index), end = share(gate.width, index + 1);
        const T *const x = buffer(gate.x), *const by = gate.y < 0 ? nullptr : buffer(gate.y);
        T* const out = buffer(gate.out);
        if (gate.rounds_once) {
            for (long at = begin; at < pass.rows * gate.width; at += gate.width)
                activate_once<ACTIVATION>(x + at, by + at, out + at, end - begin);
            return;
        }
        for (long at = begin; at < pass.rows * gate.width; at += gate.width)
            activate<ACTIVATION>(x + at, by ? by + at : nullptr, out + at, end - begin);
    }

    void clip(const Operation<T>& of) {
        const long begin = share(of.width, index), end = share(of.width, index + 1);
        const T* const x = buffer(of.x);
        T* const out = buffer(of.out);
        const float limit = of.limit;
        for (long row = 0; row < pass.rows; row++)
            for (long i = row * of.width + begin; i < row * of.width + end; i++) {
                const float y = number(x[i]);  // NaN stays NaN
                store(y > limit ? limit : y < -limit ? -limit : y, out + i);
            }
    }

    void apply_xielu(const Operation<T>& of) {
        const long begin = share(of.width, index), end = share(of.width, index + 1);
        const T* const x = buffer(of.x);
        T* const out = buffer(of.out);
        for (long row = 0; row < pass.rows; row++)
            for (long i = begin; i < end; i += WIDTH) {
                const long at = row * of.width + i, n = std::min<long>(WIDTH, end - i);
                T some[WIDTH] = {};
                std::copy_n(x + at, n, some);
                store(xielu<T>(load(some), of.factor, of.alpha, of.offset, of.limit), some);
                std::copy_n(some, n, out + at);
            }
    }

    void activate_by_kind(const Operation<T>& now) {
        switch (now.activation) {
#define BY_KIND(NAME) \
    case NAME: now.kind == GATE ? gate<NAME>(now) : experts<NAME>(now); break;
            ACTIVATIONS(BY_KIND)
        }
    }

    // An expert that a row has chosen.
    struct Choice {
        int32_t row;
        float weight;
    };
    static_assert(sizeof(Choice) == CHOICE_BYTES);

    // Products with a router in float32. Each sum is in the same order, whatever other rows there are.
    void route(const Operation<T>& of, const T* x, long experts, float* scores) const {
        for (long row = 0; row < pass.rows; row++, x += of.size)
            for (long e = 0; e < experts; e++) {
                const float* const weights = of.router + e * of.size;
                float partial[16] = {}, sum = 0;
                for (long i = 0; i < of.size; i += 16)
                    for (int l = 0; l < 16; l++) partial[l] += number(x[i + l]) * weights[i + l];
                for (int l = 0; l < 16; l++) sum += partial[l];
                *scores++ = sum;
            }
    }

    // Leave only the experts of the groups whose best ones add up to the most.
    static void leave_groups(const Operation<T>& of, long experts, float* ranks) {
        const long size = experts / of.groups;
        float best[MOST_EXPERTS];
        for (long group = 0; group < of.groups; group++) {
            const auto is_better = [](float a, float b) { return a > b; };
            float two[2] = {};
            std::partial_sort_copy(ranks + group * size, ranks + (group + 1) * size, two, two + of.best_of_group, is_better);
            best[group] = two[0] + two[1];
        }
        for (long left = of.groups; left > of.top_groups; left--) {
            const long worst = std::min_element(best, best + of.groups) - best;
            best[worst] = std::numeric_limits<float>::infinity();
            std::fill_n(ranks + worst * size, size, attention::HIDDEN);
        }
    }

    // Bring the k largest to the front. Of equal ones, torch's topk takes those that these algorithms bring there.
    static void find_best(std::pair<float, int32_t>* ranked, long n, long k) {
        const auto is_before = [](const auto& a, const auto& b) { return a.first > b.first; };
        if (k * 64 <= n) {
            std::partial_sort(ranked, ranked + k, ranked + n, is_before);
        } else {
            std::nth_element(ranked, ranked + k - 1, ranked + n, is_before);
            std::sort(ranked, ranked + k - 1, is_before);
        }
    }

    // SparseMixer (Liu et al. 2024, arXiv 2409.12136): the best expert that is left, in turn, and its share among those
    // whose scores are near its own.
    template <class F, class G>
    static void choose_in_turn(const Operation<T>& of, long experts, F score, G stepped, Choice* chosen) {
        bool is_taken[MOST_EXPERTS] = {};
        for (long k = 0; k < of.top_k; k++) {
            long best = -1;
            for (long e = 0; e < experts; e++)
                if (!is_taken[e] && (best < 0 || score(e) > score(best))) best = e;
            const float most = score(best);
            float sum = 0;
            for (long e = 0; e < experts; e++) {
                const float distance = stepped(stepped(most - score(e)) / std::max(std::abs(score(e)), most));
                if (!is_taken[e] && !(distance > float(of.nearness))) sum += std::exp(score(e) - most);
            }
            is_taken[best] = true, chosen[k] = {(int32_t)best, stepped(1 / sum)};
        }
    }

    // Each row's experts: choices in the order of experts, then of rows, and where those of each expert begin. scores: of
    // type T, or those of `route`.
    void choose(const Operation<T>& of, const T* scores, long experts, Choice* choices, long* begins) const {
        const long rows = pass.rows;
        float chances[MOST_EXPERTS], ranks[MOST_EXPERTS];
        std::pair<float, int32_t> ranked[MOST_EXPERTS];
        const auto stepped = [&](float weight) { return of.rounds_steps ? rounded_to<T>(weight) : weight; };
        Choice* const by_row = choices + rows * of.top_k;  // [rows][top_k], of which `row` is an expert
        std::fill(begins, begins + experts + 1, 0);
        for (long row = 0; row < rows; row++) {
            const auto score = [&](long e) {
                const float y = of.router ? ((const float*)scores)[row * experts + e] : number(scores[row * experts + e]);
                return of.cap ? float(of.cap) * std::tanh(y / float(of.cap)) : y;
            };
            if (of.nearness >= 0) {
                choose_in_turn(of, experts, score, stepped, by_row + row * of.top_k);
                for (long k = 0; k < of.top_k; k++) begins[by_row[row * of.top_k + k].row + 1]++;
                continue;
            }
            float most = of.is_sigmoid ? 0 : score(0), sum = 0, chosen = 0;
            for (long e = 1; e < experts && !of.is_sigmoid; e++) most = std::max(most, score(e));
            for (long e = 0; e < experts; e++) sum += chances[e] = std::exp(score(e) - most);
            for (long e = 0; e < experts; e++) {
                chances[e] = stepped(of.is_sigmoid ? 1 / (1 + std::exp(-score(e))) : chances[e] / sum);
                float rank = (of.ranks_scores ? score(e) : chances[e]) + (of.correction ? of.correction[e] : 0);
                if (of.rounds_ranks) rank = rounded_to<T>(rank);
                ranks[e] = rank >= attention::HIDDEN ? rank : attention::HIDDEN;  // so that none is chosen twice, NaN or not
            }
            if (of.groups > 1) leave_groups(of, experts, ranks);
            for (long e = 0; e < experts; e++) ranked[e] = {ranks[e], (int32_t)e};
            find_best(ranked, experts, of.top_k);
            for (long k = 0; k < of.top_k; k++) {
                const int32_t e = ranked[k].second;
                by_row[row * of.top_k + k] = {e, chances[e]};
                chosen += chances[e];
                begins[e + 1]++;
            }
            const float divisor = stepped(stepped(chosen) + float(of.epsilon));
            for (long k = 0; k < of.top_k; k++) {
                float& weight = by_row[row * of.top_k + k].weight;
                if (of.adds_to_one) weight = stepped(weight / divisor);
                weight = stepped(weight * float(of.factor));
                if (of.scales) weight *= of.scales[by_row[row * of.top_k + k].row];
                if (of.rounds_weights) weight = rounded_to<T>(weight);
            }
        }
        for (long e = 0; e < experts; e++) begins[e + 1] += begins[e];
        long places[MOST_EXPERTS];
        std::copy_n(begins, experts, places);
        for (long i = 0; i < rows * of.top_k; i++)
            choices[places[by_row[i].row]++] = {(int32_t)(i / of.top_k), by_row[i].weight};
    }

    // The MLPs of each row's experts (Shazeer et al. 2017, arXiv 1701.06538), added up by their weights. An expert's
    // weights are read once for all rows that have chosen it.
    template <long ACTIVATION>
    void experts(const Operation<T>& of) {
        const auto* const router = (const Product<T>*)of.products;
        const long each = 2 + of.is_apart, width = of.width;
        const long mlps = (of.count - 1) / each, experts = mlps + of.identities;
        const long inner = router[1].matrix.outputs >> (of.is_gated && !of.is_apart);
        const T *const x = buffer(of.x), *const routed = of.y < 0 ? x : buffer(of.y);
        T *const scores = buffer(of.temporary[0]), *const gathered = buffer(of.temporary[1]);
        T* const halves = buffer(of.temporary[2]);
        Choice* const choices = (Choice*)buffer(of.temporary[3]);
        T *const gated = buffer(of.temporary[4]), *const products = buffer(of.temporary[5]);  // shared; a row each choice
        long begins[MOST_EXPERTS + 1];
        if (of.router) {
            route(of, routed, experts, (float*)scores);
        } else {
            Matrix<T> routing = router->matrix;
            routing.out = scores;
            multiply(prepare(routed, pass.rows, of.size, router, 1), routing, 0, experts, nullptr);
        }
        choose(of, scores, experts, choices, begins);
        const long begin = share(inner, index), n = share(inner, index + 1) - begin;
        for (long e = 0; e < mlps && n; e++) {
            const long first = begins[e], rows = begins[e + 1] - first;
            if (!rows) continue;
            for (long i = 0; i < rows; i++) {
                const T* const from = x + choices[first + i].row * width;
                T* const to = gathered + i * width;
                if (of.weighs_inputs)
                    for (long j = 0; j < width; j++) store(choices[first + i].weight * number(from[j]), to + j);
                else
                    std::copy_n(from, width, to);
            }
            // Gates, then what they are multiplied with, if anything: in the same matrix, or in the next one.
            const Matrix<T>&both = router[1 + each * e].matrix, &others = router[1 + each * e + of.is_apart].matrix;
            const long begin_of_others = of.is_apart ? begin : inner + begin;
            const Input<By> input = prepare(gathered, rows, width, router + 1 + each * e, 1 + of.is_apart);
            if (of.limit) {
                multiply(input, both.part(2 * begin, 2 * n, width, halves), 0, 2 * n, nullptr);
                for (long i = 0; i < rows; i++)
                    activate_bounded(halves + i * 2 * n, of.alpha, of.limit, gated + (first + i) * inner + begin, n);
                continue;
            }
            T* const ups = of.is_gated ? halves + rows * n : nullptr;
            multiply(input, both.part(begin, n, width, halves), 0, n, ups ? others.at(begin_of_others, width) : nullptr);
            if (ups) multiply(input, others.part(begin_of_others, n, width, ups), 0, n, nullptr);
            for (long i = 0; i < rows; i++) {
                const T* const by = ups ? ups + i * n : nullptr;
                activate<ACTIVATION>(halves + i * n, by, gated + (first + i) * inner + begin, n);
            }
        }
        meet();
        const long begin_out = share(width, index), end_out = share(width, index + 1);
        for (long e = 0; e < mlps && begin_out < end_out; e++) {
            const long first = begins[e], rows = begins[e + 1] - first;
            if (!rows) continue;
            const Product<T>* const back = router + each * (e + 1);
            Matrix<T> down = back->matrix;
            down.out = products + first * width;
            multiply(prepare(gated + first * inner, rows, inner, back, 1), down, begin_out, end_out, nullptr);
        }
        meet();
        T* const out = buffer(of.out);
        std::fill(out, out + pass.rows * width, T{});
        for (long i = 0; i < begins[experts]; i++) {
            T* const to = out + choices[i].row * width;
            const bool is_mlp = i < begins[mlps];
            const T* const given = is_mlp ? products + i * width : x + choices[i].row * width;
            const float weight = of.weighs_inputs && is_mlp ? 1 : choices[i].weight;
            for (long j = 0; j < width; j++) store(number(to[j]) + rounded_to<T>(weight * number(given[j])), to + j);
        }
    }

    void weigh(const Operation<T>& weigh) {
        const T *const x = buffer(weigh.x), *const by = buffer(weigh.y);
        T* const out = buffer(weigh.out);
        for (long row = 0; row < pass.rows; row++) {
            const float weight = rounded_to<T>(1 / (1 + std::exp(-number(by[row]))));
            for (long i = row * weigh.width; i < (row + 1) * weigh.width; i++) store(weight * number(x[i]), out + i);
        }
    }

    void scale(const Operation<T>& scale) {
        const T* const x = buffer(scale.x);
        T* const out = buffer(scale.out);
        const float factor = scale.factor;
        for (long at = 0; at < pass.rows * scale.width; at += scale.width)
            for (long i = 0; i < scale.width; i++)
                store((scale.weight ? factor * number(scale.weight[i]) : factor) * number(x[at + i]), out + at + i);
    }

    void add(const Operation<T>& add) {
        const T *const x = buffer(add.x), *const more = buffer(add.y);
        T* const out = buffer(add.out);
        const float factor = add.factor;
        for (long i = 0; i < pass.rows * add.width; i++)
            store(number(x[i]) + rounded_to<T>(factor * number(more[i])), out + i);
    }

    // Each stream of a row, and the sum of others by factors that are the row's own.
    void blend(const Operation<T>& of) {
        using recurrence::some;
        const T *const x = buffer(of.x), *const more = buffer(of.y), *const by = of.weight ? buffer(of.temporary[0]) : nullptr;
        T* const out = buffer(of.out);
        std::copy_n(x, pass.rows * of.width, out);
        for (long row = 0; row < pass.rows; row++)
            for (long stream = of.first; stream < of.width / of.size; stream++) {
                float factors[MOST_STREAMS];
                for (long j = 0; j < of.count; j++) {
                    const T* const weights = of.weight + (stream * of.count + j) * of.value_size;
                    float sum = 0;
                    for (long i = 0; by && i < of.value_size; i++)
                        sum += number(weights[i]) * number(by[row * of.value_size + i]);
                    factors[j] = rounded_to<T>(rounded_to<T>(sum) + float(of.offset));
                }
                T* const to = out + row * of.width + stream * of.size;
                for (long i = 0; i < of.size; i += WIDTH) {
                    recurrence::Floats sum = {};
                    for (long j = 0; j < of.count; j++)
                        sum += factors[j] * some(more + (row * of.count + j) * of.size + i, of.size - i);
                    recurrence::store_some(some(to + i, of.size - i) + all_rounded_to<T>(sum), to + i, of.size - i);
                }
            }
    }

    // The root of the mean of squares of n numbers, or of `least` if that is more.
    static float magnitude(const T* x, long n, float least) {
        const float squares = sum_of(x, n, [](float y) { return rounded_to<T>(y * y); });
        return rounded_to<T>(__builtin_sqrtf(std::max(rounded_to<T>(squares / n), least)));
    }

    void rescale(const Operation<T>& of) {
        const T *const x = buffer(of.x), *const like = buffer(of.y);
        T* const out = buffer(of.out);
        for (long at = 0; at < pass.rows * of.width; at += of.width) {
            const float to = magnitude(like + at, of.width, 0), from = magnitude(x + at, of.width, of.limit);
            for (long i = at; i < at + of.width; i++) store(rounded_to<T>(number(x[i]) * to) / from, out + i);
        }
    }

    // What is above the mean of a row and some deviations of it.
    void cut(const Operation<T>& of) {
        const T* const x = buffer(of.x);
        T* const out = buffer(of.out);
        const long n = of.width;
        for (long at = 0; at < pass.rows * n; at += n) {
            const float mean = sum_of(x + at, n, [](float y) { return y; }) / n;
            const float squares = sum_of(x + at, n, [=](float y) { return (y - mean) * (y - mean); });
            const float deviation = rounded_to<T>(__builtin_sqrtf(squares / n));
            const float edge = rounded_to<T>(rounded_to<T>(mean) + rounded_to<T>(deviation * float(of.factor)));
            for (long i = at; i < at + n; i++) {
                const float above = number(x[i]) - edge;  // NaN stays NaN
                store(above < 0 ? 0 : above, out + i);
            }
        }
    }

    void keep(const Operation<T>& keep) {  // the rows, if they are asked for
        T* const to = ((T* const*)pass.outputs)[keep.index];
        if (to && index == 0) memcpy(to, buffer(keep.x), pass.rows * keep.width * sizeof(T));
    }

    // Returns whether a row has become NaN before the head.
    bool logits(const Operation<T>& of) {
        const T *const x = buffer(of.x), *const shown = x + (pass.rows - pass.shown) * of.width;
        const auto* const product = (const Product<T>*)of.products;
        Matrix<T> head = product->matrix;
        head.out = pass.logits;
        const Input<By> taken = prepare(shown, pass.shown, of.width, product, 1);
        const long begin = share(head.outputs, index), end = share(head.outputs, index + 1);
        top_k::TopKSoftmax* const own = seen + index * pass.said;
        const auto* sequence = (const Sequence<T>*)pass.sequences;
        for (long row = 0; row < pass.said; row++) {
            while (pass.rows - pass.shown + row >= sequence->begin + sequence->rows) sequence++;
            new (own + row) top_k::TopKSoftmax(pass.top_k, sequence->temperature);
        }
        const long size = pass.said ? LOOKED_AT : end - begin;
        for (long first = begin; first < end; first += size) {
            const long last = std::min(end, first + size);
            multiply(taken, head, first, last, nullptr, product->digest);
            for (long row = 0; row < pass.said; row++)
                own[row].add(head.out + row * head.outputs + first, last - first, first);
        }
        if (pass.said) {
            meet();
            for (long row = index; row < pass.said; row += pass.threads) {
                for (long thread = 1; thread < pass.threads; thread++) seen[row].add(seen[thread * pass.said + row]);
                seen[row].put(pass.probabilities + row * pass.top_k, pass.tokens + row * pass.top_k);
            }
        }
        return std::count_if(x, x + pass.rows * of.width, [](T y) { return number(y) != number(y); });
    }

    bool run() {
        bool has_nan = false;
        const double began = seconds_of(CLOCK_MONOTONIC), ran = seconds_of(CLOCK_THREAD_CPUTIME_ID);
        for (long i = 0; i < pass.operation_count; i++) {
            const Operation<T>& now = pass.at(i);
            if (now.meets) meet();
            switch (now.kind) {
                case EMBED: embed(now); break;
                case NORM: norm(now); break;
                case NORM_HEADS: norm_heads(now); break;
                case PRODUCTS: multiply_shares(now); break;
                case HEADPRODUCTS: multiply_heads(now); break;
                case SELECT: select(now); break;
                case JOIN: join(now); break;
                case ROTARY: rotary(now); break;
                case APPEND: append(now); break;
                case ATTEND: attend(now); break;
                case CONVOLVE: convolve(now); break;
                case DELTA:
                case DELTABYKEY: delta(now); break;
                case SCAN: scan(now); break;
                case GATE:
                case EXPERTS: activate_by_kind(now); break;
                case CLIP: clip(now); break;
                case XIELU: apply_xielu(now); break;
                case WEIGH: weigh(now); break;
                case SCALE: scale(now); break;
                case ADD: add(now); break;
                case BLEND: blend(now); break;
                case RESCALE: rescale(now); break;
                case CUT: cut(now); break;
                case KEEP: keep(now); break;
                case LOGITS: has_nan = logits(now); break;
            }
        }
        const double taken = seconds_of(CLOCK_MONOTONIC) - began;
        pass.lost[index] = 1 - (slept + seconds_of(CLOCK_THREAD_CPUTIME_ID) - ran) / taken;
        return has_nan;
    }
};

template <class By>
static long run(const Pass<typename By::Number>& pass) {
    Barrier barrier;
    bool has_nan = false;
    const Places<By> places(pass);
#pragma omp parallel num_threads(pass.threads)
    {
        const AmxUnit unit;
        const long index = omp_get_thread_num();
        auto here = pass;
        here.threads = omp_get_num_threads();  // may be fewer than were asked for
        char* const own = (char*)pass.room + index * pass.room_bytes;
        const auto part = [&](int i) { return own + places.at[i]; };
        Thread<By> thread = {here, barrier, index, own, part(0), part(1), (long*)part(2), (float*)part(3), (Ints*)part(4)};
        const bool found = thread.run();
        if (index == 0) has_nan = found;  // every thread has all rows
    }
    return has_nan;
}

template <class By>
static void measure(const Pass<typename By::Number>& pass, long* sizes) {
    sizes[0] = Places<By>(pass).at[5];
    sizes[1] = pass.threads * pass.rows * sizeof(top_k::TopKSoftmax);
    sizes[2] = 2;  // the near keys, and what is left of a part
    for (long end = 0; end < pass.longest + pass.rows; end = attention::end_of_part(end)) sizes[2]++;
}

// Returns whether a row has become NaN before the head.
extern "C" long run_float32(const Pass<float>* pass) { return run<ByFloats>(*pass); }
extern "C" long run_bfloat16(const Pass<BFloat16>* pass) {
    return by_pairs([=](auto by) { return run<decltype(by)>(*pass); });
}

// Write the bytes that a thread needs for itself, and those of all `tops`, which are to be aligned to 64 bytes; and in how
// many parts attention may be computed.
extern "C" void sizes_float32(const Pass<float>* pass, long* sizes) { measure<ByFloats>(*pass, sizes); }
extern "C" void sizes_bfloat16(const Pass<BFloat16>* pass, long* sizes) {
    by_pairs([=](auto by) { measure<decltype(by)>(*pass, sizes); });
}

// Say the limits, the fields of all structures, and the kinds of operations and of activations in their order.
extern "C" const char* describe_uint8() {
#define SAID(NAME) #NAME ","
#define VALUED(NAME, VALUE) #NAME "|" #VALUE ","
    return "Limit:" LIMITS(VALUED) ";Kind:" KINDS(SAID) ";Activation:" ACTIVATIONS(SAID) ";Operation:" OPERATION(NAMED, T) ";Cached:" CACHED(NAMED, T)
        ";Sequence:" SEQUENCE(NAMED, T) ";RotaryTable:" ROTARY_TABLE(NAMED, T) ";Pass:" PASS(NAMED, T);
}

// Commit rows of a sequence to the states of its cache, [layers]: a path from the root.
template <class T>
static void commit(const Cached<T>* layers, long layer_count, const long* path, long rows, long threads) {
#pragma omp parallel for num_threads(threads)
    for (long i = 0; i < layer_count; i++) {
        const recurrence::Inputs<T> inputs = inputs_of(layers[i]);
        const recurrence::State state = state_of(layers[i]);
        for (long c = 0; c < inputs.channels; c++)
            inputs.take(c, path, rows, [&](long row) { return inputs.of_rows[row * inputs.channels + c]; });
        for (long head = 0; head < state.heads; head++) state.take(head, path, rows);
    }
}

extern "C" void commit_float32(const Cached<float>* layers, long layer_count, const long* path, long rows, long threads) {
    commit(layers, layer_count, path, rows, threads);
}
extern "C" void commit_bfloat16(const Cached<BFloat16>* layers, long layer_count, const long* path, long rows,
                                long threads) {
    commit(layers, layer_count, path, rows, threads);
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
