"""A wrapped model among the libraries that people use with generate(): the same tokens as without the wrap."""

import random
import re
from functools import cache

import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st
from outlines_core import Guide, Index, Vocabulary
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from test_lossless import random_cases, random_prompt
from torchao.quantization import (
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    quantize_,
)
from torchao.quantization.granularity import PerGroup
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    WatermarkDetector,
    WatermarkingConfig,
)
from transformers.generation import EosTokenCriteria, MaxLengthCriteria
from zoo import END, tiny_model

import lookahead
from lookahead import LookaheadConfig, compat
from lookahead.engine.sampling import NewTokensCriterion
from lookahead.tools.audit import _judge, audit, first_difference, next_logits
from lookahead.tools.loading import load

IDS = torch.tensor([[5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6]])
SAMPLING = {"do_sample": True, "temperature": 0.8, "top_k": 0, "top_p": 1.0}
GREEDY = {"do_sample": False}
HOT = SAMPLING | {"temperature": 2.0}


def generate(model, ids=IDS, seed=0, **options) -> list[int]:
    torch.manual_seed(seed)
    return model.generate(ids, **{"max_new_tokens": 40, **options})[0, ids.shape[1] :].tolist()


def check_same(model, expected: list[int], **options) -> None:
    """A wrapped model writes the same text as before, and lookahead has accepted a guess."""
    assert generate(model, **options) == expected
    assert model.lookahead.last.steps > 0, "the model's own decoding took over"
    assert model.lookahead.last.tokens == len(expected)


@pytest.fixture
def model():
    return tiny_model("llama", seed=3)


# -- guided decoding --------------------------------------------------------------------------------------------------

# Two tokens end a text and pad it; all others are characters or pairs of characters.
LETTERS = {token: chr(ord(" ") + token - 3) for token in range(3, 90)}
PIECES = {**LETTERS, 90: '{"', 91: '":', 92: "},", 93: "12", 94: "ab", 95: ", ", 96: "10"}
REGEX = r'\[(\{"(a|b|ab|id)":(true|false|[1-9][0-9]{0,2})\},){4,9}\]'


class Guided(LogitsProcessor):
    """Rules out what a grammar does not allow; its guide goes forward by the one token that was emitted."""

    def __init__(self, index: Index):
        self.guide = Guide(index)
        self.calls = 0

    def __call__(self, input_ids, scores):
        if self.calls:
            self.guide.advance(int(input_ids[0, -1]))  # raises if the grammar does not allow it
        assert input_ids.shape[1] == IDS.shape[1] + self.calls, "once for every emitted token, in order"
        self.calls += 1
        allowed = torch.full_like(scores, -torch.inf)
        allowed[:, self.guide.get_tokens()] = 0
        return scores + allowed


@pytest.mark.parametrize(
    "options", [GREEDY, SAMPLING, SAMPLING | {"temperature": 2.0}], ids=["greedy", "sampled", "hot"]
)
def test_guided_by_a_grammar(model, options):
    vocabulary = Vocabulary(END, {piece: [token] for token, piece in PIECES.items()})
    index = Index(REGEX, vocabulary)
    accepted = 0
    for seed in range(4):
        theirs, ours = Guided(index), Guided(index)
        settings = {**options, "max_new_tokens": 200}
        expected = generate(model, seed=seed, logits_processor=LogitsProcessorList([theirs]), **settings)
        lookahead.wrap(model, LookaheadConfig(window_size=3))
        check_same(model, expected, seed=seed, logits_processor=LogitsProcessorList([ours]), **settings)
        accepted += model.lookahead.last.accepted.total()
        lookahead.unwrap(model)
        assert ours.calls == theirs.calls == len(expected)
        assert ours.guide.get_state() == theirs.guide.get_state()
        if expected[-1] == END:
            text = "".join(PIECES[token] for token in expected[:-1])
            assert re.fullmatch(REGEX, text), text
    assert accepted > 0


