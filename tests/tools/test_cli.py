import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import click
import gguf
import pytest
import torch
import unpack_gguf
from click.testing import CliRunner
from transformers import AutoModelForCausalLM
from zoo import tiny_model

from lookahead import DEMO_MODEL
from lookahead.cpu.gguf import BlocksLinear
from lookahead.tools import commands, loading
from lookahead.tools.cli import main
from lookahead.tools.files import read_text
from lookahead.tools.loading import load
from lookahead.tools.terminal import StepStreamer
from ngram_pool import NgramPool, Origin

BINARY = DEMO_MODEL / "model.safetensors"
PROMPT = "def add(a, b):\n"


def run(*arguments, **options):
    return CliRunner().invoke(main, ["generate", *arguments], **options)


def test_generate_prints_the_models_own_text():
    result = run(PROMPT, "--max-new-tokens", "40")
    assert result.exit_code == 0, result.output
    model, tokenizer = load(None)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    expected = tokenizer.decode(model.generate(ids, max_new_tokens=40)[0, ids.shape[1] :], skip_special_tokens=True)
    assert result.stdout == expected + "\n"
    assert run(PROMPT, "--max-new-tokens", "40", "--no-stream").stdout == result.stdout


def as_gguf(path, kind=gguf.GGMLQuantizationType.F32):
    """Write the packaged model to a GGUF file, as llama.cpp keeps a Llama: in its names, heads' halves interleaved.

    kind: of its matrices.
    """
    model, words = load(None)[0], json.loads((DEMO_MODEL / "tokenizer.json").read_text())["model"]
    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(words["vocab"], key=words["vocab"].get))
    writer.add_token_merges([" ".join(pair) for pair in words["merges"]])
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weight = weight.view(-1, 2, config.head_dim // 2, config.hidden_size).transpose(1, 2).flatten(0, 2)
        if name != "lm_head.weight":  # it is the embedding
            its = kind if weight.ndim == 2 else gguf.GGMLQuantizationType.F32
            numbers = gguf.quantize(weight.contiguous().numpy(), its)
            writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), numbers, raw_dtype=its)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file(tmp_path, monkeypatch):
    file = tmp_path / "tiny.gguf"
    as_gguf(file)
    command = (PROMPT, "--max-new-tokens", "40")
    result = run(*command, "--model", str(file))
    assert result.exit_code == 0, result.output
    assert result.stdout == run(*command).stdout
    assert load(str(file))[0].config.name_or_path == "tiny.gguf"
    assert "cannot load the model on cpu" in run(PROMPT, "--model", str(tmp_path / "other.gguf")).stderr
    monkeypatch.setattr(loading, "is_gguf_available", lambda: False)
    assert "pip install gguf" in run(PROMPT, "--model", str(file)).stderr


@pytest.mark.parametrize("options", [(), ("--do-sample", "--seed", "5")])
def test_commands_leave_weights_in_the_blocks_of_a_file(tmp_path, options):
    """The text is that of the model that transformers unpacks."""
    file = tmp_path / "tiny.gguf"
    as_gguf(file, gguf.GGMLQuantizationType.Q8_0)
    result = run(PROMPT, "--max-new-tokens", "40", "--model", str(file), *options)
    assert result.exit_code == 0, result.output
    model, tokenizer = load(str(file))
    assert type(model.lm_head) is BlocksLinear
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    torch.manual_seed(5)
    written = plain.generate(ids, max_new_tokens=40, do_sample=bool(options))[0, ids.shape[1] :]
    assert result.stdout == tokenizer.decode(written, skip_special_tokens=True) + "\n"


def test_a_gguf_file_as_a_folder(tmp_path):
    """Other libraries read the folder, and it holds the same model."""
    file, folder = tmp_path / "tiny.gguf", tmp_path / "tiny"
    as_gguf(file)
    options = ["--model", file, "--dtype", "float32", "--out", folder]
    result = CliRunner().invoke(unpack_gguf.main, [str(option) for option in options])
    assert result.exit_code == 0, result.output
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    command = (PROMPT, "--max-new-tokens", "40")
    assert run(*command, "--model", str(folder)).stdout == run(*command).stdout


