"""Tiny random models of many architectures, for comparison with their own generate()."""

from unittest import mock

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText

VOCABULARY = 97
END = 1
WINDOW = 8  # sliding windows are shorter than the texts

COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": END,
    "pad_token_id": 2,
}
HEAD = {"head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GROUPED = {
    **{"n_routed_experts": 8, "num_local_experts": 8, "num_experts": 8, "num_experts_per_tok": 2, "n_group": 4},
    **{"topk_group": 2, "n_shared_experts": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1},
    "routed_scaling_factor": 2.5,
}
LATENT = {
    **{"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 32},
    **{"num_key_value_heads": 4, "initializer_range": 0.014},
}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "n_inner": 48, "vocab_size": VOCABULARY}

_VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16}
_VISION_OF_QWEN = {"depth": 1, "num_heads": 2, "out_hidden_size": 32}
_UNDROPPED = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_AUDIO = {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "output_dim": 32}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": "auto", "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_expand": 2}
DELTA = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 16},
    "layer_types": ["linear_attention", "full_attention"],
}

SETTINGS = {
    "llama": {},
    "mistral": {"sliding_window": WINDOW, **HEAD},
    "qwen2": {},
    "qwen3": HEAD,
    "gemma": HEAD,
    "gemma2": {**HEAD, **MIXED, "query_pre_attn_scalar": 8, "attn_implementation": "eager"},
    "gemma3_text": {**HEAD, **MIXED, "query_pre_attn_scalar": 8},
    "gpt2": GPT,
    "gpt_neox": {"rotary_pct": 0.5},
    "gptj": {**GPT, "rotary_dim": 4},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "phi3": {
        "sliding_window": WINDOW,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen3_moe": {**HEAD, **EXPERTS, "decoder_sparse_step": 1},
    "gpt_oss": {
        **{**HEAD, **MIXED, "num_local_experts": 4, "num_experts_per_tok": 2},
        "attn_implementation": "eager",
    },
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "bloom": {},
    "mpt": {"expansion_ratio": 2, "max_seq_len": 256, "max_position_embeddings": None},
    "olmo2": {},
    "cohere": {"logit_scale": 1.0},
    "starcoder2": {"sliding_window": WINDOW},
    "granite": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.7,
        "attention_multiplier": 0.4,
        "logits_scaling": 0.6,
    },
    # Less common: partial rotary, multi-query, layers without positions, chunked attention.
    "stablelm": {},
    "gpt_bigcode": {**GPT, "multi_query": True},
    "smollm3": {"no_rope_layers": [1, 0]},
    "llama4_text": {**HEAD, "attention_chunk_size": WINDOW, "num_local_experts": 4, "intermediate_size_mlp": 48},
    # Layers that keep a state: short convolution, linear attention, both kinds in one layer, states only.
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "qwen3_next": {**HEAD, **EXPERTS, **DELTA},
    "falcon_h1": {
        **{"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 4},
        **{"embedding_multiplier": 3.0, "lm_head_multiplier": 0.6, "mlp_multipliers": [0.7, 1.3]},
        **{"key_multiplier": 1.4, "attention_in_multiplier": 0.8, "attention_out_multiplier": 1.2},
        **{"ssm_in_multiplier": 1.1, "ssm_out_multiplier": 0.9, "ssm_multipliers": [0.7, 1.2, 0.8, 1.4, 0.9]},
    },
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "residual_in_fp32": False},
    "zaya": {},  # computes its states by code of its own, which has no form over trees
}
# Built like models above, but for details of their settings. Only their passes are tested.
ALIKE = {
    "ministral": {**HEAD, **MIXED},
    "cwm": {**HEAD, **MIXED, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "seed_oss": HEAD,
    "olmo3": MIXED,
    "gemma4_text": {
        **{**HEAD, "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
        "tie_word_embeddings": False,
        "initializer_range": 0.1,  # of its embeddings, before which the norms of its many parts drown them
        **{"sliding_window": WINDOW, "global_head_dim": 32, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
        **{"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": VOCABULARY},
    },
    "gemma3n_text": {
        **{**HEAD, "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
        **{"sliding_window": WINDOW, "num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.6, 0.0, 0.9, 0.0]},
        **{"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": VOCABULARY, "laurel_rank": 32},
    },
    "exaone4": {**HEAD, **MIXED},
    "lfm2_moe": {**EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lfm3": {
        **{"layer_types": ["conv", "sliding_attention", "full_attention"], "num_hidden_layers": 3, **HEAD},
        "sliding_window": WINDOW,
    },
    "qwen3_5_text": {**HEAD, **DELTA},
    "qwen3_5_moe_text": {**HEAD, **EXPERTS, **DELTA, "shared_expert_intermediate_size": 32},
    "olmo_hybrid": DELTA,
    "kimi_linear": {
        **{**LATENT, **GROUPED, "mlp_layer_types": ["dense", "sparse"], "linear_num_heads": 4, "linear_head_dim": 32},
        "layer_types": ["linear_attention", "full_attention"],
    },
    "bailing_hybrid": {
        **{**LATENT, **GROUPED, "mlp_layer_types": ["dense", "sparse"], "head_dim": 32, "num_attention_heads": 4},
        "layer_types": ["linear_attention", "full_attention"],
    },
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "granitemoehybrid": {
        **{**MAMBA, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32},
        "layer_types": ["linear_attention", "full_attention"],
    },
    "nemotron_h": {
        **{**HEAD, "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 8},
        "time_step_min": 0.5,  # a limit that most time steps of prompts are below
        "layer_types": ["linear_attention", "full_attention", "mlp"],
    },
    "glm": {"head_dim": 16, "partial_rotary_factor": 0.5},
    "glm4": {"head_dim": 16, "partial_rotary_factor": 0.5},
    "ernie4_5": {},
    "helium": HEAD,
    "cohere2": MIXED,
    "arcee": HEAD,
    "nemotron": HEAD,
    "phi": {},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "granite_swa": {
        **{**HEAD, **MIXED, "layer_rope_theta": [0, 1e4], "attn_implementation": "eager"},
        **{"embedding_multiplier": 3.0, "residual_multiplier": 0.7, "attention_multiplier": 0.35},
        "logits_scaling": 0.6,
    },
    "flint": {
        **{**HEAD, **MIXED, **EXPERTS, "mlp_only_layers": [0], "attn_implementation": "eager"},
        "shared_expert_intermediate_size": 32,
    },
    "cohere2_moe": {
        **{**MIXED, **EXPERTS, "num_shared_experts": 1, "mlp_layer_types": ["dense", "sparse"]},
        **{"logit_scale": 1.0, "prefix_dense_intermediate_size": 64},
    },
    "apertus1p5_text": HEAD,
    "gpt_neox_japanese": {"intermediate_multiple_size": 2},
    "biogpt": {},
    "ctrl": {"dff": 48, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "bitnet": {},
    "xglm": {"ffn_dim": 48},
    "granitemoe_swa": {
        **{**HEAD, **MIXED, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32},
        **{"layer_rope_theta": [0, 1e4], "attn_implementation": "eager", "attention_multiplier": 0.35},
    },
    "granitemoeshared": {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32},
    "olmo": {},
    "persimmon": {},
    "mellum": {**HEAD, **MIXED, **EXPERTS, "mlp_layer_types": ["dense", "sparse"]},
    "ministral3": {
        **HEAD,
        "sliding_window": WINDOW,
        "rope_parameters": {
            **{"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.3},
            "original_max_position_embeddings": 16,
        },
    },
    "hyperclovax": {**HEAD, "use_post_norm": True, "logits_scaling": 0.6, "residual_multiplier": 0.7},
    "vaultgemma": {**HEAD, **MIXED, "query_pre_attn_scalar": 8, "attn_implementation": "eager"},
    "jais2": HEAD,
    "hunyuan_v1_dense": HEAD,
    "hunyuan_v1_moe": {**HEAD, "num_experts": 4, "moe_topk": 2},
    "glm4_moe": {**HEAD, **GROUPED, "partial_rotary_factor": 0.5, "use_qk_norm": True},
    "solar_open": {**HEAD, **GROUPED},
    "dots1": {**HEAD, **MIXED, **GROUPED},
    "exaone_moe": {**HEAD, **MIXED, **GROUPED, "num_shared_experts": 1, "mlp_layer_types": ["dense", "sparse"]},
    "hy_v3": {**HEAD, **GROUPED, "num_shared_experts": 1, "mlp_layer_types": ["dense", "sparse"]},
    "minimax_m2": {**HEAD, **GROUPED},
    "ernie4_5_moe": {
        **{"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 1},
        **{"moe_layer_start_index": 1, "moe_layer_end_index": 1},
    },
    "deepseek_v2": {**LATENT, **GROUPED, "topk_method": "greedy"},
    "deepseek_v3": {**LATENT, **GROUPED},
    "glm4_moe_lite": {**LATENT, **GROUPED, "mlp_layer_types": ["dense", "sparse"]},
    "axk1": {**LATENT, **GROUPED, "mlp_layer_types": ["dense", "sparse"]},
    "longcat_flash": {
        **{**LATENT, "n_routed_experts": 6, "zero_expert_num": 3, "num_experts_per_tok": 3},
        **{"expert_ffn_hidden_size": 32, "routed_scaling_factor": 2.5, "head_dim": 8},
    },
    "youtu": LATENT,
    "codegen": {**GPT, "rotary_dim": 4},
    "nanochat": {"final_logit_softcapping": 15.0},
    "apertus": HEAD,
    "afmoe": {
        **{**HEAD, **MIXED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        **{"num_shared_experts": 1, "num_dense_layers": 1, "route_scale": 2.5, "mup_enabled": True},
    },
    "beam": {
        **{**HEAD, **MIXED, **GROUPED, "mlp_layer_types": ["dense", "sparse"]},
        "final_logit_softcapping": 15.0,
    },
    "mimo_v2_flash": {
        **{**HEAD, **MIXED, **GROUPED, "mlp_layer_types": ["dense", "sparse"], "attn_implementation": "eager"},
        **{"num_key_value_heads": 1, "v_head_dim": 16},
    },
    "cohere_compass_text": {
        **{**MIXED, "logit_scale": 0.7},
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
            "full_attention": None,
        },
    },
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    "minicpm3": {**LATENT, "scale_emb": 3, "scale_depth": 1.4},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "router_jitter_noise": 0.3},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 32},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "modernbert-decoder": {**MIXED, "classifier_bias": True, "decoder_bias": True},
    "gemma4_unified_text": {
        **{**HEAD, "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
        **{"sliding_window": WINDOW, "global_head_dim": 32, "num_kv_shared_layers": 2, "initializer_range": 0.1},
    },
    "rembert": {"input_embedding_size": 64, "output_embedding_size": 96},
    "roc_bert": {
        **{"pronunciation_vocab_size": 5, "pronunciation_embed_dim": 48, "shape_vocab_size": 7, "shape_embed_dim": 16},
    },
    "phi4_multimodal": {
        **{"vision_config": _VISION | {"num_hidden_layers": 2}, "sliding_window": None, "pad_token_id": 2},
        "audio_config": {
            **{"hidden_size": 32, "intermediate_size": 32, "num_blocks": 1, "num_attention_heads": 2},
            **{"ext_pw_out_channel": 32, "nemo_conv_channels": 32, "depthwise_separable_out_channel": 32},
        },
    },
    "zamba2": {
        **{"layers_block_type": ["linear_attention", "hybrid", "hybrid"], "num_hidden_layers": 3},
        **{"n_mamba_heads": 8, "mamba_ngroups": 2, "mamba_d_state": 8, "num_mem_blocks": 2, "adapter_rank": 32},
        "use_mem_rope": True,
    },
    **{
        family: {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}, **more}
        for family, more in {
            **{"qwen2_vl_text": {}, "qwen2_5_vl_text": {}, "qwen2_5_omni_text": {}, "glm4v_text": {}},
            **{"glm_ocr_text": HEAD, "paddleocr_vl_text": HEAD},
            "glm4v_moe_text": {**HEAD, **GROUPED, "partial_rotary_factor": 1.0},
        }.items()
    },
    "qwen3_omni_moe_text": {**HEAD, **EXPERTS, "decoder_sparse_step": 1},
    "ernie4_5_vl_moe_text": {
        **{"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": [32, 16], "moe_num_shared_experts": 1},
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    },
    "qwen3_vl_text": HEAD,
    "qwen3_vl_moe_text": {**HEAD, **EXPERTS, "decoder_sparse_step": 1},
    "kolibri1": {**HEAD, **MIXED, **EXPERTS, "shared_expert_intermediate_size": 32},
    "laguna": {
        **{**HEAD, **MIXED, **EXPERTS, "num_attention_heads_per_layer": [4, 8], "moe_routed_scaling_factor": 2.5},
        **{"mlp_layer_types": ["dense", "sparse"], "shared_expert_intermediate_size": 32},
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 1.0},
        "d_model": 32,
        "ffn_config": {"moe_num_experts": 4, "moe_top_k": 2, "ffn_hidden_size": 32},
    },
    "hrm_text": {**HEAD, "H_cycles": 2, "L_cycles": 3, "embedding_scale": 5.0},
    "lara_mini": {
        **{**HEAD, **EXPERTS, **DELTA, "shared_expert_intermediate_size": 32, "num_hidden_layers": 3},
        **{"layer_types": ["linear_attention", "sliding_attention", "full_attention"], "sliding_window": WINDOW},
    },
    "big_bird": {"attention_type": "original_full"},
    "git": {"vision_config": {**_VISION, "image_size": 16, "patch_size": 8}, **_UNDROPPED},
    "xmod": {"languages": ["de_DE", "en_XX"], "default_language": "en_XX", "adapter_reduction_factor": 1},
}
BERTS = {
    "bert", "bert-generation", "ernie", "electra", "roberta", "camembert", "xlm-roberta", "data2vec-text",
    "roberta-prelayernorm", "xlm-roberta-xl", "megatron-bert", "rembert", "big_bird", "roc_bert",
    "xmod",
}  # fmt: skip
_DECODER = {"is_decoder": True, **_UNDROPPED}
ALIKE |= {family: ALIKE.get(family, {}) | _DECODER for family in BERTS}
# Of models that take images, too: the model type of their text side, and further settings.
WITH_IMAGES: dict[str, tuple[str, dict]] = {
    "emu3": ("emu3_text_model", {"vocabulary_map": {"<image>": 96}}),
    "gemma3": (
        "gemma3_text",
        {"vision_config": {**_VISION, "image_size": 16, "patch_size": 8}, "image_token_id": VOCABULARY},
    ),
    "gemma3n": (
        "gemma3n_text",
        {
            "vision_config": {"hidden_size": 32, "vocab_size": 4, "vocab_offset": VOCABULARY},
            "audio_config": {
                **{"hidden_size": 32, "conf_num_attention_heads": 2, "conf_num_hidden_layers": 1},
                **{"sscp_conv_channel_size": (8, 4), "vocab_size": 4, "vocab_offset": VOCABULARY},
            },
        },
    ),
    "gemma4": (
        "gemma4_text",
        {"vision_config": _VISION, "image_token_id": 97, "video_token_id": 98, "audio_token_id": 99},
    ),
    "paligemma": (
        "gemma",
        {
            "vision_config": {
                **{**_VISION, "model_type": "siglip_vision_model", "projection_dim": 32},
                **{"image_size": 16, "patch_size": 8},
            },
            **{"image_token_id": VOCABULARY, "projection_dim": 32},
        },
    ),
    "fuyu": ("persimmon", {"patch_size": 4}),
    "got_ocr2": ("qwen2", {"vision_config": {**_VISION, "mlp_dim": 32, "output_channels": 32, "image_size": 32}}),
    **{
        family: (f"{family}_text", {"vision_config": {**_VISION, **_VISION_OF_QWEN, **more}})
        for family, more in {
            "qwen2_vl": {"embed_dim": 32},
            "qwen2_5_vl": {},
            "qwen3_vl": {"deepstack_visual_indexes": [0]},
            "qwen3_vl_moe": {"deepstack_visual_indexes": [0]},
            "glm4v": {},
            "glm4v_moe": {},
            "glm_ocr": {},
            "ernie4_5_vl_moe": {},
            "paddleocr_vl": {"image_size": 28},
        }.items()
    },
    "glm46v": ("glm4v_text", {"vision_config": {**_VISION, **_VISION_OF_QWEN}}),
    **{
        f"{family}_thinker": (f"{family}_text", {**more, "audio_config": _AUDIO, "vision_start_token_id": VOCABULARY})
        for family, more in {
            "qwen2_5_omni": {"vision_config": {**_VISION, **_VISION_OF_QWEN}},
            "qwen3_omni_moe": {"vision_config": {**_VISION, **_VISION_OF_QWEN, "deepstack_visual_indexes": [0]}},
        }.items()
    },
    "gemma4_unified": (
        "gemma4_unified_text",
        {"vision_config": None, "audio_config": None, "image_token_id": 97, "video_token_id": 98, "audio_token_id": 99},
    ),
}
RESTORED = {"zaya"}  # their states, after a rejection
WITH_STATE = {"lfm2", "qwen3_next", "falcon_h1", "mamba2", *RESTORED}
CHAIN_ONLY = RESTORED
ALONE = {"mpt"}  # a step takes one sequence


def _but_for_timm(make):
    """Make parts of models so, but no tower of Gemma 3n, which needs timm."""
    return lambda config, **more: nn.Identity() if config.model_type == "gemma3n_vision" else make(config, **more)


def tiny_model(model_type: str, seed: int = 0, **settings):
    """Return a random float32 model in eval mode, whose logits are spread enough for varied, non-uniform sampling."""
    torch.manual_seed(seed)
    kinds = AutoModelForCausalLM, AutoModelForImageTextToText
    if not any(CONFIG_MAPPING[model_type] in kind._model_mapping for kind in kinds):  # only the whole is a model
        whole = (name for name, (text, _) in WITH_IMAGES.items() if text == model_type)
        return tiny_model(next(whole, model_type.removesuffix("_text")), seed, **settings)
    of_text, more = WITH_IMAGES.get(model_type, (model_type, {}))
    settings = {**COMMON, **(SETTINGS | ALIKE).get(of_text, {}), **settings}
    config = AutoConfig.for_model(model_type, **({**more, "text_config": settings} if more else settings))
    kind = AutoModelForCausalLM if type(config) in AutoModelForCausalLM._model_mapping else AutoModelForImageTextToText
    with mock.patch.object(AutoModel, "from_config", _but_for_timm(AutoModel.from_config)):
        model = kind.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):  # decays keep nearly all, or forget nearly all
                parameter.uniform_(-4, 2)
            elif name.endswith("forget_gate.dt_bias"):  # with the usual ones, keys forget next to nothing
                parameter.normal_()
            elif name.endswith(("conv.weight", "conv1d.weight")):  # or nearly nothing would reach the states
                parameter.normal_(std=0.5)
            elif parameter.ndim >= 2:
                parameter.mul_(4)  # with the usual 0.02, all contexts look alike
            if parameter.ndim >= 2 and not parameter.any():
                parameter.normal_(std=0.08)  # or all experts would be the same to it
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith(("e_score_correction_bias", "expert_bias")):  # it is zero at first
                tensor.normal_(std=0.2)
            if name.endswith("correct_output_scale"):  # so is this
                tensor.normal_()
    model.generation_config.pad_token_id = 2
    return model


def as_loaded(model, dtype):
    """Return a model of `tiny_model` as `from_pretrained` reads it, which leaves some parts in float32."""
    if dtype == torch.float32:
        return model
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    towers = mock.patch.object(AutoModel, "from_config", _but_for_timm(AutoModel.from_config))
    with towers, torch.random.fork_rng(devices=[]):
        loaded = type(model).from_pretrained(None, config=model.config, state_dict=state, dtype=dtype).eval()
    loaded.generation_config.pad_token_id = 2
    return loaded
