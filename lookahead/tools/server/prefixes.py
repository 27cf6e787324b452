"""What earlier requests have left: caches of their texts. A prompt that begins with such a text goes on from there."""

from dataclasses import dataclass

from transformers import DynamicCache, PreTrainedModel

from lookahead.extending import bytes_of, can_be_cut, cut, empty_cache
from lookahead.tools.audit import first_difference

LEAST_SHARED = 16  # tokens: less of another text is not worth a copy
ROOM, ROWS = 4096, 128  # positions beyond a prompt that a cache allocates at once, at most; and those of a step


@dataclass(eq=False)
class _Kept:
    text: list[int]
    """What the cache holds."""
    cache: DynamicCache
    bytes: int
    stays: bool
    """Whether it is copied for each prompt that goes on from it."""


class Prefixes:
    """Caches of texts, up to a number of bytes. The one that was not used for longest goes first.

    Only one thread may use them. Caches are handed out: a call of generate() changes the one that it was given, and
    `keep` takes it back with the longer text. A cache of which the prompt needs a part is copied, so that the text it
    belongs to can go on, too. So is one that is handed out, between two passes of its call: what the call has read by
    then need not be read again. Where layers cannot be cut back (states, windows that have moved on), a prompt must
    begin with all of a text, so beginnings of prompts are kept, too (`Prompt.ends`).
    """

    def __init__(self, model: PreTrainedModel, most: int):
        """most: bytes; 0: nothing is kept."""
        self._model, self._most = model, most
        self._kept: list[_Kept] = []  # the newest is last
        self._lent: list[tuple[list[int], DynamicCache]] = []  # prompts, and the caches that their calls write into
        self.bytes = self.prompt_tokens = self.cached_tokens = 0
        """Bytes of what is kept, tokens of all prompts, and those of them that were found here."""

    def take(self, ids: list[int], shares: bool = False, new: int = 0) -> tuple[DynamicCache | None, int]:
        """Return a cache for a call of generate(), and how many tokens of its prompt the cache holds.

        The call is lent the cache, until `give_back`.

        ids: the prompt. shares: whether other calls go on from it, too. new: tokens of the answer, at most.
        None, 0 if nothing is to be kept: generate() then makes a cache of its own.
        """
        self.prompt_tokens += len(ids)
        cache, shared = self._found(ids, shares)
        self.cached_tokens += shared
        if cache is None:
            cache = self._empty(len(ids) + min(new, ROOM) + ROWS)
        if cache is not None and can_be_cut(cache):
            self._lent.append((ids, cache))
        return cache, shared

    def give_back(self, cache: DynamicCache | None) -> None:
        """Copy nothing of this cache any more: its call has ended."""
        self._lent = [lent for lent in self._lent if lent[1] is not cache]

    def _found(self, ids: list[int], shares: bool) -> tuple[DynamicCache | None, int]:
        """Return what `take` does, but for a new cache."""
        for shared, length, kept, cache in self._that_share(ids):
            if shares or kept is None or kept.stays or shared < length:
                copied = cut(cache, shared - length)
                if copied is None:
                    continue
                if kept is not None:
                    self._kept.remove(kept)
                    self._kept.append(kept)
                return copied, shared
            self._kept.remove(kept)
            self.bytes -= kept.bytes
            return cache, shared
        return None, 0

    def keep(self, ids: list[int], cache: DynamicCache, stays: bool = False) -> None:
        """Keep a cache. ids: the text, of which the cache holds the beginning. stays: when it is handed out, too."""
        text = ids[: cache.get_seq_length()]
        for i, kept in enumerate(self._kept):
            if kept.text == text:  # of another answer to the same prompt
                stays |= kept.stays
                self.bytes -= self._kept.pop(i).bytes
                break
        self._kept.append(_Kept(text, cache, bytes_of(cache), stays))
        self.bytes += self._kept[-1].bytes
        while self.bytes > self._most:
            self.bytes -= self._kept.pop(0).bytes

    def keep_copy(self, ids: list[int], cache: DynamicCache) -> None:
        """Keep a copy of a cache for all prompts that go on from it."""
        copied = cut(cache, 0)
        assert copied is not None
        self.keep(ids, copied, stays=True)

    def _that_share(self, ids: list[int]) -> list[tuple[int, int, _Kept | None, DynamicCache]]:
        """Return the caches of texts that share enough with a prompt, the longest, and newest, first.

        With each, how many tokens it shares, and how many it holds; and, before it, what is kept; None if it is lent.

        The last token of a prompt is always computed, because the first one of the answer follows from its logits.
        """
        found, prompt = [], ids[:-1]
        of_texts: list[tuple[list[int], int, _Kept | None, DynamicCache]] = [
            (kept.text, len(kept.text), kept, kept.cache) for kept in reversed(self._kept)
        ]
        of_texts += [(text, cache.get_seq_length(), None, cache) for text, cache in self._lent]
        for text, length, kept, cache in of_texts:
            at = first_difference(text, prompt)
            shared = min(len(prompt) if at is None else at, length)
            if shared >= LEAST_SHARED:
                found.append((shared, length, kept, cache))
        return sorted(found, key=lambda one: -one[0])

    def _empty(self, expected_length: int) -> DynamicCache | None:
        if not self._most or getattr(self._model.generation_config, "cache_implementation", None) is not None:
            return None  # in the latter case, generate() makes that cache, and takes no other
        return empty_cache(self._model, expected_length)
