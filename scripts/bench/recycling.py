"""Three published methods without a draft model, as sources of guesses in our own loop, to compare the pool with.

All of them recycle logits: after a token, they guess the model's last predictions after the same token.
`TokenRecyclingSource` is Token Recycling (Luo et al. 2024, arXiv 2408.08696, section 3). `RacerSource` is RACER (Zhang
et al. 2026, arXiv 2604.14885, section 3), which adds continuations of the last two tokens in the text. `GooseSource` is
similar to Goose (Jin et al. 2026, arXiv 2604.02047), which adds the continuation of the longest match. The first two
papers give guesses no probabilities. Here, the probability is the share of guesses of the same rank that were accepted
so far or, for RACER's continuations, the share of places that continue with the guess. So a fixed budget verifies whole
trees, as published, and an automatic budget verifies what pays. Each call begins without evidence.
"""

import heapq
import itertools
from collections import deque

import numpy as np
import torch

from lookahead import Guesser, GuessSource, GuessTree
from lookahead.guessing.source import Batch, Limits, Needs, Outcome

TOP_K = 8  # next tokens kept of each row of logits, in both papers
RECYCLED_NODES = 80  # guesses of Token Recycling
RECYCLED_DEPTH = 6
RACER_NODES = 63  # guesses of RACER: 64 nodes with the root
NGRAM = 10  # length of RACER's n-grams, and the match length up to which Goose distinguishes
GOOSE_NODES = 63  # as many as RACER's
PRIOR = 8.0  # number of observations that a rank's prior counts as
ROOT = 0  # the root's index in `Growing`


def static_tree() -> list[tuple[int, int]]:
    """Return Token Recycling's places: for each, the index of its parent (-1: the root) and its rank among siblings.

    The paper shows its tree only in a picture. This tree has the same size, depth and width. It has the most likely
    places if each rank is half as likely as the one before. So lower ranks have larger subtrees.
    """
    places: list[tuple[int, int]] = []
    waiting = [(1 + rank, 1, -1, rank) for rank in range(TOP_K)]  # first the number of halvings
    while len(places) < RECYCLED_NODES:
        halvings, depth, parent, rank = heapq.heappop(waiting)
        places.append((parent, rank))
        if depth < RECYCLED_DEPTH:
            for below in range(TOP_K):
                heapq.heappush(waiting, (halvings + 1 + below, depth + 1, len(places) - 1, below))
    return places


STATIC_TREE = static_tree()


class PublishedSource(GuessSource):
    """One of the methods as a source, which is asked in every step."""

    is_free = True
    guesser: type["Recycled"]

    def start(self, batch: Batch) -> Guesser:
        return self.guesser()


class Recycled(Guesser):
    """The model's last predictions after each token."""

    def __init__(self) -> None:
        self._said: dict[int, list[int]] = {}
        self._right, self._seen = PRIOR * 0.5 ** np.arange(1, TOP_K + 1), np.full(TOP_K, PRIOR)

    def _chances(self) -> list[float]:
        """Return the chance of each rank."""
        return (self._right / self._seen).tolist()

    def _learn(self, tokens: list[int], logits: torch.Tensor) -> None:
        """Learn the model's predictions after each token. logits: [len(tokens), vocabulary]."""
        top_k = logits.topk(min(TOP_K, logits.shape[-1]), dim=-1).indices
        self._said.update(zip(tokens, top_k.tolist(), strict=True))

    def _learn_prompt(self, text: list[int], logits: torch.Tensor) -> None:
        """Learn the model's predictions after the last tokens of a prompt, which have logits."""
        logits = logits[-len(text) :]
        self._learn(text[-len(logits) :], logits)

    def propose(self, texts: list[list[int]], limits: Limits) -> list[GuessTree]:
        return [self._after(text).finished() for text in texts]

    def observe(self, outcome: Outcome) -> None:
        of_each = outcome.steps, outcome.paths, outcome.emitted, outcome.first
        for step, path, emitted, first in zip(*of_each, strict=True):
            tokens = step.ids[: 1 + step.guesses].tolist()
            for row, new in zip(path, emitted, strict=True):
                said = self._said.get(tokens[row], [])
                self._seen[: len(said)] += 1
                if new in said:
                    self._right[said.index(new)] += 1
            self._learn(tokens, outcome.logits[first : first + len(tokens)])


