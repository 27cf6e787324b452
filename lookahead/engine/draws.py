"""The random draws of sampled tokens, made as plain decoding makes them, and known before it is known what for.

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
    """Draws one token after another as `torch.multinomial` does, and can make the draws before it knows what for.

    To draw one token, `torch.multinomial` draws an exponential variate e for each token of the vocabulary, and takes
    the largest p / e. So e depends on the generator alone, and not on the text. It is drawn ahead from a copy of the
    generator's state. The generator itself moves on only when a token is chosen. If somebody else has used or seeded it
    in the meantime, as a logits processor may, what was drawn ahead is dropped.
    """

    def __init__(self, generator: torch.Generator | None, vocabulary: int = 0):
        """generator: on the CPU; None: torch's own. vocabulary: as long as it is 0, the first logits tell."""
        self.generator = torch.default_generator if generator is None else generator
        self.vocabulary = 0
        self._states = [self.generator.get_state()]
        """The generator's state before each draw that is known, and before the next one."""
        if vocabulary:
            self._allocate(vocabulary)

    def _allocate(self, vocabulary: int) -> None:
        # The known variates are the rows from `_first` on, those of the next token first. When no row is left behind
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
        """Draw a token; None, and nothing is drawn, if that takes torch's own arithmetic.

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
        """Return the generator's state before the first draw that is not known. after: behind the last one known."""
        return after

    def _pass(self) -> None:
        """Leave the next draw, which is known, behind."""
        self._first += 1
        self._states.pop(0)
        self.generator.set_state(self._states[0])

    def _check(self) -> None:
        """Forget what was drawn ahead if the generator's state is not the one that was left."""
        state = self.generator.get_state()
        # Between passes, bytes are compared sooner than torch finds its code for tensors.
        if state.numpy().tobytes() != self._states[0].numpy().tobytes():
            self._first, self._states = 0, [state]


def copy_of(state: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(state.numpy().copy())
