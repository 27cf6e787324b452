"""Guesses from a draft model: a tree of what it holds likely, which its passes grow best-first.

A pass computes the likeliest guesses; what the model says after each of them are further guesses. Another pass follows
while the tokens that it is expected to add are worth its time (a draft model: Leviathan et al. 2023, arXiv 2211.17192;
a tree that grows by its probabilities: Li et al. 2024, arXiv 2406.16858, section 4.1).

A draft model looks ahead itself: its own sources guess what it will say, so that one of its passes can go several
tokens deep. They are an n-gram pool, or what the draft model was wrapped with. So models can form a cascade.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from transformers import PreTrainedModel

from lookahead.config import LookaheadConfig
from lookahead.cpu import products
from lookahead.guessing.budget import Budget, Pace
from lookahead.guessing.combine import Combined, Ledger
from lookahead.guessing.pool import PoolSource
from lookahead.guessing.source import Batch, GuessSource, Limits, Outcome, draws_at, likeliest
from lookahead.models.adapter import context_length, vocabulary_of
from lookahead.models.cache import LookaheadCache
from lookahead.passes.capabilities import can_batch, choose_runner
from lookahead.passes.costs import StepCosts, step_costs, synchronize
from lookahead.passes.runner import EagerRunner
from lookahead.stats import Stats
from lookahead.step import Step, grow, lay_out
from ngram_pool import GuessTree, NgramPool

TOP_K = 8  # guesses after each row
MAX_ROWS = 16  # guesses of one text that a pass computes
MAX_LACKING = 32  # tokens of a text that a step's first pass may compute beside guesses; more are read before
ROOM = 1024  # positions beyond the text that a cache makes room for at once
MIN_TOKENS = 0.2  # that a further pass is expected to add, where no rate says what its time is worth
SHARPENING, MAX_SHARPNESS = 0.02, 8.0  # how far a token moves the exponent of a draft's probabilities, and its bound
MIN_REST = 1e-6  # least probability of all tokens beyond the likeliest
# Before any is counted: accepted rows (the second), and those with the next token among their guesses (the first).
PRIOR_HITS, PRIOR_ROWS = 6.0, 8.0


class Sharpness:
    """The exponent that makes a draft's probabilities say how often its guesses come true.

    A draft that has the model's own probabilities knows the winner of a known draw (`Limits.draws`), but the shares of
    p / e do not say so. One that is far from them is less sure than it looks. The exponent follows the emitted tokens,
    by gradient descent on the log loss.
    """

    def __init__(self) -> None:
        self._exponent = 1.0

    def __call__(self, probabilities: np.ndarray) -> np.ndarray:
        """Return the probabilities of some tokens, [..., k], sharpened. All other tokens count as one."""
        rest = np.maximum(1 - probabilities.sum(-1, keepdims=True), MIN_REST)
        powers = np.concatenate([probabilities, rest], -1) ** self._exponent
        return (powers / powers.sum(-1, keepdims=True))[..., :-1]

    def count(self, probabilities: np.ndarray, index: int | None) -> None:
        """Count an emitted token. probabilities: float64 [k], as given. index: the token's; None: another token."""
        whole = np.append(probabilities, max(1 - probabilities.sum(), MIN_REST))
        logs = np.log(np.maximum(whole, MIN_REST))
        shares = np.exp(self._exponent * logs)
        slope = self._exponent * (logs[-1 if index is None else index] - (shares * logs).sum() / shares.sum())
        self._exponent *= float(np.exp(SHARPENING * np.clip(slope, -5, 5)))
        self._exponent = min(max(self._exponent, 1 / MAX_SHARPNESS), MAX_SHARPNESS)


_sharpness: WeakKeyDictionary[PreTrainedModel, dict[bool, Sharpness]] = WeakKeyDictionary()


