"""Guesses from a draft model: a tree of likely tokens, which its passes grow best-first.

A pass computes the most likely guesses; the model's predictions after them are more guesses. Another pass follows if
the tokens that it should add are worth its time (draft models: Leviathan et al. 2023, arXiv 2211.17192; trees that
grow by probability: Li et al. 2024, arXiv 2406.16858, section 4.1).

A draft model uses lookahead, too: its own sources guess its tokens, so one of its passes can go several tokens deep.
These sources are an n-gram pool, or those that the draft model was wrapped with. So models can form a cascade.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate, takewhile
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from lookahead.extending import (
    AnyCache,
    Batch,
    Budget,
    Combined,
    EagerRunner,
    Guesser,
    GuessSource,
    Ledger,
    Limits,
    LookaheadConfig,
    OfModels,
    Outcome,
    Pace,
    PoolSource,
    Stats,
    Step,
    average_length,
    can_batch,
    can_rewind,
    choose_runner,
    context_length,
    device_of,
    draws_at,
    grow,
    lay_out,
    rewind,
    settle,
    state_of,
    step_costs,
    synchronize,
    top_k,
    vocabulary_of,
)
from ngram_pool import GuessTree, NgramPool

TOP_K = 8  # guesses after each row
MAX_ROWS = 16  # guesses of one text that a pass computes
MAX_LACKING = 32  # missing tokens that a step's first pass computes together with guesses; more are prefilled first
ROOM = 1024  # positions beyond the text that a cache allocates at once
MIN_TOKENS = 0.2  # expected tokens that justify another pass if no rate of decoding is known
SHARPENING, MAX_SHARPNESS = 0.02, 8.0  # step size and bound of the exponent of a draft's probabilities
MIN_REST = 1e-6  # least probability of all tokens beyond the top k together
# Initial counts: accepted rows whose guesses contained the next token, and all accepted rows.
PRIOR_HITS, PRIOR_ROWS = 6.0, 8.0


class Sharpness:
    """The exponent that calibrates a draft's probabilities to the share of accepted guesses.

    With known draws (`Limits.draws`), probabilities are shares of p / e. A draft whose p are the model's own knows the
    next token for certain, but its shares do not show it. A draft with very different p is less sure than its shares
    say. The exponent is fitted to the emitted tokens by gradient descent on the log loss.
    """

    def __init__(self) -> None:
        self._exponent = 1.0

    def __call__(self, probabilities: np.ndarray) -> np.ndarray:
        """Return sharpened probabilities of the top tokens, [..., k]. All other tokens count as a single one."""
        rest = np.maximum(1 - probabilities.sum(-1, keepdims=True), MIN_REST)
        powers = np.concatenate([probabilities, rest], -1) ** self._exponent
        return (powers / powers.sum(-1, keepdims=True))[..., :-1]

    def count(self, probabilities: np.ndarray, index: int | None) -> None:
        """Learn from an emitted token. probabilities: float64 [k], before sharpening. index: the token's among the k;
        None: it is not one of them."""
        with_rest = np.append(probabilities, max(1 - probabilities.sum(), MIN_REST))
        logs = np.log(np.maximum(with_rest, MIN_REST))
        shares = np.exp(self._exponent * logs)
        slope = self._exponent * (logs[-1 if index is None else index] - (shares * logs).sum() / shares.sum())
        self._exponent *= float(np.exp(SHARPENING * np.clip(slope, -5, 5)))
        self._exponent = min(max(self._exponent, 1 / MAX_SHARPNESS), MAX_SHARPNESS)


_sharpness = OfModels[dict[bool, Sharpness]]()


def sharpness_of(model: PreTrainedModel, has_draws: bool) -> Sharpness:
    """The `Sharpness` of a draft model, which outlives calls. There is one for known draws and one for unknown."""
    return _sharpness.setdefault(model, {}).setdefault(has_draws, Sharpness())


@dataclass(eq=False)
class Node:
    """A token of the text, or a guess. Passes have computed it, or may."""

    token: int
    parent: "Node | None" = None
    chance: float = 1.0
    """The probability that the text reaches it."""
    depth: int = 0
    """Distance from the text's last token, the root; 0 in the text itself."""
    row: int = -1
    """Its row in the passes, once it has one."""
    following: dict[int, float] = field(default_factory=dict)
    """The most likely next tokens and their probabilities, once it is computed."""
    said: np.ndarray | None = None
    """The same probabilities before they were sharpened."""

    def path(self) -> list[int]:
        """The tokens after the root, up to this one."""
        tokens, node = [], self
        while node.parent and node.depth:
            tokens.append(node.token)
            node = node.parent
        return tokens[::-1]


