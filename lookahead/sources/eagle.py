"""Guesses from an EAGLE head: one layer that continues the model's own features.

EAGLE (Li et al. 2024, arXiv 2401.15077, section 3.1) and EAGLE-2 (arXiv 2406.16858), which has the same files, read the
last layer's output after the final norm. EAGLE-3 (arXiv 2503.01840, section 3.1) reads three layers and has its own
vocabulary. The files are those of the original repository, of vLLM, SpecForge and speculators.

The head computes pairs (feature of a token, next token). Its output for a pair estimates the next token's feature,
which gives the next token's successor:

    text       a      b      c     root
    pairs     (fa,b) (fb,c) (fc,root)    |  (f'root,guess) (f'guess,next guess) ...
    computed by features of the model    |  by features of the head's own
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from lookahead.extending import (
    Batch,
    Guesser,
    GuessSource,
    Limits,
    Needs,
    Outcome,
    draws_at,
    gemm,
    synchronize,
    top_k,
    vocabulary_of,
)
from lookahead.sources.checkpoint import Checkpoint, Sizes, depth_of, projection_of
from lookahead.sources.draft import MAX_ROWS, MIN_TOKENS, TOP_K, Draft, Sharpness
from ngram_pool import GuessTree

CHUNK = 512  # pairs of a text that one pass computes
FADE = 0.98  # lowers the recorded time of a pass that was too expensive, so that it is tried again
ROOM = 256  # least number of places by which a cache grows
# Settings in a head's config.json that define its layer.
LAYER_SETTINGS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
    "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings",
)  # fmt: skip
UNKNOWN_SETTINGS = ("norm_before_fc", "fc_norm", "norm_output")  # further norms that some heads have


@dataclass
class _KeysAndValues:
    """The keys and values of an EAGLE head for the pairs of one text, followed by those of guesses."""

    keys: torch.Tensor
    """[key heads, places, size]"""
    values: torch.Tensor

    def put(self, start: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values [heads, n, size] from place ``start`` on; return all up to their end."""
        stop, room = start + keys.shape[1], self.keys.shape[1]
        if stop > room:
            more = max(ROOM, room, stop - room)
            self.keys, self.values = (functional.pad(old, (0, 0, 0, more)) for old in (self.keys, self.values))
        self.keys[:, start:stop], self.values[:, start:stop] = keys, values
        return self.keys[:, :stop], self.values[:, :stop]

    def fork(self) -> "_KeysAndValues":
        """An independent copy."""
        return _KeysAndValues(self.keys.clone(), self.values.clone())


@dataclass
class Text:
    """The pairs that a head has computed for one text, and the features that it can compute next."""

    cached: Any
    """The head's own cache, of `length` pairs and then of guesses. It has a method `fork`."""
    length: int = 0
    waiting: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    """Features of consecutive tokens that are in no pair yet, [n, width], and the place of the first in the text."""

    def known(self) -> int:
        """Number of tokens up to the last one with a waiting feature; -1 if none waits."""
        return self.waiting[-1][0] + len(self.waiting[-1][1]) if self.waiting else -1

    def fork(self) -> "Text":
        """An independent copy."""
        return Text(self.cached.fork(), self.length, list(self.waiting))


