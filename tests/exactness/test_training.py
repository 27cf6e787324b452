"""Models in training mode, as reinforcement learning generates with them: texts are those of plain decoding there."""

import random
from functools import wraps
from types import MethodType

import pytest
import torch
from peft import LoraConfig, get_peft_model
from test_fused import FAMILIES
from test_lossless import left_pad, random_prompt
from torch import nn
from zoo import tiny_model

import lookahead
from lookahead import LookaheadConfig

CONFIG = LookaheadConfig(budget=8, window_size=2, ngram_size=3)  # fixed, so that no time goes into measuring steps
WAYS = {"do_sample": False}, {"do_sample": True, "temperature": 0.7}
FEW = ["llama", "opt", "gpt2", "falcon", "gemma3_text", "mixtral", "lfm2", "qwen3_5_text", "deepseek_v3", "gpt_oss"]


def without_dropout(model):
    """Set all rates of a model to 0, in its modules and its configuration."""
    for module in model.modules():
        for held in (vars(module), vars(getattr(module, "config", module))):
            held.update({name: 0.0 for name, x in held.items() if "drop" in name and isinstance(x, float)})
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def repeated(rng, times=3):
    """Two prompts of different lengths, each of them several times, as GRPO asks for them."""
    prompts = [random_prompt(rng) for _ in range(2)]
    return left_pad([ids for ids in prompts for _ in range(times)])


def texts(model, inputs, seed):
    found = []
    for way in WAYS:
        torch.manual_seed(seed)
        found.append(model.generate(**inputs, **way, max_new_tokens=24).tolist())
    return [*found, torch.rand(2).tolist()]  # the generator ends where plain decoding leaves it


def check(model, inputs, seed=0, reason=None):
    """Compare the texts of a model with those that it writes unwrapped, in the mode that it is in.

    reason: what is said if lookahead leaves it to plain decoding; None: it decodes.
    """
    expected = texts(model, inputs, seed)
    lookahead.wrap(model, CONFIG)
    actual = texts(model, inputs, seed)
    left = model.lookahead.last.plain
    lookahead.unwrap(model)
    assert actual == expected, (inputs, seed)
    assert left == (f"in training mode, in which {reason} (model.eval() ends it)" if reason else "")


@pytest.mark.parametrize("family", [family for family in FAMILIES if family in FEW])
def test_without_dropout(family):
    """Modules without draws compute the same as in evaluation mode, and gradients come as before."""
    seed = random.randrange(1000)
    model = without_dropout(tiny_model(family)).train()
    inputs, before = repeated(random.Random(seed)), torch.get_rng_state()
    model(**inputs)
    draws = not torch.equal(torch.get_rng_state(), before)  # OPT in transformers 5.17, though it leaves no layer out
    check(model, inputs, seed, reason="a pass draws at random" if draws else None)
    model(**inputs, labels=inputs["input_ids"]).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("llama", {"attention_dropout": 0.1}, "model.layers.0.self_attn.attention_dropout is 0.1"),
        ("gpt2", {"attn_pdrop": 0.0, "embd_pdrop": 0.0}, "transformer.h.0.attn.resid_dropout.p is 0.1"),
        ("mixtral", {"router_jitter_noise": 0.2}, "model.layers.0.mlp.jitter_noise is 0.2"),
        ("falcon", {"attention_dropout": 0.3}, "transformer.h.0.self_attention.attention_dropout.p is 0.3"),
        ("opt", {}, "model.decoder.dropout is 0.1"),
        ("diffllama", {}, "lookahead does not know what DiffLlamaForCausalLM does"),
    ],
)  # fmt: skip
def test_what_draws_at_random_is_named(family, settings, reason):
    check(tiny_model(family, **settings).train(), repeated(random.Random(1)), reason=reason)


def test_a_setting_that_passes_read_in_the_configuration():
    model = tiny_model("falcon").train()
    model.config.hidden_dropout = 0.3
    check(model, repeated(random.Random(2)), reason="config.hidden_dropout is 0.3")


def test_what_cannot_be_seen_is_tried():
    """Here, an activation of torch's that is another one in training mode."""
    model = tiny_model("qwen3").train()
    model.model.layers[1].mlp.act_fn = nn.RReLU()
    check(model, repeated(random.Random(2)), reason="a pass draws at random")