class Draft:
    """The tree of a draft model after one text."""

    def __init__(self, lacking: list[int], sharpness: Sharpness):
        """lacking: the tokens of the text that the cache lacks; at least its last."""
        self._sharpness = sharpness
        self.rows: list[Node] = []
        """Nodes in the order in which passes compute them: the tokens that the cache lacks, the root last; then
        guesses, each after its parent."""
        self.computed = 0
        """How many of them have been computed."""
        self._below: dict[tuple[Node | None, int], Node] = {}  # {(row, next token): row of that token}
        for token in lacking:
            self.add(Node(token, self.rows[-1] if self.rows else None))
        self.root = self.rows[-1]

    def add(self, node: Node) -> None:
        """Plan a row for a node."""
        node.row = len(self.rows)
        self.rows.append(node)
        self._below[node.parent, node.token] = node

    def fill_up(self, count: int) -> None:
        """Pad to ``count`` rows with copies of the root that no other row sees."""
        self.rows += [Node(self.root.token, chance=0.0, row=row) for row in range(len(self.rows), count)]

    def step(self, computed: int) -> Step:
        """The rows as a step. The first ``computed`` rows are not computed again."""
        parents = [-1 if node.parent is None else node.parent.row for node in self.rows]
        return grow([node.token for node in self.rows], parents, computed)

    def expand(self, tokens: np.ndarray, probabilities: np.ndarray) -> None:
        """Store the predictions of a pass after its rows, [T, k] each."""
        probabilities = probabilities.astype(float)
        chances, new = self._sharpness(probabilities).tolist(), self.rows[self.computed :]
        for node, next_tokens, shares, said in zip(new, tokens.tolist(), chances, probabilities, strict=True):
            node.following, node.said = dict(zip(next_tokens, shares, strict=True)), said
            if node.parent and node.depth:
                node.chance = node.parent.chance * node.parent.following.get(node.token, 0.0)
        self.computed = len(self.rows)

    def candidates(self, depth: int) -> list[Node]:
        """Return the children of computed rows that have no row yet, down to this depth, most likely first."""
        found = [
            Node(token, node, node.chance * probability, node.depth + 1)
            for node in self.rows[self.root.row : self.computed]
            if node.chance > 0 and node.depth < depth
            for token, probability in node.following.items()
            if (node, token) not in self._below
        ]
        return sorted(found, key=lambda node: -node.chance)

    def worth_a_row(self, guesses: list[Node], limits: Limits, can_branch: bool = True) -> list[Node]:
        """Return the guesses that are worth computing, because their children may be among the most likely guesses.

        guesses: most likely first. can_branch: whether a pass can compute more than a single branch.
        """
        computed = self.rows[self.root.row + 1 : self.computed]
        chances = sorted((node.chance for node in (*computed, *guesses)), reverse=True)
        least = chances[limits.guesses - 1] if 0 < limits.guesses <= len(chances) else 0.0
        kept = [guess for guess in guesses if guess.chance > max(least, limits.min_probability)]
        if can_branch and not limits.is_chain:
            return kept
        chain = [self.rows[-1]]
        for guess in kept:
            if guess.parent is chain[-1]:
                chain.append(guess)
        return chain[1:]

    def tree(self, depth: int, min_probability: float) -> GuessTree:
        """Return all guesses that are likely enough, down to this depth."""
        numbers: dict[Node | None, int] = {self.root: -1}
        found: list[tuple[int, int, int, float]] = []  # token, parent, source, chance
        for node in (*self.rows[self.root.row + 1 : self.computed], *self.candidates(depth)):
            if node.chance >= min_probability and node.depth <= depth and node.parent in numbers:
                numbers[node] = len(found)
                found.append((node.token, numbers[node.parent], -1, node.chance))
        return GuessTree.of(*zip(*found, strict=True)) if found else GuessTree.empty()

    def accepted(self, emitted: list[int]) -> list[Node]:
        """Return the computed rows of the text, then those of the emitted tokens without the last, the next root."""
        path = self.rows[: self.root.row + 1]
        for token in emitted[:-1]:
            if (path[-1], token) not in self._below:
                break
            path.append(self._below[path[-1], token])
        return path

    def teach(self, path: list[Node], emitted: list[int]) -> int:
        """Learn from the emitted tokens, and return how many of them were guessed.

        path: their rows, as `accepted` returns them.
        """
        hits = 0
        for node, token in zip(path[self.root.row :], emitted, strict=False):
            assert node.said is not None
            hits += token in node.following
            self._sharpness.count(node.said, list(node.following).index(token) if token in node.following else None)
        return hits


