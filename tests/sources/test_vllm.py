"""The proposer for vLLM, driven by a small engine that moves its batch as vLLM does. tests_vllm/ holds the real one."""

import json
import os
import subprocess
import sys
import textwrap
import threading
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

import lookahead
from lookahead.vllm import PREFIX, PoolProposer, Settings, break_even
from lookahead.vocabulary import vocabulary_fingerprint
from ngram_pool import GuessTree, NgramPool, Origin, PoolFileError, contexts_of

VOCABULARY = 1000
LONGEST_TEXT = 48
K = 4


def config(rows: int = 3, most: int = K, **changes: object) -> SimpleNamespace:
    """What the proposer looks at of vLLM's configuration."""
    model = {
        "max_model_len": LONGEST_TEXT, "enable_prompt_embeds": False, "skip_tokenizer_init": True,
        "get_vocab_size": lambda: VOCABULARY, "tokenizer": str(lookahead.DEMO_MODEL), "tokenizer_revision": None,
        "trust_remote_code": False,
    }  # fmt: skip
    parallel = {"rank": 0, "tensor_parallel_size": 1, "data_parallel_index": 0}
    model, parallel = ({k: changes.get(k, v) for k, v in each.items()} for each in (model, parallel))
    target = SimpleNamespace(**model)
    return SimpleNamespace(
        model_config=target,
        speculative_config=SimpleNamespace(num_speculative_tokens=most, draft_model_config=target),
        scheduler_config=SimpleNamespace(max_num_seqs=rows),
        parallel_config=SimpleNamespace(**parallel),
    )


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch):
    for name in list(os.environ):
        if name.startswith(PREFIX):
            monkeypatch.delenv(name)


@dataclass(eq=False)
class Request:
    prompt: list[int]
    answer: list[int]  # what the model writes
    chunks: int  # steps that read the prompt and write nothing
    text: list[int] = field(default_factory=list)
    draft: list[int] = field(default_factory=list)

    def __post_init__(self):
        self.text = list(self.prompt)

    @property
    def ended(self) -> bool:
        return len(self.text) >= min(len(self.prompt) + len(self.answer), LONGEST_TEXT)


class Engine:
    """A batch of vLLM: rows that requests join at the lowest free place, leave, and are moved between."""

    def __init__(self, rows: int, *proposers: PoolProposer):
        self.proposers = proposers
        self.rows: list[Request | None] = []
        self.max_rows = rows
        self.tokens = np.zeros((rows, LONGEST_TEXT), np.int32)
        self.lengths = np.zeros(rows, np.int32)
        self.waiting: deque[Request] = deque()
        self.known: set[Request] = set()  # whose prompt was learned
        self.mirror = NgramPool(1)  # told what each request is
        self.drafted = self.accepted = 0

    def leave(self, request: Request) -> None:
        self.rows[self.rows.index(request)] = None
        request.draft = []

    def preempt(self, request: Request, chunks: int) -> None:
        self.leave(request)
        request.chunks = chunks
        self.waiting.appendleft(request)

    def arrange(self, swap: tuple[int, int] | None = None) -> None:
        """Fill the gaps with those that wait, then from the end, and exchange two rows."""
        running = sum(request is not None for request in self.rows)
        while self.waiting and running < self.max_rows:
            if None not in self.rows:
                self.rows.append(None)
            self._place(self.waiting.popleft(), self.rows.index(None))
            running += 1
        while None in self.rows:
            last = self.rows.pop()
            if last is not None:
                self._place(last, self.rows.index(None))
        if swap and max(swap) < len(self.rows):
            one, other = (self.rows[row] for row in swap)
            self._place(one, swap[1])
            self._place(other, swap[0])

    def _place(self, request: Request, row: int) -> None:
        self.rows[row] = request
        self.lengths[row] = len(request.text)
        self.tokens[row, : len(request.text)] = request.text

    def step(self) -> None:
        """Verify the drafts, write, let the proposers draft and the mirror learn; those that end leave afterwards."""
        sampled = []
        for row, request in enumerate(self.rows):
            after = self.tokens[row, len(request.text) :]
            after[: len(request.draft)] = request.draft  # vLLM keeps what is verified there, accepted or not
            new = []
            if request.chunks:
                request.chunks -= 1
            else:
                rest = request.answer[len(request.text) - len(request.prompt) :]
                agreed = 0
                while agreed < min(len(request.draft), len(rest) - 1) and request.draft[agreed] == rest[agreed]:
                    agreed += 1
                new = rest[: agreed + 1]
                self.drafted += len(request.draft)
                self.accepted += agreed
            request.text += new
            self._place(request, row)
            sampled.append(new)
        if not self.rows:
            return
        self._reflect(sampled)
        answers = [proposer.propose(sampled, self.lengths, self.tokens) for proposer in self.proposers]
        assert all(answer == answers[0] for answer in answers), "two ranks draft differently"
        for request, new, draft in zip(list(self.rows), sampled, answers[0], strict=True):
            assert len(draft) <= max(min(K, LONGEST_TEXT - len(request.text) - 1), 0)
            assert new or not draft
            request.draft = draft
            if request.ended:
                self.leave(request)

    def _reflect(self, sampled: list[list[int]]) -> None:
        for request, new in zip(self.rows, sampled, strict=True):
            text = request.text
            if request not in self.known:
                self.mirror.learn(text[: len(text) - len(new)], Origin.PROMPT)
                self.known.add(request)
            if new:
                self.mirror.calibrate(contexts_of(text[:-1], len(new)), np.array(new)[:, None], np.ones((len(new), 1)))
                self.mirror.learn(text, Origin.TEXT, start=len(text) - len(new))


