"""Guesses from Medusa heads: from one hidden state, each head predicts the token of one later position.

Cai et al. 2024, arXiv 2401.10774, section 3.1. The files are those of the original repository, or of vLLM.
"""

import heapq
from itertools import count
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional
from transformers import PreTrainedModel

from lookahead.extending import Batch, Guesser, GuessSource, Limits, Needs, Outcome, draws_at, gemm, top_k
from lookahead.sources.checkpoint import Checkpoint, Sizes, projection_of
from ngram_pool import GuessTree

TOP_K = 8  # guesses of each head


class _Head:
    """Layers x + SiLU(W x + b), and a projection to the vocabulary."""

    def __init__(self, layers: list[tuple[torch.Tensor, torch.Tensor | None]], projection: torch.Tensor):
        self.depth, self._layers = len(layers), layers
        self._projection = projection

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """Logits [batch, vocabulary] from hidden states [batch, hidden]."""
        for weight, bias in self._layers:
            states = states + functional.silu(gemm.linear(states, weight, bias))
        return gemm.linear(states.to(self._projection.dtype), self._projection)  # the model's own may change its dtype


def _layers(
    checkpoint: Checkpoint, name: str, hidden: int, least: int = 0
) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Read a head's layers, weight and bias. name: with {} for a layer's number. least: required number of layers."""
    found: list[tuple[torch.Tensor, torch.Tensor | None]] = []
    while (each := name.format(len(found))) + ".weight" in checkpoint or len(found) < least:
        bias = checkpoint.find(each + ".bias", hidden)
        found.append((checkpoint.read(each + ".weight", hidden, hidden), bias))
    return found


class MedusaSource(GuessSource):
    """Proposes the most likely combinations of the heads' predictions, as if they were independent.

    From the last layer's hidden state at a token, head k = 0, 1, ... predicts the token k + 2 places later; the model
    itself predicts the next one. A step that emits several tokens runs the heads only once.
    """

    def __init__(self, model: PreTrainedModel, path: str | Path):
        """model: the one that the heads were trained for. The heads use its device and dtype.

        path: a folder with config.json and medusa_lm_head.safetensors or .pt (original), or model.safetensors (vLLM).
        Raises FileNotFoundError or ValueError if the files are not those of such heads, naming the tensor.
        """
        head, self._sizes = projection_of(model), Sizes.of(model)
        vocabulary, hidden = self._sizes.vocabulary, self._sizes.hidden
        checkpoint = Checkpoint.load(path, head.weight.device, head.weight.dtype)
        self.needs = Needs(hidden_states=(self._sizes.layers,))  # the last layer's output after the final norm
        for prefix in ("medusa_heads.", "medusa_head."):
            checkpoint.tensors = {name.removeprefix(prefix): each for name, each in checkpoint.tensors.items()}
        self.tokens: np.ndarray | None = None
        """The tokens of the heads' reduced vocabulary."""
        if any(name.startswith("blocks.") for name in checkpoint.tensors):
            self._heads = self._of_vllm(checkpoint, vocabulary, hidden, head.weight)
        else:
            self._heads = self._original(checkpoint, vocabulary, hidden)
        checkpoint.finish()
        depths = [head.depth for head in self._heads]
        if len(set(depths)) > 1:
            raise ValueError(
                f"the heads of {checkpoint.folder} have {depths} layers: some of their tensors are missing"
            )
        self._device, self._dtype = head.weight.device, head.weight.dtype

    @staticmethod
    def _original(checkpoint: Checkpoint, vocabulary: int, hidden: int) -> list[_Head]:
        """0.0.linear.weight, 0.0.linear.bias, ..., 0.1.weight: for each head, its layers, then its projection."""
        heads: list[_Head] = []
        while f"{len(heads)}.0.linear.weight" in checkpoint or f"{len(heads)}.0.weight" in checkpoint or not heads:
            h = len(heads)
            layers = _layers(checkpoint, f"{h}.{{}}.linear", hidden)
            heads.append(_Head(layers, checkpoint.read(f"{h}.{len(layers)}.weight", vocabulary, hidden)))
        return heads

    def _of_vllm(self, checkpoint: Checkpoint, vocabulary: int, hidden: int, models_own: torch.Tensor) -> list[_Head]:
        """blocks.0.layers.0.weight, ..., lm_heads.0.weight; token_map lists the tokens of a reduced vocabulary."""
        kept = self.tokens = checkpoint.read_ids("token_map")
        if kept is not None:
            if not 0 <= kept.min() <= kept.max() < vocabulary:
                raise ValueError(f"the tensor 'token_map' of {checkpoint.folder} has ids outside 0..{vocabulary - 1}")
            if len(np.unique(kept)) < len(kept):
                raise ValueError(f"the tensor 'token_map' of {checkpoint.folder} has an id twice")

        def projection(name: str | None) -> torch.Tensor:
            weight = models_own if name is None else checkpoint.read(name, None, hidden)
            if kept is not None and len(weight) == vocabulary:
                weight = weight[kept]
            wanted = vocabulary if kept is None else len(kept)
            if len(weight) != wanted:
                raise ValueError(f"the tensor {name!r} of {checkpoint.folder} has {len(weight)} rows, not {wanted}")
            return weight

        shared = None
        if checkpoint.config.get("original_lm_head"):  # one projection for all heads: given, or the model's
            given = (name for name in ("lm_head.weight", "lm_heads.0.weight") if name in checkpoint)
            shared = projection(next(given, None))
        heads: list[_Head] = []
        while f"blocks.{len(heads)}.layers.0.weight" in checkpoint or not heads:
            h = len(heads)
            layers = _layers(checkpoint, f"blocks.{h}.layers.{{}}", hidden, least=1)
            heads.append(_Head(layers, projection(f"lm_heads.{h}.weight") if shared is None else shared))
        return heads

    def check_model(self, model: PreTrainedModel) -> None:
        self._sizes.check(model, "MedusaSource")

    def start(self, batch: Batch) -> "MedusaGuesser":
        return MedusaGuesser(self, batch)

    def __call__(self, states: list[torch.Tensor], count: int) -> torch.Tensor:
        """Return the logits of the first ``count`` heads for these hidden states, [states, heads, vocabulary]."""
        with torch.inference_mode():
            stacked = torch.stack(states).to(self._device, self._dtype)
            return torch.stack([head(stacked) for head in self._heads[:count]], dim=1)


