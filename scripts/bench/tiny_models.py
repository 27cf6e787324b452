"""Tiny random models of every architecture in transformers, for comparison with their own generate().

A configuration is made small attribute by attribute. `TINY` has the sizes, under every name that a family uses. A tiny
model has the first layers of the full-size model that include every kind of layer. `SETTINGS` has further settings of
families.
"""

import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, LlamaConfig, PreTrainedConfig, PreTrainedModel

from lookahead.models.adapter import POSITION_LIMITS

VOCABULARY = 61
BOS, EOS, PAD = 0, 1, 2
WINDOW = "window"  # stands for the length of sliding windows and chunks
SPREAD = 8  # factor on the usual standard deviation of weights, 0.02, which would make all contexts look alike

# (value, names of the attributes that get it). Attributes that a configuration lacks, or that are None, are not set.
_VALUES = [
    (VOCABULARY, "vocab_size"), (BOS, "bos_token_id"), (EOS, "eos_token_id"), (PAD, "pad_token_id"),
    (256, " ".join(POSITION_LIMITS)), (True, "is_decoder"), (False, "tie_word_embeddings"),
    # width
    (32, "hidden_size d_model n_embd emb_dim embedding_dim embedding_size word_embed_proj_dim lru_width"),
    (32, "input_embedding_size output_embedding_size"),
    (48, "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim feed_forward_size ffn_hidden_size n_inner d_inner"),
    (48, "dff dim_ff intermediate_size_mlp"),
    # heads
    (4, "num_attention_heads n_head n_heads attention_heads swa_num_attention_heads encoder_attention_heads"),
    (4, "decoder_attention_heads linear_num_value_heads num_encoder_attention_heads num_decoder_attention_heads"),
    (4, "linear_num_heads"),
    (2, "num_key_value_heads num_kv_heads swa_num_key_value_heads linear_num_key_heads"),
    (8, "head_dim swa_head_dim kv_channels attention_head_size d_head dim_head qk_rope_head_dim qk_nope_head_dim"),
    (8, "v_head_dim linear_head_dim linear_key_head_dim linear_value_head_dim index_head_dim global_head_dim"),
    (16, "kv_lora_rank q_lora_rank o_lora_rank"),
    (2, "n_group topk_group num_expert_group o_groups"),
    (16, "index_n_heads"),  # scores are clipped at 0: with few heads, many keys would tie for the last place
    (8, "query_pre_attn_scalar"),
    # depth, unless there is a list of layers
    (2, "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers"),
    (2, "num_decoder_layers num_blocks"), (0, "num_nextn_predict_layers"),
    # experts
    (4, "num_experts n_routed_experts num_local_experts moe_num_experts"),
    (2, "num_experts_per_tok num_experts_per_token moe_k top_k_experts"),
    (16, "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size"),
    (1, "n_shared_experts num_shared_experts moe_num_shared_experts first_k_dense_replace"),
    # windows
    (WINDOW, "sliding_window sliding_window_size attention_chunk_size attention_window_size window_size"),
    (WINDOW, "local_attention index_topk keep_window_size"),
    # recurrence
    (8, "state_size ssm_state_size mamba_d_state"),
]  # fmt: skip


def _by_name(values: list[tuple[object, str]]) -> dict[str, object]:
    return {name: value for value, names in values for name in names.split()}


TINY = _by_name(_VALUES)
# Another shape: few positions, a prime number; three layers; widths and head counts that are not powers of two; the
# default `is_decoder`. A family's own entry in SETTINGS takes precedence.
ODD = TINY | _by_name([
    (None, "is_decoder"), (97, " ".join(POSITION_LIMITS)),
    (52, "intermediate_size ffn_dim decoder_ffn_dim ffn_hidden_size n_inner dim_ff"),
    (3, "num_hidden_layers n_layer n_layers num_layers decoder_layers"),
])  # fmt: skip
ODD_HEADS = ODD | _by_name([
    (24, "hidden_size d_model n_embd embedding_size word_embed_proj_dim"),
    (3, "num_attention_heads n_head n_heads attention_heads decoder_attention_heads"),
    (1, "num_key_value_heads num_kv_heads"), (1031, " ".join(POSITION_LIMITS)),
])  # fmt: skip
SHAPES = {"even": TINY, "odd": ODD, "odd heads": ODD_HEADS}