class TokenRecycling(Recycled):
    """A tree of fixed shape, filled with the model's predictions after each parent's token."""

    def _after(self, text: list[int]) -> "Growing":
        tree, chances = Growing(text[-1]), self._chances()
        nodes = {-1: ROOT}  # by place; a place without a token has no node
        for place, (above, rank) in enumerate(STATIC_TREE):
            said = self._said.get(tree.tokens[nodes[above]], []) if above in nodes else []
            if rank < len(said):
                nodes[place] = tree.add(nodes[above], said[rank], chances[rank])
        return tree


class Followed:
    """A trie of continuations with counts."""

    def __init__(self) -> None:
        self.times = 0
        self.next: dict[int, Followed] = {}


class Racer(Recycled):
    """All continuations of the last two tokens in the text, most frequent first; then recycled logits.

    The paper looks up all suffixes of two tokens or more in an Aho-Corasick automaton of 10-grams, and takes the
    continuations with the highest counts. These are below the suffix of two tokens, whose counts include those of all
    longer suffixes. So a plain trie of 10-grams finds the same. A full automaton forgets the least recently used
    n-grams; this trie holds all texts of a call.
    """

    def __init__(self) -> None:
        super().__init__()
        self._grams = Followed()

    def observe_prompt(self, text: list[int], logits: torch.Tensor, hidden_states: dict[int, torch.Tensor]) -> None:
        if text:  # a prompt of embeddings has no text
            self._learn_prompt(text, logits)
            self._insert_grams(text)

    def observe(self, outcome: Outcome) -> None:
        super().observe(outcome)
        for text, emitted in zip(outcome.texts, outcome.emitted, strict=True):
            self._insert_grams((text[-NGRAM:] + emitted)[:-1])

    def _insert_grams(self, tokens: list[int]) -> None:
        for begin in range(len(tokens) - NGRAM + 1):
            node = self._grams
            for token in tokens[begin : begin + NGRAM]:
                node = node.next.setdefault(token, Followed())
                node.times += 1

    def _after(self, text: list[int]) -> "Growing":
        tree = Growing(text[-1])
        self._add_followed(tree, text)
        self._add_recycled(tree)
        return tree

    def _add_followed(self, tree: "Growing", text: list[int]) -> None:
        waiting: list[tuple[int, int, int, int, int, Followed]] = []  # most frequent first, then lowest depth
        numbers = itertools.count()

        def wait(node: int, depth: int, above: Followed) -> None:
            for token, below in above.next.items():
                heapq.heappush(waiting, (-below.times, depth, next(numbers), node, token, above))

        if len(text) > 1 and (border := self._grams.next.get(text[-2], Followed()).next.get(text[-1])):
            wait(ROOT, 1, border)
        while waiting and len(tree) < RACER_NODES:
            _, depth, _, parent, token, above = heapq.heappop(waiting)
            below = above.next[token]
            wait(tree.add(parent, token, below.times / (above.times + 1)), depth + 1, below)

    def _add_recycled(self, tree: "Growing") -> None:
        """Fill the tree with recycled logits, breadth-first from the root.

        The root has TOP_K children, and so has its first child. Any other first child may have half as many children as
        its parent, and any later child half as many as the sibling before it; at least one (section 3.1, equation 3).
        """
        chances = self._chances()
        waiting = deque([(ROOT, TOP_K, TOP_K)])  # a node, and how many children it and its first child may have
        while waiting:
            node, breadth, first = waiting.popleft()
            for rank, token in enumerate(self._said.get(tree.tokens[node], [])[:breadth]):
                if len(tree) == RACER_NODES:
                    return
                children = max(1, first >> rank)
                waiting.append((tree.add(node, token, chances[rank]), children, children >> 1))


