"""Where another way of decoding parts from plain decoding, and whether rounding alone explains it.

In half precision two passes of different shapes round differently, so the same model may choose otherwise where two
tokens are nearly tied. Each such place is judged by two figures, both from plain passes alone:

    margin  how far the worse of the two tokens is from the best one, by the logits of the model in float32
    noise   how far plain passes of two shapes (one row on a cache, the whole text at once) are from those logits there,
            or in the middle one of the rows up to there if that is more

A margin within the noise is a near tie: plain decoding itself could have gone either way. A larger one is unexplained.
The middle row is asked because two passes may agree on one row by chance, as they do where rounding matters only at a
threshold (activations scaled to int8).
"""

import copy
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

import torch
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TemperatureLogitsWarper,
)

from lookahead.config import LookaheadConfig
from lookahead.tools.prompts import up_to_its_end
from lookahead.wrapping import LookaheadMixin, unwrap, wrap
from ngram_pool import NgramPool

# Left to itself, a budget may be 0 where the model is small: then nothing would be looked at.
GUESSING = LookaheadConfig(budget=16, window_size=0, allow_row_dependent=True)

Ways = dict[str, tuple[int, dict]]
"""For each, the copies of a prompt and what else generate() is told."""


def first_difference(ours: list[int], theirs: list[int]) -> int | None:
    """Index at which two texts part; None if they are the same."""
    if ours == theirs:
        return None
    return next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))  # noqa: B905


def choice_scores(logits: torch.Tensor, temperature: float = 0.0, seed: int = 0, index: int = 0) -> torch.Tensor:
    """Scores [vocabulary], in the unit of logits, of which generate() takes the largest as new token ``index``.

    logits: float32 [vocabulary]. Decoding greedily (temperature 0), they are the scores. Sampling, `torch.multinomial`
    draws one exponential variate q a token and takes the largest p / q, so the scores are log(p / q) times the
    temperature; q is the one that a generator with this seed draws at its ``index``-th token.
    """
    if temperature == 0:
        return logits
    scores = TemperatureLogitsWarper(temperature)(None, logits[None])
    generator = torch.Generator(logits.device).manual_seed(seed)
    q = torch.empty_like(scores)
    for _ in range(index + 1):
        q.exponential_(1, generator=generator)
    return (scores.log_softmax(-1) - q.log())[0] * temperature


@torch.no_grad()
def next_logits(model: PreTrainedModel, prompt: torch.Tensor, text: list[int]) -> torch.Tensor:
    """Float32 [n, vocabulary]: the logits of each of the n tokens of ``text``, by one plain pass without a cache.

    prompt: int64 [1, k].
    """
    new = torch.tensor([text[:-1]], dtype=torch.long, device=prompt.device)
    logits = model(input_ids=torch.cat([prompt, new], dim=1), use_cache=False).logits[0]
    return logits[prompt.shape[1] - 1 :].float()


@dataclass(frozen=True)
class Divergence:
    """One place where a text parts from plain decoding's."""

    prompt: int
    """Number of the prompt."""
    position: int
    """Index among the new tokens."""
    plain_token: int | None
    """What plain decoding took; None if its text ends here."""
    other_token: int | None
    """What the other way took; None if its text ends here."""
    margin: float
    """In logits of the float32 reference: the best token's score less that of the worse of the two."""
    margin_in_dtype: float
    """The same in the logits that plain decoding had."""
    noise: float
    """Largest error that plain passes make in the difference of two logits: of this row, or of a middling one."""

    @property
    def near_tie(self) -> bool:
        return self.margin <= self.noise


