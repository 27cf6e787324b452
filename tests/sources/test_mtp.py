"""A checkpoint's multi-token-prediction layers as a source of guesses: files, predictions, and the text."""

import copy
import json
import math
import random
import re
from pathlib import Path

import pytest
import torch
import train_hybrid_model
from click.testing import CliRunner
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from test_heads import GREEDY, IDS, check_trees, spied
from test_lossless import check_identical, check_sources, left_pad, random_cases
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)
from transformers.modeling_layers import MtpModel
from zoo import GROUPED, HEAD, LATENT, VOCABULARY, tiny_model

import lookahead
from bench.tiny_models import random_model, tiny_config
from lookahead import DEMO_MODEL, LookaheadConfig, MtpSource, PoolSource
from lookahead.compat.mtp import _WithMtp, run_mtp_layer
from lookahead.guessing.combine import Ledger
from lookahead.sources.checkpoint import depth_of
from lookahead.tools.cli import main

DELTA = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "layer_types": ["linear_attention", "full_attention"],
}
QWEN = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "post_norm": "norm"}
MIMO = {
    "eh_proj": "input_proj",
    "enorm": "token_layernorm",
    "hnorm": "hidden_layernorm",
    "post_norm": "final_layernorm",
}
MODELS = {
    "mimo": {"num_nextn_predict_layers": 1},
    "qwen3_5_text": {**HEAD, **DELTA, "mtp_num_hidden_layers": 1},
    "qwen3_next": {},
    "glm4_moe": {**HEAD, **GROUPED, "num_nextn_predict_layers": 1},
    "glm4_moe, 3": {**HEAD, **GROUPED, "num_nextn_predict_layers": 3},
    "deepseek_v3": {**LATENT, **GROUPED, "num_nextn_predict_layers": 1},
    "deepseek_v3, 2": {**LATENT, **GROUPED, "num_nextn_predict_layers": 2},
    "mellum": {**HEAD, "mlp_layer_types": ["sparse", "sparse"], "num_nextn_predict_layers": 1},
}


class MiMoConfig(Qwen2Config):
    """As the checkpoints' own code has it."""

    model_type = "mimo"


class MiMoForCausalLM(Qwen2ForCausalLM):
    config_class = MiMoConfig


AutoConfig.register("mimo", MiMoConfig)
AutoModelForCausalLM.register(MiMoConfig, MiMoForCausalLM)


def published(name: str, model_type: str) -> str:
    """What a checkpoint calls a parameter of transformers' `MtpModel`; an expert's is one of several."""
    _, k, part, *rest = name.split(".")
    if "qwen" in model_type or model_type == "mellum":
        inner = ".".join(rest)
        return f"mtp.layers.{k}.{inner}" if part == "mtp_block" else f"mtp.{QWEN[part]}.{inner}"
    if model_type == "mimo":
        return f"model.mtp_layers.{k}." + ".".join(
            rest if part == "mtp_block" else [MIMO.get(part, "final_layernorm"), *rest]
        )
    if part == "post_norm":
        part = "shared_head.norm"
    inner = ".".join(rest if part == "mtp_block" else [part, *rest])
    return f"model.layers.{2 + int(k)}.{inner}"


def split_experts(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Experts as checkpoints have them, each by itself."""
    if ".experts." not in name:
        return {name: tensor}
    place, part = name.rsplit(".", 1)
    found = {}
    for e, expert in enumerate(tensor):
        parts = {"gate_proj": expert.chunk(2)[0], "up_proj": expert.chunk(2)[1]} if "gate" in part else {part: expert}
        found |= {f"{place}.{e}.{each}.weight": its.contiguous() for each, its in parts.items()}
    return found


def new_layers(model) -> MtpModel:
    """Random layers, of transformers' own making."""
    as_mtp = _WithMtp(model, "")
    torch.manual_seed(1)
    layers = MtpModel(as_mtp, as_mtp.config.get_text_config().num_mtp_layers).eval()
    with torch.no_grad():
        for parameter in layers.layers.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=1 / math.sqrt(parameter.shape[-1]))
    return layers


