"""The authors' own lookahead decoding, `lade` 0.0.2 (Fu et al. 2024, arXiv 2402.02057), on Llama models.

Methods: lade-W-N-G (window, n-gram size and guesses per step, such as lade-15-5-15; greedy only), and plain, decoding
without lade in the same environment. It takes one prompt at a time. See protocol.py and install.sh.
"""

import json
import os
import re
import time
from argparse import Namespace
from importlib.metadata import version
from pathlib import Path

from protocol import Answer, Decode, Request, arguments, end_tokens, serve

KEPT = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "hidden_act", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings",
    "attention_bias",
)  # fmt: skip


def llama_options(saved: dict) -> dict:
    """Return the options of LlamaConfig in transformers 4.34, from a config.json written by any later version.

    Raises ValueError for a model that the Llama of that version cannot represent.
    """
    rope = saved.get("rope_parameters") or saved.get("rope_scaling") or {}
    head_dim = saved["hidden_size"] // saved["num_attention_heads"]
    for name, value, needed in (
        ("model_type", saved["model_type"], "llama"),
        ("head_dim", saved.get("head_dim") or head_dim, head_dim),
        ("rope_type", rope.get("rope_type", rope.get("type", "default")), "default"),
        ("mlp_bias", saved.get("mlp_bias", False), False),
        ("quantization_config", saved.get("quantization_config"), None),
    ):
        if value != needed:
            raise ValueError(f"lade needs a model with {name} {needed!r}, this one has {value!r}: compare without lade")
    theta = rope.get("rope_theta", saved.get("rope_theta", 10000.0))
    return {**{name: saved[name] for name in KEPT if name in saved}, "rope_theta": theta}


def lade_sizes(method: str) -> tuple[int, int, int] | None:
    """Read window, n-gram size and guesses from a method's name; None for plain. Raises ValueError for other names."""
    if method == "plain":
        return None
    match = re.fullmatch(r"lade-([1-9]\d*)-([1-9]\d*)-([1-9]\d*)", method)
    if match is None or int(match[2]) < 3:
        raise ValueError(f"--method has to be plain or lade-W-N-G with n-grams of 3 or more, got {method!r}")
    return int(match[1]), int(match[2]), int(match[3])


def load_llama(folder: Path, dtype: str):  # noqa: ANN201
    import torch
    from safetensors.torch import load_file
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**llama_options(json.loads((folder / "config.json").read_text(encoding="utf-8"))))
    # Build the model in its dtype, as from_pretrained does. A later cast would also cast the rotary frequencies.
    torch.set_default_dtype(getattr(torch, dtype))
    model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    weights = {name: x for path in folder.glob("*.safetensors") for name, x in load_file(path).items()}
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights)
    return model.eval()


def load(chosen: Namespace) -> tuple[Decode, dict[str, str]]:
    sizes = lade_sizes(chosen.method)
    ends = end_tokens(chosen.model)
    if sizes and len(ends) > 1:
        raise ValueError(f"lade ends a text only at one token, the model at any of {ends}: compare without lade")
    os.environ["OMP_NUM_THREADS"] = str(chosen.threads)  # torch reads this when it is imported
    import torch

    model = load_llama(chosen.model, chosen.dtype)
    if sizes:
        import lade

        os.environ["USE_LADE"] = "1"
        # After the model was built, because building a Llama fails afterwards.
        lade.augment_all()
        lade.config_lade(WINDOW_SIZE=sizes[0], LEVEL=sizes[1], GUESS_SET_SIZE=sizes[2], DEBUG=0)
    passes: list[None] = []
    # Count at the last norm, which runs once a pass: lade bypasses the model's forward() and any hook on it.
    model.model.norm.register_forward_pre_hook(lambda *_: passes.append(None))

    def decode(request: Request) -> Answer:
        if sizes and request.temperature > 0:
            raise ValueError(f"lade decodes only greedily: temperature has to be 0, got {request.temperature}")
        (prompt,) = request.prompts
        sampling = {"temperature": request.temperature, "top_k": 0} if request.temperature > 0 else {}
        torch.manual_seed(request.seed)
        passes.clear()
        start = time.perf_counter()
        ids = torch.tensor([prompt])
        output = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=request.max_new_tokens,
            eos_token_id=ends or None, pad_token_id=ends[0] if ends else None, do_sample=bool(sampling), **sampling,
        )  # fmt: skip
        return Answer([output[0, len(prompt) :].tolist()], time.perf_counter() - start, len(passes) - 1)

    return decode, {name: version(name) for name in ("lade", "torch", "transformers")}


if __name__ == "__main__":
    serve(load, arguments())
