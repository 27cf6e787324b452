"""Give a small trained Llama the size and the cost of a big one, without changing what it computes.

A speed-up depends on how often guesses are accepted, which needs a trained model, and on the cost of a pass, which
needs a big one. A small trained model with ballast writes its own texts at the big model's cost. A pass computes with
the added weights as with all others, and multiplies the results by zero.

    python scripts/ballast.py --model M --size 80M --out FOLDER
    python scripts/ballast.py --model M --hidden-size 512 --layers 12 --intermediate-size 1408 --out FOLDER
"""

import copy
from pathlib import Path

import click
import torch
from transformers import LlamaForCausalLM

from bench import cli
from lookahead.tools.loading import load

# Names are the numbers of parameters with a tied vocabulary of 4096 and heads of 64. 135M and 360M have SmolLM2's
# shapes, with wider feed-forward layers instead of its vocabulary. 1B and 8B have the layers of Llama 3, whose 8B has a
# billion more parameters in its vocabulary. Names that begin with smollm2 are for SmolLM2-135M, with its vocabulary of
# 49152: 360M has the shape of SmolLM2-360M; the others keep 30 layers.
SHAPES = {
    "80M": {"hidden_size": 768, "layers": 12, "intermediate_size": 2048, "heads": 12, "kv_heads": 6},
    "135M": {"hidden_size": 576, "layers": 30, "intermediate_size": 2048, "heads": 9, "kv_heads": 3},
    "360M": {"hidden_size": 960, "layers": 32, "intermediate_size": 3072, "heads": 15, "kv_heads": 5},
    "1B": {"hidden_size": 2048, "layers": 16, "intermediate_size": 8192, "heads": 32, "kv_heads": 8},
    "smollm2-360M": {"hidden_size": 960, "layers": 32, "intermediate_size": 2560, "heads": 15, "kv_heads": 5},
    "smollm2-1B": {"hidden_size": 1536, "layers": 30, "intermediate_size": 5376, "heads": 24, "kv_heads": 8},
    "smollm2-3B": {"hidden_size": 2304, "layers": 36, "intermediate_size": 9216, "heads": 36, "kv_heads": 12},
    "8B": {"hidden_size": 4096, "layers": 32, "intermediate_size": 14336, "heads": 64, "kv_heads": 16},
}

LENGTH_FREE = ("default", "linear", "llama3")  # rotary embeddings that do not depend on max_position_embeddings
WRITERS = ("o_proj", "down_proj")  # projections whose results are added to the hidden state
PROMPT = "def read_lines(path):\n    with open(path) as file:\n        return [line.rstrip() for line in file]\n\n\n"
TOLERANCE = 4  # largest difference, as a multiple of the trained model's own rounding error