def write(folder, model, layers: MtpModel, kind: str, without: str = "") -> None:
    """Write a checkpoint with these layers as it is published, but for the tensors whose names hold ``without``."""
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in layers.layers.state_dict(prefix="layers.").items():
        tensors |= split_experts(published(name, kind.split(",")[0]), tensor.clone())
    if "model.layers.2.eh_proj.weight" in tensors:  # these repeat the model's own, which serve
        for name in ("embed_tokens", "shared_head.head"):
            tensors[f"model.layers.2.{name}.weight"] = torch.zeros_like(tensors["model.embed_tokens.weight"])
    kept = {name: tensor for name, tensor in tensors.items() if not without or without not in name}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """By kind: the model as it was loaded, and the layers that were written."""
    known = {}

    def checkpoint(kind: str):
        if kind not in known:
            folder = tmp_path_factory.mktemp("mtp")
            made = tiny_model(kind.split(",")[0], **MODELS[kind])
            layers = new_layers(made)
            write(folder, made, layers, kind)
            known[kind] = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), layers
        return known[kind]

    return checkpoint


class PlainLayers:
    """The layers over whole sequences, without a cache, one branch at a time."""

    def __init__(self, model, layers: MtpModel):
        self.model, self.layers = model, layers

    @torch.no_grad()
    def after(self, text: list[int], path: tuple[int, ...], temperature: float) -> torch.Tensor:
        states = self.model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states[-1][0]
        count, root = len(self.layers.layers), len(text) - 1
        tokens, before = [*text, *path], list[torch.Tensor]()
        for end in range(root, len(tokens)):
            made: list[torch.Tensor] = []
            for d in range(count):
                entering = []
                for j in range(1, end + 1):  # the token's place
                    if d == 0 and j <= root:
                        entering.append(states[j - 1])
                    elif j > root and d == count - 1 and j - root >= count:
                        entering.append(before[d][j - 2])
                    elif d == 0:
                        entering.append(before[0][j - 2])
                    else:
                        entering.append(states[0] if j == 1 else made[d - 1][j - 2])
                made.append(self.through(d, tokens[1 : end + 1], torch.stack(entering)))
            before = made
        logits = self.layers._project_to_logits(made[min(len(path), count - 1)][-1])
        return (logits.float() / temperature).softmax(-1)

    def through(self, d: int, tokens: list[int], entering: torch.Tensor) -> torch.Tensor:
        said = self.model.get_input_embeddings()(torch.tensor(tokens))
        sees = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
        if (getattr(self.layers.config, "layer_types", None) or [""] * 9)[d] == "sliding_attention":
            sees = sees.triu(1 - self.layers.config.sliding_window)
        positions = torch.arange(1, len(tokens) + 1)
        return run_mtp_layer(self.layers, d, said, entering, positions, sees, None)


# -- predictions of the layers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(("batch", "has_pool"), [(1, False), (3, True)])
def test_a_tree_has_the_probabilities_of_the_plain_layers(monkeypatch, checkpoints, kind, batch, has_pool):
    (model, layers), seen = checkpoints(kind), []
    source = MtpSource(model)
    spied(monkeypatch, source, seen)
    monkeypatch.setattr("lookahead.sources.draft.Sharpness.count", lambda *_: None)
    prompts = [IDS[:, : 10 - 2 * b] + b for b in range(batch)]
    config = LookaheadConfig(budget=12, pool_memory_mb=0.1)
    check_identical(model, prompts, GREEDY, config, 0, source=[source, *[PoolSource()] * has_pool])
    plain = PlainLayers(model, layers)
    check_trees(plain, [(text, tree, temperature) for text, tree, temperature in seen if len(tree)], 6)


def test_it_is_seen_if_a_guess_goes_on_with_another_state(monkeypatch, checkpoints):
    compute = lookahead.sources.mtp._Layers.compute

    def wrong(self, text, begin, tokens, features, *others):
        return compute(self, text, begin, tokens, features.roll(1, 0), *others)

    monkeypatch.setattr("lookahead.sources.mtp._Layers.compute", wrong)
    with pytest.raises(AssertionError):
        test_a_tree_has_the_probabilities_of_the_plain_layers(monkeypatch, checkpoints, "glm4_moe", 1, False)