def assert_same(pool: NgramPool, other: NgramPool) -> None:
    ours, theirs = pool.__getstate__(), other.__getstate__()
    for one, two in zip([*ours["_table"], *ours["_credence"]], [*theirs["_table"], *theirs["_credence"]], strict=True):
        np.testing.assert_array_equal(one, two)
    assert pool.observations == other.observations


def assert_bounded(proposer: PoolProposer, rows: int) -> None:
    """Of a request there is a hash at most, of so many at most."""
    texts = proposer._texts
    assert sorted(number for numbers in texts._numbers.values() for number in numbers) == list(texts._hashes)
    assert len(texts) <= 2 * rows
    assert all(type(text) is bytes and len(text) == 16 for text in texts._numbers)


@st.composite
def requests(draw, number: int):
    # The first token tells requests apart; the rest are few, so that much repeats.
    some = st.lists(st.integers(0, 5), min_size=1, max_size=24)
    return Request([100 + number, *draw(some)], draw(some), draw(st.integers(0, 2)))


MOVES = st.tuples(
    st.sampled_from(["go on", "preempt", "preempt all", "abort"]),
    st.integers(0, 11),
    st.tuples(st.integers(0, 3), st.integers(0, 3)),
    st.booleans(),
)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_every_token_is_learned_once(data):
    rows = data.draw(st.integers(1, 4))
    one, other = (PoolProposer(config(rows, rank=rank, tensor_parallel_size=2)) for rank in (0, 1))
    one.pool, other.pool = NgramPool(1), NgramPool(1)
    engine = Engine(rows, one, other)
    todo = [data.draw(requests(number)) for number in range(data.draw(st.integers(1, 8)))]
    moves = iter(data.draw(st.lists(MOVES, max_size=40)))
    while todo or engine.waiting or any(engine.rows):
        move, chosen, swap, nobody_comes = next(moves, ("go on", 0, (0, 0), False))
        running = [request for request in engine.rows if request]
        if running and move == "preempt all":
            for request in running:
                engine.preempt(request, 1)
        elif running and move == "preempt":
            engine.preempt(running[chosen % len(running)], chosen % 3)
        elif running and move == "abort":
            engine.leave(running[chosen % len(running)])
        if todo and not nobody_comes:
            engine.waiting.append(todo.pop())
        waiting = engine.waiting
        if nobody_comes:  # nor come those that wait
            engine.waiting = deque()
        engine.arrange(swap)
        engine.waiting = waiting
        engine.step()
        assert_bounded(one, rows)
    assert_same(one.pool, engine.mirror)
    assert_same(other.pool, engine.mirror)


def test_drafts_are_accepted_and_end_with_the_text():
    engine = Engine(2, proposer := PoolProposer(config(2)))
    proposer.pool = NgramPool(1)
    for number in range(6):
        engine.waiting.append(Request([100 + number, 1, 2, 3, 4, 5, 1, 2, 3], [4, 5, 1, 2, 3] * 8, 0))
    while engine.waiting or any(engine.rows):
        engine.arrange()
        engine.step()
    assert engine.accepted > engine.drafted / 2 > 0
    assert_same(proposer.pool, engine.mirror)
    assert_bounded(proposer, 2)


