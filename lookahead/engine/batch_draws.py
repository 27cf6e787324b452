"""The random draws of sampled batches, made as plain decoding makes them."""

import torch

from lookahead.cpu import choice
from lookahead.engine.draws import KNOWN_DRAWS, Race, copy_of, drawing

MOST_STATES = 2048  # of 5 kB, stored for sequences that are behind; others are computed again


class BatchDraws:
    """The draws of plain decoding of a batch, for sequences that advance independently.

    For each token, plain decoding draws the variates of all sequences at once, in order, even of those that have
    ended. So torch's generator draws those of token t of sequence b after (t * sequences + b) * vocabulary others,
    whatever the texts are.
    """

    def __init__(self, sequences: int):
        self._sequences, self._vocabulary = sequences, 0
        self._live = set(range(sequences))
        self._next = 0  # the index of the next draw among all draws
        self._states: dict[int, torch.Tensor] = {}  # before draws that were not requested yet, by index
        self._starts: dict[int, torch.Tensor] = {}  # before all draws of a token
        self._asked = [0] * sequences  # tokens
        # States: before the next of all draws, and of torch's generator.
        self._frontier = self._left = torch.empty(0, device="cpu")

    def _seize(self, vocabulary: int) -> None:
        """Take over torch's generator. Other threads that draw meanwhile get other numbers."""
        with drawing:
            generator, self._vocabulary = torch.default_generator, vocabulary
            self._frontier = generator.get_state()
            generator.manual_seed(int(torch.randint(2**62, (), device="cpu")))
            self._left = generator.get_state()

    def races(self) -> list["RaceInBatch"]:
        """Return what draws the tokens of each sequence."""
        return [RaceInBatch(self, b) for b in range(self._sequences)]

    def before(self, token: int, sequence: int, vocabulary: int) -> torch.Tensor:
        """Return the generator's state before a draw. Request each once, in the order of a sequence's tokens."""
        if not self._vocabulary:
            self._seize(vocabulary)
        self._asked[sequence] = token
        place = token * self._sequences + sequence
        while self._next <= place:
            self._go_on()
        if place in self._states:
            return self._states.pop(place)
        state = copy_of(self._starts[token])
        choice.skip(state, sequence * vocabulary)
        return state

    def leave(self, sequence: int) -> None:
        """Drop the states of a sequence that has ended."""
        self._live.discard(sequence)
        self._states = {place: state for place, state in self._states.items() if place % self._sequences != sequence}

    def set_generator_after(self, tokens: int) -> None:
        """Set torch's generator to its state in plain decoding after this many tokens of each sequence.

        No sequence has drawn more than KNOWN_DRAWS beyond them. If another thread has used it, it does not change.
        """
        if not self._vocabulary:
            return
        while self._next <= tokens * self._sequences:
            self._go_on()
        with drawing:
            if torch.equal(torch.default_generator.get_state(), self._left):
                torch.default_generator.set_state(self._starts[tokens])

    def _go_on(self) -> None:
        token, sequence = divmod(self._next, self._sequences)
        if sequence == 0:
            self._starts[token] = copy_of(self._frontier)
            least = min([token - KNOWN_DRAWS - 1, *(self._asked[b] for b in self._live)])
            while (oldest := next(iter(self._starts))) < least:
                del self._starts[oldest]
        if sequence in self._live and len(self._states) < MOST_STATES:
            self._states[self._next] = copy_of(self._frontier)
        choice.skip(self._frontier, self._vocabulary)
        self._next += 1


class RaceInBatch(Race):
    """Draws the tokens of one sequence of a batch."""

    def __init__(self, draws: BatchDraws, sequence: int):
        super().__init__(torch.Generator("cpu"))
        self._draws, self._sequence = draws, sequence
        self._asked = 0  # how many states

    def _allocate(self, vocabulary: int) -> None:
        super()._allocate(vocabulary)
        self._states = [self._before_next()]
        self.generator.set_state(self._states[0])

    def _before_next(self, after: torch.Tensor | None = None) -> torch.Tensor:
        self._asked += 1
        return self._draws.before(self._asked - 1, self._sequence, self.vocabulary)

    def _check(self) -> None:
        """Skip the next draw if torch has drawn the last token from the state that was set for it."""
        if self.generator.get_state().numpy().tobytes() != self._states[0].numpy().tobytes():
            if len(self._states) == 1:
                self._states.append(self._before_next())
                self._first -= 1  # its variates are not there
            self._pass()

    def end(self) -> None:
        self._draws.leave(self._sequence)
