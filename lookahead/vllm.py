"""The n-gram pool as a speculative proposer of vLLM, through its ``custom_class`` interface; see docs/vllm.md.

    LLM(model, speculative_config={"method": "custom_class", "model": "lookahead.vllm.PoolProposer",
                                   "num_speculative_tokens": 16})

`PoolProposer` proposes a chain of guesses for each request, and vLLM verifies it. One pool serves all requests of an
engine, and learns from their prompts and texts. Environment variables configure it (`Settings`).

This module imports neither vLLM nor its dependencies.
"""

import copy
import logging
import math
import os
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from transformers import AutoTokenizer

from lookahead.extending import Limits, PoolGuesser
from lookahead.vocabulary import vocabulary_fingerprint
from ngram_pool import NgramPool, Origin
from ngram_pool.table import LONGEST

PREFIX = "LOOKAHEAD_VLLM_"
FADE = 0.98  # factor by which each pass fades the counts of tokens
POLL_SECONDS = 0.2  # between two checks whether the process has ended

_logger = logging.getLogger("vllm.lookahead")  # below vLLM's logger, so that messages are shown


@dataclass(frozen=True)
class Settings:
    """The environment variables LOOKAHEAD_VLLM_POOL, ..._MEMORY_MB and so on, which vLLM's processes inherit."""

    pool: Path | None = None  # the pool file to start from
    memory_mb: float = 64.0  # size of an empty pool in MiB
    free_rows: float = 12.0  # how cheap a guess is on this machine: see `break_even`
    min_probability: float = 0.4  # less likely guesses are never proposed
    snapshot: Path | None = None  # file to which the pool is written now and then, and when the process ends
    snapshot_seconds: float = 300.0  # between two such files

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "Settings":
        """Raise ValueError, naming the variable, for an unknown name, a bad value, or two that contradict."""
        given = {name: value for name, value in environment.items() if name.startswith(PREFIX)}
        known = {PREFIX + field.upper(): field for field in cls.__dataclass_fields__}
        for name in given:
            if name not in known:
                raise ValueError(f"{name} is not a setting: the settings are {', '.join(known)}")
        values: dict[str, Any] = {}
        for name, value in given.items():
            field = known[name]
            values[field] = Path(value) if field in ("pool", "snapshot") else _number(name, value)
            if not value:
                raise ValueError(f"{name} is empty: name a file, or leave it out")
        if "pool" in values and "memory_mb" in values:
            raise ValueError(f"{PREFIX}POOL keeps the size of its file: leave out {PREFIX}MEMORY_MB")
        if "snapshot_seconds" in values and "snapshot" not in values:
            raise ValueError(f"{PREFIX}SNAPSHOT_SECONDS needs {PREFIX}SNAPSHOT, the file to write")
        settings = cls(**values)
        if not 0 < settings.snapshot_seconds < math.inf:
            raise ValueError(
                f"{PREFIX}SNAPSHOT_SECONDS must be a finite number above 0, not {settings.snapshot_seconds:g}"
            )
        if settings.free_rows < 0:
            raise ValueError(f"{PREFIX}FREE_ROWS must be 0 or more, not {settings.free_rows:g}")
        if not 0 <= settings.min_probability <= 1:
            raise ValueError(f"{PREFIX}MIN_PROBABILITY must lie in 0..1, not {settings.min_probability:g}")
        return settings


