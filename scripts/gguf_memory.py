"""Measure the memory and the loading time of a model whose weights stay in the blocks of its GGUF file.

    python scripts/gguf_memory.py --out FOLDER

The script writes a file in Q4_K_M, in the shape of Llama 3.2 1B, with random weights. Separate processes load it, in
blocks and unpacked by transformers, and write some tokens. With --mixture, the model is a small Qwen3-MoE: 8 layers of
32 experts, 4 of them for each token.
"""

import json
import math
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

import click
import gguf
import numpy as np
from gguf_blocks import Kind, random_blocks

from lookahead import DEMO_MODEL

DENSE = {
    "block_count": 16, "context_length": 131_072, "embedding_length": 2048, "feed_forward_length": 8192,
    "attention.head_count": 32, "attention.head_count_kv": 8, "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.dimension_count": 64, "rope.freq_base": 500_000.0, "vocab_size": 128_256,
}  # fmt: skip
MIXTURE = {
    "block_count": 8, "context_length": 32_768, "embedding_length": 1024, "feed_forward_length": 3072,
    "attention.head_count": 16, "attention.head_count_kv": 4, "attention.layer_norm_rms_epsilon": 1e-6,
    "attention.key_length": 64, "rope.freq_base": 1_000_000.0, "vocab_size": 32_000,
    "expert_count": 32, "expert_used_count": 4, "expert_feed_forward_length": 768,
}  # fmt: skip


def kind_of(name: str, layers: int) -> Kind:
    """The format of a weight in llama.cpp's Q4_K_M, for a model with tied embeddings."""
    found = re.fullmatch(r"blk\.(\d+)\.(?:attn_v|ffn_down|ffn_down_exps)\.weight", name)
    layer = int(found[1]) if found else -1
    is_fine = found and (layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2)
    return Kind.Q6_K if is_fine or name == "token_embd.weight" else Kind.Q4_K


def shapes_of(shape: dict) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors, by name."""
    hidden, inner, layers = shape["embedding_length"], shape["feed_forward_length"], shape["block_count"]
    of_keys = hidden * shape["attention.head_count_kv"] // shape["attention.head_count"]
    found = {"token_embd": (shape["vocab_size"], hidden), "output_norm": (hidden,)}
    for i in range(layers):
        found |= {f"blk.{i}.{name}_norm": (hidden,) for name in ("attn", "ffn")}
        found |= {f"blk.{i}.attn_{name}": (hidden, hidden) for name in ("q", "output")}
        found |= {f"blk.{i}.attn_{name}": (of_keys, hidden) for name in ("k", "v")}
        if (experts := shape.get("expert_count")) is not None:
            inner = shape["expert_feed_forward_length"]
            found |= {f"blk.{i}.ffn_gate_inp": (experts, hidden), f"blk.{i}.ffn_down_exps": (experts, hidden, inner)}
            found |= {f"blk.{i}.ffn_{name}_exps": (experts, inner, hidden) for name in ("gate", "up")}
            found |= {f"blk.{i}.attn_{name}_norm": (shape["attention.key_length"],) for name in ("q", "k")}
        else:
            found |= {f"blk.{i}.ffn_{name}": (inner, hidden) for name in ("gate", "up")}
            found |= {f"blk.{i}.ffn_down": (hidden, inner)}
    return found


def write(path: Path, architecture: str, of_model: dict) -> None:
    """Write the file. Its vocabulary is the packaged model's, and tokens that no text has."""
    random, writer = np.random.default_rng(0), gguf.GGUFWriter(path, architecture)
    for name, value in of_model.items():
        kind = gguf.GGUFValueType.FLOAT32 if isinstance(value, float) else gguf.GGUFValueType.UINT32
        writer.add_key_value(f"{architecture}.{name}", value, kind)
    words = json.loads((DEMO_MODEL / "tokenizer.json").read_text())["model"]
    known = sorted(words["vocab"], key=words["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*known, *(f"<|{i}|>" for i in range(len(known), of_model["vocab_size"]))])
    writer.add_token_merges([" ".join(pair) for pair in words["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    for name, shape in shapes_of(of_model).items():
        *outputs, inputs = shape
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
        elif name.endswith("ffn_gate_inp"):
            writer.add_tensor(f"{name}.weight", random.standard_normal(shape, np.float32))
        else:
            kind = kind_of(f"{name}.weight", of_model["block_count"])
            blocks = random_blocks(kind, math.prod(outputs), inputs, random, 0.02)
            writer.add_tensor(f"{name}.weight", blocks.reshape(*outputs, -1), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def memory() -> dict[str, int]:
    """Memory of this process in MB: resident, anonymous, and the peak of resident."""
    text = Path("/proc/self/smaps_rollup").read_text() + Path("/proc/self/status").read_text()
    names = {"Rss": "all", "Anonymous": "of its own", "VmHWM": "at the worst moment"}
    return {what: int(re.search(rf"{name}:\s+(\d+) kB", text)[1]) * 1024 / 1e6 for name, what in names.items()}


def measure(path: Path, in_blocks: bool) -> dict:
    """Load the model in this process and let it write. The packaged model comes first, to load all libraries."""
    import torch
    from transformers import AutoModelForCausalLM

    import lookahead

    def write_text(model) -> list[int]:
        ids = torch.arange(100, 120)[None]
        return lookahead.wrap(model).generate(ids, max_new_tokens=32, do_sample=False)[0].tolist()

    write_text(AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32))
    before, start = memory(), time.perf_counter()
    if in_blocks:
        model = lookahead.load_gguf(path)
    else:
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    seconds, text = time.perf_counter() - start, write_text(model)
    return {"seconds": seconds, "before": before, "after": memory(), "text": text}


@click.command(help=__doc__.split("\n")[0])
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for the file, of 0.8 GB.")
@click.option("--mixture", is_flag=True, help="Use a mixture of experts, of 0.4 GB.")
@click.option("--as", "kind", type=click.Choice(["blocks", "unpacked"]), hidden=True)
def main(out, mixture, kind) -> None:
    path = out / ("random-mixture-q4_k_m.gguf" if mixture else "random-1b-q4_k_m.gguf")
    if kind:
        print(json.dumps(measure(path, kind == "blocks")))
        return
    out.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        write(path, *(("qwen3moe", MIXTURE) if mixture else ("llama", DENSE)))
    size, texts = path.stat().st_size / 1e6, set()
    print(f"{path.name}: {size:.0f} MB")
    start = time.perf_counter()
    command = [sys.executable, "-m", "lookahead", "generate", "--model", str(path), "--max-new-tokens", "32", "def f("]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e6
    print(f"lookahead generate: {time.perf_counter() - start:.0f} s, at most {most:.0f} MB")
    for kind in ("blocks", "unpacked"):
        command = [sys.executable, __file__, "--out", str(out), "--as", kind, *["--mixture"] * mixture]
        found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.splitlines()[-1])
        texts.add(tuple(found["text"]))
        print(f"{kind}: loaded in {found['seconds']:.1f} s")
        for what, after in found["after"].items():
            more = after - found["before"][what]
            print(f"  {what}: {after:.0f} MB, {more:.0f} of them for the model, {more / size:.2f} times its file")
    print("the texts are the same" if len(texts) == 1 else "THE TEXTS DIFFER")


if __name__ == "__main__":
    main()
