"""The simulation of replicas on small traces: nothing is drafted from what is not known yet, and all is counted."""

import json
from collections import Counter
from copy import deepcopy

import numpy as np
import pytest
import simulate_replicas
from click.testing import CliRunner
from simulate_replicas import ALONE, choose_requests, main, passages, read_trace, route, serve, simulate, summary

from lookahead.tools.loading import load
from ngram_pool import NgramPool
from ngram_pool.kernels import LONGEST

DRAFTING = (4, 0.0)


@pytest.fixture
def trace(tmp_path):
    """12 prompts of 3 sessions with 3 answers each, from a Markov source that often says the same."""
    rng = np.random.default_rng(0)
    follows = rng.integers(0, 30, (30, 3))

    def text(length: int) -> list[int]:
        tokens = [int(rng.integers(30))]
        while len(tokens) < length:
            tokens.append(int(follows[tokens[-1], rng.choice(3, p=(0.8, 0.1, 0.1))]))
        return tokens

    lines = [
        {"session": f"s{n % 3}", "prompt": text(10 + n), "answers": [text(20), text(2), text(20), [7]]}
        for n in range(12)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def plainly(pool: NgramPool, request) -> tuple[int, int, int, int]:
    """`serve` token by token."""
    text = [*request.prompt.tolist(), *request.answer.tolist()]
    pool.learn(text[: len(request.prompt) + 1], source=0)
    at, steps, drafted, accepted = len(request.prompt) + 1, 0, 0, 0
    while at < len(text):
        steps += 1
        draft = pool.guess(text[:at], *DRAFTING, max_depth=len(text) - at - 1, chain=True).tokens.tolist()
        drafted += len(draft)
        new = []
        for token in [*draft, None]:
            new.append(text[at + len(new)])
            if token != new[-1]:
                break
            accepted += 1
        for index in range(at, at + len(new)):
            pool.calibrate([([-1] * LONGEST + text[:index])[-LONGEST:]], [[text[index]]], [[1.0]])
        for index in range(at, at + len(new)):
            pool.learn(text[: index + 1], start=index)
        at += len(new)
    return steps, len(request.answer) - 1, drafted, accepted


def test_a_request_is_served_as_token_by_token(trace):
    ours, plain = NgramPool(1), NgramPool(1)
    for prompt in read_trace(trace):
        for request in prompt:
            counts = serve(ours, request, *DRAFTING)
            assert counts == plainly(plain, request)
            steps, tokens, drafted, accepted = counts
            assert steps + accepted == tokens
            assert accepted <= drafted
    assert (ours.belief == plain.belief).all()
    assert ours.observations == plain.observations


def test_an_answer_of_new_tokens_is_never_guessed():
    request = simulate_replicas.Request("s", np.arange(10), np.arange(100, 130))
    pool = NgramPool(1)
    assert serve(pool, request, *DRAFTING)[::3] == (29, 0)
    assert serve(pool, request, *DRAFTING)[::3] == (6, 23)  # 29 tokens by fives, the last step without its fifth


def test_requests_of_today_and_yesterday_share_no_prompt(trace):
    prompts = read_trace(trace)
    assert [len(prompt) for prompt in prompts] == [3] * 12, "an answer of one token needs no step"
    today, yesterday = choose_requests(prompts, 7, False, 0)
    seen = [request.prompt.tolist() for request in today + yesterday]
    assert len(today) == 7
    assert len({tuple(prompt) for prompt in seen}) == 12


def test_repeated_prompts_are_answered_in_turn(trace):
    prompts = read_trace(trace)
    requests, yesterday = choose_requests(prompts, 200, True, 0)
    assert yesterday == []
    drawn = Counter(tuple(request.prompt.tolist()) for request in requests)
    counts = [count for _, count in drawn.most_common()]
    assert counts[0] > 200 / 4 > counts[1] > 200 / 10 > counts[4] > 0, "not by Zipf's law: 64, 32, 21, 16, 13, ..."
    for prompt in prompts:
        texts = [r.answer.tolist() for r in requests if np.array_equal(r.prompt, prompt[0].prompt)]
        assert texts == [prompt[k % 3].answer.tolist() for k in range(len(texts))]


def test_routing(trace):
    requests, _ = choose_requests(read_trace(trace), 100, True, 0)
    homes = route(requests, 5, "by session", 1)
    assert {len({h for h, r in zip(homes, requests, strict=True) if r.session == s}) for s in ("s0", "s1", "s2")} == {1}
    assert set(route(requests, 5, "random", 1)) == set(range(5))
    assert len(set(route(requests, ALONE, "random", 1))) == 100


def test_replicas_know_what_they_are_to_know(trace):
    requests, _ = choose_requests(read_trace(trace), 40, True, 0)
    start = NgramPool(1)

    def of(replicas, every=None):
        return simulate(requests, start, route(requests, replicas, "random", 0), every, DRAFTING)

    shared, fresh = NgramPool(1), [NgramPool(1) for _ in requests]
    assert of(1).tolist() == [list(serve(shared, request, *DRAFTING)) for request in requests]
    assert of(ALONE).tolist() == [list(serve(p, r, *DRAFTING)) for p, r in zip(fresh, requests, strict=True)]
    homes = route(requests, 4, "random", 0)
    pools = [deepcopy(start) for _ in range(4)]
    assert of(4).tolist() == [list(serve(pools[h], r, *DRAFTING)) for h, r in zip(homes, requests, strict=True)]
    assert start.observations == 0, "the start was changed"
    alone, merged, one = (summary(r)["tokens_per_step"] for r in (of(ALONE), of(40, 2), of(1)))
    assert alone < merged
    assert alone < one
    assert summary(of(40, 2))["requests"] == 40


def test_a_run_is_written_down_and_comes_again(trace, tmp_path):
    arguments = ["--trace", str(trace), "--memory-mb", "0.5", "--requests", "8"]
    replicas = ["--replicas", "1,3", "--intervals", "2"]
    pages = []
    for out in ("a", "b"):
        result = CliRunner().invoke(main, ["run", *arguments, *replicas, "--out", str(tmp_path / out)])
        assert result.exit_code == 0, result.output
        assert (tmp_path / f"{out}.png").stat().st_size > 10_000
        pages.append(json.loads((tmp_path / f"{out}.json").read_text())["results"])
    assert pages[0] == pages[1]
    assert [(row["start"], row["replicas"], row["merge_every"]) for row in pages[0]] == [
        (start, number, every)
        for start in ("nothing", "yesterday's pool")
        for number, every in ((1, None), (3, None), (3, 2), (3, None), (ALONE, None))
    ]
    assert str(tmp_path) not in (tmp_path / "a.md").read_text()
    result = CliRunner().invoke(main, ["run", "--zipf", *arguments, *replicas, "--out", str(tmp_path / "z")])
    assert "with an answer that came before; 3 sessions; 0 requests of yesterday" in result.output


def test_costs_are_measured(trace, tmp_path):
    arguments = ["--trace", str(trace), "--memory-mb", "0.5", "--requests", "8", "--parts", "2", "--sizes", "1"]
    result = CliRunner().invoke(main, ["costs", *arguments, "--out", str(tmp_path / "c")])
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "c.json").read_text())["results"]
    assert [row["learned"] for row in found["merging"]] == ["all by one pool", "by 2 pools, merged"] * 2
    assert found["times"][0]["bytes"] > 0.99 * 2**20
    assert found["times"][0].keys() == simulate_replicas.TIMES.keys()


