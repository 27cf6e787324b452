"""Models whose classes are their users' own: what their loops give to passes, and what they make of padding."""

from copy import deepcopy

import pytest
import torch
from torch import nn
from transformers import GenerationMixin, LlamaConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaModel
from zoo import COMMON

import lookahead
from lookahead.compat import CACHE

IDS = torch.tensor([[6, 5, 8, 7, 6, 5, 8, 7, 6, 5]])
PADDED = (torch.arange(10) >= 3).long()[None]
GREEDY = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False}


class OwnConfig(LlamaConfig):
    model_type = "own_of_a_user"


class Own(PreTrainedModel, GenerationMixin):
    """A class of its own around a decoder of transformers'."""

    config_class = OwnConfig
    _supports_sdpa = _supports_attention_backend = True
    counts_columns = False

    def __init__(self, config):
        super().__init__(config)
        self.model = LlamaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.table = nn.Embedding(512, config.hidden_size)
        self.post_init()

    def get_input_embeddings(self):
        return self.model.embed_tokens

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, use_cache=None, **kwargs):
        cache, embeds = kwargs.get(CACHE), self.model.embed_tokens(input_ids)
        if self.counts_columns:
            held = cache.get_seq_length() if cache is not None else 0
            embeds = embeds + self.table(torch.arange(held, held + input_ids.shape[1]))
        inputs = {"inputs_embeds": embeds, "position_ids": position_ids, CACHE: cache}
        output = self.model(attention_mask=attention_mask, use_cache=use_cache, **inputs)
        return CausalLMOutputWithPast(logits=self.lm_head(output.last_hidden_state), **{CACHE: cache})


def declared(cls):
    """With the cache by its name among the arguments of forward, which differs from version to version."""
    arguments = "self, input_ids=None, attention_mask=None, position_ids=None, use_cache=None"
    handed_on = "input_ids, attention_mask, position_ids, use_cache"
    if cls.counts_columns:
        arguments, handed_on = arguments.replace(" position_ids=None,", ""), handed_on.replace("position_ids", "None")
    space = {"own": cls.forward}
    exec(f"def forward({arguments}, {CACHE}=None, **k):\n return own(self, {handed_on}, {CACHE}={CACHE})", space)
    cls.forward = space["forward"]
    return cls


@declared
class Usual(Own):
    def prepare_inputs_for_generation(self, *args, **kwargs):
        return super().prepare_inputs_for_generation(*args, **kwargs)


@declared
class WithOtherPositions(Own):
    def prepare_inputs_for_generation(self, *args, **kwargs):
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)
        return {**inputs, "position_ids": inputs["position_ids"] * 3}


@declared
class WithOtherUpdates(Own):
    def _update_model_kwargs_for_generation(self, *args, **kwargs):
        found = super()._update_model_kwargs_for_generation(*args, **kwargs)
        return {**found, "position_ids": torch.zeros_like(found["position_ids"])}


@declared
class WithAnotherLoop(Own):
    def _sample(self, ids, *args, **kwargs):
        return torch.cat([ids, super()._sample(ids, *args, **kwargs)], dim=1)


@declared
class CountsColumns(Own):
    counts_columns = True  # and padding among them: it is given no positions


def model_of(cls):
    torch.manual_seed(0)
    model = cls(OwnConfig(**COMMON)).eval()
    with torch.no_grad():
        for matrix in model.parameters():
            matrix.mul_(4.0 if matrix.ndim > 1 else 1.0)  # so that texts depend on positions
    return model


CASES = [
    (Usual, {}, False),
    (Usual, {"attention_mask": PADDED}, False),
    (WithOtherPositions, {}, True),
    (WithOtherUpdates, {}, True),
    (WithAnotherLoop, {}, True),
    (CountsColumns, {}, False),
    (CountsColumns, {"attention_mask": PADDED}, True),
]


@pytest.mark.parametrize(("cls", "options", "is_left"), CASES)
def test_the_loop_of_a_class_of_users(cls, options, is_left):
    """It may give passes other inputs than the usual, and a model may count padding where it gets no positions."""
    model = model_of(cls)
    expected = model.generate(IDS, **options, **GREEDY)
    lookahead.wrap(model)
    assert model.generate(IDS, **options, **GREEDY).tolist() == expected.tolist()
    assert bool(model.lookahead.last.plain) == is_left, model.lookahead.last.plain


def test_methods_of_the_loop_that_are_set_on_an_object():
    """With `decode`, too, for which the model is not wrapped."""
    model = model_of(Usual)
    own = model._update_model_kwargs_for_generation
    model._update_model_kwargs_for_generation = lambda *args, **kwargs: {
        **(found := own(*args, **kwargs)), "position_ids": torch.zeros_like(found["position_ids"])
    }  # fmt: skip
    expected = model.generate(IDS, **GREEDY).tolist()
    with pytest.warns(UserWarning, match="replaced"):
        assert model.generate(IDS, custom_generate=lookahead.decode, **GREEDY).tolist() == expected
    wrapped = lookahead.wrap(deepcopy(model))
    assert wrapped.generate(IDS, **GREEDY).tolist() == expected