@torch.no_grad()
def ballast(
    model: LlamaForCausalLM,
    hidden_size: int,
    layers: int,
    intermediate_size: int,
    heads: int | None = None,
    kv_heads: int | None = None,
    max_position_embeddings: int | None = None,
    seed: int = 0,
) -> LlamaForCausalLM:
    """Return a Llama of the given size that computes the same function as ``model``, on its device and in its dtype.

    heads: by default, as many as fill hidden_size. Heads keep their dimension.
    kv_heads: by default, as many heads for each as in ``model``. With fewer heads for each, trained KV heads are
    repeated.
    max_position_embeddings: by default, the trained number. A larger number does not change the function.
    seed: for the random weights.

    Trained layers are spread evenly, the last one at the end, so no part of the layers is the whole model. Trained
    hidden dimensions and feed-forward units come first. The other hidden dimensions are always zero, because the
    embedding and the rows of o_proj and down_proj that write them are zero. Columns of o_proj and down_proj are zero if
    they read other heads and units; in added layers, both matrices are zero. All other new weights are random, with the
    standard deviation ``config.initializer_range``. Zeros are read and multiplied like other weights, but with many
    zeros, a GPU at its power limit may clock higher.

    Added layers do not change logits at all. With a greater width, the mean square in an RMSNorm shrinks by the factor
    old / new. So eps is multiplied by this factor and the weights by its square root, and logits change only by
    rounding. In bf16 and fp16, the scaled weights are rounded, too, unless new / old is a power of four.

    Raises ValueError if the model is not a Llama, a size is smaller than the trained one, sizes do not divide each
    other, the KV heads are too few for the trained ones, or the rotary embedding depends on a changed number of
    positions.
    """
    if not isinstance(model, LlamaForCausalLM) or model.config.model_type != "llama":
        kind = f"{type(model).__name__} of type {model.config.model_type!r}"
        raise ValueError(f"model is a {kind}, whose layers are not supported: give a LlamaForCausalLM")
    trained = model.config
    head_dim, trained_heads, trained_kv = trained.head_dim, trained.num_attention_heads, trained.num_key_value_heads
    trained_group = trained_heads // trained_kv  # heads for each KV head
    _at_least("hidden_size", hidden_size, trained.hidden_size)
    _at_least("layers", layers, trained.num_hidden_layers)
    _at_least("intermediate_size", intermediate_size, trained.intermediate_size)
    if heads is None:
        heads = _divide("hidden_size", hidden_size, head_dim, "a head's dimension; or give heads")
    _at_least("heads", heads, trained_heads)
    _divide("hidden_size", hidden_size, heads, "the number of heads")
    if kv_heads is None:
        kv_heads = _divide("heads", heads, trained_group, "the trained heads to a KV head; or give kv_heads")
    _at_least("kv_heads", kv_heads, trained_kv)
    group = _divide("heads", heads, kv_heads, "kv_heads")
    copies = -(-trained_group // group)
    if trained_kv * copies > kv_heads:
        raise ValueError(
            f"kv_heads={kv_heads} are too few: with {group} heads to a KV head instead of {trained_group}, the trained "
            f"{trained_kv} take {trained_kv * copies}; give as many, or more heads"
        )
    positions = trained.max_position_embeddings if max_position_embeddings is None else max_position_embeddings
    rope_type = model.model.rotary_emb.rope_type
    _at_least("max_position_embeddings", positions, trained.max_position_embeddings)
    if positions != trained.max_position_embeddings and rope_type not in LENGTH_FREE:
        raise ValueError(
            f"max_position_embeddings={positions} would change the rotary embedding of type "
            f"{rope_type!r}: leave it at {trained.max_position_embeddings}"
        )

    config = copy.deepcopy(trained)
    config.update({
        "hidden_size": hidden_size, "num_hidden_layers": layers, "intermediate_size": intermediate_size,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "dtype": model.dtype,
        "max_position_embeddings": positions,
        "rms_norm_eps": trained.rms_norm_eps * trained.hidden_size / hidden_size,
    })  # fmt: skip
    with torch.device("meta"):  # weights are neither allocated nor drawn yet
        big = LlamaForCausalLM(config)
    big.to(model.dtype).to_empty(device=model.device)
    big.tie_weights()
    big.model.rotary_emb = copy.deepcopy(model.model.rotary_emb)
    big.model.rotary_emb.config = config
    big.generation_config = copy.deepcopy(model.generation_config)
    big.train(model.training)

    generator = torch.Generator(model.device).manual_seed(seed)
    hidden, units = slice(trained.hidden_size), slice(trained.intermediate_size)
    keys = slice(trained_kv * copies * head_dim)
    queries = _query_rows(trained_heads, trained_group, group, head_dim).to(model.device)
    rows = {
        "q_proj": queries, "k_proj": keys, "v_proj": keys, "o_proj": hidden,
        "gate_proj": units, "up_proj": units, "down_proj": hidden,
    }  # fmt: skip
    columns = {"o_proj": queries, "down_proj": units}
    scale = (trained.hidden_size / hidden_size) ** 0.5

    def fill_norm(weight: torch.Tensor, trained_weight: torch.Tensor | None) -> None:
        weight.fill_(1)
        if trained_weight is not None:
            weight[hidden] = trained_weight * scale

    big.model.embed_tokens.weight.zero_()[:, hidden] = model.model.embed_tokens.weight
    if not config.tie_word_embeddings:
        _random(big.lm_head.weight, generator, config)[:, hidden] = model.lm_head.weight
    fill_norm(big.model.norm.weight, model.model.norm.weight)
    source_of = {(i + 1) * layers // trained.num_hidden_layers - 1: layer for i, layer in enumerate(model.model.layers)}
    for index, layer in enumerate(big.model.layers):
        source = source_of.get(index)
        for name, parameter in layer.named_parameters():
            kind, value = name.split(".")[-2], source and source.get_parameter(name)
            if "norm" in name:
                fill_norm(parameter, value)
                continue
            parameter.zero_() if kind in WRITERS else _random(parameter, generator, config)
            if value is None:
                continue
            if kind in ("k_proj", "v_proj"):
                value = value.unflatten(0, (trained_kv, head_dim)).repeat_interleave(copies, dim=0).flatten(0, 1)
            if name.endswith("bias"):
                parameter[rows[kind]] = value
            else:
                parameter[rows[kind], columns.get(kind, hidden)] = value
    return big


def _at_least(name: str, size: int, least: int) -> None:
    if size < least:
        raise ValueError(f"{name}={size} is less than the model's {least}: ballast only adds, give at least {least}")


def _divide(name: str, size: int, by: int, what: str) -> int:
    if size % by:
        raise ValueError(f"{name}={size} is not a multiple of {by}: give a multiple of {what}")
    return size // by


def _random(parameter: torch.Tensor, generator: torch.Generator, config) -> torch.Tensor:
    return parameter.normal_(0, config.initializer_range, generator=generator)


def _query_rows(trained_heads: int, trained_group: int, group: int, head_dim: int) -> torch.Tensor:
    """Return the rows of the new q_proj for the rows of the trained one, int64 [trained_heads * head_dim].

    Head j reads KV head j // group. The trained heads of one KV head fill as many groups as they need, and their KV
    head is repeated in each. Groups are not shared with heads of other KV heads.
    """
    copies = -(-trained_group // group)
    head = torch.arange(trained_heads)
    kv_head, member = head // trained_group, head % trained_group
    places = (kv_head * copies + member // group) * group + member % group
    return (places[:, None] * head_dim + torch.arange(head_dim)).flatten()


@torch.no_grad()
def departure(model: LlamaForCausalLM, reference: LlamaForCausalLM, ids: torch.Tensor) -> float:
    """Return the largest difference of logits for ``ids`` [1, n], in standard deviations of the reference's logits."""
    theirs = reference(ids, use_cache=False).logits.double()
    ours = model(ids, use_cache=False).logits.double()
    return ((ours - theirs).abs().max() / theirs.std()).item()


@click.command(help=__doc__.split("\n")[0])
@click.option("--model", "model_name", metavar="NAME_OR_PATH", help="Trained Llama. Default: the packaged model.")
@click.option("--size", type=click.Choice(SHAPES), help="A shape; the options below change or replace it.")
@click.option("--hidden-size", type=cli.COUNT)
@click.option("--layers", type=cli.COUNT)
@click.option("--intermediate-size", type=cli.COUNT)
@click.option("--heads", type=cli.COUNT)
@click.option("--kv-heads", type=cli.COUNT)
@click.option("--context", "max_position_embeddings", type=cli.COUNT, help="max_position_embeddings.")
@cli.dtype
@cli.device
@click.option("--seed", default=0, show_default=True)
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path), help="New folder to write.")
def main(model_name, size, dtype, device, out, **shape) -> None:
    shape = {**SHAPES.get(size, {}), **{name: value for name, value in shape.items() if value is not None}}
    missing = [name for name in ("hidden_size", "layers", "intermediate_size") if name not in shape]
    if missing:
        raise click.UsageError(f"give --size, or --{' and --'.join(missing).replace('_', '-')}")
    if out.exists() and any(out.iterdir()):
        raise click.BadParameter(f"{str(out)!r} is not empty: name a new folder", param_hint="--out")
    model, tokenizer = load(model_name, dtype, device)
    try:
        big = ballast(model, **shape)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"{model.num_parameters():,} parameters became {big.num_parameters():,}, {big.dtype}")
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids.to(model.device)
    difference = departure(big, model, ids)
    rounding = departure(model, copy.deepcopy(model).double(), ids)
    verdict = f"logits differ from the trained model's by at most {difference:.1e} of their spread; "
    verdict += f"the trained model's own rounding error is {rounding:.1e}"
    if not difference <= TOLERANCE * rounding:
        raise click.ClickException(
            f"{verdict}. This is more than {TOLERANCE} times as much, so the function is not the same, and nothing was "
            "written. Try --dtype float32. If that fails, too, this script does not support a feature of the model."
        )
    click.echo(verdict)
    big.save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    main()