class _Linear:
    """A linear layer of a checkpoint, with a bias if there is one."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        self.weight, self._bias = weight, bias

    @classmethod
    def from_file(cls, file: Checkpoint, name: str, outputs: int, inputs: int) -> "_Linear":
        return cls(file.read(name + ".weight", outputs, inputs), file.find(name + ".bias", outputs))

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        return gemm.linear(states, self.weight, self._bias)


class _Head:
    """The layer of an EAGLE head, with the parts before and after it."""

    def __init__(self, model: PreTrainedModel, path: str | Path):
        output = projection_of(model)
        self._vocabulary, self._width = output.weight.shape
        self.device, self._dtype = output.weight.device, output.weight.dtype
        file = Checkpoint.load(path, self.device, self._dtype)
        settings = file.config | (file.config.get("transformer_layer_config") or {})  # the layer's, for speculators
        for name in UNKNOWN_SETTINGS:
            if _eagle_setting(settings, name):
                raise ValueError(f"{file.folder}/config.json asks for {name}, which lookahead does not support")
        try:
            config = LlamaConfig(**{name: settings[name] for name in LAYER_SETTINGS if settings.get(name) is not None})
            rotary = LlamaRotaryEmbedding(config)
        except Exception as error:  # a value may be unfit in any way
            raise ValueError(f"{file.folder}/config.json describes no layer like Llama's: {error}") from error
        self._rotary = rotary.to(self.device)
        self._hidden, self._epsilon = config.hidden_size, config.rms_norm_eps
        layer = "midlayer." if "midlayer.self_attn.q_proj.weight" in file else "layers.0."
        self._is_third = layer + "hidden_norm.weight" in file
        count = depth_of(model)
        self.layers = _layers_read(settings, count) if self._is_third else (count,)
        if not self._is_third and self._hidden != self._width:
            raise ValueError(
                f"{file.folder} has hidden_size {self._hidden}, the model has {self._width}: the head was made for "
                "another model"
            )
        entering = len(self.layers) * self._width if self._is_third else 2 * self._hidden
        self._fuse = _Linear.from_file(file, "fc", self._hidden, entering)
        self._read_layer(file, layer, config)
        self.tokens: np.ndarray | None = None
        """Int64, the model's token for each of the head's; None if they are the same."""
        if self._is_third:
            self._norm_tokens = file.read(layer + "input_layernorm.weight", self._hidden)
            self._norm_features = file.read(layer + "hidden_norm.weight", self._hidden)
            self._norm_last = file.read("norm.weight", self._hidden)
            self._goes_on_normed = bool(_eagle_setting(settings, "norm_before_residual"))
            self.tokens = self._read_vocabulary(file)
        fits = self._hidden == self._width  # whether the head can use the model's own embedding
        self._embed: Callable[[torch.Tensor], torch.Tensor] = model.get_input_embeddings()
        self.reads: int | None = None
        """Number of tokens that the head's own embedding knows; None if it uses the model's."""
        if "embed_tokens.weight" in file or not fits:
            embedding = file.read("embed_tokens.weight", None, self._hidden)
            if len(embedding) < vocabulary_of(model):
                raise ValueError(
                    f"the tensor 'embed_tokens.weight' of {file.folder} has {len(embedding)} rows for "
                    f"{vocabulary_of(model)} tokens: the head was made for another model"
                )
            self._embed, self.reads = partial(functional.embedding, weight=embedding), len(embedding)
        self._project: nn.Linear | _Linear = output
        if "lm_head.weight" in file or not fits or self.tokens is not None:
            rows = self._vocabulary if self.tokens is None else len(self.tokens)
            self._project = _Linear.from_file(file, "lm_head", rows, self._hidden)
        file.tensors = {name: each for name, each in file.tensors.items() if not name.endswith("rotary_emb.inv_freq")}
        file.finish()

    def _read_layer(self, file: Checkpoint, layer: str, config: LlamaConfig) -> None:
        """Read the layer's own tensors. layer: prefix of their names."""
        hidden, inner, queries = self._hidden, config.intermediate_size, config.num_attention_heads
        keys = config.num_key_value_heads or queries
        self._size = config.head_dim or hidden // queries
        self._split = [queries, keys, keys]
        entering = (2 if self._is_third else 1) * hidden
        self._qkv = [
            _Linear.from_file(file, f"{layer}self_attn.{x}_proj", heads * self._size, entering)
            for x, heads in zip("qkv", self._split, strict=True)
        ]
        self._out = _Linear.from_file(file, layer + "self_attn.o_proj", hidden, queries * self._size)
        self._gate, self._up = (_Linear.from_file(file, f"{layer}mlp.{x}_proj", inner, hidden) for x in ("gate", "up"))
        self._down = _Linear.from_file(file, layer + "mlp.down_proj", hidden, inner)
        self._activation = ACT2FN[config.hidden_act]
        self._norm_after = file.read(layer + "post_attention_layernorm.weight", hidden)

    def _read_vocabulary(self, file: Checkpoint) -> np.ndarray | None:
        file.read_ids("t2d")  # says the same as d2t
        offsets = file.read_ids("d2t")
        if offsets is None:
            return None
        tokens = np.arange(len(offsets)) + offsets
        if tokens.min() < 0 or tokens.max() >= self._vocabulary:
            raise ValueError(f"the tensor 'd2t' of {file.folder} leads to ids outside 0..{self._vocabulary - 1}")
        if len(np.unique(tokens)) < len(tokens):
            raise ValueError(f"the tensor 'd2t' of {file.folder} leads to an id twice")
        return tokens

    def new_text(self) -> Text:
        nothing = torch.zeros(self._split[1], 0, self._size, device=self.device, dtype=self._dtype)
        return Text(_KeysAndValues(nothing, nothing))

    def features(self, hidden_states: dict[int, torch.Tensor], rows: Any) -> torch.Tensor:
        """The features of these rows, from the model's layers, [n, hidden]."""
        states = torch.cat([hidden_states[i][rows].to(self.device, self._dtype) for i in self.layers], -1)
        return self._fuse(states) if self._is_third else states

    def compute(
        self, text: Text, start: int, tokens: list[int], features: torch.Tensor, positions: torch.Tensor,
        sees: torch.Tensor, depths: list[int],
    ) -> torch.Tensor:  # fmt: skip
        """Compute pairs, write them to the cache from place ``start`` on, and return the next features, [n, hidden].

        sees: bool [n, start + n], the places of the cache that each pair sees. depths: the tokens' distances from the
        root, 0 in the text; an EAGLE head ignores them.
        """
        said = self._embed(torch.tensor(tokens, device=self.device)).to(self._dtype)
        if self._is_third:
            normed = self._normed(features, self._norm_features)
            stream = normed if self._goes_on_normed else features
            entering = torch.cat([self._normed(said, self._norm_tokens), normed], -1)
        else:
            stream = entering = self._fuse(torch.cat([said, features], -1))
        queries, keys, values = (
            project(entering).view(len(tokens), heads, self._size).transpose(0, 1)
            for project, heads in zip(self._qkv, self._split, strict=True)
        )
        cos, sin = self._rotary(said, positions[None])
        queries, keys = apply_rotary_pos_emb(queries[None], keys[None], cos, sin)
        keys, values = text.cached.put(start, keys[0], values)
        attended = functional.scaled_dot_product_attention(
            queries, keys[None], values[None], sees[None, None], enable_gqa=len(queries[0]) != len(keys)
        )
        stream = stream + self._out(attended[0].transpose(0, 1).reshape(len(tokens), -1))
        normed = self._normed(stream, self._norm_after)
        return stream + self._down(self._activation(self._gate(normed)) * self._up(normed))

    def logits(self, features: torch.Tensor, depths: list[int]) -> torch.Tensor:
        """[n, vocabulary of the head]. depths: as for `compute`."""
        states = self._normed(features, self._norm_last) if self._is_third else features
        return self._project(states.to(self._project.weight.dtype))  # the model's own may have changed its dtype

    def _normed(self, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(states.float(), weight.shape, eps=self._epsilon).to(states.dtype) * weight


def _eagle_setting(settings: dict[str, Any], name: str) -> Any:
    """A setting in config.json itself, or in its eagle_config."""
    return settings.get(name, (settings.get("eagle_config") or {}).get(name))


def _layers_read(settings: dict[str, Any], count: int) -> tuple[int, ...]:
    """The layers whose outputs an EAGLE-3 head reads, in a model of ``count``; 0 is the embedding, 1 the first layer.

    By default, these are the inputs of layers 2, n // 2 and n - 3 of n, counted from 0. A list at the top of
    config.json counts in the same way (vLLM, speculators). A list in eagle_config counts outputs from 0 (SpecForge).
    """
    name = "eagle_aux_hidden_state_layer_ids"
    nested = (settings.get("eagle_config") or {}).get(name)
    layers = settings.get(name) or [layer + 1 for layer in nested or []] or [2, count // 2, count - 3]
    if sorted(set(layers)) != list(layers) or layers[0] < 0 or layers[-1] > count:
        raise ValueError(
            f"an EAGLE-3 head that reads layers {layers} does not fit a model of {count} layers: give the layers from "
            f"its training as {name} in its config.json"
        )
    return tuple(layers)


class _PassTime:
    """Seconds of a recent pass over guesses."""

    seconds = 0.0


class EagleSource(GuessSource):
    """Proposes a tree that an EAGLE head grows best-first, as a draft model does (EAGLE-2, section 4.1)."""

    def __init__(self, model: PreTrainedModel, path: str | Path):
        """model: the one that the head was trained for. The head uses its device and dtype.

        path: a folder with config.json and the tensors. A missing embedding or projection is the model's.
        Raises FileNotFoundError or ValueError if the files are not those of such a head, naming the tensor.
        """
        self._draft_with(model, _Head(model, path))

    def _draft_with(self, model: PreTrainedModel, head: Any) -> None:
        """head: a `_Head`, or an object with the same methods."""
        self.head, self._sizes = head, Sizes.of(model)
        self.needs = Needs(hidden_states=head.layers)
        self.pass_time = _PassTime()
        self.sharpness = {has_draws: Sharpness() for has_draws in (False, True)}
        """With known draws and without."""

    def check_model(self, model: PreTrainedModel) -> None:
        self._sizes.check(model, type(self).__name__)
        if self.head.reads is not None and (known := vocabulary_of(model)) > self.head.reads:
            raise ValueError(
                f"the embedding of the {type(self).__name__} has {self.head.reads} rows for the {known} tokens of "
                f"{type(model).__name__}: it was made before the model got more tokens"
            )

    def start(self, batch: Batch) -> "EagleGuesser":
        return EagleGuesser(self, batch)


class EagleGuesser(Guesser):
    """An EAGLE head in one call.

    Each text has its own cache. Emitted tokens are computed from the model's features. Guesses are computed from the
    head's features and follow them in the same cache, where the next step overwrites them.
    """

    def __init__(self, source: EagleSource, batch: Batch):
        self._head, self._pass_time, self._sharpness = source.head, source.pass_time, source.sharpness
        self._batch = batch
        self._texts = [self._head.new_text() for _ in batch.texts]
        self._drafts: list[Draft | None] = []

    def observe_prompt(self, text: list[int], logits: torch.Tensor, hidden_states: dict[int, torch.Tensor]) -> None:
        if not (sequences := self._batch.sequences_of(text)):
            return
        one = self._head.new_text()
        with torch.inference_mode():
            features = self._head.features(hidden_states, slice(None))
            first = len(text) - len(features)
            if first < -1:  # a prompt of embeddings: only the last is followed by a token
                features, first = features[-1:], -1
            if len(features) > 1:
                one.waiting.append((first, features[:-1]))
                self._catch_up(one, text)
            one.waiting.append((len(text) - 1, features[-1:].clone()))  # a clone, to free the rest of the prompt's
        for b in sequences:
            self._texts[b] = one.fork()

    def observe(self, outcome: Outcome) -> None:
        with torch.inference_mode():
            for one, text, path, first in zip(self._texts, outcome.texts, outcome.paths, outcome.first, strict=True):
                rows = [first + row for row in path]
                one.waiting.append((len(text) - 1, self._head.features(outcome.hidden_states, rows)))
        for draft, emitted in zip(self._drafts, outcome.emitted, strict=True):
            if draft is not None:
                draft.teach(draft.accepted(emitted), emitted)

    def select(self, sequences: list[int]) -> None:
        self._texts = [self._texts[b] for b in sequences]

    def propose(self, texts: list[list[int]], limits: Limits) -> list[GuessTree]:
        self._drafts = []
        draws = limits.draws or [None] * len(texts)
        with torch.inference_mode():
            return [
                self._after(one, text, depth, limits, known)
                for one, text, depth, known in zip(self._texts, texts, limits.depths, draws, strict=True)
            ]

    def _after(self, one: Text, text: list[int], depth: int, limits: Limits, draws: np.ndarray | None) -> GuessTree:
        """Grow the tree of one text, while passes pay."""
        if depth <= 0 or one.known() != len(text) - 1:  # after a pause, the last token's feature is not known
            self._drafts.append(None)
            return GuessTree.empty()
        features = self._catch_up(one, text)[-1:]
        self.passes += 1
        draft = Draft(text[-1:], self._sharpness[draws is not None])
        self._drafts.append(draft)
        draft.expand(*self._top_k(features, [0], draws))
        while guesses := draft.worth_a_row(draft.candidates(depth - 1)[:MAX_ROWS], limits):
            price = MIN_TOKENS if limits.rate is None else limits.rate * self._pass_time.seconds
            if sum(guess.chance for guess in guesses) < price:
                self._pass_time.seconds *= FADE
                break
            began = time.perf_counter()
            for guess in guesses:
                draft.add(guess)
            step, new = draft.step(draft.computed), slice(draft.computed, None)
            sees = torch.from_numpy(step.ancestors[new, 1:]).to(self._head.device)
            sees = functional.pad(sees, (one.length, 0), value=True)  # the committed places, the root's last
            positions = torch.from_numpy(step.depths[new]).to(self._head.device) + len(text) - 2
            place, above = one.length + draft.computed - 1, features[step.parents[new]]
            depths = step.depths[new].tolist()
            made = self._head.compute(one, place, step.ids[new].tolist(), above, positions, sees, depths)
            self.passes += 1
            features = torch.cat([features, made])
            draft.expand(*self._top_k(made, depths, draws))
            synchronize(self._head.device)
            took = time.perf_counter() - began
            self._pass_time.seconds += (took - self._pass_time.seconds) * (0.1 if self._pass_time.seconds else 1.0)
        return draft.tree(depth, limits.min_probability)

    def _catch_up(self, one: Text, text: list[int]) -> torch.Tensor:
        """Compute the pairs whose features wait; return the next features of the last of them, [n, hidden]."""
        features = torch.cat([some for _, some in one.waiting])
        device = self._head.device
        places = torch.cat([first + torch.arange(len(some), device=device) for first, some in one.waiting])
        tokens = [text[first + 1 + i] for first, some in one.waiting for i in range(len(some))]
        one.waiting.clear()
        for start in range(0, len(tokens), CHUNK):
            part = slice(start, start + CHUNK)
            n = len(tokens[part])
            sees = torch.ones(n, one.length + n, dtype=torch.bool, device=self._head.device).tril(one.length)
            made = self._head.compute(one, one.length, tokens[part], features[part], places[part], sees, [0] * n)
            one.length += n
        return made

    def _top_k(
        self, features: torch.Tensor, depths: list[int], draws: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """The top tokens after each feature and their probabilities, [n, k]. depths: of the features' tokens."""
        size = self._batch.vocabulary
        known, logits = draws_at([draws], [depths], size), self._head.logits(features, depths)[:, :size]
        tokens = self._head.tokens
        return top_k(logits, self._batch.temperature, TOP_K, None if known is None else known[0], tokens)
