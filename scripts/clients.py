"""Run real clients of a model with and without a wrap: both runs must give the same results, to the last bit.

    PYTHON=python3.11 sh scripts/peers/install.sh .peers clients
    .peers/clients/bin/python scripts/clients.py [NAME ...]

Each client is a function, which runs twice: with a `wrap` that does nothing, then with `lookahead.wrap`. The two
results are compared, and every wrapped model must have decoded by lookahead. The exit status is 1 if anything differs
or a client is not installed. No model or data set is downloaded.
"""

import copy
import io
import json
import multiprocessing
import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path

import click

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, pipeline

import lookahead
from bench.pages import table
from bench.tiny_models import llama
from lookahead import LookaheadConfig

CONFIG = LookaheadConfig(budget=12, window_size=4, ngram_size=3)  # a fixed budget, so no step costs are measured
PROMPT = "def read_lines(path):\n    with open(path) as file:\n"
IDS = torch.tensor([[5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6]])
TRAINING_IDS = torch.arange(40).reshape(2, 20) + 100

Wrap = Callable[[PreTrainedModel], PreTrainedModel]
CLIENTS: dict[str, tuple[str, Callable[[Wrap], object]]] = {}


def client(package: str) -> Callable:
    """Register a function by its name as a client of ``package``. Its docstring says what is compared."""

    def register(function: Callable[[Wrap], object]) -> Callable[[Wrap], object]:
        CLIENTS[function.__name__] = package, function
        return function

    return register


def demo() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(lookahead.DEMO_MODEL, dtype=torch.float32).eval()


def tokenizer() -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(lookahead.DEMO_MODEL, pad_token="<|end|>", padding_side="left")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return tokenizer


def text(model: PreTrainedModel, ids: torch.Tensor = IDS, **options) -> list:
    """Return the ids of a greedy text and of a sampled one."""
    torch.manual_seed(1)
    options |= {"input_ids": ids, "max_new_tokens": 24}
    return [model.generate(do_sample=do_sample, **options).tolist() for do_sample in (False, True)]


