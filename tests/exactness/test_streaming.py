"""`lookahead.stream`: the text of generate(), in pieces, whatever becomes of the loop that reads them."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerFast, StoppingCriteria
from zoo import tiny_model

import lookahead
from lookahead.streaming import TextPieces
from lookahead.tools.loading import load

PROMPT = "def add(a, b):\n    return"
CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


class Fault(Exception):
    pass


class Watch(StoppingCriteria):
    """Counts the tokens that it is shown, takes its time, and may raise or act at one of them."""

    def __init__(self, at: int = 0, act=None, pause: float = 0.0):
        self.at, self.act, self.pause, self.seen = at, act, pause, 0

    def __call__(self, input_ids, scores, **kwargs):
        self.seen += 1
        time.sleep(self.pause)
        if self.seen == self.at:
            self.act()
        return torch.zeros(1, dtype=torch.bool)


class Script(LogitsProcessor):
    """Makes the model write given tokens."""

    def __init__(self, ids: list[int], prompt_length: int):
        self.ids, self.prompt_length = ids, prompt_length

    def __call__(self, input_ids, scores):
        scores = torch.full_like(scores, -1e9)
        scores[:, self.ids[input_ids.shape[1] - self.prompt_length]] = 0
        return scores


@pytest.fixture(params=["plain", "wrapped"])
def loaded(request):
    model, tokenizer = load(None)
    if request.param == "wrapped":
        lookahead.wrap(model)
    yield model, tokenizer
    assert [thread.name for thread in threading.enumerate() if thread.name == "lookahead.stream"] == []


def text_of(model, tokenizer, inputs, **options) -> str:
    output = model.generate(**inputs, **options, tokenizer=tokenizer)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 100},
        {"max_new_tokens": 100, "min_new_tokens": 100, "do_sample": True, "temperature": 1.2},
        {"max_new_tokens": 1},
        {"max_new_tokens": 60, "stop_strings": ["self", "\n\n"]},
    ],
    ids=str,
)
def test_pieces_join_to_the_text(loaded, options):
    model, tokenizer = loaded
    inputs = tokenizer(PROMPT, return_tensors="pt")
    torch.manual_seed(5)
    expected = text_of(model, tokenizer, inputs, **options)
    state = torch.get_rng_state()
    torch.manual_seed(5)
    pieces = list(lookahead.stream(model, tokenizer, PROMPT, **options))
    assert "".join(pieces) == expected
    assert torch.equal(torch.get_rng_state(), state)
    assert all(pieces)
    assert len(pieces) > options["max_new_tokens"] // 4 or "stop_strings" in options


def test_pieces_come_while_the_text_is_written(loaded):
    model, tokenizer = loaded
    read, allowed = threading.Event(), []

    def wait_for_the_reader():
        allowed.append(read.wait(timeout=60))

    pieces = lookahead.stream(
        model, tokenizer, PROMPT, max_new_tokens=30, stopping_criteria=[Watch(10, wait_for_the_reader)]
    )
    assert next(pieces)
    read.set()
    assert "".join(pieces)
    assert allowed == [True]


def test_prompts(loaded):
    model, tokenizer = loaded
    tokenizer.chat_template = CHAT
    inputs = tokenizer(PROMPT, return_tensors="pt")
    written = "".join(lookahead.stream(model, tokenizer, PROMPT, max_new_tokens=20))
    assert "".join(lookahead.stream(model, tokenizer, inputs, max_new_tokens=20)) == written
    assert "".join(lookahead.stream(model, tokenizer, dict(inputs), max_new_tokens=20)) == written
    question = {"role": "user", "content": "def add(a, b):"}
    begun = {"role": "assistant", "content": "    return a"}
    for messages, rendered in (
        ([question], "<user>def add(a, b):\n<assistant>"),
        ([question, begun], "<user>def add(a, b):\n<assistant>    return a"),
    ):
        expected = text_of(model, tokenizer, tokenizer(rendered, return_tensors="pt"), max_new_tokens=30)
        assert "".join(lookahead.stream(model, tokenizer, messages, max_new_tokens=30)) == expected


@pytest.mark.parametrize("do_sample", [False, True])
def test_continuing_the_assistants_message_is_lossless(do_sample):
    model, tokenizer = load(None)
    tokenizer.chat_template = CHAT
    messages = [
        {"role": "user", "content": "Write a loop."},
        {"role": "assistant", "content": "for index in range("},
    ]
    inputs = tokenizer.apply_chat_template(messages, continue_final_message=True, return_tensors="pt", return_dict=True)
    options = {"max_new_tokens": 80, "do_sample": do_sample, "temperature": 0.8 if do_sample else None}
    torch.manual_seed(1)
    expected = model.generate(**inputs, **options)
    text = tokenizer.decode(expected[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    lookahead.wrap(model)
    torch.manual_seed(1)
    assert model.generate(**inputs, **options).tolist() == expected.tolist()
    assert model.lookahead.last.tokens == expected.shape[1] - inputs["input_ids"].shape[1]
    torch.manual_seed(1)
    assert "".join(lookahead.stream(model, tokenizer, messages, **options)) == text


@pytest.mark.parametrize("error", [Fault("mine"), KeyboardInterrupt(), torch.OutOfMemoryError("full")], ids=repr)
@pytest.mark.parametrize("at", [1, 2, 7])
def test_what_generate_raises_is_raised_here(loaded, error, at):
    model, tokenizer = loaded

    def fail():
        raise error

    pieces = lookahead.stream(model, tokenizer, PROMPT, max_new_tokens=50, stopping_criteria=[Watch(at, fail)])
    with pytest.raises(type(error)) as caught:
        list(pieces)
    assert caught.value is error


def test_errors_before_the_first_token(loaded):
    model, tokenizer = loaded
    with pytest.raises(ValueError, match="nonsense"):
        list(lookahead.stream(model, tokenizer, PROMPT, nonsense=3))
    with pytest.raises(ValueError, match="beam search"):
        list(lookahead.stream(model, tokenizer, PROMPT, num_beams=2, max_new_tokens=3))
    with pytest.raises(ValueError, match="num_return_sequences"):
        list(lookahead.stream(model, tokenizer, PROMPT, num_return_sequences=2, do_sample=True, max_new_tokens=3))


@pytest.mark.parametrize("how", ["close", "break", "error"])
def test_leaving_ends_generate_at_its_next_token(loaded, how):
    model, tokenizer = loaded
    watch = Watch(pause=0.02)
    seen = []

    def read(pieces):
        for _ in pieces:
            seen.append(watch.seen)
            if how == "error":
                raise Fault
            break
        if how == "close":
            pieces.close()

    pieces = lookahead.stream(model, tokenizer, PROMPT, max_new_tokens=800, stopping_criteria=[watch])
    if how == "error":
        with pytest.raises(Fault), closing(pieces):
            read(pieces)
    else:
        read(pieces)
    del pieces
    assert watch.seen <= seen[0] + 2


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_ctrl_c_while_the_loop_waits(loaded):
    model, tokenizer = loaded
    watch = Watch(5, lambda: os.kill(os.getpid(), signal.SIGINT), pause=0.02)
    with pytest.raises(KeyboardInterrupt):
        for _ in lookahead.stream(model, tokenizer, PROMPT, max_new_tokens=800, stopping_criteria=[watch]):
            pass
    assert watch.seen <= 5 + 3


def test_nothing_runs_before_the_first_piece_is_asked_for(loaded):
    model, tokenizer = loaded
    watch = Watch()
    lookahead.stream(model, tokenizer, PROMPT, max_new_tokens=20, stopping_criteria=[watch]).close()
    assert watch.seen == 0


@pytest.mark.long
def test_a_stream_left_open_does_not_hold_up_the_end_of_the_process():
    program = """
