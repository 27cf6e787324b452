// A pool's prediction of the next token: a mixture of the evidence of all kinds of contexts, weighted by belief.

#pragma once

#include "table.h"

namespace pool {

constexpr double FADE = 0.9995, STEP = 0.02, MAX_VOTES = 50.0;
constexpr double MIN_TOLD = 1e-100, MIN_TIMES = 1.0, MAX_TIMES = 1.001 / (1 - FADE);
constexpr double OUTSIDE = 1e-4, MIN_REST = 1e-9;
constexpr double RACE_CHANCE = 0.85, RACE_VARIATE = 0.6, RACE_OTHERS = 2.4, MIN_VARIATE = 1e-12;

static inline int amount_of(const Pool& pool, int64_t entry) {
    const int seen = pool.counts_of(entry)[0], rows = pool.counts_of(entry)[1];
    if (rows == 0) return seen == 1 ? 0 : seen < 5 ? 1 : 2;
    return rows == 1 ? 3 : rows < 4 ? 4 : 5;
}

static inline int peak_of(const Pool& pool, int64_t entry) {
    const float* const weights = pool.weights_of(entry);
    float highest = 0;
    for (int place = 0; place < WIDTH; place++) highest = std::max(highest, weights[place]);
    return highest <= 0.4 ? 0 : highest <= 0.7 ? 1 : highest <= 0.95 ? 2 : 3;
}

static inline int class_of(float weight) {
    if (weight <= 0.15) return weight <= 0 ? 0 : 1;
    return weight <= 0.4 ? 2 : weight <= 0.7 ? 3 : weight <= 0.95 ? 4 : 5;
}

// The evidence of each kind of context about the token after some tokens.
struct Known {
    int64_t entries[KINDS];  // -1 for kinds without evidence
    int amounts[KINDS];
    double beliefs[KINDS];
    double rest = 1;  // the belief that is left over

    Known(const Pool& pool, Tokens tokens) {
        const Keys keys(tokens);
        for (int kind = 0; kind < KINDS; kind++) {
            const int64_t entry = entries[kind] = find(pool, keys.of[kind]);
            amounts[kind] = 0;
            beliefs[kind] = 0;
            if (entry < 0) continue;
            amounts[kind] = amount_of(pool, entry);
            const double* const told = pool.belief_of(kind, amounts[kind], peak_of(pool, entry));
            beliefs[kind] = rest * told[0] / told[1];
            rest = std::max(rest - beliefs[kind], 0.0);  // rounding could make it negative
        }
    }
};

// The candidates for the next token.
struct Candidates {
    int count = 0;
    int64_t tokens[KINDS * WIDTH];
    int64_t origins[KINDS * WIDTH];
    double chances[KINDS * WIDTH];

    Candidates(const Pool& pool, const Known& known) {
        double tilts[KINDS * WIDTH];  // each candidate's votes, relative to a token that no kind holds
        double silence = 0;           // the votes for a token that no kind holds
        double others = 1;            // chance of all tokens that are not candidates
        for (int kind = 0; kind < KINDS; kind++) {
            const int64_t entry = known.entries[kind];
            if (entry < 0) continue;
            const double* const cast = pool.votes_of(kind, known.amounts[kind]);
            silence += cast[0];
            for (int place = 0; place < WIDTH; place++) {
                const float weight = pool.weights_of(entry)[place];
                if (weight <= 0) continue;
                const int64_t token = pool.tokens_of(entry)[place];
                int at = 0;
                while (at < count && tokens[at] != token) at++;
                if (at == count) {
                    tokens[at] = token, origins[at] = pool.sources_of(entry)[place];
                    chances[at] = tilts[at] = 0;
                    count++;
                }
                const double chance = known.beliefs[kind] * weight;
                chances[at] += chance;
                others -= chance;
                tilts[at] += cast[class_of(weight)] - cast[0];
            }
        }
        double total = std::max(others, MIN_REST);
        for (int at = 0; at < count; at++) {
            chances[at] *= pool.exp(std::min(silence + tilts[at], MAX_VOTES));
            total += chances[at];
        }
        for (int at = 0; at < count; at++) chances[at] /= total;
    }

    // Change the chances for known draws. draws: the variate of each token.
    void race(const Pool& pool, Span<const float> draws) {
        double others = 1;
        for (int at = 0; at < count; at++) others -= chances[at];
        double total = std::max(others, MIN_REST) * RACE_OTHERS;
        for (int at = 0; at < count; at++) {
            const double variate = tokens[at] < draws.size ? draws[tokens[at]] : 1;
            chances[at] = pool.pow(chances[at], RACE_CHANCE) * pool.pow(std::max(variate, MIN_VARIATE), -RACE_VARIATE);
            total += chances[at];
        }
        for (int at = 0; at < count; at++) chances[at] /= total;
    }
};

// Learn from what followed one context: the votes, then the beliefs. `bound` must follow.
static inline void calibrate(const Pool& pool, Tokens context, Tokens tokens, Span<const double> probabilities) {
    const Known known(pool, context);
    const Candidates candidates(pool, known);
    for (int at = 0; at < candidates.count; at++) {
        double observed = 0;
        for (int64_t column = 0; column < tokens.size; column++) {
            if (tokens[column] == candidates.tokens[at]) observed += probabilities[column];
        }
        const double step = STEP * (observed - candidates.chances[at]);
        for (int kind = 0; kind < KINDS; kind++) {
            if (known.entries[kind] < 0) continue;
            const float weight = held(pool, known.entries[kind], candidates.tokens[at]);
            pool.votes_of(kind, known.amounts[kind])[class_of(weight)] += step;
        }
    }
    for (int64_t column = 0; column < tokens.size; column++) {
        const double probability = probabilities[column];
        if (probability <= 0) continue;
        double credit[KINDS] = {0}, total = std::max(known.rest, MIN_REST) * OUTSIDE;
        for (int kind = 0; kind < KINDS; kind++) {
            if (known.entries[kind] < 0) continue;
            credit[kind] = known.beliefs[kind] * held(pool, known.entries[kind], tokens[column]);
            total += credit[kind];
        }
        double left = 1;  // credit for the token that earlier kinds have left over
        for (int kind = 0; kind < KINDS; kind++) {
            if (known.entries[kind] < 0) continue;
            double* const told = pool.belief_of(kind, known.amounts[kind], peak_of(pool, known.entries[kind]));
            const double keep = 1 - (1 - FADE) * probability * left;
            told[0] = told[0] * keep + probability * credit[kind] / total;
            told[1] = told[1] * keep + probability * left;
            left = std::max(left - credit[kind] / total, 0.0);
        }
    }
}

static inline void bound(const Pool& pool) {
    for (int cell = 0; cell < KINDS * AMOUNTS * CLASSES; cell++) {
        pool.votes[cell] = std::min(std::max(pool.votes[cell], -MAX_VOTES), MAX_VOTES);
    }
    for (int cell = 0; cell < KINDS * AMOUNTS * PEAKS; cell++) {
        double* const told = pool.belief + 2 * cell;
        told[1] = std::min(std::max(told[1], MIN_TIMES), MAX_TIMES);
        told[0] = std::min(std::max(told[0], MIN_TOLD), told[1]);
    }
}

}  // namespace pool
