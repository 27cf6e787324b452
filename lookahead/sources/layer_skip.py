"""Guesses from some of the model's own layers, on the model's own cache: no weights, no training.

A pass without some layers costs less and predicts nearly the same (Zhang et al. 2024, "Draft & Verify", arXiv
2309.08168, section 3; Xia et al. 2025, "SWIFT", arXiv 2410.06916). The remaining layers use the keys and values that
passes of the full model have cached, and append those of their guesses. The verifying pass computes all layers for the
guesses, so their rows are dropped before it.
"""

import copy
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from lookahead.extending import (
    AnyCache,
    Batch,
    EagerRunner,
    Limits,
    LookaheadCache,
    LookaheadConfig,
    Outcome,
    Step,
    StepCosts,
    UnsupportedModelError,
    attention_implementation,
    can_batch,
    can_rewind,
    choose_runner,
    context_length,
    copy_of_module,
    device_of,
    lay_out,
    part_of,
    processor,
    read_config,
    rewind,
    state_of,
    step_costs,
    stored,
    time_passes,
)
from lookahead.sources.draft import DraftGuesser, DraftModelSource
from ngram_pool import GuessTree, Origin

CHUNK = 8  # rows of a chunk of a sample
PROMPT, SAMPLE = 256, 64  # most tokens of a prompt, and of the model's text after it
LONGEST_CHAIN = 12  # most guesses of a chain whose yield is computed
PATIENCE = 3  # layers dropped in a row without a gain that end the search


class LayerSkipSource(DraftModelSource):
    """Proposes the likely tokens of the decoding model without some of its layers.

    The layers must form one list, and each must cache the keys and values of all positions.
    """

    def __init__(self, model: PreTrainedModel, skipped: Sequence[int] | None = None):
        """model: the wrapped one. skipped: indices of layers; by default, those found by `lookahead tune`.

        Raises UnsupportedModelError, with the reason, if the model's layers cannot be skipped. Raises ValueError if
        ``skipped`` names no layers, all, or unknown ones, or if it is left out and none were found yet.
        """
        if hasattr(model, "get_base_model"):  # of PEFT, which `wrap` unpacks too
            model = model.get_base_model()  # type: ignore[operator]  # a method
        super().__init__(model)
        self.base = model
        count = len(_layer_list(model)[1])
        if not read_config(model).can_grow:
            raise _unsupported(model, "not all of its layers hold the keys and values of all positions")
        if skipped is None:
            skipped = kept_layers(model).skipped
        self.skipped = tuple(sorted(set(skipped)))
        """Indices of the layers that are left out."""
        if not set(self.skipped) < set(range(count)):
            raise ValueError(
                f"skipped={tuple(skipped)} does not fit {type(model).__name__}, whose layers are 0 to {count - 1}: "
                "name some of them, and leave at least one to draft with"
            )
        self.kept = [index for index in range(count) if index not in self.skipped]
        _without(model, self.skipped)

    @property
    def model(self) -> PreTrainedModel:
        """The model that drafts: the whole one as it is now, without these layers."""
        return _without(self.base, self.skipped)

    @contextmanager
    def running(self) -> Iterator[EagerRunner]:
        engine = vars(self.base).get("lookahead")
        # Its layers share the whole model's kernels and packed weights.
        config = replace(engine.config if engine is not None else LookaheadConfig(), pack_weights=False)
        runner = choose_runner(self.model, config)[0]
        if not runner.adapter.can_grow:
            raise _unsupported(self.base, "its passes take no mask of ours")
        try:
            yield runner
        finally:
            runner.end()

    def check_model(self, model: PreTrainedModel) -> None:
        if model is not self.base:
            raise ValueError(
                f"this LayerSkipSource was made for another {type(self.base).__name__} than the "
                f"{type(model).__name__} that decodes: make it for the wrapped model"
            )

    def start(self, batch: Batch) -> "LayerSkipGuesser":
        return LayerSkipGuesser(self, batch)


