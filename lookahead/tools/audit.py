"""Find where another way of decoding diverges from plain decoding, and whether rounding alone explains it.

In half precision, passes of different shapes round differently. So the same model may choose another token where two
tokens are nearly tied. Each divergence is judged by two figures, which come only from plain passes:

    margin  how far the worse of the two tokens is from the best token, by the logits of the model in float32
    noise   the error of plain passes of two shapes (one row on a cache, the whole text at once) against those logits,
            in this row or, if that is larger, the median over the rows up to it

A margin within the noise is a near tie: plain decoding itself could have chosen either token. A larger margin is
unexplained. The median is needed because two passes may agree on one row by chance, for example where rounding matters
only at a threshold (activations scaled to int8).
"""

import copy
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TemperatureLogitsWarper

from lookahead.config import LookaheadConfig
from lookahead.engine.engine import Lookahead
from lookahead.tools.loading import bare_settings
from lookahead.tools.prompts import up_to_its_end
from lookahead.wrapping import LookaheadMixin, unwrap, wrap
from ngram_pool import NgramPool

# With an automatic budget, a small model might verify no guesses, and nothing would be audited.
GUESSING = LookaheadConfig(budget=16, window_size=0, allow_row_dependent=True)

Ways = dict[str, tuple[int, dict]]
"""For each way of decoding, the number of copies of a prompt, and further arguments of generate()."""


def first_difference(ours: list[int], theirs: list[int]) -> int | None:
    """Return the index at which two texts diverge, or None if they are equal."""
    if ours == theirs:
        return None
    return next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))  # noqa: B905


def choice_scores(logits: torch.Tensor, temperature: float = 0.0, seed: int = 0, index: int = 0) -> torch.Tensor:
    """Return scores [vocabulary], in the unit of logits. generate() takes the largest of them as new token ``index``.

    logits: float32 [vocabulary]. For greedy decoding (temperature 0), they are the scores. For sampling,
    `torch.multinomial` draws an exponential variate q for each token and takes the largest p / q. So the scores are
    log(p / q) times the temperature, with the q that a generator with this seed draws for its ``index``-th token.
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
    """Return float32 [n, vocabulary], the logits that predict each token of ``text``, from one plain pass without a
    cache.

    prompt: int64 [1, k], before the text.
    """
    new = torch.tensor([text[:-1]], dtype=torch.long, device=prompt.device)
    logits = model(input_ids=torch.cat([prompt, new], dim=1), use_cache=False).logits[0]
    return logits[prompt.shape[1] - 1 :].float()


@dataclass(frozen=True)
class Divergence:
    """The place where a text diverges from plain decoding's."""

    prompt: int
    """Number of the prompt."""
    position: int
    """Index among the new tokens."""
    plain_token: int | None
    """The token of plain decoding; None if its text ends here."""
    other_token: int | None
    """The token of the other way; None if its text ends here."""
    margin: float
    """The best token's score minus that of the worse of the two, in logits of the float32 reference."""
    margin_in_dtype: float
    """The same, in the logits of plain decoding."""
    noise: float
    """Largest error of plain passes in the difference of two logits: in this row, or the median over rows."""

    @property
    def near_tie(self) -> bool:
        return self.margin <= self.noise


@dataclass
class Tally:
    """One way of decoding compared with plain decoding, over all prompts."""

    decoding: str
    """greedy or sampled."""
    way: str
    prompts: int = 0
    tokens: int = 0
    """Tokens chosen after the same prefix as in plain decoding: the common ones, and the one that diverges."""
    squared_error: float = 0.0
    """Squared error of these tokens' logits against the float32 reference: the sum over tokens of the mean over the
    vocabulary."""
    divergences: list[Divergence] = field(default_factory=list)
    by_guesses: int = 0
    """For lookahead: number of texts that guesses changed."""
    passes: str = ""
    """For lookahead: the code that computed its passes, as `report()` names it."""

    def count(self, logits: torch.Tensor, exact: torch.Tensor, divergence: Divergence | None = None) -> None:
        """Add a text. logits: [tokens, vocabulary], the text's. exact: the reference's, for plain decoding's text."""
        decided = len(exact) if divergence is None else min(divergence.position + 1, len(exact), len(logits))
        self.prompts += 1
        self.tokens += decided
        self.squared_error += _errors(logits[:decided], exact[:decided]).var(-1, correction=0).sum().item()
        if divergence is not None:
            self.divergences.append(divergence)

    @property
    def rms_error(self) -> float:
        """Root of the mean squared error of a logit. A shift of a whole row does not count."""
        return math.sqrt(self.squared_error / max(self.tokens, 1))

    @property
    def unexplained(self) -> list[Divergence]:
        return [divergence for divergence in self.divergences if not divergence.near_tie]

    def as_dict(self) -> dict:
        """Return plain values, for JSON. An infinite margin, where only one of the texts ends, is None."""
        rows = []
        for divergence in self.divergences:
            row = {name: None if value == math.inf else value for name, value in asdict(divergence).items()}
            rows.append(row | {"near_tie": divergence.near_tie})
        return {
            "decoding": self.decoding, "way": self.way, "prompts": self.prompts, "tokens": self.tokens,
            "rms_error": self.rms_error, "unexplained": len(self.unexplained), "by_guesses": self.by_guesses,
            "passes": self.passes, "divergences": rows,
        }  # fmt: skip


