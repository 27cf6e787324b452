// The next token after a row of logits: the argmax, or the winner of a race that torch's random numbers decide.
//
// A sampled token is the one with the largest p / e, where each token has its own exponential variate e. Here, p and e
// are rounded differently from torch's. So a token counts only if it wins by more than rounding can explain.

#include <algorithm>

#include "top_k.h"

using namespace top_k;

constexpr float LOG_RANGE = 87;        // weights below exp(-87) are 0
constexpr float ROUNDING = 5e-7;       // relative error of a score, in torch and here
constexpr float MARGIN = 1e-5;         // relative error by all other rounding
constexpr double SUM_ROUNDING = 6e-8;  // relative error of torch's sums for each summand
constexpr int CHUNK = 1024;            // variates drawn at a time

// What torch.Generator.get_state() returns on a CPU: the Mersenne Twister (Matsumoto & Nishimura 1998).
struct Generator {
    uint64_t seed;
    int32_t left, seeded;  // left: 1 more than the numbers left in the words
    uint64_t next;         // the word of the next number
    uint64_t words[624];
};

static void twist(uint32_t* words) {
    const auto twisted = [&](int i, int next, int other) {
        const uint32_t mixed = (words[i] & 0x80000000) | (words[next] & 0x7fffffff);
        return words[other] ^ mixed >> 1 ^ (-(mixed & 1) & 0x9908b0df);
    };
    for (int i = 0; i < 227; i++) words[i] = twisted(i, i + 1, i + 397);
    for (int i = 227; i < 623; i++) words[i] = twisted(i, i + 1, i - 227);
    words[623] = twisted(623, 0, 396);
}

static inline uint32_t tempered(uint32_t y) {
    y ^= y >> 11;
    y ^= y << 7 & 0x9d2c5680;
    y ^= y << 15 & 0xefc60000;
    return y ^ y >> 18;
}

// log(x) for x in 2^-60 .. 1, to a few units in the last place (Cephes, logf).
static inline Floats logarithm(Floats x) {
    const Ints halved = (Ints)x - 0x3f3504f3;  // for a mantissa in sqrt(1/2) .. sqrt(2)
    const Floats n = __builtin_convertvector(halved >> 23, Floats);
    const Floats m = (Floats)((halved & 0x7fffff) + 0x3f3504f3) - 1.0f;
    Floats y = m * 7.0376836292e-2f - 1.1514610310e-1f;
    y = y * m + 1.1676998740e-1f;
    y = y * m - 1.2420140846e-1f;
    y = y * m + 1.4249322787e-1f;
    y = y * m - 1.6668057665e-1f;
    y = y * m + 2.0000714765e-1f;
    y = y * m - 2.4999993993e-1f;
    y = y * m + 3.3333331174e-1f;
    const Floats square = m * m;
    return y * m * square - n * 2.12194440e-4f - square * 0.5f + m + n * 0.693359375f;
}

// Draw n exponential variates, and advance the generator as torch's exponential_() does. Each takes two numbers of the
// generator, which give 53 bits of u. The variate is -log(1 - u). If `variates` is null, the numbers are skipped.
extern "C" void draw_float32(Generator* generator, float* variates, long n) {
    uint32_t words[624], numbers[2 * CHUNK];
    float u[CHUNK], rest[CHUNK];  // rest: 1 - u
    std::copy_n(generator->words, 624, words);
    long next = generator->next, left = generator->left;
    for (long begin = 0; begin < n; begin += CHUNK) {
        const long count = std::min<long>(CHUNK, n - begin);
        for (long made = 0; made < 2 * count;) {
            if (left == 1) twist(words), left = 625, next = 0;
            const long more = std::min(2 * count - made, left - 1);
            for (long i = 0; i < more && variates; i++) numbers[made + i] = tempered(words[next + i]);
            made += more, next += more, left -= more;
        }
        for (long i = 0; i < CHUNK && variates; i++) {
            const int32_t high = numbers[2 * i] & 0x1fffff, low = numbers[2 * i + 1] >> 1;
            u[i] = high * 0x1p-21f + low * 0x1p-52f;
            rest[i] = (0x1fffff - high) * 0x1p-21f + (0x7fffffff - low) * 0x1p-52f + 0x1p-53f;
        }
        for (long i = 0; i < count && variates; i += L) {
            const Floats x = load(rest + i);
            // The rounding error of 1 - u, which matters if u is small.
            const Floats lost = x < 0.5f ? Floats{} : (load(u + i) + (x - 1.0f)) / x;
            const Floats found = lost - logarithm(x);
            memcpy(variates + begin + i, &found, std::min<long>(L, count - i) * sizeof(float));
        }
    }
    std::copy_n(words, 624, generator->words);
    generator->next = next, generator->left = left;
}

// The i-th vector of a row of n numbers. Lanes beyond the row hold `other`.
template <class T>
static inline Floats load(const T* x, long i, long n, float other) {
    if (i + L <= n) return load(x + i);
    Floats some = Floats{} + other;
    for (long l = 0; i + l < n; l++) some[l] = number(x[i + l]);
    return some;
}

// The largest number of a row, or NaN if there is a NaN.
template <class T>
static float largest_of(const T* x, long n) {
    Floats all = Floats{} - INFINITY;
    Ints spoiled = {};
    for (long i = 0; i < n; i += L) {
        const Floats some = load(x, i, n, -INFINITY);
        all = some > all ? some : all;
        spoiled |= some != some;
    }
    if (any(spoiled)) return NAN;
    float top = all[0];
    for (int l = 1; l < L; l++) top = std::max(top, all[l]);
    return top;
}

template <class T>
struct Race {
    const T* logits;
    const float* variates;
    const long n;
    const float temperature;
    float top = -INFINITY;
    float least = -INFINITY;  // top-k keeps tokens whose logits are at least this
    double mass = 0;          // sum of the weights of the tokens that top-k keeps
    long kept = 0;            // number of these tokens

