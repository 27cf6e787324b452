"""Split attention against the dense mask, alone and inside of models."""

import threading
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from zoo import SETTINGS, tiny_model

from lookahead.cpu import tree_attention
from lookahead.decoding_pass import DecodingPass, current_pass
from lookahead.guessing.window import JacobiWindow
from lookahead.models import attention, split_attention
from lookahead.passes.capabilities import find_adapter
from lookahead.passes.runner import EagerRunner
from lookahead.step import lay_out
from ngram_pool import GuessTree, Origin


def random_step(rng: np.random.Generator, guesses: int, window: int):
    nodes: list[tuple[int, int]] = []  # parent and token, no two alike
    while len(nodes) < guesses:
        node = int(rng.integers(-1, len(nodes))), int(rng.integers(0, 60))
        if node not in nodes:
            nodes.append(node)
    tree = GuessTree.of([token for _, token in nodes], [parent for parent, _ in nodes], Origin.TEXT)
    return lay_out(3, tree, JacobiWindow(window, 3, [1, 2, 3]).rows if window else ())


class Layer(torch.nn.Module):
    is_causal = True

    def __init__(self, groups: int):
        super().__init__()
        self.num_key_value_groups = groups


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    guesses=st.integers(0, 40),
    window=st.integers(0, 6),
    held=st.integers(0, 90),
    key_heads=st.integers(1, 3),
    groups=st.integers(1, 4),
    head_dim=st.sampled_from([8, 24, 64]),
    scaling=st.sampled_from([None, 0.3]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    short=st.sampled_from([0, 1024]),
    by_kernel=st.booleans(),
)
def test_two_parts_are_the_whole(
    seed, guesses, window, held, key_heads, groups, head_dim, scaling, dtype, short, by_kernel
):
    note(f"{seed=} {guesses=} {window=} {held=} {key_heads=} {groups=} {head_dim=}")
    note(f"{scaling=} {dtype=} {short=} {by_kernel=}")
    step = random_step(np.random.default_rng(seed), guesses, window)
    torch.manual_seed(seed)
    new = len(step)
    query = torch.randn(1, new, key_heads * groups, head_dim, dtype=dtype).transpose(1, 2)
    room = torch.randn(2, 1, key_heads, held + new + 5, head_dim, dtype=dtype)
    key, value = room[:, :, :, : held + new]
    own = torch.zeros(1, 1, new, new, dtype=dtype)
    own.masked_fill_(~torch.from_numpy(step.ancestors), torch.finfo(dtype).min)
    dense = torch.nn.functional.pad(own, (held, 0))
    exact, _ = sdpa_attention_forward(
        Layer(groups), query.double(), key.double(), value.double(), dense.double(), scaling=scaling
    )
    kernel = tree_attention.serves if by_kernel else lambda *arguments: False
    with (
        mock.patch.object(split_attention, "SHORT_CONTEXT", short),
        mock.patch.object(tree_attention, "serves", kernel),
    ):
        for mask in (own, dense, dense == 0):
            with DecodingPass(splits_attention=True, uses_kernels=True):
                out, weights = attention.attend(Layer(groups), query, key, value, mask, scaling=scaling)
            assert weights is None
            assert out.shape == exact.shape
            assert out.is_contiguous()
            assert (out.double() - exact).abs().max() < (1e-5 if dtype == torch.float32 else 3e-2)


@pytest.mark.parametrize("new", [1, 7])
def test_anything_but_a_step_is_sdpa(new):
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, new, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    square = torch.randn(1, 2, new, 8), torch.randn(1, 2, new, 8)
    bias = torch.randn(1, 4, new, 9)
    for arguments in ((query, *square, None), (query, key, value, bias), (query, key, value, None)):
        if arguments[1] is key and arguments[3] is None and new > 1:
            continue  # sdpa's causal flag has another meaning there, and models give a mask
        expected, _ = sdpa_attention_forward(Layer(2), *arguments)
        with DecodingPass(splits_attention=True, uses_kernels=True):
            torch.testing.assert_close(attention.attend(Layer(2), *arguments)[0], expected, atol=1e-5, rtol=1e-5)

    def with_softcap(function):
        """What it gives, or raises: releases of transformers differ."""
        try:
            with DecodingPass(splits_attention=True, uses_kernels=True):
                return function(Layer(2), query, key, value, bias[:, :1], softcap=30.0)[0].tolist()
        except ValueError as error:
            return str(error)

    assert with_softcap(attention.attend) == with_softcap(sdpa_attention_forward)


