"""Trained heads as sources of guesses: files in each published layout, the heads' predictions, and the text."""

import copy
import json
import math
import os
import pickle
import random
import re
from contextlib import suppress

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from safetensors.torch import save_file
from test_lossless import (
    check_identical,
    check_sources,
    known_model,
    left_pad,
    random_cases,
    random_prompt,
)
from test_sources import paths_of
from zoo import VOCABULARY, tiny_model

import lookahead
from lookahead import DraftModelSource, EagleSource, LookaheadConfig, MedusaSource, PoolSource
from lookahead.guessing.combine import Ledger
from lookahead.guessing.source import Batch, Limits
from lookahead.sources import draft
from lookahead.sources.eagle import EagleGuesser
from lookahead.sources.medusa import MedusaGuesser

HIDDEN, LAYERS, INNER, QUERY_HEADS, KEY_HEADS, SIZE, REDUCED = 32, 8, 48, 4, 2, 8, 40
IDS = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])
GREEDY = {"max_new_tokens": 40, "min_new_tokens": 40, "do_sample": False}
KINDS = [
    "medusa",
    "medusa vllm",
    "medusa vllm reduced",
    "eagle",
    "eagle bias",
    "eagle3",
    "eagle3 reduced",
    "eagle3 vllm",
]


def deep_model(seed: int = 0):
    return known_model("llama", seed) if LAYERS == 2 else tiny_model("llama", seed=seed, num_hidden_layers=LAYERS)


# -- files of each layout, and the same heads computed plainly ---------------------------------------------------------


def medusa_files(kind: str, heads: int = 3, layers: int = 2, seed: int = 0) -> tuple[dict, dict]:
    """config.json and the tensors."""
    torch.manual_seed(seed)
    tensors = {}
    for h in range(heads):
        for layer in range(layers):
            name = f"blocks.{h}.layers.{layer}" if "vllm" in kind else f"{h}.{layer}.linear"
            tensors[name + ".weight"] = torch.randn(HIDDEN, HIDDEN) / math.sqrt(HIDDEN)
            if "vllm" not in kind:
                tensors[name + ".bias"] = torch.randn(HIDDEN)
        name = f"lm_heads.{h}.weight" if "vllm" in kind else f"{h}.{layers}.weight"
        tensors[name] = torch.randn(REDUCED if "reduced" in kind else VOCABULARY, HIDDEN) / 2
    if "reduced" in kind:
        tensors["token_map"] = torch.randperm(VOCABULARY)[:REDUCED]
    return {"num_heads": heads} if "vllm" in kind else {"medusa_num_heads": 2, "medusa_num_layers": layers}, tensors


def eagle_files(kind: str, seed: int = 0) -> tuple[dict, dict]:
    torch.manual_seed(seed)
    third = "eagle3" in kind
    layer = "midlayer." if third and "vllm" not in kind else "layers.0."
    entering = 2 * HIDDEN if third else HIDDEN
    shapes = {
        "fc.weight": (HIDDEN, (3 if third else 2) * HIDDEN),
        layer + "self_attn.q_proj.weight": (QUERY_HEADS * SIZE, entering),
        layer + "self_attn.k_proj.weight": (KEY_HEADS * SIZE, entering),
        layer + "self_attn.v_proj.weight": (KEY_HEADS * SIZE, entering),
        layer + "self_attn.o_proj.weight": (HIDDEN, QUERY_HEADS * SIZE),
        layer + "mlp.gate_proj.weight": (INNER, HIDDEN),
        layer + "mlp.up_proj.weight": (INNER, HIDDEN),
        layer + "mlp.down_proj.weight": (HIDDEN, INNER),
        layer + "post_attention_layernorm.weight": (HIDDEN,),
    }
    if "bias" in kind:
        shapes |= {"fc.bias": (HIDDEN,), layer + "self_attn.q_proj.bias": (QUERY_HEADS * SIZE,)}
    if "vllm" not in kind:
        shapes["embed_tokens.weight"] = (VOCABULARY, HIDDEN)
    if third:
        shapes |= {layer + "input_layernorm.weight": (HIDDEN,), layer + "hidden_norm.weight": (HIDDEN,)}
        shapes |= {"norm.weight": (HIDDEN,), "lm_head.weight": (REDUCED if "reduced" in kind else VOCABULARY, HIDDEN)}
    tensors = {
        name: 1 + torch.randn(shape) / 4 if len(shape) == 1 else 1.5 * torch.randn(shape) / math.sqrt(shape[-1])
        for name, shape in shapes.items()
    }
    config = {
        "hidden_size": HIDDEN, "intermediate_size": INNER, "num_attention_heads": QUERY_HEADS,
        "num_key_value_heads": KEY_HEADS, "num_hidden_layers": 1, "vocab_size": VOCABULARY, "hidden_act": "silu",
        "rms_norm_eps": 1e-5, "rope_theta": 500.0, "model_type": "llama", "max_position_embeddings": 2048,
    }  # fmt: skip
    if "reduced" in kind:
        kept = torch.randperm(VOCABULARY)[:REDUCED].sort().values
        tensors["d2t"] = kept - torch.arange(REDUCED)
        tensors["t2d"] = torch.isin(torch.arange(VOCABULARY), kept)
        config["draft_vocab_size"] = REDUCED
    if "vllm" in kind:
        own = {"norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": [1, 4, 7]}
        config = {"transformer_layer_config": config, "speculators_model_type": "eagle3"} | own
    return config, tensors