@pytest.mark.parametrize("group", [(), ("pool",)])
def test_a_list_of_commands_cuts_no_sentence(group):
    listed = CliRunner().invoke(main, [*group, "--help"])
    assert listed.exit_code == 0
    assert "..." not in listed.stdout.partition("Commands:")[2]


@pytest.mark.parametrize(("seconds", "told"), [(0.7, False), (42.1, True)])
@pytest.mark.parametrize("options", [(), ("--json",)])
def test_the_end_says_what_the_next_run_will_not_wait_for(seconds, told, options, monkeypatch):
    monkeypatch.setattr(commands, "seconds_saved", lambda: seconds)
    result = run(PROMPT, "--max-new-tokens", "2", *options)
    message = "the next run starts 42 s sooner: it reuses what this one has measured\n"
    assert result.stderr.endswith(message) is told


@pytest.mark.parametrize("strategy", ["lookahead", "jacobi", "plain"])
def test_compare(strategy):
    result = run(PROMPT, "--max-new-tokens", "40", "--temperature", "0.6", "--seed", "3", "--compare", "--stats",
                 "--strategy", strategy)  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "; the texts are identical" in result.stdout
    assert "steps" in result.stderr


def test_json():
    result = run(PROMPT, "--max-new-tokens", "30", "--json", "--compare", "--window-size", "3", "--ngram-size", "2")
    answer = json.loads(result.stdout)
    assert answer["prompt"] == PROMPT
    assert answer["tokens"] == answer["stats"]["tokens"] == 30
    assert answer["plain"]["identical"] is True
    assert answer["stats"]["window_tokens"] > 0


def test_a_draft_model():
    arguments = [PROMPT, "--max-new-tokens", "40", "--temperature", "0.6", "--seed", "3"]
    result = run(*arguments, "--assistant", str(DEMO_MODEL), "--budget", "8", "--json", "--compare")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert answer["plain"]["identical"] is True
    assert answer["stats"]["accepted"]["DraftModelSource"] > 0
    chatted = CliRunner().invoke(
        main, ["chat", "--max-new-tokens", "8", "--assistant", str(DEMO_MODEL), "--budget", "8"], input=PROMPT
    )
    assert chatted.exit_code == 0, chatted.output


def test_a_draft_model_of_no_use_is_named(tmp_path):
    result = run(PROMPT, "--assistant", str(DEMO_MODEL), "--strategy", "plain")
    assert result.exit_code == 2
    assert "--assistant has no effect with --strategy plain" in result.stderr
    model, tokenizer = load(None)
    model.save_pretrained(tmp_path)
    tokenizer.add_tokens(["<another>"])
    tokenizer.save_pretrained(tmp_path)
    result = run(PROMPT, "--assistant", str(tmp_path))
    assert result.exit_code == 2
    assert "has another vocabulary than the model" in result.stderr


def test_prompts_from_elsewhere(tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT)
    here = run(PROMPT, "--max-new-tokens", "10").stdout
    assert run("-", "--max-new-tokens", "10", input=PROMPT).stdout == here
    assert run("--prompt-file", str(file), "--max-new-tokens", "10").stdout == here


def test_sampling_options_reach_generate():
    greedy = run(PROMPT, "--max-new-tokens", "30").stdout
    sampled = run(PROMPT, "--max-new-tokens", "30", "--temperature", "1.5", "--top-k", "0", "--seed", "1").stdout
    assert sampled != greedy
    assert run(PROMPT, "--max-new-tokens", "30", "--temperature", "1.5", "--top-k", "1").stdout == greedy
    assert run(PROMPT, "--max-new-tokens", "30", "--temperature", "0", "--top-k", "5").stdout == greedy


