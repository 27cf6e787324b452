"""Compare lookahead with plain decoding and with transformers' own speculative methods.

Prompts come in Spec-Bench's JSONL format: one object a line with question_id, category and turns, of which the first
is used. For every prompt the methods run in turn, in an order that rotates from repeat to repeat; a method's time is
the median of its repeats. Every text is compared with that of plain decoding from the same seed, the prompt's number.

    python scripts/compare.py --model M --prompts FILE.jsonl --methods greedy,lookahead,jacobi,prompt-lookup,assisted
"""

import json
import shlex
import statistics
import sys
import time
from pathlib import Path

import click
import torch

import lookahead
from lookahead import LookaheadConfig, NgramPool
from lookahead.audit import choice_scores, first_difference, next_logits
from lookahead.cli import AutoOr, load
from lookahead.measuring import environment, read_prompts

ENVIRONMENT = ("processor", "threads", "dtype", "python", "torch", "transformers")  # what a table has to name
METHODS = ("greedy", "lookahead", "jacobi", "prompt-lookup", "assisted")


class ForwardCounter:
    """Counts the forward passes of a model while it is open, and the seconds until the second of them begins."""

    def __init__(self, model):
        self._model = model

    def __enter__(self):
        self.passes = 0
        self.first_seconds = None
        self._opened = time.perf_counter()
        self._hook = self._model.register_forward_pre_hook(self._count)
        return self

    def _count(self, *_):
        self.passes += 1
        if self.passes == 2:
            self.first_seconds = time.perf_counter() - self._opened

    def __exit__(self, *_):
        self._hook.remove()


def timed(model, inputs, options: dict, seed: int) -> tuple[list[list[int]], float]:
    """One call of the model's generate() from a seed: the new ids of each sequence, and its seconds."""
    torch.manual_seed(seed)
    start = time.perf_counter()
    output = model.generate(**inputs, **options)
    texts = output[:, inputs.input_ids.shape[1] :].tolist()
    return texts, time.perf_counter() - start


def generate(model, method: str, inputs, options: dict, seed: int, config, pool, assistant=None) -> dict:
    """One timed call: the new ids of each sequence, seconds, forward passes, and the statistics of lookahead."""
    extra = {"prompt-lookup": {"prompt_lookup_num_tokens": 10}, "assisted": {"assistant_model": assistant}}
    if method in ("lookahead", "jacobi"):
        lookahead.wrap(model, config, pool)
    with ForwardCounter(model) as counter:
        texts, seconds = timed(model, inputs, options | extra.get(method, {}), seed)
    stats = model.lookahead.last if method in ("lookahead", "jacobi") else None
    lookahead.unwrap(model)
    return {"texts": texts, "seconds": seconds, "passes": counter.passes, "stats": stats}


def margin_at(model, inputs, text: list[int], index: int, options: dict, seed: int) -> float:
    """How close plain decoding's choice of new token ``index`` was, in logits: zero is a tie."""
    row = next_logits(model, inputs.input_ids, text[: index + 1])[-1]
    scores = choice_scores(row, options.get("temperature", 0.0), seed, index, options.get("top_p", 1.0))
    best = scores.topk(2).values
    return (best[0] - best[1]).item()


def summarise(rows: list[dict], methods: list[str]) -> list[dict]:
    """One row a category and method, and one a method over all ("overall": mean of the categories)."""
    categories = list(dict.fromkeys(row["category"] for row in rows))
    table = []
    for category in categories:
        plain_rate = None
        for method in methods:
            mine = [row for row in rows if row["category"] == category and row["method"] == method]
            rate = sum(row["tokens"] for row in mine) / sum(row["seconds"] for row in mine)
            plain_rate = plain_rate or rate  # greedy comes first
            margins = [row["margin"] for row in mine if row["margin"] is not None]
            steps = sum(row["passes"] - 1 for row in mine)
            table.append({
                "category": category,
                "method": method,
                "tokens_per_second": rate,
                "speedup": rate / plain_rate,
                "tokens_per_step": sum(row["tokens"] - 1 for row in mine) / steps if steps else 1.0,
                "identical": sum(row["difference"] is None for row in mine),
                "prompts": len(mine),
                "largest_margin": max(margins, default=None),
            })  # fmt: skip
    for method in methods:
        mine = [row for row in table if row["method"] == method]
        mean = {name: statistics.mean(row[name] for row in mine)
                for name in ("tokens_per_second", "speedup", "tokens_per_step")}  # fmt: skip
        counts = {name: sum(row[name] for row in mine) for name in ("identical", "prompts")}
        margins = [row["largest_margin"] for row in mine if row["largest_margin"] is not None]
        table.append(
            {"category": "overall", "method": method, **mean, **counts, "largest_margin": max(margins, default=None)}
        )
    return table


