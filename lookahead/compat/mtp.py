"""Multi-token-prediction layers of a checkpoint, as transformers reads and runs them."""

import copy
import inspect
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.modeling_layers import MtpModel

from lookahead.compat import CACHE

MTP_COUNTS = ("num_mtp_layers", "num_nextn_predict_layers", "mtp_num_hidden_layers")
"""What configurations call the number of multi-token-prediction layers."""

# Qwen's checkpoints have one such layer, with its norms and projection outside of it. transformers has known these
# names since 5.23, for Mellum.
_QWEN = (
    (r"^layers\.(\d+)\.(?!(?:mtp_block|enorm|hnorm|eh_proj|post_norm)\.)", r"layers.\1.mtp_block."),
    (r"^fc\.", "layers.0.eh_proj."),
    (r"^pre_fc_norm_embedding\.", "layers.0.enorm."),
    (r"^pre_fc_norm_hidden\.", "layers.0.hnorm."),
    (r"^norm\.", "layers.0.post_norm."),
)
# MiMo's checkpoints, which bring their own model class.
_MIMO = (
    *(
        (rf"^(?:model\.)?mtp_layers\.(\d+)\.{theirs}\.", rf"layers.\1.{ours}.")
        for theirs, ours in (
            ("token_layernorm", "enorm"),
            ("hidden_layernorm", "hnorm"),
            ("(?:input_proj|eh_proj)", "eh_proj"),  # some versions of transformers rename it first
            ("final_layernorm", "post_norm"),
        )
    ),
    (r"^(?:model\.)?mtp_layers\.(\d+)\.", r"layers.\1.mtp_block."),
)


class _WithMtp:
    """A model, with the attributes that transformers needs to read its multi-token-prediction layers."""

    def __init__(self, model: PreTrainedModel, path: str):
        self._model = model
        self.config = copy.deepcopy(model.config)
        self.config.name_or_path, self.config.dtype = path, model.dtype
        text = self.config.get_text_config(decoder=True)
        count = text.num_mtp_layers = next((n for name in MTP_COUNTS if (n := getattr(text, name, None))), 1)
        if getattr(text, "layer_types", None) and not getattr(text, "mtp_layer_types", None):
            text.mtp_layer_types = ["full_attention"] * count
        if (kinds := getattr(text, "mlp_layer_types", None)) and not getattr(text, "mtp_mlp_layer_types", None):
            text.mtp_mlp_layer_types = [kinds[-1]] * count
        if text.model_type == "mimo":
            text.mtp_hidden_states_first = True
        first = text.num_hidden_layers
        # The model's class names only the layers of the first checkpoints of its family.
        numbers = "|".join(str(first + k) for k in range(count))
        self._keys_to_ignore_on_load_unexpected = [r"(^|\.)mtp(_layers)?\.", rf"(^|\.)layers\.({numbers})\."]
        known = getattr(model, "_weight_conversions", None)
        known = get_model_conversion_mapping(model) if known is None else known
        self._weight_conversions = [*(WeightRenaming(old, new) for old, new in (*_MIMO, *_QWEN)), *known]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def mtp_model(model: PreTrainedModel, path: str) -> MtpModel:
    """Read a checkpoint's multi-token-prediction layers, in the model's dtype. They share the rest with the model.

    Raises RuntimeError if a tensor is missing or has another shape, and transformers' errors if it cannot make the
    layers.
    """
    device = model.get_output_embeddings().weight.device
    like_model: Any = _WithMtp(model, path)
    heads = MtpModel.from_pretrained(like_model, device_map={"": device})
    heads.set_attn_implementation("sdpa")  # it takes any mask
    return heads.eval()


def run_mtp_layer(
    heads: MtpModel, layer: int, said: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, sees: torch.Tensor,
    cache: Cache | None,
) -> torch.Tensor:  # fmt: skip
    """Run one of the layers over tokens of one text, and return its states, [n, hidden].

    said: the tokens' embeddings, [n, hidden]. states: the state to join with each embedding: that of the token before,
    [n, hidden]. positions: int64 [n]. sees: bool [n, keys], the mask over the cache and then these tokens.
    """
    rotated, kind = None, {}
    if heads.rotary_emb is not None:
        if "layer_type" in inspect.signature(heads.rotary_emb.forward).parameters:
            kind = {"layer_type": heads.config.layer_types[layer]}
        axes = (3, 1, -1) if hasattr(heads.rotary_emb, "mrope_section") else (1, -1)  # 3 if the model also sees images
        rotated = heads.rotary_emb(said[None], position_ids=positions.expand(axes), **kind)
    made = heads.layers[layer](
        said[None], states[None], position_embeddings=rotated, attention_mask=sees[None, None],
        position_ids=positions[None], **{CACHE: cache},
    )[0]  # fmt: skip
    return heads.shared_post_norm(made) if heads.use_shared_post_norm else made


def mtp_logits(heads: MtpModel, states: torch.Tensor) -> torch.Tensor:
    """The logits of states of the layers, by the model's lm_head."""
    return heads._project_to_logits(states)
