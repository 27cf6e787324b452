"""Train heads that guess what a model will say, on texts that the model itself has written.

A model with a chat template writes the user's turns too (Magpie, arXiv 2406.08464), or answers given prompts. Another
model goes on with given prompts, or with passages of the Python standard library. Texts are added to --texts until
there are enough, so a later run goes on with them, and several kinds of heads share them. The model then reads them
once. Its hidden states are the heads' input, and its likeliest next tokens, with their probabilities, the target. One
text in twenty is held out.

- medusa: each head is x + SiLU(W x + b) and a projection, which begins as the model's (arXiv 2401.10774).
- eagle: one layer that makes the next feature, projected by the model (arXiv 2401.15077).
- eagle3: one layer that reads three layers' outputs, with a projection of its own (arXiv 2503.01840).

Both kinds of EAGLE are trained as they will guess: in each step, they go on from their own features a few times
(EAGLE-3, section 3.2). Where the model has more tokens than --vocabulary, the loss counts only those that the texts
have most often, and medusa and eagle3 know no others.

    python scripts/train_heads.py --model lookahead/demo_model --kind eagle --out heads
    python scripts/train_heads.py --model M --kind medusa --texts heads/texts.jsonl --out heads-medusa

OUT can be read by `lookahead.MedusaSource` or `lookahead.EagleSource`. Its model card has the figures of the run.
"""

import itertools
import json
import math
import operator
import random
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import click
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional
from train_demo_model import descend, optimizers, standard_library
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from lookahead.tools.prompts import read_prompts, up_to_its_end

USER_TOKENS, ANSWER_TOKENS, CONTINUED_TOKENS = 64, 192, 256  # most of each that the model writes
PROMPT_TOKENS = (16, 128)  # least and most of a passage that the model goes on with
LONGEST_PROMPT = 512  # tokens of a given prompt that are kept, its last ones
WRITTEN_AT_ONCE = 64
TEMPERATURE = 0.7  # of answers and continuations, between greedy decoding and full sampling
HELD_OUT = 20  # one text in so many
TOP_K = 8  # likeliest tokens of the model that are the target at each place
MEDUSA_HEADS = 4
SELF_FED = 4  # times that an EAGLE head goes on from its own features while it is trained
DEEPER = 0.8  # weight of the loss at each depth relative to the one above it (Medusa, section 2.2.1)


# -- texts ------------------------------------------------------------------------------------------------------------


@dataclass
class Text:
    ids: list[int]
    begin: int  # where the model's own writing begins


