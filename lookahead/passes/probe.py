"""Probes a model: do the logits of a pass agree with plain decoding, which computes one token in a pass?"""

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from lookahead.compat import is_plain
from lookahead.models.adapter import ModelAdapter, context_length, device_of, vocabulary_of
from lookahead.models.cache import InPlaceLayer, LookaheadCache
from lookahead.passes.rounding import is_half, row_errors, tolerance
from lookahead.passes.runner import EagerRunner
from lookahead.step import MAX_DEPTH, Step, lay_out
from ngram_pool import GuessTree, Origin

# Errors grow with the number of layers. In float32, 1.1e-5 was seen in a trained model of 30 layers. Logits that depend
# on other rows, because these share a scale or an expert's capacity, differ by far more.
LARGEST_ROUNDING = 1e-4
LARGEST_MOVE = 2.5e-4  # More would hide that a model rounds its activations to few bits.
GROSS_ERROR = 0.2  # A median error this large comes neither from rounding nor from quantization.
LONG_TEXT = 384  # tokens after which foreign code is also probed
WIDE = 128  # rows of a step with which foreign code is also probed; only larger budgets than the default make more
WIDE_PLAIN = 4  # guesses of it that are also decoded plainly
NOISY_PASSES = 2  # A single one sometimes changes a row too little,
MORE_NOISY_PASSES = 6  # and so do two, if rounding changes some rows of a model a lot.


@contextmanager
def as_in_generate(model: PreTrainedModel) -> Iterator[None]:
    """Run the block without gradients and without dropout."""
    training = [module for module in model.modules() if module.training]

    def restore() -> None:
        for module in training:
            module.training = True

    try:
        model.eval()
        with torch.no_grad():
            yield
        restore()
    except BaseException:  # an interrupt may also have stopped this
        restore()
        raise


def takes_inference_mode(model: PreTrainedModel, adapter: ModelAdapter) -> bool:
    """Whether the model runs in inference mode. Weights that some libraries have quantized do not."""
    try:
        with as_in_generate(model), torch.inference_mode():
            plain_logits(model, adapter, torch.zeros(1, 2, dtype=torch.long, device="cpu"))
    except (torch.OutOfMemoryError, MemoryError):  # this says nothing about the model
        raise
    except Exception:  # if the model fails for another reason, the probe will tell
        return False
    return True


def row_dependence(
    model: PreTrainedModel, adapter: ModelAdapter, trials: dict[tuple[bool, int], "Trial"] | None = None
) -> float:
    """Measure `ModelAdapter.row_dependence`. trials: as for `compare_with_plain`.

    Plain decoding of the trial's texts is compared with one pass over all of them. If they differ, it may have other
    reasons, so more is tried (`shapes`).
    """
    largest = max(tolerance_of(model), LARGEST_ROUNDING)
    try:
        errors = _trial(model, adapter, 1, {} if trials is None else trials).errors
        if typical(model, errors) <= largest:
            return 0.0
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception:  # more that is tried will fail, too, or the probe will tell
        pass
    from lookahead.passes import shapes  # most models do not need it

    return shapes.row_dependence(model, adapter, largest)


def typical(model: PreTrainedModel, errors: torch.Tensor) -> float:
    """The error of rows that must not be more than rounding: the largest; in half precision, the median."""
    return (errors.median() if is_half(model.dtype) else errors.max()).item()


@dataclass(frozen=True)
class PlainRows:
    """The logits of plain decoding for the tokens of a pass."""

    logits: torch.Tensor
    """[rows, vocabulary]"""
    noise: torch.Tensor
    """How much rounding alone changes each row (`row_errors`), float64 [rows]."""


@dataclass
class Trial:
    """Prompts and steps to probe passes with, and plain decoding's logits for them."""

    prompts: list[tuple[list[int], PlainRows]]
    """For each sequence: the tokens of its prompt."""
    rounds: list[list[tuple[Step, list[int], PlainRows]]]
    """For each pass and sequence: a step and its accepted path."""
    lines: "list[_Line]"
    """All lines of tokens, to measure noise with; [] once there is no more to measure."""
    errors: torch.Tensor
    """Errors of rows (`row_errors`) between one pass over all lines of tokens and plain decoding, float64 [rows]."""


