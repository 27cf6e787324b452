"""A guesser of a user's source: whatever it writes to, the text stays what the model would have written."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
from transformers import PreTrainedModel

from lookahead.guessing.source import Batch, Guesser, GuessSource, Limits, Outcome, is_ours
from lookahead.models.cache import AnyCache
from ngram_pool import GuessTree

NUMBERS = "tokens", "parents", "depths", "sources"  # arrays of whole numbers in a GuessTree


class UsersGuesser(Guesser):
    """Lends copies to a user's guesser of everything that decides the text, and checks what it returns."""

    def __init__(self, guesser: Guesser, name: str, vocabulary: int):
        """name: of its source, for errors. vocabulary: number of tokens that the model knows."""
        self._guesser, self._name, self._vocabulary = guesser, name, vocabulary

    @property
    def passes(self) -> int:  # type: ignore[override]  # the guesser counts them
        return self._guesser.passes

    def observe_prompt(self, text: list[int], logits: torch.Tensor, hidden_states: dict[int, torch.Tensor]) -> None:
        self._guesser.observe_prompt(text.copy(), logits, hidden_states)

    def attach(self, model: PreTrainedModel, cache: AnyCache) -> None:
        self._guesser.attach(model, cache)

    def propose(self, texts: list[list[int]], limits: Limits) -> list[GuessTree]:
        proposed = self._guesser.propose(_copies_of(texts), _lent(limits))
        if proposed is None:
            return []
        if isinstance(proposed, GuessTree | np.ndarray) or not isinstance(proposed, Iterable):
            raise TypeError(f"{self._name} proposes {proposed!r:.60}: propose a list, of a GuessTree for each sequence")
        trees = list(proposed)
        for tree in trees:
            if not isinstance(tree, GuessTree):
                raise TypeError(
                    f"{self._name} proposes {tree!r:.60} in place of a GuessTree: propose GuessTree.empty() where "
                    "there is nothing to guess"
                )
            for name in NUMBERS:
                if (dtype := getattr(tree, name).dtype).kind not in "iu":
                    raise TypeError(f"{self._name} proposes {name} of {dtype}: make trees by GuessTree.of or .chain")
        return list(map(_of_usual_numbers, trees))

    def look_ahead(self, limits: Limits) -> list[list[np.ndarray]]:
        found, sequences = self._guesser.look_ahead(_lent(limits)), len(limits.depths)
        try:
            windows = [[np.asarray(row) for row in rows] for rows in found]
        except (TypeError, ValueError):
            windows = []
        every = [row for rows in windows for row in rows]
        if (
            len(windows) != sequences
            or not all(row.ndim == 1 and row.size and row.dtype.kind in "iu" for row in every)
            or any(len({len(row) for row in rows}) > 1 for rows in windows)
            or not all(row.min() >= 0 and row.max() < self._vocabulary for row in every)
        ):
            raise ValueError(
                f"{self._name}.look_ahead returns {found!r:.80} for {sequences} sequences: return a list for each, "
                f"of rows of one length, int64, with tokens in 0..{self._vocabulary - 1}; [] for no window"
            )
        return [[row.astype(np.int64) for row in rows] for rows in windows]

    def observe(self, outcome: Outcome) -> None:
        texts, paths, emitted = map(_copies_of, (outcome.texts, outcome.paths, outcome.emitted))
        hidden, steps, first = dict(outcome.hidden_states), list(outcome.steps), list(outcome.first)
        lent = replace(
            outcome, texts=texts, steps=steps, paths=paths, emitted=emitted, hidden_states=hidden, first=first
        )
        self._guesser.observe(lent)

    def select(self, sequences: list[int]) -> None:
        self._guesser.select(sequences.copy())

    def end(self) -> None:
        self._guesser.end()


def start(source: GuessSource, batch: Batch, name: str) -> Guesser:
    """Begin a call of a user's source of this name: return its guesser."""
    guesser = source.start(replace(batch, texts=_copies_of(batch.texts)))
    if not isinstance(guesser, Guesser):
        raise TypeError(
            f"start of {name} returns {guesser!r:.60} in place of a Guesser: return what guesses in this call, such as "
            "self"
        )
    return guesser if is_ours(guesser) else UsersGuesser(guesser, name, batch.vocabulary)


def _of_usual_numbers(tree: GuessTree) -> GuessTree:
    """The same tree in the dtypes that a `GuessTree` has: C++ reads its numbers as these."""
    numbers = {name: getattr(tree, name) for name in NUMBERS}
    if tree.probabilities.dtype == np.float64 and all(one.dtype == np.int64 for one in numbers.values()):
        return tree
    whole = {name: one.astype(np.int64) for name, one in numbers.items()}
    return replace(tree, probabilities=tree.probabilities.astype(np.float64), **whole)


def _lent(limits: Limits) -> Limits:
    return replace(limits, depths=list(limits.depths), draws=list(map(_read_only, limits.draws)))


def _copies_of(lists: Sequence[list[int]]) -> list[list[int]]:
    return [one.copy() for one in lists]


def _read_only(draws: np.ndarray | None) -> np.ndarray | None:
    if draws is not None:
        draws = draws.view()
        draws.flags.writeable = False
    return draws
