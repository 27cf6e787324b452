"""Answers that are decoded at the same time, and the one place that calls ``model.generate``."""

import asyncio
import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any

import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)

from lookahead.compat import CACHE
from lookahead.engine import loop
from lookahead.engine.engine import Lookahead
from lookahead.guessing.combine import Ledger
from lookahead.guessing.retrieval import LONGEST, RetrievalSource
from lookahead.models.adapter import context_length
from lookahead.passes.fused import FusedRunner
from lookahead.tools.server.answering import Penalties, Piece, Probabilities, Stop, Writer
from lookahead.tools.server.fields import RefusedError, Wishes
from lookahead.tools.server.prefixes import Prefixes, can_be_cut
from lookahead.tools.server.reading import Prompt, Reader, Written
from lookahead.wrapping import own_loop

MOST_WAITING = 64  # requests that wait for others to end; further ones are refused
LENGTH = 1024  # tokens of an answer, if its request does not say
PORTION = 512  # tokens of a prompt that are read between two steps of other requests


class BusyError(Exception):
    """Too many requests wait already."""


class Workers:
    """Threads that make calls, in their order. None of them keeps Python from ending."""

    def __init__(self, count: int):
        self.count = count
        self.open = 0
        """Calls that have not ended."""
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lock = Lock()
        for _ in range(count):
            Thread(target=self._work, daemon=True).start()

    def submit(self, call: Callable[[], None]) -> None:
        """Call it as soon as a thread is free. It must not raise anything."""
        with self._lock:
            self.open += 1
        self._calls.put(call)

    def _work(self) -> None:
        while True:
            call = self._calls.get()
            try:
                call()
            finally:
                with self._lock:
                    self.open -= 1
            del call


@dataclass
class Answer:
    """An answer under way. tokens: of its prompt. writer: hands on what is written."""

    tokens: int
    stop: Stop
    writer: Writer