# -- adapters ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def adapted(model):
    """Two adapters of random weights, each of which changes the text."""
    settings = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings), adapter_name="one")
    adapted.add_adapter("two", LoraConfig(task_type="CAUSAL_LM", **settings))
    return adapted.eval()


@pytest.mark.parametrize("options", [GREEDY, SAMPLING], ids=["greedy", "sampled"])
def test_peft_adapters_switched_after_wrapping(adapted, options):
    def texts():
        by = {}
        for name in ("one", "two"):
            adapted.set_adapter(name)
            by[name] = generate(adapted, **options, input_ids=IDS)
        with adapted.disable_adapter():
            by["none"] = generate(adapted, **options, input_ids=IDS)
        return by

    def generate(peft_model, input_ids, **options):
        torch.manual_seed(0)
        return peft_model.generate(input_ids=input_ids, max_new_tokens=40, **options)[0].tolist()

    expected = texts()
    assert len(set(map(str, expected.values()))) == 3
    assert lookahead.wrap(adapted) is adapted
    assert texts() == expected
    assert adapted.lookahead.stats.calls == 3
    assert adapted.lookahead.last.steps > 0
    lookahead.unwrap(adapted)
    assert texts() == expected
    assert not hasattr(adapted, "lookahead")


@pytest.mark.parametrize("kind", [PromptTuningConfig, PrefixTuningConfig])
def test_peft_prompts_that_are_learned(model, kind):
    """PEFT adds them in its own prepare_inputs_for_generation, which lookahead does not call."""
    tuned = get_peft_model(model, kind(task_type="CAUSAL_LM", num_virtual_tokens=4)).eval()
    expected = tuned.generate(input_ids=IDS, max_new_tokens=20, do_sample=False).tolist()
    # PEFT 0.21.2 loses prefixes with transformers 5.24, because it passes them by the old name.
    has_effect = kind is PromptTuningConfig or compat.CACHE == "past_key_values"
    assert not has_effect or expected != model.generate(IDS, max_new_tokens=20, do_sample=False).tolist()
    lookahead.wrap(tuned)
    with pytest.warns(UserWarning, match="prepare_inputs_for_generation"):
        assert tuned.generate(input_ids=IDS, max_new_tokens=20, do_sample=False).tolist() == expected


def test_peft_base_model_wrapped_before_the_adapter(model):
    """Wrapping first and adapting afterwards: the adapter sits in the layers, below generate()."""
    torch.manual_seed(1)
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], init_lora_weights=False)
    adapted = get_peft_model(model, config)
    expected = adapted.generate(input_ids=IDS, max_new_tokens=40)
    base = adapted.get_base_model()
    lookahead.wrap(base)
    assert adapted.generate(input_ids=IDS, max_new_tokens=40).tolist() == expected.tolist()
    assert base.lookahead.last.steps > 0


# -- quantized weights and weights elsewhere --------------------------------------------------------------------------


@pytest.mark.parametrize("options", [GREEDY, SAMPLING], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "config",
    [
        Int8WeightOnlyConfig(),
        Int8WeightOnlyConfig(granularity=PerGroup(16)),
        IntxWeightOnlyConfig(torch.int4, PerGroup(16)),
    ],
    ids=["by output", "by group", "int4 by group"],
)
def test_torchao_weights_in_int8(model, config, options):
    before = model(IDS).logits
    quantize_(model, config)
    assert not torch.equal(model(IDS).logits, before), "nothing was quantized"
    expected = generate(model, **options)
    lookahead.wrap(model)
    check_same(model, expected, **options)
    assert model.lookahead.passes == "fused", "int8 weights are read as they are"


@pytest.mark.long
def test_torchao_activations_in_int8(model):
    """Scaled to int8 in every pass, an activation at the edge of two steps goes either way by rounding: near ties."""
    quantize_(model, Int8DynamicActivationInt8WeightConfig())
    rng = random.Random(0)
    tallies = audit(model, [random_prompt(rng) for _ in range(6)], 40, temperature=0.8)
    assert [tally.unexplained for tally in tallies] == [[]] * len(tallies)