def read_texts(path: Path) -> list[Text]:
    """Read a file of `add_texts`. Raises ClickException, naming the line, if it is none."""
    if not path.exists():
        return []
    texts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            texts.append(Text(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise click.ClickException(f"{path}, line {number} is no text of this script: {error!r}") from error
    return texts


def tokens_written(texts: list[Text]) -> int:
    return sum(len(text.ids) - text.begin for text in texts)


def chat_frame(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str] | None:
    """Return what the chat template puts before the user's turn, and between it and the answer; None without one."""
    if not tokenizer.chat_template:
        return None
    mark = "<user's turn>"
    turn = [{"role": "user", "content": mark}]
    before, _, between = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True).partition(mark)
    return before, between


@torch.inference_mode()
def written(model: PreTrainedModel, prompts: list[list[int]], most: int, temperature: float, top_k: int = 0) -> list:
    """Return what the model writes after each prompt, up to and with an end token."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    ends = model.generation_config.eos_token_id
    first = ends[0] if isinstance(ends, list) else ends
    out = model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=most, do_sample=True, temperature=temperature, top_k=top_k,
        top_p=1.0, repetition_penalty=1.0, pad_token_id=0 if first is None else first,
    )  # fmt: skip
    return [up_to_its_end(row, ends) for row in out[:, longest:].tolist()]


def some_texts(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, given: list[str], rng: random.Random
) -> list[Text]:
    """Let the model write WRITTEN_AT_ONCE texts.

    given: prompts to choose from; without any, a chat model writes the user's turns too.
    """

    def encoded(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False).input_ids

    frame = chat_frame(tokenizer)
    prompts = []
    if frame is None:
        for text in rng.choices(given, weights=[len(text) for text in given], k=WRITTEN_AT_ONCE):
            begin = rng.randrange(max(len(text) - 8 * PROMPT_TOKENS[1], 0) + 1)
            passage = encoded(text[begin : begin + 8 * PROMPT_TOKENS[1]])
            prompts.append(passage[: rng.randint(*PROMPT_TOKENS)] or [0])
    elif given:
        turns = [encoded(text)[-LONGEST_PROMPT:] for text in rng.choices(given, k=WRITTEN_AT_ONCE)]
        prompts = [encoded(frame[0]) + turn + encoded(frame[1]) for turn in turns]
    else:
        ends = model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        before, between = map(encoded, frame)
        turns = written(model, [before] * WRITTEN_AT_ONCE, USER_TOKENS, 1.0, 50)
        turns = [turn[:-1] if turn[-1] in ends else turn for turn in turns]
        prompts = [before + turn + between for turn in turns if turn]
    prompts.sort(key=len)
    answers = written(model, prompts, CONTINUED_TOKENS if frame is None else ANSWER_TOKENS, TEMPERATURE)
    texts = [Text(prompt + answer, len(prompt)) for prompt, answer in zip(prompts, answers, strict=True)]
    rng.shuffle(texts)  # so that those held out are of every length
    return texts


def add_texts(
    path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, given: list[str], tokens: int, seed: int
) -> list[Text]:
    """Let the model write until the file holds so many tokens of its own."""
    texts = read_texts(path)
    if any(token >= model.get_input_embeddings().num_embeddings for text in texts for token in text.ids):
        raise click.ClickException(f"{path} has tokens that the model lacks: give each model a file of its own")
    start, before = time.perf_counter(), tokens_written(texts)
    while tokens_written(texts) < tokens:
        torch.manual_seed(seed + len(texts))
        new = some_texts(model, tokenizer, given, random.Random(seed + len(texts)))
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(vars(text)) + "\n" for text in new)
        texts += new
        have = tokens_written(texts)
        rate = (have - before) / (time.perf_counter() - start)
        left = max(tokens - have, 0) / rate
        click.echo(f"{have:,} tokens written, {rate:.0f} a second, {left / 60:.0f} minutes left")
    return texts


# -- what the model says of them --------------------------------------------------------------------------------------


@dataclass
class Example:
    """A text as the model has read it."""

    ids: torch.Tensor  # [n], int64
    begin: int
    states: torch.Tensor  # [n, layers * hidden], bfloat16: what the heads read at each token
    likely: torch.Tensor  # [n, TOP_K], int64: the likeliest tokens after each token
    chances: torch.Tensor  # [n, TOP_K], float32: their probabilities


def grouped(lengths: list[int], rows: int) -> list[list[int]]:
    """Indices of texts of about the same length, in groups that have at most ``rows`` tokens when padded."""
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not groups or lengths[groups[-1][0]] * (len(groups[-1]) + 1) > rows:
            groups.append([])
        groups[-1].append(i)
    return groups


@torch.inference_mode()
def read_by(model: PreTrainedModel, texts: list[Text], layers: tuple[int, ...]) -> list[Example]:
    """Compute each text. Padding stands behind the texts, where no token sees it."""
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
    likely: torch.Tensor  # in the heads' vocabulary; tokens that it lacks have chance 0
    chances: torch.Tensor
    is_written: torch.Tensor  # [batch, n], bool: whether the model has written the token

    def behind(self, places: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """For each token so many places ahead of another: whether it counts, and the target behind it.

        Returns bool [batch, n - places], then `likely` and `chances` of the rows that count.
        """
        counts = functional.pad(self.is_written[:, places + 1 :], (0, 1))
        return counts, self.likely[:, places:][counts], self.chances[:, places:][counts]


def batch_of(examples: list[Example], place_of: torch.Tensor) -> Batch:
    """place_of: the place in the heads' vocabulary of each token of the model, -1 for none."""

    def padded(rows: list[torch.Tensor]) -> torch.Tensor:
        return nn.utils.rnn.pad_sequence(rows, batch_first=True)

    likely, chances = place_of[padded([e.likely for e in examples])], padded([e.chances for e in examples])
    written_rows = [torch.arange(len(e.ids)) >= e.begin for e in examples]
    return Batch(
        padded([e.ids for e in examples]), padded([e.states for e in examples]), likely.clamp(min=0),
        chances * (likely >= 0), padded(written_rows),
    )  # fmt: skip


# -- heads, whose parameters have the names of the published files ----------------------------------------------------


class MedusaHead(nn.ModuleList):
    def __init__(self, projection: torch.Tensor):
        hidden = projection.shape[1]
        block = nn.ModuleDict({"linear": nn.Linear(hidden, hidden)})
        nn.init.zeros_(block["linear"].weight)  # begin as the model's own projection (Medusa, section 2.2.1)
        nn.init.zeros_(block["linear"].bias)
        super().__init__([block, nn.Linear(hidden, len(projection), bias=False)])
        self[1].weight.data = projection.clone()

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self[1](states + functional.silu(self[0]["linear"](states)))


class MedusaHeads(nn.ModuleList):
    def __init__(self, projection: torch.Tensor, count: int):
        super().__init__([MedusaHead(projection) for _ in range(count)])

    def said(self, batch: Batch) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """For each depth: the places that count, logits, and the target; see `Batch.behind`."""
        for depth, head in enumerate(self, 1):
            counts, likely, chances = batch.behind(depth)
            yield counts, head(batch.states[:, :-depth][counts].float()), likely, chances


def rms_norm(states: torch.Tensor, norm: nn.RMSNorm) -> torch.Tensor:
    return functional.rms_norm(states.float(), norm.normalized_shape, norm.weight, norm.eps)


class Layer(nn.Module):
    """A decoder layer. Its pairs see those of the model's features, and those of the head's own on the way to them."""

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
        """earlier: keys and values of the passes before this one; this one's are added."""
        batch, n, _ = entering.shape
        queries, keys, values = (
            self.self_attn[name](entering).view(batch, n, -1, self.size).transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        queries, keys = apply_rotary_pos_emb(queries, keys, *rotary)
        shared = self.heads // self.key_heads
        earlier.append((keys.repeat_interleave(shared, 1), values.repeat_interleave(shared, 1)))
        own = len(earlier) - 1  # features of the head's own that lead to each pair, this one's included
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
        """projection: the model's rows for the head's vocabulary, [n, hidden], where an EAGLE-3 head's own begins."""
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
        # What is the model's is no parameter: it is neither trained nor written.
        self._layer, self._embed = [layer], [model.get_input_embeddings()]
        self._projection, self._rotary = [projection], [LlamaRotaryEmbedding(config)]

    def features(self, batch: Batch, passes: int) -> Iterator[torch.Tensor]:
        """Yield, for each pass, what each pair (feature of a token, next token) leads to, [batch, n - 1, hidden].

        Pass 0 takes the model's features; each later one takes those that the pass before it has made.
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
        """For each depth: the places that count, logits, and the target; see `Batch.behind`."""
        counts, likely, chances = batch.behind(1)
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
    """Return the model's tokens that the heads know, int64, ascending: all, or those that the texts have most often."""
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
    """Return the cross-entropy with what the model holds likely, over all depths."""
    total, weights = torch.zeros(()), 0.0
    for depth, (_, logits, likely, chances) in enumerate(heads.said(batch)):
        logits = logits.float()
        each = (logits.logsumexp(-1, keepdim=True) - logits.gather(1, likely)) * chances
        total = total + DEEPER**depth * each.sum() / max(len(each), 1)
        weights += DEEPER**depth
    return total / weights


@torch.no_grad()
def agreement(heads: Heads, examples: list[Example], place_of: torch.Tensor) -> list[float]:
    """Return, for each depth, how often the likeliest token is the model's where all tokens above it are right."""
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
    """Return the tokens of a step whose guesses are one branch, each depth's likeliest, if depths are independent."""
    return 1 + sum(itertools.accumulate(shares, operator.mul))


def optimizers_of(heads: Heads, rate: float) -> list[torch.optim.Optimizer]:
    """Return `optimizers` for heads. Projections begin as the model's, so they get a lower rate than other matrices."""
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
            lengths = [len(example.ids) + rng.randrange(16) for example in examples]  # other groups in each round
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


# -- files ------------------------------------------------------------------------------------------------------------


def medusa_files(heads: MedusaHeads, tokens: torch.Tensor, vocabulary: int) -> tuple[str, dict, dict]:
    """Return the file's name, config.json and tensors: in the original layout, or vLLM's for a reduced vocabulary."""
    tensors = dict(heads.state_dict())
    if len(tokens) == vocabulary:
        return "medusa_lm_head.safetensors", {"medusa_num_heads": len(heads), "medusa_num_layers": 1}, tensors
    renamed = {"token_map": tokens}
    for h in range(len(heads)):
        for side in ("weight", "bias"):
            renamed[f"blocks.{h}.layers.0.{side}"] = tensors[f"{h}.0.linear.{side}"]
        renamed[f"lm_heads.{h}.weight"] = tensors[f"{h}.1.weight"]
    config = {
        "architectures": ["MedusaModel"], "model_type": "medusa", "num_heads": len(heads), "num_hidden_layers": 1,
        "hidden_size": heads[0][1].in_features, "vocab_size": vocabulary, "truncated_vocab_size": len(tokens),
        "medusa_fc_bias": True,
    }  # fmt: skip
    return "model.safetensors", config, renamed


def eagle_files(model: PreTrainedModel, heads: EagleHead, tokens: torch.Tensor, vocabulary: int) -> tuple:
    """Do the same, in the original layout. The model's embedding serves, and for EAGLE the model's projection."""
    tensors = dict(heads.state_dict())
    layer = layer_config(model)
    names = (
        "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
        "rms_norm_eps", "num_hidden_layers", "vocab_size", "max_position_embeddings",
    )  # fmt: skip
    config = {name: getattr(layer, name) for name in names} | {
        "architectures": ["LlamaForCausalLMEagle3" if heads.is_third else "LlamaForCausalLMEagle"],
        "model_type": "llama", "rope_theta": layer.rope_parameters["rope_theta"], "bias": False,
    }  # fmt: skip
    if heads.is_third:
        config["eagle_aux_hidden_state_layer_ids"] = list(layers_read(model, "eagle3"))
        config["draft_vocab_size"] = len(tokens)
        if len(tokens) < vocabulary:
            tensors["d2t"] = tokens - torch.arange(len(tokens))
            tensors["t2d"] = torch.isin(torch.arange(vocabulary), tokens)
    return "model.safetensors", config, tensors


def write_heads(out: Path, model: PreTrainedModel, heads: Heads, tokens: torch.Tensor) -> None:
    """Write config.json and the tensors, floats in bf16."""
    vocabulary = model.get_output_embeddings().weight.shape[0]
    if isinstance(heads, MedusaHeads):
        name, config, tensors = medusa_files(heads, tokens, vocabulary)
    else:
        name, config, tensors = eagle_files(model, heads, tokens, vocabulary)
    tensors = {key: (x.bfloat16() if x.is_floating_point() else x).contiguous() for key, x in tensors.items()}
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / name, {"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


CARD = """---
tags: [{kind}, speculative-decoding]
---
# {title} heads for {model}

Read by `lookahead.{source}(model, folder)`. Held out, the likeliest token at each depth is the model's in {shares} of
the places whose tokens above it are right: {chain:.2f} tokens a step with one branch of guesses.

| | |
|---|---|
| parameters | {parameters:.1f} million |
| vocabulary | {tokens:,} of {vocabulary:,} tokens |
| data | {texts:,} texts, of which the model wrote {written:,} tokens at temperature {temperature}; {held} held out |
| training | {steps:,} steps of at most {rows:,} tokens; bf16 autocast |
| optimizers | Muon for matrices of layers, AdamW for the rest; peak rate {rate} |
| seed | {seed} |
| time | {reading:.0f} minutes to read the texts, {minutes:.0f} to train, on {threads} CPU threads, torch {torch} |
"""


@click.command(help=__doc__.split("\n")[0])
@click.option("--model", "name", required=True, help="Folder or name of the model.")
@click.option("--kind", type=click.Choice(["medusa", "eagle", "eagle3"]), required=True)
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--texts", type=click.Path(path_type=Path), help="File of the model's texts.  [default: OUT/texts.jsonl]")
@click.option("--tokens", default=200_000, show_default=True, help="Tokens that the model writes in all.")
@click.option("--prompts", type=click.Path(path_type=Path), help="Prompts for it, in Spec-Bench's JSONL format.")
@click.option("--vocabulary", default=8192, show_default=True, help="Most tokens that the heads know.")
@click.option("--steps", default=600, show_default=True, help="Steps of training; 0 writes texts alone.")
@click.option("--batch", default=2048, show_default=True, help="Most tokens of a step.")
@click.option("--rate", default=2e-3, show_default=True, help="Peak learning rate.")
@click.option("--seed", default=0, show_default=True)
def main(
    name: str, kind: str, out: Path, texts: Path | None, tokens: int, prompts: Path | None, vocabulary: int, steps: int,
    batch: int, rate: float, seed: int,
) -> None:  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16).eval()
    tokenizer = AutoTokenizer.from_pretrained(name)
    out.mkdir(parents=True, exist_ok=True)
    given = [prompt["turns"][0] for prompt in read_prompts(prompts, None)] if prompts else []
    if not given and not tokenizer.chat_template:
        given = standard_library()[0]
    known = add_texts(texts or out / "texts.jsonl", model, tokenizer, given, tokens, seed)
    if not steps:
        return
    start = time.perf_counter()
    examples = read_by(model, known, layers_read(model, kind))
    reading = (time.perf_counter() - start) / 60
    held_out = examples[::HELD_OUT]
    examples = [example for i, example in enumerate(examples) if i % HELD_OUT]
    click.echo(f"{len(examples):,} texts and {len(held_out)} held out, read in {reading:.1f} minutes")

    torch.manual_seed(seed)
    size = model.get_output_embeddings().weight.shape[0]
    chosen = tokens_of_heads(known, size, vocabulary)
    place_of = torch.full((size,), -1).index_copy(0, chosen, torch.arange(len(chosen)))
    heads = new_heads(model, kind, chosen)
    start = time.perf_counter()
    train(heads, examples, held_out, place_of, steps, batch, rate, seed)
    minutes = (time.perf_counter() - start) / 60
    write_heads(out, model, heads, chosen)
    shares = agreement(heads, held_out, place_of)
    card = CARD.format(
        kind=kind, title={"medusa": "Medusa", "eagle": "EAGLE", "eagle3": "EAGLE-3"}[kind],
        model=Path(name).name, source="MedusaSource" if kind == "medusa" else "EagleSource",
        shares=", ".join(f"{share:.1%}" for share in shares), chain=tokens_of_chain(shares),
        parameters=sum(p.numel() for p in heads.parameters()) / 1e6, tokens=len(chosen), vocabulary=size,
        texts=len(known), written=tokens_written(known), temperature=TEMPERATURE,
        held=len(held_out), steps=steps, rows=batch, rate=rate, seed=seed, reading=reading, minutes=minutes,
        threads=torch.get_num_threads(), torch=torch.__version__,
    )  # fmt: skip
    (out / "README.md").write_text(card, encoding="utf-8")
    click.echo(card)


if __name__ == "__main__":
    main()