def compare_with_plain(
    runner: EagerRunner,
    sequences: int = 1,
    trials: dict[tuple[bool, int], Trial] | None = None,
    also_long: bool = False,
) -> str | None:
    """Return what is wrong with the passes of ``runner``. None: their logits are those of plain decoding.

    sequences: sequences in the batch. Their prompts and accepted paths differ in length.
    trials: known results of plain decoding of this model; new ones are added. The model must not change meanwhile.
    also_long: also probe after LONG_TEXT tokens, and with a step of WIDE rows, because foreign code may act only there.
    """
    trials = {} if trials is None else trials
    try:
        trial = _trial(runner.model, runner.adapter, sequences, trials)
        with as_in_generate(runner.model):
            wrong = _compare_with_plain(runner, trial)
            if wrong is not None and _measure_more_noise(runner.model, runner.adapter, trial):
                wrong = _compare_with_plain(runner, trial)
            if wrong is None and also_long:
                wrong = _compare_with_plain(runner, _long_trial(runner.model, runner.adapter, sequences, trial))
                if wrong is None and sequences == 1:
                    wrong = _compare_wide_step(runner, trial)
            return wrong
    except (torch.OutOfMemoryError, MemoryError):  # this says nothing about the model
        raise
    except Exception as error:  # a model may raise anything if it does not know such a mask or cache
        return f"a step with {'branches' if runner.adapter.can_branch else 'several tokens'} failed with {error!r}"


def _compare_with_plain(runner: EagerRunner, trial: Trial) -> str | None:
    """Run prompts, three steps and their commits. Compare each row of logits with plain decoding."""
    adapter, worst, caches = runner.adapter, 0.0, []
    for text, plain in trial.prompts:
        caches.append(adapter.make_cache())
        prompt = torch.tensor([text], device=device_of(runner.model))
        logits = runner.prefill(prompt, caches[-1], logits_to_keep=len(text)).logits
        if not _has_column_for_each(caches[-1], logits):
            return "a pass adds more or fewer positions to the cache than it has tokens"
        worst = max(worst, _error_beyond_rounding(runner, logits, plain))
    cache = runner.begin(runner.join(caches))
    for plan in trial.rounds:
        steps = [step for step, _, _ in plan]
        output = runner.run(steps, cache)
        for first, (step, _, plain) in zip(output.first, plan, strict=True):
            if plain.logits.isnan().any():
                return "the logits of a plain pass are NaN"
            worst = max(worst, _error_beyond_rounding(runner, output.logits[first : first + len(step)], plain))
        cache.commit(steps, [path for _, path, _ in plan])
    if not worst:
        return None
    what = "custom masks, position_ids or cache are" if adapter.can_branch else "the cache is"
    return f"{what} not honoured, its logits differ from plain decoding's by {worst:.1e} of their spread"


def _compare_wide_step(runner: EagerRunner, trial: Trial) -> str | None:
    """Compare some rows of a step of WIDE rows, or as many as the model allows, with plain decoding. The step follows
    the trial's prompt, and is not committed."""
    model, adapter, (text, _) = runner.model, runner.adapter, trial.prompts[0]
    branches, known = adapter.can_branch, vocabulary_of(model)
    most = known if branches else min(1 + MAX_DEPTH, max(context_length(model) - len(text), 1))  # siblings must differ
    count = min(WIDE, most)
    tokens = np.random.default_rng(1).choice(known, count, replace=not branches)

    def laid_out(kept: np.ndarray) -> Step:  # guesses that are all children of the root, or a chain
        parents = [-1] * len(kept) if branches else range(-1, len(kept) - 1)
        return lay_out(tokens[0], GuessTree.of(tokens[kept].tolist(), parents, Origin.TEXT))

    guesses = np.arange(1, count)
    places = np.unique(np.linspace(0, count - 2, WIDE_PLAIN).astype(np.int64))
    some = guesses[places] if branches else guesses[:WIDE_PLAIN]
    plain_cache, cache = DynamicCache(config=adapter.config), adapter.make_cache()
    prompt = torch.tensor([text], device=device_of(model))
    plain_logits(model, adapter, prompt, plain_cache)
    logits, _ = _plain_rows(model, adapter, laid_out(some), plain_cache, len(text))
    runner.prefill(prompt, cache, logits_to_keep=1)
    output = runner.run([laid_out(guesses)], runner.begin(runner.join([cache])))
    noise = torch.full((len(logits),), _largest_noise(trial), dtype=torch.float64, device="cpu")
    error = _error_beyond_rounding(runner, output.logits[[0, *some.tolist()]], PlainRows(logits, noise))
    if not error:
        return None
    return f"in a step of {count} rows, logits differ from plain decoding's by {error:.1e} of their spread"


