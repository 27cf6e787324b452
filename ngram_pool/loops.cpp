// The loops of a pool that Python calls: learn, calibrate, merge, grow a tree.

#include <cstdlib>

#include "mixture.h"

using namespace pool;

// n rows of equal width.
template <class T>
struct Rows {
    T* first;
    int64_t count, width;

    Span<T> operator[](int64_t row) const {
        assert(0 <= row && row < count);
        return {first + row * width, width};
    }
};

// Errors of `pool_learn_step`, which then learns nothing. `table.py` has the same numbers.
enum Flaw : int64_t { NONE = -1, NO_IDS = -2, NO_PARENTS = -3, NO_DISTRIBUTIONS = -4 };

static bool are_ids(Tokens tokens) {
    for (int64_t i = 0; i < tokens.size; i++) {
        if (tokens[i] < 0 || tokens[i] >= (int64_t)1 << 31) return false;
    }
    return true;
}

static bool is_distribution(Span<const double> probabilities) {
    double total = 0;
    for (int64_t column = 0; column < probabilities.size; column++) {
        if (!(probabilities[column] >= 0)) return false;  // true for NaN
        total += probabilities[column];
    }
    return total <= 1 + ROUNDING;
}

static int64_t learn_text(const Pool& pool, Tokens tokens, int64_t start, int64_t source, int64_t clock) {
    const double certain = 1;
    int64_t largest = -1;
    for (int64_t index = start; index < tokens.size; index++, clock++) {
        if (tokens[index] < 0) continue;
        observe(pool, Keys(tokens.part(0, index)), tokens.part(index, 1), {&certain, 1}, source, clock);
        largest = std::max(largest, tokens[index]);
    }
    return largest;
}

static int64_t learn_row(const Pool& pool, Tokens context, Tokens tokens, Span<const double> probabilities,
                         int64_t source, int64_t clock) {
    observe(pool, Keys(context), tokens, probabilities, source, clock);
    int64_t largest = -1;
    for (int64_t column = 0; column < tokens.size; column++) {
        if (probabilities[column] > 0) largest = std::max(largest, tokens[column]);
    }
    return largest;
}

extern "C" int64_t pool_learn_text(const Pool* pool, const int64_t* tokens, int64_t count, int64_t start,
                                   int64_t source, int64_t clock) {
    return learn_text(*pool, {tokens, count}, start, source, clock);
}

// contexts [count][width]. tokens, probabilities [count][columns].
extern "C" int64_t pool_learn_rows(const Pool* pool, const int64_t* contexts, int64_t count, int64_t width,
                                   const int64_t* tokens, const double* probabilities, int64_t columns, int64_t source,
                                   int64_t clock) {
    const Rows<const int64_t> before{contexts, count, width}, next{tokens, count, columns};
    const Rows<const double> chances{probabilities, count, columns};
    int64_t largest = -1;
    for (int64_t row = 0; row < count; row++) {
        largest = std::max(largest, learn_row(*pool, before[row], next[row], chances[row], source, clock + row));
    }
    return largest;
}

// The last tokens of a branch of guesses and of the text before it. The newest token is put first.
struct Context {
    int64_t tokens[LONGEST];
    int known = 0;  // these tokens are at the end of the array

    bool is_full() const { return known == LONGEST; }
    operator Tokens() const { return {tokens + LONGEST - known, known}; }

    void put(int64_t token) { tokens[LONGEST - ++known] = token; }

    void put(Tokens text) {
        for (int64_t index = text.size - 1; index >= 0 && !is_full(); index--) put(text[index]);
    }
};

// The context after a text and a guess below it; guess -1: after the text.
static Context context_of(Tokens text, Tokens guesses, Tokens parents, int64_t guess) {
    Context context;
    for (; guess >= 0 && !context.is_full(); guess = parents[guess]) context.put(guesses[guess]);
    context.put(text);
    return context;
}

// line [count]. guesses, parents [guessed]. tokens, probabilities [1 + guessed][columns].
extern "C" int64_t pool_learn_step(const Pool* pool, const int64_t* line, int64_t count, int64_t start,
                                   const int64_t* guesses, const int64_t* parents, int64_t guessed,
                                   const int64_t* tokens, const double* probabilities, int64_t columns, int64_t clock) {
    const Tokens all{line, count}, tree{guesses, guessed}, above{parents, guessed}, text = all.part(0, start);
    const Rows<const int64_t> next{tokens, 1 + guessed, columns};
    const Rows<const double> chances{probabilities, 1 + guessed, columns};
    if (!are_ids(all) || !are_ids(tree) || !are_ids({tokens, next.count * columns})) return NO_IDS;
    for (int64_t guess = 0; guess < guessed; guess++) {
        if (above[guess] < -1 || above[guess] >= guess) return NO_PARENTS;
    }
    for (int64_t row = 0; row < chances.count; row++) {
        if (!is_distribution(chances[row])) return NO_DISTRIBUTIONS;
    }
    for (int64_t row = 0; row <= guessed; row++) prefetch(*pool, context_of(text, tree, above, row - 1));
    int64_t last = 0, place = start;  // the last row that belongs to the text, and the index of the token after it
    for (int64_t row = 0; row <= guessed; row++) {  // parents before children
        if (row > 0) {
            if (place >= count - 1 || above[row - 1] + 1 != last || tree[row - 1] != all[place]) continue;
            last = row, place++;
        }
        calibrate(*pool, context_of(text, tree, above, row - 1), next[row], chances[row]);
    }
    bound(*pool);
    int64_t largest = -1;
    for (int64_t row = 0; row <= guessed; row++) {
        const Context context = context_of(text, tree, above, row - 1);
        largest = std::max(largest, learn_row(*pool, context, next[row], chances[row], LOGITS, clock + row));
    }
    return std::max(largest, learn_text(*pool, all, start, TEXT, clock + 1 + guessed));
}