def files_of(kind: str, seed: int = 0) -> tuple[dict, dict]:
    return (medusa_files if "medusa" in kind else eagle_files)(kind, seed=seed)


def write(folder, config: dict, tensors: dict, name: str = "model.safetensors"):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if name.endswith(".safetensors"):
        save_file(tensors, folder / name)
    else:
        torch.save(tensors, folder / name)
    return folder


def source_of(kind: str, model, folder, seed: int = 0):
    folder = write(folder / kind.replace(" ", "-"), *files_of(kind, seed))
    return (MedusaSource if "medusa" in kind else EagleSource)(model, folder)


def plain_rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight


class PlainEagle:
    """An EAGLE head in double precision, over whole sequences, one query after the other."""

    def __init__(self, kind: str, model, seed: int = 0):
        config, tensors = eagle_files(kind, seed)
        self.third = "eagle3" in kind
        self.layers = config.get("eagle_aux_hidden_state_layer_ids", [2, LAYERS // 2, LAYERS - 3])
        self.t = {name.removeprefix("midlayer.").removeprefix("layers.0."): x.double() for name, x in tensors.items()}
        self.embedding = self.t.get("embed_tokens.weight", model.get_input_embeddings().weight.double())
        self.projection = self.t.get("lm_head.weight", model.lm_head.weight.double())
        self.normed_residual = config.get("norm_before_residual", False)
        self.model = model

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        """Each row of [n, heads * size] turned by its position, [n, heads, size]."""
        half = SIZE // 2
        x = x.view(len(x), -1, SIZE)
        angles = torch.arange(len(x))[:, None, None] * 500.0 ** (-torch.arange(half).double() / half)
        turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([turned.real, turned.imag], -1)

    def out(self, tokens: list[int], features: torch.Tensor) -> torch.Tensor:
        """The layer's output for each pair."""
        t, said = self.t, self.embedding[tokens]
        bias = {x: t.get(f"self_attn.{x}_proj.bias", 0.0) for x in "qkv"}
        if self.third:
            normed = plain_rms(features, t["hidden_norm.weight"])
            stream = normed if self.normed_residual else features
            entering = torch.cat([plain_rms(said, t["input_layernorm.weight"]), normed], 1)
        else:
            stream = entering = torch.cat([said, features], 1) @ t["fc.weight"].T + t.get("fc.bias", 0.0)
        q, k, v = (entering @ t[f"self_attn.{x}_proj.weight"].T + bias[x] for x in "qkv")
        q, k, v = self.rotated(q), self.rotated(k), v.view(len(v), -1, SIZE)
        rows = []
        for i in range(len(tokens)):
            shared = [h // (QUERY_HEADS // KEY_HEADS) for h in range(QUERY_HEADS)]
            scores = [k[: i + 1, g] @ q[i, h] / math.sqrt(SIZE) for h, g in enumerate(shared)]
            rows.append(torch.cat([each.softmax(0) @ v[: i + 1, g] for each, g in zip(scores, shared, strict=True)]))
        stream = stream + torch.stack(rows) @ t["self_attn.o_proj.weight"].T
        x = plain_rms(stream, t["post_attention_layernorm.weight"])
        gate = x @ t["mlp.gate_proj.weight"].T
        return stream + (gate * gate.sigmoid() * (x @ t["mlp.up_proj.weight"].T)) @ t["mlp.down_proj.weight"].T

    def after(self, text: list[int], guesses: tuple[int, ...], temperature: float) -> torch.Tensor:
        """The probabilities of what follows the text and these guesses."""
        with torch.no_grad():
            states = self.model(torch.tensor([text]), output_hidden_states=True).hidden_states
        if self.third:
            features = torch.cat([states[layer][0].double() for layer in self.layers], 1) @ self.t["fc.weight"].T
        else:
            features = states[-1][0].double()
        features = features[:-1]
        for n in range(len(guesses) + 1):
            made = self.out([*text[1:], *guesses[:n]], features)[-1:]
            features = torch.cat([features, made])
        logits = (plain_rms(made, self.t["norm.weight"]) if self.third else made)[0] @ self.projection.T
        return spread((logits / temperature).softmax(-1), self.t.get("d2t"))


class PlainMedusa:
    def __init__(self, kind: str, model, seed: int = 0):
        _, self.t = medusa_files(kind, seed=seed)
        self.is_vllm, self.model = "vllm" in kind, model

    def after(self, text: list[int], guesses: tuple[int, ...], temperature: float) -> torch.Tensor:
        h = len(guesses)
        with torch.no_grad():  # no guess changes what a head says
            x = self.model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states[-1][0, -1]
        for layer in range(2):
            name = f"blocks.{h}.layers.{layer}" if self.is_vllm else f"{h}.{layer}.linear"
            y = self.t[name + ".weight"] @ x + self.t.get(name + ".bias", 0)
            x = x + y * y.sigmoid()
        logits = self.t[f"lm_heads.{h}.weight" if self.is_vllm else f"{h}.2.weight"] @ x
        probabilities = (logits.double() / temperature).softmax(-1)
        if (tokens := self.t.get("token_map")) is None:
            return probabilities
        return spread(probabilities, tokens - torch.arange(REDUCED))


def spread(probabilities: torch.Tensor, offsets: torch.Tensor | None) -> torch.Tensor:
    """Probabilities of all tokens from those of a reduced vocabulary."""
    if offsets is None:
        return probabilities
    whole = torch.zeros(VOCABULARY).double()
    whole[[i + int(offset) for i, offset in enumerate(offsets)]] = probabilities
    return whole


def plain_of(kind: str, model):
    return (PlainMedusa if "medusa" in kind else PlainEagle)(kind, model)


# -- predictions of the heads -----------------------------------------------------------------------------------------


def spied(monkeypatch, source, seen: list):
    """Keep the texts and trees of each step that can take a guess."""
    guesser = MedusaGuesser if isinstance(source, MedusaSource) else EagleGuesser
    propose = guesser.propose

    def keep(self, texts, limits):
        trees = propose(self, texts, limits)
        seen.extend(
            (list(text), tree, self._batch.temperature)
            for text, tree, depth in zip(texts, trees, limits.depths, strict=True)
            if depth
        )
        return trees

    monkeypatch.setattr(guesser, "propose", keep)


def check_trees(plain, seen: list, sample: int) -> None:
    """Each guess has the probability that the plain head gives it, and the best first guess is among them."""
    chosen = random.Random(0).sample(seen, min(len(seen), sample))
    for text, tree, temperature in chosen:
        paths = paths_of(tree)
        said = {above: plain.after(text, above, temperature) for above in {path[:-1] for path in paths}}
        for path, probability in paths.items():
            expected = math.prod(said[path[:n]][path[n]].item() for n in range(len(path)))
            assert abs(expected - probability) < 2e-3 * expected + 1e-5, (text, path)
        assert (int(said[()].argmax()),) in paths


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("batch", "has_pool"), [(1, False), (3, True)])
def test_a_tree_has_the_probabilities_of_the_plain_head(monkeypatch, tmp_path, kind, batch, has_pool):
    """At every step of a call, with guesses accepted (the pool's too) and rejected."""
    monkeypatch.setattr(draft, "SHARPENING", 0.0)
    model, seen = deep_model(), []
    source = source_of(kind, model, tmp_path)
    plain = plain_of(kind, deep_model())
    spied(monkeypatch, source, seen)
    monkeypatch.setattr(Ledger, "is_asked", lambda self, number: True)
    prompts = [random_prompt(random.Random(b % 2)) for b in range(batch)]  # two of them are equal
    lookahead.wrap(model, LookaheadConfig(budget=10 * batch), source=[source, *([PoolSource()] if has_pool else [])])
    model.generate(**left_pad(prompts), max_new_tokens=25, do_sample=False)
    assert all(len(tree) for _, tree, _ in seen)
    deepest = max(int(tree.depths.max(initial=0)) for _, tree, _ in seen)
    assert deepest == 3 if "medusa" in kind else deepest > 2
    check_trees(plain, seen, 4)


def test_a_wrong_head_is_seen(monkeypatch, tmp_path):
    """The check above can fail: an attention that sees one pair too few."""
    monkeypatch.setattr(torch.Tensor, "tril", lambda self, k, tril=torch.Tensor.tril: tril(self, max(k - 1, 0)))
    with pytest.raises(AssertionError):
        test_a_tree_has_the_probabilities_of_the_plain_head(monkeypatch, tmp_path, "eagle", 1, False)


def proposed(source, text: list[int], guesses: int, depth: int = 6, is_chain: bool = False, rate: float | None = None):
    """The tree for one text, whose features come from a plain pass."""
    model = deep_model()
    with torch.no_grad():
        states = model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
    prompt = text[:-1]
    guesser = source.start(Batch([prompt], 0.3, VOCABULARY, None))
    guesser.observe_prompt(prompt, None, {layer: states[layer][0] for layer in source.needs.hidden_states})
    (tree,) = guesser.propose([text], Limits([depth], guesses, 1e-4, is_chain, rate))
    return tree


@pytest.mark.parametrize("kind", ["medusa", "eagle", "eagle3 reduced"])
def test_a_tree_keeps_within_its_limits(tmp_path, kind):
    source = source_of(kind, deep_model(), tmp_path)
    text = [*random_prompt(random.Random(3))[0].tolist(), 9, 10]
    assert len(proposed(source, text, 20, depth=0)) == 0
    for depth in (1, 2, 6):
        assert proposed(source, text, 20, depth).depths.max() == min(depth, proposed(source, text, 20).depths.max())
    assert (proposed(source, text, 20).probabilities >= 1e-4).all()
    chain = proposed(source, text, 20, is_chain=True).likeliest_chain()
    assert len(chain) > 1
    if kind == "medusa":
        assert len(proposed(source, text, 7)) == 7
        assert (chain.parents == range(-1, len(chain) - 1)).all()
        few, many = (paths_of(proposed(source, text, n)) for n in (7, 50))
        assert sorted(few.values(), reverse=True) == sorted(many.values(), reverse=True)[:7], "not the likeliest"


def test_passes_stop_where_they_do_not_pay(tmp_path):
    """A pass that is too dear is not made; since its cost may have been an accident, it is tried again much later."""
    source = source_of("eagle3", deep_model(), tmp_path)
    text = list(range(5, 25))
    source.pass_time.seconds = 1.0
    assert proposed(source, text, 12, rate=1e3).depths.max() == 1
    assert source.pass_time.seconds < 1.0
    assert proposed(source, text, 12, rate=1e-3).depths.max() > 1
    for _ in range(1000):
        deepest = proposed(source, text, 12, rate=10.0).depths.max()
        if deepest > 1:
            break
    assert deepest > 1


# -- heads that are right ---------------------------------------------------------------------------------------------


def memoryless_model():
    """Its next token depends on the last alone, as its layers add nothing; and the cycle that its text falls into."""
    model = deep_model()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    text = model.generate(IDS, max_new_tokens=150, min_new_tokens=150, do_sample=False)[0].tolist()[-60:]
    cycle = text[text.index(text[-1], 0, -1) + 1 :] if text[-1] in text[:-1] else text
    return model, cycle


def test_an_eagle_head_that_is_right_is_accepted_whole(tmp_path):
    """Its layer adds nothing either, so the feature that it passes on is the token's, as in the model."""
    model, cycle = memoryless_model()
    config, tensors = eagle_files("eagle")
    del tensors["embed_tokens.weight"]
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"layers.0.{name}.weight"].zero_()
    tensors["fc.weight"] = torch.cat([2000 * torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)], 1)
    source = EagleSource(model, write(tmp_path, config, tensors))
    stats = check_identical(model, [torch.tensor([cycle])], GREEDY, LookaheadConfig(budget=6), 0, source=source)
    assert stats.tokens_per_step > 4, stats