class Generations:
    """Decodes answers, several at once where they share their passes. Each has a random generator of its own."""

    def __init__(
        self,
        model: PreTrainedModel,
        reader: Reader,
        written: Written,
        prefixes: Prefixes,
        engine: Lookahead | None,
        assistant: PreTrainedModel | None,
        parallel: int,
    ):
        self._model, self._reader, self._written, self._prefixes = model, reader, written, prefixes
        self._engine, self._assistant = engine, assistant
        self._portion = portion(model, engine)
        if assistant is not None or self._portion is None:
            parallel = 1
        self.workers = Workers(parallel)
        self._of_predictions: Ledger | None = None  # what predictions have earned so far
        self._lock = Lock()  # of what calls share
        self._is_plain = Lock()  # held while the model's own decoding draws from torch's generator
        self._seeds = torch.Generator().manual_seed(int(torch.randint(2**62, ())))

    async def ended(self) -> None:
        """Wait until all calls have ended."""
        while self.workers.open:
            await asyncio.sleep(0.02)

    def begin(
        self, prompts: Sequence[Prompt], wishes: Wishes, send: Callable[[int, Piece | Exception], None]
    ) -> list[Answer]:
        """Decode ``wishes.answers`` to each prompt. Return them in order; ``send`` is told their pieces by number.

        Answers to one prompt follow from seeds that follow each other. ``send`` is called on other threads.
        Raises RefusedError if a prompt does not fit; BusyError.
        """
        context = context_length(self._model)
        for prompt in prompts:
            if not 0 < len(prompt.ids) < context:
                raise RefusedError(
                    f"the prompt has {len(prompt.ids)} tokens: give 1 to {context - 1}, the model's context"
                )
        if self.workers.open >= self.workers.count + MOST_WAITING:
            raise BusyError(f"{self.workers.open} requests are being served: try again later")
        answers: list[Answer] = []
        for prompt in prompts:
            for number in range(wishes.answers):
                seed = None if wishes.seed is None else (wishes.seed + number) % 2**64
                answers.append(self._submit(prompt, wishes, seed, partial(send, len(answers))))
        return answers

    def _submit(
        self, prompt: Prompt, wishes: Wishes, seed: int | None, send: Callable[[Piece | Exception], None]
    ) -> Answer:
        model, tokenizer, length = self._model, self._reader.tokenizer, len(prompt.ids)
        generation = copy.deepcopy(model.generation_config)
        assert isinstance(generation, GenerationConfig)
        generation.max_new_tokens = max(generation.max_new_tokens or 0, LENGTH)
        generation.update(**wishes.settings)
        generation.max_new_tokens = min(generation.max_new_tokens or LENGTH, context_length(model) - length)
        processors: list[LogitsProcessor] = []
        if wishes.presence or wishes.frequency:
            processors.append(Penalties(length, wishes.presence, wishes.frequency))
        probabilities = None
        if wishes.logprobs is not None:
            probabilities = Probabilities(tokenizer, length, wishes.logprobs)
            processors.append(probabilities)
        stop = Stop(tokenizer, length, wishes.stops, generation)
        ends = stop.ask if wishes.one_call else None
        writer = Writer(tokenizer, self._reader.parser(prompt), wishes.stops, probabilities, send, ends)
        if seed is None and self.workers.count > 1:  # where answers are decoded at once, each has a seed
            seed = int(torch.randint(2**62, (), generator=self._seeds))

        def call() -> None:
            try:
                if not stop.asked:  # the client has gone while it waited
                    send(self._decode(prompt, generation, seed, processors, stop, writer, wishes.answers > 1))
            except Exception as error:
                send(error)

        self.workers.submit(call)
        return Answer(length, stop, writer)

    def _decode(
        self,
        prompt: Prompt,
        generation: GenerationConfig,
        seed: int | None,
        processors: list[LogitsProcessor],
        stop: Stop,
        writer: Writer,
        shares: bool,
    ) -> Piece:
        """Decode an answer. shares: whether others go on from the same prompt."""
        with self._lock:
            cache, cached = self._prefixes.take(prompt.ids, shares)
        with self._engine_for(prompt) as engine:
            if cache is not None and len(prompt.ids) - cached > 1 and not can_be_cut(cache):
                self._read(engine, prompt.ids[:-1], cache)
            ids, cache = self._generate(engine, prompt.ids, cache, generation, seed, processors, stop, writer)
        if cache is not None:
            with self._lock:
                self._prefixes.keep(ids, cache)
        conversation = prompt.conversation
        if conversation is not None and writer.is_whole and not stop.asked:
            said = conversation.with_answer(writer.text, writer.calls)
            self._written.keep(said, conversation.rendered, ids)
        return writer.finish(stop.has_ended, cached)

    def _read(self, engine: Lookahead | None, ids: list[int], cache: DynamicCache) -> None:
        """Let the cache hold the beginning of a prompt, and keep a copy of it."""
        generation = copy.deepcopy(self._model.generation_config)
        assert isinstance(generation, GenerationConfig)
        generation.update(max_new_tokens=1, do_sample=False, temperature=None, top_k=None, top_p=None)
        tokenizer = self._reader.tokenizer
        stop, unread = Stop(tokenizer, len(ids), (), generation), Writer(tokenizer, None, (), None, lambda _: None)
        self._generate(engine, ids, cache, generation, 0, [], stop, unread)
        with self._lock:
            self._prefixes.keep_copy(ids, cache)

    @contextmanager
    def _engine_for(self, prompt: Prompt) -> Iterator[Lookahead | None]:
        """The engine of an answer. The text that its client expects is one more source of guesses."""
        engine = self._engine
        if engine is None or not prompt.predicted:
            yield engine
            return
        source = RetrievalSource([[*prompt.ids[-LONGEST:], *prompt.predicted]])
        own = engine.beside(source, self._of_predictions)
        self._of_predictions = own.ledger
        with engine.call():
            try:
                yield own
            finally:
                engine.add(own.stats)

    def _generate(
        self,
        engine: Lookahead | None,
        ids: list[int],
        cache: DynamicCache | None,
        generation: GenerationConfig,
        seed: int | None,
        processors: list[LogitsProcessor],
        stop: Stop,
        writer: Writer,
    ) -> tuple[list[int], Any]:
        """Return a prompt with its answer, and the cache, which holds all of it but the last token."""
        model = self._model
        inputs = torch.tensor([ids], device=model.device)
        options: dict[str, Any] = {
            "input_ids": inputs,
            "attention_mask": torch.ones_like(inputs),
            "generation_config": generation,
            "stopping_criteria": StoppingCriteriaList([stop]),
        }
        if processors:
            options["logits_processor"] = LogitsProcessorList(processors)
        if cache is not None:
            options[CACHE], generation.return_dict_in_generate = cache, True
        if self.workers.count == 1 or engine is None or seed is None:
            more = {} if self._assistant is None else {"assistant_model": self._assistant}
            with seeded(seed, model.device):
                output: Any = model.generate(**options, **more, streamer=writer)  # type: ignore[operator]  # a method
        else:
            generation.prefill_chunk_size = self._portion
            output = model.generate(  # type: ignore[operator]
                **options, custom_generate=partial(self._decode_in_company, engine, seed, writer)
            )
        if cache is None:
            return output[0].tolist(), None
        return output.sequences[0].tolist(), cache

    def _decode_in_company(
        self,
        engine: Lookahead,
        seed: int,
        writer: Writer,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        **kwargs: Any,
    ) -> Any:
        """Decode one of several calls that share their passes."""

        def plain(*args: Any, **options: Any) -> Any:
            with self._is_plain, seeded(seed, model.device):
                return own_loop(model)(*args, **options)

        writer.put(input_ids)  # as generate() does it for loops of its own
        return loop.run(engine, plain, model, input_ids, **kwargs, seeds=[seed], streamer=writer)  # type: ignore[arg-type]


def portion(model: PreTrainedModel, engine: Lookahead | None) -> int | None:
    """Return how many tokens of a prompt are read at once, where calls in several threads share their passes.

    As many as passes of our own take: these round a row alike in any company, so a prompt that goes on from an earlier
    text holds the numbers of one that is read as a whole.
    None where calls share no passes.
    """
    if engine is None or engine.adapter is None:
        return None
    runner = engine.find_runner(model)
    runner.end()
    return min(PORTION, runner.most_read) if isinstance(runner, FusedRunner) else None


@contextmanager
def seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    """Set torch's generators in the block. Later requests without a seed draw as if it had not been."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
        torch.manual_seed(seed)
        yield