def test_what_passes_are_made_of_does_not_change_the_text():
    text = run(PROMPT, "--max-new-tokens", "30").stdout
    assert run(PROMPT, "--max-new-tokens", "30", "--no-cpu-kernels").stdout == text


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["chat", "--chat-template", str(BINARY)], "is not UTF-8"),
        (["audit", "--prompts", str(BINARY)], "is not UTF-8"),
        (["tune", "--picture", "/no/such/folder/x.png"], "'--picture': /no/such/folder/x.png"),
    ],
)
def test_bad_files_are_named(command, message):
    result = CliRunner().invoke(main, command)
    assert result.exit_code != 0
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_standard_input_that_is_no_text(tmp_path):
    for command in (["generate", "-", "--max-new-tokens", "5"], ["chat", "--max-new-tokens", "5"]):
        result = CliRunner().invoke(main, command, input=b"def \xff\n")
        assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
        assert "UTF-8" in result.stderr
    path = tmp_path / "text"
    path.write_bytes(b"def \xff\n")
    for errors in ("strict", "surrogateescape"):  # as standard input is opened in the C locale
        with open(path, encoding="utf-8", errors=errors) as file, pytest.raises(click.ClickException, match="UTF-8"):
            read_text(file)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "PROMPT"),
        ([""], "empty"),
        ([PROMPT, "--model", "./no/such/folder"], "no/such/folder"),
        ([PROMPT, "--device", "nonsense"], "nonsense"),
        ([PROMPT, "--window-size", "-1"], "--window-size"),
        ([PROMPT, "--window-size", "100000"], "--window-size"),
        ([PROMPT, "--window-size", "1000", "--ngram-size", "5"], "window_size=1000"),
        ([PROMPT, "--ngram-size", "1"], "--ngram-size"),
        ([PROMPT, "--ngram-size", "1000"], "--ngram-size"),
        ([PROMPT, "--budget", "-1"], "--budget"),
        ([PROMPT, "--budget", "999999999"], "--budget"),
        ([PROMPT, "--temperature", "-1"], "--temperature"),
        ([PROMPT, "--temperature", "0", "--do-sample"], "--do-sample"),
        (["--prompt-file", str(BINARY)], f"{BINARY} is not UTF-8"),
        ([PROMPT, "--top-p", "1.5"], "--top-p"),
        (["word " * 3000], "shorten the prompt"),
        (["--prompt-file", "/no/such/file"], "/no/such/file"),
    ],
)
def test_bad_input_is_named_and_fails(arguments, message):
    result = run(*arguments)
    assert result.exit_code != 0
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_the_context_caps_the_length():
    model, tokenizer = load(None)
    context = model.config.max_position_embeddings
    prompt = "x"
    while len(tokenizer(prompt).input_ids) < context - 30:
        prompt += " = x\n"
    length = len(tokenizer(prompt).input_ids)
    assert length < context
    result = run(prompt, "--max-new-tokens", "500", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["tokens"] <= context - length
    assert f"room for {context - length}" in result.stderr


def test_nan_logits_are_named(tmp_path):
    model = tiny_model("llama", vocab_size=4096)
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    model.save_pretrained(tmp_path)
    load(None)[1].save_pretrained(tmp_path)
    result = run(PROMPT, "--model", str(tmp_path))
    assert result.exit_code != 0
    assert "NaN" in result.stderr


def test_recurrent_models_are_refused(tmp_path):
    tiny_model("mamba", vocab_size=4096, state_size=4).save_pretrained(tmp_path)
    load(None)[1].save_pretrained(tmp_path)
    result = run(PROMPT, "--model", str(tmp_path))
    assert result.exit_code != 0
    assert "Its layers 0, 1 (linear_attention" in result.stderr


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_ctrl_c_in_mid_stream():
    command = [sys.executable, "-m", "lookahead", "generate", PROMPT, "--max-new-tokens", "900", "--temperature", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.read(10)  # it has begun
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"interrupted" in errors
    assert b"Traceback" not in errors


def test_streamer_writes_whole_characters_and_colours_steps(monkeypatch, capsys):
    _, tokenizer = load(None)
    text = "naïve → 日本\n  done"
    ids = tokenizer(text).input_ids
    steps = iter(range(100))
    for colour in (False, True):
        monkeypatch.setattr("sys.stdout.isatty", lambda colour=colour: colour)
        monkeypatch.setenv("TERM", "xterm")
        streamer = StepStreamer(tokenizer, lambda: next(steps))
        streamer.put(torch.tensor([[1, 2, 3]]))  # the prompt
        for token in ids:
            streamer.put(torch.tensor([token]))
        streamer.end()
        written = capsys.readouterr().out
        if colour:
            assert "\x1b[" in written
        else:
            assert written == text + "\n"


def test_packaged_model_has_a_card():
    card = (DEMO_MODEL / "README.md").read_text()
    for word in ("PSF", "seed", "held-out loss", "steps"):
        assert word in card


@pytest.fixture
def built(tmp_path):
    """Two files of text and the pool built from them."""
    files = [tmp_path / "one.py", tmp_path / "two.py"]
    files[0].write_text("def add(a, b):\n    return a + b\n" * 30)
    files[1].write_text("# Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.\n" * 20)
    out = tmp_path / "code.pool"
    result = pool("build", *map(str, files), "--out", str(out), "--memory-mb", "2")
    assert result.exit_code == 0, result.output
    assert "of 2 files" in result.stdout
    return files, out


def pool(*arguments):
    return CliRunner().invoke(main, ["pool", *arguments])


def test_a_built_pool_is_shown(built):
    files, out = built
    result = pool("show", str(out), "--top", "500")
    assert result.exit_code == 0, result.output
    assert "in 2.0 MiB" in result.stdout
    tokens = sum(len(load(None)[1](file.read_text(), add_special_tokens=False).input_ids) for file in files)
    assert f"{tokens:,} observations" in result.stdout
    assert "next tokens by source: file" in result.stdout
    assert "return" in result.stdout
    assert len(pool("show", str(out), "--top", "3").stdout.splitlines()) == 6


def test_a_built_pool_saves_steps_and_stays_as_it_is(built):
    _, out = built
    before = out.read_bytes()
    plain = run(PROMPT, "--max-new-tokens", "60", "--json")
    helped = run(PROMPT, "--max-new-tokens", "60", "--json", "--pool", str(out))
    assert helped.exit_code == 0, helped.output
    a, b = json.loads(plain.stdout), json.loads(helped.stdout)
    assert a["text"] == b["text"]
    assert a["stats"]["accepted"]["file"] == 0
    assert out.read_bytes() == before


def test_guesses_from_files_are_attributed(tmp_path):
    """A pool of the very text that the model will write."""
    model, tokenizer = load(None)
    ids = model.generate(tokenizer(PROMPT, return_tensors="pt").input_ids, max_new_tokens=60)[0].tolist()
    known = NgramPool(1)
    for _ in range(5):
        known.learn(ids, Origin.FILE)
    known.save(tmp_path / "known.pool")
    plain = json.loads(run(PROMPT, "--max-new-tokens", "60", "--json").stdout)
    helped = json.loads(run(PROMPT, "--max-new-tokens", "60", "--json", "--pool", str(tmp_path / "known.pool")).stdout)
    assert helped["text"] == plain["text"]
    assert helped["stats"]["steps"] < plain["stats"]["steps"]
    assert helped["stats"]["accepted"]["file"] > 0


def test_a_pool_of_another_vocabulary_is_refused(tmp_path):
    foreign = NgramPool(0.1, vocabulary="f00")
    foreign.learn([1, 2, 3] * 5)
    foreign.save(tmp_path / "foreign.pool")
    result = run(PROMPT, "--pool", str(tmp_path / "foreign.pool"))
    assert result.exit_code == 1
    assert "another vocabulary: f00" in result.output
    result = pool("show", str(tmp_path / "foreign.pool"))
    assert result.exit_code == 0
    assert "give --model" in result.stdout
    assert "[1, 2, 3] -> 1" in result.stdout


def test_building_loses_nothing(built, tmp_path):
    files, out = built
    assert "is not a pool file" in pool("build", str(files[0]), "--out", str(files[1])).output
    binary = tmp_path / "binary"
    binary.write_bytes(bytes(range(128, 256)))
    before = out.read_bytes()
    result = pool("build", str(files[0]), str(binary), "--out", str(out))
    assert result.exit_code == 1
    assert f"{binary} is not UTF-8" in result.output
    assert out.read_bytes() == before
    assert pool("build", str(files[0]), "--out", str(out), "--memory-mb", "1").exit_code == 0
    assert out.stat().st_size < len(before)


def test_building_goes_on_from_a_pool(built):
    files, out = built
    before = NgramPool.load(out)
    assert pool("build", str(files[1]), "--pool", str(out), "--out", str(out)).exit_code == 0
    after = NgramPool.load(out)
    again = len(load(None)[1](files[1].read_text(), add_special_tokens=False).input_ids)
    assert after.observations == before.observations + again
    assert after.nbytes == before.nbytes
    result = pool("build", str(files[1]), "--pool", str(out), "--memory-mb", "3", "--out", str(out))
    assert "--memory-mb is for a new pool" in result.output


def saved_pool(path, *texts, start=None, vocabulary="v"):
    made = NgramPool.load(start) if start else NgramPool(1, vocabulary)
    for text in texts:
        made.learn(text)
    made.save(path)
    return str(path)


def test_merged_pools_know_what_each_knew(tmp_path):
    parts = [saved_pool(tmp_path / f"{n}.pool", range(n, n + 20)) for n in (100, 200, 300)]
    result = pool("merge", *parts, "--out", parts[1])
    assert result.exit_code == 0, result.output
    assert "3 pools" in result.stdout
    merged = NgramPool.load(parts[1], vocabulary="v")
    for n in (100, 200, 300):
        assert merged.guess(range(n, n + 9), 4, chain=True).tokens.tolist() == list(range(n + 9, n + 13))
    assert merged.observations == 60
    assert NgramPool.load(parts[0]).observations == 20


def test_merging_since_a_base_counts_it_once(tmp_path):
    base = saved_pool(tmp_path / "base", [1, 2] * 3)
    replicas = [saved_pool(tmp_path / f"{n}", [n, n + 1], start=base) for n in (10, 20)]
    result = pool("merge", base, *replicas, "--since", base, "--out", base)
    assert result.exit_code == 0, result.output
    assert NgramPool.load(base).observations == 6 + 2 + 2
    result = pool("merge", *replicas, "--since", base, "--out", base)
    assert result.exit_code == 1
    assert f"{replicas[1]}: since has learned more" in result.output


def test_a_merge_that_is_refused_names_the_file_and_changes_nothing(tmp_path):
    ours = saved_pool(tmp_path / "ours", [1, 2, 3])
    foreign = saved_pool(tmp_path / "foreign", [1, 2, 3], vocabulary="f00")
    torn = tmp_path / "torn"
    torn.write_bytes((tmp_path / "ours").read_bytes()[:-9])
    for bad, message in ((foreign, "has another vocabulary: f00, not v"), (torn, "is truncated")):
        before = (tmp_path / "ours").read_bytes()
        result = pool("merge", ours, ours, str(bad), "--out", ours)
        assert result.exit_code == 1
        assert f"{bad} {message}" in result.output
        assert (tmp_path / "ours").read_bytes() == before
    result = pool("merge", ours, ours, "--since", foreign, "--out", ours)
    assert f"{foreign} has another vocabulary" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pool", "merge", "--out", "x"], "FILES"),
        (["pool", "merge", __file__, "--out", "x"], "at least two"),
        (["pool", "merge", __file__, __file__, "--out", "x"], "not a pool file"),
        (["pool", "merge", __file__, __file__, "--out", __file__], "would be lost"),
        (["pool", "build", "--out", "x"], "FILES"),
        (["pool", "build", "no-such-file", "--out", "x"], "no-such-file"),
        (["pool", "build", __file__, "--out", "x", "--memory-mb", "0.00001"], "memory_mb"),
        (["pool", "build", __file__, "--out", "no/such/folder/x"], "no/such/folder"),
        (["pool", "show", __file__], "not a pool file"),
        (["generate", PROMPT, "--pool", __file__], "not a pool file"),
        (["generate", PROMPT, "--pool", __file__, "--strategy", "jacobi"], "--pool"),
        (["pool", "show", "no-such-file"], "no-such-file"),
    ],
)
def test_pool_commands_name_bad_input(arguments, message):
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code in (1, 2)
    assert message in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("words", "expected"),
    [("", "generate"), ("po", "pool"), ("pool m", "merge"), ("generate --stra", "--strategy"),
     ("generate --strategy p", "plain")],
)  # fmt: skip
def test_the_shell_completes_commands_and_options(words, expected):
    variables = {"_LOOKAHEAD_COMPLETE": "bash_complete", "COMP_WORDS": f"lookahead {words}",
                 "COMP_CWORD": str(1 + words.count(" "))}  # fmt: skip
    result = CliRunner(env=variables).invoke(main, [], prog_name="lookahead")
    assert f"plain,{expected}" in result.output.splitlines()


