"""What streamers can record of a call of generate(): what it writes, and each of its steps."""

import time
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
from transformers.generation import BaseStreamer

from lookahead.stats import STAGES, Stats
from lookahead.step import Step
from ngram_pool import GuessTree

MAX_ROWS = 100_000  # of a whole record; later steps keep only their accepted rows


class RecordingStreamer(BaseStreamer):
    """A streamer that also gets the steps of a call."""

    records_steps = True
    """A call passes its steps to a streamer that has this attribute."""
    streamer: BaseStreamer | None = None
    """Another streamer, which gets the same tokens, or None."""

    def begin(self, names: list[str], stats: Stats) -> None:
        """Called if lookahead decodes the call. names: to count accepted guesses under. stats: of the call."""
        raise NotImplementedError

    def record(self, length: int, step: Step, tree: GuessTree, path: list[int], emitted: list[int]) -> None:
        """Called after a step. length: positions committed before it. tree: its guesses. path, emitted: of
        `Outcome`."""
        raise NotImplementedError


@dataclass(frozen=True)
class RecordedStep:
    """One step of one sequence. Row 0 is the root, then come the guesses and the rows of the window, as in `Step`."""

    length: int
    """Positions that were committed before the step."""
    ids: np.ndarray
    """Int64 [T], the token of each row."""
    parents: np.ndarray
    """Int64 [T], the row that each row continues; -1 for the root."""
    probabilities: np.ndarray
    """Float64 [guesses], the estimated probability that the guess is accepted."""
    sources: np.ndarray
    """Int64 [guesses], the index in `Recorder.names` of the source that each guess counts for."""
    path: list[int]
    """The accepted rows, beginning with the root's 0."""
    emitted: list[int]
    """The tokens that the step wrote, one for each accepted row."""
    seconds: np.ndarray
    """Float64 [5], wall-clock time by stage, as in `stats.STAGES`."""
    verified: int
    """Guesses that the step verified. If it is more than those above, only the accepted rows were kept."""
    window: int
    """Tokens of the Jacobi window that the step computed."""


class Recorder(RecordingStreamer):
    """A streamer that keeps the tokens of one sequence, and also its steps, which the decoding loop passes to it.

    ``model.generate(**inputs, streamer=Recorder())`` writes the same text as without it. Memory is bounded: beyond
    MAX_ROWS rows, steps keep only their accepted rows.
    """

    def __init__(self, streamer: BaseStreamer | None = None):
        self.streamer = streamer
        self.prompt: list[int] = []
        """The prompt's tokens."""
        self.tokens: list[int] = []
        """The tokens written. The first comes from the prefill."""
        self.times: list[float] = []
        """For each token, the seconds from the end of generate()'s own preparation until it was written."""
        self.steps: list[RecordedStep] = []
        self.names: list[str] = []
        """Names under which accepted guesses are counted."""
        self.stats: Stats | None = None
        """Of the call; None until lookahead decodes it."""
        self._began: float | None = None
        self._rows = 0
        self._seconds: Counter = Counter()  # of all steps until now, by stage

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt, int64 [1, n], then the tokens. Raises ValueError for a prompt of several sequences."""
        if self._began is None:
            if value.ndim == 2 and len(value) != 1:
                raise ValueError(
                    f"one sequence can be recorded, not a batch of {len(value)}: give one prompt, and leave "
                    "num_return_sequences at 1"
                )
            self.prompt = value.flatten().tolist()
            self._began = time.perf_counter()
        else:
            self.tokens += value.flatten().tolist()
            self.times.append(time.perf_counter() - self._began)
        if self.streamer is not None:
            self.streamer.put(value)

    def end(self) -> None:
        if self.streamer is not None:
            self.streamer.end()

    def begin(self, names: list[str], stats: Stats) -> None:
        self.names, self.stats = names, stats

    def record(self, length: int, step: Step, tree: GuessTree, path: list[int], emitted: list[int]) -> None:
        ids, parents = step.ids, step.parents
        probabilities, sources = tree.probabilities.copy(), tree.sources.copy()  # they may be views of larger arrays
        self._rows += len(step)
        kept = path
        if self._rows > MAX_ROWS:
            guesses = np.array(path[1:], np.int64) - 1
            ids, parents = ids[path], np.arange(-1, len(path) - 1)
            probabilities, sources, kept = probabilities[guesses], sources[guesses], list(range(len(path)))
        so_far = self.stats.seconds.copy() if self.stats else Counter()
        seconds = np.array([so_far[stage] - self._seconds[stage] for stage in STAGES])
        self._seconds = so_far
        window = len(step) - 1 - step.guesses
        self.steps.append(
            RecordedStep(
                length, ids, parents, probabilities, sources, list(kept), list(emitted), seconds, step.guesses, window
            )
        )
