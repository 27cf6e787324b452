"""The methods of the benchmark, and one timed call of each."""

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import BatchEncoding, CompileConfig, GenerationConfig, PreTrainedModel, StaticCache

import lookahead
from bench.peer_process import Peer, worker_command
from bench.recycling import RACER_NODES, RECYCLED_NODES, RacerSource, TokenRecyclingSource
from bench.timing import time_limit, timed
from lookahead import DraftModelSource, GuessSource, Lookahead, LookaheadConfig, NgramPool, PoolSource
from lookahead.compat import CACHE
from lookahead.tools.loading import load

PLAIN = ("plain", "static-compiled", "prompt-lookup", "assisted")
BUDGETS = (16, 32, 64, 127)
LOOKAHEAD = {
    "steps-of-one": {"budget": 0, "window_size": 0},
    "steps-of-one-torch": {"budget": 0, "window_size": 0, "cpu_kernels": False},
    "jacobi": {"strategy": "jacobi", "budget": 16},
    "lookahead-5-5-5": {"window_size": 5, "ngram_size": 5, "budget": 5},
    "lookahead-15-5-15": {"window_size": 15, "ngram_size": 5, "budget": 15},
    "auto": {},
    "auto-shared": {},
    "auto-torch": {"cpu_kernels": False},
    "auto-packed": {"pack_weights": True},
    "auto-unpacked": {"pack_weights": False},
    "auto-graphs": {"cuda_graphs": True},
    **{f"budget-{n}": {"budget": n, "window_size": 0} for n in BUDGETS},
    **{f"graphs-{n}": {"budget": n, "window_size": 0, "cuda_graphs": True} for n in BUDGETS},
    "draft": {},
    "auto-draft": {},
    "token-recycling": {"window_size": 0},
    "token-recycling-80": {"budget": RECYCLED_NODES, "window_size": 0},
    "racer": {"window_size": 0},
    "racer-64": {"budget": RACER_NODES, "window_size": 0},
}
PUBLISHED = {  # sources of guesses, with all their nodes or with those that pay
    "token-recycling": TokenRecyclingSource, "token-recycling-80": TokenRecyclingSource,
    "racer": RacerSource, "racer-64": RacerSource,
}  # fmt: skip
PEERS = {  # (library, method of its worker)
    "lade-15-5-15": ("lade", "lade-15-5-15"),
    "lade-plain": ("lade", "plain"),
    "vllm-plain": ("vllm", "plain"),
    "vllm-ngram": ("vllm", "ngram"),
    "vllm-suffix": ("vllm", "suffix"),
    "vllm-sgl": ("vllm", "sgl"),
    "llama-plain": ("llama", "plain"),
    "llama-ngram-simple": ("llama", "ngram-simple"),
    "llama-ngram-mod": ("llama", "ngram-mod"),
    "llama-q8_0": ("llama", "q8_0"),
    "llama-q4_0": ("llama", "q4_0"),
    "ik-plain": ("llama", "ik-plain"),
    "ik-q8_0": ("llama", "ik-q8_0"),
    "ik-q4_0": ("llama", "ik-q4_0"),
    "openvino-plain": ("openvino", "plain"),
    "openvino-lookup": ("openvino", "prompt-lookup"),
    "economize-lookup": ("economize", "lookup"),
    "flashspec-lookup": ("flashspec", "lookup"),
    "ortgenai-plain": ("ortgenai", "plain"),
    "ortgenai-ngram": ("ortgenai", "ngram"),
}
METHODS = (*PLAIN, *LOOKAHEAD, *PEERS)
KEEP_DRAWS = ("plain", "static-compiled", *LOOKAHEAD)  # methods that draw as plain does, once for each token
DEFAULT = {
    "cpu": ("plain", "prompt-lookup", "steps-of-one", "auto"),
    "cuda": ("plain", "static-compiled", "prompt-lookup", "steps-of-one", "auto", "auto-graphs"),
}
WITH_DRAFT_MODEL = ("assisted", "draft", "auto-draft")  # "draft": without the pool
GUESS_AT_ONCE = ("prompt-lookup", "assisted")  # methods whose first pass verifies guesses, so it counts as a step