def _number(name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if math.isnan(number):
        raise ValueError(f"{name} must be a number, not {value!r}")
    return number


def break_even(requests: int, free_rows: float) -> float:
    """Return the probability of acceptance above which a guess saves time, if ``requests`` share each pass.

    A pass over n rows takes about (free_rows + n) times the time that one row adds. So one more row takes the time of
    1 / (free_rows + n) of a pass. A plain pass writes a token for each request, so in this time it would have written
    requests / (free_rows + n) tokens. This is returned for n = requests: the more requests share a pass, the likelier a
    guess must be. With 0 free rows no guess pays, with infinitely many each does. If guesses make decoding g times as
    fast as plain decoding, time is worth g times as many tokens (see `lookahead.guessing.budget`).
    """
    return requests / (free_rows + requests)


class PoolProposer:
    """Proposes guesses to vLLM, which makes a proposer on each rank of tensor parallelism and in each engine of data
    parallelism.

    The same calls give the same guesses on every rank: nothing depends on time, chance or memory addresses.

    vLLM does not tell which row holds which request. The proposer recognizes a request by a hash (xxh3-128) of its text
    before the tokens just sampled; "How it recognizes requests" in docs/vllm.md explains why this is enough.
    """

    def __init__(self, vllm_config: Any):
        """vllm_config: vLLM's VllmConfig, for the method "custom_class".

        Raises TypeError for another config; ValueError for bad settings, a pool with unknown tokens, or if prompts of
        embeddings are enabled; PoolFileError for a file that is not a pool of the model's vocabulary;
        FileNotFoundError.
        """
        speculative = getattr(vllm_config, "speculative_config", None)
        if speculative is None:
            raise TypeError(
                "PoolProposer is made by vLLM, from a VllmConfig: give vLLM the speculative_config "
                '{"method": "custom_class", "model": "lookahead.vllm.PoolProposer", "num_speculative_tokens": 16}'
            )
        self._model = vllm_config.model_config
        if self._model.enable_prompt_embeds:
            raise ValueError("prompts of embeddings have no ids to learn from: leave out enable_prompt_embeds")
        self._max_guesses = speculative.num_speculative_tokens
        self._settings = Settings.from_environment()
        self._texts = _Texts(2 * vllm_config.scheduler_config.max_num_seqs)
        self.pool = self._make_pool()
        self._tokens = self._plain = 1.0  # tokens written lately, and tokens that plain passes would have written
        self._guesses = 0  # guesses that the next pass verifies
        # When a request comes close to the model's longest text, vLLM stops proposing for all requests, because a draft
        # model could not read further. This limit is raised: the proposer limits each chain to the room that is left.
        speculative.draft_model_config = copy.copy(speculative.draft_model_config)
        speculative.draft_model_config.max_model_len = self._model.max_model_len + self._max_guesses
        parallel = vllm_config.parallel_config
        if self._settings.snapshot and parallel.rank % parallel.tensor_parallel_size == 0:
            path = self._settings.snapshot
            if parallel.data_parallel_index:  # each engine learns from requests of its own
                path = path.with_name(f"{path.stem}-{parallel.data_parallel_index}{path.suffix}")
            _start_snapshots(self, path, self._settings.snapshot_seconds)

    def _vocabulary(self) -> str | None:
        """Return the fingerprint of the model's tokenizer, or None if transformers cannot load one."""
        if self._model.skip_tokenizer_init:
            return None
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                self._model.tokenizer,
                revision=self._model.tokenizer_revision,
                trust_remote_code=self._model.trust_remote_code,
            )
        except (ImportError, OSError, ValueError) as error:
            _logger.warning("Without a tokenizer, a pool's vocabulary cannot be compared with the model's: %s", error)
            return None
        return vocabulary_fingerprint(tokenizer)

    def _make_pool(self) -> NgramPool:
        vocabulary = self._vocabulary()
        if not self._settings.pool:
            return NgramPool(self._settings.memory_mb, vocabulary)
        pool = NgramPool.load(self._settings.pool, vocabulary)
        if pool.largest_token >= self._model.get_vocab_size():
            raise ValueError(
                f"{self._settings.pool} holds token {pool.largest_token}, but the model knows "
                f"{self._model.get_vocab_size()} tokens: build the pool with the model's tokenizer"
            )
        _logger.info("Guesses start from %s: %s observations", self._settings.pool, f"{pool.observations:,}")
        return pool

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: vLLM calls this although there is no draft model."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Return guesses for each of the n texts of the batch: at most num_speculative_tokens each, and no more than
        the model has room for.

        sampled_token_ids: [n], the tokens that this step has written to each text; empty while its prompt is read.
        num_tokens_no_spec: int [rows], rows >= n, the length of each text, including the tokens just sampled.
        token_ids_cpu: int [rows, longest], the texts, each valid up to its length.
        slot_mappings: not used.
        """
        written = [len(tokens) for tokens in sampled_token_ids]
        texts = [token_ids_cpu[row, : num_tokens_no_spec[row]] for row in range(len(written))]
        self._learn(texts, written)
        threshold = self._threshold(sum(new > 0 for new in written), sum(written))
        # The step that verifies the guesses writes one more token.
        rooms = [
            self._model.max_model_len - len(text) - 1 if new else 0 for text, new in zip(texts, written, strict=True)
        ]
        limits = Limits(rooms, self._max_guesses, threshold, is_chain=True)
        guesses = [tree.tokens.tolist() for tree in PoolGuesser(self.pool).propose(texts, limits)]
        self._guesses = sum(map(len, guesses))
        return guesses

    def _threshold(self, requests: int, tokens: int) -> float:
        """Return the least probability of the next guesses. The last pass wrote ``tokens`` for ``requests``."""
        least = break_even(max(requests, 1), self._settings.free_rows)
        if requests:
            self._tokens = FADE * self._tokens + tokens
            self._plain = FADE * self._plain + requests + self._guesses * least
        # The rate is never worse than that of plain passes, which are always possible.
        return max(least * max(self._tokens / self._plain, 1.0), self._settings.min_probability)

    def _learn(self, texts: list[np.ndarray], written: list[int]) -> None:
        """Learn new requests' prompts and the last ``written`` tokens of each text, and keep the texts' hashes."""
        hashes = []
        for text, new in zip(texts, written, strict=True):
            known = len(text) - new
            hash_ = xxhash.xxh3_128(text[:known].data)
            if not self._texts.remove(hash_.digest()):
                self.pool.learn(text[:known], Origin.PROMPT)
            if new:
                recent = min(known, LONGEST)
                self.pool.follow(text[known - recent :], start=recent)
                hash_.update(text[known:].data)
            hashes.append(hash_.digest())
        for digest in hashes:  # after the loop, so that no request is taken for another one of this call
            self._texts.keep(digest)


class _Texts:
    """The latest ``count`` hashes of texts. A hash is kept once for each request with this text."""

    def __init__(self, count: int):
        self._count = count
        self._hashes: OrderedDict[int, bytes] = OrderedDict()  # by number, oldest first
        self._numbers: dict[bytes, deque[int]] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._hashes)

    def keep(self, text: bytes) -> None:
        self._hashes[self._next] = text
        self._numbers.setdefault(text, deque()).append(self._next)
        self._next += 1
        if len(self._hashes) > self._count:
            _, oldest = self._hashes.popitem(last=False)
            self._numbers[oldest].popleft()
            self._tidy(oldest)

    def remove(self, text: bytes) -> bool:
        """Remove the latest request of this text. Return whether there was one."""
        if text not in self._numbers:
            return False
        del self._hashes[self._numbers[text].pop()]
        self._tidy(text)
        return True

    def _tidy(self, text: bytes) -> None:
        if not self._numbers[text]:
            del self._numbers[text]


def _start_snapshots(proposer: PoolProposer, path: Path, seconds: float) -> None:
    """Start a thread that writes the proposer's pool to ``path`` every ``seconds``, and when the proposer or the
    process ends.

    The thread is not a daemon, so the process waits for it. It notices the end by looking at the main thread, because
    forked processes run no exit handlers.
    """
    if not path.parent.is_dir():
        raise ValueError(f"{PREFIX}SNAPSHOT={path}: there is no folder {path.parent}")
    pool, main, dropped = proposer.pool, threading.main_thread(), threading.Event()
    weakref.finalize(proposer, dropped.set)

    def write() -> None:
        saved, due, is_over = pool.observations, time.monotonic() + seconds, False
        while not is_over:
            is_over = dropped.wait(POLL_SECONDS) or not main.is_alive()
            if not is_over and time.monotonic() < due:
                continue
            due = time.monotonic() + seconds
            learned = pool.observations
            if learned == saved:
                continue
            try:
                pool.save(path)
                saved = learned
            except OSError as error:  # a full disk must not end the service; the next attempt may succeed
                _logger.warning("The pool could not be written to %s: %s", path, error)

    threading.Thread(target=write, name="lookahead-snapshots").start()