BOM = "\N{ZERO WIDTH NO-BREAK SPACE}"  # with which editors on Windows begin a file


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path):
    def ids_of(*arguments, **options):
        return json.loads(run(*arguments, "--max-new-tokens", "8", "--json", **options).stdout)["text"]

    file = tmp_path / "prompt.txt"
    file.write_text(BOM + PROMPT, encoding="utf-8")
    expected = ids_of(PROMPT)
    assert ids_of("--prompt-file", str(file)) == expected
    assert ids_of("-", input=BOM + PROMPT) == expected
    chat = ["chat", "--max-new-tokens", "8"]
    plain, marked = (CliRunner().invoke(main, chat, input=begin + "import\n" + PROMPT) for begin in ("", BOM))
    assert plain.stdout == marked.stdout
    template = tmp_path / "template.jinja"
    template.write_text(BOM + "{{ messages[-1].content }}", encoding="utf-8")
    templated = CliRunner().invoke(main, [*chat, "--chat-template", str(template)], input="import\n")
    template.write_text("{{ messages[-1].content }}", encoding="utf-8")
    assert templated.stdout == CliRunner().invoke(main, [*chat, "--chat-template", str(template)], "import\n").stdout
    lines = tmp_path / "prompts.jsonl"
    lines.write_text(BOM + json.dumps({"prompt": PROMPT}) + "\n", encoding="utf-8")
    result = run("--prompts", str(lines), "--out", str(tmp_path / "out.jsonl"), "--max-new-tokens", "8")
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "out.jsonl").read_text())["text"] == expected
    lines.write_text(BOM + json.dumps({"question_id": 1, "category": "c", "turns": [PROMPT]}) + "\n", encoding="utf-8")
    audited = CliRunner().invoke(main, ["audit", "--prompts", str(lines), "--max-new-tokens", "4"])
    assert audited.exit_code == 0, audited.output
    built = [tmp_path / "marked.pool", tmp_path / "bare.pool"]
    for path, begin in zip(built, (BOM, ""), strict=True):
        file.write_text(begin + PROMPT, encoding="utf-8")
        assert pool("build", str(file), "--out", str(path), "--memory-mb", "1").exit_code == 0
    assert built[0].read_bytes() == built[1].read_bytes()


