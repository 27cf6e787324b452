"""The random draws of sampled tokens, made as plain decoding makes them, and known before it is known what for."""

import numpy as np
import torch

from lookahead.cpu import choice
from lookahead.cpu.choice import Warp
from ngram_pool.forks import Lock

KNOWN_DRAWS = 16  # how many tokens ahead draws are made
MOST_STATES = 2048  # of 5 kB, that a batch keeps for the sequences that are behind; others are found once more
_drawing = Lock()  # two threads that share a generator must not draw the same numbers


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
            self._begin_with(vocabulary)

    def _begin_with(self, vocabulary: int) -> None:
        # The known variates are the rows from `_begin` on, those of the next token first. When no row is left behind
        # them, they move to the front.
        self._buffer = np.empty((2 * KNOWN_DRAWS, vocabulary), np.float32)
        self.vocabulary, self._begin = vocabulary, 0

    def ahead(self, count: int) -> np.ndarray:
        """Return the variates of the next ``count`` tokens, float32 [count, vocabulary], valid until the next call.

        count: up to KNOWN_DRAWS.
        """
        self._check()
        known = len(self._states) - 1
        if known < count:
            if self._begin + count > len(self._buffer):
                self._buffer[:known] = self._buffer[self._begin : self._begin + known]
                self._begin = 0
            for row in self._buffer[self._begin + known : self._begin + count]:
                after = _copy_of(self._states[-1])
                choice.draw(after, row)
                self._states.append(self._before_next(after))
        return self._buffer[self._begin : self._begin + count]

    def choose(self, logits: torch.Tensor, warp: Warp, row: int = 0) -> int | None:
        """Draw a token; None, and nothing is drawn, if that takes torch's own arithmetic.

        logits, row: as for `choice.argmax`.
        """
        if not self.vocabulary:
            self._begin_with(logits.shape[-1])
        with _drawing:
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
        self._begin += 1
        self._states.pop(0)
        self.generator.set_state(self._states[0])

    def _check(self) -> None:
        """Forget what was drawn ahead if the generator's state is not the one that was left."""
        state = self.generator.get_state()
        # Between passes, bytes are compared sooner than torch finds its code for tensors.
        if state.numpy().tobytes() != self._states[0].numpy().tobytes():
            self._begin, self._states = 0, [state]


class BatchDraws:
    """What plain decoding of a batch draws, for sequences that go at their own pace.

    For each token, plain decoding draws the variates of all sequences at once, one after the other, of those that have
    ended, too. So those of token t of sequence b are drawn from torch's generator behind (t * sequences + b) *
    vocabulary others, whatever the texts say.
    """

    def __init__(self, sequences: int):
        self._sequences, self._vocabulary = sequences, 0
        self._live = set(range(sequences))
        self._next = 0  # the place of the next of all draws
        self._states: dict[int, torch.Tensor] = {}  # before draws that nobody has asked for yet, by place
        self._starts: dict[int, torch.Tensor] = {}  # before all draws of a token
        self._asked = [0] * sequences  # tokens
        self._frontier = self._left = torch.empty(0)  # states: before the next of all draws, and of torch's generator

    def _begin(self, vocabulary: int) -> None:
        """Take torch's generator over. Whoever draws meanwhile, in another thread, is given other numbers."""
        with _drawing:
            generator, self._vocabulary = torch.default_generator, vocabulary
            self._frontier = generator.get_state()
            generator.manual_seed(int(torch.randint(2**62, ())))
            self._left = generator.get_state()

    def races(self) -> list["RaceInBatch"]:
        """Return what draws the tokens of each sequence."""
        return [RaceInBatch(self, b) for b in range(self._sequences)]

    def before(self, token: int, sequence: int, vocabulary: int) -> torch.Tensor:
        """Return the generator's state before a draw; each is asked for once, in the order of a sequence's tokens."""
        if not self._vocabulary:
            self._begin(vocabulary)
        self._asked[sequence] = token
        place = token * self._sequences + sequence
        while self._next <= place:
            self._go_on()
        if place in self._states:
            return self._states.pop(place)
        state = _copy_of(self._starts[token])
        choice.skip(state, sequence * vocabulary)
        return state

    def leave(self, sequence: int) -> None:
        """Keep nothing more for a sequence, which has ended."""
        self._live.discard(sequence)
        self._states = {place: state for place, state in self._states.items() if place % self._sequences != sequence}

    def end(self, tokens: int) -> None:
        """Leave torch's generator as plain decoding leaves it after this many tokens of each sequence.

        No sequence has drawn more than KNOWN_DRAWS beyond them. If another thread has used it, it stays as it is.
        """
        if not self._vocabulary:
            return
        while self._next <= tokens * self._sequences:
            self._go_on()
        with _drawing:
            if torch.equal(torch.default_generator.get_state(), self._left):
                torch.default_generator.set_state(self._starts[tokens])

    def _go_on(self) -> None:
        token, sequence = divmod(self._next, self._sequences)
        if sequence == 0:
            self._starts[token] = _copy_of(self._frontier)
            least = min([token - KNOWN_DRAWS - 1, *(self._asked[b] for b in self._live)])
            while (oldest := next(iter(self._starts))) < least:
                del self._starts[oldest]
        if sequence in self._live and len(self._states) < MOST_STATES:
            self._states[self._next] = _copy_of(self._frontier)
        choice.skip(self._frontier, self._vocabulary)
        self._next += 1


class RaceInBatch(Race):
    """Draws the tokens of one sequence of a batch."""

    def __init__(self, draws: BatchDraws, sequence: int):
        super().__init__(torch.Generator("cpu"))
        self._draws, self._sequence = draws, sequence
        self._asked = 0  # how many states

    def _begin_with(self, vocabulary: int) -> None:
        super()._begin_with(vocabulary)
        self._states = [self._before_next()]
        self.generator.set_state(self._states[0])

    def _before_next(self, after: torch.Tensor | None = None) -> torch.Tensor:
        self._asked += 1
        return self._draws.before(self._asked - 1, self._sequence, self.vocabulary)

    def _check(self) -> None:
        """Leave the next draw behind if torch has drawn the last token, from the state that was left for it."""
        if self.generator.get_state().numpy().tobytes() != self._states[0].numpy().tobytes():
            if len(self._states) == 1:
                self._states.append(self._before_next())
                self._begin -= 1  # its variates are not there
            self._pass()

    def end(self) -> None:
        self._draws.leave(self._sequence)


def _copy_of(state: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(state.numpy().copy())
