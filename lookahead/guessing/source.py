"""The protocol of a source of guesses. docs/sources.md shows how to write one."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import PreTrainedModel

from lookahead.cpu import top_k as fast
from lookahead.models.cache import AnyCache
from lookahead.step import Step
from ngram_pool import GuessTree, NgramPool


@dataclass(frozen=True)
class Needs:
    """What a source needs in addition to texts and the logits of steps."""

    prompt_logits: int = 0
    """Number of rows of a prompt's logits, counted from its end."""
    hidden_states: tuple[int, ...] = ()
    """Layers whose outputs it needs, of prompts and of steps: 0 is the embedding, 1 the first layer."""
    top_k: int = 0
    """How many top tokens of a step's rows it uses, up to MAX_COUNT: `Outcome.top_k`."""

    def __post_init__(self) -> None:
        for name, value, most in (
            ("top_k", self.top_k, fast.MAX_COUNT),
            ("prompt_logits", self.prompt_logits, 2**62),
            *(("hidden_states", layer, 2**62) for layer in self.hidden_states),
        ):
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
                raise ValueError(f"{name}={value!r} must be a whole number in 0..{most}")


@dataclass(frozen=True)
class Batch:
    """The beginning of a call of generate()."""

    texts: list[list[int]]
    """Each prompt's tokens; empty for a prompt of embeddings."""
    temperature: float
    """Temperature at which the next tokens are drawn."""
    vocabulary: int
    """Number of tokens that the model knows."""
    pool: NgramPool
    """The wrap's pool."""
    has_rate: bool = False
    """Whether `Limits.rate` will be set."""

    def sequences_of(self, text: list[int]) -> list[int]:
        """Return the sequences with the prompt that `observe_prompt` sees; none for embeddings, unless alone."""
        if not text and len(self.texts) > 1:
            return []
        return [b for b, prompt in enumerate(self.texts) if prompt == text]


@dataclass(frozen=True)
class Limits:
    """How much a source should propose in a step."""

    depths: Sequence[int]
    """For each sequence, the most tokens that a branch may have."""
    guesses: int
    """Most guesses that are verified for each sequence."""
    min_probability: float
    """Guesses below this probability are not worth their rows."""
    is_chain: bool
    """Whether only single branches can be verified."""
    rate: float | None = None
    """The recent tokens per second, by which a source can value its time; None if time does not matter."""
    draws: Sequence[np.ndarray | None] = ()
    """For each sequence, float32 [k, vocabulary]: the exponential variates of its next k tokens. The token with the
    largest probability / variate is chosen. None if unknown. Empty if those of all sequences are unknown. A user's
    source gets them read-only."""


@dataclass(frozen=True)
class Outcome:
    """The result of a step."""

    texts: list[list[int]]
    """Each sequence before the step. Its last token is the step's root."""
    steps: Sequence[Step]
    logits: torch.Tensor
    """[rows, vocabulary] of all steps: row `first[b]` + i predicts what follows token i of step b. The next pass reuses
    their memory."""
    paths: list[list[int]]
    """The accepted rows of each sequence's step, beginning with row 0, the root."""
    emitted: list[list[int]]
    """The new tokens of each sequence, one for each accepted row."""
    hidden_states: dict[int, torch.Tensor] = field(default_factory=dict)
    """[rows, hidden] by layer, for the layers that a source needs."""
    top_k: tuple[np.ndarray, np.ndarray] | None = None
    """`top_k` of these rows, at least of roots and guesses, for as many tokens as all sources need (`Needs.top_k`), at
    the temperature of the call; None if the pass has not found them."""
    first: Sequence[int] = (0,)
    """The row of each sequence's root."""


