"""Passes in one call: the logits, hidden states and caches of the model's own code, for as long as it is that code."""

import copy
import gc
import threading
import weakref
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import Phase, assume, example, given, note, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, quantize_
from torchao.quantization.granularity import PerGroup
from transformers import CONFIG_MAPPING
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gptj import modeling_gptj
from transformers.models.rembert import modeling_rembert
from zoo import BERTS, MIXED, as_loaded, tiny_model

import lookahead
from lookahead import LookaheadConfig
from lookahead.cpu import blocks, executor, native, products
from lookahead.cpu import top_k as fast
from lookahead.models.cache import SeparateCaches, copy_of_cache
from lookahead.models.families import UnknownModelError, page_of
from lookahead.models.recurrence import StateLayer
from lookahead.passes import capabilities, fused
from lookahead.passes.fused import FusedRunner
from lookahead.passes.packed import packed_of
from lookahead.passes.rounding import relative_error
from lookahead.passes.runner import EagerRunner
from lookahead.step import MAX_DEPTH, lay_out
from ngram_pool import GuessTree, Origin

DTYPES = [torch.float32, torch.bfloat16]
SIZES = {"hidden_size": 64, "intermediate_size": 64}  # whole groups of 32
GREEDY = {"max_new_tokens": 20, "do_sample": False}
IDS = torch.arange(3, 12)[None]