def _error_beyond_rounding(runner: EagerRunner, logits: torch.Tensor, plain: PlainRows) -> float:
    """Return the largest error of a row that rounding does not explain; 0 if it explains all."""
    dtype, rounds = runner.model.dtype, _rounds(runner.model)  # not for each row: it looks at all weights
    noise = plain.noise.clamp(min=runner.adapter.row_dependence).tolist()
    errors = row_errors(logits, plain.logits).nan_to_num(torch.inf).tolist()
    beyond = [error for error, n in zip(errors, noise, strict=True) if error > rounds * tolerance(dtype, n)]
    return max(beyond, default=0.0)


def _trial(
    model: PreTrainedModel, adapter: ModelAdapter, sequences: int, trials: dict[tuple[bool, int], Trial]
) -> Trial:
    key = adapter.can_branch, sequences
    if key not in trials:
        with as_in_generate(model):
            trials[key] = _plain_trial(model, adapter, sequences)
    return trials[key]


def _long_trial(model: PreTrainedModel, adapter: ModelAdapter, sequences: int, short: Trial) -> Trial:
    """Make a trial after a long text. Its noise is the largest of the short trial's rows."""
    before = max(min(LONG_TEXT, context_length(model) - 40), 0)
    return _plain_trial(model, adapter, sequences, before, _largest_noise(short))


def _largest_noise(trial: Trial) -> float:
    """The largest noise of the trial's rows."""
    plain = [rows for _, rows in trial.prompts] + [rows for plan in trial.rounds for *_, rows in plan]
    return max(rows.noise.max().item() for rows in plain)


def _plain_trial(
    model: PreTrainedModel, adapter: ModelAdapter, sequences: int, before: int = 0, noise: float | None = None
) -> Trial:
    """Decode prompts and steps plainly, and measure how much rounding changes their logits.

    before: tokens before each prompt. noise: of all rows, if it is known.
    """
    vocabulary = vocabulary_of(model)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, vocabulary, (sequences, 20))
    earlier = rng.integers(0, vocabulary, (sequences, before)).tolist()
    # Tokens 8 and 9 are siblings in the first step, so they must differ.
    tokens[:, 9] = (tokens[:, 9] + (tokens[:, 9] == tokens[:, 8])) % vocabulary
    chain = lay_out(tokens[0, 17], GuessTree.chain(tokens[0, 18:19], Origin.TEXT))  # all of it is accepted
    last = lay_out(tokens[0, 19], GuessTree.empty())
    prompts: list[tuple[list[int], PlainRows]] = []
    rounds: list[list[tuple[Step, list[int], PlainRows]]] = [[], [], []]
    lines: list[_Line] = []
    for b, of_sequence in enumerate(tokens):
        text = earlier[b] + of_sequence[: 6 - 2 * b].tolist()
        cache = DynamicCache(config=adapter.config)
        plain = _without_noise(plain_logits(model, adapter, torch.tensor([text], device="cpu"), cache)[0])
        places: list[_Place] = [(plain, i) for i in range(len(text))]
        prompts.append((text, plain))
        plan = _first_step(of_sequence, adapter.can_branch, b), (chain, [0, 1]), (last, [0])
        for steps, (step, path) in zip(rounds, plan, strict=True):
            logits, after = _plain_rows(model, adapter, step, cache, len(text))
            plain = _without_noise(logits)
            steps.append((step, path, plain))
            for leaf in set(range(len(step))) - set(step.parents.tolist()):
                branch = np.flatnonzero(step.ancestors[leaf]).tolist()
                lines.append(([*text, *step.ids[branch]], [*places, *((plain, i) for i in branch)]))
            cache, text = after[path[-1]], text + step.ids[path].tolist()
            places += [(plain, i) for i in path]
    if noise is None:
        return Trial(prompts, rounds, lines, _measure_noise(model, adapter, lines))
    for plain in [rows for _, rows in prompts] + [rows for plan in rounds for *_, rows in plan]:
        plain.noise.fill_(noise)
    return Trial(prompts, rounds, [], torch.zeros(0, dtype=torch.float64, device="cpu"))


_Place = tuple[PlainRows, int]  # a row, and plain decoding's logits for it
_Line = tuple[list[int], list[_Place]]  # tokens, and the row of each of them


