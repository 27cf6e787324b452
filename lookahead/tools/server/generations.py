"""Answers that are decoded at the same time, by one thread."""

import asyncio
import copy
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)

from lookahead import Lookahead, RetrievalSource
from lookahead.extending import CACHE, GuessSource, can_be_cut, context_length, vocabulary_of
from lookahead.sequences import Sequences, seeded
from lookahead.tools.server.answering import Penalties, Piece, Probabilities, Stop, Writer
from lookahead.tools.server.fields import RefusedError, Wishes, blamed
from lookahead.tools.server.prefixes import Prefixes
from lookahead.tools.server.reading import Prompt, Reader, Written, too_long
from lookahead.tools.server.thinking import LimitThinking

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from lookahead.tools.server.grammar import Grammars

MOST_WAITING = 64  # requests that wait for others to end; further ones are refused
MOST_ANSWERS = 1024  # answers of requests that have begun or wait, in all; with more, further requests are refused
LENGTH = 1024  # tokens of an answer, if its request does not say
CHUNK_SIZE = 128  # tokens of a prompt that are read between two steps, at most


class BusyError(Exception):
    """Too many requests wait already."""


class Worker:
    """A thread that makes calls, in their order. It does not keep Python from ending."""

    def __init__(self, stack: int = 0) -> None:
        """stack: bytes; 0: as other threads have."""
        self.calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        """None of them may raise anything."""
        others = threading.stack_size(stack)
        try:
            threading.Thread(target=self.work, daemon=True).start()
        finally:
            threading.stack_size(others)

    def work(self) -> None:
        while True:
            call = self.calls.get()
            call()
            del call


@dataclass(eq=False)
class Group:
    """The answers to one request. waiting: beginnings of those that have not begun. under_way: how many have."""

    waiting: deque[Callable[[], None]] = field(default_factory=deque)
    under_way: int = 0


@dataclass
class Answer:
    """An answer under way.

    tokens: of its prompt. writer: hands on what is written. steps: what Python goes through to decode it. text: what it
    waits for.
    """

    tokens: int
    stop: Stop
    writer: Writer
    steps: Generator[Future, Any, Piece]
    text: Future | None = None


