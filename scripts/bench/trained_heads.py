"""Medusa and EAGLE heads, with the parameter names of the published files, and their training."""

import itertools
import math
import operator
import random
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean

import click
import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from bench.own_texts import Text
from bench.training import descend, optimizers

TOP_K = 8  # the model's top tokens at each place, which are the target
MEDUSA_HEADS = 4
SELF_FED = 4  # passes of an EAGLE head on its own features in training
DEEPER = 0.8  # weight of the loss at each depth relative to the one above it (Medusa, section 2.2.1)


# -- the model's states and predictions for its texts -----------------------------------------------------------------


@dataclass
class Example:
    """A text with the model's states and predictions."""

    ids: torch.Tensor  # [n], int64
    begin: int
    states: torch.Tensor  # [n, layers * hidden], bfloat16: the heads' input at each token
    likely: torch.Tensor  # [n, TOP_K], int64: the most likely tokens after each token
    chances: torch.Tensor  # [n, TOP_K], float32: their probabilities


def grouped(lengths: list[int], rows: int) -> list[list[int]]:
    """Group the indices of texts of similar lengths, with at most ``rows`` tokens in a padded group."""
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not groups or lengths[groups[-1][0]] * (len(groups[-1]) + 1) > rows:
            groups.append([])
        groups[-1].append(i)
    return groups


@torch.inference_mode()
def read_by(model: PreTrainedModel, texts: list[Text], layers: tuple[int, ...]) -> list[Example]:
    """Compute each text. Padding follows the texts, so no token sees it."""
    examples: list[Example | None] = [None] * len(texts)
    groups = grouped([len(text.ids) for text in texts], 4096)
    for done, group in enumerate(groups):
        if done % 10 == 5:
            click.echo(f"{done} of {len(groups)} batches of texts read")
        longest = len(texts[group[0]].ids)
        ids = torch.tensor([texts[i].ids + [0] * (longest - len(texts[i].ids)) for i in group])
        out = model(input_ids=ids, output_hidden_states=True, use_cache=False)
        states = torch.cat([out.hidden_states[layer] for layer in layers], -1).bfloat16()
        for row, i in enumerate(group):
            n = len(texts[i].ids)
            logits = out.logits[row, :n]
            top = logits.topk(min(TOP_K, logits.shape[-1]))
            chances = (top.values.float() - logits.float().logsumexp(-1, keepdim=True)).exp()
            examples[i] = Example(ids[row, :n], texts[i].begin, states[row, :n].clone(), top.indices, chances)
    return examples  # type: ignore[return-value]  # each text is in a group


