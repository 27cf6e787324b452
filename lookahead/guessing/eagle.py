"""Guesses from an EAGLE head: one layer that goes on with the model's own features.

EAGLE (Li et al. 2024, arXiv 2401.15077, section 3.1) and EAGLE-2 (arXiv 2406.16858), which has the same files, read the
last layer's output behind the final norm. EAGLE-3 (arXiv 2503.01840, section 3.1) reads three layers and has a
vocabulary of its own. The files are those of the original repository, of vLLM, SpecForge and speculators.

The head computes pairs (feature of a token, next token). What it makes of a pair is its idea of the next token's
feature, and so of what follows:

    text       a      b      c     root
    pairs     (fa,b) (fb,c) (fc,root)    |  (f'root,guess) (f'guess,next guess) ...
    computed by features of the model    |  by features of the head's own
"""

import time
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import LlamaConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from lookahead.guessing.checkpoint import Checkpoint
from lookahead.guessing.draft import MAX_ROWS, MIN_TOKENS, TOP_K, Draft
from lookahead.guessing.source import Batch, GuessSource, Limits, Needs, Outcome, likeliest
from lookahead.passes.costs import synchronize
from lookahead.step import grow
from ngram_pool import GuessTree

CHUNK = 512  # pairs of a text that one pass computes
ROOM = 256  # places that a cache is made larger by, at least
# Settings of a head's config.json that its layer is made of.
LAYER_SETTINGS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
    "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings",
)  # fmt: skip
UNKNOWN_SETTINGS = ("norm_before_fc", "fc_norm", "norm_output")  # further norms that some heads have