class Generations(Worker):
    """Decodes answers, up to ``parallel`` at once where the model is wrapped, and hands on what they say.

    Of the requests that wait, the one with the fewest answers under way is next, and none has all that may be. So a
    request for many long answers stops no other.

    Each answer is a generator of Python's. It yields the future of a text that is to be decoded, and goes on when the
    text is there. All of them run in one thread, which also takes the steps.

    One prompt is read at a time. What it begins with is looked for when its turn comes, so that it finds what those
    before it have read, also where they came together, and are still answered.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        reader: Reader,
        written: Written,
        prefixes: Prefixes,
        engine: Lookahead | None,
        assistant: PreTrainedModel | None,
        parallel: int,
        after_step: Callable[[], None] = lambda: None,
    ):
        """after_step: is called when what was sent need wait no longer: after a step, and with a first token."""
        self._after_step = after_step
        self._model, self._reader, self._written, self._prefixes = model, reader, written, prefixes
        self._assistant = assistant
        settings: Any = model.generation_config
        stops, settings.stop_strings = settings.stop_strings or (), None  # they end answers as those of requests do
        self._stops = (stops,) if isinstance(stops, str) else tuple(stops)
        self._sequences = Sequences(model) if engine is not None and assistant is None else None
        self._chunk_size = None if self._sequences is None else self._sequences.chunk_size(CHUNK_SIZE)
        self._most = 1 if self._sequences is None else parallel
        self._under_way = 0  # answers that have begun
        self._reading: object = None  # of the answer whose prompt is read
        self._turns: deque[Future[None]] = deque()  # of those whose prompts come next
        self._groups: list[Group] = []  # with answers that wait
        self._lock = threading.Lock()
        self.open = self._requests = 0
        """Answers, and requests, that have not ended, under the lock."""
        self._seeds = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
        super().__init__()

    def work(self) -> None:
        while True:
            while self._take_in() or self._let_begin():
                pass
            if self._sequences is not None:
                self._sequences.step(weights_may_change=False)
            self._after_step()

    def _take_in(self) -> bool:
        """Take what another thread has asked. Returns whether there was anything. With nothing to do, wait for it."""
        try:
            call = self.calls.get(block=not (self._under_way or self._groups))
        except Empty:
            return False
        call()
        return True

    def _let_begin(self) -> bool:
        """Let the next answer begin, if one may. Returns whether it did."""
        fewest = min(self._groups, key=lambda group: group.under_way, default=None)
        if fewest is None or self._under_way >= self._most or fewest.under_way >= max(self._most - 1, 1):
            return False
        self._under_way += 1
        fewest.under_way += 1
        begin = fewest.waiting.popleft()
        self._groups.remove(fewest)
        if fewest.waiting:
            self._groups.append(fewest)
        begin()
        self._after_step()
        return True

    async def ended(self) -> None:
        """Wait until all calls have ended."""
        while self.open:
            await asyncio.sleep(0.02)

    def begin(
        self,
        prompts: Sequence[Prompt],
        wishes: Wishes,
        send: Callable[[int, Piece | Exception], None],
        grammars: "Sequence[LLMatcher | None] | None" = None,
    ) -> list[Answer]:
        """Decode ``wishes.answers`` to each prompt. Return them in order; ``send`` is told their pieces by number.

        Answers to one prompt follow from seeds that follow each other. ``send`` is called on another thread.
        grammars: what `grammars` returns of the same prompts; None: they are compiled here, if anything is enforced.
        Raises RefusedError if a prompt does not fit, or a demand cannot be enforced; BusyError.
        """
        context = context_length(self._model)
        for prompt in prompts:
            if not 0 < len(prompt.ids) < context:
                raise too_long(len(prompt.ids), context)
        if self._requests >= self._most + MOST_WAITING or self.open >= MOST_ANSWERS:
            raise BusyError(f"{self._requests} requests are being served: try again later")
        answers, group = list[Answer](), Group()
        if grammars is None and wishes.demand:
            grammars = self.grammars(prompts, self.grammar_texts(prompts, wishes), wishes)
        grammars = [None] * len(prompts) if grammars is None else grammars
        for prompt, grammar in zip(prompts, grammars, strict=True):
            for number in range(wishes.answers):
                seed = None if wishes.seed is None else (wishes.seed + number) % 2**64
                answers.append(self._submit(group, prompt, wishes, grammar, seed, partial(send, len(answers))))
        with self._lock:
            self.open += len(answers)
            self._requests += 1
        self.calls.put(partial(self._groups.append, group))
        return answers

    @cached_property
    def _grammars(self) -> "Grammars":
        return self._reader.grammars(vocabulary_of(self._model))

    def prepare_grammars(self) -> None:
        """Make what all grammars need, if the model's tokenizer can be enforced. No other thread runs meanwhile."""
        with suppress(RefusedError):
            self._grammars.reads  # noqa: B018  (it is kept)

    def grammar_texts(self, prompts: Sequence[Prompt], wishes: Wishes) -> list[str]:
        """Return the grammar of the answers to each prompt, as it is to be compiled.

        Raises RefusedError if a demand cannot be enforced.
        """
        with blamed(wishes.demand.param):
            return [self._grammars.text(wishes.demand, prompt, not wishes.one_call) for prompt in prompts]

    def grammars_of_tools(self, prompt: Prompt, wishes: Wishes) -> list[tuple[int, str, str]]:
        """Return the place and the name of each tool that may be called, and the grammar of a call of it alone."""
        return self._grammars.of_tools(wishes.demand, prompt)

    def grammars(self, prompts: Sequence[Prompt], texts: Sequence[str], wishes: Wishes) -> "list[LLMatcher]":
        """Compile what `grammar_texts` returns. Only one thread may call this. Raises RefusedError as well."""
        compiled: dict[str, LLMatcher] = {}
        with blamed(wishes.demand.param):
            for text, prompt in zip(texts, prompts, strict=True):
                try:
                    compiled[text] = compiled.get(text) or self._grammars.compiled(text)
                except RefusedError:
                    self._grammars.blame_a_tool(wishes.demand, prompt)
                    raise
        return [compiled[text] for text in texts]

    def _submit(
        self,
        group: Group,
        prompt: Prompt,
        wishes: Wishes,
        grammar: "LLMatcher | None",
        seed: int | None,
        send: Callable[[Piece | Exception], None],
    ) -> Answer:
        model, tokenizer, length = self._model, self._reader.tokenizer, len(prompt.ids)
        generation = self._settings()
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
        sources: list[GuessSource] = []
        if prompt.predicted:
            sources.append(RetrievalSource([[*prompt.ids[-RetrievalSource.longest :], *prompt.predicted]]))
        if grammar is not None:
            processor, source = self._grammars.enforce(grammar, length, wishes.demand.param)
            processors.append(processor)
            sources.append(source)
        if prompt.thought is not None and prompt.marks is not None:
            processors.append(LimitThinking(tokenizer, length, prompt.marks, prompt.thought))
        stops = (*wishes.stops, *self._stops)
        stop = Stop(tokenizer, length, stops, generation)
        ends = stop.ask if wishes.one_call else None
        parser = self._reader.parser(prompt)
        writer = Writer(tokenizer, parser, stops, probabilities, send, ends, prompt.goes_on, lambda: not stop.has_ended)
        if seed is None:
            seed = int(torch.randint(2**62, (), generator=self._seeds))
        steps = self._decode(prompt, generation, seed, processors, sources, stop, writer, wishes.answers > 1)
        answer = Answer(length, stop, writer, steps)

        def begin() -> None:
            if stop.asked:  # the client has gone while it waited
                self._end(group)
            else:
                self._go_on(group, answer, send)

        group.waiting.append(begin)
        return answer

    def cancel(self, answer: Answer) -> None:
        """Let an answer end: with its next token, or before the first, whatever is left to read of its prompt."""
        answer.stop.asked = True
        self.calls.put(partial(self._stop_reading, answer))

    def _stop_reading(self, answer: Answer) -> None:
        text = answer.text
        if self._sequences is not None and text is not None and not (text.done() or answer.writer.count):
            self._sequences.cancel(text)

    def _settings(self) -> GenerationConfig:
        """Return a copy of the model's own settings."""
        settings = copy.deepcopy(self._model.generation_config)
        assert isinstance(settings, GenerationConfig)
        return settings

    def _go_on(
        self,
        group: Group,
        answer: Answer,
        send: Callable[[Piece | Exception], None],
        future: Future | None = None,
    ) -> None:
        """Let an answer go on, now that a text is there, until it waits for the next one."""
        answer.text = None  # it knows this answer: together they would keep its cache until Python looks for circles
        try:
            if future is None:
                wanted = next(answer.steps)
            elif future.cancelled():
                wanted = answer.steps.throw(CancelledError())
            elif (error := future.exception()) is not None:
                wanted = answer.steps.throw(error)
            else:
                wanted = answer.steps.send(future.result())
        except StopIteration as end:
            send(end.value)
            self._end(group)
        except CancelledError as error:
            send(error.with_traceback(None))  # which would keep the cache
            self._end(group)
        except Exception as error:
            send(error)
            self._end(group)
        else:
            answer.text = wanted
            wanted.add_done_callback(partial(self._go_on, group, answer, send))
            if answer.stop.asked:  # meanwhile
                self.cancel(answer)

    def _end(self, group: Group) -> None:
        group.under_way -= 1
        self._under_way -= 1
        with self._lock:
            self.open -= 1
            self._requests -= not (group.waiting or group.under_way)

    def _decode(
        self,
        prompt: Prompt,
        generation: GenerationConfig,
        seed: int,
        processors: list[LogitsProcessor],
        sources: list[GuessSource],
        stop: Stop,
        writer: Writer,
        shares: bool,
    ) -> Generator[Future, Any, Piece]:
        """Decode an answer, and return its end. shares: whether others go on from the same prompt."""
        if self._reading is not None:
            turn = Future[None]()
            self._turns.append(turn)
            yield turn
        self._reading = own = object()
        writer.has_read = partial(self._has_read, own)
        cache, cached = taken = self._prefixes.take(prompt.ids, shares, generation.max_new_tokens or 0)
        try:
            if cache is not None and not can_be_cut(cache):
                for end in prompt.ends or (len(prompt.ids) - 1,):
                    if cache is not None and end > cached:
                        cache = yield from self._read(prompt.ids[:end], cache)
            given = generation, seed, processors, sources, stop, writer
            ids, cache = yield from self._generate(prompt.ids, cache, *given)
            if cache is not None:
                self._prefixes.keep(ids, cache)
        except CancelledError:
            if taken[0] is not None and cached:  # it holds what it held
                self._prefixes.keep(prompt.ids[:cached], taken[0])
            raise
        except Exception:
            with suppress(Exception):  # the first error is the one to tell
                writer.flush()
            raise
        finally:
            self._prefixes.give_back(taken[0])
            self._let_read(own)
        conversation = prompt.conversation
        if conversation is not None and writer.is_whole and stop.found is None and not stop.asked:
            said = conversation.with_answer(writer.text, writer.calls)
            self._written.keep(said, conversation.rendered, ids)
        return writer.finish(stop, cached)

    def _has_read(self, own: object) -> None:
        """Hand on the first token before the pass of this step, and let the next prompt be read."""
        self._after_step()
        self._let_read(own)

    def _let_read(self, own: object) -> None:
        """Let the next prompt be read, if the one that was is of this answer."""
        if self._reading is own:
            self._reading = None
            while self._turns and self._reading is None:
                turn = self._turns.popleft()
                if turn.set_running_or_notify_cancel():  # the client may have gone
                    turn.set_result(None)

    def _read(self, ids: list[int], cache: DynamicCache) -> Generator[Future, Any, DynamicCache | None]:
        """Let the cache hold the beginning of a prompt, and keep a copy of it. Return what `_generate` does of it."""
        generation = self._settings()
        generation.update(max_new_tokens=1, do_sample=False, temperature=None, top_k=None, top_p=None)
        tokenizer = self._reader.tokenizer
        stop, unread = Stop(tokenizer, len(ids), (), generation), Writer(tokenizer, None, (), None, lambda _: None)
        _, read = yield from self._generate(ids, cache, generation, 0, [], [], stop, unread)
        if read is not None:
            self._prefixes.keep_copy(ids, read)
        return read

    def _generate(
        self,
        ids: list[int],
        cache: DynamicCache | None,
        generation: GenerationConfig,
        seed: int,
        processors: list[LogitsProcessor],
        sources: list[GuessSource],
        stop: Stop,
        writer: Writer,
    ) -> Generator[Future, Any, tuple[list[int], DynamicCache | None]]:
        """Return a prompt with its answer, and the cache, which holds all of it but the last token.

        None in its place if there is none, or if the model's own decoding has not counted what it holds.
        """
        model = self._model
        inputs = torch.tensor([ids], device=model.device)
        options: dict[str, Any] = {
            "attention_mask": torch.ones_like(inputs),
            "generation_config": generation,
            "stopping_criteria": StoppingCriteriaList([stop]),
            "streamer": writer,
        }
        if processors:
            options["logits_processor"] = LogitsProcessorList(processors)
        if cache is not None:
            options[CACHE], generation.return_dict_in_generate = cache, True
        if self._sequences is not None:
            generation.prefill_chunk_size = self._chunk_size
            output = yield self._sequences.submit(inputs, seed=seed, source=sources, **options)
        else:
            with seeded(seed, model.device):
                output = model.generate(input_ids=inputs, assistant_model=self._assistant, **options)  # type: ignore[operator]  # a method
        if cache is None:
            return output[0].tolist(), None
        is_counted = cache.get_seq_length() >= len(ids)
        return output.sequences[0].tolist(), cache if is_counted else None