@pytest.mark.parametrize("options", [GREEDY, SAMPLING], ids=["greedy", "sampled"])
@pytest.mark.parametrize("offloaded", ["nothing", "model.layers.0", "model.layers.1", "lm_head"])
def test_accelerate_device_maps(model, tmp_path, offloaded, options):
    """Layers on disk have their parameters on the meta device, and come to the CPU for each pass."""
    expected = generate(model, **options)
    model.save_pretrained(tmp_path / "model")
    parts = ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head"]
    device_map = {"": "cpu"}
    if offloaded != "nothing":
        device_map = {part: "disk" if part == offloaded else "cpu" for part in parts}
    mapped = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "offloaded", dtype=torch.float32
    )
    on_meta = {name for name, parameter in mapped.named_parameters() if parameter.is_meta}
    assert bool(on_meta) == (offloaded != "nothing")
    assert all(name.startswith(offloaded) for name in on_meta)
    lookahead.wrap(mapped)
    check_same(mapped, expected, **options)


# -- contexts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [GREEDY, SAMPLING], ids=["greedy", "sampled"])
@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_gradient_modes(model, context, options):
    expected = generate(model, **options)
    with context():
        assert generate(model, **options) == expected
        lookahead.wrap(model)
        check_same(model, expected, **options)
    check_same(model, expected, **options)


@pytest.mark.parametrize("options", [GREEDY, SAMPLING], ids=["greedy", "sampled"])
def test_autocast(model, options):
    """In bf16 by autocast, texts are the same or part at a near tie."""
    same = 0
    for seed in range(6):
        lookahead.wrap(model)
        with torch.autocast("cpu", torch.bfloat16):
            ours = generate(model, seed=seed, **options)
            assert model.lookahead.last.steps > 0
            lookahead.unwrap(model)
            torch.manual_seed(seed)
            plain = model.generate(IDS, max_new_tokens=40, return_dict_in_generate=True, output_logits=True, **options)
            text = plain.sequences[0, IDS.shape[1] :].tolist()
            passes = [torch.cat(plain.logits).float(), next_logits(model, IDS, text)]
        exact = next_logits(model, IDS, text)
        assert (passes[1] - exact).abs().max() > 1e-4, "autocast did nothing"
        index = first_difference(ours, text)
        if index is None:
            same += 1
            continue
        tokens, temperature = [text[index], ours[index]], options.get("temperature", 0.0)
        divergence = _judge(seed, index, tokens, exact, passes, torch.bfloat16, temperature)
        assert divergence.near_tie, divergence
    assert same > 0


# -- every option of sampling -----------------------------------------------------------------------------------------

SYNTH_ID = SynthIDTextWatermarkingConfig(ngram_len=3, keys=[654, 400, 836, 123, 340, 443, 597, 160, 57])
OF_SAMPLING = [
    {"temperature": 0.3},
    {"temperature": 1.7},
    {"top_k": 3},
    {"top_p": 0.5},
    {"min_p": 0.2},
    {"top_h": 0.4},
    {"typical_p": 0.4},
    {"epsilon_cutoff": 0.03},
    {"eta_cutoff": 0.1},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.9, "temperature": 1.2},
]
OF_BOTH = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.5},
    {"encoder_repetition_penalty": 1.5},
    {"no_repeat_ngram_size": 2},
    {"encoder_no_repeat_ngram_size": 1},
    {"bad_words_ids": [[10], [11, 12], *[[token] for token in range(20, 40)]]},
    {"sequence_bias": {(10,): 4.0, (11, 12): 3.0, (20,): -5.0}},
    {"suppress_tokens": list(range(30, 60))},
    {"begin_suppress_tokens": list(range(3, 60))},
    {"forced_eos_token_id": END, "min_new_tokens": 40},
    {"forced_bos_token_id": 40},
    {"exponential_decay_length_penalty": (5, 1.5)},
    {"min_new_tokens": 40, "eos_token_id": list(range(1, 50))},
    {"min_length": 40, "eos_token_id": list(range(1, 50))},
    {"eos_token_id": [END, *range(60, 97)]},
    {"max_length": 30, "max_new_tokens": None},
    {"prefix_allowed_tokens_fn": lambda _, ids: [3 + (len(ids) + i) % 40 for i in range(9)]},
    {"watermarking_config": WatermarkingConfig(bias=4.0, seeding_scheme="lefthash")},
    {"watermarking_config": WatermarkingConfig(bias=4.0, seeding_scheme="selfhash", context_width=2)},
    {"watermarking_config": SYNTH_ID},
    {"guidance_scale": 1.7},
    {"guidance_scale": 2.5, "negative_prompt_ids": torch.tensor([[9, 9, 9, 4]])},
]
WITHOUT_EFFECT = [  # on these texts
    {"renormalize_logits": True},
    {"remove_invalid_values": True},
    {"max_time": 60.0},
    {"use_cache": False},
    {"prefill_chunk_size": 5},
    {"diversity_penalty": 0.0},
    {"num_beams": 1},
    {"low_memory": False},
]