# Lists with one value for each layer. Every value in the full-size model's list is kept.
PER_LAYER = (
    "layer_types", "mlp_layer_types", "indexer_types", "layers_block_type", "no_rope_layers", "layer_rope_theta",
    "activation_sparsity_pattern",
)  # fmt: skip

MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8}
GEMMA4 = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "global_head_dim": 16,
    "per_layer_config": None,
}
PER_LAYER_INPUT = {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCABULARY}

# By model type, also of a part such as text_config. None keeps an attribute that TINY would set.
SETTINGS: dict[str, dict] = {
    **{family: {"rotary_dim": 4} for family in ("codegen", "gptj")},
    **{family: {"mlp_only_layers": [0]} for family in ("flint", "qwen3_moe")},
    **{family: {"head_dim": 8} for family in ("hunyuan_v1_dense", "hunyuan_v1_moe")},
    **{family: {"mlp_layer_types": ["dense", "sparse"]} for family in ("inkling_text", "inkling2_text")},
    **{family: {"sliding_window": WINDOW} for family in ("ministral3", "mixtral", "phi3", "starcoder2")},
    **{family: {"num_codebooks": 1} for family in ("musicgen_decoder", "musicgen_melody_decoder")},
    **{family: {**MIXED, "use_sliding_window": True} for family in ("qwen2", "qwen2_moe", "qwen3")},
    **{family: {"layers_block_type": ["linear_attention", "hybrid"] * 2} for family in ("zamba", "zamba2")},
    "bamba": {"attn_layer_indices": [1], **MAMBA},
    "cohere2_moe": {**MIXED, "mlp_layer_types": ["dense", "sparse"]},
    "cohere_compass_text": {
        **MIXED,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
            "full_attention": None,
        },
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        "ffn_config": {"moe_num_experts": 4, "moe_top_k": 2, "ffn_hidden_size": 16},
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "topk_method": "greedy"},
    "deepseek_v4": {
        "layer_types": ["sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"],
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
    },
    "dots1": {**MIXED, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note_text": {
        **{f"swa_{name}": 4 for name in ("num_attention_heads", "num_key_value_heads")},
        **{f"swa_{name}": 8 for name in ("q_lora_rank", "kv_lora_rank", "v_head_dim")},
        **{"head_dim": 16, "swa_head_dim": 16, "swa_qk_nope_head_dim": 8, "swa_qk_rope_head_dim": 8},
    },
    "dots3_note_vision_encoder": {"adapter_in_dim": 32, "adapter_out_dim": 32},
    "dots3_note_audio_encoder": {"adapter_input_size": 32, "adapter_out_dim": 32},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64},
    "gemma3n_text": {
        **PER_LAYER_INPUT,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.95, 0.0, 0.95, 0.0],
        "laurel_rank": 16,
    },
    "gemma4_text": {
        **{**GEMMA4, **PER_LAYER_INPUT},
        **{"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
    },
    "gemma4_assistant": {
        "text_config": {
            **{"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0},
            **{"enable_moe_block": False, "num_kv_shared_layers": 4, "num_hidden_layers": 4},
        }
    },
    "gemma4_unified_text": GEMMA4,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "attention_layers": None},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], **MAMBA},
    "granitemoeshared": {"shared_intermediate_size": 16},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"linear_head_dim": 32},
    "laguna": {**MIXED, "num_attention_heads_per_layer": [4, 8]},
    "lfm2": {"layer_types": ["conv", "full_attention"], "full_attn_idxs": None},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "llama4_text": {"moe_layers": [1]},
    "mamba2": {"num_heads": 8},
    "mellum": MIXED,
    "minimax_m3_vl_text": {
        **{"layer_types": ["full_attention", "minimax_m3_sparse"], "mlp_layer_types": ["dense", "sparse"]},
        **{"dense_intermediate_size": 48, "index_block_size": 4, "index_topk_blocks": 2, "index_n_heads": 2},
    },
    "ministral": {**MIXED, "head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "moe_shared_expert_intermediate_size": 16},
    "prophetnet": {"num_hidden_layers": None, "pad_token_id": 0},
    **{
        family: {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
        for family in ("qwen2_vl_text", "qwen2_5_vl_text", "glm4v_text")
    },
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "indexed_attention"],
        **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8},
        **{"indexer_budget": WINDOW, "indexer_compress_ratio": 2},
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "layer_types": None},
    "reformer": {"attn_layers": ["local", "lsh"], "axial_pos_shape": [16, 16], "axial_pos_embds_dim": [16, 16]},
    "roc_bert": {"shape_vocab_size": VOCABULARY, "pronunciation_vocab_size": VOCABULARY},
    "xlm": {"causal": True},
    "xlnet": {"max_position_embeddings": None},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128, "num_heads": 2},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid_sliding", "hybrid"], "sliding_window": WINDOW},
}