def values(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def gradients(model: PreTrainedModel) -> dict[str, torch.Tensor | None]:
    return {name: x.grad if x.grad is None else x.grad.clone() for name, x in model.named_parameters()}


def same_objects(held: list, model: PreTrainedModel) -> list[bool]:
    """Compare ``held`` with the model's parameters by identity."""
    return [a is b for a, b in zip(held, model.parameters(), strict=True)]


def step(model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> dict:
    """Make a training step; return its loss and gradients."""
    model.train()
    optimizer.zero_grad()
    loss = model(input_ids=TRAINING_IDS, labels=TRAINING_IDS).loss
    loss.backward()
    optimizer.step()
    model.eval()
    return {"loss": loss.detach(), "gradients": gradients(model)}


@client("trl")
def trl_grpo(wrap: Wrap) -> object:
    """Two steps of GRPOTrainer, and one by its optimizer after unwrap: gradients, parameters, losses, texts."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Watch(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model, **kwargs) -> None:
            seen.append(gradients(model))

    def reward(completion_ids, **kwargs) -> list[float]:
        return [float(sum(ids) % 11) for ids in completion_ids]

    seen, model = [], wrap(llama())
    texts = [text(model)]
    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            folder, max_steps=2, per_device_train_batch_size=4, num_generations=4, max_completion_length=12,
            learning_rate=1e-3, use_cpu=True, report_to=[], save_strategy="no", logging_steps=1, bf16=False,
            # This rule may depend on the whole batch, so sequences advance together and draw as in plain decoding.
            generation_kwargs={"top_h": 0.99},
        )  # fmt: skip
        prompts = Dataset.from_list([{"prompt": PROMPT}, {"prompt": "import os\n"}] * 4)
        trainer = GRPOTrainer(model, reward, args=settings, train_dataset=prompts, processing_class=tokenizer())
        trainer.add_callback(Watch)
        trainer.train()
    assert not getattr(getattr(model, "lookahead", None), "last", lookahead.Stats()).plain  # in training mode, too
    losses = [entry.get("loss") for entry in trainer.state.log_history]
    trained = values(model)
    texts.append(text(model.eval()))
    further = step(lookahead.unwrap(model), trainer.optimizer)
    return {"gradients": seen, "losses": losses, "trained": trained, "further": further, "last": values(model)}, texts


@client("torch")
def optimizer_over_unwrap(wrap: Wrap) -> object:
    """AdamW made while wrapped, steps before and after unwrap, texts between: gradients, parameters, objects."""
    model = llama()
    held = list(model.parameters())
    wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = [text(model), step(model, optimizer), text(model), step(model, optimizer)]
    found += [values(lookahead.unwrap(model)), step(model, optimizer), values(model), text(model)]
    return found, same_objects(held, model)


@client("torch")
def gradient_of_one_weight(wrap: Wrap) -> object:
    """F.linear(h, model.lm_head.weight), as in chunked losses, which bypass the layer: the gradient."""
    model = wrap(llama())
    before = text(model)
    hidden = model.model(TRAINING_IDS).last_hidden_state
    torch.nn.functional.linear(hidden, model.lm_head.weight).logsumexp(-1).sum().backward()
    return before, gradients(model)


def adapt(model: PreTrainedModel, name: str = "default", **settings) -> PreTrainedModel:
    from peft import get_peft_model

    return get_peft_model(model, lora(**settings), adapter_name=name)


def lora(**settings) -> object:
    from peft import LoraConfig

    torch.manual_seed(2)
    return LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", **settings)


@client("peft")
def peft_training(wrap: Wrap) -> object:
    """Three steps of a LoRA on a wrapped model, and of a wrapped model with a LoRA: gradients, adapters, texts."""
    found = []
    for adapted in (adapt(wrap(llama())), wrap(adapt(llama()))):
        optimizer = torch.optim.AdamW([x for x in adapted.parameters() if x.requires_grad], lr=1e-2)
        found += [text(adapted), *[step(adapted, optimizer) for _ in range(3)]]
        found += [values(adapted), text(adapted), values(lookahead.unwrap(adapted))]
    return found


@client("peft")
def peft_merge(wrap: Wrap) -> object:
    """merge_and_unload, merge_adapter and unmerge_adapter of a LoRA on a wrapped model: weights, texts."""
    adapted = adapt(wrap(llama()), init_lora_weights=False)
    found = [text(adapted)]
    adapted.merge_adapter()
    found += [text(adapted), values(adapted)]
    adapted.unmerge_adapter()
    merged = adapted.merge_and_unload()
    found += [text(merged), values(merged)]
    return [*found, values(lookahead.unwrap(merged)), text(merged)]


@client("peft")
def peft_adapters(wrap: Wrap) -> object:
    """Two adapters added to a wrapped model by transformers and by PEFT, switched on and off: texts."""
    model = wrap(llama())
    found = [text(model)]
    for name in ("one", "two"):
        model.add_adapter(lora(init_lora_weights=False), name)
        model.set_adapter(name)
        found.append(text(model))
    model.disable_adapters()
    found.append(text(model))
    adapted = adapt(wrap(llama()), "one", init_lora_weights=False)
    adapted.add_adapter("two", lora(init_lora_weights=False))
    for name in ("one", "two"):
        adapted.set_adapter(name)
        found.append(text(adapted))
    with adapted.disable_adapter():
        return [*found, text(adapted)]


@client("accelerate")
def offloads(wrap: Wrap) -> object:
    """cpu_offload, disk_offload and dispatch_model, each called before and after wrap: texts."""
    import accelerate

    cpu, found = torch.device("cpu"), {}
    places = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.layers.0": "cpu",
              "model.layers.1": "disk", "model.norm": "cpu", "lm_head": "disk"}  # fmt: skip
    for name, before in product(("cpu_offload", "disk_offload", "dispatch_model"), (True, False)):
        with tempfile.TemporaryDirectory() as folder:
            options = {
                "cpu_offload": {"execution_device": cpu},
                "disk_offload": {"execution_device": cpu, "offload_dir": folder},
                "dispatch_model": {"device_map": places, "main_device": "cpu", "offload_dir": folder,
                                   "force_hooks": True},
            }  # fmt: skip
            model = llama() if before else wrap(llama())
            model = getattr(accelerate, name)(model, **options[name])
            model = wrap(model) if before else model
            found[name, before] = [text(model), text(model), text(lookahead.unwrap(model))]
    return found


@client("torch")
def casts(wrap: Wrap) -> object:
    """.to("cpu"), .to(torch.bfloat16), .half(), .float() and .double(): parameters stay the same objects."""
    found = []
    for name, *given in (("to", "cpu"), ("to", torch.bfloat16), ("half",), ("float",), ("double",)):
        model = llama()
        held = list(model.parameters())
        found.append(text(wrap(model)))
        getattr(model, name)(*given)
        found += [values(model), same_objects(held, model)]
        model.float()
        found += [text(model), values(lookahead.unwrap(model)), text(model), same_objects(held, model)]
    return found


def _both(model: PreTrainedModel, copied: PreTrainedModel) -> list:
    return [text(model), text(copied), values(copied), values(lookahead.unwrap(copied)), text(copied)]


def _file(saved: object) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return file


@client("torch")
def copies(wrap: Wrap) -> object:
    """deepcopy, pickle, torch.save and torch.load of a whole model: weights, texts."""
    found = []
    for how in (
        copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), lambda x: torch.load(_file(x), weights_only=False)
    ):  # fmt: skip
        model = wrap(llama())
        found.append((text(model), _both(model, how(model))))
    return found


@client("transformers")
def save_pretrained(wrap: Wrap) -> object:
    """save_pretrained of a wrapped model, and from_pretrained: weights, texts."""
    with tempfile.TemporaryDirectory() as folder:
        model = wrap(llama())
        before = text(model)
        model.save_pretrained(folder)
        files = {path.name: path.stat().st_size for path in Path(folder).iterdir()}
        return before, files, _both(model, wrap(AutoModelForCausalLM.from_pretrained(folder)))


@client("torch")
def state_dicts(wrap: Wrap) -> object:
    """state_dict, saved by torch.save, and load_state_dict, which copies or assigns: weights, texts."""
    found, other = [], llama()
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.normal_(std=0.1)
    for assign in (False, True):
        model = wrap(llama())
        found.append(text(model))
        model.load_state_dict(values(other), assign=assign)
        file = _file(model.state_dict())
        found += [text(model), values(model), len(file.getvalue())]
        other.load_state_dict(torch.load(file))
        found += [text(other), values(lookahead.unwrap(model)), text(model)]
    return found


def _answer(model: PreTrainedModel, pipe: Connection) -> None:
    torch.set_num_threads(1)
    pipe.send((text(model), {name: tensor.numpy() for name, tensor in values(model).items()}))


@client("torch")
def spawned_process(wrap: Wrap) -> object:
    """A model sent to a process that multiprocessing spawns: texts there and here."""
    model = wrap(llama())
    found = [text(model)]
    for context in (multiprocessing.get_context("spawn"), torch.multiprocessing.get_context("spawn")):
        here, there = context.Pipe()
        process = context.Process(target=_answer, args=(model, there))
        process.start()
        there.close()
        try:
            answer, weights = here.recv()
            found += [answer, {name: torch.from_numpy(array) for name, array in weights.items()}]
        finally:
            process.join()
    return [*found, text(model)]


@client("torch")
def model_compile(wrap: Wrap) -> object:
    """model.compile() before and after wrap, and a separate pass: texts, gradients."""
    found = []
    for compiled_first in (True, False):
        torch.compiler.reset()
        model = llama()
        if compiled_first:
            model.compile(backend="aot_eager")
        found.append(text(wrap(model)))
        if not compiled_first:
            model.compile(backend="aot_eager")
        found += [text(model), step(model, torch.optim.SGD(model.parameters(), lr=0.1)), text(model)]
    return found


@client("torch")
def torch_compile(wrap: Wrap) -> object:
    """torch.compile of a wrapped model: texts, gradients."""
    torch.compiler.reset()
    model = torch.compile(wrap(llama()), backend="aot_eager")
    return text(model), step(model, torch.optim.SGD(model.parameters(), lr=0.1)), text(model)


@client("transformers")
def text_generation_pipeline(wrap: Wrap) -> object:
    """pipeline("text-generation") with one prompt, a batch of prompts, and sampling."""
    pipe = pipeline("text-generation", model=wrap(demo()), tokenizer=tokenizer())
    options = {"max_new_tokens": 30, "do_sample": False}
    found = [pipe(PROMPT, **options), pipe([PROMPT, "import os\n", "class Tree:\n"], batch_size=3, **options)]
    torch.manual_seed(3)
    return [*found, pipe(PROMPT, max_new_tokens=30, do_sample=True, temperature=0.7)]


@client("lm-eval")
def lm_eval_tasks(wrap: Wrap) -> object:
    """HFLM on three local tasks, generate_until, multiple_choice and loglikelihood_rolling: scores, answers."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    lines = [{"text": f"def f{i}(x):\n    return", "answer": " x", "choices": [" x", " None"]} for i in range(8)]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "lines.jsonl")
        file.write_text("".join(json.dumps(line | {"label": i % 2}) + "\n" for i, line in enumerate(lines)))
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(file)}, "cache_dir": folder}}

        def task(kind: str, target: str, metric: str, **settings) -> dict:
            asked = {"task": kind, "output_type": kind, "doc_to_text": "{{text}}", "doc_to_target": target}
            return {**data, **asked, "test_split": "test", "metric_list": [{"metric": metric}], **settings}

        stop = {"until": ["\n\n"], "max_gen_toks": 20}
        tasks = [
            task("generate_until", "{{answer}}", "exact_match", generation_kwargs=stop),
            task("multiple_choice", "label", "acc", doc_to_choice="choices"),
            task("loglikelihood_rolling", "{{text}}", "bits_per_byte", doc_to_text=""),
        ]
        model = HFLM(pretrained=wrap(demo()), tokenizer=tokenizer(), batch_size=2, max_length=512)
        results = simple_evaluate(model=model, tasks=tasks, bootstrap_iters=0)
    answers = {task: [sample["resps"] for sample in samples] for task, samples in results["samples"].items()}
    return results["results"], answers