class _Asked(NamedTuple):
    """The guesses of the draft model's own sources after one node."""

    text: list[int]
    """The text up to the node's token."""
    node: Node
    tree: GuessTree
    nodes: list[Node]
    """Those of the tree."""


class _Inner:
    """The sources that guess for a draft model which is not wrapped. The names are those of an engine."""

    def __init__(self, memory_mb: float):
        self.sources: list[GuessSource] = [PoolSource()]
        self.ledger, self.pool = Ledger(self.sources), NgramPool(memory_mb)


_inner = OfModels[_Inner]()


@contextmanager
def _draws_undone(model: PreTrainedModel) -> Iterator[None]:
    """Leave torch's generators as they were: dropout of a draft model in training mode draws from them."""
    device = device_of(model)
    with ExitStack() as stack:
        if state_of(model).in_training:
            of_device = [] if device.type == "cpu" else [device]
            stack.enter_context(torch.random.fork_rng(of_device, device_type=device.type))
        yield


class DraftModelSource(GuessSource):
    """Proposes the likely tokens of a draft model with the same vocabulary.

    A wrapped draft model uses its own settings, sources and pool. A draft model without a wrap gets a pool for all
    calls.
    """

    def __init__(self, model: PreTrainedModel, config: LookaheadConfig | None = None):
        """config: for a draft model that is not wrapped: how to run its passes (`cpu_kernels`, `pack_weights`), and the
        memory of its pool. Raises TypeError if ``model`` is no model."""
        if not isinstance(model, nn.Module):
            raise TypeError(f"DraftModelSource takes a model, not {model!r:.80}: load it, as by from_pretrained")
        self._given = model
        self._config = config or LookaheadConfig()

    @property
    def model(self) -> PreTrainedModel:
        """The model that drafts."""
        return self._given

    @property
    def engine(self) -> Any:
        """The `Lookahead` of a wrapped draft model, or None."""
        return vars(self.model).get("lookahead")

    @contextmanager
    def running(self) -> Iterator[EagerRunner]:
        """In this block, the draft model's passes can run."""
        engine, config = self.engine, self._config
        with ExitStack() as stack:
            if engine is not None:
                config = engine.config
                stack.enter_context(engine.call())
            runner = choose_runner(self.model, config)[0]
            stack.callback(runner.end)
            yield runner

    def check(self) -> None:
        """Raise UnsupportedModelError if lookahead cannot run the draft model."""
        with self.running():
            return

    def own_sources(self) -> Any:
        """The `Lookahead` of a wrapped draft model, or else an `_Inner`."""
        if (engine := self.engine) is None:
            return _inner.get(self.model) or _inner.setdefault(self.model, _Inner(self._config.pool_memory_mb))
        if engine.needs.hidden_states:
            raise ValueError("a draft model's own sources cannot use hidden states: wrap the draft model without heads")
        self._check_path([])
        return engine

    def _check_path(self, users: list[PreTrainedModel]) -> None:
        """Raise ValueError if the draft model needs itself to draft. users: the models that need it."""
        if any(self.model is user for user in users):
            raise ValueError(
                f"{type(self.model).__name__} drafts for itself, because its own sources lead to it: wrap it with "
                "other sources, or draft with another model"
            )
        for source in getattr(self.engine, "sources", ()):
            if isinstance(source, DraftModelSource):
                source._check_path([*users, self.model])

    def check_model(self, model: PreTrainedModel) -> None:
        self._check_path([model])

    def start(self, batch: Batch) -> "DraftGuesser":
        with _draws_undone(self.model):
            return DraftGuesser(self, batch)