def _can_be_set(config: PreTrainedConfig, name: str) -> bool:
    """Whether the attribute exists, is not None, and is not computed from others."""
    found = getattr(type(config), config.attribute_map.get(name, name), None)
    computed = isinstance(found, property) and found.fset is None
    return not computed and getattr(config, name, None) is not None


def layers_kept(config: PreTrainedConfig) -> dict[str, list]:
    """Cut the per-layer lists of ``config`` to the first layers, at least two, that include every value."""
    lists = {
        name: getattr(config, name)
        for name in PER_LAYER
        if name not in config.attribute_map and _can_be_set(config, name)
    }
    lists = {name: values for name, values in lists.items() if len(values) == config.num_hidden_layers}
    kept = {values.index(value) for values in lists.values() for value in values}
    for i in range(2):
        kept |= {i} if len(kept) < 2 else set()
    return {name: [values[i] for i in sorted(kept)] for name, values in lists.items()}


def tiny_settings(config: PreTrainedConfig, own: dict, window: int, sizes: dict = TINY) -> dict:
    """Return keyword arguments for a small configuration, of the class of the default ``config``.

    own: settings that take precedence. sizes: one of SHAPES.
    """
    config.allow_global_per_layer_attribute_access = True  # for attributes that differ from layer to layer
    own = {**SETTINGS.get(config.model_type, {}), **own}
    settings = {name: value for name, value in sizes.items() if _can_be_set(config, name)}
    if "kv_lora_rank" in settings:  # latent attention has as many heads for keys as for queries
        settings["num_key_value_heads"] = sizes["num_attention_heads"]
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if isinstance(part, PreTrainedConfig):
            own[name] = tiny_settings(part, {"model_type": part.model_type, **own.get(name, {})}, window, sizes)
    lists = {**layers_kept(config), **own}
    layers = {len(values) for name, values in lists.items() if name in PER_LAYER and values}
    if layers:
        settings["num_hidden_layers"] = max(layers)
    settings |= lists
    return {name: window if value is WINDOW else value for name, value in settings.items() if value is not None}


def tiny_config(model_type: str, window: int = 8, shape: str = "even") -> PreTrainedConfig:
    """Return a small configuration of a shape of SHAPES, with sliding windows and chunks of ``window`` tokens."""
    kind = CONFIG_MAPPING[model_type]
    parts = {name: part for name, part in SETTINGS.get(model_type, {}).items() if name in kind.sub_configs}
    return kind(**tiny_settings(kind(**parts), {}, window, SHAPES[shape]))


def random_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Return a random float32 causal LM in eval mode, with logits spread enough for varied texts."""
    torch.manual_seed(seed)
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if not isinstance(config, kind.config_class):  # the class is only the decoder of a model of several parts
        config = config.get_text_config(decoder=True)
    model = kind._from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.any():  # biases and gates, which have no effect if they are zero
                parameter.normal_(std=0.02)
            elif parameter.ndim >= 2 and not name.endswith("A_log"):  # with wider decay rates, states would forget all
                parameter.mul_(SPREAD)
    model.generation_config.update(pad_token_id=PAD, decoder_start_token_id=BOS, num_return_sequences=1)
    return model


def llama(seed: int = 0) -> PreTrainedModel:
    """Return a small random Llama that is large enough for fused passes and packed weights.

    Its vocabulary has room for the tokens of the packaged model.
    """
    sizes = {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    return random_model(LlamaConfig(**sizes, **heads, bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD), seed)
