"""Try lookahead on a tiny random model of every causal LM in transformers, against the model's own generate().

Each family is built in float32 (`bench/tiny_models.py`) and writes a greedy and a sampled text, plainly and by
lookahead. It runs in its own process, so a crash or a hang does not affect other families.

    python scripts/architectures.py --out docs/architectures.md
"""

import logging
import multiprocessing
import platform
import sys
import warnings
from collections import Counter
from functools import partial
from logging.handlers import BufferingHandler
from multiprocessing.connection import Connection
from multiprocessing.pool import ThreadPool
from textwrap import shorten

import click
import torch
import transformers
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import lookahead
from bench import cli
from bench.pages import command_line, table, write_results
from bench.tiny_models import SHAPES, random_model, tiny_config
from lookahead import LookaheadConfig
from lookahead.passes import costs
from lookahead.passes.capabilities import find_adapter
from lookahead.tools.audit import first_difference

FAMILIES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
NEW_TOKENS = 64
WINDOW_SIZES = (8, 40)  # texts outgrow both; the tokens of wrap()'s probe outgrow only the first
PHRASE = [17, 5, 42, 29, 8, 33]
PROMPT = [*PHRASE, 11, *PHRASE, 50, 23, *PHRASE]  # repeats itself, so the pool can guess
TEXTS = {"greedy": {"do_sample": False}, "sampled": {"do_sample": True, "temperature": 0.7, "top_k": 0}}
RESULTS = {
    "identical": "greedy and sampled texts equal those of `model.generate`, token for token",
    "refused": "`UnsupportedModelError`, or the model's own decoding took over with a warning",
    "wrong": "another text, or an error that `model.generate` does not raise",
    "not built": "the model cannot be built, or its own `generate` fails",
}
WORST = ("wrong", "not built", "refused", "identical")


def layer_kinds(model: PreTrainedModel) -> str:
    """Name the kinds of layers, in the words of the configuration."""
    config = model.config.get_text_config(decoder=True)
    names = ("layer_types", "layers_block_type", "attention_layers", "attn_layers")
    kinds = next((kinds for name in names if isinstance(kinds := getattr(config, name, None), list)), None)
    if kinds is None:
        attention = "full" if getattr(config, "sliding_window", None) is None else "sliding"
        kinds = ["recurrent" if getattr(model, "_is_stateful", False) else attention]
    kinds = kinds + (getattr(config, "mlp_layer_types", None) or [])
    kinds = list(dict.fromkeys(kind.removesuffix("_attention") for kind in kinds))
    if any("experts" in name for name, _ in model.named_modules()):
        kinds.append("experts")
    return ", ".join(kinds)


def generate(model: PreTrainedModel, how: dict, **options) -> list[int]:
    """Return the new tokens, always from the same seed."""
    torch.manual_seed(0)
    ids = torch.tensor([PROMPT], device=model.device)
    length = {"min_new_tokens": NEW_TOKENS, "max_new_tokens": NEW_TOKENS}
    return model.generate(ids, **length, **how, **options)[0, len(PROMPT) :].tolist()


def row_of(model_type: str, **known) -> dict:
    """Return a row of the table. known: fields with known values."""
    row = {"model_type": model_type, "class": MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]}
    row |= dict.fromkeys(("layers", "guesses", "passes", "result", "reason"), "")
    # Accepted guesses are counted in all texts, different tokens only in the greedy one.
    return row | {"accepted": 0, "different_tokens": 0, "tokens_per_step": {}} | known


def check(model_type: str) -> dict:
    """Build the family in every shape and decode both ways; return the worst row.

    Only the first shape must be possible to build. If only another shape is refused, the row says so.
    """
    row = check_windows(model_type)
    for shape in list(SHAPES)[1:]:
        try:
            model = random_model(tiny_config(model_type, WINDOW_SIZES[0], shape))
        except Exception:  # many configurations and models refuse sizes that do not match
            continue
        other = check_model(model_type, model, LookaheadConfig(budget=1))  # its steps are chains
        if other["result"] != "wrong":
            other = check_model(model_type, model)
        if other["result"] == "wrong":
            return other | {"reason": f"in the shape {shape!r}: {other['reason']}"}
        if (row["result"], other["result"]) == ("identical", "refused"):
            remarks = row["reason"], f"refused in the shape {shape!r}: {other['reason']}"
            row["reason"] = "; ".join(filter(None, remarks))
    return row