@client("xgrammar")
def xgrammar_constraint(wrap: Wrap) -> object:
    """JSON by xgrammar's LogitsProcessor, greedy and sampled: texts."""
    import xgrammar

    model, tokens = wrap(demo()), tokenizer()
    info = xgrammar.TokenizerInfo.from_huggingface(tokens, vocab_size=model.config.vocab_size)
    grammar = xgrammar.GrammarCompiler(info).compile_builtin_json_grammar()
    ids, found = tokens("data = ", return_tensors="pt").input_ids, []
    for do_sample in (False, True):
        torch.manual_seed(4)
        processor = [xgrammar.contrib.hf.LogitsProcessor(grammar)]
        found.append(model.generate(ids, max_new_tokens=60, do_sample=do_sample, logits_processor=processor).tolist())
    return [tokens.decode(one[0]) for one in found]


@client("outlines")
def outlines_constraint(wrap: Wrap) -> object:
    """A regular expression and a choice by outlines, greedy and sampled: texts."""
    import outlines

    model = outlines.from_transformers(wrap(demo()), tokenizer())
    found = []
    for do_sample in (False, True):
        torch.manual_seed(4)
        date = outlines.regex(r"[0-9]{4}-[0-9]{2}-[0-9]{2}( [a-z]{3,9}){3}")
        found.append(model("date = ", date, max_new_tokens=60, do_sample=do_sample))
        found.append(model("kind = ", outlines.types.Choice(["list", "tuple", "dictionary"]), do_sample=do_sample))
    return found