    Floats weights(Floats x) const { return exponential<L>((x - top) * (1 / temperature)); }

    // The relative error that rounding may cause in the quotient of two chances.
    float margin() const { return MARGIN + ROUNDING * (4 * std::fabs(top) / temperature + 2 * LOG_RANGE); }

    // Find the largest logit, and the tokens that top-k keeps. False if these are uncertain: torch compares scores
    // after a division, which may make two of them equal.
    bool begin(long top_k) {
        if (top_k > 0 && top_k < n) {
            TopK largest(top_k);
            largest.offer_row(logits, n);
            top = largest.numbers[0], least = largest.numbers[top_k - 1];
        } else {
            top = largest_of(logits, n);
        }
        const float nearly = least - std::fabs(least) * ROUNDING;
        Floats sums = {};
        Ints counts = {}, close = {};
        for (long i = 0; i < n; i += L) {
            const Floats x = load(logits, i, n, -INFINITY);
            const Ints is_kept = x >= least;
            const Floats w = weights(x);
            sums += is_kept | (w != w) ? w : Floats{};  // a NaN anywhere makes the sum NaN
            counts -= is_kept;
            close |= (x >= nearly) & ~is_kept;
        }
        for (int l = 0; l < L; l++) mass += sums[l], kept += counts[l];
        return mass == mass && !any(close);
    }

    // Find the token with the largest weight / variate among those with logits above `floor`; -1 if it is uncertain.
    long winner(float floor) const {
        Floats best = {}, second = {};
        Ints places = {}, none = {}, place = {};
        for (int l = 0; l < L; l++) place[l] = l;
        for (long i = 0; i < n; i += L, place += L) {
            const Floats x = load(logits, i, n, -INFINITY), e = load(variates, i, n, 1.0f);
            const Floats q = (x >= least) & (x > floor) ? weights(x) / e : Floats{};
            const Ints leads = q > best;
            const Floats loser = leads ? best : q;
            second = loser > second ? loser : second;
            best = leads ? q : best;
            places = leads ? place : places;
            none |= e <= 0.0f;
        }
        int lane = 0;
        for (int l = 1; l < L; l++)
            if (best[l] > best[lane]) lane = l;
        float after = second[lane];
        for (int l = 0; l < L; l++)
            if (l != lane) after = std::max(after, best[l]);
        return best[lane] > after * (1 + margin()) && !any(none) ? places[lane] : -1;
    }

    // Whether top-p keeps a token: 1, 0, or -1 if uncertain. If chances are added in ascending order, it keeps the
    // tokens with which the sum exceeds 1 - top_p. The order of equal chances is unknown.
    int is_left(long token, double top_p) const {
        const float x = number(logits[token]), close = std::fabs(x) * ROUNDING;
        Floats above = {}, equals = {};
        Ints count = {};
        for (long i = 0; i < n; i += L) {
            const Floats others = load(logits, i, n, -INFINITY), w = weights(others);
            const Ints is_above = others > x + close, is_equal = (others >= x - close) & ~is_above;
            above += is_above ? w : Floats{};
            equals += is_equal ? w : Floats{};
            count -= is_equal;
        }
        double larger = 0, equal = 0;
        long same = 0;
        for (int l = 0; l < L; l++) larger += above[l], equal += equals[l], same += count[l];
        if (x == top && same == 1) return 1;  // the argmax is always kept
        const double most = (mass - larger) / mass, least = most - (same - 1) * equal / same / mass;
        const double error = SUM_ROUNDING * kept + margin();
        return least > 1 - top_p + error ? 1 : most < 1 - top_p - error ? 0 : -1;
    }

    // Whether min-p keeps a token: 1, 0, or -1 if uncertain. It keeps tokens that have at least this share of the
    // argmax's chance.
    int is_likely(long token, double min_p) const {
        const float share = weights(Floats{} + number(logits[token]))[0];
        return share > min_p * (1 + margin()) ? 1 : share < min_p * (1 - margin()) ? 0 : -1;
    }
};

// The drawn token, or -1 if it is uncertain or there is a NaN. top_k: at most MAX_COUNT; 0 keeps all tokens.
template <class T>
static long drawn(const T* logits, const float* variates, long n, float temperature, long top_k, double top_p,
                  double min_p) {
    Race<T> race{logits, variates, n, temperature};
    if (!race.begin(top_k)) return -1;
    for (float floor = -INFINITY;;) {
        const long token = race.winner(floor);
        if (token < 0) return token;
        const int is_left = top_p < 1 ? race.is_left(token, top_p) : 1;
        const int is_likely = min_p > 0 ? race.is_likely(token, min_p) : 1;
        if (is_left && is_likely) return std::min(is_left, is_likely) > 0 ? token : -1;
        floor = number(logits[token]);  // they do not keep less likely tokens, either
    }
}

// The place of the largest logit, the first if several are equal, or -1 if there is a NaN.
template <class T>
static long argmax(const T* logits, long n) {
    const float top = largest_of(logits, n);
    if (top != top) return -1;
    for (long i = 0;; i += L)
        if (const Ints found = load(logits, i, n, -INFINITY) == top; any(found))
            for (long l = 0;; l++)
                if (found[l]) return i + l;
}

#define FOR(NAME, T)                                                                                              \
    extern "C" void choose_##NAME(const T* logits, const float* variates, long n, float temperature, long top_k, \
                                  double top_p, double min_p, long* token) {                                     \
        *token = variates ? drawn(logits, variates, n, temperature, top_k, top_p, min_p) : argmax(logits, n);    \
    }

FOR(float32, float)
FOR(bfloat16, BFloat16)
