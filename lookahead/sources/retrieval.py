"""Guesses from a collection of texts: finds the longest suffix of the text that occurs in the collection.

A suffix array finds all its places at once, and the continuations there form a tree (REST, He et al. 2023, arXiv
2311.08252, section 3). The n-gram pool can learn the same texts in fixed memory, but this source forgets nothing.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lookahead.extending import GuessSource, Limits, vocabulary_of
from ngram_pool import GuessTree

LONGEST = 16  # most tokens of a suffix to look up; a power of two
MAX_PLACES = 64  # most places of a suffix that are used
END = -1  # after each text
KIND, SIZE = ">u4", 4  # dtype and bytes of a token


class RetrievalSource(GuessSource):
    """Proposes what follows the longest suffix of a text, up to 16 tokens, in a collection.

    It takes 8 bytes for each token of the collection.
    """

    longest = LONGEST
    """Most tokens of a suffix to look up."""

    def __init__(self, texts: Iterable[Sequence[int]]):
        """texts: token ids of each text, int in 0..2**31-1. Raises ValueError for other ids, or if there are none."""
        parts = [np.append(_ids(text), END) for text in texts]
        tokens = np.concatenate([*parts, np.empty(0, np.int64)])
        if not (tokens >= 0).any() or (tokens < END).any() or tokens.max() >= 2**31:
            raise ValueError("a collection needs at least one token, and ids in 0..2**31-1")
        if int((tokens == END).sum()) != len(parts):
            raise ValueError(f"id {END} is not a token: give ids in 0..2**31-1")
        self._largest = int(tokens.max())
        self._order = _sorted_suffixes(tokens)
        self._bytes = _bytes_of(tokens)
        self._numbers = np.frombuffer(self._bytes, KIND)

    @classmethod
    def of_files(cls, paths: Iterable[str | Path], tokenizer: PreTrainedTokenizerBase) -> "RetrievalSource":
        """Make a collection of text files, UTF-8 with or without a byte order mark.

        Raises OSError for a file that cannot be read, and ValueError, which names it, for one that is not UTF-8.
        """
        texts = map(_text_of, paths)
        return cls(tokenizer(text, add_special_tokens=False).input_ids for text in texts)

    def __len__(self) -> int:
        """Number of tokens in the collection."""
        return int(np.count_nonzero(self._numbers))

    def check_model(self, model: PreTrainedModel) -> None:
        if self._largest >= (known := vocabulary_of(model)):
            raise ValueError(
                f"the collection has token {self._largest}, but {type(model).__name__} knows {known} tokens: make it "
                "with the model's own tokenizer"
            )

    def propose(self, texts: list[list[int]], limits: Limits) -> list[GuessTree]:
        return [self._after(text, min(depth, limits.guesses)) for text, depth in zip(texts, limits.depths, strict=True)]

    def _after(self, text: list[int], depth: int) -> GuessTree:
        """The tree of continuations, with the share of each branch among the places."""
        start, stop, length = self._longest_match(text[-LONGEST:])
        if not length or depth <= 0:
            return GuessTree.empty()
        chosen = np.unique(np.linspace(start, stop - 1, MAX_PLACES).astype(np.int64))
        nodes: dict[tuple[int, int], int] = {}  # (parent, token): its number
        counts: list[int] = []
        for place in (self._order[chosen].astype(np.int64) + length).tolist():
            parent = -1
            for number in self._numbers[place : place + depth].tolist():
                if not number:
                    break
                parent = nodes.setdefault((parent, number - 1), len(nodes))
                if parent == len(counts):
                    counts.append(0)
                counts[parent] += 1
        chances: list[float] = []
        for (parent, _), count in zip(nodes, counts, strict=True):
            above, places = (chances[parent], counts[parent]) if parent >= 0 else (1 - 0.5**length, len(chosen))
            chances.append(above * count / (places + 1))  # + 1: as if another token had followed once more
        return GuessTree.of([token for _, token in nodes], [parent for parent, _ in nodes], probabilities=chances)

    def _longest_match(self, suffix: list[int]) -> tuple[int, int, int]:
        """Return the range of ``order`` for the longest suffix that occurs, and the length of that suffix."""
        known = _bytes_of(np.array(suffix, np.int64))
        places = self._order.data  # a memory view, which gives Python's own numbers
        first, found = 0, b""
        shortest, longest = 1, len(suffix)
        while shortest <= longest:  # binary search: if a suffix occurs, so does each shorter one
            length = (shortest + longest) // 2
            part = known[-SIZE * length :]
            start = bisect_left(places, part, key=self._beginning(len(part)))
            if start < len(places) and self._bytes.startswith(part, SIZE * places[start]):
                first, found = start, part
                shortest = length + 1
            else:
                longest = length - 1
        stop = bisect_right(places, found, first, key=self._beginning(len(found))) if found else first
        return first, stop, len(found) // SIZE

    def _beginning(self, size: int) -> Callable[[int], bytes]:
        """Return a function for the bytes at a place."""
        return lambda place: self._bytes[SIZE * place : SIZE * place + size]


def _bytes_of(tokens: np.ndarray) -> bytes:
    """Encode each token as its id plus 1, END as 0, big-endian. So byte strings, which Python compares fast, sort like
    tokens."""
    return (tokens + 1).astype(KIND).tobytes()


def _text_of(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error


def _ids(text: Sequence[int]) -> np.ndarray:
    ids = np.asarray(text)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(f"a text of a collection must be a sequence of token ids, not {text!r:.60}")
    return ids.astype(np.int64)


def _sorted_suffixes(tokens: np.ndarray) -> np.ndarray:
    """Int32 [n], all places, sorted by their next LONGEST tokens (prefix doubling, Manber and Myers 1993)."""
    rank, length = np.unique(tokens, return_inverse=True)[1], 1
    order = np.argsort(rank, kind="stable")
    while length < LONGEST:
        further = np.append(rank[length:], np.full(min(length, len(rank)), -1))[: len(rank)]
        order = np.lexsort((further, rank))
        is_new = (np.diff(rank[order]) != 0) | (np.diff(further[order]) != 0)
        ranked = np.empty_like(rank)
        ranked[order] = np.append(0, np.cumsum(is_new))
        rank, length = ranked, 2 * length
    return order.astype(np.int32)