class LayerSkipGuesser(DraftGuesser):
    """Some layers of the model that decodes, in one call, on its cache."""

    def __init__(self, source: LayerSkipSource, batch: Batch):
        self._source = source
        self._of_call: AnyCache | None = None
        super().__init__(source, batch)

    def attach(self, model: PreTrainedModel, cache: AnyCache) -> None:
        if can_rewind(cache):
            self._of_call = cache
        else:
            warnings.warn(
                f"LayerSkipSource proposes nothing: its passes cannot append to the {type(cache).__name__} of CUDA "
                "graphs. Leave out cuda_graphs or this source.",
                stacklevel=2,
            )

    def propose(self, texts: list[list[int]], limits: Limits) -> list[GuessTree]:
        self._drafts = []
        if self._of_call is None:
            return [GuessTree.empty() for _ in texts]
        try:
            with part_of(self._of_call, self._source.kept) as self._cache:
                return super().propose(texts, limits)
        finally:
            self._cache, self._steps = None, []

    def observe(self, outcome: Outcome) -> None:
        if self._drafts:
            self._settle(outcome)

    def _catch_up(self, texts: list[list[int]]) -> bool:
        """The cache of the call lacks only the last token of each text."""
        self._held = [text[:-1] for text in texts]
        return all(text[-1] < self._vocabulary for text in texts)


def _unsupported(model: PreTrainedModel, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{type(model).__name__} cannot draft with a part of its layers: {reason}. Use another source of guesses."
    )


# The model without some layers


def _layer_list(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Return the list of the model's layers and its name. Raises UnsupportedModelError unless there is exactly one."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    found: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{outer}.") for outer in found)  # e.g. the experts of a layer
        if isinstance(module, nn.ModuleList) and len(module) == count and not is_inside:
            found[name] = module
    if len(found) != 1:
        raise _unsupported(model, f"{' and '.join(found) or 'none'} of its modules is a list of its {count} layers")
    return next(iter(found.items()))


def _without(model: PreTrainedModel, skipped: tuple[int, ...]) -> PreTrainedModel:
    """Return a model that shares everything with ``model`` except these layers. It is kept while ``model`` is
    unchanged.

    The remaining layers are numbered from 0, as in a cache of their own.
    Raises UnsupportedModelError if the forward of a module that must be copied was replaced.
    """
    made_of = attention_implementation(model.config), model.training, *map(id, model.modules())
    kept, key = state_of(model).kept, ("layer skip", skipped)  # it goes when the model changes or is unwrapped
    if key not in kept or kept[key][0] != made_of:
        kept[key] = made_of, _make_without(model, skipped)
    return kept[key][1]


def _make_without(model: PreTrainedModel, skipped: tuple[int, ...]) -> PreTrainedModel:
    place, layers = _layer_list(model)
    kept = [index for index in range(len(layers)) if index not in skipped]
    config = copy.deepcopy(model.config)
    text, old_text = (one.get_text_config(decoder=True) for one in (config, model.config))
    text.num_hidden_layers = len(kept)
    if types := getattr(text, "layer_types", None):
        text.layer_types = [types[index] for index in kept]
    configs = {id(model.config): config, id(old_text): text}
    child: nn.Module = nn.ModuleList(_numbered(model, layers[index], place) for place, index in enumerate(kept))
    while place:
        place, _, name = place.rpartition(".")
        child = _copied(model, model.get_submodule(place), {name: child})
        if (own := vars(child).get("config")) is not None:
            child.config = configs.get(id(own), own)
    vars(child).pop("lookahead", None)  # the wrap of the whole model
    assert isinstance(child, PreTrainedModel)
    return child


def _numbered(model: PreTrainedModel, module: nn.Module, number: int) -> nn.Module:
    """Return the module with this ``layer_idx``, also for its parts. Parts without one are shared."""
    parts = {name: _numbered(model, part, number) for name, part in module.named_children()}
    own = dict(module.named_children())
    if "layer_idx" not in vars(module) and all(part is own[name] for name, part in parts.items()):
        return module
    numbered = _copied(model, module, parts)
    if "layer_idx" in vars(module):
        numbered.layer_idx = number  # type: ignore[assignment]  # a number, as before
    return numbered


def _copied(model: PreTrainedModel, module: nn.Module, children: dict[str, nn.Module]) -> nn.Module:
    if "forward" in vars(module):  # it is bound to the original, and would compute that instead of the copy
        raise _unsupported(model, f"the forward of its {type(module).__name__} was replaced, as accelerate does")
    return copy_of_module(module, children)


# Which layers to skip


@dataclass(frozen=True)
class SkippedLayers:
    """The layers to skip for the fastest drafts."""

    skipped: tuple[int, ...]
    agreement: float
    """The share of tokens that the remaining layers predict as the model does."""
    gain: float
    """Expected tokens per second with single chains of their guesses, divided by those of steps without guesses."""

    def __str__(self) -> str:
        layers = ", ".join(map(str, self.skipped)) or "none"
        return f"layers to skip: {layers}; without them, {self.agreement:.0%} of the next tokens are the model's"

    def save(self, model: PreTrainedModel) -> Path:
        """Write them for `LayerSkipSource`. Returns the file. Raises OSError."""
        path = _path(model)
        stored.write(path, asdict(self))
        return path


def kept_layers(model: PreTrainedModel) -> SkippedLayers:
    """Read the file of `SkippedLayers.save`. Raises ValueError, which names the remedy, if there is none."""
    try:
        data = stored.read(_path(model)) or {}
        return SkippedLayers(tuple(map(int, data["skipped"])), float(data["agreement"]), float(data["gain"]))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"no layers to skip are known for {type(model).__name__}: find them by `lookahead tune --layer-skip "
            f"--model {model.name_or_path or 'NAME_OR_PATH'}`, or give skipped=(...)"
        ) from error