def _without_noise(logits: torch.Tensor) -> PlainRows:
    return PlainRows(logits, torch.zeros(len(logits), dtype=torch.float64, device="cpu"))


def _measure_noise(model: PreTrainedModel, adapter: ModelAdapter, lines: list[_Line]) -> torch.Tensor:
    """Set the noise of all rows, and return `Trial.errors`.

    In half precision, rounding changes some rows of a trained model ten times as much as others. So each row has its
    own noise: the error of plain passes over the whole lines, with the embeddings changed by one rounding. In full
    precision, the noise of all rows is the largest error of such a pass. If it is more than is usual, it is the largest
    error between plain passes of several shapes, and between passes whose embeddings differ by one rounding.
    """
    if is_half(model.dtype):
        errors = noise = _noisy_errors(model, adapter, lines, range(NOISY_PASSES))
        # For example, the model ignores its cache. In some trained models, rounding alone changes rows as much.
        if noise.median() >= GROSS_ERROR and 10 * _moved_errors(model, adapter, lines).median() < noise.median():
            noise = torch.zeros_like(noise)
    else:
        errors = noise = _errors_at_once(model, adapter, lines)
        if not errors.max() < LARGEST_ROUNDING / 4:  # `tolerance` is 4 times as large
            from lookahead.passes import shapes

            moved = _moved_errors(model, adapter, lines).clamp(max=LARGEST_MOVE)
            noise = torch.cat([shapes.noise(model, adapter, _ids_of(lines)), moved])
    _set_noise(model, adapter, lines, noise)
    return errors


def _measure_more_noise(model: PreTrainedModel, adapter: ModelAdapter, trial: Trial) -> bool:
    """Measure the noise of a trial by more passes, once. Returns whether there was more to measure."""
    if not (trial.lines and is_half(model.dtype)) or not any(rows.noise.any() for _, rows in trial.prompts):
        return False
    passes = range(NOISY_PASSES, NOISY_PASSES + MORE_NOISY_PASSES)
    _set_noise(model, adapter, trial.lines, _noisy_errors(model, adapter, trial.lines, passes))
    trial.lines = []
    return True


def _set_noise(model: PreTrainedModel, adapter: ModelAdapter, lines: list[_Line], noise: torch.Tensor) -> None:
    """Set the noise of each row of the lines to at least this."""
    every = [place for _, places in lines for place in places]
    if adapter.has_state or not is_half(model.dtype):  # a state hands the error of a row on to the next ones
        noise = noise.max().repeat(len(every))
    for (plain, row), of_row in zip(every, noise, strict=True):
        plain.noise[row] = max(plain.noise[row], of_row)


def _ids_of(lines: list[_Line]) -> torch.Tensor:
    """The tokens of all lines, filled up to the longest: int64 [lines, longest]."""
    longest = max(len(places) for _, places in lines)
    return torch.tensor([[*line, *[0] * (longest - len(line))] for line, _ in lines], device="cpu")


def _rows_at_once(model: PreTrainedModel, adapter: ModelAdapter, lines: list[_Line]) -> torch.Tensor:
    """The logits of one pass over all lines, for each of their tokens."""
    logits = plain_logits(model, adapter, _ids_of(lines))
    return torch.cat([rows[: len(places)] for rows, (_, places) in zip(logits, lines, strict=True)])


def _errors_at_once(model: PreTrainedModel, adapter: ModelAdapter, lines: list[_Line]) -> torch.Tensor:
    """Errors of rows between one pass over all lines and plain decoding."""
    expected = torch.stack([plain.logits[row] for _, places in lines for plain, row in places])
    return row_errors(_rows_at_once(model, adapter, lines), expected).cpu()


def _noisy_errors(model: PreTrainedModel, adapter: ModelAdapter, lines: list[_Line], seeds: range) -> torch.Tensor:
    """The largest `_errors_at_once` of each row, with embeddings changed from each of these seeds."""
    errors = []
    for seed in seeds:
        with _moved_embeddings(model, seed):
            errors.append(_errors_at_once(model, adapter, lines))
    return torch.stack(errors).amax(0)