@pytest.fixture(scope="module")
def instruct(tmp_path_factory):
    """The packaged model with a chat template, like a chat model."""
    folder = tmp_path_factory.mktemp("instruct")
    model, tokenizer = load(None)
    model.save_pretrained(folder)
    tokenizer.chat_template = (
        "{% if messages[0].content == 'refuse' %}{{ raise_exception('no such system') }}{% endif %}"
        "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}def {% endif %}"
    )
    tokenizer.save_pretrained(folder)
    return str(folder)


RAW = "continued as raw text"


@pytest.mark.parametrize(
    ("options", "rendered"),
    [
        ([], "sort a list"),
        (["--chat"], "# user: sort a list\ndef "),
        (["--system", "Be brief."], "# system: Be brief.\n# user: sort a list\ndef "),
        (["--chat", "--system", "Be brief."], "# system: Be brief.\n# user: sort a list\ndef "),
    ],
)
def test_a_chat_model_is_asked_in_its_template(options, rendered, instruct, tmp_path):
    shared = ["--model", instruct, "--max-new-tokens", "12"]
    result = run("sort a list", *options, *shared)
    assert result.exit_code == 0, result.output
    assert result.stdout == run(rendered, "--max-new-tokens", "12").stdout
    assert (RAW in result.stderr) is (not options)
    out = tmp_path / "page.html"
    traced = CliRunner().invoke(main, ["trace", "sort a list", *options, *shared, "--out", str(out)])
    assert traced.stdout == result.stdout
    assert (RAW in traced.stderr) is (not options)