def test_requests_of_one_text_are_two_requests():
    engine = Engine(2, proposer := PoolProposer(config(2)))
    proposer.pool = NgramPool(1)
    engine.waiting.extend([Request([7, 8, 9], [1, 2, 3, 4], 1), Request([7, 8, 9], [1, 2, 3, 5], 1)])
    engine.arrange()
    engine.step()
    assert proposer.pool.observations == 6
    while any(engine.rows):
        engine.step()
        engine.arrange()
    assert proposer.pool.observations == 14
    assert_same(proposer.pool, engine.mirror)


def test_one_waits_while_the_same_text_ends_again_and_again():
    """Requests that end with one text leave the hash of one that waits in its place."""
    engine = Engine(2, proposer := PoolProposer(config(2)))
    proposer.pool = NgramPool(1)
    engine.waiting.append(waits := Request([7, 8, 9], list(range(20)), 0))
    engine.arrange()
    engine.step()
    for _ in range(6):  # the last two hashes beside those of the two that run are enough for the one that waits
        engine.rows[engine.rows.index(waits)] = None
        engine.waiting.extend([Request([5, 5], [5], 0)])
        engine.arrange()
        engine.step()
        engine.waiting.appendleft(waits)
        engine.arrange()
        engine.step()
        assert_bounded(proposer, 2)
    assert_same(proposer.pool, engine.mirror)


def test_hashes_of_ended_requests_are_dropped():
    engine = Engine(2, proposer := PoolProposer(config(2)))
    proposer.pool = NgramPool(1)
    for number in range(50):
        engine.waiting.append(Request([100 + number], [1], 0))
    while engine.waiting or any(engine.rows):
        engine.arrange()
        engine.step()
        assert_bounded(proposer, 2)


def test_the_threshold_rises_with_the_requests(monkeypatch):
    assert 0 < break_even(1, 8) < break_even(8, 8) < break_even(1000, 8) < 1
    # What follows is likely at first, and then one thing or the other.
    text, lengths = np.array([[1, 2, 3, 4, 5, 1, 2, 3, 4, 6, 1]] * 2, np.int32), np.array([11, 11])
    drafts = {}
    for free, least in (("0", "0"), ("0.5", "0"), ("inf", "0"), ("inf", "0.67")):
        monkeypatch.setenv(PREFIX + "FREE_ROWS", free)
        monkeypatch.setenv(PREFIX + "MIN_PROBABILITY", least)
        drafts[free, least] = PoolProposer(config()).propose([[1], []], lengths, text)
    assert drafts["0", "0"] == [[], []]
    assert drafts["0.5", "0"] == [[2, 3, 4], []]
    assert len(drafts["inf", "0"][0]) == K
    assert drafts["inf", "0"][0][:3] == [2, 3, 4]
    assert drafts["inf", "0.67"] == drafts["0.5", "0"]  # which is 1 / (0.5 + 1)


@pytest.mark.parametrize("accepted", [0, 3])
def test_the_threshold_rises_with_what_drafts_gain(accepted, monkeypatch):
    """Steps of one request that verify three guesses; what such a step takes, plain ones would write 1.6 tokens in."""
    thresholds = []

    def guess(context, budget, threshold, depth, chain, *draws):
        thresholds.append(threshold)
        return GuessTree.chain([1] * 3, Origin.TEXT)

    monkeypatch.setenv(PREFIX + "FREE_ROWS", "4")
    monkeypatch.setenv(PREFIX + "MIN_PROBABILITY", "0")
    proposer = PoolProposer(config(max_model_len=2000))
    proposer.pool.guess = guess
    text = np.ones((1, 2000), np.int32)
    for step in range(1, 300):
        proposer.propose([[1] * (1 + accepted)], np.array([10 + (1 + accepted) * step]), text)
    assert min(thresholds) >= break_even(1, 4) == pytest.approx(0.2)
    assert thresholds[-1] == pytest.approx(0.2 * (4 / 1.6 if accepted else 1), rel=1e-2)


def test_no_step_is_left_out_near_the_longest_text():
    given = config()
    PoolProposer(given)
    assert given.speculative_config.draft_model_config.max_model_len >= LONGEST_TEXT + K
    assert given.model_config.max_model_len == LONGEST_TEXT