class MedusaGuesser(Guesser):
    """Medusa heads in one call."""

    def __init__(self, heads: MedusaSource, batch: Batch):
        self._heads, self._batch = heads, batch
        # For each sequence, the hidden state of its last computed token, and the number of tokens up to it.
        self._states: list[tuple[torch.Tensor, int] | None] = [None] * len(batch.texts)

    def observe_prompt(self, text: list[int], logits: torch.Tensor, hidden_states: dict[int, torch.Tensor]) -> None:
        for b in self._batch.sequences_of(text):
            self._states[b] = self._last(hidden_states)[-1].clone(), len(text)  # a clone, to free the prompt's

    def observe(self, outcome: Outcome) -> None:
        states = self._last(outcome.hidden_states)
        for b, (text, path, first) in enumerate(zip(outcome.texts, outcome.paths, outcome.first, strict=True)):
            self._states[b] = states[first + path[-1]], len(text) + len(path) - 1

    def select(self, sequences: list[int]) -> None:
        self._states = [self._states[b] for b in sequences]

    def propose(self, texts: list[list[int]], limits: Limits) -> list[GuessTree]:
        trees = [GuessTree.empty() for _ in texts]
        # After a pause, the state is that of an earlier text.
        known = [
            (b, state[0])
            for b, (text, state) in enumerate(zip(texts, self._states, strict=True))
            if state is not None and state[1] == len(text) - 1 and limits.depths[b] > 0
        ]
        if not known:
            return trees
        logits = self._heads([state for _, state in known], max(limits.depths))
        self.passes += 1
        count, size = 1 if limits.is_chain else TOP_K, self._batch.vocabulary
        depths = [list(range(logits.shape[1]))] * len(known)
        draws = draws_at([limits.draws[b] for b, _ in known] if limits.draws else [], depths, size)
        tokens, chances = top_k(logits[..., :size], self._batch.temperature, count, draws, self._heads.tokens)
        for i, (b, _) in enumerate(known):
            trees[b] = product_tree(tokens[i, : limits.depths[b]], chances[i], limits.guesses, limits.min_probability)
        return trees

    def _last(self, hidden_states: dict[int, torch.Tensor]) -> torch.Tensor:
        return hidden_states[self._heads.needs.hidden_states[0]]


def product_tree(tokens: np.ndarray, chances: np.ndarray, guesses: int, min_probability: float) -> GuessTree:
    """The most likely branches, if tokens at different depths are independent.

    tokens, chances: [depths, k], most likely first.
    """
    found: list[tuple[int, int, int, float]] = []  # token, parent, source, chance
    order = count()  # among equal chances, the earlier comes first
    waiting: list[tuple[float, int, int, int, int, float]] = []  # -chance, order, depth, rank, parent, parent's chance

    def add(depth: int, rank: int, parent: int, above: float) -> None:
        if depth < len(tokens) and rank < tokens.shape[1]:
            chance = above * min(float(chances[depth, rank]), 1.0)
            if chance > 0 and chance >= min_probability:
                heapq.heappush(waiting, (-chance, next(order), depth, rank, parent, above))

    add(0, 0, -1, 1.0)
    while waiting and len(found) < guesses:
        minus, _, depth, rank, parent, above = heapq.heappop(waiting)
        found.append((int(tokens[depth, rank]), parent, -1, -minus))
        add(depth, rank + 1, parent, above)
        add(depth + 1, 0, len(found) - 1, -minus)
    return GuessTree.of(*zip(*found, strict=True)) if found else GuessTree.empty()
