"""Stream the text of generate() in pieces."""

import re
import threading
from collections.abc import Callable, Generator, Mapping
from queue import SimpleQueue
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteriaList
from transformers.generation import BaseStreamer

from lookahead.engine.sampling import NewTokensCriterion

CONTEXT = 16  # least number of tokens that are decoded again before a new one, because decoders look back
BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
UNDECODED = "\N{REPLACEMENT CHARACTER}"  # decoders write it for bytes that make no character
LONGEST_CLEANED = 3  # most characters, beginning with a space, that a tokenizer's clean-up may still change


def stream(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str | list[dict] | Mapping, **options: Any
) -> Generator[str, None, None]:
    """Yield the text that ``model.generate`` writes after ``prompt``, in pieces (str), as it writes them.

    Joined, the pieces are ``tokenizer.decode(new_ids, skip_special_tokens=True)``. A wrapped model decodes by
    lookahead, any other model as usual. generate() runs in its own thread, which starts with the first piece. Both end
    at the next token after the iterator is closed, its loop is left or Ctrl-C is pressed. Errors of generate() are
    raised here.

    prompt: a text; or messages (dicts with ``role`` and ``content``) for the tokenizer's chat template, where a last
        message of the assistant is continued; or a tokenizer's output, with ``input_ids``, int64 [1, n].
    options: other arguments of ``model.generate``. The tokenizer that stop_strings need is passed along.

    Raises TypeError for any other prompt; ValueError for a batch or an option that cannot be streamed.
    """
    if options.get("streamer") is not None:
        raise ValueError("stream() uses its own streamer: call model.generate to use another")
    if options.get("custom_generate") is not None:
        raise ValueError("transformers passes custom_generate no streamer: give stream() a wrapped model instead")
    return _run(model, tokenizer, {"tokenizer": tokenizer, **inputs_of(tokenizer, prompt, model.device), **options})


def inputs_of(tokenizer: PreTrainedTokenizerBase, prompt: str | list[dict] | Mapping, device: torch.device) -> dict:
    """Return the arguments of generate() for ``prompt``, as `stream` takes it. Raises what `stream` says."""
    if isinstance(prompt, str):
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    elif isinstance(prompt, list) and prompt and all(isinstance(message, Mapping) for message in prompt):
        inputs = render(tokenizer, prompt)
    elif isinstance(prompt, Mapping):
        inputs = prompt
        ids = inputs.get("input_ids")
        if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or ids.shape[0] != 1:
            what = tuple(ids.shape) if isinstance(ids, torch.Tensor) else type(ids).__name__
            raise ValueError(
                f"the prompt's input_ids must be a tensor of one sequence, [1, n], not {what}: "
                "tokenize one text with return_tensors='pt', and take the texts of a batch one by one"
            )
    else:
        raise TypeError(
            "the prompt must be a text, a list of chat messages (dicts with role and content) or a tokenizer's output "
            f"with input_ids, not {f'the list {prompt!r:.60}' if isinstance(prompt, list) else type(prompt).__name__}"
        )
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}


def render(tokenizer: PreTrainedTokenizerBase, messages: list[dict]) -> Mapping:
    """Return tensors [1, n] from which the model writes the assistant's next message, or continues its last one.

    Raises ValueError if the tokenizer has no chat template, jinja2.TemplateError if the template refuses the messages.
    """
    continues = messages[-1].get("role") == "assistant"
    return tokenizer.apply_chat_template(  # type: ignore[return-value]  # a dict, because of return_dict
        messages,
        add_generation_prompt=not continues,
        continue_final_message=continues,
        return_tensors="pt",
        return_dict=True,
        tokenizer_kwargs={"return_token_type_ids": False},
    )


