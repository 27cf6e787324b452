"""A trace: one text, step by step, as a page that replays it."""

import html
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lookahead.engine.engine import Lookahead
from lookahead.engine.recording import RecordedStep, Recorder
from lookahead.passes.environment import environment
from lookahead.stats import STAGES
from lookahead.streaming import BYTE_TOKEN, CONTEXT, UNDECODED, TextPieces, inputs_of
from lookahead.tools.files import write_whole
from lookahead.vocabulary import special_tokens

PAGE = Path(__file__).with_name("trace.html")
PLACE = "__TRACE__"  # in the page, where the data belong
SHOWN_PROMPT = 8_000  # characters of the prompt's end that a page holds
WORD_START = "\N{LOWER ONE EIGHTH BLOCK}"  # sentencepiece's sign for a space before a word


@dataclass(frozen=True)
class PlainTimes:
    """When plain decoding (the model's own generate() without a wrap) wrote each token."""

    seconds: list[float]
    """For each token, the seconds from the beginning of the prefill until it was written."""
    is_same_text: bool
    """Whether it wrote the same tokens."""
    why_no_ratio: str = ""
    """Why its time is not compared with lookahead's, for example a busy machine; "" if it is."""


@dataclass(frozen=True)
class Trace:
    """How a text was decoded. `trace` makes it; `save` writes it as a page, and a notebook shows it."""

    record: Recorder
    """The prompt's tokens, the tokens written, and the steps."""
    prompt: str
    text: str
    """The generated text without special tokens."""
    pieces: list[str]
    """For each token, the text that it adds; "" for a token that ends within a character, and for a special token."""
    labels: dict[int, str | list[str]]
    """For each token of the steps, its `label`."""
    about: dict[str, Any]
    """Model and environment."""
    plain: PlainTimes | None = None
    """None if it was not run."""

    @property
    def steps(self) -> list[RecordedStep]:
        return self.record.steps

    def as_dict(self) -> dict:
        """Return what the page shows, as plain values. Times are milliseconds, probabilities are per mille."""
        stats = self.record.stats
        assert stats is not None
        return {
            "about": self.about,
            "prompt": {"text": self.prompt[-SHOWN_PROMPT:], "isCut": len(self.prompt) > SHOWN_PROMPT,
                       "tokens": len(self.record.prompt)},
            "tokens": self.record.tokens,
            "pieces": self.pieces,
            "labels": self.labels,
            "sources": self.record.names,
            "stages": STAGES,
            "passes": 1 + stats.steps,
            "wall": _milliseconds(self.record.times[-1]),
            "prefill": _milliseconds(stats.prefill_seconds),
            "plain": self.plain and {"times": [_milliseconds(seconds) for seconds in self.plain.seconds],
                                     "isSame": self.plain.is_same_text, "whyNoRatio": self.plain.why_no_ratio},
            "steps": [
                {
                    "length": step.length,
                    "ids": step.ids.tolist(),
                    "parents": step.parents.tolist(),
                    "chances": np.rint(1000 * step.probabilities).astype(int).tolist(),
                    "sources": step.sources.tolist(),
                    "path": step.path,
                    "emitted": step.emitted,
                    "times": [_milliseconds(seconds) for seconds in step.seconds.tolist()],
                    "verified": step.verified,
                    "window": step.window,
                }
                for step in self.steps
            ],
        }  # fmt: skip

    def html(self) -> str:
        """Return a complete page that replays the text. It loads nothing from elsewhere."""
        data = json.dumps(self.as_dict(), separators=(",", ":"))  # ASCII, so that lone surrogates can be written too
        for character in "<>&":  # no text can end the script or begin a comment
            data = data.replace(character, f"\\u{ord(character):04x}")
        return PAGE.read_text(encoding="utf-8").replace(PLACE, data)

    def save(self, path: str | Path) -> None:
        """Write the page to a file atomically. Only its owner can read a new file, because it holds the prompt.

        Raises OSError.
        """
        write_whole(Path(path), self.html())

    def _repr_html_(self) -> str:
        # A frame keeps the notebook's styles and keys apart from those of the page.
        return (
            '<iframe title="Trace of lookahead decoding" sandbox="allow-scripts" '
            f'style="width:100%;height:900px;border:0" srcdoc="{html.escape(self.html())}"></iframe>'
        )


