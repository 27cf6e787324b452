"""Texts that one thread decodes together: they join and leave between steps."""

import copy
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from numbers import Integral
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import BaseStreamer

from lookahead.compat.loops import own_loop
from lookahead.engine.call import Decoding
from lookahead.engine.engine import Lookahead, check_source
from lookahead.engine.loop import decoding
from lookahead.engine.recording import RecordingStreamer
from lookahead.engine.sampling import NewTokensProcessor
from lookahead.guessing.combine import Ledger
from lookahead.guessing.source import GuessSource
from lookahead.passes.runner import Output, Pass
from lookahead.passes.sharing import run_together
from lookahead.stats import Stats
from lookahead.wrapping import engine_of

__all__ = ["NewTokensProcessor", "RecordingStreamer", "Sequences", "seeded"]

logger = logging.getLogger(__name__)


class Sequences:
    """Continuous batching: texts that a wrapped model decodes together, each as `generate` would write it alone.

    A pass over several texts takes little longer than over one. So each step runs one pass for all running texts, if
    passes are fused, and each text advances as far as its own guesses were right.

    Any thread may submit and cancel; only one at a time may step.
    """

    def __init__(self, model: PreTrainedModel):
        """Raises TypeError if the model is not wrapped, or is a PEFT model, whose base model is."""
        if hasattr(model, "get_base_model"):
            raise TypeError(f"give Sequences the base model of this {type(model).__name__}: model.get_base_model()")
        engine_of(model)
        self._model = model
        self._submitted: deque[_Text] = deque()
        self._texts: list[_Text] = []  # running texts, in their order
        self._cancelled: deque[Future] = deque()
        # Gains of texts' own sources, by the ledger of the wrap's sources, and by their own classes.
        self._ledgers: WeakKeyDictionary[Ledger, dict[tuple[type, ...], Ledger]] = WeakKeyDictionary()
        self._seconds = 0.0  # of the last step
        self._stepping = threading.Lock()

    def __len__(self) -> int:
        """How many texts have not ended."""
        return len(self._submitted) + len(self._texts)

    def submit(
        self,
        input_ids: torch.Tensor,
        *,
        seed: int | None = None,
        source: GuessSource | Sequence[GuessSource] = (),
        streamer: BaseStreamer | None = None,
        **options: Any,
    ) -> Future:
        """Decode a text in the next steps. Returns a future of the result or error of `generate`.

        A text begins with the next step. Prompt, settings and lists are copied now, except the model's own settings.
        If the model's own decoding serves a text (`Lookahead.report`), one step writes all of it; several texts that
        begin together are then sampled together, after ``seed``.

        input_ids: int64 [1, n]; or [texts, n], of texts that begin together.
        seed: a text is sampled as after ``torch.manual_seed(seed)``, the next one of several as after seed + 1. By
            default, torch draws a number now.
        source: more sources of guesses, only for this text.
        streamer: as for `generate`. A RecordingStreamer also gets the steps.
        options: other arguments of `generate`. With ``prefill_chunk_size``, a step prefills this many tokens of a
            prompt, so that a long prompt does not block the other texts; by default, it prefills a whole prompt.

        Raises ValueError for ``custom_generate`` and ``assistant_model``, ``stop_strings`` without a ``tokenizer``, a
        seed that torch does not take, and a source that cannot guess for the model.
        Raises TypeError for other arguments of a wrong type, and if the model has been unwrapped.
        """
        for name in ("custom_generate", "assistant_model"):
            if options.get(name) is not None:
                raise ValueError(
                    f"a text that is submitted takes no {name}: give a source of guesses, or call generate()"
                )
        engine_of(self._model)
        if not (isinstance(input_ids, torch.Tensor) and input_ids.ndim == 2):
            raise TypeError(f"input_ids={input_ids!r:.80} must be a tensor [texts, n]")
        if streamer is not None and not (hasattr(streamer, "put") and hasattr(streamer, "end")):
            raise TypeError(f"streamer={streamer!r:.80} must be a streamer, such as TextIteratorStreamer")
        if seed is None:
            seed = int(torch.randint(2**62, (), device="cpu"))
        if not (isinstance(seed, Integral) and -(2**63) <= seed < 2**64):
            raise ValueError(f"seed={seed!r} must be a whole number in -2**63..2**64-1")
        sources = list(source) if isinstance(source, Iterable) else [source]
        for one in sources:
            check_source(one)
            one.check_model(self._model)
        settings = options.get("generation_config") or self._model.generation_config
        if options.get("stop_strings") or getattr(settings, "stop_strings", None):
            from lookahead.compat.stop_strings import as_criterion  # other texts end without them

            options = as_criterion(self._model, options)
        options = {name: _copied(value) for name, value in options.items()}
        begin = partial(self._begin, input_ids.clone(), int(seed), sources, streamer, options)
        self._submitted.append(text := _Text(begin))
        return text.future

    def chunk_size(self, most: int) -> int | None:
        """Return a ``prefill_chunk_size`` of at most ``most`` tokens, with which a text does not depend on where
        chunks begin, for example on which part of its prompt is already cached.

        It is a number of tokens that a fused pass can prefill, because fused passes round a row the same in any
        company. None if fused passes cannot prefill: prompts must then be prefilled whole.
        """
        engine = engine_of(self._model)
        if engine.adapter is None:
            return None
        runner = engine.find_runner(self._model)
        runner.end()
        return min(most, runner.longest_prompt) or None

    def cancel(self, future: Future) -> None:
        """Let a text end with a CancelledError, at the next step or at the end of this one. No effect once it has
        ended."""
        if not future.cancel():
            self._cancelled.append(future)

    def step(self, weights_may_change: bool = True) -> bool:
        """Start submitted texts and prefill chunks of their prompts; then run a step of all others.

        Prompts are prefilled in the order of their texts: one chunk, and more for as long as the last step took.
        So no text waits longer for its first token than twice the time of its prompt and earlier ones, unless prompts
        have no chunks (``prefill_chunk_size``).

        weights_may_change: whether the model may have changed since the last step. False saves half a millisecond;
            a change is then noticed within a few steps.

        Returns whether there are texts that have not ended. Raises RuntimeError if a step is under way, in another
        thread or around this callback. An interrupt (KeyboardInterrupt) ends all texts.
        """
        if not self._stepping.acquire(blocking=False):
            raise RuntimeError("a step is under way: one thread at a time may call step(), and no callback in it")
        try:
            self._take_in()
            self._end_cancelled()
            with torch.no_grad():  # as generate() decodes
                self._read()
                began = perf_counter()
                live = [text for text in self._texts if text.is_live]
                wanted = [text.wanted for text in live if text.wanted is not None]
                for text, output in zip(live, run_together(wanted, weights_may_change), strict=True):
                    text.go_on(output)
                self._seconds = perf_counter() - began
            self._end_cancelled()  # what callbacks have cancelled
        except BaseException as error:  # an interrupt: how far the texts are is unknown
            for text in self._texts:
                text.end(error)
            raise
        finally:
            self._texts = [text for text in self._texts if not text.future.done()]
            self._stepping.release()
        return len(self) > 0

    def _take_in(self) -> None:
        """Let what was submitted begin."""
        while self._submitted:
            text = self._submitted.popleft()
            if text.future.set_running_or_notify_cancel():
                self._texts.append(text)

    def _end_cancelled(self) -> None:
        cancelled = {self._cancelled.popleft() for _ in range(len(self._cancelled))}
        for text in self._texts:
            if text.future in cancelled:
                text.end(CancelledError())

    def _read(self) -> None:
        began = perf_counter()
        while reading := next((text for text in self._texts if text.is_reading), None):
            reading.go_on()
            self._take_in()  # a streamer may have submitted the next one, now that this prompt is read
            if perf_counter() - began >= self._seconds:
                break

    def close(self) -> None:
        """Cancel all texts. While a step is under way, they end with it, or with the next one."""
        for text in [*self._submitted, *self._texts]:
            self.cancel(text.future)
        if not self._stepping.locked():
            with suppress(RuntimeError):  # another thread was faster
                self.step()

    def _begin(
        self,
        input_ids: torch.Tensor,
        seed: int,
        sources: list[GuessSource],
        streamer: BaseStreamer | None,
        options: dict,
    ) -> Decoding:
        """Return the call that generate() prepared."""
        engine, model = engine_of(self._model), self._model
        own = engine
        if sources:
            kind, known = tuple(map(type, sources)), self._ledgers.setdefault(engine.ledger, {})
            own = replace(engine, source=[*engine.sources, *sources], stats=Stats(), last=Stats())
            own.ledger = known.setdefault(kind, own.ledger)

        def plain(*args: Any, **given: Any) -> Any:
            with seeded(seed, model.device):
                return own_loop(model)(*args, **given)

        def prepared(_: PreTrainedModel, ids: torch.Tensor, **given: Any) -> list[Decoding]:
            if (beams := given["generation_config"].num_beams) > 1:
                raise ValueError(f"num_beams={beams}: a text that is submitted is not searched for by beams")
            seeds = [(seed + number) % 2**64 for number in range(len(ids))]
            return [decoding(own, plain, model, ids, streamer=streamer, seeds=seeds, **given)]

        call: Decoding = model.generate(input_ids=input_ids, streamer=streamer, custom_generate=prepared, **options)[0]  # type: ignore[operator]  # a method
        return call if own is engine else _counted(engine, own, call)