def test_a_hook_may_do_anything():
    """NEFTune adds noise in this way. Each call looks for it again."""
    model = lookahead.wrap(tiny_model("qwen3").train(), CONFIG)
    ids, embedding = torch.tensor([[5, 6, 7, 8]]), model.get_input_embeddings()
    model.generate(ids, max_new_tokens=4)
    assert not model.lookahead.last.plain
    lookahead.unwrap(model)
    handle = embedding.register_forward_hook(
        lambda module, _, output: output + torch.rand_like(output) if module.training else None
    )
    check(model, {"input_ids": ids}, reason="lookahead does not know what a hook on a Embedding does")
    handle.remove()
    check(model, {"input_ids": ids})


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_checkpoints(family):
    """Trainers turn them off for generate(), and leave a hook behind that asks for gradients of the embedding."""
    model, inputs = without_dropout(tiny_model(family)).train(), repeated(random.Random(3))
    model.gradient_checkpointing_enable()
    is_same = texts(model, inputs, 0) == texts(model.eval(), inputs, 0)  # by version of transformers
    check(model.train(), inputs, reason=None if is_same else "the logits are others")
    model.gradient_checkpointing_disable()
    check(model, inputs)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, None),
        ({"lora_dropout": 0.1}, "model.layers.0.self_attn.q_proj.lora_dropout.default.p is 0.1"),
        ({"use_dora": True}, "lookahead does not know what peft.tuners.lora.dora.DoraLinearLayer.forward does"),
    ],
)
def test_adapters(settings, reason):
    model = tiny_model("llama").train()
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", **settings))
    check(model, repeated(random.Random(4)), reason=reason)
    assert adapted.training


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_loop_of_training_and_generating(dtype):
    """An optimizer changes weights where they lie, of which lookahead has a copy while they are bf16 numbers."""

    def train(before):
        torch.manual_seed(5)
        model = tiny_model("llama", hidden_size=64, intermediate_size=96).bfloat16().to(dtype).train()
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.5), []
        for seed in range(4):
            before(model)
            torch.manual_seed(seed)
            found.append(model.generate(**inputs, do_sample=True, max_new_tokens=16))
            mask = nn.functional.pad(inputs["attention_mask"], (0, 16), value=1)
            model(found[-1], attention_mask=mask, labels=found[-1]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return [*map(torch.Tensor.tolist, found), *(x.detach() for x in model.parameters())], model

    def wrap_anew(model):
        lookahead.wrap(lookahead.unwrap(model), CONFIG)

    def wrap_once(model):
        if not hasattr(model, "lookahead"):
            lookahead.wrap(model, CONFIG)

    inputs = repeated(random.Random(6), times=4)
    # In bf16, plain passes over one row and over several round otherwise.
    expected, _ = train(wrap_anew if dtype == torch.bfloat16 else lambda model: None)
    actual, model = train(wrap_once)
    assert actual[:4] == expected[:4]
    assert all(map(torch.equal, actual[4:], expected[4:]))
    assert len({str(text) for text in expected[:4]}) == 4
    assert model.lookahead.stats.calls == 4
    assert model.lookahead.stats.accepted.total()


FORWARD_OF_TRL = """
def add_fused_lm_head(model):
    original_forward = model.forward

    @wraps(type(model).forward)
    def _fused_forward(self, *args, fused_lm_head=False, **kwargs):
        return None if fused_lm_head else original_forward(*args, **kwargs)

    model.forward = MethodType(_fused_forward, model)
"""


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
def test_the_forward_of_trl(family):
    """GRPOTrainer puts it before the class's, which it calls. What it calls instead of that is the user's."""
    names = {"__name__": "trl.trainer.utils", "wraps": wraps, "MethodType": MethodType}
    exec(FORWARD_OF_TRL, names)
    model, inputs = tiny_model(family).train(), repeated(random.Random(8))
    names["add_fused_lm_head"](model)
    check(model, inputs)
    lookahead.wrap(model, CONFIG)
    model.generate(**inputs, max_new_tokens=8)
    assert {"passes: fused", "guesses: trees"} <= set(model.lookahead.report().splitlines())
    lookahead.unwrap(model)
    del model.forward

    def flipped(self, *args, **kwargs):
        output = type(self).forward(self, *args, **kwargs)
        output.logits = output.logits.flip(-1)
        return output

    model.forward = MethodType(wraps(type(model).forward)(flipped), model)
    names["add_fused_lm_head"](model)
    found = texts(model.eval(), inputs, 0)
    lookahead.wrap(model, CONFIG)
    assert texts(model, inputs, 0) == found
    assert "passes: fused" not in model.lookahead.report()