def _run(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, options: dict) -> Generator[str, None, None]:
    queue: SimpleQueue[str | BaseException | None] = SimpleQueue()
    stop = StopWhenAsked()
    criteria = StoppingCriteriaList([*(options.pop("stopping_criteria", None) or ()), stop])
    kind = model.device.type
    # Each thread has its own autocast, so this thread's is carried over.
    autocast = torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))

    def generate() -> None:
        try:
            with autocast:
                model.generate(  # type: ignore[operator]  # a method
                    **options, stopping_criteria=criteria, streamer=PieceStreamer(tokenizer, queue.put)
                )
            queue.put(None)
        except BaseException as error:  # the consumer raises it
            queue.put(error)

    thread = threading.Thread(target=generate, name="lookahead.stream")
    thread.start()
    try:
        while (item := queue.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        item = None  # an error refers to this frame, so this frame must not refer to the error
        stop.asked = True
        thread.join()


class StopWhenAsked(NewTokensCriterion):
    """Ends generate() at its next token once ``asked`` is true or the main thread has ended."""

    def __init__(self) -> None:
        self.asked = False

    def ends(self, new: list[int]) -> bool:
        return self.asked or not threading.main_thread().is_alive()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), self.ends([]), dtype=torch.bool, device=input_ids.device)


class TextPieces:
    """Decodes tokens into pieces of text as they come. Joined, the pieces are the text of all tokens decoded together.

    transformers' TextStreamer decodes each line separately, so spaces are lost if a tokenizer drops a first space. It
    also holds words back until the next space.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, with_special: bool = False):
        """with_special: whether special tokens are part of the text."""
        self._tokenizer = tokenizer
        self._skips = not with_special
        self._ids: list[int] = []  # the last tokens, which are decoded together
        self._settled = 0  # index into _ids; the text before it ends with a whole character
        self._written = 0  # characters of the text of _ids that have been returned

    def add(self, ids: list[int]) -> str:
        """Return the text that ``ids`` complete; "" in the middle of a character of several tokens."""
        self._ids += ids
        text = self._decode(self._ids)
        stop = self._certain(text)
        piece = text[self._written : stop]
        self._written = max(self._written, stop)
        if stop == len(text) and len(self._ids) - self._settled >= CONTEXT:
            tail = self._ids[self._settled :]
            if context := self._decode(tail):  # without context, a first space would be dropped
                self._ids, self._written = tail, len(context)
            self._settled = len(self._ids)
        return piece

    def rest(self) -> str:
        """Return the text that was held back. Call it at the end of the text."""
        piece = self._decode(self._ids)[self._written :]
        self._ids, self._settled, self._written = [], 0, 0
        return piece

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skips)  # type: ignore[return-value]  # one text

    def _certain(self, text: str) -> int:
        """Return the number of characters of ``text`` that no further token can change."""
        if text.endswith(UNDECODED):  # the first bytes of a character
            return self._written
        last = self._tokenizer.convert_ids_to_tokens(self._ids[-1]) if self._ids else None
        if isinstance(last, str) and BYTE_TOKEN.fullmatch(last):  # later byte tokens may change how this one is decoded
            return self._written
        if getattr(self._tokenizer, "clean_up_tokenization_spaces", False):
            space = text.find(" ", max(len(text) - LONGEST_CLEANED, 0))
            if space >= 0:
                return max(space, self._written)
        return len(text)


def without_half_character(text: str) -> str:
    """Return ``text`` without an incomplete character at its end."""
    return text.rstrip(UNDECODED)


class PieceStreamer(BaseStreamer):
    """A streamer that calls ``write`` with the text of one sequence, in pieces that are not empty."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, write: Callable[[str], None]):
        self._pieces = TextPieces(tokenizer)
        self._write = write
        self._seen_prompt = False

    def put(self, value: torch.Tensor) -> None:
        if self._seen_prompt:
            self._hand_over(self._pieces.add(value.flatten().tolist()))
        elif len(value) != 1:  # generate() puts the prompt first, [texts, n]
            raise ValueError(f"only one text can be streamed, not {len(value)}: leave num_return_sequences at 1")
        self._seen_prompt = True

    def end(self) -> None:
        self._hand_over(self._pieces.rest())

    def _hand_over(self, piece: str) -> None:
        if piece:
            self._write(piece)