def _path(model: PreTrainedModel) -> Path:
    return stored.path_of("skipped-layers", model, processor(model.device), model.dtype)


def find_skipped_layers(
    runner: EagerRunner,
    prompts: Sequence[list[int]],
    seconds: float,
    progress: Callable[[float], None] = lambda done: None,
) -> SkippedLayers:
    """Find the layers to skip by greedy search, in about ``seconds``.

    Each round drops the layer without which agreement is highest, until the expected tokens per second no longer grow.
    (Draft & Verify, section 3.3, and SWIFT, section 4.2, search by Bayesian optimisation. The measure is SWIFT's, with
    the cached keys and values of the whole model.) Agreement hardly ever grows when layers are dropped. So a round does
    not try layers whose earlier agreement is below the best of this round.

    runner: of the whole model. prompts: token ids. Agreement is measured on the model's texts after them. progress:
    called with the share of the time that has passed.
    Raises UnsupportedModelError for a model whose layers cannot be skipped, ValueError if its texts are too short.
    """
    model, adapter = runner.model, runner.adapter
    count = len(_layer_list(model)[1])
    if not (adapter.can_grow and can_batch(model, adapter)):
        raise _unsupported(model, "not all of its layers hold the keys and values of all positions")
    began = time.perf_counter()
    samples = [sample for prompt in prompts if (sample := _Sample.after(prompt, runner)) is not None]
    if not samples:
        raise ValueError(f"after these prompts, {type(model).__name__} writes fewer than {CHUNK} tokens: give others")
    costs = step_costs(runner)
    each = seconds / (8 * count)  # for timing a pass

    def measured(skipped: list[int], agreement: float) -> SkippedLayers:
        # Both are timed now, because the machine may have become faster or slower since the costs were measured.
        rest, full = (time_passes(_runner_without(runner, left_out), [(1, 0)], each) for left_out in (skipped, []))
        # The bounds limit noise: a pass saves no more than the layers that it skips.
        share = min(max(rest[1, 0] / full[1, 0], 1 - len(skipped) / count), 1.0)
        return SkippedLayers(tuple(sorted(skipped)), agreement, _gain(agreement, share, costs))

    def is_over() -> bool:
        passed = time.perf_counter() - began
        progress(min(passed / seconds, 1.0))
        return passed > seconds

    dropped: list[int] = []
    agreements = dict.fromkeys(range(count), 1.0)  # without the layer, when it was last tried
    best = measured([], 1.0)
    while len(dropped) < min(count - 1, len(best.skipped) + PATIENCE) and not is_over():
        chosen = -1
        for layer in sorted(agreements, key=lambda layer: -agreements[layer]):
            if chosen >= 0 and (agreements[layer] <= agreements[chosen] or is_over()):
                break
            agreements[layer] = _agreement(_runner_without(runner, [*dropped, layer]), samples, [*dropped, layer])
            if chosen < 0 or agreements[layer] > agreements[chosen]:
                chosen = layer
        dropped.append(chosen)
        found = measured(dropped, agreements.pop(chosen))
        if found.gain > best.gain:
            best = found
    return best