@dataclass
class Tally:
    """One way of decoding against plain decoding, over all prompts."""

    decoding: str
    """greedy or sampled."""
    way: str
    prompts: int = 0
    tokens: int = 0
    """Tokens decided on the prefix of plain decoding: the common ones, and the one that parts."""
    squared_error: float = 0.0
    """Of these tokens' logits to those of the float32 reference, mean over the vocabulary, summed over the tokens."""
    divergences: list[Divergence] = field(default_factory=list)

    def count(self, logits: torch.Tensor, exact: torch.Tensor, divergence: Divergence | None = None) -> None:
        """Add a prompt: logits [tokens, vocabulary] of its text, and the reference's for plain decoding's text."""
        decided = len(exact) if divergence is None else min(divergence.position + 1, len(exact), len(logits))
        self.prompts += 1
        self.tokens += decided
        self.squared_error += _errors(logits[:decided], exact[:decided]).var(-1, correction=0).sum().item()
        if divergence is not None:
            self.divergences.append(divergence)

    @property
    def rms_error(self) -> float:
        """Root of the mean squared error of a logit; what shifts a whole row does not count."""
        return math.sqrt(self.squared_error / max(self.tokens, 1))

    @property
    def unexplained(self) -> list[Divergence]:
        return [divergence for divergence in self.divergences if not divergence.near_tie]

    def as_dict(self) -> dict:
        """Plain values; an infinite margin, where one text just ends, is None."""
        rows = []
        for divergence in self.divergences:
            row = {name: None if value == math.inf else value for name, value in asdict(divergence).items()}
            rows.append(row | {"near_tie": divergence.near_tie})
        return {
            "decoding": self.decoding, "way": self.way, "prompts": self.prompts, "tokens": self.tokens,
            "rms_error": self.rms_error, "unexplained": len(self.unexplained), "divergences": rows,
        }  # fmt: skip


def audit(
    model: PreTrainedModel,
    prompts: Iterable[torch.Tensor],
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    assistant: PreTrainedModel | None = None,
) -> list[Tally]:
    """Decode every prompt plainly and by lookahead, and account for each place where the texts part.

    prompts: int64 [1, n] each, on the model's device. They are decoded greedily; with a temperature, sampled besides,
    prompt k from seed + k. Greedily, transformers' prompt lookup, plain decoding of a batch and, if given, an
    assistant's guesses are measured by the same rule. One pool serves all prompts. The checkpoint's generation
    settings (penalties, top-k, ...) are put aside meanwhile, for it is logits that are audited.

    A model in half precision is copied to float32 for reference: count on three times its memory, and on the logits of
    a whole text, float32 [max_new_tokens, vocabulary], a few times over.

    Returns a tally for each way, plain decoding first. Raises ValueError if the model is wrapped, UnsupportedModelError
    if lookahead cannot decode it.
    """
    if isinstance(model, LookaheadMixin):
        raise ValueError("the audit compares with the model's own decoding: unwrap the model first")
    # For each decoding: its settings, and its ways.
    greedy: Ways = {"lookahead": (1, {}), "prompt lookup": (1, {"prompt_lookup_num_tokens": 10}), "batch of 4": (4, {})}
    if assistant is not None:
        greedy["assistant"] = (1, {"assistant_model": assistant})
    decodings: dict[str, tuple[dict, Ways]] = {"greedy": ({"do_sample": False}, greedy)}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        decodings["sampled"] = (sampling, {"lookahead": (1, {})})  # the others draw otherwise than plain decoding
    pool = NgramPool()
    reference = model if model.dtype == torch.float32 else copy.deepcopy(model).float()
    tallies: dict[tuple[str, str], Tally] = {}
    with _bare_settings(model):
        for number, prompt in enumerate(prompts):
            for decoding, (settings, ways) in decodings.items():
                settings = {"max_new_tokens": max_new_tokens, **settings}
                plain, rows = _decode(model, prompt, settings, seed + number)
                exact, at_once = next_logits(reference, prompt, plain), next_logits(model, prompt, plain)
                for way, logits in (("plain", rows), ("plain, whole text at once", at_once)):
                    tallies.setdefault((decoding, way), Tally(decoding, way)).count(logits, exact)
                for way, (copies, extra) in ways.items():
                    if way == "lookahead":
                        wrap(model, GUESSING, pool)
                    try:
                        text, logits = _decode(model, prompt.expand(copies, -1), settings | extra, seed + number)
                    finally:
                        unwrap(model)
                    index, divergence = first_difference(text, plain), None
                    if index is not None:
                        tokens = [ids[index] if index < len(ids) else None for ids in (plain, text)]
                        heat = settings.get("temperature", 0.0)
                        passes = [rows, at_once]
                        divergence = _judge(number, index, tokens, exact, passes, model.dtype, heat, seed + number)
                    tallies.setdefault((decoding, way), Tally(decoding, way)).count(logits, exact, divergence)
    return list(tallies.values())