def sharpness_of(model: PreTrainedModel, has_draws: bool) -> Sharpness:
    """The sharpness that is kept for a draft model or the model of a head, with known draws and without."""
    return _sharpness.setdefault(model, {}).setdefault(has_draws, Sharpness())


@dataclass(eq=False)
class Guess:
    """A guess that no pass has computed yet."""

    chance: float
    """That the text goes on to it."""
    token: int
    after: "int | Guess"
    """What it follows: a row, or another such guess."""
    row: int = -1
    """Its row, once the next pass is to compute it."""


@dataclass
class Draft:
    """What the draft model says may follow one text.

    Rows are the tokens that its passes compute: those of the text that its cache lacks, whose last is the root, then
    guesses, parents first.
    """

    ids: list[int]
    parents: list[int]
    root: int
    """The row of the text's last token."""
    depths: list[int]
    """Of each row below the root."""
    chances: list[float] = field(default_factory=list)
    """That the text goes on to each computed row."""
    following: list[dict[int, float]] = field(default_factory=list)
    """For each computed row, the likeliest next tokens and their probabilities."""
    said: list[np.ndarray] = field(default_factory=list)
    """For each computed row, the same probabilities before they were sharpened."""
    rows: dict[tuple[int, int], int] = field(default_factory=dict)
    """{(row, next token): row of that token}."""

    @classmethod
    def after(cls, lacking: list[int]) -> "Draft":
        """lacking: the tokens of the text that the cache lacks; at least its last."""
        count = len(lacking)
        return cls(list(lacking), list(range(-1, count - 1)), count - 1, [0] * count)

    def add(self, guess: Guess) -> None:
        """Plan a row for a guess."""
        parent = guess.after.row if isinstance(guess.after, Guess) else guess.after
        guess.row = self.rows[parent, guess.token] = len(self.ids)
        self.ids.append(guess.token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)

    def fill_up(self, count: int) -> None:
        """Bring the number of rows to ``count``, by copies of the root that no other row sees."""
        for _ in range(count - len(self.ids)):
            self.ids.append(self.ids[self.root])
            self.parents.append(-1)
            self.depths.append(0)

    def take(self, tokens: np.ndarray, probabilities: np.ndarray, sharpness: Sharpness) -> None:
        """Take in what a pass says after its rows, [T, k] each."""
        self.said += list(probabilities.astype(float))
        for said, chances in zip(tokens.tolist(), sharpness(probabilities.astype(float)).tolist(), strict=True):
            row = len(self.chances)
            parent = self.parents[row]
            chance = 1.0
            if row > self.root:
                chance = self.chances[parent] * self.following[parent].get(self.ids[row], 0.0) if parent >= 0 else 0.0
            self.chances.append(chance)
            self.following.append(dict(zip(said, chances, strict=True)))

    def candidates(self, depth: int) -> list[Guess]:
        """What may follow the computed rows and is no row itself, down to this depth, likeliest first."""
        found = [
            Guess(chance * probability, token, row)
            for row, (chance, following) in enumerate(zip(self.chances, self.following, strict=True))
            if row >= self.root and chance > 0 and self.depths[row] < depth
            for token, probability in following.items()
            if (row, token) not in self.rows
        ]
        return sorted(found, key=lambda guess: -guess.chance)

    def worth_a_row(self, guesses: list[Guess], limits: Limits, can_branch: bool = True) -> list[Guess]:
        """Those guesses after which others may be among the likeliest that are asked for.

        guesses: likeliest first. can_branch: whether a pass can compute more than a single branch.
        """
        chances = sorted([*self.chances[self.root + 1 :], *(guess.chance for guess in guesses)], reverse=True)
        least = chances[limits.guesses - 1] if len(chances) >= limits.guesses else 0.0
        kept = [guess for guess in guesses if guess.chance > max(least, limits.min_probability)]
        if can_branch and not limits.is_chain:
            return kept
        chain: list[Guess] = []
        last: int | Guess = len(self.ids) - 1
        for guess in kept:
            if guess.after == last:
                chain.append(guess)
                last = guess
        return chain

    def text_to(self, row: int) -> list[int]:
        """The tokens from behind the root to this row."""
        tokens: list[int] = []
        while row != self.root:
            tokens.insert(0, self.ids[row])
            row = self.parents[row]
        return tokens

    def tree(self, depth: int, min_probability: float) -> GuessTree:
        """All guesses down to this depth that are likely enough."""
        nodes = {self.root: -1}
        found: list[tuple[int, int, float]] = []  # token, parent, chance
        for row in range(self.root + 1, len(self.chances)):
            if self.chances[row] >= min_probability and self.parents[row] in nodes and self.depths[row] <= depth:
                nodes[row] = len(found)
                found.append((self.ids[row], nodes[self.parents[row]], self.chances[row]))
        for guess in self.candidates(depth):
            if guess.chance >= min_probability and guess.after in nodes:
                found.append((guess.token, nodes[guess.after], guess.chance))
        if not found:
            return GuessTree.empty()
        tokens, parents, chances = zip(*found, strict=True)
        return GuessTree.of(tokens, parents, probabilities=chances)

    def teach(self, sharpness: Sharpness, path: list[int], emitted: list[int]) -> None:
        """Count the emitted tokens. path: their rows, as `accepted` returns them."""
        for row, token in zip(path[self.root :], emitted, strict=False):
            tokens = list(self.following[row])
            sharpness.count(self.said[row], tokens.index(token) if token in tokens else None)

    def accepted(self, emitted: list[int]) -> list[int]:
        """Rows of the text and of those emitted tokens that were computed, less the last one: the next root."""
        path = list(range(self.root + 1))
        for token in emitted[:-1]:
            row = self.rows.get((path[-1], token))
            if row is None:
                break
            path.append(row)
        return path