class Guesser:
    """Makes guesses in one call of generate(), and holds the state of the call. Subclasses must define only
    `propose`."""

    passes: int = 0
    """For the statistics: passes of its own model or heads in this call."""

    def observe_prompt(self, text: list[int], logits: torch.Tensor, hidden_states: dict[int, torch.Tensor]) -> None:
        """Observe a prompt after its prefill, once for all sequences that share it.

        logits: [k, vocabulary], the prompt's last rows: at least ``needs.prompt_logits``, or all.
        hidden_states: [n, hidden] by layer, for the positions that were not cached before.
        """
        return

    def attach(self, model: PreTrainedModel, cache: AnyCache) -> None:
        """Receive the decoding model and the cache of the call, once, after all prefills.

        Before each `propose`, the cache holds all tokens of a text except the last. A guesser may add rows only within
        a method (`rewinding.part_of` lends layers).
        """
        return

    def propose(self, texts: list[list[int]], limits: Limits) -> list[GuessTree]:
        """Return a tree of guesses for each sequence of the batch."""
        raise NotImplementedError(f"{type(self).__name__} defines no propose(texts, limits)")

    def look_ahead(self, limits: Limits) -> list[list[np.ndarray]]:
        """Return, for each sequence, the rows of a Jacobi window for the step to compute; [] for no window."""
        return [[] for _ in limits.depths]

    def observe(self, outcome: Outcome) -> None:
        """Observe the result of a step."""
        return

    def select(self, sequences: list[int]) -> None:
        """Continue with only these sequences of the batch; the others have ended."""
        return

    def end(self) -> None:
        """End the call; also called if it fails."""
        return


class GuessSource(Guesser):
    """A source of guesses, for all calls of a wrapped model, also in several threads at once.

    Each call gets its own guesser from `start`, as each loop gets its own iterator from an iterable. A source whose
    guesses depend only on the texts needs no guesser: it defines `propose`, and is the guesser of every call.
    """

    needs: Needs = Needs()
    is_calibrated: bool = False
    """Whether its probabilities are used unchanged. Those of others are corrected by the share of accepted guesses."""
    is_free: bool = False
    """Whether asking it takes almost no time. Other sources are asked only while the tokens that only they propose are
    worth the time, and are tried again from time to time. They take no part in calls that are too short for that."""

    def check_model(self, model: PreTrainedModel) -> None:
        """Raise ValueError, with the remedy, if it cannot guess for this model.

        `wrap`, `decode` and `Sequences.submit` call it.
        """
        return

    def start(self, batch: Batch) -> Guesser:
        """Begin a call: return its guesser."""
        return self


def is_ours(guesser: Guesser) -> bool:
    """Whether it is of this package, so that it leaves what it is given as it is."""
    return type(guesser).__module__.startswith("lookahead.")


def can_guess(source: GuessSource) -> bool:
    """Whether it defines `propose` or `start`."""
    return type(source).propose is not Guesser.propose or type(source).start is not GuessSource.start


def top_k(
    logits: torch.Tensor,
    temperature: float,
    count: int,
    draws: torch.Tensor | None = None,
    vocabulary: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the top ``count`` next tokens of each row and their probabilities, [..., count], most likely first.

    draws: float32 [..., tokens], the variates by which each row's token will be chosen (`Limits.draws`), 1 where they
        are unknown. The probabilities are then divided by them and normalized.
    vocabulary: int64, the token that each column of the logits stands for; default: the column's number.
    """
    count = min(count, logits.shape[-1])
    if vocabulary is not None:
        columns, shares = top_k(logits, temperature, count, None if draws is None else draws[..., vocabulary])
        return vocabulary[columns], shares
    if draws is None and fast.serves(logits, count):
        return fast.top_k(logits, temperature, count)
    chances = (logits.float() / temperature).softmax(-1)
    if draws is not None:
        chances /= draws.to(chances.device)
        chances /= chances.sum(-1, keepdim=True)
    top, tokens = chances.topk(count)
    # In half precision, the row of a rejected guess may overflow. It then counts for nothing.
    # Both are copied at once, so that an accelerator is waited for only once. A float32 holds all tokens below 2**24.
    tokens, top = torch.stack([tokens.float(), top.nan_to_num_(0.0)]).cpu().numpy()
    return tokens.astype(np.int64), top