@contextmanager
def count_passes(model: torch.nn.Module) -> Iterator[SimpleNamespace]:
    """Count a model's forward passes (passes), and the seconds until the second pass begins (first_seconds)."""
    counted = SimpleNamespace(passes=0, first_seconds=None)
    opened = time.perf_counter()

    def count(*_) -> None:
        counted.passes += 1
        if counted.passes == 2:
            counted.first_seconds = time.perf_counter() - opened

    hook = model.register_forward_pre_hook(count)
    try:
        yield counted
    finally:
        hook.remove()


def as_inputs(ids: list[int], device: torch.device) -> BatchEncoding:
    ids = torch.tensor([ids], device=device)
    return BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})


def forget_settings(model: PreTrainedModel) -> None:
    """Reset the generation settings, such as top-p or a penalty, so that all methods decode by the same rule."""
    ends = model.generation_config.eos_token_id
    pad = ends[0] if isinstance(ends, list) else ends
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=pad)


def twin_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model with the same weights, to be wrapped while the model itself decodes plainly.

    If the model were unwrapped after each call, each call would inspect it again, unlike a user's.
    """
    return copy.deepcopy(model, {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())})


def timed_by(
    engine: Lookahead, model: PreTrainedModel, inputs: BatchEncoding, options: dict, seed: int
) -> tuple[list[list[int]], float]:
    """`timed`, by an engine that keeps its state from call to call. The model stays wrapped with it."""
    if vars(model).get("lookahead") is not engine:
        lookahead.wrap(model, engine.config, engine.pool, engine.source).lookahead = engine
    return timed(model, inputs, options, seed)


def outcome(ids: list[int], seconds: float, stepped: int | None = None, **known) -> dict:
    """Return a result of `Subject.call`. stepped: by default, all tokens except the first."""
    unknown = dict.fromkeys(("first_seconds", "own_seconds", "steps", "drafted", "accepted", "forward_seconds"))
    return {"ids": ids, "seconds": seconds, "stepped": len(ids) - 1 if stepped is None else stepped, **unknown, **known}


class Subject:
    """A model that decodes by every method: plainly, wrapped, and in processes of peers."""

    def __init__(
        self, model: str | PreTrainedModel, dtype: str, device: str, methods: list[str], assistant: str | None,
        peers: Path | None, timeout: float,
    ):  # fmt: skip
        """model: a name or a folder; or, if no method is a peer's, a model in ``dtype`` on ``device``."""
        self.plain: PreTrainedModel = load(model, dtype, device)[0] if isinstance(model, str) else model
        forget_settings(self.plain)
        self._wrapped = twin_of(self.plain) if set(LOOKAHEAD) & set(methods) else None
        guessing = {"prompt-lookup": {"prompt_lookup_num_tokens": 10}}
        self.draft_model = None
        if set(WITH_DRAFT_MODEL) & set(methods):
            self.draft_model = load(assistant, dtype, device)[0]
            self.draft_model.generation_config = self.plain.generation_config
            guessing["assisted"] = {"assistant_model": self.draft_model}
        self._guessing = guessing
        self.peers = {}
        for method in [method for method in methods if method in PEERS]:
            library, its_method = PEERS[method]
            command = worker_command(peers, library, model, dtype, torch.get_num_threads(), its_method)
            self.peers[method] = Peer(command, timeout)
        self._timeout = timeout

    def close(self) -> None:
        """End the peers."""
        for peer in self.peers.values():
            peer.close()

    def call(
        self, method: str, ids: list[int], options: dict, seed: int, longest: int, engine: Lookahead | None = None
    ) -> dict:
        """Make one timed call.

        longest: positions of the longest text of the cell, the size of a static cache.
        engine: for a lookahead method, from `Engines`.
        Returns ids (new ones), seconds, first_seconds (until the first token exists and the second pass begins),
        own_seconds (by a peer's own account), steps (forward passes after the prefill), stepped (tokens from those
        steps), drafted and accepted (guesses), and forward_seconds (of the steps). Unknown figures are None.
        """
        if method in PEERS:
            answer = self.peers[method].ask([ids], options, seed)
            names = ("first_seconds", "own_seconds", "steps", "drafted", "accepted")
            return outcome(answer["ids"][0], answer["seconds"], **{name: answer.get(name) for name in names})
        inputs = as_inputs(ids, self.plain.device)
        if method in LOOKAHEAD:
            return self._by_lookahead(inputs, options, seed, engine)
        if method == "static-compiled":
            return self._compiled(inputs, options, seed, longest)
        with count_passes(self.plain) as counted:
            texts, seconds = timed(self.plain, inputs, options | self._guessing.get(method, {}), seed)
        if method in GUESS_AT_ONCE:
            return outcome(texts[0], seconds, steps=counted.passes, stepped=len(texts[0]))
        first_seconds = counted.first_seconds or seconds  # a text of one token has no second pass
        return outcome(texts[0], seconds, first_seconds=first_seconds, steps=counted.passes - 1)

    def _by_lookahead(self, inputs: BatchEncoding, options: dict, seed: int, engine: Lookahead) -> dict:
        """Passes are not counted, because a hook would prevent fused passes."""
        texts, seconds = timed_by(engine, self._wrapped, inputs, options, seed)
        stats = engine.last
        return outcome(
            texts[0], seconds, first_seconds=stats.prefill_seconds, steps=stats.steps, drafted=stats.guesses,
            accepted=stats.accepted.total(), forward_seconds=stats.seconds["forward"],
        )  # fmt: skip

    def _compiled(self, inputs: BatchEncoding, options: dict, seed: int, longest: int) -> dict:
        """Passes are not counted here, either."""
        compiled = CompileConfig()
        compiled._compile_all_devices = True  # transformers does not compile on the CPU otherwise
        cache = StaticCache(config=self.plain.config, max_cache_len=longest)
        with time_limit(self._timeout):
            options = options | {CACHE: cache, "compile_config": compiled}
            texts, seconds = timed(self.plain, inputs, options, seed)
        return outcome(texts[0], seconds, steps=len(texts[0]) - 1)