def random_tree(rng, rows: int, vocabulary: int) -> GuessTree:
    # Siblings differ; 2 has an embedding of zeros.
    tokens = 3 + np.tile(rng.permutation(vocabulary - 3), 1 + rows // (vocabulary - 3))[:rows]
    nodes: dict[tuple[int, int], None] = {}  # parents and tokens
    for i, token in enumerate(tokens.tolist()):
        while (node := (int(rng.integers(-1, i)), token)) in nodes:
            pass
        nodes[node] = None
    return GuessTree.of(tokens.tolist(), [parent for parent, _ in nodes], Origin.TEXT) if rows else GuessTree.empty()


FAMILIES = [
    "llama", "mistral", "ministral", "ministral3", "cwm", "seed_oss", "qwen2", "qwen3", "smollm3", "granite",
    "hyperclovax", "phi3", "olmo", "olmo2", "olmo3", "exaone4", "gemma", "gemma2", "gemma3_text", "gemma3",
    "gemma3n_text", "gemma3n", "gemma4_text", "gemma4", "vaultgemma", "glm", "glm4", "ernie4_5", "helium", "cohere",
    "cohere2", "arcee", "nemotron", "jais2", "hunyuan_v1_dense", "phi", "stablelm", "starcoder2", "youtu", "minicpm3",
    "nanochat", "apertus", "gptj", "codegen", "opt", "gpt2", "gpt_bigcode", "gpt_neox", "persimmon", "falcon", "bloom",
    "mpt", "granite_swa", "apertus1p5_text", "gpt_neox_japanese", "biogpt", "xglm", "ctrl", "bitnet", "emu3",
    "cohere_compass_text", "bert", "bert-generation", "ernie", "electra", "roberta", "camembert", "xlm-roberta",
    "data2vec-text", "roberta-prelayernorm", "xlm-roberta-xl", "megatron-bert", "rembert", "big_bird", "roc_bert",
    "xmod", "modernbert-decoder", "gemma4_unified_text", "gemma4_unified", "phi4_multimodal", "fuyu",
    "got_ocr2", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen2_5_omni_thinker", "glm4v", "glm46v", "glm_ocr",
    "paddleocr_vl", "paligemma", "git", "hrm_text", "zamba2", "lfm2", "lfm3",
    "qwen3_5_text", "olmo_hybrid", "bamba", "falcon_h1", "nemotron_h", "mamba2", "mixtral", "granitemoehybrid",
    "lfm2_moe", "phimoe", "mellum", "qwen3_next", "qwen3_5_moe_text", "qwen2_moe", "qwen3_moe", "olmoe", "flex_olmo",
    "granitemoe", "granitemoeshared", "hunyuan_v1_moe", "glm4_moe", "solar_open", "dots1", "exaone_moe", "hy_v3",
    "minimax_m2", "ernie4_5_moe", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "axk1", "afmoe", "gpt_oss",
    "granitemoe_swa", "flint", "cohere2_moe", "beam", "mimo_v2_flash", "aria_text", "lara_mini",
    "llama4_text", "kolibri1", "laguna", "dbrx", "qwen3_vl_moe", "qwen3_omni_moe_thinker", "glm4v_moe",
    "ernie4_5_vl_moe", "longcat_flash", "kimi_linear", "bailing_hybrid",
]  # fmt: skip
# In older transformers, these have parts of another shape or of another model, or masks that are not causal.
OTHERS_BEFORE = [
    *("gptj", "codegen", "nemotron_h", "cohere_compass_text", "aria_text", "git"),
    *("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"),
]
SEE_WHAT_FOLLOWS = [] if hasattr(modeling_rembert, "create_causal_mask") else ["megatron-bert", "rembert", "big_bird"]
LEFT_OUT = [*([] if hasattr(modeling_gptj, "GPTJRotaryEmbedding") else OTHERS_BEFORE), *SEE_WHAT_FOLLOWS]
FAMILIES = [family for family in FAMILIES if family not in LEFT_OUT and family in CONFIG_MAPPING]

STATES = [
    *("lfm2", "lfm3", "qwen3_5_text", "olmo_hybrid", "kimi_linear", "bamba", "falcon_h1", "nemotron_h", "mamba2"),
    "zamba2",
    "bailing_hybrid",
]
STATES = [family for family in STATES if family in FAMILIES]
WITH_WINDOWS = {
    "mistral", "ministral", "gemma3_text", "gemma3n_text", "gemma4_text", "phi3", "olmo3", "cohere2", "mixtral",
    "starcoder2",
    "lfm3", "granitemoe_swa", "phimoe", "granite_swa", "cohere_compass_text", "flint", "cohere2_moe", "beam",
    "mimo_v2_flash", "modernbert-decoder", "gemma4_unified_text", "lara_mini",
    "kolibri1", "laguna",
}  # fmt: skip
# torch multiplies with their experts, in an order of its own
MIXTURES = set(FAMILIES[FAMILIES.index("mixtral") :])
# a copy of their weights must be made, for which torch multiplies with the original
TRANSPOSED = {"gpt2", "gpt_oss", "aria_text", "llama4_text", "dbrx"}
OUTPUTS = {"longcat_flash": 2}  # hidden states of tiny models that have fewer: its two layers are one
# their attention has another form
LATENT = {
    "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "axk1", "youtu", "minicpm3", "kimi_linear", "bailing_hybrid",
    "longcat_flash",
}  # fmt: skip
# they multiply with parts of weights, and torchao does not know Falcon's layers
NOT_QUANTIZED = LATENT | {"roc_bert", "falcon"}
# The own code of these does not use our attention, nor, in Falcon, our products; Ministral 3 scales queries apart, and
# Gemma 3n takes the mean of its streams in one step.
OTHERWISE = {
    "gemma3n_text", "gemma3n", "gemma2", "vaultgemma", "falcon", "ministral3", "bloom", "mpt", "granite_swa",
    "gpt_neox_japanese", "xglm", "git", *LATENT,
    "paligemma",  # its own code counts positions from 1
    *BERTS,  # they add up their embeddings in another order
}  # fmt: skip
# these know no other width
AS_WIDE_AS_HEADS = {
    "gpt2",
    "gpt_bigcode",
    "gptj",
    "codegen",
    "nanochat",
    "gpt_neox",
    "persimmon",
    "falcon",
    "qwen2_moe",
    "helium",
    "opt",
    "phi",
    "stablelm",
    "olmoe",
    "granitemoe",
    "bloom",
    "mpt",
    "gpt_neox_japanese",
    "biogpt",
    "xglm",
    "ctrl",
    "bitnet",
    "cohere_compass_text",
    "modernbert-decoder",
    "fuyu",
    "zamba2",
    "dbrx",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen2_5_omni_thinker",
    "glm4v",
    "glm46v",
    "git",
    *BERTS,
}
# a share of the numbers that turn has positions of its own in each dimension
WITH_SECTIONS = {
    "qwen2_vl", "qwen2_5_vl", "qwen2_5_omni_thinker", "glm4v", "glm46v", "glm_ocr", "paddleocr_vl", "glm4v_moe",
    "ernie4_5_vl_moe",
}  # fmt: skip
VARIANTS = [
    ("falcon", {"new_decoder_architecture": False, "multi_query": True, "parallel_attn": True}),
    ("falcon", {"new_decoder_architecture": False, "multi_query": False, "parallel_attn": False, "num_kv_heads": 4}),
    ("falcon", {"num_ln_in_parallel_attn": 1}),
    ("falcon", {"alibi": True}),
    (
        "falcon",
        {"new_decoder_architecture": False, "multi_query": False, "parallel_attn": False, "num_kv_heads": 4}
        | {"alibi": True, "bias": True},
    ),
    ("bloom", {"apply_residual_connection_post_layernorm": True, "tie_word_embeddings": False}),
    ("bloom", {"num_attention_heads": 6, "hidden_size": 96}),
    ("mpt", {"num_attention_heads": 6, "hidden_size": 96, "attn_config": {"softmax_scale": 0.3}}),
    (
        "cohere2_moe",
        {"expert_selection_fn": "sigmoid", "norm_topk_prob": False, "shared_expert_combination_strategy": "sum"}
        | {"rms_norm_eps": 1e-5, "prefix_dense_sliding_window_pattern": 2},
    ),
    ("cohere2_moe", {"expert_selection_fn": "sigmoid", "num_shared_experts": 0}),
    ("flint", {"norm_topk_prob": False, "attention_bias": True}),
    ("granite_swa", {"layer_rope_theta": [0, 0], "tie_word_embeddings": False}),
    ("biogpt", {"scale_embedding": False}),
    ("bitnet", {"attention_bias": True, "hidden_act": "silu"}),
    ("xglm", {"scale_embedding": False, "tie_word_embeddings": False}),
    ("phimoe", {"attention_bias": True, "lm_head_bias": True, "router_jitter_noise": 0.01, "num_local_experts": 8}),
    ("gpt_neox", {"use_parallel_residual": False}),
    ("gpt_neox", {"attention_bias": False, "rotary_pct": 1.0}),
    ("gemma2", {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0}),
    ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    ("gemma3_text", {"final_logit_softcapping": 2.0}),
    ("gemma4_text", {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True}),
    (
        "gemma4_text",
        {"layer_types": ["sliding_attention", "full_attention", "full_attention"], "num_hidden_layers": 3}
        | {"num_kv_shared_layers": 1, "final_logit_softcapping": 5.0, "tie_word_embeddings": True},
    ),
    (
        "gemma4_text",
        {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
        | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
    (
        "gemma3n_text",
        {"altup_active_idx": 1, "altup_correct_scale": False, "altup_num_inputs": 2, "num_kv_shared_layers": 0}
        | {"final_logit_softcapping": 5.0, "tie_word_embeddings": False, "attention_bias": True},
    ),
    ("qwen2_moe", {"mlp_only_layers": [0], "norm_topk_prob": True}),
    ("hyperclovax", {"use_post_norm": False}),
    ("gpt_bigcode", {"multi_query": False}),
    ("persimmon", {"qk_layernorm": False}),
    ("glm4_moe", {"use_qk_norm": False, "n_group": 1, "topk_group": 1, "norm_topk_prob": False}),
    ("ernie4_5_moe", {"moe_num_shared_experts": 0}),
    ("granitemoeshared", {"shared_intermediate_size": 0}),
    ("deepseek_v2", {"topk_method": "group_limited_greedy", "q_lora_rank": None, "tie_word_embeddings": True}),
    ("deepseek_v3", {"q_lora_rank": None, "rope_interleave": False, "attention_bias": True}),
    (
        "deepseek_v3",
        {
            "rope_parameters": {
                **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16},
                **{"mscale": 1.0, "mscale_all_dim": 0.8},
            }
        },
    ),
    ("minicpm3", {"q_lora_rank": None, "mlp_bias": True}),
    ("longcat_flash", {"zero_expert_num": 0, "attention_bias": True, "tie_word_embeddings": True}),
    ("longcat_flash", {"zero_expert_num": 6, "n_routed_experts": 2, "moe_topk": 1, "num_layers": 1}),
    ("git", {"hidden_act": "gelu_new", "tie_word_embeddings": False}),
    (
        "llama4_text",  # queries grow within the texts
        {"floor_scale": 30, "attn_scale": 2.0, "no_rope_layers": [1, 0], "num_experts_per_tok": 2}
        | {"layer_types": ["chunked_attention", "full_attention"]},
    ),
    ("llama4_text", {"use_qk_norm": False, "attention_bias": True, "tie_word_embeddings": True, "moe_layers": [0]}),
    ("laguna", {"gating": "per-element", "moe_router_logit_softcapping": 0.5, "attention_bias": True}),
    ("kolibri1", {"norm_topk_prob": False, "num_experts_per_tok": 3}),
    ("olmo", {"clip_qkv": 0.3, "attention_bias": True}),
    ("olmoe", {"clip_qkv": 0.3}),
    ("mpt", {"attn_config": {"clip_qkv": 0.3}}),
    ("nanochat", {"final_logit_softcapping": None, "attention_bias": True}),
    ("apertus", {"hidden_act": "silu", "attention_bias": True}),
    ("afmoe", {"mup_enabled": False, "tie_word_embeddings": True, "attention_bias": True}),
    ("beam", {"final_logit_softcapping": None, "norm_topk_prob": False, "tie_word_embeddings": True}),
    (
        "beam",
        {"attention_bias": True, "mlp_layer_types": ["sparse", "dense"], "n_group": 1, "topk_group": 1}
        | {"rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in MIXED["layer_types"]}},
    ),
    *(
        (
            family,
            {"tie_word_embeddings": True, "attention_bias": True}
            | {
                "rope_parameters": {
                    **{"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
                    "mrope_section": [1, 1, 0],
                }
            },
        )
        for family in ("glm4v", "glm_ocr", "glm4v_moe")
    ),
    ("glm4v_moe", {"norm_topk_prob": False, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 2}),
    ("ernie4_5_vl_moe", {"moe_num_shared_experts": 0, "use_bias": True}),
    ("paddleocr_vl", {"use_bias": True, "hidden_act": "gelu"}),
    ("qwen3_omni_moe_thinker", {"norm_topk_prob": False, "attention_bias": True, "mlp_only_layers": [0]}),
    ("qwen2_5_omni_thinker", {**MIXED, "use_sliding_window": True, "max_window_layers": 1}),
    (
        "mimo_v2_flash",
        {"attention_value_scale": None, "attention_bias": True, "v_head_dim": 8, "n_group": 1, "topk_group": 1},
    ),
    ("emu3", {"mlp_bias": True, "attention_bias": True, "tie_word_embeddings": True}),
    (
        "cohere_compass_text",
        {"attention_bias": True, "logit_scale": None, "tie_word_embeddings": False}
        | {
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
                for kind in MIXED["layer_types"]
            }
        },
    ),
    ("electra", {"embedding_size": 48, "hidden_act": "relu", "type_vocab_size": 1}),
    ("ernie", {"use_task_id": True, "tie_word_embeddings": False}),
    ("roberta", {"add_cross_attention": False, "hidden_act": "gelu_new", "tie_word_embeddings": False}),
    ("megatron-bert", {"hidden_act": "gelu_new", "tie_word_embeddings": False, "type_vocab_size": 1}),
    ("rembert", {"hidden_act": "relu", "tie_word_embeddings": True, "output_embedding_size": 48}),
    ("big_bird", {"rescale_embeddings": True, "use_bias": False, "hidden_act": "gelu"}),
    ("phi4_multimodal", {"tie_word_embeddings": True, "sliding_window": 8, "num_key_value_heads": 1}),
    ("fuyu", {"qk_layernorm": False, "tie_word_embeddings": True}),
    ("got_ocr2", {**MIXED, "use_sliding_window": True, "tie_word_embeddings": True}),
    ("zamba2", {"use_shared_attention_adapter": True, "num_mem_blocks": 1, "num_key_value_heads": 4}),
    ("zamba2", {"use_mem_rope": False, "layers_block_type": ["hybrid", "linear_attention", "hybrid"]}),
    ("zamba2", {"add_bias_linear": True, "mamba_ngroups": 1, "tie_word_embeddings": False}),
    ("hrm_text", {"H_cycles": 1, "L_cycles": 1, "attention_bias": True, "mlp_bias": True}),
    ("hrm_text", {"H_cycles": 3, "L_cycles": 1, "num_hidden_layers": 1, "tie_word_embeddings": True}),
    ("lara_mini", {"norm_topk_prob": False, "attention_bias": True, "linear_value_head_dim": 12}),
    ("roc_bert", {"concat_input": False, "tie_word_embeddings": False}),
    ("roc_bert", {"enable_shape": False}),
    ("roc_bert", {"enable_shape": False, "enable_pronunciation": False}),
    ("xmod", {"pre_norm": True, "default_language": "de_DE", "ln_before_adapter": False}),
    ("xmod", {"adapter_layer_norm": True, "adapter_reduction_factor": 2, "tie_word_embeddings": False}),
    ("xmod", {"adapter_reuse_layer_norm": False}),
    (
        "modernbert-decoder",
        {"norm_bias": True, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}
        | {"layer_types": ["full_attention", "sliding_attention"], "decoder_bias": False},
    ),
    ("gemma4_unified_text", {"num_kv_shared_layers": 0, "attention_k_eq_v": True, "tie_word_embeddings": False}),
    ("gemma4_unified_text", {"num_global_key_value_heads": 1, "final_logit_softcapping": 5.0}),
    ("aria_text", {"mlp_bias": True, "attention_bias": True, "moe_num_shared_experts": 2, "moe_topk": 3}),
    ("gpt_oss", {"swiglu_limit": 0.3, "swiglu_alpha": 3.0}),
    ("lfm3", {"use_sandwich_norm": False, "use_attention_gate": False, "attention_bias": True}),
    ("lfm2", {"conv_bias": True, "conv_L_cache": 4, "layer_types": ["full_attention", "conv"]}),
    ("lfm2_moe", {"use_expert_bias": False, "norm_topk_prob": False, "routed_scaling_factor": 2.5, "num_experts": 8}),
    ("granitemoe_swa", {"layer_rope_theta": [0, 0], "shared_intermediate_size": 0, "residual_multiplier": 0.7}),
    ("mamba2", {"residual_in_fp32": True, "use_bias": True, "use_conv_bias": False, "n_groups": 1}),
    ("qwen3_5_text", {"attention_bias": True, "linear_key_head_dim": 12, "linear_num_key_heads": 4}),
    ("qwen3_next", {"linear_value_head_dim": 12, "layer_types": ["full_attention", "linear_attention"]}),
    ("granitemoehybrid", {"num_local_experts": 0, "position_embedding_type": "rope"}),
    (
        "falcon_h1",
        {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_n_groups": 2, "ssm_multipliers": None}
        | {"mlp_multipliers": None, "embedding_multiplier": 1.0, "lm_head_multiplier": 1.0},
    ),
    (
        "falcon_h1",
        {"mamba_rms_norm": True, "mamba_n_groups": 2, "attention_bias": True, "mlp_bias": True, "projectors_bias": True}
        | {"mamba_proj_bias": True, "mamba_conv_bias": False, "mamba_d_conv": 3},
    ),
    (
        "nemotron_h",
        {"layer_types": ["moe", "linear_attention", "moe", "full_attention"], "n_routed_experts": 8, "topk_group": 2}
        | {"n_group": 4, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32}
        | {"routed_scaling_factor": 2.5, "moe_latent_size": 64, "use_bias": True, "mlp_bias": True},
    ),
    (
        "nemotron_h",
        {"layer_types": ["full_attention", "moe", "linear_attention"], "moe_intermediate_size": 64}
        | {"moe_shared_expert_intermediate_size": 32, "norm_topk_prob": False},
    ),
    ("olmo_hybrid", {"rope_parameters": {"rope_theta": None}, "linear_allow_neg_eigval": False}),
]
"""Of families whose settings change what is computed."""
VARIANTS = [variant for variant in VARIANTS if variant[0] in FAMILIES]
if not LEFT_OUT:
    VARIANTS.append(("gptj", {"n_positions": 64, "max_position_embeddings": 64, "rotary_dim": 8}))


def heads_of(family, heads):
    """How many heads a model of this family has, of queries and of keys, and their size."""
    many, few, size = heads
    if family == "mimo_v2_flash":  # layers with a window have twice as many of keys
        return 2 * many, few, size
    return many, many if family in LATENT else few, size


def first_and_last(family):
    """The first and the last output of a tiny model's layers."""
    return (0, 1) if family == "longcat_flash" else (0, 2)  # two layers of the cache are one of the model


def sizes(family, width, intermediate, size, heads=4, key_heads=2):
    """Settings of a model of this width, with this size of heads if the family lets it choose."""
    if family == "opt":
        return {"hidden_size": width, "word_embed_proj_dim": width, "ffn_dim": intermediate}
    if family == "falcon":
        return {"hidden_size": width, "ffn_hidden_size": intermediate, "num_kv_heads": key_heads}
    if family in ("gpt2", "gpt_bigcode", "gptj", "codegen"):
        return {"n_embd": width, "hidden_size": width, "n_inner": intermediate}
    if family in LATENT:
        return {"hidden_size": width, "intermediate_size": intermediate}
    if family == "dbrx":
        attention = {"kv_n_heads": key_heads, "rope_theta": 1e4, "clip_qkv": 1.0}
        experts = {"moe_num_experts": 4, "moe_top_k": 2, "ffn_hidden_size": intermediate}
        return {"hidden_size": width, "d_model": width, "attn_config": attention, "ffn_config": experts}
    if family == "laguna":
        of_layers = {"num_attention_heads_per_layer": [heads, 2 * heads]}
        return {"hidden_size": width, "intermediate_size": intermediate, "head_dim": size, **of_layers}
    if family == "mpt":
        return {"hidden_size": width, "max_seq_len": 8192}
    if family == "ctrl":
        return {"hidden_size": width, "dff": intermediate}
    if family == "xglm":
        return {"hidden_size": width, "ffn_dim": intermediate}
    if family == "mamba2":
        return {"hidden_size": width, "num_heads": width // 4, "head_dim": 8}
    size = width // heads if family in AS_WIDE_AS_HEADS else size
    if family in WITH_SECTIONS:
        sections = [size // 2 - size // 4, size // 8, size // 8]
        rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
        rope |= {"mrope_section": sections[::-1] if family == "ernie4_5_vl_moe" else sections}
        return {"hidden_size": width, "intermediate_size": intermediate, "head_dim": size, "rope_parameters": rope}
    return {"hidden_size": width, "intermediate_size": intermediate, "head_dim": size}


@settings(max_examples=70, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(
    family=st.sampled_from(FAMILIES),
    heads=st.sampled_from([(4, 4, 16), (6, 3, 32), (4, 1, 32), (3, 3, 64)]),
    width=st.sampled_from([96, 192]),
    intermediate=st.sampled_from([32, 64, 160]),
    steps=st.lists(st.integers(0, 90) | st.just(300), min_size=1, max_size=3),
    held=st.integers(1, 150) | st.sampled_from([300, 500]),
    threads=st.integers(1, 3),
    dtype=st.sampled_from(DTYPES),
    in_int8=st.sampled_from(["", "all but the head", "all", "in groups", "int4 in groups"]),
    seed=st.integers(0, 99),
)
def test_it_computes_what_the_model_computes(
    family, heads, width, intermediate, steps, held, threads, dtype, in_int8, seed
):
    note(f"{family=} {heads=} {width=} {intermediate=} {steps=} {held=} {threads=} {dtype=} {in_int8=} {seed=}")
    many, few, size = heads_of(family, heads)
    if family in AS_WIDE_AS_HEADS:
        width = many * size
    if family in MIXTURES:
        dtype = torch.float32  # in bf16, a row may choose other experts, whose scores are nearly those of its own
    model = tiny_model(
        family, seed, num_attention_heads=many, num_key_value_heads=few,
        max_position_embeddings=1024, attention_bias=bool(seed % 2),
        **sizes(family, width, intermediate, size, many, few),
    )  # fmt: skip
    model = as_loaded(model, dtype)
    for parameter in model.parameters():  # norms and biases too
        if parameter.ndim == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)
    if in_int8 and family not in NOT_QUANTIZED:
        groups = Int8WeightOnlyConfig(granularity=PerGroup(32))
        kinds = {"in groups": groups, "int4 in groups": IntxWeightOnlyConfig(torch.int4, PerGroup(32))}
        quantize_(
            model.base_model if in_int8 == "all but the head" else model, kinds.get(in_int8, Int8WeightOnlyConfig()),
            lambda part, _: isinstance(part, torch.nn.Linear) and part.in_features % 32 == 0,  # not all of images' are
        )  # fmt: skip
    adapter = capabilities.find_adapter(model)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        layers = (0, 1) if family == "longcat_flash" else (0, 1, 2)  # two layers of the cache are one of the model
        runners = EagerRunner(model, adapter, layers), FusedRunner(model, adapter, layers, family in TRANSPOSED)
        caches = [adapter.make_cache() for _ in runners]
        rng = np.random.default_rng(seed)
        prompt = torch.from_numpy(rng.integers(3, 97, (1, held)))
        with torch.no_grad():
            for cache in caches:
                runners[0].prefill(prompt, cache)
            for rows in steps:
                step = lay_out(int(rng.integers(3, 97)), random_tree(rng, rows, 97))
                eager, fused = (runner.run([step], cache) for runner, cache in zip(runners, caches, strict=True))
                # Quantized experts make more of what rounding changes: 1.6e-4 was seen over steps of 300 rows.
                full = 3e-4 if in_int8 and family in MIXTURES else 1e-4
                allowed = full if dtype == torch.float32 else 1.6e-1 if in_int8 else 8e-2
                assert relative_error(fused.logits, eager.logits) < allowed
                for layer in layers:
                    assert relative_error(fused.hidden_states[layer], eager.hidden_states[layer]) < allowed
                path = [0]
                while children := np.flatnonzero(step.parents == path[-1]).tolist():
                    path.append(children[int(rng.integers(len(children)))])
                for cache in caches:
                    cache.commit([step], [path])
        assert_states_alike(caches, allowed)
        for mine, theirs in zip(caches[1].in_place, caches[0].in_place, strict=True):
            assert mine.keys.shape == theirs.keys.shape
            for ours, own in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
                assert relative_error(ours.flatten(0, 2), own.flatten(0, 2)) < allowed
    finally:
        torch.set_num_threads(before)


def assert_states_alike(caches, allowed):
    states = [
        [states for layer in cache.layers if isinstance(layer, StateLayer) for states in layer.tensors()]
        for cache in caches
    ]
    for ours, theirs in zip(*states, strict=True):  # as wholes: a head that forgets at once keeps what rounding left
        assert relative_error(ours.flatten(1), theirs.flatten(1)) < allowed


BLUNT = {"hrm_text", "zamba2", "granitemoe", "granitemoeshared"}
"""Families in which larger weights would make 0.01 and more of a last digit, in cycles, or where experts are chosen."""


@lru_cache(maxsize=8)
def sharp_model(family, heads, window, dtype):
    """A model whose attention is far from even, and its adapter."""
    many, few, size = heads_of(family, heads)
    window = {"sliding_window": window} if family in WITH_WINDOWS else {}
    model = tiny_model(
        family, num_attention_heads=many, num_key_value_heads=few, max_position_embeddings=8192,
        **sizes(family, 96, 64, size, many, few), **window,
    )  # fmt: skip
    for parameter in model.parameters():
        if parameter.ndim == 2 and family not in BLUNT:
            parameter.data *= 4
    model = as_loaded(model, dtype)
    return model, capabilities.find_adapter(model)


@settings(max_examples=60, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(
    family=st.sampled_from(
        [
            *("llama", "mistral", "qwen3", "gemma2", "gemma3_text", "gemma4_text", "phi3", "gpt_oss", "deepseek_v3"),
            *("bloom", "mpt", "lfm2_moe", "granitemoe_swa", *STATES),
        ]
    ),
    heads=st.sampled_from([(4, 4, 16), (6, 3, 32), (3, 3, 64)]),
    window=st.sampled_from([20, 100, 300]),
    held=st.integers(1, 700) | st.sampled_from([60, 64, 127, 128, 192, 255, 256, 320, 4100]),
    rows=st.integers(1, 90),
    breadth=st.integers(1, 90),
    window_rows=st.integers(0, 3),
    threads=st.tuples(*[st.integers(1, 3)] * 2),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
@example("llama", (6, 3, 32), 100, 255, 64, 1, 0, (2, 1), torch.bfloat16, 1)  # the deepest guess
def test_guesses_do_not_change_a_bit(family, heads, window, held, rows, breadth, window_rows, threads, dtype, seed):
    """The logits of a row of a tree are those that passes over one token give along its path."""
    note(f"{family=} {heads=} {window=} {held=} {rows=} {breadth=} {window_rows=} {threads=} {dtype=} {seed=}")
    model, adapter = sharp_model(family, heads, window, dtype)
    runner, rng = FusedRunner(model, adapter, packs=family in TRANSPOSED), np.random.default_rng(seed)
    prompt = torch.from_numpy(rng.integers(3, 97, (1, held)))
    parents = [int(rng.integers(max(-1, row - breadth), row)) for row in range(rows)]
    tree = GuessTree.of(rng.permutation(np.arange(1000))[:rows].tolist(), parents, Origin.TEXT)
    step = lay_out(5, tree, [rng.integers(3, 97, 4) for _ in range(window_rows)])
    step = replace(step, ids=step.ids % 97)
    before = torch.get_num_threads()
    try:
        with torch.no_grad():
            filled = adapter.make_cache()
            EagerRunner(model, adapter).prefill(prompt, filled)
            torch.set_num_threads(threads[0])
            logits = runner.run([step], copy.deepcopy(filled)).logits
            torch.set_num_threads(threads[1])
            leaf, path = int(rng.integers(0, min(rows, MAX_DEPTH) + 1)), []
            while leaf >= 0:
                path, leaf = [leaf, *path], int(step.parents[leaf])
            for row in path:
                alone = lay_out(int(step.ids[row]), GuessTree.empty())
                assert torch.equal(runner.run([alone], filled).logits[0], logits[row]), f"{row=} of {path=}"
                filled.commit([alone], [[0]])
    finally:
        torch.set_num_threads(before)


@settings(max_examples=60, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(
    family=st.sampled_from(FAMILIES),
    heads=st.sampled_from([(4, 4, 16), (6, 3, 32), (4, 1, 32)]),
    held=st.lists(st.integers(1, 300) | st.sampled_from([64, 255, 700]), min_size=2, max_size=5),
    threads=st.tuples(*[st.integers(1, 3)] * 2),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_other_sequences_do_not_change_a_bit(family, heads, held, threads, dtype, seed):
    """In two steps, a pass over several sequences computes the same for each as a pass over it alone."""
    note(f"{family=} {heads=} {held=} {threads=} {dtype=} {seed=}")
    model, adapter = sharp_model(family, heads, 100, dtype)
    rng, before = np.random.default_rng(seed), torch.get_num_threads()
    layers = (0, 1, 2)[: min(seed % 4, OUTPUTS.get(family, 3))]
    packs = family in TRANSPOSED, bool(seed % 2) or family in TRANSPOSED
    runners = [FusedRunner(model, adapter, layers, each) for each in packs]
    try:
        with torch.no_grad():
            alone = [adapter.make_cache() for _ in held]
            for cache, length in zip(alone, held, strict=True):
                EagerRunner(model, adapter).prefill(torch.from_numpy(rng.integers(3, 97, (1, length))), cache)
            together = runners[0].join([copy_of_cache(cache) for cache in alone])
            assert isinstance(together, SeparateCaches)
            for turn in range(2):
                steps = [
                    lay_out(int(rng.integers(3, 97)), random_tree(rng, int(rng.integers(0, 9)), 97)) for _ in alone
                ]
                torch.set_num_threads(threads[0])
                found = runners[0].run(steps, together, top_k=(3, 0.7))
                torch.set_num_threads(threads[1])
                for first, step, cache in zip(found.first, steps, alone, strict=True):
                    one, rows = runners[1].run([step], cache, top_k=(3, 0.7)), slice(first, first + len(step))
                    assert torch.equal(found.logits[rows], one.logits), f"{turn=} {first=}"
                    for layer in layers:
                        assert torch.equal(found.hidden_states[layer][rows], one.hidden_states[layer])
                    assert (found.top_k is None) == (one.top_k is None)
                    if one.top_k is not None:
                        assert found.argmax[rows] == one.argmax
                        assert (found.top_k[0][rows] == one.top_k[0]).all()
                        np.testing.assert_allclose(found.top_k[1][rows], one.top_k[1], rtol=1e-5)
                    cache.commit([step], [[0]])
                together.commit(steps, [[0]] * len(steps))
                leaves = int(rng.integers(len(alone)))
                kept = [b for b in range(len(alone)) if b != leaves]
                together.select(kept)
                alone = [alone[b] for b in kept]
    finally:
        torch.set_num_threads(before)


@settings(max_examples=70, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(
    family=st.sampled_from(FAMILIES),
    counts=st.lists(st.integers(1, 300) | st.sampled_from([32, 33, 64, 65, 192, 193]), min_size=1, max_size=3),
    at_once=st.sampled_from([20, 70, fused.MOST_AT_ONCE]),
    keep=st.integers(1, 80),
    dtype=st.sampled_from(DTYPES),
    packs=st.booleans(),
    seed=st.integers(0, 99),
)
def test_it_reads_prompts_as_the_model_does(family, counts, at_once, keep, dtype, packs, seed):
    """The parts of a prompt, one after the other. packs: all weights are numbers of bf16, which are packed."""
    note(f"{family=} {counts=} {at_once=} {keep=} {dtype=} {packs=} {seed=}")
    dtype = torch.float32 if family in MIXTURES else dtype
    model = tiny_model(family, seed, max_position_embeddings=1024, **sizes(family, 64, 64, 16))
    if packs:
        in_blocks(model, 1)
    model = as_loaded(model, dtype)
    adapter = capabilities.find_adapter(model)
    layers = first_and_last(family)
    eager = EagerRunner(model, adapter, layers)
    fused = FusedRunner(model, adapter, layers, packs or family in TRANSPOSED)
    caches = [adapter.make_cache() for _ in range(2)]
    rng = np.random.default_rng(seed)
    allowed = 1e-4 if dtype == torch.float32 else 8e-2
    for count in counts:
        prompt = torch.from_numpy(rng.integers(3, 97, (1, count)))
        with (
            torch.no_grad(),
            mock.patch.object(fused._executor, "run", side_effect=fused._executor.run) as passes,
            mock.patch("lookahead.passes.fused.MOST_AT_ONCE", at_once),
        ):
            expected, found = (
                runner.prefill(prompt, cache, logits_to_keep=keep)
                for runner, cache in zip((eager, fused), caches, strict=True)
            )
        if native.HAS_AMX and dtype == torch.bfloat16:
            has_limits = family in ("nemotron_h", "zamba2")  # of time steps
            assert fused.longest_prompt == (0 if has_limits else 192)
        assert passes.called == (count <= fused.longest_prompt)
        assert found.logits.shape == expected.logits.shape == (min(keep, count), 97)
        assert relative_error(found.logits, expected.logits) < allowed
        for layer in layers:
            assert found.hidden_states[layer].shape == expected.hidden_states[layer].shape
            assert relative_error(found.hidden_states[layer], expected.hidden_states[layer]) < allowed
    assert caches[1].lengths == caches[0].lengths == [sum(counts)]
    assert_states_alike(caches, allowed)
    for mine, theirs in zip(caches[1].in_place, caches[0].in_place, strict=True):
        window = getattr(mine, "sliding_window", 2**20) - 1
        for ours, own in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
            assert relative_error(ours[0, :, -window:].flatten(0, 1), own[0, :, -window:].flatten(0, 1)) < allowed


@pytest.mark.parametrize("taken", [0, 1, 3])
@pytest.mark.parametrize("keep", [1, 6, 30, 99])
def test_the_model_reads_all_that_is_left_of_a_prompt_behind_a_part_that_a_pass_does_not_take(taken, keep):
    model = tiny_model("mistral")
    adapter = capabilities.find_adapter(model)
    runners = EagerRunner(model, adapter, (0, 2)), FusedRunner(model, adapter, (0, 2))
    prompt = torch.from_numpy(np.random.default_rng(taken).integers(3, 97, (1, 40)))
    with (
        torch.no_grad(),
        mock.patch("lookahead.passes.fused.MOST_AT_ONCE", 10),
        mock.patch.object(runners[1], "_can_run", side_effect=[True] * taken + [False]) as asked,
    ):
        expected, found = (runner.prefill(prompt, adapter.make_cache(), keep) for runner in runners)
    assert asked.call_count == taken + 1
    assert found.logits.shape == expected.logits.shape
    assert relative_error(found.logits, expected.logits) < 1e-4
    for layer in (0, 2):
        assert relative_error(found.hidden_states[layer], expected.hidden_states[layer]) < 1e-4


@pytest.mark.parametrize("embedding_size", [16, 48])
def test_outputs_are_as_wide_as_layers_where_the_head_reads_another_width(embedding_size):
    model = tiny_model("electra", embedding_size=embedding_size)
    adapter, layers = capabilities.find_adapter(model), (0, 1, 2)
    eager, found = of_both([EagerRunner(model, adapter, layers), FusedRunner(model, adapter, layers)], held=20, rows=6)
    for layer in layers:
        assert found.hidden_states[layer].shape == (7, 32)
        assert relative_error(found.hidden_states[layer], eager.hidden_states[layer]) < 1e-4


def test_prompts_that_a_pass_does_not_take_are_read_by_the_model():
    model = lookahead.wrap(tiny_model("llama", max_position_embeddings=16))
    with mock.patch.object(EagerRunner, "prefill", autospec=True, side_effect=EagerRunner.prefill) as reads:
        for config in ({}, {"prefill_chunk_size": 4}):
            model.generate(IDS, max_new_tokens=2, do_sample=False, **config)
        assert not reads.called
        with torch.autocast("cpu", torch.bfloat16):
            model.generate(IDS, max_new_tokens=2, do_sample=False)
        assert reads.call_count == 1
        model.generate(inputs_embeds=model.get_input_embeddings()(IDS), max_new_tokens=2, do_sample=False)
        assert reads.call_count == 2
        with pytest.warns(UserWarning, match="the prompt has 17 tokens, the model was made for 16"):
            model.generate(torch.arange(3, 20)[None], max_new_tokens=1, do_sample=False)
        for unknown in (97, -1):
            with pytest.raises(IndexError):
                model.generate(torch.tensor([[3, unknown]]), max_new_tokens=2, do_sample=False)


@pytest.mark.parametrize(
    ("family", "settings"), [*((family, {}) for family in [*FAMILIES, *SEE_WHAT_FOLLOWS]), *VARIANTS]
)
def test_texts_are_those_of_generate(family, settings, monkeypatch):
    """Greedily and sampled, after prompts that are shorter and longer than windows. No step is left to the model."""

    def texts():
        short, long = IDS[:, :5], torch.arange(3, 43)[None]
        yield model.generate(long, max_new_tokens=14, do_sample=False).tolist()
        for prompt in (short, long):
            torch.manual_seed(5)
            yield model.generate(prompt, max_new_tokens=14, do_sample=True, temperature=0.8, top_k=0).tolist()

    model = tiny_model(family, **(sizes(family, 64, 64, 16) if family in TRANSPOSED else {}), **settings)
    expected = list(texts())
    lookahead.wrap(model)
    model.generate(IDS, max_new_tokens=2, do_sample=False)  # the probe compares with the model's own passes
    if family in SEE_WHAT_FOLLOWS:
        assert "its attention is not causal" in model.lookahead.report()
        assert list(texts()) == expected
        return
    assert "passes: fused" in model.lookahead.report()
    monkeypatch.setattr(EagerRunner, "run", mock.Mock(side_effect=AssertionError("a step is left to the model")))
    assert list(texts()) == expected


def test_padding_that_the_model_counts_as_positions_is_left_to_it():
    """Llama 4's queries grow by their place in a pass."""
    settings = {"floor_scale": 30, "attn_scale": 2.0, "no_rope_layers": [0, 0]}
    model = tiny_model("llama4_text", **sizes("llama4_text", 64, 64, 16), **settings)
    longer = GREEDY | {"max_new_tokens": 40}
    prompts = torch.arange(3, 19).reshape(2, 8)
    prompts[0, :5] = 2
    mask = (prompts != 2).long()
    expected = model.generate(prompts, attention_mask=mask, **longer)
    lookahead.wrap(model)
    with pytest.warns(UserWarning, match="with padding"):
        assert torch.equal(model.generate(prompts, attention_mask=mask, **longer), expected)


def of_both(runners, held, rows):
    """What runners say of a random tree of this many guesses, after this many tokens that the first of them reads."""
    rng = np.random.default_rng(held)
    caches = [runners[0].adapter.make_cache() for _ in runners]
    prompt = torch.from_numpy(rng.integers(3, 97, (1, held)))
    with torch.no_grad():
        for cache in caches:
            runners[0].prefill(prompt, cache)
        step = lay_out(5, random_tree(rng, rows, 97))
        return [runner.run([step], cache) for runner, cache in zip(runners, caches, strict=True)]


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in MIXTURES | TRANSPOSED | OTHERWISE])
def test_it_rounds_where_the_model_rounds(family, monkeypatch):
    """If the model's own code uses our products and attention, too, nearly all numbers are the same to the last bit."""
    monkeypatch.setattr(products, "MIN_WEIGHTS", 0)
    width, size = (64, 16) if family == "opt" else (96, 24)  # it rounds queries before they are scaled, by 1/4
    model = as_loaded(tiny_model(family, **sizes(family, width, 64, size)), torch.bfloat16)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)
    lookahead.wrap(model)
    adapter = capabilities.find_adapter(model)
    layers = (0, 1, 2)
    runners = [EagerRunner(model, adapter, layers), FusedRunner(model, adapter, layers)]
    # Where a processor multiplies pairs, a single layer rounds the weights of all values, a pass those of far ones.
    pairs = native.CAPABILITY == "AVX512_BF16" and "GenuineIntel" not in Path("/proc/cpuinfo").read_text()
    rounds_weights = pairs and (family == "opt" or family.startswith("gemma4"))  # heads of whole vectors

    def are_alike(fused, expected) -> bool:
        if rounds_weights:
            return bool((fused - expected).abs().max() < 0.03 * expected.abs().max())
        return bool((fused == expected).float().mean() > 0.98)

    def all_are_alike(held) -> bool:
        eager, fused = of_both(runners, held, rows=6)
        return are_alike(fused.logits, eager.logits) and all(
            are_alike(fused.hidden_states[layer], eager.hidden_states[layer]) for layer in layers
        )

    # Sums of torch's differ in their last bits from ours: now and then, one rounds another way, and that spreads.
    assert any(map(all_are_alike, (40, 41, 42)))


WITHOUT_EXPERTS = {"mlp_layer_types": ["dense", "dense"]}


@pytest.mark.parametrize(
    ("family", "settings"),
    [("bailing_hybrid", WITHOUT_EXPERTS), ("kimi_linear", WITHOUT_EXPERTS), ("olmo_hybrid", {}), ("flint", {})],
)
def test_parts_that_transformers_keeps_in_float32_are_computed_there(family, settings):
    """Those of OLMo Hybrid are in no list of transformers': its class makes them so."""
    if family not in FAMILIES:
        pytest.skip("needs another transformers")
    model = as_loaded(tiny_model(family, **{**sizes(family, 64, 64, 16), **settings}), torch.bfloat16)
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if family == "kimi_linear" and torch.float32 not in dtypes:
        pytest.skip("an older transformers, which keeps no part of it in float32")
    assert dtypes == {torch.float32, torch.bfloat16}
    adapter = capabilities.find_adapter(model)
    eager, fused = of_both([EagerRunner(model, adapter), FusedRunner(model, adapter)], held=40, rows=60)
    assert relative_error(fused.logits, eager.logits) < 2e-2


def test_a_part_in_another_dtype_is_named():
    model = tiny_model("mamba2", **sizes("mamba2", 64, 64, 16)).to(torch.bfloat16)
    mixer = model.backbone.layers[0].mixer
    mixer.A_log = nn.Parameter(mixer.A_log.detach().float())
    with pytest.raises(UnknownModelError, match="weights of a Scan are not in the dtype of the embedding"):
        FusedRunner(model, capabilities.find_adapter(model))


def test_sums_of_layers_in_float32_are_left_to_the_model():
    model = tiny_model("mamba2", residual_in_fp32=True).to(torch.bfloat16)
    with pytest.raises(UnknownModelError, match="its residual stream is in float32"):
        FusedRunner(model, capabilities.find_adapter(model))


@pytest.mark.skipif("lfm2_moe" not in FAMILIES, reason="needs another transformers")
@pytest.mark.parametrize("keeps_biases", [False, True])
def test_rounded_scores_choose_the_experts_that_the_model_chooses(keeps_biases):
    """In bf16, where other experts would be chosen if a single step were not rounded. Read biases stay in float32."""
    model = tiny_model("lfm2_moe", num_experts=32, num_experts_per_tok=4, **sizes("lfm2_moe", 96, 64, 24))
    mixture = model.model.layers[1].feed_forward
    biases = mixture.expert_bias.clone()
    model.to(torch.bfloat16)
    if keeps_biases:
        mixture.expert_bias = biases
    adapter = capabilities.find_adapter(model)
    eager, fused = of_both([EagerRunner(model, adapter), FusedRunner(model, adapter)], held=40, rows=60)
    assert relative_error(fused.logits, eager.logits) < 2e-2


@pytest.mark.parametrize("family", ["bloom", "falcon"])
def test_biases_of_keys_reach_far(family):
    """After 8,192 positions, too."""
    model = tiny_model(family, max_position_embeddings=2**16, **({"alibi": True} if family == "falcon" else {}))
    adapter = capabilities.find_adapter(model)
    runners = EagerRunner(model, adapter), FusedRunner(model, adapter)
    caches, prompt = [adapter.make_cache() for _ in runners], torch.arange(8500)[None] % 97
    with torch.no_grad():
        for cache in caches:
            for part in prompt.split(500, dim=1):
                runners[0].prefill(part, cache)
        step = lay_out(5, random_tree(np.random.default_rng(0), 6, 97))
        with mock.patch.object(runners[1]._executor, "run", side_effect=runners[1]._executor.run) as passes:
            eager, found = (runner.run([step], cache) for runner, cache in zip(runners, caches, strict=True))
    assert passes.called
    assert relative_error(found.logits, eager.logits) < 1e-4


def test_each_side_of_the_length_where_longrope_changes():
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32}
    rope |= {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0], "partial_rotary_factor": 1.0}
    model = tiny_model("phi3", rope_parameters=rope, original_max_position_embeddings=32, sliding_window=None)
    adapter = capabilities.find_adapter(model)
    runners = EagerRunner(model, adapter), FusedRunner(model, adapter)
    for held in (10, 60, 20, 32, 33):
        eager, found = of_both(runners, held, rows=6)
        assert relative_error(found.logits[0], eager.logits[0]) < 1e-4
        prompt = torch.arange(held)[None] % 97
        for at_once in (fused.MOST_AT_ONCE, 7):
            with torch.no_grad(), mock.patch("lookahead.passes.fused.MOST_AT_ONCE", at_once):
                expected, found = (runner.prefill(prompt, adapter.make_cache()).logits for runner in runners)
            assert relative_error(found, expected) < 1e-4


def with_weights_scaled_in_small_groups(model):
    quantize_(model, Int8WeightOnlyConfig(granularity=PerGroup(8)))


def with_hook(model):
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: output * 0.5)


def with_pre_hook(model):
    model.model.layers[0].self_attn.q_proj.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))


def with_own_forward(model):
    mlp = model.model.layers[1].mlp
    mlp.forward = lambda *args, **kwargs: type(mlp).forward(mlp, *args, **kwargs) * 0.5


def with_adapter(model):
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    assert adapted.base_model.model is model


def with_other_activation(model):
    model.model.layers[0].mlp.act_fn = nn.ELU()


def with_other_layer(model):
    class Halved(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 0.5

    old = model.model.layers[0].mlp.down_proj
    new = Halved(old.in_features, old.out_features, bias=False)
    new.weight = old.weight
    model.model.layers[0].mlp.down_proj = new


def with_a_layer_of_fewer_heads(model):
    attention = model.model.layers[1].self_attn
    for name in ("q_proj", "k_proj", "v_proj"):
        layer = getattr(attention, name)
        layer.weight = nn.Parameter(layer.weight[: layer.out_features // 2].contiguous())
    attention.o_proj.weight = nn.Parameter(attention.o_proj.weight[:, :16].contiguous())


CHANGES = [
    with_hook,
    with_pre_hook,
    with_own_forward,
    with_adapter,
    with_other_activation,
    with_other_layer,
    with_weights_scaled_in_small_groups,
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_run_by_its_own_code(change):
    model = tiny_model("llama")
    lookahead.wrap(model)
    model.generate(IDS, **GREEDY)
    assert "passes: fused" in model.lookahead.report()
    change(model)
    text = model.generate(IDS, **GREEDY)
    assert "passes: eager" in model.lookahead.report()
    assert "given up: fused passes: " in model.lookahead.report()
    assert text.tolist() == lookahead.unwrap(model).generate(IDS, **GREEDY).tolist()


def test_a_layer_of_fewer_heads_has_a_cache_of_another_shape():
    model = lookahead.wrap(tiny_model("llama"))
    before = model.generate(IDS, **GREEDY).tolist()
    with_a_layer_of_fewer_heads(model)
    text = model.generate(IDS, **GREEDY).tolist()
    assert "passes: fused" in model.lookahead.report()
    assert text == lookahead.unwrap(model).generate(IDS, **GREEDY).tolist() != before


def test_attention_in_the_place_of_eager_is_left_to_the_model(monkeypatch):
    def mine(module, query, key, value, *args, **kwargs):
        return query.transpose(1, 2) * 0.5, None

    model = lookahead.wrap(tiny_model("gemma2"))
    before = model.generate(IDS, **GREEDY).tolist()
    assert "passes: fused" in model.lookahead.report()
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "eager", mine)
    text = model.generate(IDS, **GREEDY).tolist()
    assert "passes: fused" not in model.lookahead.report()
    assert text == lookahead.unwrap(model).generate(IDS, **GREEDY).tolist() != before


def test_tokens_that_stand_for_images_are_read_by_the_model():
    """Without an image, Gemma 4 reads padding in their place."""
    model, prompt = tiny_model("gemma4"), torch.tensor([[3, 20, 5, 6, 20, 8]])
    before = model.generate(prompt, **GREEDY).tolist()
    model.config.image_token_id = 20
    text = model.generate(prompt, **GREEDY).tolist()
    assert text != before
    lookahead.wrap(model)
    assert model.generate(prompt, **GREEDY).tolist() == text
    assert "passes: fused" in model.lookahead.report()


def test_tokens_that_have_other_tables_are_read_by_the_model():
    """Gemma 3n has them for images and sounds, and not for all words an embedding of each layer."""
    model, prompt = tiny_model("gemma3n"), torch.tensor([[3, 93, 5, 6, 90, 8]])
    before = model.generate(prompt, **GREEDY).tolist()
    model.model.embed_vision.vocab_offset, model.model.embed_audio.vocab_offset = 89, 93
    model.model.language_model.config.vocab_size_per_layer_input = 89
    text = model.generate(prompt, **GREEDY).tolist()
    assert text != before
    lookahead.wrap(model)
    assert model.generate(prompt, **GREEDY).tolist() == text
    assert "passes: fused" in model.lookahead.report()


def test_a_model_stays_fused_when_it_has_shown_its_hidden_states():
    """transformers leaves hooks on the layers then, which only collect outputs."""
    model = tiny_model("llama")
    text = model.generate(IDS, **GREEDY).tolist()
    model(IDS, output_hidden_states=True)
    lookahead.wrap(model)
    assert model.generate(IDS, **GREEDY).tolist() == text
    assert "passes: fused" in model.lookahead.report()


def in_blocks(model, most):
    """Weights such as GGUF's Q8_0 (most=127) and Q4_0 (most=-8) are unpacked to; most=1: numbers of bf16."""
    for module in model.modules():
        if isinstance(module, nn.Linear) and most == 1:
            module.weight.data.copy_(module.weight.bfloat16())
        elif isinstance(module, nn.Linear):
            groups = module.weight.detach().unflatten(1, (-1, 32))
            largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
            numbers = (groups * (most / largest)).round().clamp(-abs(most), abs(most) - (most < 0))
            module.weight.data.copy_((numbers * (largest / most).half().float()).flatten(1))


def trained(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)


def replaced(model):
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(module.weight.flip(0).contiguous())


def loaded(model):
    model.load_state_dict(tiny_model("llama", seed=5, **SIZES).state_dict(), assign=True)


def given_other_memory(model):
    for parameter in model.parameters():
        parameter.data = parameter.data.flip(0)


def written_behind_its_back(model):
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)


INDEXED = torch.uint8 if blocks.can_index(torch.float32) else torch.float32


@pytest.mark.parametrize(("most", "dtype"), [(0, torch.float32), (127, torch.int8), (-8, torch.uint8), (1, INDEXED)])
@pytest.mark.parametrize("change", [trained, replaced, loaded, given_other_memory, written_behind_its_back])
def test_changed_weights_take_effect(change, most, dtype):
    model = tiny_model("llama", **SIZES)
    if most:
        in_blocks(model, most)
    lookahead.wrap(model)
    with mock.patch.object(fused, "Executor", side_effect=executor.Executor) as programs:
        before = model.generate(IDS, **GREEDY)
        assert model.generate(IDS, **GREEDY).tolist() == before.tolist()
    read, *originals = [call.args[0] for call in programs.call_args_list]  # both calls have the same
    assert {linear.weight.dtype for linear in read.linears} == {dtype}
    assert len(originals) == (dtype != torch.float32), "what the first pass compares copies with"
    change(model)
    text = model.generate(IDS, **GREEDY)
    assert "passes: fused" in model.lookahead.report()
    assert text.tolist() != before.tolist()
    assert text.tolist() == lookahead.unwrap(model).generate(IDS, **GREEDY).tolist()


@pytest.mark.parametrize("most", [127, 1])
def test_the_next_call_sees_each_weight_that_was_written_behind_its_back(most):
    model = tiny_model("llama", **SIZES)
    in_blocks(model, most)
    lookahead.wrap(model, LookaheadConfig(pack_weights=True))
    rows = [(layer.mlp.down_proj.weight.data, row) for layer in model.model.layers for row in (0, 17, 63)]
    texts = []
    for weight, row in rows:
        model.generate(IDS, **GREEDY)
        weight[row] = weight[row] * -8
        with mock.patch.object(fused, "Executor", side_effect=executor.Executor) as programs:
            texts.append(model.generate(IDS, **GREEDY).tolist())
        copied = any(linear.origin is not None for linear in programs.call_args_list[0].args[0].linears)
        assert copied or not blocks.can_index(torch.float32), "nothing was to be compared"
        assert programs.call_count == 1 + copied
    assert len(set(map(str, texts))) > 1
    assert texts[-1] == lookahead.unwrap(model).generate(IDS, **GREEDY).tolist()


def written_by_data(parameter, place, number):
    parameter.data.view(-1)[place] = number


@settings(max_examples=40, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(
    family=st.sampled_from(FAMILIES),
    count=st.integers(2, 330),
    chunk_size=st.integers(1, 330),
    at_once=st.sampled_from([20, 70, fused.MOST_AT_ONCE]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_a_prompt_holds_the_same_bits_in_whatever_chunks_it_is_read(family, count, chunk_size, at_once, dtype, seed):
    """Those of single tokens, where it is read as steps are."""
    note(f"{family=} {count=} {chunk_size=} {at_once=} {dtype=} {seed=}")
    model = tiny_model(family, seed, max_position_embeddings=1024, **sizes(family, 64, 64, 16)).to(dtype)
    adapter = capabilities.find_adapter(model)
    assume(adapter.uses_kernels)  # in a random mixture in bf16, rounding may choose other experts
    layers = first_and_last(family)
    runner = FusedRunner(model, adapter, layers, family in TRANSPOSED)
    assume(runner.longest_prompt >= count)
    prompt = torch.from_numpy(np.random.default_rng(seed).integers(3, 97, (1, count)))
    found = []
    with torch.no_grad(), mock.patch("lookahead.passes.fused.MOST_AT_ONCE", at_once):
        for size in (1, chunk_size):
            cache = adapter.make_cache()
            outputs = [runner.prefill(part, cache, count, as_steps=True) for part in prompt.split(size, dim=1)]
            found.append([torch.cat([output.logits for output in outputs])])
            found[-1] += [torch.cat([output.hidden_states[layer] for output in outputs]) for layer in layers]
    assert all(map(torch.equal, *found))


def written_by_numpy(parameter, place, number):
    bits = torch.tensor([number], dtype=parameter.dtype).view(torch.int16).numpy()
    parameter.detach().view(torch.int16).numpy().reshape(-1, len(bits))[place] = bits


@pytest.mark.parametrize(("most", "dtype"), [(127, torch.float32), (-8, torch.float32), *((1, d) for d in DTYPES)])
@pytest.mark.parametrize("write", [written_by_data, written_by_numpy])
@pytest.mark.parametrize("prompt", [1, 7, 33])
@mock.patch("lookahead.passes.fused.NO_LIMIT", 32)
@mock.patch("lookahead.passes.fused.MOST_READ_IN_TILES", dict.fromkeys(DTYPES, 32))
def test_the_first_token_is_already_that_of_a_single_number_that_was_written_behind_its_back(
    most, dtype, write, prompt
):
    """Also where another pass than the prompt's is the first one that could read a copy."""
    model = tiny_model("llama", **SIZES)
    in_blocks(model, most)
    model.to(dtype)
    lookahead.wrap(model, LookaheadConfig(pack_weights=True, budget=2, window_size=0))
    ids = torch.randint(3, 97, (1, prompt))
    settings = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    before = torch.cat(model.generate(ids, **settings).logits).float()
    layers = model.model.layers
    for linear in (layers[0].mlp.down_proj, layers[-1].self_attn.v_proj, model.lm_head):
        place = int(torch.randint(linear.weight.numel(), ()))
        write(linear.weight, place, 50.0)
        found = model.generate(ids, **settings)
        assert "passes: fused" in model.lookahead.report()
        again = model.generate(ids, **settings)
        lookahead.unwrap(model)
        expected = model.generate(ids, **settings)
        lookahead.wrap(model, LookaheadConfig(pack_weights=True, budget=2, window_size=0))
        model.generate(ids, **settings)
        logits = torch.cat(expected.logits).float()
        assert relative_error(before[0], logits[0]) > 0.1, "the change makes a difference"
        if dtype == torch.float32:
            assert found.sequences.tolist() == expected.sequences.tolist() == again.sequences.tolist()
        for text in (found, again):
            same = (text.sequences == expected.sequences)[0, prompt:].long().cumprod(0).sum()  # then texts may part
            for i in range(min(int(same) + 1, len(logits))):
                error = relative_error(torch.cat(text.logits).float()[i], logits[i])
                assert error < (1e-4 if dtype == torch.float32 else 5e-2)
        before = logits


def one_number(model):
    model.transformer.h[1].attn.c_attn.weight.data[7, 130] *= -1000


@pytest.mark.parametrize("change", [trained, given_other_memory, written_behind_its_back, one_number])
@pytest.mark.parametrize("dtype", DTYPES)
def test_changes_of_transposed_weights_take_effect(change, dtype):
    model = tiny_model("gpt2", **sizes("gpt2", 64, 64, 16)).to(dtype)
    lookahead.wrap(model)
    with mock.patch.object(fused, "Executor", side_effect=executor.Executor) as programs:
        before = [model.generate(IDS, **GREEDY).tolist() for _ in range(2)]
        assert before[0] == before[1]
        programs.assert_called_once()  # both calls have the same
        change(model)
        text = model.generate(IDS, **GREEDY).tolist()
        assert programs.call_count == 2
    (read,) = programs.call_args.args
    for linear in read.linears:
        if linear.origin is not None and linear.unpacked is None:
            assert torch.equal(linear.weight, linear.origin.weight)
    assert "passes: fused" in model.lookahead.report()
    if dtype == torch.float32:
        assert text == lookahead.unwrap(model).generate(IDS, **GREEDY).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("most_copied", [fused.MOST_COPIED, 0])
def test_experts_in_mxfp4_are_read_in_4_bits(dtype, most_copied, monkeypatch):
    """As transformers unpacks gpt-oss's. most_copied: bytes of a copy in more bits."""
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    model = tiny_model("gpt_oss", **sizes("gpt_oss", 64, 96, 16))
    experts = [weight for name, weight in model.named_parameters() if "experts" in name and name.endswith("_proj")]
    for weights in experts:
        groups = weights.detach().unflatten(1, (-1, 32))
        powers = 2.0 ** (groups.abs().amax(2, keepdim=True).log2().floor() - 2)
        nearest = ((groups / powers).abs()[..., None] - numbers).abs().argmin(-1)
        weights.data.copy_((numbers[nearest] * powers).copysign(groups).flatten(1, 2))
    model = model.to(dtype)
    sampled = GREEDY | {"do_sample": True, "top_k": 20}

    def texts(packs: bool | str) -> list:
        lookahead.wrap(model, LookaheadConfig(pack_weights=packs))
        found = []
        for settings in (GREEDY, sampled):
            torch.manual_seed(0)
            found.append(model.generate(IDS, **settings).tolist())
        assert "passes: fused" in model.lookahead.report()
        return found

    with monkeypatch.context() as without:
        without.setattr(blocks, "_of_mxfp4", dict)
        expected, size = texts(True), model.lookahead.copied_bytes
    lookahead.unwrap(model)
    monkeypatch.setattr(fused, "MOST_COPIED", most_copied)
    assert texts("auto") == expected, "the same numbers, to the last bit"
    weights = sum(parameter.numel() for parameter in experts)
    assert "weights: read from a copy of " in model.lookahead.report()
    if most_copied:
        assert size - model.lookahead.copied_bytes == weights * dtype.itemsize - weights * 17 // 32
    else:
        assert model.lookahead.copied_bytes == weights * 17 // 32
    if dtype == torch.float32:
        lookahead.unwrap(model)
        for settings, text in zip((GREEDY, sampled), expected, strict=True):
            torch.manual_seed(0)
            assert model.generate(IDS, **settings).tolist() == text
    else:
        trained(model)
        model.generate(IDS, **GREEDY)
        assert most_copied or "its weights are transposed" in model.lookahead.report(), "other weights are not copied"


def test_transposed_weights_that_change_within_a_call_are_no_longer_read_from_the_copy():
    model = tiny_model("gpt2", **sizes("gpt2", 64, 64, 16))
    adapter = capabilities.find_adapter(model)
    runners = EagerRunner(model, adapter), FusedRunner(model, adapter, packs=True)
    before, _ = of_both(runners, held=20, rows=6)
    assert runners[1]._executor is not None
    written_behind_its_back(model)
    eager, fused = of_both(runners, held=20, rows=6)
    assert runners[1]._executor is None
    assert torch.equal(fused.logits, eager.logits)
    assert not torch.equal(eager.logits, before.logits)


def test_transposed_weights_without_a_copy_are_left_to_the_model():
    model = tiny_model("gpt2", **sizes("gpt2", 64, 64, 16))
    expected = model.generate(IDS, **GREEDY).tolist()
    lookahead.wrap(model, LookaheadConfig(pack_weights=False))
    assert model.generate(IDS, **GREEDY).tolist() == expected
    assert "given up: fused passes: its weights are transposed" in model.lookahead.report()
    assert model.lookahead.copied_bytes == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("packs", [False, True])
def test_between_calls_no_weights_are_held(packs, dtype):
    """Neither by what is kept for the next call, nor by the copy."""
    model = tiny_model("llama", **SIZES)
    in_blocks(model, 1)
    memory = []
    for parameter in model.to(dtype).parameters():
        held = parameter.detach().view(torch.int16).numpy().copy()
        parameter.data = torch.from_numpy(held).view(dtype)
        memory.append(weakref.ref(held))
    del held
    lookahead.wrap(model, LookaheadConfig(pack_weights=packs))
    expected = [model.generate(IDS, **GREEDY).tolist() for _ in range(2)]
    assert all(reference() is not None for reference in memory)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    gc.collect()
    assert all(reference() is None for reference in memory)
    assert [model.generate(IDS, **GREEDY).tolist() for _ in range(2)] == expected


@pytest.mark.parametrize("kind", ["torchao", "inference"])
def test_a_program_of_tensors_whose_changes_are_not_counted_is_made_anew_in_each_call(kind):
    with torch.inference_mode(kind == "inference"):
        model = tiny_model("llama", **SIZES)
    if kind == "torchao":
        quantize_(model, Int8WeightOnlyConfig(version=2))
    lookahead.wrap(model)
    model.generate(IDS, **GREEDY)
    with mock.patch.object(fused, "Executor", side_effect=executor.Executor) as programs:
        model.generate(IDS, **GREEDY)
    assert "passes: fused" in model.lookahead.report()
    programs.assert_called_once()


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize(
    ("family", "name", "are_elsewhere"),
    [
        ("gemma", "model.embed_tokens.embed_scale", False),  # a buffer, which becomes a setting
        ("apertus", "model.layers.1.mlp.act_fn.alpha_p", False),  # a parameter, which does
        ("glm4_moe", "model.layers.1.mlp.gate.weight", True),  # a parameter, of which the program takes a copy
        ("glm4_moe", "model.layers.1.mlp.gate.e_score_correction_bias", True),
        ("roberta", "roberta.embeddings.token_type_embeddings.weight", True),
    ],
)
def test_between_calls_a_program_is_kept_with_what_was_computed_of_weights(family, name, are_elsewhere, packs):
    """torch does not count what is written to .data, so each call computes these again, and compares."""
    settings = {"is_decoder": True} if family == "roberta" else {"first_k_dense_replace": 0} if "glm" in family else {}
    model = tiny_model(family, **settings, **SIZES).to(torch.bfloat16)
    if are_elsewhere and "glm" in family:
        in_blocks(model, 1)
    plain = copy.deepcopy(model)
    config = LookaheadConfig(pack_weights=packs, budget=0, window_size=0)
    lookahead.wrap(model, config)

    def write(one):
        held = dict([*one.named_parameters(), *one.named_buffers()])[name].data
        held += torch.linspace(-9, 9, held.numel()).reshape(held.shape) if held.numel() > 1 else 9

    def logits(one):
        found = one.generate(IDS, output_logits=True, return_dict_in_generate=True, **GREEDY)
        return torch.stack(found.logits).tolist()

    before = logits(model)
    with mock.patch.object(fused, "Executor", side_effect=executor.Executor) as programs:
        assert logits(model) == before
        programs.assert_not_called()
        write(model)
        changed = logits(model)
        programs.assert_called()
    assert "passes: fused" in model.lookahead.report()
    ready = packed_of(model)._waiting
    assert bool(ready.elsewhere) == are_elsewhere
    write(plain)
    assert before != changed == logits(lookahead.wrap(plain, config))


@pytest.mark.parametrize("packs", [True, False])
def test_a_call_beside_another_computes_anew_what_was_computed_of_weights(packs):
    """Weights of the activation become numbers of the program, and torch does not count what is written to .data."""
    model = tiny_model("apertus", **SIZES)
    plain = copy.deepcopy(model)
    lookahead.wrap(model, LookaheadConfig(pack_weights=packs))
    before, texts = model.generate(IDS, **GREEDY).tolist(), []

    def change(one):
        for layer in one.model.layers:
            layer.mlp.act_fn.alpha_p.data.add_(4)

    def process(ids, scores):
        if ids.shape[1] == 20 and not texts:
            change(model)
            texts.append(model.generate(IDS, **GREEDY).tolist())
        return scores

    model.generate(IDS, logits_processor=[process], **GREEDY)
    assert "passes: fused" in model.lookahead.report()
    change(plain)
    assert texts == [plain.generate(IDS, **GREEDY).tolist()] != [before]


def test_calls_in_threads_share_a_program():
    model = lookahead.wrap(tiny_model("llama", num_hidden_layers=8, **SIZES), LookaheadConfig(budget=4))
    prompts = [torch.randint(3, 97, (1, 5 + i)) for i in range(4)]
    expected = [model.generate(prompt, **GREEDY).tolist() for prompt in prompts]
    texts: dict[int, list] = {}

    def write(i: int) -> None:
        texts[i] = [model.generate(prompts[i], **GREEDY).tolist() for _ in range(15)]

    threads = [threading.Thread(target=write, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [texts[i] for i in range(4)] == [[text] * 15 for text in expected]


@pytest.mark.parametrize(
    ("model_type", "settings", "reason"),
    [
        ("zaya", {}, "there is no program for ZayaForCausalLM; no operation computes its parts ZayaQKNorm"),
        ("llama", {"hidden_act": "quick_gelu"}, "which no operation computes"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "changes with the"),
        ("gemma2", {"final_logit_softcapping": 0.0}, "the cap of its logits is 0"),
        ("gemma3_text", {"hidden_activation": "gelu_python_tanh"}, "which no operation computes"),
    ],
)
def test_models_of_another_kind_are_refused_by_name(model_type, settings, reason):
    with pytest.raises(UnknownModelError, match=reason):
        page_of(tiny_model(model_type, **settings)).program()


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_are_packed_if_the_copy_is_small_or_asked_for(dtype, monkeypatch):
    model = tiny_model("llama", **SIZES)
    in_blocks(model, 1)
    model = model.to(dtype)
    has_copy = blocks.can_index(dtype)

    def copied(**config):
        lookahead.wrap(model, LookaheadConfig(budget=8, window_size=0, **config))
        text = model.generate(IDS, **GREEDY).tolist()
        report = model.lookahead.report()
        assert ("weights: read from a copy of " in report) == (model.lookahead.copied_bytes > 0)
        assert ("turned off: packed weights" in report) == (config.get("pack_weights") is False)
        return text, model.lookahead.copied_bytes

    text, size = copied()
    assert (size > 0) == has_copy
    assert copied(pack_weights=False) == (text, 0), "the same numbers, to the last bit"
    assert copied() == (text, size)
    lookahead.unwrap(model)  # which forgets the copy: a call may go on with that of the call before
    monkeypatch.setattr("lookahead.passes.fused.MOST_COPIED", 10_000)
    assert copied() == (text, size if dtype == torch.float32 else 0), "a copy of bf16 is no small part of it"
    assert ("packed weights: their copy would take 0.0 GB" in model.lookahead.report()) == (
        has_copy and dtype == torch.bfloat16
    )
    assert copied(pack_weights=True) == (text, size)
    lookahead.unwrap(model)
    assert packed_of(model).copied_bytes == 0


@pytest.mark.parametrize(("family", "settings"), [("zamba2", {"num_mem_blocks": 1}), ("hrm_text", {})])
def test_weights_that_layers_share_are_copied_once(family, settings):
    model = tiny_model(family, **sizes(family, 64, 64, 16), **settings)
    in_blocks(model, 1)
    expected = model.generate(IDS, **GREEDY).tolist()
    linears = page_of(model).program().linears
    shared = {linear.weight.data_ptr(): linear.weight for linear in linears}.values()
    assert len(shared) < len(linears)
    lookahead.wrap(model, LookaheadConfig(pack_weights=True))
    for _ in range(2):
        assert model.generate(IDS, **GREEDY).tolist() == expected
        assert 0 < model.lookahead.copied_bytes < sum(weight.nbytes for weight in shared)
    assert "passes: fused" in model.lookahead.report()


def test_the_copy_does_not_keep_the_weights_alive():
    model = tiny_model("llama", **SIZES)
    in_blocks(model, 1)
    lookahead.wrap(model).generate(IDS, **GREEDY)
    old = weakref.ref(model.lm_head.weight)
    replaced(model)
    gc.collect()
    assert old() is None


def test_a_token_without_an_embedding_is_an_error_as_in_plain_decoding():
    model = tiny_model("llama")
    model.lm_head = nn.Linear(32, 120, bias=False)
    with torch.no_grad():
        model.lm_head.weight[:100] = 0  # what the model says has no embedding
        model.lm_head.weight[100:] = 1
    with pytest.raises(IndexError) as plain:
        model.generate(IDS, **GREEDY)
    lookahead.wrap(model)
    with pytest.raises(IndexError) as ours:
        model.generate(IDS, **GREEDY)
    assert str(ours.value) == str(plain.value)


def test_a_copy_has_its_own_weights():
    model = lookahead.wrap(tiny_model("llama"))
    copied = copy.deepcopy(model)
    trained(copied)
    expected = copied.generate(IDS, **GREEDY)
    del model
    assert copied.generate(IDS, **GREEDY).tolist() == expected.tolist()
    assert lookahead.unwrap(copied).generate(IDS, **GREEDY).tolist() == expected.tolist()


@settings(max_examples=100, deadline=None)
@given(
    buffers=st.integers(1, 4),
    heads=st.integers(1, 3),
    columns=st.integers(1, 30),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 99),
)
def test_rows_are_moved_as_they_are(buffers, heads, columns, dtype, seed):
    note(f"{buffers=} {heads=} {columns=} {dtype=} {seed=}")
    rng = np.random.default_rng(seed)
    held = [torch.randn(1, heads, columns + i, 8).to(dtype) for i in range(buffers)]
    sources = np.sort(rng.permutation(columns)[: rng.integers(1, columns + 1)])
    targets = np.sort(rng.permutation(columns)[: len(sources)])
    targets = np.minimum.accumulate(np.minimum(sources, targets)[::-1])[::-1]
    targets, kept = np.unique(targets, return_index=True)
    sources = sources[kept]
    expected = [buffer.clone() for buffer in held]
    for buffer, old in zip(expected, held, strict=True):
        buffer[:, :, targets] = old[:, :, sources]
    assert executor.can_move(held)
    executor.move_rows(held, sources, targets)
    assert all(torch.equal(buffer, wanted) for buffer, wanted in zip(held, expected, strict=True))


@settings(max_examples=150, deadline=None)
@given(
    shape=st.sampled_from([(), (1,), (5,), (2, 3)]),
    vocabulary=st.integers(1, 700) | st.integers(700, 3000),
    count=st.integers(1, 32),
    temperature=st.floats(0.05, 3),
    spread=st.sampled_from([0.0, 1.0, 30.0]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_the_likeliest_tokens(shape, vocabulary, count, temperature, spread, dtype, seed):
    note(f"{shape=} {vocabulary=} {count=} {temperature=} {spread=} {dtype=} {seed=}")
    torch.manual_seed(seed)
    logits = (torch.randn(*shape, vocabulary) * spread).to(dtype)
    count = min(count, vocabulary)
    assert fast.serves(logits, count)
    tokens, probabilities = map(torch.from_numpy, fast.top_k(logits, temperature, count))
    exact = (logits.double() / temperature).softmax(-1)
    assert tokens.shape == probabilities.shape == (*shape, count)
    assert all(len(set(row)) == count for row in tokens.reshape(-1, count).tolist())
    assert torch.equal(logits.gather(-1, tokens), logits.topk(count)[0])  # equal logits may stand in any order
    assert torch.equal(tokens[..., 0], logits.float().argmax(-1))  # but for the first, which plain decoding writes
    torch.testing.assert_close(probabilities.double(), exact.gather(-1, tokens), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_that_a_model_rules_out_have_no_share(dtype):
    logits = torch.randn(3, 2000).to(dtype)
    logits[0, 5:600] = logits[1, :1200] = logits[2, 9:] = -torch.inf
    tokens, probabilities = map(torch.from_numpy, fast.top_k(logits, 1.0, 8))
    expected = logits.double().softmax(-1).gather(-1, tokens)
    torch.testing.assert_close(probabilities.double(), expected, rtol=1e-4, atol=1e-7)


@settings(max_examples=60, deadline=None)
@given(
    vocabulary=st.integers(60, 200) | st.sampled_from([511, 512, 513, 1024, 3000]),
    rows=st.integers(1, 40),
    count=st.integers(1, 9),
    temperature=st.floats(0.1, 2),
    threads=st.integers(1, 3),
    dtype=st.sampled_from(DTYPES),
    is_level=st.booleans(),
    packs=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_pass_finds_the_likeliest_tokens(vocabulary, rows, count, temperature, threads, dtype, is_level, packs, seed):
    """As they are found in its logits. is_level: all logits are equal."""
    note(f"{vocabulary=} {rows=} {count=} {temperature=} {threads=} {dtype=} {is_level=} {packs=} {seed=}")
    model = tiny_model("llama", seed, vocab_size=vocabulary, **SIZES)
    if packs:
        in_blocks(model, 1)
    model = model.to(dtype)
    adapter = capabilities.find_adapter(model)
    model.lm_head.weight.data *= not is_level
    rng = np.random.default_rng(seed)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        runner = FusedRunner(model, adapter, packs=packs)
        cache = runner.adapter.make_cache()
        with torch.no_grad():
            runner.prefill(torch.from_numpy(rng.integers(0, vocabulary, (1, 7))), cache)
            step = lay_out(1, random_tree(rng, rows, vocabulary))
            output = runner.run([step], cache, top_k=(count, temperature))
            tokens, probabilities = output.top_k
            expected, chances = fast.top_k(output.logits, temperature, min(count, vocabulary))
            assert (tokens == expected).all()
            np.testing.assert_allclose(probabilities, chances, rtol=1e-5, atol=1e-12)
            assert (tokens[..., 0] == output.logits.float().argmax(-1).numpy()).all()
            assert output.argmax == tokens[:, 0].tolist()
            assert output.has_nan is False
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_that_is_nan_is_told(dtype):
    """A guess that overflows may spoil the rows that do not see it: the loop must know."""
    model = tiny_model("llama", **SIZES).to(dtype)
    runner = FusedRunner(model, capabilities.find_adapter(model))
    model.model.embed_tokens.weight.data[7] = torch.nan
    wanted = {"top_k": (3, 1.0)}
    cache = runner.adapter.make_cache()
    with torch.no_grad():
        runner.prefill(torch.tensor([[5, 6]]), cache)
        sound = runner.run([step := lay_out(5, GuessTree.of([6, 8], [-1, 0]))], cache, **wanted)
        cache.commit([step], [[]])
        spoiled = runner.run([lay_out(5, GuessTree.of([7, 8], [-1, -1]))], cache, **wanted)
    assert (sound.has_nan, sound.logits.isnan().any().item()) == (False, False)
    assert (spoiled.has_nan, spoiled.logits.isnan().any().item()) == (True, True)
    _tokens, probabilities = spoiled.top_k
    is_nan = spoiled.logits.isnan().any(-1).numpy()
    assert (probabilities[is_nan] == 0).all()
    assert ((np.array(spoiled.argmax) == -1) == is_nan).all()
    assert -1 not in sound.argmax


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_overflowed_row_counts_for_nothing(dtype):
    logits = torch.randn(4, 50).to(dtype)
    logits[1, 7], logits[2, 9], logits[3, :] = torch.nan, torch.inf, -torch.inf
    tokens, probabilities = fast.top_k(logits, 1.0, 5)
    assert (probabilities[1:] == 0).all()
    assert all(len(set(row)) == 5 for row in tokens.tolist())
    assert (probabilities[0] > 0).all()