def test_medusa_heads_that_are_right_are_accepted_whole(tmp_path):
    """Head k says the token k + 2 places on in the cycle."""
    model, cycle = memoryless_model()
    cycle = list(dict.fromkeys(cycle))
    assert 1 < len(cycle) <= HIDDEN, "the cycle is too long to be learned by heart"
    with torch.no_grad():
        states = model(torch.tensor([cycle]), output_hidden_states=True).hidden_states[-1][0]
    tensors = {}
    for h in range(3):
        wanted = torch.zeros(len(cycle), VOCABULARY)
        for place in range(len(cycle)):
            wanted[place, cycle[(place + h + 2) % len(cycle)]] = 20.0
        tensors |= {f"{h}.0.linear.weight": torch.zeros(HIDDEN, HIDDEN), f"{h}.0.linear.bias": torch.zeros(HIDDEN)}
        tensors[f"{h}.1.weight"] = torch.linalg.lstsq(states, wanted).solution.T.contiguous()
    source = MedusaSource(model, write(tmp_path, {}, tensors, "medusa_lm_head.safetensors"))
    stats = check_identical(model, [torch.tensor([cycle])], GREEDY, LookaheadConfig(budget=6), 0, source=source)
    assert stats.tokens_per_step > 3.5, stats


# -- the text ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("heads")
    model = deep_model()
    return model, {kind: source_of(kind, model, folder) for kind in KINDS}