@pytest.mark.parametrize("kind", ["glm4_moe", "glm4_moe, 3", "deepseek_v3", "deepseek_v3, 2"])
def test_transformers_own_loop_writes_the_same(checkpoints, kind):
    """It knows the layers by the numbers that they have in large checkpoints."""
    model, _ = checkpoints(kind)
    model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.[2-9].*"]
    theirs = model.generate(IDS, **GREEDY, use_mtp=True)
    lookahead.wrap(model, LookaheadConfig(budget=6), source=MtpSource(model))
    try:
        assert model.generate(IDS, **GREEDY).equal(theirs)
        assert model.lookahead.last.sources["MtpSource"].proposed > 0
    finally:
        lookahead.unwrap(model)


# -- layers that are right --------------------------------------------------------------------------------------------


def memoryless(kind: str):
    """A model whose next token depends on the last alone, with layers that say the same; and a text of it."""
    model = tiny_model(kind.split(",")[0], **MODELS[kind])
    layers = new_layers(model)
    zero = "o_proj", "down_proj", "out_proj"
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *layers.layers.named_parameters()]:
            if any(part in name for part in zero):
                parameter.mul_(1e-4 if kind == "mimo" else 0)  # whose pass is refused if nothing depends on the cache
        for layer in layers.layers:
            size = layer.eh_proj.weight.shape[0]
            joined = [100 * torch.eye(size), torch.zeros(size, size)]
            layer.eh_proj.weight.copy_(torch.cat(joined[::-1] if kind == "mimo" else joined, 1))
            layer.post_norm.weight.copy_(model.model.norm.weight)
        model.get_output_embeddings().weight.mul_(10)  # so that both are sure of it
    return model, layers, model.generate(IDS, max_new_tokens=60, min_new_tokens=60, do_sample=False)


@pytest.mark.parametrize("kind", MODELS)
def test_layers_that_are_right_are_accepted_whole(tmp_path, kind):
    made, layers, text = memoryless(kind)
    write(tmp_path, made, layers, kind)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    source = MtpSource(model)
    for prompts, options in (
        ([text], GREEDY),
        ([text], GREEDY | {"do_sample": True, "temperature": 0.3}),
        ([text, text[:, :20], text[:, :7]], GREEDY),
    ):
        stats = check_identical(model, prompts, options, LookaheadConfig(budget=6), 0, source=source)
        assert stats.tokens_per_step > (4 if len(prompts) == 1 else 2.5), (prompts, options, stats)


@pytest.mark.parametrize("kind", MODELS)
def test_second_turns(checkpoints, kind):
    """A conversation computes what is new in it alone, so the layers have not seen the rest."""
    model, _ = checkpoints(kind)
    source = MtpSource(model)
    options = GREEDY | {"max_new_tokens": 20, "min_new_tokens": 20}
    longer = torch.cat([model.generate(IDS, max_new_tokens=10, do_sample=False), IDS], 1)
    expected = model.generate(longer, **options)
    lookahead.wrap(model, LookaheadConfig(budget=16), source=source)
    try:
        first = model.generate(IDS, max_new_tokens=10, return_dict_in_generate=True, do_sample=False)
        given = {lookahead.compat.CACHE: first[lookahead.compat.CACHE]}
        assert model.generate(longer, **given, **options).equal(expected)
        assert model.lookahead.last.guesses > 0
    finally:
        lookahead.unwrap(model)


# -- the text ---------------------------------------------------------------------------------------------------------


@random_cases(40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(sorted(MODELS)),
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
def test_whatever_the_layers_say_the_text_is_plain(
    checkpoints, kind, prompt_seeds, has_pool, asked, budget, options, temperature, seed
):
    """asked: the share of steps in which they are asked; in the others they miss what the model said."""
    model, _ = checkpoints(kind)
    sources = [MtpSource(model), *[PoolSource()] * has_pool]
    rng = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ledger, "is_asked", lambda self, number: rng.random() < asked)
        check_sources(model, prompt_seeds, options, temperature, budget, seed, sources, kind=kind, asked=asked)