def markdown(table: list[dict], environment: dict) -> str:
    lines = [
        f"`{environment['command']}`",
        "",
        ", ".join(f"{name} {environment[name]}" for name in ENVIRONMENT),
        "",
        "| category | method | tokens/s | speed-up | tokens/step | identical | margin where different |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in table:
        margin = "" if row["largest_margin"] is None else f"up to {row['largest_margin']:.3g}"
        lines.append(
            f"| {row['category']} | {row['method']} | {row['tokens_per_second']:.1f} | {row['speedup']:.2f} | "
            f"{row['tokens_per_step']:.2f} | {row['identical']}/{row['prompts']} | {margin} |"
        )
    if environment["samples"]:
        lines += [
            "",
            "From one seed, prompt-lookup and assisted draw other texts than plain decoding does.",
        ]
    return "\n".join(lines) + "\n"


def write_results(out: Path, text: str, results: dict) -> None:
    """Write OUT.md and OUT.json, and the folder that they go to."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    out.with_suffix(".md").write_text(text, encoding="utf-8")


@click.command(help=__doc__.split("\n")[0])
@click.option("--model", "model_name", metavar="NAME_OR_PATH", help="Causal LM to load; the packaged one by default.")
@click.option("--prompts", "prompts_file", required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--methods", default="greedy,lookahead,jacobi,prompt-lookup", show_default=True,
              help=f"Of {', '.join(METHODS)}; greedy, which is plain decoding, always runs.")  # fmt: skip
@click.option("--assistant", metavar="NAME_OR_PATH", help="Draft model of the method assisted.")
@click.option(
    "--dtype", default="auto", show_default=True, type=click.Choice(["auto", "float32", "bfloat16", "float16"])
)
@click.option("--device", default="auto", show_default=True)
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads; torch's default if not given.")
@click.option("--max-new-tokens", default=128, show_default=True, type=click.IntRange(min=2))
@click.option("--temperature", default=0.0, show_default=True, type=click.FloatRange(min=0), help="0 does not sample.")
@click.option("--top-p", default=1.0, show_default=True, type=click.FloatRange(min=0, max=1, min_open=True))
@click.option("--seed", default=0, show_default=True, help="Added to the prompt's number.")
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(min=1))
@click.option("--limit", type=click.IntRange(min=1), help="Use only the first prompts.")
@click.option("--budget", default=LookaheadConfig.budget, show_default=True, type=AutoOr(min=0))
@click.option("--window-size", default=LookaheadConfig.window_size, show_default=True, type=AutoOr(min=0))
@click.option("--ngram-size", default=LookaheadConfig.ngram_size, show_default=True, type=AutoOr(min=2))
@click.option("--shared-pool", is_flag=True, help="Keep one pool over all prompts; else a fresh one for every call.")
@click.option("--out", type=click.Path(path_type=Path), help="Write OUT.json and OUT.md.")
def main(
    model_name, prompts_file, methods, assistant, dtype, device, threads, max_new_tokens, temperature, top_p, seed,
    repeats, limit, budget, window_size, ngram_size, shared_pool, out,
) -> None:  # fmt: skip
    chosen = ["greedy", *[m for m in dict.fromkeys(methods.split(",")) if m != "greedy"]]
    for method in chosen:
        if method not in METHODS:
            raise click.BadParameter(f"{method!r} is not one of {', '.join(METHODS)}", param_hint="--methods")
    if "assisted" in chosen and assistant is None:
        raise click.UsageError("the method assisted needs --assistant")
    if shared_pool and repeats > 1:
        raise click.UsageError("a shared pool knows a prompt when it is repeated: use --repeats 1")
    if threads:
        torch.set_num_threads(threads)
    prompts = read_prompts(prompts_file, limit)
    model, tokenizer = load(model_name, dtype, device)
    assistant_model = load(assistant, dtype, device)[0] if assistant else None
    options = {"max_new_tokens": max_new_tokens, "do_sample": False}
    if temperature > 0:
        options |= {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": top_p}
    configs = {
        "lookahead": LookaheadConfig(budget=budget, window_size=window_size, ngram_size=ngram_size),
        "jacobi": LookaheadConfig(strategy="jacobi", budget=budget),
    }
    shared = {"lookahead": NgramPool()} if shared_pool else {}

    def run(method: str, number: int, inputs) -> dict:
        return generate(
            model, method, inputs, options, seed + number, configs.get(method), shared.get(method), assistant_model
        )

    warm_up = tokenizer(prompts[0]["turns"][0], return_tensors="pt", return_token_type_ids=False).to(model.device)
    for method in chosen:
        if method not in shared:
            run(method, 0, warm_up)
    rows, stats = [], {method: lookahead.Stats() for method in configs if method in chosen}
    with click.progressbar(list(enumerate(prompts)), label="prompts", file=sys.stderr) as progress:
        for number, prompt in progress:
            inputs = tokenizer(prompt["turns"][0], return_tensors="pt", return_token_type_ids=False).to(model.device)
            calls: dict[str, list[dict]] = {method: [] for method in chosen}
            for repeat in range(repeats):
                turn = (number + repeat) % len(chosen)
                for method in chosen[turn:] + chosen[:turn]:
                    calls[method].append(run(method, number, inputs))
            plain = calls["greedy"][0]["texts"][0]
            for method in chosen:
                call = calls[method][0]
                different = first_difference(call["texts"][0], plain)
                comparable = different is not None and (method in configs or not options["do_sample"])
                if call["stats"]:
                    stats[method] += call["stats"]
                margin = margin_at(model, inputs, plain, different, options, seed + number) if comparable else None
                rows.append({
                    "question_id": prompt["question_id"],
                    "category": prompt["category"],
                    "method": method,
                    "tokens": len(call["texts"][0]),
                    "seconds": statistics.median(c["seconds"] for c in calls[method]),
                    "passes": call["passes"],
                    "difference": different,
                    "margin": margin,
                })  # fmt: skip
    where = {
        "command": shlex.join(["python", "scripts/compare.py", *sys.argv[1:]]),
        **environment(model),
        "samples": options["do_sample"],
    }
    table = summarise(rows, chosen)
    text = markdown(table, where)
    for method, total in stats.items():
        text += f"\n{method}: {total}\noverhead outside the forward pass: {total.overhead:.1%} of the steps' time\n"
    click.echo(text)
    if out is not None:
        report = {"environment": where, "table": table, "stats": {m: s.as_dict() for m, s in stats.items()},
                  "prompts": rows}  # fmt: skip
        write_results(out, text, report)


if __name__ == "__main__":
    main()