@random_cases(40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=2, unique=True),
    prompt_seeds=st.lists(st.integers(0, 2**31), min_size=1, max_size=3),
    has_pool=st.booleans(),
    asked=st.sampled_from([1.0, 0.6]),
    budget=st.sampled_from(["auto", 1, 7, 40]),
    options=st.fixed_dictionaries(
        {"max_new_tokens": st.integers(1, 40)},
        optional={"eos_token_id": st.lists(st.integers(3, VOCABULARY - 1), max_size=8), "top_k": st.just(5)},
    ),
    temperature=st.none() | st.sampled_from([0.3, 1.5]),
    seed=st.integers(0, 2**31),
)
def test_whatever_heads_say_the_text_is_plain(
    sources, kinds, prompt_seeds, has_pool, asked, budget, options, temperature, seed
):
    """asked: the share of steps in which a source is asked; in the others it misses what the model said."""
    model, known = sources
    given_sources = [known[kind] for kind in kinds] + ([PoolSource()] if has_pool else [])
    rng = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ledger, "is_asked", lambda self, number: rng.random() < asked)
        described = {"kinds": kinds, "asked": asked}
        check_sources(model, prompt_seeds, options, temperature, budget, seed, given_sources, **described)


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
@pytest.mark.parametrize("model_type", ["gpt2", "gemma3_text", "llama4_text", "lfm2", "bloom"])
def test_every_kind_of_cache(tmp_path, kind, model_type):
    """Also of models that verify only single chains, or compute accepted guesses again."""
    model = tiny_model(model_type)
    source = source_of(kind, model, tmp_path)
    stats = check_identical(model, [IDS], GREEDY, LookaheadConfig(budget=16), 0, source=[source, PoolSource()])
    did = stats.sources[type(source).__name__]
    assert did.proposed > 0
    assert 0 < did.passes <= did.asked if kind == "medusa" else did.passes > did.asked // 2