@contextmanager
def _bare_settings(model: PreTrainedModel) -> Iterator[None]:
    """Put the checkpoint's generation settings aside, all but the special tokens."""
    own = model.generation_config
    first = own.eos_token_id[0] if isinstance(own.eos_token_id, list) else own.eos_token_id
    padding = first if own.pad_token_id is None else own.pad_token_id
    model.generation_config = GenerationConfig(
        bos_token_id=own.bos_token_id, eos_token_id=own.eos_token_id, pad_token_id=padding
    )
    try:
        yield
    finally:
        model.generation_config = own


def _decode(model: PreTrainedModel, prompt: torch.Tensor, settings: dict, seed: int) -> tuple[list[int], torch.Tensor]:
    """New tokens of the first row of ``prompt``, and the logits [tokens, vocabulary] that each was chosen by."""
    torch.manual_seed(seed)
    output = model.generate(  # type: ignore[operator]  # a method
        prompt, attention_mask=torch.ones_like(prompt), return_dict_in_generate=True, output_logits=True, **settings
    )
    text = up_to_its_end(output.sequences[0, prompt.shape[1] :].tolist(), model.generation_config.eos_token_id)
    return text, torch.stack([row[0] for row in output.logits[: len(text)]]).float()


def _errors(logits: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    return (logits - exact).nan_to_num()  # tokens that a model rules out are -inf in both


def _judge(
    number: int,
    index: int,
    tokens: list[int | None],
    exact: torch.Tensor,
    passes: list[torch.Tensor],
    dtype: torch.dtype,
    temperature: float,
    seed: int,
) -> Divergence:
    """Account for a difference at new token ``index``, given plain and other token.

    exact: logits [n, vocabulary] of the reference; passes: the same by plain passes in ``dtype``, generate()'s first.
    """
    plain, other = tokens
    if plain is None or other is None:  # both had the same prefix, yet one stopped: no margin could explain that
        return Divergence(number, index, plain, other, margin=math.inf, margin_in_dtype=math.inf, noise=0.0)

    def margin(row: torch.Tensor) -> float:
        scores = choice_scores(row, temperature, seed, index)
        return (scores.max() - scores[tokens].min()).item()

    errors = [_errors(rows[: index + 1], exact[: index + 1]) for rows in passes]
    ranges = torch.stack([error.amax(-1) - error.amin(-1) for error in errors]).amax(0)
    noise = max(ranges[-1].item(), ranges.median().item())
    # Where those passes happen to agree, a logit is still no finer than the dtype: half a unit for each of the two.
    step = torch.finfo(dtype).eps * exact[index, tokens].abs().max().item()
    return Divergence(number, index, plain, other, margin(exact[index]), margin(passes[0][index]), max(noise, step))


def markdown(tallies: list[Tally], tokenizer: PreTrainedTokenizerBase, names: list[str]) -> str:
    """The tallies as a table, and one of all divergences. names: what to call the prompts."""
    lines = [
        "| decoding | way | texts that part | tokens compared | near ties | unexplained | rms error of a logit |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for tally in tallies:
        parted, unexplained = len(tally.divergences), len(tally.unexplained)
        verdict = f"{parted}/{tally.prompts} | {tally.tokens} | {parted - unexplained} | {unexplained}"
        if tally.way.startswith("plain"):
            verdict = f"| {tally.tokens} | |"
        lines.append(f"| {tally.decoding} | {tally.way} | {verdict} | {tally.rms_error:.2g} |")
    rows = [(tally, divergence) for tally in tallies for divergence in tally.divergences]
    if rows:
        lines += [
            "",
            "| prompt | decoding | way | at | plain | other | margin | in its dtype | noise | |",
            "|---|---|---|---:|---|---|---:|---:|---:|---|",
        ]
    for tally, it in rows:
        plain, other = (_shown(tokenizer, token) for token in (it.plain_token, it.other_token))
        lines.append(
            f"| {names[it.prompt]} | {tally.decoding} | {tally.way} | {it.position} | {plain} | {other} | "
            f"{it.margin:.2g} | {it.margin_in_dtype:.2g} | {it.noise:.2g} | "
            f"{'near tie' if it.near_tie else 'UNEXPLAINED'} |"
        )
    return "\n".join(lines)


def _shown(tokenizer: PreTrainedTokenizerBase, token: int | None) -> str:
    if token is None:
        return "(end)"
    text = repr(tokenizer.decode([token])).replace("|", "\\|")
    return f"{token} `{text}`"