def trace(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str | list[dict] | Mapping, **options: Any
) -> Trace:
    """Call ``model.generate`` for ``prompt``, and return how the text was decoded, step by step.

    The text is the same as without a trace. A notebook shows the page of the result, and also of
    `model.lookahead.last`. ``trace(...).save("trace.html")`` writes it to a file.

    model: a wrapped model.
    prompt: as for `lookahead.stream`: a text, messages, or a tokenizer's output of one sequence.
    options: other arguments of ``model.generate``.

    Raises TypeError and ValueError for a prompt that `stream` refuses. Raises ValueError for a model that is not
    wrapped, for several sequences, and for a call that the model's own decoding takes over.
    """
    engine = getattr(model, "lookahead", None)
    if not isinstance(engine, Lookahead):
        raise ValueError("lookahead.trace shows what a wrapped model does: call lookahead.wrap(model) first")
    record = Recorder(options.pop("streamer", None))
    inputs = {"tokenizer": tokenizer, **inputs_of(tokenizer, prompt, model.device), **options}
    model.generate(**inputs, streamer=record)  # type: ignore[operator]  # a method
    if record.stats is None:
        raise ValueError(f"there are no steps to trace: lookahead does not decode {engine.last.plain}")
    record.stats.trace = made = trace_of(record, model, tokenizer)
    return made


def trace_of(record: Recorder, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Trace:
    """Return the trace of a recorded call of lookahead. model: the wrapped model of the call."""
    known = {token for step in record.steps for token in step.ids.tolist()}.union(record.tokens)
    pieces = TextPieces(tokenizer)
    pieces.add(record.prompt[-2 * CONTEXT :])  # decoders look back
    parts = [pieces.add([token]) for token in record.tokens]
    parts[-1] += pieces.rest()
    path = model.config.name_or_path
    about = {"model": Path(path).name if path else type(model).__name__, **environment(model)}
    prompt = tokenizer.decode(record.prompt)
    text = tokenizer.decode(record.tokens, skip_special_tokens=True)
    special = special_tokens(tokenizer)
    labels = {token: label(tokenizer, token, token in special) for token in sorted(known)}
    return Trace(record, prompt, text, parts, labels, about)  # type: ignore[arg-type]  # decode gives one text


def label(tokenizer: PreTrainedTokenizerBase, token: int, is_special: bool) -> str | list[str]:
    """Return how to show a token: its text; ["special", name] for a special token or an id that no token has; or
    ["bytes", hexadecimal digits] for a part of a character."""
    name = tokenizer.convert_ids_to_tokens(token)
    if not isinstance(name, str):
        return ["special", f"#{token}"]  # models often have more rows than their tokenizer has tokens
    if is_special:
        return ["special", name]
    if BYTE_TOKEN.fullmatch(name):
        code = int(name[3:5], 16)
        return chr(code) if code < 0x80 else ["bytes", name[3:5]]
    text = tokenizer.decode([token], clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    if UNDECODED in text and set(name) <= _BYTES.keys():
        return ["bytes", " ".join(f"{_BYTES[sign]:02X}" for sign in name)]
    if name.startswith(WORD_START) and not text.startswith(" "):  # decoders drop a text's first space
        return " " + text
    return text


def _byte_signs() -> dict[str, int]:
    """Return the byte for each character of byte-level BPE (Radford et al. 2019, GPT-2's vocabulary): a byte is written
    as the character of its number if that is printable, or else as the next one from 256 on."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


_BYTES = _byte_signs()


def _milliseconds(seconds: float) -> float:
    return round(1000 * seconds, 2)