def test_a_draft_models_own_heads_are_refused(tmp_path):
    model, small = deep_model(), deep_model()
    lookahead.wrap(small, source=source_of("eagle", small, tmp_path))
    lookahead.wrap(model, source=DraftModelSource(small))
    with pytest.raises(ValueError, match=r"draft model.* hidden states"):
        model.generate(IDS, **GREEDY)


@pytest.mark.parametrize("kind", ["medusa", "eagle", "eagle3"])
def test_after_a_pause_nothing_is_guessed_from_an_old_state(monkeypatch, tmp_path, kind):
    model, seen, steps = deep_model(), [], []
    source = source_of(kind, model, tmp_path)
    spied(monkeypatch, source, seen)
    monkeypatch.setattr(Ledger, "is_asked", lambda self, number: len(steps) % 8 < 4 or not number)

    class Clock(lookahead.GuessSource):
        def propose(self, texts, limits):
            return [lookahead.GuessTree.empty()]

        def observe(self, outcome):
            steps.append(outcome.texts[0][:])

    lookahead.wrap(model, LookaheadConfig(budget=8), source=[Clock(), source])
    model.generate(IDS, **GREEDY)
    firsts = [steps.index(text) % 8 == 0 and steps.index(text) > 0 for text, _, _ in seen]
    assert any(firsts)
    for is_first, (_, tree, _) in zip(firsts, seen, strict=True):
        assert (len(tree) == 0) == is_first
    if kind == "medusa":
        check_trees(plain_of(kind, deep_model()), [one for one in seen if len(one[1])], 4)