@dataclass
class _Sample:
    """A text of the model, cut into chunks. Each chunk is a sequence of a batch, which follows all earlier chunks."""

    cache: LookaheadCache
    """The whole model's cache of the tokens before each chunk."""
    steps: list[Step]
    """The chunks, as chains of CHUNK rows."""
    said: torch.Tensor
    """The model's own next token after each row, int64 [chunks, CHUNK]."""

    @classmethod
    def after(cls, prompt: list[int], runner: EagerRunner) -> "_Sample | None":
        """Let the model continue a prompt. None if the text is shorter than a chunk."""
        model, half = runner.model, context_length(runner.model) // 2
        ids = torch.tensor([prompt[-min(PROMPT, half) :]], device=device_of(model))
        mask, most = torch.ones_like(ids), min(SAMPLE, half)
        text = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=most)[0]  # type: ignore[operator]
        starts = range(ids.shape[1], len(text) - CHUNK + 1, CHUNK)
        if not starts:
            return None
        full = runner.adapter.make_cache(len(text))
        with torch.no_grad():
            logits = runner.prefill(text[None, : starts[-1] + CHUNK], full, logits_to_keep=len(starts) * CHUNK).logits
        parts = [LookaheadCache([copy.copy(layer) for layer in full.layers], [start]) for start in starts]
        for part, start in zip(parts, starts, strict=True):
            rewind(part, start)
        cache = runner.adapter.make_cache(len(text))
        cache.stack(parts)
        chunks = text[starts[0] : starts[-1] + CHUNK].reshape(-1, CHUNK).tolist()
        steps = [lay_out(chunk[0], GuessTree.chain(chunk[1:], Origin.TEXT)) for chunk in chunks]
        return cls(cache, steps, logits.argmax(-1).reshape(-1, CHUNK))


def _runner_without(runner: EagerRunner, skipped: list[int]) -> EagerRunner:
    """Return an eager runner of the model without these layers, which must all be of one kind."""
    model = _make_without(runner.model, tuple(skipped))
    config, kept = model.config.get_text_config(decoder=True), len(runner.adapter.layers) - len(skipped)
    return EagerRunner(model, replace(runner.adapter, config=config, layers=runner.adapter.layers[:kept]))


def _agreement(runner: EagerRunner, samples: list[_Sample], skipped: list[int]) -> float:
    """Return the share of rows for which the remaining layers predict the model's token.

    runner: of the model without the skipped layers.
    """
    agrees = []
    for sample in samples:
        kept = [index for index in range(len(sample.cache.layers)) if index not in skipped]
        with torch.no_grad(), part_of(sample.cache, kept) as cache:
            agrees.append(runner.run(sample.steps, cache).logits.argmax(-1) == sample.said.flatten())
    return torch.cat(agrees).float().mean().item()


def _gain(agreement: float, share: float, costs: StepCosts) -> float:
    """Return `SkippedLayers.gain`, for chains of the best length.

    share: the time of a draft pass over one row, divided by that of the whole model's.
    """
    lengths, one = np.arange(1, LONGEST_CHAIN + 1), costs(1, 0)
    tokens = 1 + np.cumsum(agreement**lengths)
    seconds = lengths * share * one + costs(1 + lengths, 0)
    return float((tokens / seconds).max() * one)