def _counted(engine: Lookahead, own: Lookahead, call: Decoding) -> Decoding:
    """Count the call of an engine with more sources as a call of ``engine``."""
    with engine.call():
        try:
            return (yield from call)
        finally:
            engine.add(own.stats)


class _Text:
    """What was submitted, step by step."""

    def __init__(self, begin: Callable[[], Decoding]):
        self.future: Future = Future()
        self.wanted: Pass | None = None
        """The next pass; None until the prompt is prefilled."""
        self._begin = begin
        self._call: Decoding | None = None

    @property
    def is_reading(self) -> bool:
        return self.wanted is None and not self.future.done()

    @property
    def is_live(self) -> bool:
        return self.wanted is not None and not self.future.done()

    def go_on(self, output: Output | Exception | None = None) -> None:
        """Continue until the next pass of a step, or until a chunk is prefilled. output: of the last pass."""
        if isinstance(output, Exception):
            return self.end(output)
        try:
            self._call = self._call or self._begin()
        except StopIteration as error:  # of a callback; asyncio would wait for ever for a future that raises it
            return self.end(RuntimeError(f"a callback raised {error!r}"))
        except Exception as error:
            return self.end(error)
        try:
            self.wanted = next(self._call) if output is None else self._call.send(output)
        except StopIteration as end:
            self.future.set_result(end.value)
        except Exception as error:
            self.end(error)

    def end(self, error: BaseException) -> None:
        """Fail with this error, and clean up. No effect once the text has ended."""
        try:
            if self._call is not None:
                self._call.close()
        except Exception as another:  # of a source that ends: it must not take other texts with it
            logger.warning("a text that failed with %r could not be cleaned up: %r", error, another)
        finally:
            if not self.future.done():
                self.future.set_exception(error)


def _copied(value: Any) -> Any:
    """A copy of what a caller may change before the text begins. A cache stays the caller's, who wants it filled."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, GenerationConfig):
        return copy.deepcopy(value)
    if type(value) is list:
        return list(map(_copied, value))
    if type(value) is dict:
        return {key: _copied(part) for key, part in value.items()}
    return copy.copy(value) if isinstance(value, list) else value  # processors and criteria stay the caller's, too


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's generators within the block, and restore them afterwards."""
    with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
        torch.manual_seed(seed)
        yield