@pytest.mark.parametrize("kind", ["medusa", "eagle", "eagle3"])
def test_prompts_of_embeddings_and_cached_prompts(tmp_path, kind):
    model = deep_model()
    source = source_of(kind, model, tmp_path)
    embeds = model.get_input_embeddings()(torch.cat([IDS, IDS + 20]))
    for prompt in (embeds[:1], embeds):
        options = {"inputs_embeds": prompt, "max_new_tokens": 20, "do_sample": False}
        expected = model.generate(**options)
        lookahead.wrap(model, LookaheadConfig(budget=16), source=source)
        assert model.generate(**options).equal(expected)
        assert model.lookahead.last.guesses > 0
        lookahead.unwrap(model)
    first = model.generate(IDS, max_new_tokens=10, return_dict_in_generate=True, do_sample=False)
    longer = torch.cat([first.sequences, IDS], 1)
    expected = model.generate(longer, max_new_tokens=20, do_sample=False)
    lookahead.wrap(model, LookaheadConfig(budget=16), source=source)
    actual = model.generate(longer, past_key_values=first.past_key_values, max_new_tokens=20, do_sample=False)
    assert actual.equal(expected)
    assert model.lookahead.last.guesses > 0


def test_long_prompts_are_computed_in_pieces(monkeypatch, tmp_path):
    text = [3 + i * i % 90 for i in range(90)]
    trees = []
    for chunk in (512, 7):
        monkeypatch.setattr("lookahead.sources.eagle.CHUNK", chunk)
        trees.append(paths_of(proposed(source_of("eagle3", deep_model(), tmp_path), text, 12)))
    assert trees[0] == pytest.approx(trees[1], rel=1e-2)


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_pytorchs_files_and_files_in_parts_say_the_same(tmp_path, kind):
    model, (config, tensors) = deep_model(), files_of(kind)
    cls = MedusaSource if "medusa" in kind else EagleSource
    text = list(range(5, 25))
    expected = paths_of(proposed(cls(model, write(tmp_path / "whole", config, tensors)), text, 12))
    name = "medusa_lm_head.pt" if "medusa" in kind else "pytorch_model.bin"
    actual = paths_of(proposed(cls(model, write(tmp_path / "bin", config, tensors, name)), text, 12))
    assert actual == pytest.approx(expected, rel=1e-2)
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for part, its in parts.items():
        write(tmp_path / "parts", config, {each: tensors[each] for each in its}, part)
    index = {"weight_map": {each: part for part, its in parts.items() for each in its}}
    (tmp_path / "parts" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert paths_of(proposed(cls(model, tmp_path / "parts"), text, 12)) == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_misshapen_or_unknown_tensor_is_named(tmp_path, kind):
    model, (config, tensors) = deep_model(), files_of(kind)
    cls = MedusaSource if "medusa" in kind else EagleSource
    optional = {"embed_tokens.weight", "t2d", "fc.bias", "layers.0.self_attn.q_proj.bias"}
    if kind in ("eagle3", "eagle3 vllm"):
        optional |= {"lm_head.weight"}  # the model's fits as well
    for i, name in enumerate(sorted(tensors)):
        wrong = tensors | {name: torch.zeros(3, 5, 7)}
        with pytest.raises(ValueError, match=f"'{name}' of .* has shape|of an unknown layout"):
            cls(model, write(tmp_path / f"{i}-wrong", config, wrong))
        if name not in optional and not name.endswith(".bias"):
            rest = {other: tensor for other, tensor in tensors.items() if other != name}
            with pytest.raises(ValueError, match=r"lacks the tensor|of an unknown layout|rows|has shape|layers"):
                cls(model, write(tmp_path / f"{i}-lacks", config, rest))
        for kind_of_number in (torch.int8, torch.bool, torch.complex64):
            if not tensors[name].is_floating_point():
                continue
            quantized = tensors | {name: torch.zeros(tensors[name].shape, dtype=kind_of_number)}
            with pytest.raises(ValueError, match=rf"'{name}' of .* is of {kind_of_number}"):
                cls(model, write(tmp_path / f"{i}-{kind_of_number}", config, quantized))
    with pytest.raises(ValueError, match=r"of an unknown layout: .*'extra\.weight'"):
        cls(model, write(tmp_path / "more", config, tensors | {"extra.weight": torch.zeros(2)}))


def test_heads_of_another_model_are_refused(tmp_path):
    other = tiny_model("llama", hidden_size=64, num_hidden_layers=LAYERS)
    for kind in KINDS:
        with pytest.raises(ValueError, match=r"shape|another model|lacks the tensor 'embed"):
            source_of(kind, other, tmp_path)
    shallow = tiny_model("llama")
    with pytest.raises(ValueError, match=r"\[2, 1, -1\] does not fit a model of 2 layers.*eagle_aux_hidden"):
        source_of("eagle3", shallow, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrap_of_another_model_is_refused(tmp_path, kind):
    """And a text with such a source is; a model of these sizes is not, whatever its dtype has become."""
    model = deep_model()
    source = source_of(kind, model, tmp_path)
    for sizes in ({"hidden_size": 64}, {"num_hidden_layers": LAYERS + 1}):
        other = tiny_model("llama", **({"num_hidden_layers": LAYERS} | sizes))
        with pytest.raises(ValueError, match=r"was made for a model with \d+ tokens, hidden size 32 and"):
            lookahead.wrap(other, source=source)
        assert not hasattr(other, "lookahead")
        sequences = lookahead.Sequences(lookahead.wrap(other))
        with pytest.raises(
            ValueError,
            match=f"not for this LlamaForCausalLM with .* and {sizes.get('num_hidden_layers', LAYERS)} layers",
        ):
            sequences.submit(torch.tensor([[5, 6]]), source=source)
    model.double()
    ids = torch.tensor([[5, 6, 7]])
    expected = model.generate(ids, max_new_tokens=20, do_sample=False).tolist()
    lookahead.wrap(model, source=source)
    for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert one.generate(ids, max_new_tokens=20, do_sample=False).tolist() == expected
        assert one.lookahead.last.sources[type(source).__name__].proposed


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_with_more_tokens_than_the_heads_know(tmp_path, kind):
    """They guess for it, or are refused: a token that they cannot read ends no text."""
    model = deep_model()
    source = source_of(kind, model, tmp_path)
    model.resize_token_embeddings(VOCABULARY + 7)
    ids = torch.tensor([[5, 6, VOCABULARY + 3, 7]])
    expected = model.generate(ids, max_new_tokens=20, do_sample=False).tolist()
    if isinstance(source, EagleSource) and source.head.reads is not None:
        with pytest.raises(ValueError, match="it was made before the model got more tokens"):
            lookahead.wrap(model, source=source)
        return
    lookahead.wrap(model, source=source)
    assert model.generate(ids, max_new_tokens=20, do_sample=False).tolist() == expected


def test_settings_that_are_not_computed_are_refused(tmp_path):
    config, tensors = eagle_files("eagle3")
    with pytest.raises(ValueError, match="norm_before_fc"):
        EagleSource(deep_model(), write(tmp_path, config | {"eagle_config": {"norm_before_fc": True}}, tensors))


def test_layers_under_eagle_config_are_named_by_their_outputs(tmp_path):
    config, tensors = eagle_files("eagle3")
    name = "eagle_aux_hidden_state_layer_ids"
    for settings_of, expected in (
        ({}, (2, 4, 5)),
        ({name: [1, 4, 7]}, (1, 4, 7)),
        ({"eagle_config": {name: [1, 3, 5]}}, (2, 4, 6)),
    ):
        source = EagleSource(deep_model(), write(tmp_path, config | settings_of, tensors))
        assert source.needs.hidden_states == expected


class Intruder:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_file_that_runs_code_is_refused(tmp_path):
    config, tensors = eagle_files("eagle")
    with pytest.raises(ValueError, match="holds more than tensors"):
        EagleSource(
            deep_model(),
            write(tmp_path, config, {**tensors, "x": Intruder(tmp_path / "intruder")}, "pytorch_model.bin"),
        )
    assert not (tmp_path / "intruder").exists()


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", 3])
def test_an_index_that_leaves_its_folder_is_refused(tmp_path, name):
    folder = write(tmp_path, *eagle_files("eagle"))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"fc.weight": name}}))
    with pytest.raises(ValueError, match="not a file of its folder"):
        EagleSource(deep_model(), folder)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="snapshot_download"):
        MedusaSource(deep_model(), tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="holds none of"):
        MedusaSource(deep_model(), tmp_path)