import time, lookahead
from transformers import LogitsProcessor
from lookahead.tools.loading import load
class Slow(LogitsProcessor):
    def __call__(self, input_ids, scores):
        time.sleep(0.5)
        return scores
model, tokenizer = load(None)
pieces = lookahead.stream(model, tokenizer, "def", max_new_tokens=900, logits_processor=[Slow()])
print(repr(next(pieces)))
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0
    assert result.stdout
    assert "Traceback" not in result.stderr


def test_autocast_reaches_the_thread(loaded):
    model, tokenizer = loaded
    seen = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        assert list(lookahead.stream(model, tokenizer, PROMPT, max_new_tokens=3))
    assert set(seen) == {torch.bfloat16}
    seen.clear()
    list(lookahead.stream(model, tokenizer, PROMPT, max_new_tokens=3))
    assert set(seen) == {torch.float32}


@pytest.mark.parametrize(
    ("prompt", "options", "error", "words"),
    [
        (5, {}, TypeError, "not int"),
        ([1, 2, 3], {}, TypeError, r"not the list \[1, 2, 3\]"),
        ([], {}, TypeError, "chat messages"),
        (torch.tensor([[1, 2]]), {}, TypeError, "not Tensor"),
        ({"input_ids": torch.ones((2, 3), dtype=torch.long)}, {}, ValueError, r"\(2, 3\).* one by one"),
        ({"input_ids": [[1, 2]]}, {}, ValueError, "not list"),
        ({"attention_mask": torch.ones((1, 3))}, {}, ValueError, "input_ids"),
        ([{"role": "user", "content": "x"}], {}, ValueError, "chat_template"),
        ("x", {"streamer": object()}, ValueError, "its own streamer"),
        ("x", {"custom_generate": lookahead.decode}, ValueError, "wrapped model"),
    ],
)
def test_bad_input_is_named(prompt, options, error, words):
    model, tokenizer = load(None)
    with pytest.raises(error, match=words):
        lookahead.stream(model, tokenizer, prompt, **options)


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """Words with the space before them, which is dropped where a text starts, and bytes for the unknown."""
    words = [
        "<unk>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "\u2581",
        "\u2581the",
        "\u2581cat",
        "s",
        ".",
        "\n",
    ]
    core = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", unk_token="<unk>")