def named(options: dict) -> str:
    return ",".join(f"{name}={type(value).__name__}" for name, value in options.items())


def three_texts(model, ids, **options) -> list[list[int]]:
    return [generate(model, ids, seed=seed, **options) for seed in range(3)]


@pytest.mark.filterwarnings("ignore")  # generate() has words of its own on some options
@pytest.mark.parametrize(
    ("options", "way"),
    [
        *[(options, SAMPLING) for options in OF_SAMPLING + OF_BOTH + WITHOUT_EFFECT],
        *[(options, GREEDY) for options in OF_BOTH + WITHOUT_EFFECT],
    ],
    ids=lambda value: {id(SAMPLING): "sampled", id(GREEDY): "greedy"}.get(id(value)) or named(value),
)
def test_options(model, options, way):
    ids = IDS[:, :1] if "forced_bos_token_id" in options else IDS  # which is for prompts of one token
    expected = three_texts(model, ids, **way | options)
    if way is SAMPLING and options not in WITHOUT_EFFECT:
        assert expected != three_texts(model, ids, **way), "the option does nothing here, so nothing is tested"
    lookahead.wrap(model, LookaheadConfig(window_size=2))
    assert three_texts(model, ids, **way | options) == expected
    assert model.lookahead.stats.calls == 3, "the model's own decoding took over"
    assert model.lookahead.stats.tokens == sum(map(len, expected))


@pytest.mark.parametrize("options", [GREEDY, SAMPLING], ids=["greedy", "sampled"])
def test_stop_strings_across_tokens(options):
    """Every string that spans two or three tokens of the text stops it, wherever in a step it lies."""
    model, tokenizer = load(None)
    ids = tokenizer("def read_lines(path):\n", return_tensors="pt").input_ids
    text = generate(model, ids, max_new_tokens=60, **options)
    pieces = [tokenizer.decode([token]) for token in text]
    stops = []
    for i in range(0, len(pieces) - 2, 4):  # the end of one token, all of the next, the beginning of the third
        stop = pieces[i][-1:] + pieces[i + 1] + pieces[i + 2][:1]
        if "\N{REPLACEMENT CHARACTER}" not in stop:
            stops.append(stop)
    assert len(stops) > 3
    expected = [
        generate(model, ids, max_new_tokens=60, stop_strings=[s], tokenizer=tokenizer, **options) for s in stops
    ]
    assert any(len(short) < len(text) for short in expected)
    lookahead.wrap(model)
    for stop, short in zip(stops, expected, strict=True):
        ours = generate(model, ids, max_new_tokens=60, stop_strings=[stop], tokenizer=tokenizer, **options)
        assert ours == short, stop


class EndsBehind(NewTokensCriterion):
    """Ends a text after a number of tokens, and records what it was shown."""

    def __init__(self, prompt, most):
        self._prompt, self._most, self.seen = prompt, most, []

    def ends(self, new):
        self.seen.append(list(new))
        return len(new) >= self._most

    def __call__(self, input_ids, scores, **kwargs):
        return torch.tensor([self.ends(input_ids[0, self._prompt :].tolist())])