@client("langchain-huggingface")
def langchain_pipeline(wrap: Wrap) -> object:
    """HuggingFacePipeline: invoke, batch and stream."""
    from langchain_huggingface import HuggingFacePipeline

    pipe = pipeline("text-generation", model=wrap(demo()), tokenizer=tokenizer())
    chain = HuggingFacePipeline(pipeline=pipe).bind(pipeline_kwargs={"max_new_tokens": 30, "do_sample": False})
    return chain.invoke(PROMPT), chain.batch([PROMPT, "import os\n"]), list(chain.stream(PROMPT))


@client("llama-index-llms-huggingface")
def llama_index_llm(wrap: Wrap) -> object:
    """HuggingFaceLLM: complete and stream_complete."""
    from llama_index.llms.huggingface import HuggingFaceLLM

    options = {"context_window": 512, "max_new_tokens": 30, "generate_kwargs": {"do_sample": False}}
    llm = HuggingFaceLLM(model=wrap(demo()), tokenizer=tokenizer(), **options)
    return llm.complete(PROMPT).text, [piece.delta for piece in llm.stream_complete(PROMPT)]


@client("smolagents")
def smolagents_model(wrap: Wrap) -> object:
    """TransformersModel: an answer, an answer with a stop sequence, and a stream."""
    from smolagents import TransformersModel

    engine = TransformersModel(str(lookahead.DEMO_MODEL), device_map="cpu", torch_dtype="float32", max_new_tokens=30)
    engine.model, engine.tokenizer = wrap(engine.model), tokenizer()
    asked = [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]
    found = [engine.generate(asked, stop, do_sample=False).content for stop in (None, ["return"])]
    return [*found, [piece.content for piece in engine.generate_stream(asked, do_sample=False)]]