def audit(
    model: PreTrainedModel,
    prompts: Iterable[torch.Tensor],
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    assistant: PreTrainedModel | None = None,
) -> list[Tally]:
    """Decode each prompt plainly and by lookahead, and judge each divergence of the texts. Lookahead decodes it twice,
    with guesses and without.

    prompts: int64 [1, n] each, on the model's device. They are decoded greedily; with a temperature above 0, they are
    also sampled, prompt k from seed k. Greedy decoding also audits transformers' prompt lookup, plain decoding of a
    batch and, if given, an assistant model. All prompts share one pool. The checkpoint's generation settings
    (penalties, top-k, ...) are ignored, because the audit is about logits.

    A model in half precision is copied to float32 as the reference. Together they take three times the model's memory,
    and a few times that of a text's logits, float32 [max_new_tokens, vocabulary].

    Returns a tally for each way, plain decoding first. Raises ValueError if the model is wrapped, UnsupportedModelError
    if lookahead cannot decode it.
    """
    if isinstance(model, LookaheadMixin):
        raise ValueError("the audit compares with the model's own decoding: unwrap the model first")
    # The settings and the ways of each decoding.
    greedy: Ways = {"lookahead": (1, {}), "prompt lookup": (1, {"prompt_lookup_num_tokens": 10}), "batch of 4": (4, {})}
    if assistant is not None:
        greedy["assistant"] = (1, {"assistant_model": assistant})
    decodings: dict[str, tuple[dict, Ways]] = {"greedy": ({"do_sample": False}, greedy)}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        decodings["sampled"] = (sampling, {"lookahead": (1, {})})  # the other ways draw differently from plain decoding
    pool = NgramPool()
    reference = model if model.dtype == torch.float32 else copy.deepcopy(model).float()
    tallies: dict[tuple[str, str], Tally] = {}
    with bare_settings(model):
        for number, prompt in enumerate(prompts):
            for decoding, (settings, ways) in decodings.items():
                settings = {"max_new_tokens": max_new_tokens, **settings}
                plain, rows = _decode(model, prompt, settings, number)
                exact, at_once = next_logits(reference, prompt, plain), next_logits(model, prompt, plain)
                for way, logits in (("plain", rows), ("plain, whole text at once", at_once)):
                    tallies.setdefault((decoding, way), Tally(decoding, way)).count(logits, exact)
                for way, (copies, extra) in ways.items():
                    tally = tallies.setdefault((decoding, way), Tally(decoding, way))
                    if way == "lookahead":
                        with _wrapped(model, replace(GUESSING, budget=0)):
                            unguessed, _ = _decode(model, prompt, settings, number)
                        with _wrapped(model, GUESSING, pool) as engine:
                            text, logits = _decode(model, prompt, settings, number)
                        tally.by_guesses += text != unguessed
                        tally.passes = engine.passes
                    else:
                        text, logits = _decode(model, prompt.expand(copies, -1), settings | extra, number)
                    divergence = None
                    if (index := first_difference(text, plain)) is not None:
                        tokens = [ids[index] if index < len(ids) else None for ids in (plain, text)]
                        heat = settings.get("temperature", 0.0)
                        divergence = _judge(number, index, tokens, exact, [rows, at_once], model.dtype, heat)
                    tally.count(logits, exact, divergence)
    return list(tallies.values())


@contextmanager
def _wrapped(model: PreTrainedModel, config: LookaheadConfig, pool: NgramPool | None = None) -> Iterator[Lookahead]:
    wrap(model, config, pool)
    assert isinstance(model, LookaheadMixin)
    try:
        yield model.lookahead
    finally:
        unwrap(model)


def _decode(model: PreTrainedModel, prompt: torch.Tensor, settings: dict, seed: int) -> tuple[list[int], torch.Tensor]:
    """Return the new tokens of the first row of ``prompt``, and the logits [tokens, vocabulary] that predict them."""
    torch.manual_seed(seed)
    output = model.generate(  # type: ignore[operator]  # a method
        prompt, attention_mask=torch.ones_like(prompt), return_dict_in_generate=True, output_logits=True, **settings
    )
    text = up_to_its_end(output.sequences[0, prompt.shape[1] :].tolist(), model.generation_config.eos_token_id)
    return text, torch.stack([row[0] for row in output.logits[: len(text)]]).float()


def _errors(logits: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    return (logits - exact).nan_to_num()  # tokens that a model excludes are -inf in both


def _judge(
    number: int,
    index: int,
    tokens: list[int | None],
    exact: torch.Tensor,
    passes: list[torch.Tensor],
    dtype: torch.dtype,
    temperature: float,
) -> Divergence:
    """Judge a divergence at new token ``index``.

    number: the prompt's, which is also the seed. tokens: plain decoding's and the other way's. exact: logits
    [n, vocabulary] of the reference. passes: logits of plain passes in ``dtype``, generate()'s first.
    """
    plain, other = tokens
    if plain is None or other is None:  # one text ended earlier, so there are no two logits to compare
        return Divergence(number, index, plain, other, margin=math.inf, margin_in_dtype=math.inf, noise=0.0)

    def margin(row: torch.Tensor) -> float:
        scores = choice_scores(row, temperature, number, index)
        return (scores.max() - scores[tokens].min()).item()

    errors = [_errors(rows[: index + 1], exact[: index + 1]) for rows in passes]
    ranges = torch.stack([error.amax(-1) - error.amin(-1) for error in errors]).amax(0)
    noise = max(ranges[-1].item(), ranges.median().item())
    # Even where these passes agree, each of the two logits is rounded by up to half a unit of the dtype.
    step = torch.finfo(dtype).eps * exact[index, tokens].abs().max().item()
    return Divergence(number, index, plain, other, margin(exact[index]), margin(passes[0][index]), max(noise, step))


def markdown(tallies: list[Tally], tokenizer: PreTrainedTokenizerBase, names: list[str]) -> str:
    """Return a table of the tallies, and one of all divergences. names: the prompts' names."""
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
