"""What earlier requests have left: caches of their texts. A prompt that begins with such a text goes on from there."""

from dataclasses import dataclass

from transformers import DynamicCache, PreTrainedModel

from lookahead.extending import bytes_of, cut, empty_cache
from lookahead.tools.audit import first_difference

LEAST_SHARED = 16  # tokens: less of another text is not worth a copy


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
    belongs to can go on, too. Where layers cannot be cut back (states, windows that have moved on), a prompt must begin
    with all of a text, so beginnings of prompts are kept, too (`Prompt.ends`).
    """

    def __init__(self, model: PreTrainedModel, most: int):
        """most: bytes; 0: nothing is kept."""
        self._model, self._most = model, most
        self._kept: list[_Kept] = []  # the newest is last
        self.bytes = self.prompt_tokens = self.cached_tokens = 0
        """Bytes of what is kept, tokens of all prompts, and those of them that were found here."""

    def take(self, ids: list[int], shares: bool = False) -> tuple[DynamicCache | None, int]:
        """Return a cache for a call of generate(), and how many tokens of its prompt the cache holds.

        ids: the prompt. shares: whether other calls go on from it, too.
        None, 0 if nothing is to be kept: generate() then makes a cache of its own.
        """
        self.prompt_tokens += len(ids)
        for shared, kept in self._that_share(ids):
            if shares or kept.stays or shared < len(kept.text):
                cache = cut(kept.cache, shared - len(kept.text))
                if cache is None:
                    continue
                self._kept.remove(kept)
                self._kept.append(kept)
            else:
                cache = kept.cache
                self._kept.remove(kept)
                self.bytes -= kept.bytes
            self.cached_tokens += shared
            return cache, shared
        return self._empty(), 0

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

    def _that_share(self, ids: list[int]) -> list[tuple[int, _Kept]]:
        """Return the texts that share enough with a prompt, and how many tokens. The longest, and newest, is first.

        The last token of a prompt is always computed, because the first one of the answer follows from its logits.
        """
        found, prompt = [], ids[:-1]
        for kept in reversed(self._kept):
            at = first_difference(kept.text, prompt)
            shared = len(prompt) if at is None else at
            if shared >= LEAST_SHARED:
                found.append((shared, kept))
        return sorted(found, key=lambda one: -one[0])

    def _empty(self) -> DynamicCache | None:
        if not self._most or getattr(self._model.generation_config, "cache_implementation", None) is not None:
            return None  # in the latter case, generate() makes that cache, and takes no other
        return empty_cache(self._model)