def check_windows(model_type: str) -> dict:
    """Do what `check` does for the first shape, with every length of window."""
    rows, configs = [], []
    for window in WINDOW_SIZES:
        try:
            config = tiny_config(model_type, window)
            if config.to_dict() in configs:  # the family has no window
                continue
            configs.append(config.to_dict())
            rows.append(check_model(model_type, random_model(config)))
        except Exception as error:  # families raise errors of many types
            rows.append(row_of(model_type, result="not built", reason=described(error)))
        if len(configs) > 1 and rows[-1]["reason"]:
            rows[-1]["reason"] = f"with windows of {window}: {rows[-1]['reason']}"
    row = min(rows, key=lambda row: WORST.index(row["result"]))
    return row | {"guesses": " or ".join(dict.fromkeys(row["guesses"] for row in rows if row["guesses"]))}


def check_model(model_type: str, model: PreTrainedModel, config: LookaheadConfig | None = None) -> dict:
    """Decode both ways and return a row of the table. config: for `lookahead.wrap`."""
    row = row_of(model_type, layers=layer_kinds(model))
    try:
        expected = {name: generate(model, how) for name, how in TEXTS.items()}
        uncached = generate(model, TEXTS["greedy"], use_cache=False)
    except Exception as error:
        return row | {"result": "not built", "reason": f"its own generate fails: {described(error)}"}
    logger, said = logging.getLogger("lookahead"), BufferingHandler(capacity=1000)
    logger.addHandler(said)
    try:
        lookahead.wrap(model)
        if not model.config.is_encoder_decoder:
            row["guesses"] = "tree" if find_adapter(model).can_branch else "chain"
    except lookahead.UnsupportedModelError as error:
        return row | {"result": "refused", "reason": described(error)}
    except Exception as error:
        return row | {"result": "wrong", "reason": f"wrap: {described(error)}"}
    finally:
        logger.removeHandler(said)
    lookahead.unwrap(model)
    row |= {"different_tokens": len(set(expected["greedy"]))} | by_lookahead(model, expected, config)
    remarks = [row["reason"]]
    if row["guesses"] == "chain":
        remarks += [record.getMessage().split(". Guesses")[0] for record in said.buffer]
    if uncached != expected["greedy"]:
        remarks.append("its own generate writes another text with use_cache=False")
    return row | {"reason": "; ".join(filter(None, remarks))}


def by_lookahead(model: PreTrainedModel, expected: dict[str, list[int]], config: LookaheadConfig | None) -> dict:
    """Decode by lookahead and compare; return fields of a row."""
    lookahead.wrap(model, config)
    steps = {}
    for name, how in TEXTS.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                actual = generate(model, how)
            except Exception as error:
                return {"result": "wrong", "reason": f"{name}: {described(error)}"}
        different = first_difference(actual, expected[name])
        if different is not None:
            return {"result": "wrong", "reason": f"the {name} text differs from its token {different} on"}
        steps[name] = model.lookahead.last
        if not steps[name].steps:
            said = " ".join(str(warning.message) for warning in caught if "lookahead" in str(warning.message))
            reason = said.rstrip(".") or "the model's own decoding took over"
            return {"result": "refused", "guesses": "", "reason": reason}
    passes = passes_of(model)
    accepted = sum(stats.accepted.total() for stats in steps.values())
    rates = {name: stats.tokens_per_step for name, stats in steps.items()}
    reason = "" if accepted else "no guess was accepted"
    return {"result": "identical", "passes": passes, "tokens_per_step": rates, "accepted": accepted, "reason": reason}


def passes_of(model: PreTrainedModel) -> str:
    """Return "fused", or why passes are not fused on this CPU."""
    report = model.lookahead.report().splitlines()
    why_not = [line.removeprefix(start) for line in report if line.startswith(start := "given up: fused passes: ")]
    return why_not[0] if why_not else report[0].removeprefix("passes: ")