def cleaning() -> PreTrainedTokenizerFast:
    """Words whose decoder takes spaces away before punctuation."""
    words = ["[UNK]", "do", "n't", "'", "s", ".", "?", ",", "'m", "'ve", "x"]
    core = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    core.decoder = decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[UNK]", clean_up_tokenization_spaces=True)


@pytest.mark.parametrize(
    "make", [lambda: load(None)[1], sentencepiece_like, cleaning], ids=["bytes", "words", "cleaning"]
)
def test_pieces_of_any_tokens_join_to_their_text(make):
    """Random tokens, which are torn characters for the most part, and real ones, in longer texts than are kept."""
    tokenizer = make()
    rng = random.Random(0)
    for case in range(60):
        if case % 2:
            ids = [rng.randrange(len(tokenizer)) for _ in range(rng.randint(1, 150))]
        else:
            texts = [
                "the cats.\n",
                "na\u00efve \u2192 ",
                "\u65e5\u672c\u8a9e",
                "\U0001f600",
                "  x",
                "do n't . ",
                "\n\n the",
            ]
            ids = tokenizer("".join(rng.choices(texts, k=40)), add_special_tokens=False).input_ids
        pieces = TextPieces(tokenizer)
        joined = ""
        for token in ids:
            piece = pieces.add([token])
            joined += piece
        assert joined + pieces.rest() == tokenizer.decode(ids, skip_special_tokens=True), (case, ids)


def test_a_space_after_many_special_tokens_is_kept():
    tokenizer = sentencepiece_like()
    the, cat = tokenizer.convert_tokens_to_ids(["\u2581the", "\u2581cat"])
    pieces = TextPieces(tokenizer)
    for ids in ([the] * 40, [tokenizer.eos_token_id] * 40, [cat]):
        joined = [pieces.add([token]) for token in ids]
    assert joined == [" cat"]


def test_characters_are_never_cut(loaded):
    model, tokenizer = loaded
    text = "na\u00efve \u2192 \u65e5\u672c \U0001f600 done\n  and more"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert len(ids) > len(text) // 2
    inputs = tokenizer(PROMPT, return_tensors="pt")
    script = Script(ids, inputs.input_ids.shape[1])
    pieces = list(
        lookahead.stream(
            model, tokenizer, inputs, max_new_tokens=len(ids), logits_processor=LogitsProcessorList([script])
        )
    )
    assert "".join(pieces) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert len(pieces) > 10


def test_sliding_layers():
    model, tokenizer = tiny_model("gemma2", vocab_size=4096), load(None)[1]
    inputs = tokenizer(PROMPT, return_tensors="pt")
    expected = text_of(model, tokenizer, inputs, max_new_tokens=40)
    lookahead.wrap(model)
    assert "".join(lookahead.stream(model, tokenizer, PROMPT, max_new_tokens=40)) == expected
    assert model.lookahead.last.steps > 0