@pytest.mark.parametrize("fault", [0.0, -1.0, float("nan"), float("inf")])
def test_broken_layers_cost_speed_alone(checkpoints, fault):
    model, _ = checkpoints("qwen3_5_text")
    source = MtpSource(model)
    with torch.no_grad():
        source.head._model.layers[0].eh_proj.weight.mul_(fault)
    for prompts in ([IDS], [IDS, IDS[:, :6] + 3]):
        for more in ({}, {"do_sample": True, "temperature": 0.7, "top_k": 20} if len(prompts) == 1 else {}):
            check_identical(model, prompts, GREEDY | more, LookaheadConfig(budget=8), 1, source=[source, PoolSource()])


def test_a_call_that_fails_leaves_nothing(checkpoints):
    model, _ = checkpoints("glm4_moe, 3")
    source = MtpSource(model)
    before = vars(source).copy()
    expected = model.generate(**left_pad([IDS, IDS[:, :4]]), **GREEDY)
    lookahead.wrap(model, LookaheadConfig(budget=8), source=source)

    def fails(ids, scores, **_):
        if ids.shape[1] > 20:
            raise RuntimeError("stop here")
        return torch.zeros(len(ids), dtype=torch.bool)

    try:
        with pytest.raises(RuntimeError, match="stop here"):
            model.generate(**left_pad([IDS, IDS[:, :4]]), **GREEDY, stopping_criteria=[fails])
        assert vars(source) == before
        assert model.generate(**left_pad([IDS, IDS[:, :4]]), **GREEDY).equal(expected)
    finally:
        lookahead.unwrap(model)


@pytest.mark.parametrize("kind", ["qwen3_5_text", "deepseek_v3, 2"])
def test_texts_that_join_between_steps(checkpoints, kind):
    model, _ = checkpoints(kind)
    prompts = [IDS, IDS[:, :3] + 20, IDS + 9]
    alone = [model.generate(ids, **GREEDY).tolist() for ids in prompts]
    lookahead.wrap(model, LookaheadConfig(budget=8), source=[PoolSource(), MtpSource(model)])
    try:
        sequences = lookahead.Sequences(model)
        futures = []
        for ids in prompts:
            futures.append(sequences.submit(ids, **GREEDY))
            for _ in range(3):
                sequences.step()
        while len(sequences):
            sequences.step()
        assert [future.result().tolist() for future in futures] == alone
        assert model.lookahead.stats.sources["MtpSource"].proposed > 0
    finally:
        lookahead.unwrap(model)


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MODELS)
def test_reading_layers_changes_nothing_in_the_model(checkpoints, kind):
    model, layers = checkpoints(kind)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config = model.config.to_dict()
    source = MtpSource(model)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(tensor.equal(before[name]) for name, tensor in after.items())
    assert model.config.to_dict() == config
    read = source.head._model.layers.state_dict()
    assert all(tensor.equal(read[name]) for name, tensor in layers.layers.state_dict().items())