def differences(plain: object, wrapped: object, place: str = "") -> Iterator[str]:
    """List the differences of two results, which may be nested."""
    if isinstance(plain, dict) and isinstance(wrapped, dict) and plain.keys() == wrapped.keys():
        for key in plain:
            yield from differences(plain[key], wrapped[key], f"{place}[{key!r}]")
    elif isinstance(plain, list | tuple) and isinstance(wrapped, list | tuple) and len(plain) == len(wrapped):
        for i, pair in enumerate(zip(plain, wrapped, strict=True)):
            yield from differences(*pair, f"{place}[{i}]")
    elif isinstance(plain, torch.Tensor) and isinstance(wrapped, torch.Tensor):
        if plain.shape != wrapped.shape or plain.dtype != wrapped.dtype:
            yield f"{place}: {[*plain.shape]} {plain.dtype} became {[*wrapped.shape]} {wrapped.dtype}"
        elif not torch.equal(plain, wrapped):
            yield f"{place}: by up to {(plain - wrapped).abs().max():.3g}"
    elif type(plain) is not type(wrapped) or plain != wrapped:
        yield f"{place}: {plain!s:.100} became {wrapped!s:.100}"


def tried(run: Callable[[Wrap], object]) -> str:
    """Run a client both ways; return "equal", or the difference, or the error."""
    engines = []

    def wrap(model: PreTrainedModel) -> PreTrainedModel:
        model = lookahead.wrap(model, CONFIG)
        engines.append(model.lookahead)
        return model

    which = "plain"
    try:
        plain = run(lambda model: model)
        which = "wrapped"
        found = list(differences(plain, run(wrap)))
    except Exception as error:
        traceback.print_exc()
        return f"FAILS: the {which} model raises {type(error).__name__}: {error}"
    if found:
        return f"DIFFERS: in {len(found)} values, first {found[0]}"
    idle = sum(not engine.stats.steps for engine in engines)
    if idle or not engines:
        return f"FAILS: lookahead did not decode for {idle} of {len(engines)} wrapped models"
    return "equal"


@click.command(help=__doc__.split("\n")[0])
@click.argument("names", nargs=-1, type=click.Choice(list(CLIENTS)), metavar="[NAME]...")
def main(names: tuple[str, ...]) -> None:
    rows = []
    for name in names or CLIENTS:
        package, run = CLIENTS[name]
        try:
            package += f" {version(package)}"
            result = tried(run)
        except PackageNotFoundError:
            result = "NOT INSTALLED"
        rows.append((name, package, run.__doc__.rstrip("."), " ".join(result.split())))
        click.echo(f"{name}: {rows[-1][-1]}", err=True)
    click.echo(table(["client", "version", "compared", "result"], rows))
    sys.exit(int(any(row[-1] != "equal" for row in rows)))


if __name__ == "__main__":
    main()
