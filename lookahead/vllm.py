"""The n-gram pool as a speculative proposer of vLLM, by its ``custom_class`` interface; see docs/vllm.md.

    LLM(model, speculative_config={"method": "custom_class", "model": "lookahead.vllm.PoolProposer",
                                   "num_speculative_tokens": 16})

vLLM verifies a chain of guesses for each request and decides what is written; this class drafts the chains, and learns
from prompts and texts as they come. One pool serves all requests of an engine. It is set up by environment variables,
which vLLM's processes inherit:

LOOKAHEAD_VLLM_POOL               file of the pool to start from; without it, an empty one
LOOKAHEAD_VLLM_MEMORY_MB          MiB of an empty pool, 64 if not given
LOOKAHEAD_VLLM_FREE_ROWS          how cheap a drafted token is on this machine, 12 if not given: see `break_even`
LOOKAHEAD_VLLM_MIN_PROBABILITY    below which a token is not drafted however cheap it is, 0.4 if not given
LOOKAHEAD_VLLM_SNAPSHOT           file that the pool is written to now and then, and when the process ends
LOOKAHEAD_VLLM_SNAPSHOT_SECONDS   how often that is, 300 if not given

Neither vLLM nor anything that it brings is imported here.
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

from lookahead.guessing.pool import PoolSource
from lookahead.guessing.source import Limits
from lookahead.vocabulary import vocabulary_fingerprint
from ngram_pool import NgramPool, Source
from ngram_pool.kernels import LONGEST

PREFIX = "LOOKAHEAD_VLLM_"
FADE = 0.98  # a pass, of what was written lately
POLL_SECONDS = 0.2  # seconds between looks at whether the process has ended

_logger = logging.getLogger("vllm.lookahead")  # below vLLM's, which shows what is logged


@dataclass(frozen=True)
class Settings:
    """What the environment variables say; see the head of this module."""

    pool: Path | None = None
    memory_mb: float = 64.0
    free_rows: float = 12.0
    min_probability: float = 0.4
    snapshot: Path | None = None
    snapshot_seconds: float = 300.0

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "Settings":
        """Raises ValueError, naming the variable, for one that is not known, a bad value, or two that contradict."""
        given = {name: value for name, value in environment.items() if name.startswith(PREFIX)}
        known = {PREFIX + field.upper(): field for field in cls.__dataclass_fields__}
        for name in given:
            if name not in known:
                raise ValueError(f"{name} is not a setting: there are {', '.join(known)}")
        values: dict[str, Any] = {}
        for name, value in given.items():
            field = known[name]
            values[field] = Path(value) if field in ("pool", "snapshot") else _number(name, value)
            if not value:
                raise ValueError(f"{name} is empty: name a file, or leave it out")
        if "pool" in values and "memory_mb" in values:
            raise ValueError(f"{PREFIX}POOL brings a table of its own size: leave out {PREFIX}MEMORY_MB")
        if "snapshot_seconds" in values and "snapshot" not in values:
            raise ValueError(f"{PREFIX}SNAPSHOT_SECONDS needs {PREFIX}SNAPSHOT, the file to write")
        settings = cls(**values)
        if not 0 < settings.snapshot_seconds < math.inf:
            raise ValueError(
                f"{PREFIX}SNAPSHOT_SECONDS has to be a finite number above 0, got {settings.snapshot_seconds:g}"
            )
        if settings.free_rows < 0:
            raise ValueError(f"{PREFIX}FREE_ROWS has to be 0 or more, got {settings.free_rows:g}")
        if not 0 <= settings.min_probability <= 1:
            raise ValueError(f"{PREFIX}MIN_PROBABILITY has to lie in 0..1, got {settings.min_probability:g}")
        return settings


def _number(name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if math.isnan(number):
        raise ValueError(f"{name} has to be a number, got {value!r}")
    return number


def break_even(requests: int, free_rows: float) -> float:
    """Probability of being accepted above which a drafted token saves time where ``requests`` are decoded together.

    A pass over n rows takes about as long as free_rows + n times what each row adds. So one row more takes the time in
    which 1 / (free_rows + n) of a pass would be done, and a plain pass writes a token for each request. That is
    requests / (free_rows + n) tokens lost, which is returned for n = requests: the more requests share a pass, the
    surer a guess has to be. With no free rows nothing is drafted, with infinitely many everything. Where drafts make
    decoding g times as fast as plain passes, time is worth g times as many tokens (see `lookahead.guessing.budget`).
    """
    return requests / (free_rows + requests)


class PoolProposer:
    """Drafts for vLLM, which makes one on each rank of tensor parallelism, and for each engine of data parallelism.

    The same calls give the same drafts, on every rank: nothing depends on time, chance or addresses.

    **Which request is which** vLLM does not say, nor which have ended or wait after a preemption, and rows of the batch
    move. What has been learned of a request is a function of its text alone: all of it, as far as it was seen. So all
    that is kept is a hash of each text (xxh3-128). In the next call a request's text is what it was and the tokens
    just sampled; where the hash of the former is among those kept, only the latter are new, in whichever row, after
    however long. Where it is not, the request is new, and the former is its prompt. Two requests of the same text are
    kept as two, and it does not matter which is which.

    Hashes of requests that ended look like those of requests that wait. `max_num_seqs` requests run at most, and those
    preempted come back before others begin (with vLLM's scheduling by arrival), so twice as many hashes are kept, the
    latest, and no request that comes back is forgotten.
    """

    def __init__(self, vllm_config: Any):
        """vllm_config: vLLM's VllmConfig, for the method "custom_class".

        Raises ValueError for settings, a pool or prompts (of embeddings) that will not do, PoolFileError for a file
        that is no pool of the model's vocabulary, FileNotFoundError.
        """
        speculative = getattr(vllm_config, "speculative_config", None)
        if speculative is None:
            raise TypeError(
                "PoolProposer is made by vLLM, which hands it a VllmConfig: give vLLM the speculative_config "
                '{"method": "custom_class", "model": "lookahead.vllm.PoolProposer", "num_speculative_tokens": 16}'
            )
        self._model = vllm_config.model_config
        if self._model.enable_prompt_embeds:
            raise ValueError("prompts of embeddings have no ids to learn from: leave out enable_prompt_embeds")
        self._most = speculative.num_speculative_tokens
        self._settings = Settings.from_environment()
        self._texts = _Texts(2 * vllm_config.scheduler_config.max_num_seqs)
        self.pool = self._make_pool()
        self._tokens = self._plain = 1.0  # written lately, and what plain passes would have written in the same time
        self._drafted = 0  # tokens, that the next pass verifies
        # Where a request comes close to the model's longest text, vLLM drafts for none, as a draft model could not read
        # on. This proposer reads no positions, and keeps each draft to what there is room for.
        speculative.draft_model_config = copy.copy(speculative.draft_model_config)
        speculative.draft_model_config.max_model_len = self._model.max_model_len + self._most
        parallel = vllm_config.parallel_config
        if self._settings.snapshot and parallel.rank % parallel.tensor_parallel_size == 0:
            path = self._settings.snapshot
            if parallel.data_parallel_index:  # each engine learns from requests of its own
                path = path.with_name(f"{path.stem}-{parallel.data_parallel_index}{path.suffix}")
            _start_snapshots(self, path, self._settings.snapshot_seconds)

    def _vocabulary(self) -> str | None:
        """Fingerprint of the model's tokenizer, None where there is none that transformers can load."""
        if self._model.skip_tokenizer_init:
            return None
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                self._model.tokenizer,
                revision=self._model.tokenizer_revision,
                trust_remote_code=self._model.trust_remote_code,
            )
        except (ImportError, OSError, ValueError) as error:
            _logger.warning("Pools are not checked to be of the model's vocabulary, for want of a tokenizer: %s", error)
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
                f"{self._model.get_vocab_size()}: build the pool with the model's tokenizer"
            )
        _logger.info("Guesses start from %s: %s observations", self._settings.pool, f"{pool.observations:,}")
        return pool

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """There is no draft model; vLLM calls this all the same."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Draft tokens to follow the texts of the batch: for each of its n rows at most num_speculative_tokens, and
        none that the model has no room for.

        sampled_token_ids: for each row the tokens that this step has written; none while a prompt is being read.
        num_tokens_no_spec: int [rows], rows >= n, the length of each row's text, the tokens just sampled included.
        token_ids_cpu: int [rows, longest], the texts; what stands behind a text's length is no part of it.
        slot_mappings: of no use here.
        """
        written = [len(tokens) for tokens in sampled_token_ids]
        texts = [token_ids_cpu[row, : num_tokens_no_spec[row]] for row in range(len(written))]
        self._learn(texts, written)
        threshold = self._threshold(sum(new > 0 for new in written), sum(written))
        # The step that verifies a draft writes a token more.
        rooms = [
            self._model.max_model_len - len(text) - 1 if new else 0 for text, new in zip(texts, written, strict=True)
        ]
        limits = Limits(rooms, self._most, threshold, is_chain=True)
        drafts = [tree.tokens.tolist() for tree in PoolSource(self.pool).propose(texts, limits)]
        self._drafted = sum(map(len, drafts))
        return drafts

    def _threshold(self, requests: int, tokens: int) -> float:
        """Least probability of a drafted token, after a pass that wrote so many ``tokens`` of so many requests."""
        least = break_even(max(requests, 1), self._settings.free_rows)
        if requests:
            self._tokens = FADE * self._tokens + tokens
            self._plain = FADE * self._plain + requests + self._drafted * least
        # Plain passes are always to be had.
        return max(least * max(self._tokens / self._plain, 1.0), self._settings.min_probability)

    def _learn(self, texts: list[np.ndarray], written: list[int]) -> None:
        """Learn the prompts of requests not seen before and the last ``written`` tokens of each text, and keep what is
        now known of every one."""
        hashes = []
        for text, new in zip(texts, written, strict=True):
            known = len(text) - new
            hash_ = xxhash.xxh3_128(text[:known].data)
            if not self._texts.take(hash_.digest()):
                self.pool.learn(text[:known], Source.PROMPT)
            if new:
                recent = min(known, LONGEST)
                self.pool.follow(text[known - recent :], start=recent)
                hash_.update(text[known:].data)
            hashes.append(hash_.digest())
        for digest in hashes:  # only now, for no request may be taken for another one of this call
            self._texts.keep(digest)