@dataclass
class _Text:
    """What the head has computed of one text, and what it can compute next."""

    keys: torch.Tensor
    """[key heads, places, size]: those of `length` pairs, and behind them those of guesses."""
    values: torch.Tensor
    length: int = 0
    waiting: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    """Features of consecutive tokens that are in no pair yet, [n, width], and the place of the first in the text."""

    def known(self) -> int:
        """The number of tokens up to the last whose feature waits; -1 if none does."""
        return self.waiting[-1][0] + len(self.waiting[-1][1]) if self.waiting else -1

    def put(self, begin: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values [heads, n, size] from place ``begin`` on; return all up to them."""
        end, room = begin + keys.shape[1], self.keys.shape[1]
        if end > room:
            more = max(ROOM, room, end - room)
            self.keys, self.values = (functional.pad(old, (0, 0, 0, more)) for old in (self.keys, self.values))
        self.keys[:, begin:end], self.values[:, begin:end] = keys, values
        return self.keys[:, :end], self.values[:, :end]

    def fork(self) -> "_Text":
        """A copy that goes its own way."""
        return _Text(self.keys.clone(), self.values.clone(), self.length, list(self.waiting))


class _Head:
    """The layer of an EAGLE head, with what stands before and behind it."""

    def __init__(self, model: PreTrainedModel, path: str | Path):
        output = model.get_output_embeddings()
        vocabulary, width = output.weight.shape
        self.device, dtype = output.weight.device, output.weight.dtype
        read = Checkpoint.read(path, self.device, dtype)
        settings = read.config | read.config.get("transformer_layer_config", {})  # speculators has the layer's in there
        config = LlamaConfig(**{name: settings[name] for name in LAYER_SETTINGS if settings.get(name) is not None})
        hidden, inner = config.hidden_size, config.intermediate_size
        self._heads, self._key_heads = config.num_attention_heads, config.num_key_value_heads
        self._size, self._epsilon = config.head_dim, config.rms_norm_eps
        self._activation = ACT2FN[config.hidden_act]
        self._rotary = LlamaRotaryEmbedding(config).to(self.device)
        layer = "midlayer." if "midlayer.self_attn.q_proj.weight" in read else "layers.0."
        self.is_third = layer + "hidden_norm.weight" in read
        self.layers = _layers_read(settings, model) if self.is_third else _last_layer(model)

        embedding = read.take_if_there("embed_tokens.weight", None, hidden)
        self._embed = model.get_input_embeddings() if embedding is None else torch.nn.Embedding.from_pretrained(embedding)
        if embedding is None and hidden != width:
            read.take("embed_tokens.weight", None, hidden)  # the model's does not fit: raises
        self._fuse = read.take("fc.weight", hidden, len(self.layers) * width if self.is_third else 2 * hidden)
        self._fuse_bias = read.take_if_there("fc.bias", hidden)
        if not self.is_third and hidden != width:
            raise ValueError(f"{read.folder} has hidden_size {hidden}, the model {width}: they are of another model")
        of_attention, qkv = (2 if self.is_third else 1) * hidden, layer + "self_attn."
        sizes = {"q": self._heads * self._size, "k": self._key_heads * self._size, "v": self._key_heads * self._size}
        self._qkv = torch.cat([read.take(f"{qkv}{x}_proj.weight", size, of_attention) for x, size in sizes.items()])
        biases = [read.take_if_there(f"{qkv}{x}_proj.bias", size) for x, size in sizes.items()]
        self._qkv_bias = None if all(bias is None for bias in biases) else torch.cat([
            torch.zeros(size, dtype=dtype, device=self.device) if bias is None else bias
            for bias, size in zip(biases, sizes.values(), strict=True)
        ])  # fmt: skip
        self._out = read.take(qkv + "o_proj.weight", hidden, sizes["q"])
        self._out_bias = read.take_if_there(qkv + "o_proj.bias", hidden)
        self._gate, self._up = (read.take(f"{layer}mlp.{x}_proj.weight", inner, hidden) for x in ("gate", "up"))
        self._down = read.take(layer + "mlp.down_proj.weight", hidden, inner)
        self._norm_behind = read.take(layer + "post_attention_layernorm.weight", hidden)
        self._tokens: torch.Tensor | None = None
        if self.is_third:
            self._norm_tokens = read.take(layer + "input_layernorm.weight", hidden)
            self._norm_features = read.take(layer + "hidden_norm.weight", hidden)
            self._norm_last = read.take("norm.weight", hidden)
            self._goes_on_normed = bool(_eagle_setting(settings, "norm_before_residual"))
            offsets = read.take_if_there("d2t", None)
            if offsets is not None:
                self._tokens = torch.arange(len(offsets), device=self.device) + offsets
                if not 0 <= self._tokens.min() <= self._tokens.max() < vocabulary:
                    raise ValueError(f"the tensor 'd2t' of {read.folder} leads to ids outside 0..{vocabulary - 1}")
            read.take_if_there("t2d", None)  # says the same as d2t
        self._project = output
        if self.is_third or "lm_head.weight" in read:
            rows = None if self._tokens is None else len(self._tokens)
            projection = read.take_if_there("lm_head.weight", rows, hidden)
            if projection is None and (self._tokens is not None or hidden != width):
                read.take("lm_head.weight", rows, hidden)  # the model's does not fit: raises
            if projection is not None:
                if self._tokens is None and len(projection) != vocabulary:
                    raise ValueError(
                        f"the tensor 'lm_head.weight' of {read.folder} has {len(projection)} rows for {vocabulary} "
                        "tokens, and there is no tensor 'd2t' to say which of them they stand for"
                    )
                self._project = _Linear(projection)
        for name in UNKNOWN_SETTINGS:
            if _eagle_setting(settings, name):
                raise ValueError(f"{read.folder}/config.json asks for {name}, which is not computed here")
        read.tensors = {name: each for name, each in read.tensors.items() if not name.endswith("rotary_emb.inv_freq")}
        read.finish()
        self._dtype = dtype

    def begin(self) -> _Text:
        nothing = torch.zeros(self._key_heads, 0, self._size, device=self.device, dtype=self._dtype)
        return _Text(nothing, nothing)

    def features(self, hidden_states: dict[int, torch.Tensor], rows: Any) -> torch.Tensor:
        """What pairs take of these rows of the model's layers, [n, hidden]."""
        states = torch.cat([hidden_states[i][rows].to(self.device, self._dtype) for i in self.layers], -1)
        return functional.linear(states, self._fuse, self._fuse_bias) if self.is_third else states

    def compute(
        self, text: _Text, begin: int, tokens: list[int], features: torch.Tensor, positions: torch.Tensor,
        sees: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Compute pairs into the places of the cache from ``begin`` on, and return the next features, [n, hidden].

        sees: bool [n, begin + n], which places of the cache each pair sees.
        """
        said = self._embed(torch.tensor(tokens, device=self.device)).to(self._dtype)
        if self.is_third:
            normed = self._normed(features, self._norm_features)
            stream = normed if self._goes_on_normed else features
            entering = torch.cat([self._normed(said, self._norm_tokens), normed], -1)
        else:
            stream = entering = functional.linear(torch.cat([said, features], -1), self._fuse, self._fuse_bias)
        projected = functional.linear(entering, self._qkv, self._qkv_bias).view(len(tokens), -1, self._size)
        queries, keys, values = projected.transpose(0, 1).split([self._heads, self._key_heads, self._key_heads])
        cos, sin = self._rotary(said, positions[None])
        queries, keys = apply_rotary_pos_emb(queries[None], keys[None], cos, sin)
        keys, values = text.put(begin, keys[0], values)
        attended = functional.scaled_dot_product_attention(
            queries, keys[None], values[None], sees[None, None], enable_gqa=self._heads != self._key_heads
        )
        mixed = attended[0].transpose(0, 1).reshape(len(tokens), -1)
        stream = stream + functional.linear(mixed, self._out, self._out_bias)
        normed = self._normed(stream, self._norm_behind)
        gated = self._activation(functional.linear(normed, self._gate)) * functional.linear(normed, self._up)
        return stream + functional.linear(gated, self._down)

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """[n, vocabulary of the head]"""
        return self._project(self._normed(features, self._norm_last) if self.is_third else features)

    def token_of(self, ids: Any) -> Any:
        """The model's tokens for ids of the head's vocabulary, an int64 array."""
        return ids if self._tokens is None else self._tokens.cpu().numpy()[ids]

    @property
    def is_reduced(self) -> bool:
        """Whether the head has a vocabulary of its own."""
        return self._tokens is not None

    def _normed(self, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(states.float(), weight.shape, eps=self._epsilon).to(states.dtype) * weight


class _Linear:
    def __init__(self, weight: torch.Tensor):
        self.weight = weight

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        return functional.linear(states, self.weight)


def _last_layer(model: PreTrainedModel) -> tuple[int, ...]:
    return (model.config.get_text_config(decoder=True).num_hidden_layers,)


def _eagle_setting(settings: dict[str, Any], name: str) -> Any:
    """A setting that stands in config.json itself or under eagle_config."""
    return settings.get(name, (settings.get("eagle_config") or {}).get(name))


def _layers_read(settings: dict[str, Any], model: PreTrainedModel) -> tuple[int, ...]:
    """The layers whose outputs an EAGLE-3 head reads; 0 is the embedding, 1 the first layer.

    By default, what enters layers 2, n // 2 and n - 3 of n, counted from 0. A list at the top of config.json counts in
    the same way (vLLM, speculators); one under eagle_config names layers by their outputs, counted from 0 (SpecForge).
    """
    (count,) = _last_layer(model)
    name = "eagle_aux_hidden_state_layer_ids"
    nested = (settings.get("eagle_config") or {}).get(name)
    layers = settings.get(name) or [layer + 1 for layer in nested or []] or [2, count // 2, count - 3]
    if sorted(set(layers)) != list(layers) or layers[0] < 0 or layers[-1] > count:
        raise ValueError(
            f"an EAGLE-3 head that reads layers {layers} does not fit a model of {count} layers: give the layers that "
            f"it was trained with as {name} in its config.json"
        )
    return tuple(layers)


class _Pace:
    """Seconds of a pass over guesses, as the last ones took."""

    seconds = 0.0


class EagleSource(GuessSource):
    """Proposes a tree that an EAGLE head grows best-first, as a draft model's does (EAGLE-2, section 4.1).

    Each text has a cache of its own. What the model has written is computed from the model's features; guesses from the
    head's, behind them in the same cache, where the next step overwrites them.
    """

    def __init__(self, model: PreTrainedModel, path: str | Path):
        """model: the one that the head was trained for, on its device and in its dtype, which the head takes over.

        path: a folder with config.json and the tensors. Where it has no embedding or projection, the model's serve.
        Raises FileNotFoundError or ValueError if the files are not those of such a head, naming the tensor.
        """
        self._head = _Head(model, path)
        self.needs = Needs(hidden_states=self._head.layers)
        self._pace = _Pace()  # shared by all calls

    def start(self, batch: Batch) -> None:
        self._temperature, self._vocabulary = batch.temperature, batch.vocabulary
        self._prompts = batch.texts
        self._texts = [self._head.begin() for _ in batch.texts]

    def read(self, text: list[int], logits: torch.Tensor, hidden_states: dict[int, torch.Tensor]) -> None:
        if not text and len(self._prompts) > 1:
            return  # embeddings do not tell which prompt of the batch they are
        one = self._head.begin()
        with torch.inference_mode():
            features = self._head.features(hidden_states, slice(None))
            first = len(text) - len(features)
            if first < -1:  # embeddings: only the last is followed by a token
                features, first = features[-1:], -1
            if len(features) > 1:
                one.waiting.append((first, features[:-1]))
                self._catch_up(one, text)
            one.waiting.append((len(text) - 1, features[-1:]))
        for b, prompt in enumerate(self._prompts):
            if prompt == text:
                self._texts[b] = one.fork()

    def observe(self, outcome: Outcome) -> None:
        with torch.inference_mode():
            for b, (one, text, path) in enumerate(zip(self._texts, outcome.texts, outcome.paths, strict=True)):
                one.waiting.append((len(text) - 1, self._head.features(outcome.hidden_states, (b, path))))

    def keep(self, sequences: list[int]) -> None:
        self._texts = [self._texts[b] for b in sequences]

    def propose(self, texts: list[list[int]], limits: Limits) -> list[GuessTree]:
        with torch.inference_mode():
            return [
                self._after(one, text, depth, limits)
                for one, text, depth in zip(self._texts, texts, limits.depths, strict=True)
            ]

    def _after(self, one: _Text, text: list[int], depth: int, limits: Limits) -> GuessTree:
        """Grow the tree of one text, as long as passes pay."""
        if depth <= 0 or one.known() != len(text) - 1:  # after a pause, the last token's feature is not known
            return GuessTree.empty()
        features = self._catch_up(one, text)[-1:]
        draft = Draft.after(text[-1:])
        draft.take(*self._likeliest(features))
        while True:
            guesses = draft.worth_a_row(draft.candidates(depth - 1)[:MAX_ROWS], limits)
            gain = sum(guess.chance for guess in guesses)
            if not guesses or gain < (MIN_TOKENS if limits.rate is None else limits.rate * self._pace.seconds):
                return draft.tree(depth, limits.min_probability)
            began = time.perf_counter()
            computed = len(draft.ids)
            for guess in guesses:
                draft.add(guess)
            step = grow(draft.ids, draft.parents, computed)
            sees = torch.from_numpy(step.ancestors[computed:]).to(self._head.device)
            sees = functional.pad(sees[:, 1:], (one.length, 0), value=True)  # the root is the last of the committed
            positions = torch.from_numpy(step.depths[computed:]).to(self._head.device) + len(text) - 2
            made = self._head.compute(
                one, one.length + computed - 1, draft.ids[computed:], features[draft.parents[computed:]], positions, sees
            )  # fmt: skip
            features = torch.cat([features, made])
            draft.take(*self._likeliest(made))
            synchronize(self._head.device)
            took = time.perf_counter() - began
            self._pace.seconds += (took - self._pace.seconds) * (0.1 if self._pace.seconds else 1.0)

    def _catch_up(self, one: _Text, text: list[int]) -> torch.Tensor:
        """Compute the pairs whose features wait; return the next features of the last of them, [n, hidden]."""
        features = torch.cat([some for _, some in one.waiting])
        places = torch.cat([first + torch.arange(len(some)) for first, some in one.waiting]).to(self._head.device)
        tokens = [text[first + 1 + i] for first, some in one.waiting for i in range(len(some))]
        one.waiting.clear()
        for begin in range(0, len(tokens), CHUNK):
            part = slice(begin, begin + CHUNK)
            n = len(tokens[part])
            sees = torch.ones(n, one.length + n, dtype=torch.bool, device=self._head.device).tril(one.length)
            made = self._head.compute(one, one.length, tokens[part], features[part], places[part], sees)
            one.length += n
        return made

    def _likeliest(self, features: torch.Tensor) -> tuple[Any, Any]:
        """The likeliest tokens behind each feature and their probabilities, [n, k]."""
        logits = self._head.logits(features)
        if not self._head.is_reduced:
            logits = logits[:, : self._vocabulary]
        ids, chances = likeliest(logits, self._temperature, TOP_K)
        return self._head.token_of(ids), chances