// As for `pool_learn_rows`.
extern "C" void pool_calibrate(const Pool* pool, const int64_t* contexts, int64_t count, int64_t width,
                               const int64_t* tokens, const double* probabilities, int64_t columns) {
    const Rows<const int64_t> before{contexts, count, width}, next{tokens, count, columns};
    const Rows<const double> chances{probabilities, count, columns};
    for (int64_t row = 0; row < count; row++) calibrate(*pool, before[row], next[row], chances[row]);
    bound(*pool);
}

extern "C" void pool_calibrate_text(const Pool* pool, const int64_t* tokens, int64_t count, int64_t start) {
    const Tokens text{tokens, count};
    const double certain = 1;
    for (int64_t index = start; index < count; index++) {
        calibrate(*pool, text.part(0, index), text.part(index, 1), {&certain, 1});
    }
    bound(*pool);
}

// contexts [count][width]. entries [count].
extern "C" void pool_find_entries(const Pool* pool, const int64_t* contexts, int64_t count, int64_t width, int64_t kind,
                                  int64_t* entries) {
    assert(0 <= kind && kind < KINDS);
    const Rows<const int64_t> before{contexts, count, width};
    for (int64_t row = 0; row < count; row++) entries[row] = find(*pool, Keys(before[row]).of[kind]);
}

static void subtract(const Pool& since, int64_t base, const int32_t* tokens, float* weights, int64_t seen) {
    const int64_t before = since.counts_of(base)[0], later = std::max<int64_t>(seen - before, 1);
    float total = 0;
    for (int place = 0; place < WIDTH; place++) {
        if (weights[place] <= 0) continue;
        const double of_base = held(since, base, tokens[place]);
        weights[place] = (float)std::max((seen * (double)weights[place] - before * of_base) / later, 0.0);
        total += weights[place];
    }
    if (total > 1) {
        for (int place = 0; place < WIDTH; place++) weights[place] /= total;
    }
}

extern "C" void pool_merge(const Pool* pool, int64_t clock, const Pool* other, int64_t other_clock, const Pool* since) {
    for (int64_t theirs = 0; theirs < other->entries; theirs++) {
        const uint64_t key = other->key_of(theirs);
        int64_t seen = other->counts_of(theirs)[0], rows = other->counts_of(theirs)[1];
        if (key == EMPTY) continue;
        const int32_t* const tokens = other->tokens_of(theirs);
        float weights[WIDTH];
        std::copy_n(other->weights_of(theirs), WIDTH, weights);
        const int64_t base = find(*since, key);
        if (base >= 0) {
            const int64_t before = since->counts_of(base)[0];
            if (other->learned_at_of(theirs) == since->learned_at_of(base) && seen == before) continue;
            if (seen >= before) {  // otherwise the entry was evicted and learned anew
                subtract(*since, base, tokens, weights, seen);
                seen = std::max<int64_t>(seen - before, 1);  // 1 if both counts have stopped at 255
                rows = std::min(std::max<int64_t>(rows - since->counts_of(base)[1], 0), seen);
            }
        }
        int64_t its_age = age(*other, theirs, other_clock), entry = find(*pool, key);
        if (entry < 0) {
            entry = entry_for(*pool, key, clock);
            const int64_t its_seen = pool->counts_of(entry)[0];
            if (pool->key_of(entry) != EMPTY && age(*pool, entry, clock) * seen <= its_age * its_seen) {
                continue;  // the new entry would be evicted before this one
            }
            assign(*pool, entry, key);
        } else {
            its_age = std::min(its_age, age(*pool, entry, clock));
        }
        uint8_t* const counts = pool->counts_of(entry);
        const float share = (float)((double)seen / (counts[0] + seen));
        pool->learned_at_of(entry) = (uint32_t)(clock - its_age);
        counts[0] = (uint8_t)std::min<int64_t>(counts[0] + seen, 255);
        counts[1] = (uint8_t)std::min<int64_t>(counts[1] + rows, 255);
        float* const merged = pool->weights_of(entry);
        for (int place = 0; place < WIDTH; place++) merged[place] = (float)(merged[place] * (1 - (double)share));
        Contents contents(*pool, entry);
        for (int place = 0; place < WIDTH; place++) {
            if (weights[place] <= 0) continue;
            contents.add(tokens[place], weights[place] * share, other->sources_of(theirs)[place]);
        }
        contents.put(*pool, entry);
        float total = 0;
        for (int place = 0; place < WIDTH; place++) total += merged[place];
        if (total > 1 + ROUNDING) {  // learning brings a sum back to 1, merging does not
            for (int place = 0; place < WIDTH; place++) merged[place] /= total;
        }
    }
}