def _moved_errors(model: PreTrainedModel, adapter: ModelAdapter, lines: list[_Line]) -> torch.Tensor:
    """Errors of rows between passes of the same shape, whose embeddings differ by one rounding."""
    expected = _rows_at_once(model, adapter, lines)
    errors = []
    for seed in range(NOISY_PASSES):
        with _moved_embeddings(model, seed):
            errors.append(row_errors(_rows_at_once(model, adapter, lines), expected).cpu())
    return torch.stack(errors).amax(0)


@contextmanager
def _moved_embeddings(model: PreTrainedModel, seed: int) -> Iterator[None]:
    """Run the block with embeddings changed at random, by up to one rounding, in this thread's passes."""
    generator, thread = torch.Generator().manual_seed(seed), threading.get_ident()

    def move(module: torch.nn.Module, inputs: tuple, embeddings: torch.Tensor) -> torch.Tensor | None:
        if threading.get_ident() != thread:
            return None
        random = torch.rand(embeddings.shape, generator=generator, dtype=torch.float32, device="cpu")
        by = (random - 0.5).to(embeddings.device) * torch.finfo(embeddings.dtype).eps
        return (embeddings.float() * (1 + by)).to(embeddings.dtype)

    hook = model.get_input_embeddings().register_forward_hook(move)
    try:
        yield
    finally:
        hook.remove()


def _has_column_for_each(cache: LookaheadCache, logits: torch.Tensor) -> bool:
    """Whether the last pass put a column into every layer for each row of its logits [T, vocabulary]."""
    layers = [layer for layer in cache.layers if isinstance(layer, InPlaceLayer) and layer.is_initialized]
    return all(layer.columns - layer.base == len(logits) for layer in layers)


def tolerance_of(model: PreTrainedModel, noise: float = 0.0) -> float:
    """`tolerance`, for a model whose products may be rounded more than once."""
    return _rounds(model) * tolerance(model.dtype, noise)


def _rounds(model: PreTrainedModel) -> int:
    """How often a product is rounded: with quantized weights twice, before and after the scaling."""
    return 1 if all(map(is_plain, model.parameters())) else 2


def _first_step(tokens: np.ndarray, can_branch: bool, b: int) -> tuple[Step, list[int]]:
    """Return the probe's first step for sequence ``b``, and its accepted path."""
    if not can_branch:
        return lay_out(tokens[6], GuessTree.chain(tokens[8:11], Origin.TEXT)), [0, 1]
    # The rejected sibling comes first, so that the commit has to move the accepted path.
    tree = GuessTree.of(tokens[8:11].tolist(), [-1, -1, 1], Origin.TEXT)
    if b > 0:
        return lay_out(tokens[6], tree), [0]
    return lay_out(tokens[6], tree, window=[tokens[11:13], tokens[13:15]]), [0, 2, 3]


def plain_logits(
    model: PreTrainedModel,
    adapter: ModelAdapter,
    ids: torch.Tensor,
    cache: DynamicCache | None = None,
    start: int = 0,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return logits [batch, n, vocabulary] of the model's own pass over ids [batch, n], from column ``start`` on.

    mask: int64 [batch, start + n], 0 in columns of padding, which have no positions.
    """
    inputs = {"input_ids": ids.to(device_of(model)), "use_cache": cache is not None}
    if cache is not None:
        inputs[adapter.cache_argument] = cache
    if adapter.takes_position_ids:  # as generate() does; without them, some models count from their padding token
        positions = torch.arange(start, start + ids.shape[1], device=device_of(model))
        inputs["position_ids"] = positions.expand(ids.shape)
    if mask is not None:
        mask = mask.to(device_of(model))
        inputs["attention_mask"] = mask
        if adapter.takes_position_ids:
            inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)[:, start:]
    return model(**inputs).logits


def _plain_rows(
    model: PreTrainedModel, adapter: ModelAdapter, step: Step, cache: DynamicCache, length: int
) -> tuple[torch.Tensor, list[DynamicCache]]:
    """Decode each line of a step plainly, one token in a pass, on a cache that holds ``length`` positions.

    Returns the logits [T, vocabulary], and for each row the cache after it.
    """
    rows: list[torch.Tensor] = []
    caches: list[DynamicCache] = []
    for token, parent, depth in zip(step.ids.tolist(), step.parents.tolist(), step.depths.tolist(), strict=True):
        caches.append(copy.deepcopy(cache if parent < 0 else caches[parent]))
        rows.append(plain_logits(model, adapter, torch.tensor([[token]], device="cpu"), caches[-1], length + depth)[0])
    return torch.cat(rows), caches