def test_what_a_chat_needs_is_named(instruct, tmp_path):
    for options in (["--chat"], ["--system", "x"]):
        result = run(PROMPT, *options)
        assert result.exit_code == 2
        assert (
            "the tokenizer of the packaged model has no chat template: leave out --chat and --system" in result.stderr
        )
        lines = run("--prompts", __file__, "--out", str(tmp_path / "x.jsonl"), *options)
        assert f"{options[0]} has no effect with --prompts" in lines.stderr
    result = run(PROMPT, "--model", instruct, "--system", "refuse")
    assert (result.exit_code, "no such system" in result.stderr) == (1, True)
    assert RAW not in run(PROMPT, "--max-new-tokens", "2").stderr


def test_texts_of_a_file_are_continued_raw_and_that_is_said(instruct, tmp_path):
    for number, (line, told) in enumerate(
        [({"prompt": "x"}, True), ({"messages": [{"role": "user", "content": "x"}]}, False)]
    ):
        path = tmp_path / f"{number}.jsonl"
        path.write_text(json.dumps(line))
        out = str(path.with_suffix(".out"))
        result = run("--prompts", str(path), "--out", out, "--model", instruct, "--max-new-tokens", "4")
        assert result.exit_code == 0, result.output
        assert (RAW in result.stderr) is told