@dataclass
class Batch:
    ids: torch.Tensor  # [batch, n]
    states: torch.Tensor
    likely: torch.Tensor  # in the heads' vocabulary; the chances of tokens that it lacks are 0
    chances: torch.Tensor
    is_written: torch.Tensor  # [batch, n], bool: whether the model has written the token

    def after(self, places: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The targets after each token that has another one ``places`` places before it.

        Returns which of these tokens count, bool [batch, n - places], then their `likely` and `chances`.
        """
        counts = functional.pad(self.is_written[:, places + 1 :], (0, 1))
        return counts, self.likely[:, places:][counts], self.chances[:, places:][counts]


def batch_of(examples: list[Example], place_of: torch.Tensor) -> Batch:
    """place_of: for each token of the model, its place in the heads' vocabulary, or -1."""

    def padded(rows: list[torch.Tensor]) -> torch.Tensor:
        return nn.utils.rnn.pad_sequence(rows, batch_first=True)

    likely, chances = place_of[padded([e.likely for e in examples])], padded([e.chances for e in examples])
    written_rows = [torch.arange(len(e.ids)) >= e.begin for e in examples]
    return Batch(
        padded([e.ids for e in examples]), padded([e.states for e in examples]), likely.clamp(min=0),
        chances * (likely >= 0), padded(written_rows),
    )  # fmt: skip


# -- heads ------------------------------------------------------------------------------------------------------------


class MedusaHead(nn.ModuleList):
    def __init__(self, projection: torch.Tensor):
        hidden = projection.shape[1]
        block = nn.ModuleDict({"linear": nn.Linear(hidden, hidden)})
        nn.init.zeros_(block["linear"].weight)  # so that the head begins as the model's lm_head (Medusa, section 2.2.1)
        nn.init.zeros_(block["linear"].bias)
        super().__init__([block, nn.Linear(hidden, len(projection), bias=False)])
        self[1].weight.data = projection.clone()

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self[1](states + functional.silu(self[0]["linear"](states)))


class MedusaHeads(nn.ModuleList):
    def __init__(self, projection: torch.Tensor, count: int):
        super().__init__([MedusaHead(projection) for _ in range(count)])

    def said(self, batch: Batch) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """For each depth: the places that count, logits, and the target; see `Batch.after`."""
        for depth, head in enumerate(self, 1):
            counts, likely, chances = batch.after(depth)
            yield counts, head(batch.states[:, :-depth][counts].float()), likely, chances


def rms_norm(states: torch.Tensor, norm: nn.RMSNorm) -> torch.Tensor:
    return functional.rms_norm(states.float(), norm.normalized_shape, norm.weight, norm.eps)


class Layer(nn.Module):
    """A decoder layer. A pair sees earlier pairs with the model's features, and the pairs with the head's own features
    that led to it."""

    def __init__(self, config: LlamaConfig, is_third: bool):
        super().__init__()
        hidden, size = config.hidden_size, config.head_dim
        self.heads, self.key_heads, self.size = config.num_attention_heads, config.num_key_value_heads, size
        entering = 2 * hidden if is_third else hidden
        outputs = {"q_proj": self.heads, "k_proj": self.key_heads, "v_proj": self.key_heads}
        self.self_attn = nn.ModuleDict({n: nn.Linear(entering, h * size, bias=False) for n, h in outputs.items()})
        self.self_attn["o_proj"] = nn.Linear(self.heads * size, hidden, bias=False)
        wide = config.intermediate_size
        sides = {"gate_proj": (hidden, wide), "up_proj": (hidden, wide), "down_proj": (wide, hidden)}
        self.mlp = nn.ModuleDict({name: nn.Linear(*side, bias=False) for name, side in sides.items()})
        self.post_attention_layernorm = nn.RMSNorm(hidden, config.rms_norm_eps)
        if is_third:
            self.input_layernorm = nn.RMSNorm(hidden, config.rms_norm_eps)
            self.hidden_norm = nn.RMSNorm(hidden, config.rms_norm_eps)

    def forward(
        self, entering: torch.Tensor, stream: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], earlier: list
    ) -> torch.Tensor:
        """earlier: keys and values of earlier passes, to which this pass adds its own."""
        batch, n, _ = entering.shape
        queries, keys, values = (
            self.self_attn[name](entering).view(batch, n, -1, self.size).transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        queries, keys = apply_rotary_pos_emb(queries, keys, *rotary)
        shared = self.heads // self.key_heads
        earlier.append((keys.repeat_interleave(shared, 1), values.repeat_interleave(shared, 1)))
        own = len(earlier) - 1  # number of the head's own features that lead to each pair, including its own
        (keys, values), *others = earlier
        sees = torch.ones(n, n, dtype=torch.bool).tril(-own)
        scores = (queries @ keys.transpose(2, 3)).float().masked_fill(~sees, -math.inf)
        chain = [(k.roll(own - i, 2), v.roll(own - i, 2)) for i, (k, v) in enumerate(others, 1)]
        alone = [(queries * k).sum(-1, keepdim=True).float() for k, _ in chain]
        weights = (torch.cat([scores, *alone], -1) / math.sqrt(self.size)).softmax(-1).to(values.dtype)
        attended = weights[..., :n] @ values
        for i, (_, v) in enumerate(chain):
            attended = attended + weights[..., n + i : n + i + 1] * v
        stream = stream + self.self_attn["o_proj"](attended.transpose(1, 2).reshape(batch, n, -1))
        normed = rms_norm(stream, self.post_attention_layernorm)
        gate = functional.silu(self.mlp["gate_proj"](normed))
        return stream + self.mlp["down_proj"](gate * self.mlp["up_proj"](normed))


class EagleHead(nn.Module):
    """A head of EAGLE, or of EAGLE-3."""

    def __init__(self, model: PreTrainedModel, config: LlamaConfig, projection: torch.Tensor, is_third: bool):
        """projection: the model's rows for the head's vocabulary, [n, hidden]. An EAGLE-3 head trains a copy of
        them."""
        super().__init__()
        hidden = config.hidden_size
        self.is_third = is_third
        self.fc = nn.Linear((3 if is_third else 2) * hidden, hidden, bias=False)
        layer = Layer(config, is_third)
        if is_third:
            self.midlayer = layer
            self.norm = nn.RMSNorm(hidden, config.rms_norm_eps)
            self.lm_head = nn.Linear(hidden, len(projection), bias=False)
            self.lm_head.weight.data = projection.clone()
        else:
            self.layers = nn.ModuleList([layer])
        # Lists hide the model's own modules from torch, so they are neither trained nor written.
        self._layer, self._embed = [layer], [model.get_input_embeddings()]
        self._projection, self._rotary = [projection], [LlamaRotaryEmbedding(config)]

    def features(self, batch: Batch, passes: int) -> Iterator[torch.Tensor]:
        """Yield, for each pass, the output for each pair (feature of a token, next token), [batch, n - 1, hidden].

        Pass 0 uses the model's features; each later pass uses the features of the pass before it.
        """
        with torch.no_grad():
            said = self._embed[0](batch.ids[:, 1:]).float()
            rotary = self._rotary[0](said, torch.arange(said.shape[1])[None])
        features = batch.states[:, :-1].float()
        features = self.fc(features) if self.is_third else features
        earlier: list = []
        (layer,) = self._layer
        for _ in range(passes):
            if self.is_third:
                parts = rms_norm(said, layer.input_layernorm), rms_norm(features, layer.hidden_norm)
                made = layer(torch.cat(parts, -1), features, rotary, earlier)
            else:
                entering = self.fc(torch.cat([said, features], -1))
                made = layer(entering, entering, rotary, earlier)
            yield made
            features = functional.pad(made[:, :-1], (0, 0, 1, 0))

    def said(self, batch: Batch) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """For each depth: the places that count, logits, and the target; see `Batch.after`."""
        counts, likely, chances = batch.after(1)
        for made in self.features(batch, SELF_FED):
            kept = made[counts]
            logits = self.lm_head(rms_norm(kept, self.norm)) if self.is_third else kept @ self._projection[0].T
            yield counts, logits, likely, chances


Heads = MedusaHeads | EagleHead


def layers_read(model: PreTrainedModel, kind: str) -> tuple[int, ...]:
    """Return the layers whose outputs the heads read; 0 is the embedding, 1 the first layer."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    if kind != "eagle3":
        return (count,)
    return (2, count // 2, count - 3) if count > 7 else (count // 3, 2 * count // 3, count)


def layer_config(model: PreTrainedModel) -> LlamaConfig:
    """Return the configuration of a layer with the model's sizes."""
    config = model.config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    return LlamaConfig(
        hidden_size=config.hidden_size, num_hidden_layers=1, num_attention_heads=heads,
        intermediate_size=getattr(config, "intermediate_size", None) or 3 * config.hidden_size,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocab_size=model.get_output_embeddings().weight.shape[0], rms_norm_eps=1e-6,
        max_position_embeddings=config.max_position_embeddings,
    )  # fmt: skip


def tokens_of_heads(texts: list[Text], vocabulary: int, most: int) -> torch.Tensor:
    """Return the heads' vocabulary as the model's tokens, int64, ascending: all, or the most frequent in the texts."""
    if vocabulary <= most:
        return torch.arange(vocabulary)
    seen = Counter(token for text in texts for token in text.ids[text.begin :])
    others = (token for token in range(vocabulary) if token not in seen)
    ranked = [token for token, _ in seen.most_common(most)]
    return torch.tensor(sorted(ranked + [next(others) for _ in range(most - len(ranked))]))


def new_heads(model: PreTrainedModel, kind: str, tokens: torch.Tensor) -> Heads:
    """Return untrained heads for these of the model's tokens."""
    projection = model.get_output_embeddings().weight.detach()[tokens].float()
    if kind == "medusa":
        return MedusaHeads(projection, MEDUSA_HEADS)
    return EagleHead(model, layer_config(model), projection, kind == "eagle3")


# -- training ---------------------------------------------------------------------------------------------------------


def loss_of(heads: Heads, batch: Batch) -> torch.Tensor:
    """Return the cross-entropy with the model's probabilities, over all depths."""
    total, weights = torch.zeros(()), 0.0
    for depth, (_, logits, likely, chances) in enumerate(heads.said(batch)):
        logits = logits.float()
        each = (logits.logsumexp(-1, keepdim=True) - logits.gather(1, likely)) * chances
        total = total + DEEPER**depth * each.sum() / max(len(each), 1)
        weights += DEEPER**depth
    return total / weights


@torch.no_grad()
def agreement(heads: Heads, examples: list[Example], place_of: torch.Tensor) -> list[float]:
    """Return, for each depth, how often the most likely token is the model's if all tokens above it are right."""
    right, places = Counter(), Counter()
    for group in grouped([len(example.ids) for example in examples], 2048):
        batch = batch_of([examples[i] for i in group], place_of)
        with torch.autocast("cpu", torch.bfloat16):
            for depth, (_, logits, likely, chances) in enumerate(heads.said(batch)):
                hits = (logits.argmax(-1) == likely[:, 0]) & (chances[:, 0] > 0)
                right[depth] += int(hits.sum())
                places[depth] += len(hits)
    return [right[depth] / max(places[depth], 1) for depth in sorted(places)]


def tokens_of_chain(shares: list[float]) -> float:
    """Return the expected tokens of a step with one branch of the most likely guesses, if depths are independent."""
    return 1 + sum(itertools.accumulate(shares, operator.mul))


def optimizers_of(heads: Heads, rate: float) -> list[torch.optim.Optimizer]:
    """Return `optimizers` for heads. Projections begin as the model's, so their rate is lower than other matrices'."""
    projections = [p for p in heads.parameters() if p.ndim == 2 and p.shape[0] > 4 * p.shape[1]]
    matrices = [p for p in heads.parameters() if p.ndim == 2 and p.shape[0] <= 4 * p.shape[1]]
    vectors = [p for p in heads.parameters() if p.ndim == 1]
    groups = {"params": projections, "lr": rate / 8}, {"params": vectors, "lr": rate}
    return optimizers(matrices, [group for group in groups if group["params"]], rate)


def train(
    heads: Heads, examples: list[Example], held_out: list[Example], place_of: torch.Tensor, steps: int, rows: int,
    rate: float, seed: int,
) -> None:  # fmt: skip
    """rows: the most tokens of a step."""
    rng, waiting, recent = random.Random(seed), [], deque(maxlen=20)

    def next_loss() -> torch.Tensor:
        if not waiting:
            lengths = [len(example.ids) + rng.randrange(16) for example in examples]  # so that groups vary
            waiting.extend(grouped(lengths, rows))
            rng.shuffle(waiting)
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(heads, batch_of([examples[i] for i in waiting.pop()], place_of))

    for step, loss, left in descend(heads, optimizers_of(heads, rate), steps, next_loss):
        recent.append(loss)
        if step % 20 == 0 or step == steps:
            held = ""
            if step % 200 == 0:
                held = ", held out " + " ".join(f"{share:.1%}" for share in agreement(heads, held_out, place_of))
            click.echo(f"step {step}/{steps}: loss {fmean(recent):.3f}{held}, {left:.1f} minutes left")