@dataclass
class _Asked:
    """What the draft model's own sources guess after one row."""

    text: list[int]
    """Up to the row's token."""
    row: "int | Guess"
    tree: GuessTree
    nodes: list[Guess]
    """Those of the tree."""


class _Inner(NamedTuple):
    """What guesses what a draft model will say."""

    sources: list[GuessSource]
    ledger: Ledger
    pool: NgramPool


_inner: WeakKeyDictionary[PreTrainedModel, _Inner] = WeakKeyDictionary()  # of draft models that are not wrapped


class DraftModelSource(GuessSource):
    """Proposes what a draft model holds likely. The draft model must have the vocabulary of the model.

    A wrapped draft model uses its own settings, sources and pool. Another one gets a pool, which it keeps.
    """

    def __init__(self, model: PreTrainedModel, config: LookaheadConfig | None = None):
        """config: says how to run the passes of a model that is not wrapped (`cpu_kernels`, `compile_passes`), and how
        much memory its pool has."""
        self.model = model
        self._config = config or LookaheadConfig()

    @property
    def _engine(self) -> Any:
        """The `Lookahead` of a wrapped draft model, or None."""
        return vars(self.model).get("lookahead")

    @contextmanager
    def _running(self) -> Iterator[EagerRunner]:
        """Run passes of the draft model in this block, wrapped or not."""
        engine, config = self._engine, self._config
        with ExitStack() as stack:
            if engine is not None:
                config = engine.config
                stack.enter_context(engine.call())
            elif config.cpu_kernels:
                products.install(self.model)
                stack.callback(products.remove, self.model)
            runner = choose_runner(self.model, config)[0]
            stack.callback(runner.end)
            yield runner

    def check(self) -> None:
        """Raise UnsupportedModelError if lookahead cannot run the draft model."""
        with self._running():
            return

    def start(self, batch: Batch) -> None:
        self._open = ExitStack()
        self._costs: StepCosts | None = None
        self._temperature = batch.temperature
        self._vocabulary = min(batch.vocabulary, vocabulary_of(self.model))
        self._runner = self._open.enter_context(self._running())
        if batch.has_rate:
            self._costs = step_costs(self._runner)
        own, stats = self._own_sources(), Stats()
        if (engine := self._engine) is not None:
            self._open.callback(engine.add, stats)
        budget = Budget(None, Pace(self._costs), stats) if self._costs else Budget(MAX_ROWS, None, stats)
        self._inner, self._inner_pace = Combined(own.sources, own.ledger, budget, stats), budget.pace
        self._open.callback(self._inner.end)
        self._inner.start(replace(batch, vocabulary=vocabulary_of(self.model), pool=own.pool))
        self._cache: LookaheadCache | None = None
        self._held: list[list[int]] = [[] for _ in batch.texts]  # tokens in the cache
        self._drafts: list[Draft] = []
        self._steps: list[Step] = []  # what was computed and not committed yet
        self._serves = len(batch.texts) == 1 or can_batch(self.model, self._runner.adapter)
        self._hits, self._rows = PRIOR_HITS, PRIOR_ROWS

    def _own_sources(self) -> _Inner:
        if (engine := self._engine) is None:
            if self.model not in _inner:
                sources: list[GuessSource] = [PoolSource()]
                _inner.setdefault(self.model, _Inner(sources, Ledger(sources), NgramPool(self._config.pool_memory_mb)))
            return _inner[self.model]
        if engine.needs.hidden_states:
            raise ValueError(
                "a draft model's own sources cannot have hidden states: wrap the draft model without its heads"
            )
        return _Inner(engine.sources, engine.ledger, engine.pool)

    def end(self) -> None:
        if self._costs:
            self._costs.keep()
        self._open.close()

    def keep(self, sequences: list[int]) -> None:
        self._forget()
        if self._cache is not None:
            self._cache.select(sequences)
        self._held = [self._held[b] for b in sequences]
        self._inner.keep(sequences)

    def propose(self, texts: list[list[int]], limits: Limits) -> list[GuessTree]:
        self._forget()
        if not (self._serves and max(limits.depths) > 0 and self._catch_up(texts)):
            self._drafts = []
            return [GuessTree.empty() for _ in texts]
        self._drafts = [Draft.after(text[len(held) :]) for text, held in zip(texts, self._held, strict=True)]
        self._sharpness = sharpness_of(self.model, any(known is not None for known in limits.draws))
        while (asked := self._plan(texts, limits)) is not None:
            self._compute(asked, limits)
        return [
            draft.tree(depth, limits.min_probability) for draft, depth in zip(self._drafts, limits.depths, strict=True)
        ]

    def observe(self, outcome: Outcome) -> None:
        if not self._drafts:
            return
        paths = self._settle(outcome)
        for draft, path, held in zip(self._drafts, paths, self._held, strict=True):
            held += [draft.ids[row] for row in path]
        self._cached.commit(self._steps, paths)
        self._steps = []

    def _settle(self, outcome: Outcome) -> list[list[int]]:
        """Return the accepted rows of each draft, and count how often they had the next token among their guesses."""
        paths = [draft.accepted(emitted) for draft, emitted in zip(self._drafts, outcome.emitted, strict=True)]
        for draft, path, emitted in zip(self._drafts, paths, outcome.emitted, strict=True):
            for row, token in zip(path[draft.root :], emitted, strict=False):
                self._hits += token in draft.following[row]
                self._rows += 1
            draft.teach(self._sharpness, path, emitted)
        return paths

    @property
    def _cached(self) -> LookaheadCache:
        assert self._cache is not None
        return self._cache

    def _forget(self) -> None:
        """Drop what was computed for a step that nobody has verified."""
        if self._steps:
            self._cached.commit(self._steps, [[] for _ in self._steps])
            self._steps = []

    # The cache

    def _catch_up(self, texts: list[list[int]]) -> bool:
        """Bring the cache to a prefix of each text that lacks a few tokens; False where the model cannot read them."""
        context = context_length(self.model)
        for text, held in zip(texts, self._held, strict=True):
            lacking = text[len(held) :]
            if len(text) < 2 or len(text) + 2 * MAX_ROWS > context or max(lacking, default=0) >= self._vocabulary:
                return False
            if self._cache is None or len(lacking) not in range(1, MAX_LACKING + 1) or text[: len(held)] != held:
                self._read(texts)
                return True
        return True

    def _read(self, texts: list[list[int]]) -> None:
        """Compute what the cache lacks of each text but its last token, sequence by sequence."""
        caches = []
        for b, text in enumerate(texts):
            one, held = self._cache.sequence(b) if self._cache else None, self._held[b]
            shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(held, text[:-1], strict=False)))
            if one is not None and shared < len(held):
                if one.can_rewind:
                    one.rewind(shared)
                    one.lengths = [shared]
                else:
                    one = None
            if one is None:
                one, shared = self._runner.adapter.make_cache(len(text) + ROOM), 0
            self._runner.settle(one)
            if new := text[shared:-1]:
                count = max(self._inner.needs.prompt_logits, 1)
                output = self._runner.read(torch.tensor([new]), one, keep=count)
                if not shared:
                    self._inner.read(text[:-1], output.logits, output.hidden_states)
            caches.append(one)
            self._held[b] = text[:-1]
        self._cache = self._runner.adapter.join(caches, max(map(len, texts)) + ROOM)

    # A pass

    def _plan(self, texts: list[list[int]], limits: Limits) -> list[_Asked] | None:
        """Add the rows of the next pass to the drafts; None if no pass is worth its time.

        Returns what the model's own sources guess.
        """
        likeliest_first = [
            draft.candidates(depth)[:MAX_ROWS] if draft.chances else []
            for draft, depth in zip(self._drafts, limits.depths, strict=True)
        ]
        waiting = max(len(draft.ids) - len(draft.chances) for draft in self._drafts)  # rows of the text itself
        asked: list[_Asked] = []
        if waiting or all(likeliest_first):
            asked = self._ask(texts, limits, likeliest_first)
            for guesses, one in zip(likeliest_first, asked, strict=True):
                guesses += one.nodes
                guesses.sort(key=lambda guess: -guess.chance)  # stable: what a guess follows stays before it
        wanted = [
            draft.worth_a_row(guesses, limits, self._runner.adapter.can_branch)
            for draft, guesses in zip(self._drafts, likeliest_first, strict=True)
        ]
        count = self._choose(wanted, waiting, texts, limits)
        if not count and not waiting:
            return None
        for draft, guesses in zip(self._drafts, wanted, strict=True):
            for guess in guesses[:count]:
                draft.add(guess)
        most = max(len(draft.ids) for draft in self._drafts)
        for draft in self._drafts:
            draft.fill_up(most)
        return asked

    def _ask(self, texts: list[list[int]], limits: Limits, candidates: list[list[Guess]]) -> list[_Asked]:
        """What the model's own sources guess after the likeliest guess of each draft, or after the text itself."""
        asked: list[_Asked] = []
        depths, draws = [], []
        known = limits.draws or [None] * len(texts)
        planned = zip(self._drafts, candidates, texts, limits.depths, known, strict=True)
        for draft, guesses, text, depth, drawn in planned:
            row: int | Guess = draft.root
            beyond: list[int] = []  # tokens from behind the text to the row
            if guesses:
                row = guesses[0]
                assert isinstance(row.after, int)
                beyond = [*draft.text_to(row.after), row.token]
            asked.append(_Asked(text + beyond, row, GuessTree.empty(), []))
            depths.append(max(depth - len(beyond), 0))
            draws.append(None if drawn is None else drawn[len(beyond) :])
        is_chain = not self._runner.adapter.can_branch
        rate = self._inner_pace.rate() if self._inner_pace else None
        own = Limits(depths, MAX_ROWS, limits.min_probability, is_chain, rate, draws)
        for one, tree in zip(asked, self._inner.propose([one.text for one in asked], own), strict=True):
            one.tree = tree
            chance = one.row.chance if isinstance(one.row, Guess) else 1.0
            for token, parent, share in zip(
                tree.tokens.tolist(), tree.parents.tolist(), tree.probabilities.tolist(), strict=True
            ):
                one.nodes.append(Guess(chance * share, token, one.nodes[parent] if parent >= 0 else one.row))
        return asked

    def _choose(self, wanted: list[list[Guess]], waiting: int, texts: list[list[int]], limits: Limits) -> int:
        """How many guesses of each draft the next pass computes, beside the rows that wait for it."""
        count = max(map(len, wanted))
        gains = np.zeros(count + 1)
        for guesses in wanted:
            gains[1 : len(guesses) + 1] += [guess.chance for guess in guesses]
        tokens = np.cumsum(gains) * self._hits / self._rows
        if self._costs is None or limits.rate is None:
            return count if waiting or tokens[-1] >= MIN_TOKENS * len(texts) else 0
        rows = len(texts) * (waiting + np.arange(count + 1))
        seconds = np.where(rows > 0, self._costs(rows, max(map(len, texts))), 0.0)
        return int(np.argmax(tokens - limits.rate * seconds))

    def _compute(self, asked: list[_Asked], limits: Limits) -> None:
        """Run the planned rows, and take in what the model says after them."""
        computed = len(self._drafts[0].chances)
        can_grow = self._runner.adapter.can_grow
        if computed and not can_grow:
            self._forget()
        began = time.perf_counter()
        self._steps = [grow(draft.ids, draft.parents, computed if can_grow else 0) for draft in self._drafts]
        logits = self._runner.run(self._steps, self._cached).logits
        synchronize(logits.device)
        rows, length = logits.shape[0] * logits.shape[1], max(self._cached.lengths)
        if self._costs:
            self._costs.follow(rows, length, time.perf_counter() - began)
        logits = logits[:, computed - len(self._drafts[0].ids) :, : self._vocabulary]
        draws = draws_at(limits.draws, [draft.depths[computed:] for draft in self._drafts], logits.shape[-1])
        tokens, probabilities = likeliest(logits, self._temperature, TOP_K, draws)
        for draft, *said in zip(self._drafts, tokens, probabilities, strict=True):
            draft.take(said[0], said[1], self._sharpness)
        if asked:
            self._show(asked, logits, tokens[..., 0], computed)

    def _show(self, asked: list[_Asked], logits: torch.Tensor, best: np.ndarray, computed: int) -> None:
        """Show the model's own sources what it says after their guesses, as if it wrote the likeliest tokens.

        best: [batch, T], those tokens.
        """
        steps, rows, paths, emitted = [], [], [], []
        for one in asked:
            first = one.row.row if isinstance(one.row, Guess) else one.row
            if first < 0:  # a text of the batch did not get its row
                return
            kept = [node for node, guess in enumerate(one.nodes) if guess.row >= 0]
            step = lay_out(one.text[-1], one.tree.part(np.array(kept, np.int64)))
            steps.append(step)
            rows.append([first - computed, *(one.nodes[node].row - computed for node in kept)])
        most = max(map(len, rows))
        shown = torch.stack(
            [said[[*places, *[places[0]] * (most - len(places))]] for said, places in zip(logits, rows, strict=True)]
        )
        for step, places, said in zip(steps, rows, best.tolist(), strict=True):
            said = [said[place] for place in places]
            children, path = step.children(), [0]
            while (row := children.get((path[-1], said[path[-1]]))) is not None:
                path.append(row)
            paths.append(path)
            emitted.append([said[row] for row in path])
        self._inner.observe(Outcome([one.text for one in asked], steps, shown, paths, emitted))