def test_a_checkpoint_of_a_model_that_sees_images(tmp_path):
    """Qwen3.5 is published so; its text side is loaded alone."""
    text = tiny_model("qwen3_5_text", **MODELS["qwen3_5_text"])
    images = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    config = Qwen3_5Config(text_config=text.config.to_dict(), vision_config={**images, "patch_size": 4})
    layers = new_layers(text)
    write(tmp_path, Qwen3_5ForConditionalGeneration(config), layers, "qwen3_5")
    assert "model.language_model.norm.weight" in load_file(tmp_path / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    source = MtpSource(model)
    read = source.head._model.layers.state_dict()
    assert all(tensor.equal(read[name]) for name, tensor in layers.layers.state_dict().items())
    check_identical(model, [IDS], GREEDY, LookaheadConfig(budget=8), 0, source=source)


@pytest.mark.parametrize(
    ("kind", "lost"),
    [
        ("qwen3_5_text", "fc."),
        ("qwen3_5_text", "mtp."),
        ("glm4_moe, 3", "eh_proj"),
        ("glm4_moe, 3", "layers.4."),
        ("deepseek_v3", "layers.2.post_attention_layernorm"),
    ],
)
def test_a_missing_tensor_is_named(tmp_path, checkpoints, kind, lost):
    _, layers = checkpoints(kind)
    model = tiny_model(kind.split(",")[0], **MODELS[kind])
    write(tmp_path, model, layers, kind, without=lost)
    with pytest.raises(ValueError, match=r"has no multi-token-prediction layers that fit .*missing.*layers\.\d"):
        MtpSource(model, tmp_path)


def test_a_checkpoint_without_such_layers_is_refused(tmp_path):
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no multi-token-prediction layers that fit LlamaForCausalLM"):
        MtpSource(model, tmp_path)
    with pytest.raises(ValueError, match="was loaded from no checkpoint: give the path of one"):
        MtpSource(model)


@pytest.mark.parametrize("kind", ["deepseek_v32", "qwen4_exp_text", "longcat_flash"])
def test_layers_that_need_more_than_they_are_given_are_refused(tmp_path, kind):
    """A cache of indices, several streams, two layers of a cache each: not in the middle of a text."""
    if kind not in CONFIG_MAPPING:
        pytest.skip("this transformers has no such model")
    model = random_model(tiny_config(kind))
    write(tmp_path, model, new_layers(model), kind)
    with pytest.raises(ValueError, match=r"does not support (the )?multi-token-prediction layers of"):
        MtpSource(model, tmp_path)


def test_the_depth_of_a_model_is_the_number_of_its_last_hidden_state():
    """LongCat-Flash counts halves of its layers."""
    for kind in ("llama", "gpt2", "longcat_flash", "qwen3_next", "hrm_text"):
        if kind in CONFIG_MAPPING:
            model = random_model(tiny_config(kind))
            assert depth_of(model) == len(model(IDS, output_hidden_states=True).hidden_states) - 1, kind


@pytest.mark.parametrize("kind", ["mimo", "qwen3_5_text"])
def test_a_model_whose_dtype_has_changed_since(checkpoints, kind):
    """The layers keep theirs; the head is the model's."""
    model = copy.deepcopy(checkpoints(kind)[0])
    source = MtpSource(model, checkpoints(kind)[0].name_or_path)
    model.double()
    expected = model.generate(IDS, max_new_tokens=20, do_sample=False).tolist()
    lookahead.wrap(model, source=source)
    assert model.generate(IDS, max_new_tokens=20, do_sample=False).tolist() == expected
    assert model.lookahead.last.sources["MtpSource"].proposed


def test_the_commands(tmp_path):
    model = tiny_model("qwen3_5_text", **MODELS["qwen3_5_text"], vocab_size=4096)
    write(tmp_path, model, new_layers(model), "qwen3_5_text")
    AutoTokenizer.from_pretrained(DEMO_MODEL).save_pretrained(tmp_path)
    arguments = ["generate", "def main():", "--model", str(tmp_path), "--mtp", "--max-new-tokens", "20"]
    result = CliRunner().invoke(main, [*arguments, "--budget", "8", "--json", "--compare"])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert answer["plain"]["identical"] is True
    assert "MtpSource" in answer["stats"]["sources"]
    for more, words in (
        (["--strategy", "plain"], "--mtp has no effect with --strategy plain"),
        (["--model", str(DEMO_MODEL)], "--mtp: .* has no multi-token-prediction layers that fit LlamaForCausalLM"),
    ):
        result = CliRunner().invoke(main, [*arguments, *more])
        assert result.exit_code
        assert re.search(words, result.stderr), result.stderr


def test_a_small_hybrid_is_trained_with_such_a_layer(monkeypatch, tmp_path):
    text = Path(train_hybrid_model.__file__).read_text()
    monkeypatch.setattr(train_hybrid_model, "standard_library", lambda: ([text] * 2, [text] * 2))
    options = ["--tokenizer", str(DEMO_MODEL), "--steps", "1", "--batch", "1", "--context", "64"]
    result = CliRunner().invoke(train_hybrid_model.main, [*options, "--out", str(tmp_path)], catch_exceptions=False)
    said = r"held-out loss [78]\.\d+ nats per token, [78]\.\d+ for the multi-token"
    assert re.search(said, result.output), result.output
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert "linear_attention" in model.config.layer_types
    prompts = [json.loads(line)["turns"][0] for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    ids = AutoTokenizer.from_pretrained(tmp_path)(prompts[0], return_tensors="pt").input_ids
    stats = check_identical(model, [ids], GREEDY, LookaheadConfig(budget=4), 0, source=MtpSource(model))
    assert stats.sources["MtpSource"].proposed > 0