@cache
def packaged():
    model, tokenizer = load(None)
    ids = tokenizer("def read_lines(path):\n", return_tensors="pt").input_ids
    return model, tokenizer, ids, tokenizer.decode(generate(model, ids, max_new_tokens=60))


@random_cases(30)
@given(
    cuts=st.lists(st.tuples(st.integers(0, 150), st.integers(1, 6)), max_size=3),
    strange=st.lists(st.text("\n ab(é", min_size=1, max_size=3), max_size=2),
    most=st.integers(1, 60),
    eos=st.integers(0, 59),
    way=st.sampled_from([GREEDY, SAMPLING]),
    budget=st.sampled_from([0, 3, 16]),
)
def test_what_ends_a_text_is_asked_without_tensors(cuts, strange, most, eos, way, budget):
    """Where a text ends by its tokens alone, no criterion of transformers is called for a token that cannot end it."""
    note(f"{cuts=} {strange=} {most=} {eos=} {way=} {budget=}")
    model, tokenizer, ids, text = packaged()
    stops = [cut for begin, length in cuts if (cut := text[begin : begin + length])] + strange
    options = way | {"max_new_tokens": 60, "eos_token_id": [0, tokenizer(text).input_ids[eos]]}
    options |= {"stop_strings": stops, "tokenizer": tokenizer} if stops else {}
    theirs, ours = (EndsBehind(ids.shape[1], most) for _ in range(2))
    expected = generate(model, ids, **options, stopping_criteria=[theirs])
    lookahead.wrap(model, LookaheadConfig(budget=budget))
    try:
        with pytest.MonkeyPatch.context() as patched:
            for criterion in (EosTokenCriteria, MaxLengthCriteria):
                patched.setattr(criterion, "__call__", None)
            found = generate(model, ids, **options, stopping_criteria=[ours])
    finally:
        lookahead.unwrap(model)
    assert found == expected
    assert ours.seen == theirs.seen


def test_an_empty_stop_string_ends_everything():
    model, tokenizer, ids, _ = packaged()
    options = {"stop_strings": ["", "never written"], "tokenizer": tokenizer, **GREEDY}
    expected = generate(model, ids, **options)
    lookahead.wrap(model)
    assert generate(model, ids, **options) == expected
    lookahead.unwrap(model)


def test_max_time_stops_between_tokens_of_a_step(model):
    """A clock that is read once a token stops both ways at the same token."""

    class Clock(StoppingCriteria):
        def __init__(self, tokens):
            self.left = tokens

        def __call__(self, input_ids, scores, **kwargs):
            self.left -= 1
            return torch.full((input_ids.shape[0],), self.left <= 0)

    for tokens in (1, 2, 7, 20):
        expected = generate(model, stopping_criteria=StoppingCriteriaList([Clock(tokens)]), **GREEDY)
        assert len(expected) == tokens
        lookahead.wrap(model)
        assert generate(model, stopping_criteria=StoppingCriteriaList([Clock(tokens)]), **GREEDY) == expected
        assert generate(model, max_time=1e-9, **GREEDY) == expected[:1], "the real clock has run out after one token"
        lookahead.unwrap(model)


def test_a_watermark_is_detected(model):
    """The text of a wrapped model carries the watermark, by transformers' own detector."""
    config = WatermarkingConfig(bias=6.0)
    detector = WatermarkDetector(model.config, "cpu", config, ignore_repeated_ngrams=True)
    lookahead.wrap(model)
    options = {"max_new_tokens": 80, "min_new_tokens": 80, **SAMPLING}
    for seed in range(3):
        torch.manual_seed(seed)
        marked = model.generate(IDS, watermarking_config=config, **options)[:, IDS.shape[1] :]
        assert detector(marked, return_dict=True).prediction.all()
    assert model.lookahead.stats.calls == 3