class _Texts:
    """Hashes of texts, one for each request, however many have the same text; the latest ``most`` of them."""

    def __init__(self, most: int):
        self._most = most
        self._hashes: OrderedDict[int, bytes] = OrderedDict()  # by number, which is the age
        self._numbers: dict[bytes, deque[int]] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._hashes)

    def keep(self, text: bytes) -> None:
        self._hashes[self._next] = text
        self._numbers.setdefault(text, deque()).append(self._next)
        self._next += 1
        if len(self._hashes) > self._most:
            _, oldest = self._hashes.popitem(last=False)
            self._numbers[oldest].popleft()
            self._tidy(oldest)

    def take(self, text: bytes) -> bool:
        """Whether a request of this text is kept, the latest of which is no longer."""
        if text not in self._numbers:
            return False
        del self._hashes[self._numbers[text].pop()]
        self._tidy(text)
        return True

    def _tidy(self, text: bytes) -> None:
        if not self._numbers[text]:
            del self._numbers[text]


def _start_snapshots(proposer: PoolProposer, path: Path, seconds: float) -> None:
    """Write the proposer's pool to ``path`` every so many ``seconds``, and when the proposer or the process ends.

    The thread is no daemon, so the process waits for it, and it looks whether the main thread has ended: so it sees the
    end also in processes that are forked, which run no exit handlers.
    """
    if not path.parent.is_dir():
        raise ValueError(f"{PREFIX}SNAPSHOT={path}: there is no folder {path.parent}")
    pool, main, dropped = proposer.pool, threading.main_thread(), threading.Event()
    weakref.finalize(proposer, dropped.set)

    def write() -> None:
        saved, due, ends = pool.observations, time.monotonic() + seconds, False
        while not ends:
            ends = dropped.wait(POLL_SECONDS) or not main.is_alive()
            if not ends and time.monotonic() < due:
                continue
            due = time.monotonic() + seconds
            learned = pool.observations
            if learned == saved:
                continue
            try:
                pool.save(path)
                saved = learned
            except OSError as error:  # a full disk must not end the service, and the next time it may be otherwise
                _logger.warning("The pool could not be written to %s: %s", path, error)

    threading.Thread(target=write, name="lookahead-snapshots").start()