def test_code_that_a_user_compiles_has_torchs_attention():
    """Wherever it is traced and run. It cannot be traced through ours."""
    query, key, value = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    arguments = query, key, value, torch.randn(1, 1, 3, 9)
    torch.compiler.reset()
    compiled = torch.compile(
        lambda *arguments: attention.attend(Layer(2), *arguments)[0], backend="eager", fullgraph=True
    )
    with torch.no_grad(), DecodingPass(splits_attention=True, uses_kernels=True):
        assert torch.equal(compiled(*arguments), sdpa_attention_forward(Layer(2), *arguments)[0])
    torch.compiler.reset()


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_models_attend_in_parts_exactly_when_they_can(name, monkeypatch):
    model = tiny_model(name)
    adapter = find_adapter(model)
    calls = []
    part = split_attention.flash_attention
    monkeypatch.setattr(split_attention, "flash_attention", lambda *arguments: calls.append(1) or part(*arguments))
    monkeypatch.setattr(split_attention, "SHORT_CONTEXT", 0)
    assert_a_step_is_that_of_the_dense_mask(model, adapter)  # by the kernel
    monkeypatch.setattr(tree_attention, "serves", lambda *arguments: False)
    calls.clear()
    assert_a_step_is_that_of_the_dense_mask(model, adapter)
    # Older releases of transformers let "sdpa" pass soft caps by; those calls are left to it.
    has_softcap = getattr(model.config, "attn_logit_softcapping", None) is not None
    assert bool(calls) == bool(adapter.splits_attention and not has_softcap)
    assert model.config._attn_implementation in ("sdpa", "eager")


def assert_a_step_is_that_of_the_dense_mask(model, adapter) -> None:
    """Beyond the windows of sliding layers."""
    rng = np.random.default_rng(1)
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    prompt = rng.integers(1, min(vocabulary, 200), 40).tolist()
    step = random_step(rng, 12 if adapter.can_branch else 0, 0)
    logits = []
    for in_parts in (adapter.splits_attention, False):
        runner = EagerRunner(model, replace(adapter, splits_attention=in_parts))
        cache = runner.adapter.make_cache()
        with torch.no_grad():
            runner.prefill(torch.tensor([prompt]), cache)
            logits.append(runner.run([step], cache).logits)
    spread = logits[1].std()
    assert (logits[0] - logits[1]).abs().max() < 1e-4 * spread


def test_a_pass_in_one_thread_is_nothing_to_another():
    model, ids = tiny_model("llama"), torch.arange(9)[None]
    before, config = model(ids).logits, model.config.to_dict()
    inside, leave = threading.Event(), threading.Event()
    found = []

    def hold():
        with (
            torch.no_grad(),
            DecodingPass(splits_attention=True, uses_kernels=True),
            mock.patch.object(tree_attention, "attend", side_effect=tree_attention.attend) as kernel,
        ):
            found.append(model(ids).logits)
            assert kernel.called
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert inside.wait(60)
    with mock.patch.object(tree_attention, "attend") as kernel:
        assert torch.equal(model(ids).logits, before)
        assert not kernel.called
    assert model.config.to_dict() == config
    leave.set()
    thread.join(60)
    torch.testing.assert_close(found[0], before, atol=1e-4, rtol=1e-4)


def test_an_interrupt_leaves_no_pass_behind():
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), DecodingPass(splits_attention=True, uses_kernels=True):
        interrupted()
    assert current_pass() is None
