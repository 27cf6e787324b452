"""What a source of guesses is. docs/sources.md shows how to write one."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from lookahead.step import Step
from ngram_pool import GuessTree, NgramPool


@dataclass(frozen=True)
class Needs:
    """What a source wants to see besides texts and the logits of steps."""

    prompt_logits: int = 0
    """How many of a prompt's last rows of logits."""
    hidden_states: tuple[int, ...] = ()
    """Layers whose output is wanted, of prompts and of steps: 0 is the embedding, 1 the first layer's. Passes are then
    neither compiled nor replayed."""


@dataclass(frozen=True)
class Batch:
    """What a call of generate() begins with."""

    texts: list[list[int]]
    """The prompts' tokens, as far as they are known."""
    temperature: float
    """Of the distribution that the next tokens are drawn from."""
    vocabulary: int
    """Tokens that the model knows."""
    pool: NgramPool
    """The wrap's."""


@dataclass(frozen=True)
class Limits:
    """How much is worth proposing in a step."""

    depths: Sequence[int]
    """For each sequence, how many tokens there is room for."""
    guesses: int
    """Of each sequence; more than that are not verified."""
    min_probability: float
    """A guess below it is not worth its row."""
    is_chain: bool
    """Only single branches can be verified."""
    rate: float | None = None
    """Tokens per second that decoding reaches, which a source's time is worth; None where time is no matter."""


@dataclass(frozen=True)
class Outcome:
    """What a step has shown."""

    texts: list[list[int]]
    """What each sequence was before the step: the last token is the step's root."""
    steps: Sequence[Step]
    logits: torch.Tensor
    """[batch, T, vocabulary], row i after token i of the step. Their memory is used again by the next pass."""
    paths: list[list[int]]
    """The accepted rows of each step, from the root's 0 on."""
    emitted: list[list[int]]
    """The tokens written, one for each accepted row: the text goes on with them."""
    hidden_states: dict[int, torch.Tensor] = field(default_factory=dict)
    """[batch, T, hidden] by layer, of those that were asked for."""

    @property
    def rows(self) -> int:
        """Of the pass, over all sequences."""
        return len(self.steps) * max(map(len, self.steps))


@runtime_checkable
class GuessSource(Protocol):
    """Proposes what may follow the texts of a batch. Subclasses need no more than `propose`.

    Each call of generate() works on a shallow copy: what a method assigns to ``self`` belongs to the call, what the
    source held before is shared by all calls, in whatever threads they run.
    """

    needs: Needs = Needs()
    is_calibrated: bool = False
    """Whether its probabilities come true as they are. Others are corrected by what has come true so far."""
    is_free: bool = False
    """Whether asking it takes next to nothing. Others are asked only while the tokens that they alone propose are worth
    the time, and are tried again from time to time."""

    def start(self, batch: Batch) -> None:
        """A call begins."""
        return

    def read(self, text: list[int], logits: torch.Tensor, hidden_states: dict[int, torch.Tensor]) -> None:
        """A prompt was computed, once for all sequences that have it. The last ``needs.prompt_logits`` rows of logits
        [k, vocabulary] at least; hidden states [n, hidden] by layer, of the positions that were not cached before."""
        return

    def propose(self, texts: list[list[int]], limits: Limits) -> list[GuessTree]:
        """For each sequence of the batch, a tree of guesses to follow its text, and how likely each is."""
        ...

    def look_ahead(self, limits: Limits) -> list[list[np.ndarray]]:
        """For each sequence, the rows of a Jacobi window, which the step computes beside the guesses; mostly none."""
        return [[] for _ in limits.depths]

    def observe(self, outcome: Outcome) -> None:
        """A step was verified."""
        return

    def keep(self, sequences: list[int]) -> None:
        """The batch shrinks to these of its sequences."""
        return

    def end(self) -> None:
        """The call is over, or has failed, even in `start`."""
        return


def likeliest(logits: torch.Tensor, temperature: float, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The ``count`` likeliest next tokens of each row and their probabilities, [..., count], likeliest first."""
    top, tokens = (logits.float() / temperature).softmax(-1).topk(min(count, logits.shape[-1]))
    # A guess that is rejected may overflow in half precision; what its row says is then worth nothing.
    return tokens.cpu().numpy(), top.nan_to_num_(0.0).cpu().numpy()