class Engines:
    """The engines of the lookahead methods in one cell.

    As in a model that stays wrapped, a method keeps its measurements of step times. But each call begins with a fresh
    pool, except that a method named -shared keeps its pool for all prompts of a repeat.
    """

    def __init__(self, draft_model: PreTrainedModel | None = None):
        self._draft_model = draft_model
        self._kept: dict[tuple[str, int | None], Lookahead] = {}

    def _source(self, method: str) -> GuessSource | list[GuessSource] | None:
        if method in PUBLISHED:
            return PUBLISHED[method]()
        if method not in WITH_DRAFT_MODEL:
            return None
        drafts = DraftModelSource(self._draft_model, LookaheadConfig(**LOOKAHEAD[method]))
        return drafts if method == "draft" else [PoolSource(), drafts]

    def begin(self, method: str, repeat: int) -> Lookahead | None:
        """Return the engine for a call; None if ``method`` is not lookahead's. repeat: -1 to warm up."""
        if method not in LOOKAHEAD:
            return None
        config, shared = LookaheadConfig(**LOOKAHEAD[method]), method.endswith("-shared")
        key = (method, repeat if shared else None)
        if key not in self._kept:
            self._kept[key] = Lookahead(config, NgramPool(config.pool_memory_mb), self._source(method))
        elif not shared:
            self._kept[key].pool = NgramPool(config.pool_memory_mb)
        return self._kept[key]