@pytest.mark.parametrize("tokens", [[3, 3, *range(4, REDUCED + 2)], [1.0] * REDUCED, []])
def test_a_list_of_tokens_is_one(tmp_path, tokens):
    config, tensors = files_of("medusa vllm reduced")
    tensors["token_map"] = torch.tensor(tokens)
    with pytest.raises(ValueError, match=r"'token_map' of .* (has an id twice|must list tokens)"):
        MedusaSource(deep_model(), write(tmp_path / "heads", config, tensors))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", b"{"),
        ("config.json", b"[" * 100_000),
        ("config.json", b"\xe9"),
        ("config.json", b'{"hidden_size": "many"}'),
        ("config.json", b'{"hidden_size": 32, "num_attention_heads": 0}'),
        ("model.safetensors.index.json", b'{"weight_map": ["x"]}'),
        ("model.safetensors.index.json", b'{"weight_map": {"x": []}}'),
        ("model.safetensors.index.json", b'{"weight_map": {"x": ".."}}'),
        ("model.safetensors.index.json", b'{"weight_map": {"x": "lacking.safetensors"}}'),
        ("model.safetensors", b"no tensors"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, name, content):
    folder = write(tmp_path / "heads", *files_of("eagle"))
    (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(str(folder / name))):
        EagleSource(deep_model(), folder)


def test_a_damaged_file_of_pytorch_raises_no_other_error(tmp_path):
    config, tensors = files_of("eagle")
    folder = write(tmp_path / "heads", config, tensors)
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    whole = (folder / "pytorch_model.bin").read_bytes()
    for seed in range(40):
        drawn = random.Random(seed)
        damaged = bytearray(whole[: drawn.randrange(len(whole))] if seed % 2 else whole)
        for _ in range(5):
            damaged[drawn.randrange(min(len(damaged), 400))] = drawn.randrange(256)
        (folder / "pytorch_model.bin").write_bytes(damaged)
        with suppress(ValueError):  # another error fails the test
            EagleSource(deep_model(), folder)
