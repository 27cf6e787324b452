"""The sources of guesses of a call. If there are several, `together` merges their trees."""

from collections.abc import Container, Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from lookahead.guessing.budget import Budget, Trials
from lookahead.guessing.jacobi import Windows, WindowSource
from lookahead.guessing.pool import PoolAlone, PoolSource
from lookahead.guessing.source import Batch, Guesser, GuessSource, Needs, is_ours
from lookahead.models.cache import AnyCache
from lookahead.stats import Stats
from ngram_pool import Origin

if TYPE_CHECKING:
    from lookahead.guessing.merging import Experience
    from lookahead.guessing.together import Together


def trials_of(source: GuessSource) -> Trials | None:
    """Return the trials that decide whether a source is asked; None for one that is free."""
    return None if source.is_free else Trials(1, first=1)


class Ledger:
    """The claims and gains of the sources of guesses, over all calls."""

    def __init__(self, sources: Sequence[GuessSource]):
        self.names = [origin.name.lower() for origin in Origin]
        """Names to count accepted guesses under, by number in `GuessTree.sources`: the origins of evidence in a pool,
        then the sources of guesses by class; a second source of a class has a 2 appended."""
        self.trials: list[Trials | None] = []
        """For each source, whether asking it pays."""
        for source in sources:
            self.enter(source, trials_of(source))

    def enter(self, source: GuessSource, trials: Trials | None) -> None:
        """Add a source. trials: from `trials_of`."""
        name = type(source).__name__
        same = sum(known.split()[0] == name for known in self.names)
        self.names.append(f"{name} {same + 1}" if same else name)
        self.trials.append(trials)

    @cached_property
    def experience(self) -> "Experience":
        """How often guesses were accepted, by the sources' claims."""
        from lookahead.guessing.merging import Experience  # a single source does not need it

        return Experience()

    def is_asked(self, number: int) -> bool:
        trials = self.trials[number]
        return trials is None or trials.level > 0

    def resting(self, steps: int) -> set[int]:
        """Return the numbers of the sources that will not be asked within this many steps."""
        return {i for i, trials in enumerate(self.trials) if trials is not None and trials.rests(steps)}


def needs_of(sources: Sequence[GuessSource]) -> Needs:
    """Return the needs of all these sources together."""
    layers = {layer for source in sources for layer in source.needs.hidden_states}
    return Needs(
        max((source.needs.prompt_logits for source in sources), default=0),
        tuple(sorted(layers)),
        max((source.needs.top_k for source in sources), default=0),
    )


class Combined:
    """The guessers of one call, one for each source that takes part in it. They guess `together`."""

    def __init__(
        self,
        sources: Sequence[GuessSource],
        ledger: Ledger,
        budget: Budget,
        stats: Stats,
        resting: Container[int] = (),
    ):
        """budget: the number of guesses of a step. If it depends on costs, a source is asked only while it pays.

        stats: counts what each source does. resting: numbers of sources that take no part in this call.
        """
        self._sources = sources
        self._parts = [i for i in range(len(sources)) if i not in resting]
        self.needs = needs_of([sources[i] for i in self._parts])
        proposers = [sources[i] for i in self._parts if not isinstance(sources[i], WindowSource)]
        self.stands_alone = len(proposers) == 1 and proposers[0].is_calibrated
        """Whether there is a single source, whose probabilities are used unchanged."""
        self.pool_alone: PoolAlone | None = None
        """The fast path if only a pool guesses: while no window is open, it stands for `together`."""
        self.windows: Windows | None = None
        """The Jacobi windows of the call, if there are any."""
        self._guessers: dict[int, Guesser] = {}  # of this call, by the number of their source
        self._ledger = ledger
        self._budget = budget
        self._names = ledger.names[len(Origin) :]
        self._stats = [stats.source(name) for name in self._names[: len(sources)]]

    def start(self, batch: Batch) -> None:
        self._vocabulary = batch.vocabulary
        for i in self._parts:
            source = self._sources[i]
            if is_ours(source):
                guesser = source.start(batch)
            else:
                from lookahead.guessing import users_guesser  # calls without a user's source do not need it

                guesser = users_guesser.start(source, batch, self._names[i])
            self._guessers[i] = guesser
            if isinstance(guesser, Windows):
                self.windows = guesser
        others = [i for i, source in enumerate(self._sources) if not isinstance(source, WindowSource)]
        if len(others) == 1 and type(self._sources[others[0]]) is PoolSource:
            self.pool_alone = PoolAlone(self._guessers[others[0]], self._stats[others[0]])

    def observe_prompt(self, text: list[int], logits: torch.Tensor, hidden_states: dict[int, torch.Tensor]) -> None:
        for guesser in self._guessers.values():
            guesser.observe_prompt(text, logits, hidden_states)

    def attach(self, model: PreTrainedModel, cache: AnyCache) -> None:
        for guesser in self._guessers.values():
            guesser.attach(model, cache)

    @cached_property
    def together(self) -> "Together":
        """The guessers, step by step."""
        from lookahead.guessing.together import Together  # a single pool does not need it

        return Together(self._sources, self._guessers, self._ledger, self._budget, self._stats, self._vocabulary)

    def select(self, sequences: list[int]) -> None:
        for guesser in self._guessers.values():
            guesser.select(sequences)

    def end(self) -> None:
        with ExitStack() as ending:  # ends all, even if one raises
            for guesser in self._guessers.values():
                ending.callback(guesser.end)