def test_pool_is_loaded_for_its_vocabulary(tmp_path, monkeypatch):
    fingerprint = vocabulary_fingerprint(AutoTokenizer.from_pretrained(lookahead.DEMO_MODEL))
    path = tmp_path / "a.pool"
    monkeypatch.setenv(PREFIX + "POOL", str(path))
    with pytest.raises(FileNotFoundError, match=r"a\.pool"):
        PoolProposer(config())
    pool = NgramPool(1, fingerprint)
    pool.learn([1, 2, 3])
    pool.save(path)
    assert PoolProposer(config(skip_tokenizer_init=False)).pool.observations == 3
    pool = NgramPool(1, "of another")
    pool.learn([1, 2, VOCABULARY])
    pool.save(path)
    with pytest.raises(PoolFileError, match="another vocabulary"):
        PoolProposer(config(skip_tokenizer_init=False))
    with pytest.raises(ValueError, match="holds token 1000"):
        PoolProposer(config())
    path.write_bytes(b"no pool")
    with pytest.raises(PoolFileError):
        PoolProposer(config())


def test_vocabulary_is_not_checked_without_a_tokenizer(tmp_path, monkeypatch, caplog):
    NgramPool(1, "of some").save(path := tmp_path / "a.pool")
    monkeypatch.setenv(PREFIX + "POOL", str(path))
    assert PoolProposer(config(skip_tokenizer_init=False, tokenizer=str(tmp_path))).pool.vocabulary == "of some"
    assert "Without a tokenizer" in caplog.text
    assert PoolProposer(config(skip_tokenizer_init=True)).pool.vocabulary == "of some"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"POOLS": "x"}, "LOOKAHEAD_VLLM_POOLS is not a setting"),
        ({"POOL": ""}, "POOL is empty"),
        ({"MEMORY_MB": "much"}, "MEMORY_MB must be a number, not 'much'"),
        ({"MEMORY_MB": "nan"}, "MEMORY_MB must be a number"),
        ({"FREE_ROWS": "-1"}, "FREE_ROWS must be 0 or more, not -1"),
        ({"MIN_PROBABILITY": "1.5"}, "MIN_PROBABILITY must lie in 0..1, not 1.5"),
        ({"SNAPSHOT": "x", "SNAPSHOT_SECONDS": "0"}, "finite number above 0"),
        ({"SNAPSHOT": "x", "SNAPSHOT_SECONDS": "inf"}, "finite number above 0"),
        ({"SNAPSHOT_SECONDS": "9"}, "needs LOOKAHEAD_VLLM_SNAPSHOT"),
        ({"POOL": "x", "MEMORY_MB": "9"}, "leave out LOOKAHEAD_VLLM_MEMORY_MB"),
    ],
)
def test_bad_settings_are_named(variables, message):
    with pytest.raises(ValueError, match=message):
        Settings.from_environment({PREFIX + name: value for name, value in variables.items()})


def test_settings_are_read(monkeypatch):
    assert Settings.from_environment({"HOME": "/"}) == Settings()
    monkeypatch.setenv(PREFIX + "MEMORY_MB", "2")
    assert PoolProposer(config()).pool.nbytes <= 2 * 2**20
    monkeypatch.setenv(PREFIX + "MEMORY_MB", "-2")
    with pytest.raises(ValueError, match="memory_mb=-2"):
        PoolProposer(config())


def test_what_cannot_be_served_is_refused(monkeypatch, tmp_path):
    with pytest.raises(TypeError, match="made by vLLM"):
        PoolProposer(None)
    with pytest.raises(TypeError, match="custom_class"):
        PoolProposer(SimpleNamespace(speculative_config=None))
    with pytest.raises(ValueError, match="enable_prompt_embeds"):
        PoolProposer(config(enable_prompt_embeds=True))
    monkeypatch.setenv(PREFIX + "SNAPSHOT", str(tmp_path / "none" / "a.pool"))
    with pytest.raises(ValueError, match="no folder"):
        PoolProposer(config())