class DraftGuesser(Guesser):
    """A draft model in one call."""

    def __init__(self, source: DraftModelSource, batch: Batch):
        self.model, self._temperature = source.model, batch.temperature
        self._vocabulary = min(batch.vocabulary, vocabulary_of(self.model))
        own, stats = source.own_sources(), Stats()
        with ExitStack() as opening:
            self._runner = opening.enter_context(source.running())
            self._costs = step_costs(self._runner) if batch.has_rate else None
            if (engine := source.engine) is not None:
                opening.callback(engine.add, stats)
            budget = Budget(None, Pace(self._costs)) if self._costs else Budget(MAX_ROWS, None)
            self._inner, self._inner_pace = Combined(own.sources, own.ledger, budget, stats), budget.pace
            opening.callback(self._inner.end)
            self._inner.start(replace(batch, vocabulary=vocabulary_of(self.model), pool=own.pool))
            self._open = opening.pop_all()
        self._cache: AnyCache | None = None
        self._held: list[list[int]] = [[] for _ in batch.texts]  # tokens in the cache
        self._drafts: list[Draft] = []
        self._steps: list[Step] = []  # computed, but not committed yet
        self._serves = len(batch.texts) == 1 or can_batch(self.model, self._runner.adapter)
        self._hits, self._rows = PRIOR_HITS, PRIOR_ROWS

    def end(self) -> None:
        if self._costs:
            self._costs.save()
        self._open.close()

    def select(self, sequences: list[int]) -> None:
        self._forget()
        if self._cache is not None:
            self._cache.select(sequences)
        self._held = [self._held[b] for b in sequences]
        self._inner.select(sequences)

    def propose(self, texts: list[list[int]], limits: Limits) -> list[GuessTree]:
        with _draws_undone(self.model):
            return self._propose(texts, limits)

    def _propose(self, texts: list[list[int]], limits: Limits) -> list[GuessTree]:
        self._forget()
        if not (self._serves and max(limits.depths) > 0 and self._catch_up(texts)):
            self._drafts = []
            return [GuessTree.empty() for _ in texts]
        sharpness = sharpness_of(self.model, any(known is not None for known in limits.draws))
        self._drafts = [Draft(text[len(held) :], sharpness) for text, held in zip(texts, self._held, strict=True)]
        while (asked := self._plan(texts, limits)) is not None:
            self._compute(asked, limits)
        return [
            draft.tree(depth, limits.min_probability) for draft, depth in zip(self._drafts, limits.depths, strict=True)
        ]

    def observe(self, outcome: Outcome) -> None:
        if not self._drafts:
            return
        paths = self._settle(outcome)
        for path, held in zip(paths, self._held, strict=True):
            held += [node.token for node in path]
        self._cached.commit(self._steps, [[node.row for node in path] for path in paths])
        self._steps = []

    def _settle(self, outcome: Outcome) -> list[list[Node]]:
        """Return the accepted rows of each draft, and count how many of their guesses contained the next token."""
        paths = [draft.accepted(emitted) for draft, emitted in zip(self._drafts, outcome.emitted, strict=True)]
        for draft, path, emitted in zip(self._drafts, paths, outcome.emitted, strict=True):
            self._hits += draft.teach(path, emitted)
            self._rows += len(path) - draft.root.row
        return paths

    @property
    def _cached(self) -> AnyCache:
        assert self._cache is not None
        return self._cache

    def _forget(self) -> None:
        """Drop the rows of a step that was not verified."""
        if self._steps:
            self._cached.commit(self._steps, [[] for _ in self._steps])
            self._steps = []

    # The cache

    def _catch_up(self, texts: list[list[int]]) -> bool:
        """Bring the cache close to the end of each text. Returns False if the draft model cannot continue the texts."""
        context = context_length(self.model)
        lacking = [text[len(held) :] for text, held in zip(texts, self._held, strict=True)]
        if any(len(text) < 2 or len(text) + 2 * MAX_ROWS > context for text in texts):
            return False
        is_close = all(
            len(new) in range(1, MAX_LACKING + 1) and text[: len(held)] == held
            for text, held, new in zip(texts, self._held, lacking, strict=True)
        )
        # Another text than before, as that of a draft model's own draft model, may have other tokens anywhere.
        if any(token >= self._vocabulary for new in (lacking if is_close else texts) for token in new):
            return False
        if self._cache is None or not is_close:
            self._read(texts)
        return True

    def _read(self, texts: list[list[int]]) -> None:
        """Compute the tokens that the cache lacks, except the last of each text, sequence by sequence."""
        caches = []
        for b, text in enumerate(texts):
            one, held = self._cache.sequence(b) if self._cache else None, self._held[b]
            shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(held, text[:-1], strict=False)))
            if one is None or (shared < len(held) and not can_rewind(one)):
                one, shared = self._runner.adapter.make_cache(len(text) + ROOM), 0
            elif shared < len(held):
                rewind(one, shared)
                one.lengths = [shared]
            settle(self._runner, one)
            if new := text[shared:-1]:
                count = max(self._inner.needs.prompt_logits, 1)
                output = self._runner.prefill(torch.tensor([new], device="cpu"), one, logits_to_keep=count)
                if not shared:
                    self._inner.observe_prompt(text[:-1], output.logits, output.hidden_states)
            caches.append(one)
            self._held[b] = text[:-1]
        self._cache = self._runner.join(caches, max(map(len, texts)) + ROOM)

    # A pass

    def _plan(self, texts: list[list[int]], limits: Limits) -> list[_Asked] | None:
        """Add the rows of the next pass to the drafts, and return the guesses of the draft model's own sources.

        Returns None if no pass is worth its time.
        """
        likeliest_first = [
            draft.candidates(depth)[:MAX_ROWS] for draft, depth in zip(self._drafts, limits.depths, strict=True)
        ]
        waiting = max(len(draft.rows) - draft.computed for draft in self._drafts)  # rows of the text itself
        asked: list[_Asked] = []
        if waiting or all(likeliest_first):
            asked = self._ask(texts, limits, likeliest_first)
            for guesses, one in zip(likeliest_first, asked, strict=True):
                guesses += one.nodes
                guesses.sort(key=lambda guess: -guess.chance)  # stable, so parents stay before children
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
        most = max(len(draft.rows) for draft in self._drafts)
        for draft in self._drafts:
            draft.fill_up(most)
        return asked

    def _ask(self, texts: list[list[int]], limits: Limits, candidates: list[list[Node]]) -> list[_Asked]:
        """Guesses of the draft model's own sources after the most likely guess of each draft, or after the text."""
        after = [guesses[0] if guesses else draft.root for draft, guesses in zip(self._drafts, candidates, strict=True)]
        texts = [text + node.path() for text, node in zip(texts, after, strict=True)]
        depths = [max(depth - node.depth, 0) for depth, node in zip(limits.depths, after, strict=True)]
        known = limits.draws or [None] * len(texts)
        draws = [None if drawn is None else drawn[node.depth :] for drawn, node in zip(known, after, strict=True)]
        is_chain = not self._runner.adapter.can_branch
        rate = self._inner_pace.rate() if self._inner_pace else None
        own = Limits(depths, MAX_ROWS, limits.min_probability, is_chain, rate, draws)
        asked: list[_Asked] = []
        for text, node, tree in zip(texts, after, self._inner.together.propose(texts, own), strict=True):
            nodes: list[Node] = []
            guesses = zip(tree.tokens.tolist(), tree.parents.tolist(), tree.probabilities.tolist(), strict=True)
            for token, parent, share in guesses:
                above = nodes[parent] if parent >= 0 else node
                nodes.append(Node(token, above, node.chance * share, above.depth + 1))
            asked.append(_Asked(text, node, tree, nodes))
        return asked

    def _choose(self, wanted: list[list[Node]], waiting: int, texts: list[list[int]], limits: Limits) -> int:
        """How many guesses of each draft the next pass computes, in addition to waiting rows."""
        count = max(map(len, wanted))
        gains = np.zeros(count + 1)
        for guesses in wanted:
            gains[1 : len(guesses) + 1] += [guess.chance for guess in guesses]
        tokens = np.cumsum(gains) * self._hits / self._rows
        if self._costs is None or limits.rate is None:
            return count if waiting or tokens[-1] >= MIN_TOKENS * len(texts) else 0
        rows = len(texts) * (waiting + np.arange(count + 1))
        seconds = np.where(rows > 0, self._costs(rows, average_length(texts), len(texts)), 0.0)
        return int(np.argmax(tokens - limits.rate * seconds))

    def _compute(self, asked: list[_Asked], limits: Limits) -> None:
        """Run the planned rows, and store the model's predictions after them."""
        computed = self._drafts[0].computed
        can_grow = self._runner.adapter.can_grow
        if computed and not can_grow:
            self._forget()
        began = time.perf_counter()
        self._steps = [draft.step(computed if can_grow else 0) for draft in self._drafts]
        logits = self._runner.run(self._steps, self._cached).logits
        self.passes += 1
        synchronize(logits.device)
        lengths = self._cached.lengths
        if self._costs:
            took, length = time.perf_counter() - began, sum(lengths) // len(lengths)
            self._costs.follow(len(logits), length, took, sequences=len(lengths))
        depths = [[node.depth for node in draft.rows[computed:]] for draft in self._drafts]
        logits = logits.unflatten(0, (len(depths), -1))[:, -len(depths[0]) :, : self._vocabulary]
        draws = draws_at(limits.draws, depths, logits.shape[-1])
        said = top_k(logits, self._temperature, TOP_K, draws)
        for draft, tokens, probabilities in zip(self._drafts, *said, strict=True):
            draft.expand(tokens, probabilities)
        if asked:
            self._show(asked, logits, said[0][..., 0], computed)

    def _show(self, asked: list[_Asked], logits: torch.Tensor, best: np.ndarray, computed: int) -> None:
        """Let the draft model's own sources observe the logits after their guesses, as if it emitted the top tokens.

        best: [batch, T], these tokens. computed: number of rows before those of the pass.
        """
        if any(one.node.row < 0 for one in asked):  # a text of the batch got no row
            return
        steps, shown, paths, emitted = [], [], [], []
        for one, row_logits, tokens in zip(asked, logits, best, strict=True):
            kept = [number for number, node in enumerate(one.nodes) if node.row >= 0]
            step = lay_out(one.text[-1], one.tree.part(kept))
            rows = [node.row - computed for node in (one.node, *(one.nodes[number] for number in kept))]
            said, children, path = tokens[rows].tolist(), step.children(), [0]
            while (row := children.get((path[-1], said[path[-1]]))) is not None:
                path.append(row)
            steps.append(step)
            shown.append(row_logits[rows])
            paths.append(path)
            emitted.append([said[row] for row in path])
        texts = [one.text for one in asked]
        first = [0, *accumulate(map(len, shown))][:-1]
        self._inner.together.observe(Outcome(texts, steps, torch.cat(shown), paths, emitted, first=first))