struct Guess {
    double chance;
    int64_t parent, token, source;

    // Whether the other is taken first: the likelier guess, or else the one with the earlier parent.
    bool operator<(const Guess& other) const {
        if (chance != other.chance) return chance < other.chance;
        return parent != other.parent ? parent > other.parent : token > other.token;
    }
};

// A heap of the guesses that the tree may take next.
struct Frontier {
    Guess* guesses = nullptr;
    int64_t size = 0, room = 0;

    ~Frontier() { free(guesses); }

    // Make room for `more` guesses. False without memory.
    bool has_room(int64_t more) {
        if (size + more <= room) return true;
        const int64_t wanted = 2 * (size + more);
        Guess* const moved = (Guess*)realloc(guesses, wanted * sizeof(Guess));
        if (!moved) return false;
        guesses = moved, room = wanted;
        return true;
    }

    void push(Guess guess) {
        assert(size < room);
        guesses[size++] = guess;
        std::push_heap(guesses, guesses + size);
    }

    Guess pop() {
        assert(size > 0);
        std::pop_heap(guesses, guesses + size);
        return guesses[--size];
    }
};

// Node 0 is the root.
struct Node {
    int64_t parent, token, depth, source;
    double joint;
    // In depth-first order: its place, the number of nodes in its subtree, and the place of its next child.
    int64_t place, size, next;
};

// Find each node's place in depth-first order. Siblings keep their order; the root's place is -1.
static void lay_out(Span<Node> nodes) {
    for (int64_t node = nodes.size - 1; node > 0; node--) nodes[nodes[node].parent].size += nodes[node].size;
    for (int64_t node = 1; node < nodes.size; node++) {
        Node& parent = nodes[nodes[node].parent];
        nodes[node].place = parent.next;
        nodes[node].next = parent.next + 1;
        parent.next += nodes[node].size;
    }
}

// Add the likeliest nodes below the root, one by one. Returns the number of nodes, or -1 without memory.
static int64_t grow(const Pool& pool, Tokens context, double min_probability, int64_t max_depth, bool is_chain,
                    Rows<const float> draws, Span<Node> nodes) {
    Frontier frontier;
    for (int64_t count = 1;; count++) {
        const int64_t newest = count - 1;
        const Node& node = nodes[newest];
        if (node.depth < max_depth) {
            Context path;
            for (int64_t at = newest; at > 0 && !path.is_full(); at = nodes[at].parent) path.put(nodes[at].token);
            path.put(context);
            Candidates candidates(pool, Known(pool, path));
            if (node.depth < draws.count) candidates.race(pool, draws[node.depth]);
            if (!frontier.has_room(candidates.count)) return -1;
            for (int at = 0; at < candidates.count; at++) {
                const double chance = node.joint * candidates.chances[at];
                if (chance > min_probability) {
                    frontier.push({chance, newest, candidates.tokens[at], candidates.origins[at]});
                }
            }
        }
        if (count == nodes.size || frontier.size == 0) return count;
        const Guess best = frontier.pop();
        if (is_chain) frontier.size = 0;
        const int64_t depth = nodes[best.parent].depth + 1;
        nodes[count] = {best.parent, best.token, depth, best.source, best.chance, -1, 1, 0};
    }
}

// context [LONGEST]. draws [drawn][vocabulary]. Writes nodes [4][budget] and joints [budget].
extern "C" int64_t pool_grow(const Pool* pool, const int64_t* context, double min_probability, int64_t max_depth,
                             bool is_chain, const float* draws, int64_t drawn, int64_t vocabulary, int64_t* nodes,
                             double* joints, int64_t budget) {
    assert(budget > 0);
    Node* const memory = (Node*)malloc((budget + 1) * sizeof(Node));
    if (!memory) return -1;
    memory[0] = {-1, -1, 0, -1, 1, -1, 1, 0};
    const Rows<const float> variates{draws, drawn, vocabulary};
    const int64_t count =
        grow(*pool, {context, LONGEST}, min_probability, max_depth, is_chain, variates, {memory, budget + 1});
    if (count > 0) lay_out({memory, count});
    const Rows<int64_t> found{nodes, 4, budget};
    for (int64_t at = 1; at < count; at++) {
        const Node& node = memory[at];
        found[0][node.place] = node.token;
        found[1][node.place] = memory[node.parent].place;
        found[2][node.place] = node.depth;
        found[3][node.place] = node.source;
        joints[node.place] = node.joint;
    }
    free(memory);
    return count < 0 ? count : count - 1;
}
