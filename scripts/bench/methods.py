"""The methods of the benchmark, and one timed call of each."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import BatchEncoding, CompileConfig, GenerationConfig, PreTrainedModel, StaticCache

import lookahead
from bench.peer_process import Peer, worker_command
from bench.timing import timed
from lookahead import Lookahead, LookaheadConfig, NgramPool
from lookahead.tools.loading import load

PLAIN = ("plain", "static-compiled", "prompt-lookup", "assisted")
LOOKAHEAD = {
    "steps-of-one": {"budget": 0, "window_size": 0},
    "steps-of-one-torch": {"budget": 0, "window_size": 0, "cpu_kernels": False},
    "jacobi": {"strategy": "jacobi", "budget": 16},
    "lookahead-5-5-5": {"window_size": 5, "ngram_size": 5, "budget": 5},
    "lookahead-15-5-15": {"window_size": 15, "ngram_size": 5, "budget": 15},
    "auto": {},
    "auto-shared": {},
    "auto-torch": {"cpu_kernels": False},
    "steps-of-one-compiled": {"budget": 0, "window_size": 0, "compile_passes": True},
    "auto-compiled": {"compile_passes": True},
    "auto-compiled-shared": {"compile_passes": True},
    "auto-graphs": {"cuda_graphs": True},
}
SHARED = ("auto-shared", "auto-compiled-shared")
PEERS = {  # the environment, and what its worker calls the method
    "lade-15-5-15": ("lade", "lade-15-5-15"),
    "lade-plain": ("lade", "plain"),
    "vllm-plain": ("vllm", "plain"),
    "vllm-ngram": ("vllm", "ngram"),
    "vllm-suffix": ("vllm", "suffix"),
}
METHODS = (*PLAIN, *LOOKAHEAD, *PEERS)
KEEP_DRAWS = ("plain", "static-compiled", *LOOKAHEAD)  # they draw once a token from the seed, as plain decoding
DEFAULT = {
    "cpu": ("plain", "prompt-lookup", "steps-of-one", "auto", "auto-compiled"),
    "cuda": ("plain", "static-compiled", "prompt-lookup", "steps-of-one", "auto", "auto-graphs"),
}
GUESS_AT_ONCE = ("prompt-lookup", "assisted")  # in the first pass, which so is a step, too


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in what runs longer."""

    def ring(*_) -> None:
        raise TimeoutError(f"took more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1)  # again each second: some code swallows exceptions
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def count_passes(model: torch.nn.Module) -> Iterator[SimpleNamespace]:
    """Counts a model's forward passes (passes), and the seconds until the second of them begins (first_seconds)."""
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


def outcome(ids: list[int], seconds: float, stepped: int | None = None, **known) -> dict:
    """What `Subject.call` returns. stepped: all tokens but the first, if not given."""
    unknown = dict.fromkeys(("first_seconds", "steps", "drafted", "accepted", "forward_seconds"))
    return {"ids": ids, "seconds": seconds, "stepped": len(ids) - 1 if stepped is None else stepped, **unknown, **known}


class Subject:
    """A model to decode with: plain, wrapped, and behind its peers."""

    def __init__(
        self, name: str, dtype: str, device: str, methods: list[str], assistant: str | None, peers: Path | None,
        timeout: float,
    ):  # fmt: skip
        self.plain: PreTrainedModel = load(name, dtype, device)[0]
        # Every method is to decode by one rule: neither a top-p nor a penalty that the model's folder may ask for.
        ends = self.plain.generation_config.eos_token_id
        pad = ends[0] if isinstance(ends, list) else ends
        self.plain.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=pad)
        self.assistant = load(assistant, dtype, device)[0] if "assisted" in methods else None
        self.peers = {}
        for method in [method for method in methods if method in PEERS]:
            library, its_name = PEERS[method]
            threads = torch.get_num_threads()
            command = worker_command(peers, f"{library}_worker.py", name, dtype, threads, its_name)
            self.peers[method] = Peer(command, timeout)
        self._timeout = timeout

    def __enter__(self) -> "Subject":
        return self

    def __exit__(self, *_) -> None:
        for peer in self.peers.values():
            peer.close()

    def call(
        self, method: str, ids: list[int], options: dict, seed: int, longest: int, engine: Lookahead | None = None
    ) -> dict:
        """One timed call.

        longest: positions of the longest text of the cell, for which a static cache is made.
        engine: of a lookahead method (`Engines`).
        Returns ids (new ones), seconds, first_seconds (until the first token is there and the second pass begins),
        steps (forward passes after the prefill), stepped (tokens that they yielded), drafted and accepted (guesses),
        forward_seconds (of the steps); None for what is not known.
        """
        if method in PEERS:
            return self._by_peer(method, ids, options, seed)
        inputs = as_inputs(ids, self.plain.device)
        if method in LOOKAHEAD:
            return self._by_lookahead(inputs, options, seed, engine)
        if method == "static-compiled":
            return self._compiled(inputs, options, seed, longest)
        guessing = {
            "prompt-lookup": {"prompt_lookup_num_tokens": 10}, "assisted": {"assistant_model": self.assistant},
        }  # fmt: skip
        with count_passes(self.plain) as counted:
            texts, seconds = timed(self.plain, inputs, options | guessing.get(method, {}), seed)
        if method in GUESS_AT_ONCE:
            return outcome(texts[0], seconds, steps=counted.passes, stepped=len(texts[0]))
        first_seconds = counted.first_seconds or seconds  # a text of one token has no second pass
        return outcome(texts[0], seconds, first_seconds=first_seconds, steps=counted.passes - 1)

    def _by_peer(self, method: str, ids: list[int], options: dict, seed: int) -> dict:
        answer = self.peers[method].ask({
            "ids": ids, "max_new_tokens": options["max_new_tokens"], "temperature": options.get("temperature", 0.0),
            "seed": seed,
        })  # fmt: skip
        known = {name: answer.get(name) for name in ("steps", "drafted", "accepted")}
        return outcome(answer["ids"], answer["seconds"], **known)

    def _by_lookahead(self, inputs: BatchEncoding, options: dict, seed: int, engine: Lookahead) -> dict:
        """Passes are not counted: a hook would be in the way of compiling."""
        lookahead.wrap(self.plain, engine.config, engine.pool).lookahead = engine
        try:
            texts, seconds = timed(self.plain, inputs, options, seed)
        finally:
            lookahead.unwrap(self.plain)
        stats = engine.last
        return outcome(
            texts[0], seconds, first_seconds=stats.prefill_seconds, steps=stats.steps, drafted=stats.guesses,
            accepted=stats.accepted.total(), forward_seconds=stats.seconds["forward"],
        )  # fmt: skip

    def _compiled(self, inputs: BatchEncoding, options: dict, seed: int, longest: int) -> dict:
        """Passes are not counted here either."""
        compiled = CompileConfig()
        compiled._compile_all_devices = True  # on the CPU, transformers does not by itself
        cache = StaticCache(config=self.plain.config, max_cache_len=longest)
        with time_limit(self._timeout):
            options = options | {"past_key_values": cache, "compile_config": compiled}
            texts, seconds = timed(self.plain, inputs, options, seed)
        return outcome(texts[0], seconds, steps=len(texts[0]) - 1)


class Engines:
    """What lookahead methods know when a prompt begins, in one cell.

    As in a wrapped model that is used for long, a method keeps what it found out of the pace of its steps, but its pool
    is a fresh one for each call. Those of SHARED are kept over all prompts of a repeat.
    """

    def __init__(self):
        self._kept: dict[tuple[str, int | None], Lookahead] = {}

    def begin(self, method: str, repeat: int) -> Lookahead | None:
        """None if ``method`` is another's. repeat: -1 to warm up."""
        if method not in LOOKAHEAD:
            return None
        config = LookaheadConfig(**LOOKAHEAD[method])
        key = (method, repeat if method in SHARED else None)
        if key not in self._kept:
            self._kept[key] = Lookahead(config, NgramPool(config.pool_memory_mb))
        elif method not in SHARED:
            self._kept[key].pool = NgramPool(config.pool_memory_mb)
        return self._kept[key]