def test_answers_are_recorded(tmp_path):
    out = tmp_path / "t.jsonl"
    arguments = ["--passages", "2", "--answers", "2", "--max-new-tokens", "6", "--out", str(out)]
    result = CliRunner().invoke(main, ["record", *arguments])
    assert result.exit_code == 0, result.output
    tokenizer = load(None)[1]
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    for line, prompt in zip(lines, passages(2, 0), strict=True):
        assert tokenizer.decode(line["prompt"], skip_special_tokens=True) == prompt["turns"][0]
        assert line["session"] == prompt["category"]
        assert [len(answer) for answer in line["answers"]] == [6, 6]


def test_passages_are_disjoint():
    names = [passage["question_id"] for passage in passages(300, 0)]
    assert len(set(names)) == 300
    assert all((int(name.split(":")[1]) - 1) % simulate_replicas.PASSAGE_LINES == 0 for name in names)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["record", "--out", "x"], "--prompts or --passages"),
        (["record", "--passages", "9999999", "--out", "x"], "standard library has"),
        (["run", "--trace", __file__, "--out", "x"], "line 1 is not what `record` writes"),
        (["run", "--trace", __file__, "--out", "x", "--replicas", "1,x"], "positive whole numbers"),
        (["run", "--trace", "TRACE", "--requests", "12", "--out", "x"], "none of the trace's 12"),
    ],
)
def test_bad_input_is_named(trace, arguments, message):
    result = CliRunner().invoke(main, [str(trace) if a == "TRACE" else a for a in arguments])
    assert result.exit_code in (1, 2)
    assert message in result.output