class Goose(Recycled):
    """A spine that continues the longest, latest match of the text's end; recycled logits branch from it.

    Matched tokens are accepted several times as often as recycled ones. So a tree of the most likely guesses is deep
    along the spine and wide beside it, which is the paper's point. The paper's rules for depth and breadth are not
    used: the tree grows best-first, by the acceptance of matches of the same length, and of guesses of the same rank.
    """

    def __init__(self) -> None:
        super().__init__()
        self._matches_right, self._matches_seen = np.full(NGRAM + 1, PRIOR / 2), np.full(NGRAM + 1, PRIOR)

    def observe_prompt(self, text: list[int], logits: torch.Tensor, hidden_states: dict[int, torch.Tensor]) -> None:
        if text:  # a prompt of embeddings has no text
            self._learn_prompt(text, logits)

    def observe(self, outcome: Outcome) -> None:
        for text, emitted in zip(outcome.texts, outcome.emitted, strict=True):
            spine, length = longest_match(text)
            for guess, token in zip(spine, emitted, strict=False):
                self._matches_seen[length] += 1
                self._matches_right[length] += guess == token
                if guess != token:
                    break
        super().observe(outcome)

    def _after(self, text: list[int]) -> "Growing":
        tree, chances = Growing(text[-1]), self._chances()
        spine, length = longest_match(text)
        of_spine = float(self._matches_right[length] / self._matches_seen[length])
        waiting: list[tuple[float, int, int, float, int]] = []  # most likely first; last, the place on the spine

        def wait(node: int, joint: float, place: int) -> None:
            matched = spine[place] if 0 <= place < len(spine) else None
            if matched is not None:
                heapq.heappush(waiting, (-joint * of_spine, node, matched, of_spine, place + 1))
            left = 1.0 if matched is None else 1 - of_spine
            for rank, token in enumerate(self._said.get(tree.tokens[node], [])):
                if token != matched:
                    heapq.heappush(waiting, (-joint * left * chances[rank], node, token, left * chances[rank], -1))

        wait(ROOT, 1.0, 0)
        while waiting and len(tree) < GOOSE_NODES:
            negative, parent, token, chance, place = heapq.heappop(waiting)
            wait(tree.add(parent, token, chance), -negative, place)
        return tree


def longest_match(text: list[int]) -> tuple[list[int], int]:
    """Return the GOOSE_NODES tokens after the longest earlier match of the text's end, and its length up to NGRAM.

    At least two tokens must match. Among equally long matches, the latest counts. If the tokens reach the text's end,
    they are repeated.
    """
    tokens, length = np.array(text), 0
    ends = np.arange(1, len(text))  # places after a match of ``length`` tokens
    while length < NGRAM:
        longer = ends[(ends > length) & (tokens[ends - 1 - length] == tokens[-1 - length])]
        if not len(longer):
            break
        ends, length = longer, length + 1
    return (np.resize(tokens[ends[-1] :], GOOSE_NODES).tolist(), length) if length > 1 else ([], 0)


class Growing:
    """A tree of guesses under construction. Node 0 is the root."""

    def __init__(self, root: int):
        self.tokens = [root]
        self._parents = [-1]
        self._chances = [1.0]  # probability that a node is accepted if its parent is
        self._nodes: dict[tuple[int, int], int] = {}  # by parent and token

    def __len__(self) -> int:
        """Number of guesses."""
        return len(self._nodes)

    def add(self, parent: int, token: int, chance: float) -> int:
        """Add a guess, or find it, and return its node. A guess that is added twice keeps the larger chance."""
        node = self._nodes.setdefault((parent, token), len(self.tokens))
        if node == len(self.tokens):
            self.tokens.append(token)
            self._parents.append(parent)
            self._chances.append(chance)
        self._chances[node] = max(self._chances[node], chance)
        return node

    def finished(self) -> GuessTree:
        whole = [1.0]
        for parent, chance in zip(self._parents[1:], self._chances[1:], strict=True):
            whole.append(whole[parent] * chance)
        return GuessTree.of(self.tokens[1:], [parent - 1 for parent in self._parents[1:]], probabilities=whole[1:])


class TokenRecyclingSource(PublishedSource):
    guesser = TokenRecycling


class RacerSource(PublishedSource):
    needs = Needs(prompt_logits=2**20)  # for all tokens of all prompts
    guesser = Racer


class GooseSource(PublishedSource):
    needs = RacerSource.needs
    guesser = Goose