def described(error: Exception) -> str:
    """Return an error's message in one short line, after the name of its type unless the error is lookahead's own."""
    text = shorten(str(error), 300, placeholder=" ...")
    own = isinstance(error, lookahead.UnsupportedModelError)
    return text if own else ": ".join(filter(None, (type(error).__name__, text)))


def check_into(sender: Connection, model_type: str) -> None:
    """Check a family, and send its row to the parent process."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    costs.SECONDS = 0.02  # enough for tiny models
    sender.send(check(model_type))


def check_alone(model_type: str, seconds: float) -> dict:
    """Check a family in its own process, which is ended after ``seconds``."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lookahead.wrapping"])  # slow imports run once
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=check_into, args=(sender, model_type))
    process.start()
    sender.close()
    try:
        row = receiver.recv() if receiver.poll(seconds) else None
        reason = f"not done after {seconds:g} s"
    except EOFError:
        row, reason = None, "its process died"
    process.kill()
    process.join()
    return row or row_of(model_type, result="wrong", reason=reason)


def summary(rows: list[dict]) -> str:
    """Count the results, in one line."""
    counts = Counter(row["result"] for row in rows)
    trees = sum(row["guesses"] == "tree" for row in rows if row["result"] == "identical")
    identical = f"identical {counts['identical']} ({trees} by trees, {counts['identical'] - trees} by chains)"
    fused = sum(row["passes"] == "fused" for row in rows)
    others = [f"{result} {counts[result]}" for result in RESULTS if result != "identical"]
    return ", ".join([identical, *others, f"fused passes {fused}"])


def markdown(rows: list[dict], environment: dict) -> str:
    meanings = "\n".join(f"- **{result}**: {meaning}." for result, meaning in RESULTS.items())
    versions = ", ".join(f"{name} {environment[name]}" for name in ("lookahead", "transformers", "torch", "python"))
    columns = ["model type", "class", "layers", "guesses", "passes", "result", "tokens per step", "reason"]
    cells = [
        [row["model_type"], row["class"], row["layers"], row["guesses"], row["passes"], row["result"],
         " / ".join(f"{value:.2f}" for value in row["tokens_per_step"].values()), row["reason"]]
        for row in rows
    ]  # fmt: skip
    return f"""# Architectures

Every model type of transformers' causal-LM mapping ({len(rows)}), as a tiny random float32 model with every kind of
layer of its family. A prompt of {len(PROMPT)} tokens and {NEW_TOKENS} new ones are longer than its sliding windows and
chunks, which have {" and ".join(map(str, WINDOW_SIZES))} tokens in turn. Other shapes (few positions, other head
counts and widths, the default `is_decoder`) are also tried, if they can be built. The table shows each family's worst
result:

{meanings}

**{summary(rows)}.**

    {environment["command"]}

{versions}

The column "passes" says whether they are fused on a CPU, or why not.

Tokens per step are those of the greedy and of the sampled text. They differ for trained models.

{table(columns, cells)}
"""


@click.command(help=__doc__.split("\n")[0])
@click.option("--only", "families", type=cli.ListOf(click.Choice(FAMILIES)), default=",".join(FAMILIES),
              metavar="TYPE,TYPE,...", help="Model types; default: all.")  # fmt: skip
@click.option("--seconds", default=120.0, show_default=True, help="Time limit for a family.")
@click.option("--out", type=cli.OUT, help="Write OUT.md and OUT.json.")
def main(families, seconds, out) -> None:
    with ThreadPool() as processors:  # a thread for each core
        done = processors.imap(partial(check_alone, seconds=seconds), sorted(families))
        with click.progressbar(done, length=len(families), label="families", file=sys.stderr) as progress:
            rows = list(progress)
    versions = {module.__name__: module.__version__ for module in (lookahead, transformers, torch)}
    environment = {"command": command_line(__file__), **versions, "python": platform.python_version()}
    for row in rows:
        if row["result"] != "identical" or row["reason"]:
            click.echo(f"{row['model_type']}: {row['result']}: {row['reason']}")
    click.echo(summary(rows))
    if out is not None:
        write_results(out, markdown(rows, environment), {"environment": environment, "families": rows})
    if any(row["result"] == "wrong" for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