@pytest.mark.skipif(os.name == "nt", reason="terminals")
def test_whatever_takes_long_says_so(tmp_path):
    """A user is told of each part that writes no text, each of which takes minutes for some model or machine."""
    import pty

    ours, theirs = pty.openpty()
    patient = "from ngram_pool import waiting; waiting.PATIENCE = 0.001; from lookahead.tools.cli import main; main()"
    saved = str(tmp_path / "x.pool")
    NgramPool(64).save(saved)
    arguments = ["generate", "# " + "words " * 500, "--max-new-tokens", "4", "--pool", saved, "--compare"]
    process = subprocess.Popen([sys.executable, "-c", patient, *arguments], stdout=subprocess.DEVNULL, stderr=theirs)
    os.close(theirs)
    told = ""
    with suppress(OSError):  # of a terminal that nobody writes to any more
        while part := os.read(ours, 1000):
            told += part.decode()
    os.close(ours)
    assert process.wait() == 0, told
    parts = (
        "loading torch and transformers",
        "loading the model",
        f"reading {saved}",
        "trying how",
        "reading the prompt",
        f"decoding plainly for comparison  [{'#' * 36}]  100%",
    )
    places = [told.find(part) for part in parts]
    assert -1 not in places, told
    assert places == sorted(places)
    assert told.count("trying") == 1, told
