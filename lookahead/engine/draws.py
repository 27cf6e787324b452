"""The random draws of sampled tokens: those of plain decoding, known before the tokens' logits.

`batch_draws` has those of batches.
"""

import numpy as np
import torch

from lookahead.cpu import choice
from lookahead.cpu.choice import Warp
from ngram_pool.forks import Lock

KNOWN_DRAWS = 16  # how many tokens ahead draws are made
drawing = Lock()  # two threads that share a generator must not draw the same numbers


class Race:
    """Draws one token after another as `torch.multinomial` does, and can draw the variates ahead.

    To draw one token, `torch.multinomial` draws an exponential variate e for each token of the vocabulary, and chooses
    the token with the largest p / e. So e depends only on the generator, not on the text. It is drawn ahead from a copy
    of the generator's state. The generator itself advances only when a token is chosen. If other code, such as a logits
    processor, has used or seeded it in the meantime, the variates drawn ahead are dropped.
    """

    def __init__(self, generator: torch.Generator | None):
        """generator: on the CPU; None: torch's own."""
        self.generator = torch.default_generator if generator is None else generator
        self.vocabulary = 0  # until the first logits
        self._states = [self.generator.get_state()]
        """The generator's state before each known draw, and before the next one."""

    def _allocate(self, vocabulary: int) -> None:
        # The known variates are the rows from `_first` on, those of the next token first. If there is no free row after
        # them, they move to the front.
        self._buffer = np.empty((2 * KNOWN_DRAWS, vocabulary), np.float32)
        self.vocabulary, self._first = vocabulary, 0

    def ahead(self, count: int) -> np.ndarray:
        """Return the variates of the next ``count`` tokens, float32 [count, vocabulary], valid until the next call.

        count: up to KNOWN_DRAWS.
        """
        self._check()
        known = len(self._states) - 1
        if known < count:
            if self._first + count > len(self._buffer):
                self._buffer[:known] = self._buffer[self._first : self._first + known]
                self._first = 0
            for row in self._buffer[self._first + known : self._first + count]:
                after = copy_of(self._states[-1])
                choice.draw(after, row)
                self._states.append(self._before_next(after))
        return self._buffer[self._first : self._first + count]

    def choose(self, logits: torch.Tensor, warp: Warp, row: int = 0) -> int | None:
        """Draw a token. Returns None without drawing if torch's own arithmetic must decide.

        logits, row: as for `choice.argmax`.
        """
        if not self.vocabulary:
            self._allocate(logits.shape[-1])
        with drawing:
            token = choice.drawn(logits, self.ahead(1)[0], warp, row)
            if token is not None:
                self._pass()
            return token

    def end(self) -> None:
        """No further token is drawn."""

    def _before_next(self, after: torch.Tensor) -> torch.Tensor:
        """Return the generator's state before the first unknown draw. after: the state after the last known one."""
        return after

    def _pass(self) -> None:
        """Skip the next draw, which is known."""
        self._first += 1
        self._states.pop(0)
        self.generator.set_state(self._states[0])

    def _check(self) -> None:
        """Drop the variates drawn ahead if the generator's state has changed."""
        state = self.generator.get_state()
        # Between passes, bytes are compared sooner than torch finds its code for tensors.
        if state.numpy().tobytes() != self._states[0].numpy().tobytes():
            self._first, self._states = 0, [state]


def copy_of(state: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(state.numpy().copy())