SNAPSHOT = textwrap.dedent(
    """
    import json, os, sys
    import numpy as np
    from test_vllm import config
    from lookahead.vllm import PoolProposer

    status = {}
    for name, end, rank, engine in json.loads(sys.argv[1]):
        if (child := os.fork()) == 0:
            break
        status[name] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    else:
        print(json.dumps(status), flush=True)
        os._exit(0)
    os.environ["LOOKAHEAD_VLLM_SNAPSHOT"] = os.path.join(sys.argv[2], name, "now.pool")

    def serve():
        proposer = PoolProposer(config(rank=rank, tensor_parallel_size=2, data_parallel_index=engine))
        proposer.propose([[3]], np.array([3]), np.array([[1, 2, 3]], np.int32))
        return proposer

    if end == "fork":
        import multiprocessing
        child = multiprocessing.get_context("fork").Process(target=serve)
        child.start()
        child.join()
    else:
        kept = serve()
        if end == "error":
            raise SystemExit(3)
    """
)


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Folders of processes that have served one step each, forked from one that has imported, and their statuses."""
    folder = tmp_path_factory.mktemp("snapshots")
    processes = [
        ("return", "return", 0, 0), ("error", "error", 0, 0), ("fork", "fork", 0, 0),
        ("other rank", "return", 1, 0), ("other engine", "return", 2, 1),
    ]  # fmt: skip
    for name, *_ in processes:
        (folder / name).mkdir()
    environment = os.environ | {
        PREFIX + "SNAPSHOT_SECONDS": "1e6", PREFIX + "MEMORY_MB": "1",  # the one at the end is left
        "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *filter(None, sys.path)]),
    }  # fmt: skip
    command = [sys.executable, "-c", SNAPSHOT, json.dumps(processes), folder]
    done = subprocess.run(command, env=environment, timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout)


@pytest.mark.parametrize("end", ["return", "error", "fork"])
def test_pool_is_saved_when_the_process_ends(ended, end):
    folder, status = ended
    assert status[end] == (3 if end == "error" else 0)
    assert NgramPool.load(folder / end / "now.pool").observations == 3


def test_only_one_rank_saves_and_engines_save_apart(ended):
    folder, status = ended
    assert status["other rank"] == status["other engine"] == 0
    assert not list((folder / "other rank").iterdir())
    assert [path.name for path in (folder / "other engine").iterdir()] == ["now-1.pool"]


def test_pool_is_saved_while_serving(tmp_path, monkeypatch):
    """The thread writes what was learned since, and ends with the proposer."""
    saved, writes, save = threading.Event(), [], NgramPool.save

    def note(pool, path):
        save(pool, path)
        writes.append(pool.observations)
        saved.set()

    monkeypatch.setattr(NgramPool, "save", note)
    monkeypatch.setenv(PREFIX + "SNAPSHOT", str(tmp_path / "now.pool"))
    monkeypatch.setenv(PREFIX + "SNAPSHOT_SECONDS", "0.01")
    proposer = PoolProposer(config())
    (thread,) = (each for each in threading.enumerate() if each.name == "lookahead-snapshots")
    for length in (3, 4):
        saved.clear()
        proposer.propose([[3]], np.array([length]), np.array([[1, 2, 3, 3]], np.int32))
        assert saved.wait(60)
    proposer.propose([[3]], np.array([5]), np.array([[1, 2, 3, 3, 3]], np.int32))
    del proposer
    thread.join(60)
    assert not thread.is_alive()
    assert NgramPool.load(tmp_path / "now.pool").observations == 5
    assert len(set(writes)) == len(writes), "what was not learned on was written again"


def test_a_full_disk_does_not_end_the_service(tmp_path, monkeypatch, caplog):
    failed = threading.Event()

    def refuse(pool, path):
        failed.set()
        raise OSError("no space left")

    monkeypatch.setattr(NgramPool, "save", refuse)
    monkeypatch.setenv(PREFIX + "SNAPSHOT", str(tmp_path / "now.pool"))
    monkeypatch.setenv(PREFIX + "SNAPSHOT_SECONDS", "0.01")
    proposer = PoolProposer(config())
    proposer.propose([[3]], np.array([3]), np.array([[1, 2, 3]], np.int32))
    for _ in range(2):  # it is tried again, though nothing is new
        failed.clear()
        assert failed.wait(60)
    assert len(proposer.propose([[3]], np.array([3]), np.array([[1, 2, 3]], np.int32))) == 1
    (thread,) = (each for each in threading.enumerate() if each.name == "lookahead-snapshots")
    del proposer
    thread.join(60)
    assert not thread.is_alive()
    assert "no space left" in caplog.text


def test_vllm_is_not_imported():
    code = "import sys, lookahead, lookahead.vllm; sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
