"""Sources of guesses: whatever they propose, the text is plain decoding's; what they see and earn is as promised."""

import copy
import itertools
import random
import threading
from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from test_lossless import GenerateFailsError, check_identical, known_model, left_pad, random_cases, random_prompt
from zoo import CHAIN_ONLY, VOCABULARY, tiny_model

import lookahead
from lookahead import Guesser, GuessSource, GuessTree, LookaheadConfig, NgramPool, Origin, PoolSource, Stats
from lookahead.engine import engine as engines
from lookahead.guessing import budget as budgets
from lookahead.guessing import combine, together
from lookahead.guessing.budget import FIRST_PAUSE, MAX_GUESSES, PAUSE_GROWTH, TRIAL_STEPS, Budget
from lookahead.guessing.combine import Combined, Ledger
from lookahead.guessing.merging import Calibration, Mixture
from lookahead.guessing.pool import PoolGuesser
from lookahead.guessing.source import Batch, Limits, Needs, Outcome
from lookahead.passes import costs, measuring
from lookahead.passes.costs import StepCosts
from lookahead.passes.graphs import StepGraphs
from lookahead.step import lay_out

IDS = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])
GREEDY = {"max_new_tokens": 40, "min_new_tokens": 40, "do_sample": False}


def random_tree(rng: np.random.Generator, most: int, tokens: int = VOCABULARY) -> GuessTree:
    """Up to ``most`` nodes: deep, bushy or in between, of tokens below ``tokens``; ties and zeros among the chances."""
    deep = rng.choice([0.0, 0.5, 0.95])
    parents, chosen, chances, taken = [], [], [], set()
    for _ in range(rng.integers(0, most + 1)):
        parent = len(parents) - 1 if rng.random() < deep else int(rng.integers(-1, len(parents)))
        token = int(rng.integers(0, tokens))
        if (parent, token) not in taken:
            taken.add((parent, token))
            above = 1.0 if parent < 0 else chances[parent]
            parents.append(parent)
            chosen.append(token)
            chances.append(above * rng.choice([1.0, rng.random(), 0.9, 0.0], p=[0.2, 0.5, 0.25, 0.05]))
    return GuessTree.of(chosen, parents, rng.integers(-1, len(Origin), len(parents)), chances)


def paths_of(tree: GuessTree) -> dict[tuple[int, ...], float]:
    """The probability of each node, by the tokens down to it."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    assert len(set(paths)) == len(tree), "a node stands twice"
    assert [len(path) for path in paths] == tree.depths.tolist()
    return dict(zip(paths, tree.probabilities.tolist(), strict=True))


class Random(GuessSource):
    """Proposes another random tree each time it is asked."""

    def __init__(self, seed: int, most: int = 30, is_free: bool = True, is_calibrated: bool = False):
        self.seed, self.most, self.is_free, self.is_calibrated = seed, most, is_free, is_calibrated

    def __repr__(self) -> str:
        return f"Random({self.seed}, {self.most}, {self.is_free}, {self.is_calibrated})"

    def start(self, batch):
        guesser = copy.copy(self)
        guesser._rng = np.random.default_rng(self.seed)
        return guesser

    def propose(self, texts, limits):
        return [random_tree(self._rng, self.most) for _ in texts]


class Knows(GuessSource):
    """Proposes the coming text, with errors now and then, a few or many tokens ahead."""

    is_free = True

    def __init__(self, answers: list[list[int]], errs: float = 0.0, ahead: int = 12, claim: float = 0.9):
        self.answers, self.errs, self.ahead, self.claim = answers, errs, ahead, claim

    def __repr__(self) -> str:
        return f"Knows(errs={self.errs}, ahead={self.ahead}, claim={self.claim})"

    def start(self, batch):
        guesser = copy.copy(self)
        guesser._random = random.Random(0)
        return guesser

    def propose(self, texts, limits):
        trees = []
        for text in texts:
            rest = next((answer[len(text) :] for answer in self.answers if answer[: len(text)] == text), [])
            guessed = [self._random.randrange(VOCABULARY) if self._random.random() < self.errs else t for t in rest]
            guessed = guessed[: self.ahead]
            trees.append(GuessTree.chain(guessed, probabilities=self.claim ** np.arange(1, len(guessed) + 1)))
        return trees


class Wrong(GuessSource):
    """Proposes a token that is never right, and says that it is likely."""

    is_free = True

    def __init__(self, token: int = 0, claim: float = 0.9):
        self.token, self.claim = token, claim

    def propose(self, texts, limits):
        return [GuessTree.chain([self.token] * 3, probabilities=self.claim ** np.arange(1, 4)) for _ in texts]


class Says(GuessSource):
    """Proposes given trees."""

    def __init__(self, *trees: GuessTree):
        self.trees = list(trees)

    def propose(self, texts, limits):
        return self.trees


def answers_of(model, inputs: dict, **options) -> list[list[int]]:
    """What plain decoding writes, without padding to the left."""
    texts = model.generate(**inputs, **options)
    paddings = (inputs["attention_mask"] == 0).sum(1).tolist() if "attention_mask" in inputs else [0] * len(texts)
    return [text[padding:] for text, padding in zip(texts.tolist(), paddings, strict=True)]


# -- the text ---------------------------------------------------------------------------------------------------------

flags = st.booleans()
garbage = st.builds(Random, st.integers(0, 2**31), st.sampled_from([1, 8, 40, 300]), flags, flags)
knowing = st.builds(
    Knows,
    st.just([]),
    st.sampled_from([0.0, 0.1, 0.5]),
    st.sampled_from([1, 5, 100]),
    st.sampled_from([0.0, 0.3, 0.99, 1.0]),
)


@random_cases(40)
@given(
    model_type=st.sampled_from(["llama", "gpt2", "gemma3_text", "llama4_text", "lfm2", "mamba2", "bloom"]),
    prompt_seeds=st.lists(st.integers(0, 2**31), min_size=1, max_size=4),
    sources=st.lists(garbage | knowing, min_size=1, max_size=3),
    has_pool=st.booleans(),
    config=st.builds(
        LookaheadConfig,
        budget=st.sampled_from(["auto", "auto", 0, 1, 7, 40]),
        window_size=st.sampled_from(["auto", 0, 3]),
        strategy=st.sampled_from(["lookahead", "lookahead", "jacobi"]),
        pool_memory_mb=st.just(0.1),
    ),
    options=st.fixed_dictionaries(
        {"max_new_tokens": st.integers(1, 40)},
        optional={"eos_token_id": st.lists(st.integers(3, VOCABULARY - 1), max_size=8), "top_k": st.just(5)},
    ),
    temperature=st.none() | st.sampled_from([0.5, 1.5]),
    seed=st.integers(0, 2**31),
)
def test_whatever_is_guessed_the_text_is_plain(
    model_type, prompt_seeds, sources, has_pool, config, options, temperature, seed
):
    """A batch that samples is identical where its sequences go in step, for which the stateful processor stands."""
    model = known_model(model_type, 0)
    prompts = [random_prompt(random.Random(prompt_seed)) for prompt_seed in prompt_seeds]
    options = options | (
        {"do_sample": False} if temperature is None else {"do_sample": True, "temperature": temperature}
    )
    torch.manual_seed(seed)
    answers = answers_of(model, left_pad(prompts), **options)
    for source in sources:
        if isinstance(source, Knows):
            source.answers = answers
    given_sources = [*sources, PoolSource()] if has_pool else sources
    in_step = temperature is not None and len(prompts) > 1
    try:
        check_identical(model, prompts, options, config, seed, drift=in_step, source=given_sources)
    except GenerateFailsError:
        assume(False)


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "lfm2", "mamba2", "bloom"])
@pytest.mark.parametrize("budget", ["auto", 30])
def test_a_source_that_knows_the_text_is_believed(model_type, budget):
    model = known_model(model_type, 0)
    answers = answers_of(model, {"input_ids": IDS}, **GREEDY)
    config = LookaheadConfig(budget=budget, window_size=0)
    stats = check_identical(model, [IDS], GREEDY, config, 0, source=Knows(answers, claim=0.99))
    assert set(stats.accepted) == {"Knows"}
    assert stats.accepted["Knows"] + stats.steps + 1 == 40
    assert stats.steps < 10


def test_custom_generate_takes_a_source():
    model = known_model("llama", 0)
    expected = model.generate(IDS, **GREEDY)
    source = Knows(expected.tolist())
    actual = model.generate(IDS, **GREEDY, custom_generate=lookahead.decode, source=[source, PoolSource()])
    assert actual.tolist() == expected.tolist()


def test_a_tree_of_a_thousand_guesses_is_cut():
    model = known_model("llama", 0)
    for budget in ("auto", 20):
        config = LookaheadConfig(budget=budget, window_size=0)
        stats = check_identical(model, [IDS], GREEDY, config, 0, source=Random(3, most=5000, is_calibrated=True))
        assert 0 < stats.guesses <= stats.steps * (MAX_GUESSES if budget == "auto" else budget)


class Follows(GuessSource):
    """Keeps what each sequence has written."""

    def start(self, batch):
        return Following(batch)


class Following(Guesser):
    def __init__(self, batch):
        self._is_first, self._seen = True, [list(text) for text in batch.texts]

    def propose(self, texts, limits):
        if self._is_first:  # the first token comes with the prompt
            assert [text[:-1] for text in texts] == self._seen
            self._is_first, self._seen = False, [list(text) for text in texts]
        assert self._seen == texts
        assert len(limits.depths) == len(texts)
        rng = np.random.default_rng(len(texts[0]))
        return [random_tree(rng, 9) for _ in texts]

    def observe(self, outcome):
        assert self._seen == outcome.texts
        assert len(outcome.first) == len(outcome.texts)
        ends = [*outcome.first[1:], len(outcome.logits)]
        for i, (step, path, new) in enumerate(zip(outcome.steps, outcome.paths, outcome.emitted, strict=True)):
            assert path[0] == 0
            assert len(path) == len(new)
            assert step.ids[path].tolist() == [outcome.texts[i][-1], *new[:-1]]
            first = outcome.first[i]
            assert first + len(step) <= ends[i]
            assert outcome.logits[first : ends[i]][path].argmax(-1).tolist() == new
            self._seen[i] += new
        counted.append([list(text) for text in self._seen])

    def select(self, sequences):
        self._seen = [self._seen[b] for b in sequences]


counted: list[list[list[int]]] = []


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_a_source_sees_each_token_once(model_type):
    """In a batch whose sequences end one after the other."""
    model = known_model(model_type, 0)
    prompts = [random_prompt(random.Random(seed)) for seed in range(5)]
    longest = model.generate(**left_pad(prompts), max_new_tokens=40, do_sample=False)
    ends = sorted({text[-position] for text, position in zip(longest.tolist(), (5, 20, 35, 1, 15), strict=True)})
    counted.clear()
    config = LookaheadConfig(budget=30, window_size=2)
    options = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": ends}
    stats = check_identical(model, prompts, options, config, 0, source=[Follows(), PoolSource()])
    assert len(counted) == stats.steps
    assert len(counted[0]) > len(counted[-1]), "no sequence ended before the others"


# -- trees ------------------------------------------------------------------------------------------------------------


def arrays(tokens, parents, depths, probabilities, sources) -> tuple[np.ndarray, ...]:
    whole = (np.array(values, np.int64) for values in (tokens, parents, depths, sources))
    tokens, parents, depths, sources = whole
    return tokens, parents, depths, np.array(probabilities, float), sources


@pytest.mark.parametrize(
    ("tokens", "parents", "probabilities", "message"),
    [
        ([1, 2], [-1, 1], 1.0, "node 1 of a guess tree has parent 1: it must be an earlier node, or -1"),
        ([1, 2], [1, -1], 1.0, "node 0 of a guess tree has parent 1"),
        ([1, 2], [-1, -2], 1.0, "node 1 of a guess tree has parent -2"),
        ([1, -1], [-1, 0], 1.0, "node 1 of a guess tree has token -1: it must be 0 or more"),
        (
            [1, 2, 1],
            [-1, 0, -1],
            1.0,
            "node 2 of a guess tree has token 1: it must be different from its siblings' tokens",
        ),
        ([1], [-1], 1.1, "node 0 of a guess tree has probability 1.1: it must be a number from 0 to its parent's, or"),
        ([1], [-1], -0.1, "node 0 of a guess tree has probability -0.1"),
        ([1], [-1], float("nan"), "node 0 of a guess tree has probability nan"),
        ([1], [-1], float("inf"), "node 0 of a guess tree has probability inf"),
        ([1, 2, 3], [-1, 0, 1], [0.9, 0.5, 0.6], "node 2 of a guess tree has probability 0.6"),
        ([1, 2], [-1], 1.0, "the arrays of a guess tree must be of one length"),
        ([1], [-1, 0], 1.0, "the arrays of a guess tree must be of one length"),
        ([], [-1], 1.0, "the arrays of a guess tree must be of one length"),
        ([1, 2], [-1, 0], [0.5], "the arrays of a guess tree must be of one length"),
    ],
)
def test_a_wrong_tree_is_named(tokens, parents, probabilities, message):
    with pytest.raises(ValueError, match="guess tree") as error:
        GuessTree.of(tokens, parents, probabilities=probabilities)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(("depths", "node"), [([0, 1], 0), ([1, 1], 1), ([1, 3], 1), ([2, 3], 0)])
def test_a_wrong_depth_is_named(depths, node):
    with pytest.raises(ValueError, match=rf"node {node} of a guess tree has depth .*its parent's depth plus 1"):
        GuessTree(*arrays([1, 2], [-1, 0], depths, [1, 1], [0, 0]))


def test_an_array_of_another_kind_is_named():
    with pytest.raises(ValueError, match="must be of one length, not of shapes"):
        GuessTree(*(np.array([x]) for x in arrays([1], [-1], [1], [1], [0])))


def test_siblings_that_are_no_neighbours_may_not_be_equal():
    same_token_elsewhere = GuessTree.of([1, 1, 2, 1], [-1, 0, -1, 2])
    assert len(same_token_elsewhere) == 4
    with pytest.raises(ValueError, match=r"node 3 .*token 1"):
        GuessTree.of([1, 1, 2, 1], [-1, 0, 0, 0])


def test_an_empty_tree():
    for tree in (GuessTree.empty(), GuessTree.of([], []), GuessTree.chain([])):
        assert len(tree) == len(tree.prune(3)) == len(tree.likeliest_chain()) == 0


def trees(count: int, most: int):
    rng = np.random.default_rng(4)
    return [random_tree(rng, most, tokens=5) for _ in range(count)]


def test_the_likeliest_part_is_the_best_of_all_parts():
    for tree in trees(150, 9):
        whole, n = paths_of(tree), len(tree)
        for count in range(n + 2):
            parts = [
                kept
                for kept in itertools.combinations(range(n), min(count, n))
                if {int(tree.parents[node]) for node in kept} <= {-1, *kept}
            ]
            best = max(tree.probabilities[list(kept)].sum() for kept in parts)
            part = tree.prune(count)
            paths = paths_of(part)
            assert len(part) == min(count, n)
            assert part.probabilities.sum() == pytest.approx(best)
            assert paths.items() <= whole.items()
            assert list(paths) == [path for path in whole if path in paths], "the order is another one"


def test_parts_hold_the_nodes_that_are_kept():
    rng = np.random.default_rng(5)
    for tree in trees(200, 20):
        kept: list[int] = []
        for node, parent in enumerate(tree.parents.tolist()):
            if (parent < 0 or parent in kept) and rng.random() < 0.7:
                kept.append(node)
        part = tree.part(kept)
        whole = list(paths_of(tree).items())
        assert list(paths_of(part).items()) == [whole[node] for node in kept]
        assert part.sources.tolist() == tree.sources[kept].tolist()


def test_tokens_are_followed_as_far_as_they_were_guessed():
    rng = random.Random(0)
    for tree in trees(200, 20):
        paths = paths_of(tree)
        for tokens in (*paths, [rng.randrange(5) for _ in range(4)]):
            tokens = [*tokens, rng.randrange(5)]
            expected = max(n for n in range(len(tokens) + 1) if not n or tuple(tokens[:n]) in paths)
            assert tree.follow(tokens) == expected, (paths, tokens)


def test_the_likeliest_chain_takes_the_likeliest_child_each_time():
    for tree in trees(200, 20):
        whole, path = paths_of(tree), ()
        expected = []
        while below := [other for other in whole if len(other) == len(path) + 1 and other[: len(path)] == path]:
            path = max(below, key=whole.get)  # of equally likely ones the first
            expected.append(path)
        chain = tree.likeliest_chain()
        assert list(paths_of(chain).items()) == [(path, whole[path]) for path in expected]
        assert chain.parents.tolist() == list(range(-1, len(chain) - 1))


# -- several sources --------------------------------------------------------------------------------------------------


def combined(sources: list[GuessSource], ledger: Ledger | None = None, sequences: int = 1) -> Combined:
    whole = Combined(sources, ledger or Ledger(sources), Budget(None, None), Stats())
    whole.start(Batch([[1]] * sequences, 1.0, VOCABULARY, NgramPool(0.1)))
    return whole


def merged(*trees: GuessTree, ledger: Ledger | None = None, depth: int = 99, is_chain: bool = False) -> GuessTree:
    sources = [Says(tree) for tree in trees]
    (tree,) = combined(sources, ledger).together.propose([[1]], Limits([depth], 1000, 0.0, is_chain))
    return tree


def experienced_ledger(rng: np.random.Generator, sources: int) -> Ledger:
    """What a ledger is after claims of all kinds, more or less well founded."""
    ledger = Ledger([Says() for _ in range(sources)])
    for speakers in parts(range(sources)):
        for _ in range(20):
            ledger.experience.mixture(speakers).count({i: rng.random() for i in speakers if rng.random() < 0.7})
        for proposers in parts(speakers):
            honesty = rng.random() * 2
            for claim in rng.random(200):
                ledger.experience.calibration(speakers, proposers).count(claim, rng.random() < claim * honesty)
    return ledger


def parts(whole: Iterable[int]) -> list[frozenset[int]]:
    """All parts of a set but the empty one."""
    members = list(whole)
    return [frozenset(part) for count in range(len(members)) for part in itertools.combinations(members, count + 1)]


def test_prefixes_merge():
    one = GuessTree.of([1, 2, 3], [-1, 0, 1], probabilities=[0.8, 0.6, 0.3])
    two = GuessTree.of([1, 2, 4, 5], [-1, 0, 1, -1], probabilities=[0.5, 0.4, 0.2, 0.1])
    tree = merged(one, two)
    assert set(paths_of(tree)) == {(1,), (1, 2), (1, 2, 3), (1, 2, 4), (5,)}
    assert tree.tokens.tolist()[0] == 1, "the likeliest child is not the first"
    sources = dict(zip(paths_of(tree), (tree.sources - len(Origin)).tolist(), strict=True))
    assert sources == {(1,): 0, (1, 2): 1, (1, 2, 3): 0, (1, 2, 4): 1, (5,): 1}, "the higher claim has it"


@pytest.mark.parametrize("seed", range(60))
def test_a_merged_tree_is_sound(seed):
    rng = np.random.default_rng(seed)
    given_trees = [random_tree(rng, 25, tokens=4) for _ in range(rng.integers(1, 4))]
    depth = int(rng.integers(0, 6))
    tree = merged(*given_trees, ledger=experienced_ledger(rng, 3), depth=depth)
    paths = paths_of(tree)
    assert set(paths) == {path for one in given_trees for path in paths_of(one) if len(path) <= depth}
    sums: dict[tuple, float] = {}
    for path, probability in paths.items():
        assert 0 <= probability <= paths.get(path[:-1], 1.0)
        sums[path[:-1]] = sums.get(path[:-1], 0.0) + probability
    for path, total in sums.items():
        assert total <= paths.get(path, 1.0) + 1e-9, "more than one of the siblings would be accepted"
    order = list(paths)
    assert all(order[i][:-1] in ((), *order[:i]) for i in range(len(order)))
    for path in paths:
        below = [other for other in order if other[:-1] == path]
        assert below == sorted(below, key=lambda other: -paths[other]), "the likeliest child is not the first"
        inside = [other[: len(path)] == path for other in order]
        assert sum(a != b for a, b in itertools.pairwise([False, *inside, False])) == 2, "it is not depth-first"


@pytest.mark.parametrize("seed", range(20))
def test_where_chains_alone_are_verified_the_merged_tree_is_one(seed):
    rng = np.random.default_rng(seed)
    given_trees = [random_tree(rng, 25, tokens=4) for _ in range(3)]
    tree = merged(*given_trees, depth=5, is_chain=True)
    assert tree.parents.tolist() == list(range(-1, len(tree) - 1))
    assert set(paths_of(tree)) <= {path for one in given_trees for path in paths_of(one)}
    assert len(tree) or not any(map(len, given_trees))


def test_accepted_guesses_are_counted_by_the_class_that_proposed_them():
    model = tiny_model("llama")
    answers = answers_of(model, {"input_ids": IDS}, **GREEDY)
    lookahead.wrap(model, LookaheadConfig(budget=30), source=[PoolSource(), Wrong(), Knows(answers, errs=0.3)])
    model.generate(IDS, **GREEDY)
    stats = model.lookahead.last
    assert set(stats.accepted) <= {"prompt", "text", "logits", "jacobi", "file", "Knows"}
    assert stats.accepted["Knows"] > 0
    assert stats.accepted.total() + stats.steps + 1 == stats.tokens == 40
    assert stats.as_dict()["accepted"]["Knows"] == stats.accepted["Knows"]
    assert f"Knows {stats.accepted['Knows']}" in str(stats)
    first = dict(stats.accepted)
    model.generate(IDS, **GREEDY)
    model.lookahead.last.accepted.update(first)
    assert model.lookahead.stats.accepted == model.lookahead.last.accepted


@pytest.mark.parametrize("is_calibrated", [False, True])
def test_what_is_attributed_to_no_known_evidence_is_its_proposers(is_calibrated):
    model = tiny_model("llama")
    answers = answers_of(model, {"input_ids": IDS}, **GREEDY)

    class Elsewhere(Knows):
        def propose(self, texts, limits):
            trees = super().propose(texts, limits)
            return [GuessTree.of(tree.tokens, tree.parents, 99, tree.probabilities) for tree in trees]

    source = Elsewhere(answers)
    source.is_calibrated = is_calibrated
    lookahead.wrap(model, LookaheadConfig(budget=8), source=source)
    assert model.generate(IDS, **GREEDY).tolist() == answers
    assert set(model.lookahead.last.accepted) == {"Elsewhere"}


def test_a_source_may_have_a_pool_of_its_own():
    model, own = tiny_model("llama"), NgramPool(0.1)
    expected = model.generate(IDS, **GREEDY)
    lookahead.wrap(model, LookaheadConfig(budget=8), source=PoolSource(own))
    assert model.generate(IDS, **GREEDY).tolist() == expected.tolist()
    assert len(own) > 0
    assert len(model.lookahead.pool) == 0


# -- what claims are worth, and asking --------------------------------------------------------------------------------


@pytest.mark.parametrize(("claim", "true"), [(0.9, 0.1), (0.95, 0.5), (0.1, 0.1), (0.2, 0.8), (1.0, 0.3)])
def test_claims_are_worth_what_comes_true(claim, true):
    calibration = Calibration()
    assert calibration(claim) == pytest.approx(claim), "nothing is known yet"
    for i in range(2000):
        calibration.count(claim, int((i + 1) * true) > int(i * true))
    assert calibration(claim) == pytest.approx(true, abs=0.03)
    other = 0.05 if claim > 0.1 else 0.95
    assert calibration(other) == pytest.approx(other), "other claims have not been tried"


def test_calibration_follows_what_changes():
    calibration = Calibration()
    for _ in range(3000):
        calibration.count(0.9, True)
    assert calibration(0.9) == pytest.approx(1.0)
    for i in range(1000):
        calibration.count(0.9, i % 10 == 0)
    assert calibration(0.9) == pytest.approx(0.1, abs=0.03)


def test_whoever_was_right_is_believed():
    mixture = Mixture(frozenset({0, 1}))
    assert mixture({0: 0.8}) == pytest.approx(0.4), "nothing is known yet: both count the same"
    assert mixture({0: 0.8, 1: 0.2}) == pytest.approx(0.5)
    for _ in range(300):
        mixture.count({0: 0.8, 1: 0.1})
    assert mixture({0: 0.8}) > 0.75
    assert mixture({1: 0.8}) < 0.05
    for _ in range(2000):
        mixture.count({1: 0.5})
    assert mixture({0: 0.8}) < 0.05, "who is right now is not believed"


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_beliefs_are_the_shares_of_the_truth(share):
    """Two sources that are each sure of one token: belief in a source is the share of the tokens that it knew."""
    rng = np.random.default_rng(0)
    mixture = Mixture(frozenset({0, 1}))
    believed = []
    for _ in range(4000):
        mixture.count({0: 1.0} if rng.random() < share else {1: 1.0})
        believed.append(mixture({0: 1.0}))
    assert np.mean(believed[1000:]) == pytest.approx(share, abs=0.04)


def test_claims_of_nothing_spoil_no_mixture():
    mixture = Mixture(frozenset({0, 1}))
    for _ in range(200_000):
        mixture.count({0: 0.0, 1: 0.0})
    assert mixture({0: 0.5, 1: 0.5}) == pytest.approx(0.5)


@pytest.mark.parametrize("is_accepted", [False, True])
def test_claims_of_nothing_for_ever_spoil_no_calibration(is_accepted):
    calibration = Calibration()
    with np.errstate(divide="raise", invalid="raise", over="raise"):
        for _ in range(200_000):
            calibration.count(0.0, is_accepted)
        assert 0 <= calibration(0.0) <= 1
        assert 0 <= calibration(0.05) <= 1


def test_a_source_that_boasts_is_seen_through_in_decoding():
    model = tiny_model("llama")
    lookahead.wrap(model, LookaheadConfig(budget=8), source=Wrong())
    for _ in range(3):
        model.generate(IDS, max_new_tokens=200, min_new_tokens=200)
    engine = model.lookahead
    assert engine.last.accepted.total() == 0
    assert engine.ledger.experience.calibration(frozenset({0}), frozenset({0}))(0.9) < 0.03
    assert all(predicted < 0.1 for guesses, predicted, _ in engine.last.reliability if guesses)


class Clock:
    """Time that passes only where a source says so."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(together, "time", SimpleNamespace(perf_counter=lambda: self.now))


def slow(kind: type[GuessSource], clock: Clock, seconds: float) -> type[GuessSource]:
    """A kind of source that takes so long, and counts how often it is asked."""

    class Slow(kind):
        is_free = False
        asked = 0

        def propose(self, texts, limits):
            Slow.asked += 1
            clock.now += seconds
            return super().propose(texts, limits)

    return Slow


def test_a_slow_source_that_earns_nothing_is_asked_now_and_then(monkeypatch):
    kind = slow(Wrong, Clock(monkeypatch), 1.0)
    model = tiny_model("llama")
    lookahead.wrap(model, LookaheadConfig(window_size=0), source=kind())
    engine = model.lookahead
    while engine.stats.steps + 220 < FIRST_PAUSE * PAUSE_GROWTH:
        model.generate(IDS, max_new_tokens=220, min_new_tokens=220)
        if engine.stats.steps > TRIAL_STEPS:
            assert 1 < kind.asked < 8, "a few steps show it; the first one may have read the prompt"
    first = kind.asked
    while engine.stats.steps < FIRST_PAUSE * PAUSE_GROWTH + 2 * TRIAL_STEPS:
        model.generate(IDS, max_new_tokens=220, min_new_tokens=220)
    assert first < kind.asked < 2 * 8, "after a long pause it is tried again"
    assert engine.stats.accepted.total() == 0


@pytest.mark.long
@pytest.mark.parametrize("pool", [[], [PoolSource()]], ids=["alone", "with the pool"])
def test_a_source_has_no_part_in_a_call_that_its_pause_outlasts(monkeypatch, pool):
    """Neither the source nor the pass works for it, but its pause continues."""
    kind = slow(Wrong, Clock(monkeypatch), 1.0)
    begun, layers = [], []

    class Reader(kind):
        needs = Needs(prompt_logits=3, hidden_states=(1,))

        def start(self, batch):
            begun.append(engine.stats.calls)
            return super().start(batch)

    model = tiny_model("llama")
    expected = model.generate(IDS, max_new_tokens=100, min_new_tokens=100)
    choose = engines.choose_runner
    monkeypatch.setattr(engines, "choose_runner", lambda *given: layers.append(given[2]) or choose(*given))
    lookahead.wrap(model, LookaheadConfig(window_size=0), source=[Reader(), *pool])
    engine = model.lookahead
    while engine.stats.steps < FIRST_PAUSE * PAUSE_GROWTH + TRIAL_STEPS:
        assert model.generate(IDS, max_new_tokens=100, min_new_tokens=100).tolist() == expected.tolist()
    assert begun[0] == 0
    assert len(begun) < engine.stats.calls / 2, "the last one is the next trial"
    assert begun[-1] > 2
    assert kind.asked < 2 * 8
    assert [call for call, wanted in enumerate(layers) if wanted] == begun


@pytest.mark.parametrize("pool", [[], [PoolSource()]], ids=["alone", "with the pool"])
def test_a_source_that_is_right_is_always_asked(monkeypatch, pool):
    """The pool, which is fresh for each text, knows less of it."""
    kind = slow(Knows, Clock(monkeypatch), 1e-9)
    model = tiny_model("llama")
    answers = answers_of(model, {"input_ids": IDS}, max_new_tokens=220, min_new_tokens=220)
    lookahead.wrap(model, LookaheadConfig(window_size=0), source=[kind(answers, ahead=2), *pool])
    steps = 0
    for _ in range(8):
        model.lookahead.pool = NgramPool(0.1)
        model.generate(IDS, max_new_tokens=220, min_new_tokens=220)
        steps += model.lookahead.last.steps
    assert steps > TRIAL_STEPS + FIRST_PAUSE
    assert kind.asked == steps
    assert model.lookahead.stats.accepted["Slow"] > steps // 4


def test_what_repeats_the_pool_and_takes_long_is_dropped(monkeypatch):
    """A guess that somebody else had, too, is not worth the time."""

    class Repeats(GuessSource):
        def propose(self, texts, limits):
            return PoolGuesser(model.lookahead.pool).propose(texts, limits)

    kind = slow(Repeats, Clock(monkeypatch), 1.0)
    model = tiny_model("llama")
    lookahead.wrap(model, LookaheadConfig(window_size=0), source=[PoolSource(), kind()])
    for _ in range(4):
        model.generate(IDS, max_new_tokens=100, min_new_tokens=100)
    assert model.lookahead.stats.accepted.total() > 0
    assert kind.asked < 8


def says(*tokens: int, chance: float = 0.9) -> GuessTree:
    return GuessTree.chain(tokens, probabilities=chance ** np.arange(1, len(tokens) + 1))


@pytest.mark.parametrize(
    ("trees", "earned"),
    [
        ([says(1, 2, 3), GuessTree.empty()], [3, 0]),
        ([says(1, 2, 3), says(1, 2)], [1, 0]),
        ([says(1, 2), says(1, 2)], [0, 0]),
        ([says(5), says(1)], [0, 1]),
        # Two guesses are verified. The second source's takes the place of one that would have been accepted.
        ([says(1, 2, 3, chance=0.5), says(1, 7, chance=0.9)], [0, -1]),
    ],
)
def test_a_source_earns_what_the_step_would_not_have_written_without_it(trees, earned):
    """The text goes on with 1, 2, 3, 4. No claim is corrected yet."""
    stats = Stats()
    sources = [Says(tree) for tree in trees]
    budget = Budget(2 if earned[1] < 0 else 9, None)
    whole = Combined(sources, Ledger(sources), budget, stats)
    whole.start(Batch([[1]], 1.0, VOCABULARY, NgramPool(0.1)))
    (tree,) = whole.together.propose([[0]], Limits([9], 99, 0.0, False))
    (chosen,) = budget.choose([tree], 1, 0)
    accepted = chosen.follow([1, 2, 3, 4])
    step = lay_out(0, chosen)
    path = [0]
    for token in [1, 2, 3, 4][:accepted]:
        path.append(step.children()[path[-1], token])
    logits = torch.zeros(len(step), VOCABULARY)
    whole.together.observe(Outcome([[0]], [step], logits, [path], [[1, 2, 3, 4][: accepted + 1]]))
    assert [each.earned for each in whole._stats] == earned


def test_sources_of_one_class_are_counted_apart():
    model = known_model("llama", 0)
    sources = [Wrong(), Knows(answers_of(model, {"input_ids": IDS}, **GREEDY)), Wrong()]
    stats = check_identical(model, [IDS], GREEDY, LookaheadConfig(budget=16, window_size=0), 0, source=sources)
    assert list(stats.sources) == ["Wrong", "Knows", "Wrong 2"]
    assert all(each.asked == stats.steps for each in stats.sources.values())
    assert stats.accepted["Knows"] > 0 == stats.accepted["Wrong"] == stats.accepted["Wrong 2"]


def test_a_fixed_budget_asks_always(monkeypatch):
    kind = slow(Wrong, Clock(monkeypatch), 1.0)
    model = tiny_model("llama")
    lookahead.wrap(model, LookaheadConfig(budget=4, window_size=0), source=kind())
    model.generate(IDS, max_new_tokens=100, min_new_tokens=100)
    assert kind.asked == model.lookahead.last.steps == 99


# -- hidden states ----------------------------------------------------------------------------------------------------

LAYERS = (0, 2)


class Sees(Knows):
    """Knows the text, and notes the logits and hidden states that it is shown."""

    needs = Needs(prompt_logits=4, hidden_states=LAYERS)

    def __init__(self, answers: list[list[int]]):
        super().__init__(answers, errs=0.2)
        self.prompts: list[tuple] = []
        self.positions: list[tuple[int, tuple, torch.Tensor, dict]] = []  # which, text so far, logits, hidden states

    def observe_prompt(self, text, logits, hidden_states):
        states = {layer: x.clone() for layer, x in hidden_states.items()}
        self.prompts.append((list(text), logits.clone(), states))

    def observe(self, outcome):
        hidden = outcome.hidden_states
        assert set(hidden) == set(LAYERS)
        assert {tuple(states.shape) for states in hidden.values()} == {(len(outcome.logits), 32)}
        of_each = outcome.texts, outcome.paths, outcome.emitted, outcome.first
        for text, path, new, first in zip(*of_each, strict=True):
            for place, row in enumerate(path):
                states = {layer: x[first + row].clone() for layer, x in hidden.items()}
                self.positions.append(([*text, *new[:place]], outcome.logits[first + row].clone(), states))


def close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return actual.shape == expected.shape and bool(torch.allclose(actual, expected, rtol=1e-3, atol=1e-3))


@pytest.mark.parametrize(
    ("model_type", "batch", "options"),
    [
        ("llama", 1, {}),
        ("llama", 4, {}),
        ("llama", 1, {"prefill_chunk_size": 3}),
        ("gemma3_text", 1, {}),
        ("gemma3_text", 3, {}),
        ("lfm2", 1, {}),
        ("bloom", 1, {}),
    ],
)
def test_hidden_states_are_those_of_plain_passes(model_type, batch, options):
    model = known_model(model_type, 0)
    prompts = [random_prompt(random.Random(seed)) for seed in range(3)]
    prompts = [*prompts, prompts[0]][:batch]  # the last is the first again
    options = {"max_new_tokens": 30, "min_new_tokens": 30, "do_sample": False, **options}
    answers = answers_of(model, left_pad(prompts), **options)
    with torch.no_grad():
        plain = [model(torch.tensor([answer]), output_hidden_states=True) for answer in answers]
    source = Sees(answers)
    config = LookaheadConfig(budget=20, window_size=2, cpu_kernels=False)
    stats = check_identical(model, prompts, options, config, 0, source=source)
    assert not stats.plain
    assert stats.accepted["Sees"] > 0

    assert [text for text, _, _ in source.prompts] == [ids[0].tolist() for ids in prompts[:3]], (
        "equal ones are read once"
    )
    for (text, logits, hidden), whole in zip(source.prompts, plain, strict=False):
        n = len(text)
        last = options.get("prefill_chunk_size", n)
        assert len(logits) >= min(4, (n - 1) % last + 1)
        assert close(logits, whole.logits[0, n - len(logits) : n])
        for layer in LAYERS:
            assert close(hidden[layer], whole.hidden_states[layer][0, :n])

    assert len(source.positions) == stats.tokens - len(prompts)
    for text, logits, hidden in source.positions:
        whole = next(x for x, answer in zip(plain, answers, strict=True) if answer[: len(text)] == text)
        assert close(logits, whole.logits[0, len(text) - 1])
        for layer in LAYERS:
            assert close(hidden[layer], whole.hidden_states[layer][0, len(text) - 1])


def test_what_sees_hidden_states_gets_eager_passes():
    model = tiny_model("gemma2")
    expected = model.generate(IDS, **GREEDY)
    config = LookaheadConfig(budget=8, cpu_kernels=False)
    lookahead.wrap(model, config, source=[PoolSource(), Sees(expected.tolist())])
    assert model.generate(IDS, **GREEDY).tolist() == expected.tolist()
    assert "passes: eager" in model.lookahead.report()


def test_what_sees_hidden_states_gets_passes_of_fixed_shape():
    model = tiny_model("gemma2")
    expected = model.generate(IDS, **GREEDY)
    config = LookaheadConfig(budget=8, cuda_graphs=True)
    lookahead.wrap(model, config, source=[PoolSource(), Sees(expected.tolist())])
    model.lookahead.graphs = StepGraphs(model, capture=None)
    assert model.generate(IDS, **GREEDY).tolist() == expected.tolist()
    assert "passes: CUDA graphs" in model.lookahead.report()
    assert "given up" not in model.lookahead.report()


def test_what_sees_hidden_states_gets_fused_passes():
    model = tiny_model("llama")
    expected = model.generate(IDS, **GREEDY)
    lookahead.wrap(model, source=[PoolSource(), Sees(expected.tolist())])
    for _ in range(2):  # transformers leaves hooks behind
        assert model.generate(IDS, **GREEDY).tolist() == expected.tolist()
        assert "passes: fused" in model.lookahead.report()


@pytest.mark.parametrize("options", [GREEDY, {"do_sample": True, "max_new_tokens": 40}])
@pytest.mark.parametrize("window", [{"window_size": 0}, {}])
@pytest.mark.parametrize("model_type", ["llama", "trocr"])  # trees, and single chains
def test_the_short_road_of_the_pool_leads_where_the_long_one_does(model_type, window, options, monkeypatch):
    """Also where a window opens and closes in the midst of a text."""
    monkeypatch.setattr(budgets, "FIRST_PAUSE", 7)
    monkeypatch.setattr(budgets, "TRIAL_STEPS", 5)

    def written(is_short: bool) -> tuple:
        with pytest.MonkeyPatch.context() as patch:
            if not is_short:
                patch.setattr(combine, "PoolAlone", lambda *_: None)
            patch.setattr(StepCosts, "follow", lambda *_: None)
            patch.setattr(costs, "_known", type(costs._known)())
            patch.setattr(measuring, "measure", lambda *_: StepCosts(1e-2 * (1 + np.arange(8) / 20), np.zeros(2)))
            patch.setattr(costs, "_load", lambda path: None)
            model = lookahead.wrap(tiny_model(model_type), LookaheadConfig(**window))
            torch.manual_seed(0)
            texts = [model.generate(IDS, **options).tolist() for _ in range(2)]
            stats = model.lookahead.stats
        pool = stats.sources["PoolSource"]
        counted = pool.asked, pool.proposed, pool.accepted, pool.earned, stats.steps, stats.window_tokens
        assert (stats.window_tokens > 0) == (model_type == "llama" and not window)
        return texts, counted, dict(stats.accepted)

    assert written(True) == written(False)


def test_only_what_is_asked_for_is_shown():
    shown = []

    class Modest(Wrong):
        def observe_prompt(self, text, logits, hidden_states):
            shown.append((len(logits), hidden_states))

        def observe(self, outcome):
            shown.append((None, outcome.hidden_states))

    model = lookahead.wrap(tiny_model("llama"), LookaheadConfig(budget=4), source=Modest())
    model.generate(IDS, max_new_tokens=3, min_new_tokens=3)
    assert shown == [(1, {}), (None, {}), (None, {})]


# -- wrong sources ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [3, object(), [object()], "pool", [PoolSource(), "pool"], Wrong, [Wrong], GuessSource(), Guesser()],
    ids=lambda source: str(source)[:20],
)
def test_what_is_no_source_is_refused_with_a_remedy(source):
    model = tiny_model("llama")
    with pytest.raises(TypeError, match=r"lookahead\.GuessSource and defines propose\(texts, limits\)"):
        lookahead.wrap(model, source=source)
    assert not hasattr(model, "lookahead")
    lookahead.wrap(model)
    engine = model.lookahead
    with pytest.raises(TypeError, match=r"lookahead\.GuessSource"):
        lookahead.wrap(model, source=source)
    assert model.lookahead is engine


def test_no_source_at_all_is_refused_with_a_remedy():
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="leave it out for the n-gram pool"):
        lookahead.wrap(model, source=[])
    assert not hasattr(model, "lookahead")


class TooMany(Wrong):
    def propose(self, texts, limits):
        return [*super().propose(texts, limits), GuessTree.empty()]


class TooFew(GuessSource):
    def propose(self, texts, limits):
        return []


class HasNone(GuessSource):
    def propose(self, texts, limits):
        return [None for _ in texts]


@pytest.mark.parametrize("others", [[], [PoolSource()]], ids=["alone", "with the pool"])
@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            HasNone(),
            "HasNone proposes None in place of a GuessTree: propose GuessTree.empty() where there is nothing to guess",
        ),
        (TooMany(), "TooMany proposes 2 trees for 1 sequences"),
        (TooFew(), "TooFew proposes 0 trees for 1 sequences"),
        (Wrong(VOCABULARY), f"Wrong proposes token {VOCABULARY}, but the model knows {VOCABULARY} tokens"),
        (Wrong(2**40), f"Wrong proposes token {2**40}, but the model knows {VOCABULARY} tokens"),
    ],
    ids=["None", "too many", "too few", "beyond", "far beyond"],
)
def test_wrong_trees_are_refused_by_the_name_of_their_class(source, message, others):
    model = tiny_model("llama")
    expected = model.generate(IDS, **GREEDY)
    lookahead.wrap(model, LookaheadConfig(budget=4), source=[*others, source])
    with pytest.raises((TypeError, ValueError), match="proposes") as error:
        model.generate(IDS, **GREEDY)
    assert str(error.value) == message
    lookahead.wrap(model, source=PoolSource())
    assert model.generate(IDS, **GREEDY).tolist() == expected.tolist()
    model.lookahead.pool.check_integrity()


@pytest.mark.parametrize("started", [None, 3, Wrong])
def test_a_start_that_returns_no_guesser_is_refused_with_a_remedy(started):
    class Notes(Wrong):
        def start(self, batch):
            return started

    model = tiny_model("llama")
    expected = model.generate(IDS, **GREEDY)
    source = Notes()
    lookahead.wrap(model, source=[PoolSource(), source])
    with pytest.raises(
        TypeError, match=r"start of Notes returns .* in place of a Guesser: return what guesses in this"
    ):
        model.generate(IDS, **GREEDY)
    started = source
    assert model.generate(IDS, **GREEDY).tolist() == expected.tolist()


class Fault(Exception):
    pass


class Fails(Wrong):
    """Fails once, when a method is called the n-th time."""

    def __init__(self, method: str, at: int):
        super().__init__()
        self._counts, self._fails = [0], (method, at)

    def _count(self, method: str):
        if method == self._fails[0]:
            self._counts[0] += 1
            if self._counts[0] == self._fails[1]:
                raise Fault

    def start(self, batch):
        self._count("start")
        return self

    def observe_prompt(self, text, logits, hidden_states):
        self._count("observe_prompt")

    def propose(self, texts, limits):
        self._count("propose")
        return super().propose(texts, limits)

    def look_ahead(self, limits):
        self._count("look_ahead")
        return super().look_ahead(limits)

    def observe(self, outcome):
        self._count("observe")

    def select(self, sequences):
        self._count("select")


@pytest.mark.parametrize("order", [1, -1], ids=["before the pool", "after the pool"])
@pytest.mark.parametrize("model_type", ["llama", "lfm2"])
@pytest.mark.parametrize(
    ("method", "at"),
    [
        ("start", 1),
        ("observe_prompt", 1),
        ("propose", 1),
        ("propose", 9),
        ("look_ahead", 3),
        ("observe", 1),
        ("observe", 9),
    ],
)
def test_after_a_source_has_failed_all_is_well(method, at, model_type, order):
    model = tiny_model(model_type)
    expected = model.generate(IDS, **GREEDY)
    lookahead.wrap(model, LookaheadConfig(budget=4, window_size=2), source=[Fails(method, at), PoolSource()][::order])
    with pytest.raises(Fault):
        model.generate(IDS, **GREEDY)
    model.lookahead.pool.check_integrity()
    for _ in range(2):
        assert model.generate(IDS, **GREEDY).tolist() == expected.tolist()
        assert model.lookahead.last.steps > 0
    lookahead.unwrap(model)
    assert model.generate(IDS, **GREEDY).tolist() == expected.tolist()


def test_after_a_source_has_failed_as_a_batch_shrinks_all_is_well():
    model = tiny_model("llama")
    inputs = left_pad([random_prompt(random.Random(seed)) for seed in range(4)])
    end = model.generate(**inputs, max_new_tokens=30, do_sample=False)[0, -25].item()
    options = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": end}
    expected = model.generate(**inputs, **options)
    lookahead.wrap(model, LookaheadConfig(budget=4), source=[PoolSource(), Fails("select", 1)])
    with pytest.raises(Fault):
        model.generate(**inputs, **options)
    assert model.generate(**inputs, **options).tolist() == expected.tolist()
    model.lookahead.pool.check_integrity()


# -- calls and wraps --------------------------------------------------------------------------------------------------


def test_what_a_call_notes_is_its_own():
    """Two threads, of which each begins while the other is under way."""
    both = threading.Barrier(2, timeout=60)

    class Notes(Wrong):
        def start(self, batch):
            return Noting(batch)

    class Noting(Wrong):
        def __init__(self, batch):
            super().__init__()
            self.prompt, self.count = list(batch.texts[0]), 0

        def propose(self, texts, limits):
            if len(texts[0]) == len(self.prompt) + 1:
                both.wait()
            assert texts[0][: len(self.prompt)] == self.prompt
            self.count += 1
            return super().propose(texts, limits)

        def observe(self, outcome):
            assert outcome.texts[0][: len(self.prompt)] == self.prompt
            assert self.count == len(outcome.texts[0]) - len(self.prompt)

    model = tiny_model("llama")
    prompts = [IDS, IDS.flip(1)]
    expected = [model.generate(ids, **GREEDY).tolist() for ids in prompts]
    source = Notes()
    lookahead.wrap(model, LookaheadConfig(budget=4), source=source)
    texts: dict[int, list] = {}

    def decode(number: int):
        texts[number] = model.generate(prompts[number], **GREEDY).tolist()

    threads = [threading.Thread(target=decode, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [texts[0], texts[1]] == expected
    assert vars(source) == vars(Wrong()), "what a call noted is seen by the next"


def test_wrapping_again_keeps_the_source():
    model = tiny_model("llama")
    expected = model.generate(IDS, **GREEDY)
    source, pool = Knows(expected.tolist()), NgramPool(0.1)
    lookahead.wrap(model, LookaheadConfig(budget=3), pool, source)
    ledger = model.lookahead.ledger
    assert lookahead.wrap(model).lookahead.ledger is ledger
    lookahead.wrap(model, LookaheadConfig(budget=8))
    engine = model.lookahead
    assert engine.source is source
    assert engine.sources == [source]
    assert model.generate(IDS, **GREEDY).tolist() == expected.tolist()
    assert set(engine.last.accepted) == {"Knows"}
    lookahead.wrap(model, source=PoolSource())
    engine = model.lookahead
    assert [type(one) for one in engine.sources] == [PoolSource]
    assert engine.config.budget == 8
    assert engine.pool is pool
    assert model.generate(IDS, **GREEDY).tolist() == expected.tolist()
    assert engine.stats.calls == 2
    assert "Knows" not in engine.last.accepted
    lookahead.unwrap(model)
    lookahead.wrap(model)
    assert [type(one).__name__ for one in model.lookahead.sources] == ["PoolSource", "WindowSource"]


def test_a_wrap_with_a_source_is_copied_and_pickled():
    import copy
    import pickle

    model = tiny_model("llama")
    expected = model.generate(IDS, **GREEDY)
    lookahead.wrap(model, source=[Knows(expected.tolist()), PoolSource()])
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert again.generate(IDS, **GREEDY).tolist() == expected.tolist()
        assert again.lookahead.last.accepted["Knows"] > 0


def test_chain_only_models_are_among_those_tried():
    assert {"zaya"} <= CHAIN_ONLY


# -- sources that write to what they get -------------------------------------------------------------------------------


class Writes(GuessSource):
    """Writes to one of the things that it gets, as by a slip."""

    needs = Needs(prompt_logits=1)

    def __init__(self, to: str):
        self.to = to

    def start(self, batch):
        if self.to == "prompts":
            for text in batch.texts:
                text.clear()
        return self

    def observe_prompt(self, text, logits, hidden_states):
        if self.to == "prompt":
            text.append(5)
        elif self.to == "logits of the prompt":
            logits.div_(0.5)[..., :60] = -1e9

    def propose(self, texts, limits):
        trees = [GuessTree.chain([text[-2] if len(text) > 1 else 5, 6, 7]) for text in texts]
        if self.to == "texts":
            for text, tree in zip(texts, trees, strict=True):
                text += tree.tokens.tolist()
        elif self.to == "depths":
            limits.depths[:] = [10**6] * len(texts)
            return [GuessTree.chain([5] * 99) for _ in texts]
        return trees

    def observe(self, outcome):
        if self.to == "logits":
            outcome.logits.zero_()
        if self.to == "outcome":
            for one in (*outcome.texts, *outcome.paths, *outcome.emitted):
                one.insert(0, 5)
            for one in (outcome.texts, outcome.steps, outcome.first, outcome.hidden_states):
                one.clear()

    def select(self, sequences):
        sequences.clear()


@pytest.mark.parametrize("others", [[], [PoolSource()]], ids=["alone", "with the pool"])
@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("to", ["prompts", "prompt", "logits of the prompt", "texts", "depths", "logits", "outcome"])
def test_a_source_that_writes_to_what_it_gets_changes_no_text(to, sample, others):
    model, options = tiny_model("llama"), {**GREEDY, "do_sample": sample}
    torch.manual_seed(0)
    expected = model.generate(IDS.repeat(2, 1), **options).tolist()
    lookahead.wrap(model, LookaheadConfig(budget=8, window_size=0), source=[*others, Writes(to)])
    torch.manual_seed(0)
    assert model.generate(IDS.repeat(2, 1), **options).tolist() == expected


def test_draws_cannot_be_written_to():
    class Scales(GuessSource):
        def propose(self, texts, limits):
            limits.draws[0][...] *= 2
            return [GuessTree.empty() for _ in texts]

    model = lookahead.wrap(tiny_model("llama"), source=[PoolSource(), Scales()])
    with pytest.raises(ValueError, match="read-only"):
        model.generate(IDS, max_new_tokens=9, do_sample=True)


def test_a_generator_of_trees_is_taken():
    class Yields(GuessSource):
        def propose(self, texts, limits):
            for _ in texts:
                yield GuessTree.chain([5, 6])

    model = tiny_model("llama")
    expected = model.generate(IDS, **GREEDY).tolist()
    lookahead.wrap(model, source=Yields())
    assert model.generate(IDS, **GREEDY).tolist() == expected
    assert model.lookahead.last.sources["Yields"].proposed > 0


@pytest.mark.parametrize(
    "rows", [None, [], 5, [[np.array([97])]], [[np.array([-1])]], [[np.array([0.5])]], [[[5, 6], [7]]], [[[]]]], ids=str
)
def test_a_wrong_window_is_refused_by_the_name_of_its_class(rows):
    class Looks(GuessSource):
        def propose(self, texts, limits):
            return [GuessTree.empty() for _ in texts]

        def look_ahead(self, limits):
            return rows

    model = lookahead.wrap(tiny_model("llama"), source=Looks())
    with pytest.raises(ValueError, match=r"Looks\.look_ahead returns .* for 1 sequences: return a list for each"):
        model.generate(IDS, **GREEDY)


def test_needs_and_tokens_of_a_wrong_type_are_refused_by_the_name_of_their_class():
    class Needy(GuessSource):
        needs = None

        def propose(self, texts, limits):
            return [GuessTree(np.array([5.0]), np.array([-1]), np.array([1]), np.ones(1), np.array([-1]))]

    model = tiny_model("llama")
    with pytest.raises(TypeError, match=r"Needy\.needs=None must be a lookahead\.extending\.Needs"):
        lookahead.wrap(model, source=Needy())
    Needy.needs = Needs()
    lookahead.wrap(model, source=[PoolSource(), Needy()])
    with pytest.raises(TypeError, match=r"Needy proposes tokens of float64: make trees by GuessTree\.of"):
        model.generate(IDS, **GREEDY)


class OddNumbers(GuessSource):
    """Proposes right numbers in dtypes that C++ does not read."""

    is_free = True

    def __init__(self, kind, is_calibrated):
        self.kind, self.is_calibrated = kind, is_calibrated

    def propose(self, texts, limits):
        counts = [min(limits.guesses, depth, 12) for depth in limits.depths]
        return [self.tree(count) if count else GuessTree.empty() for count in counts]

    def tree(self, n):
        numbers = np.arange(3, 3 + n), np.arange(-1, n - 1), np.arange(1, n + 1), 0.9 ** np.arange(n), np.full(n, -1)
        tokens, parents, depths, probabilities, sources = numbers
        whole = np.int64 if np.dtype(self.kind).kind == "f" else self.kind
        probabilities = probabilities.astype(self.kind) if np.dtype(self.kind).kind == "f" else probabilities
        return GuessTree(tokens.astype(whole), parents, depths.astype(whole), probabilities, sources)

    def look_ahead(self, limits):
        return [[np.array([3, 4], self.kind)] if np.dtype(self.kind).kind in "iu" else [] for _ in limits.depths]


@pytest.mark.parametrize("is_calibrated", [False, True])
@pytest.mark.parametrize("kind", ["uint64", "uint8", "int16", "float64", "float16"])
def test_numbers_of_any_kind_become_those_that_are_read(kind, is_calibrated):
    model = tiny_model("llama")
    options = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None}
    expected = model.generate(IDS, **options).tolist()
    lookahead.wrap(model, LookaheadConfig(budget=8, window_size=0), source=[OddNumbers(kind, is_calibrated)])
    assert model.generate(IDS, **options).tolist() == expected


@pytest.mark.parametrize("name", ["tokens", "parents", "depths", "sources"])
def test_numbers_that_are_not_whole_are_named(name):
    class Odd(OddNumbers):
        def tree(self, n):
            tree = super().tree(n)
            return replace(tree, **{name: getattr(tree, name).astype(float)})

    model = lookahead.wrap(tiny_model("llama"), LookaheadConfig(budget=8), source=Odd("int64", True))
    with pytest.raises((TypeError, IndexError), match=rf"Odd proposes {name} of float64|must be of integer"):
        model.generate(IDS, max_new_tokens=20)


@pytest.mark.parametrize("proposed", [GuessTree.chain([3]), np.zeros(1)])
def test_what_is_no_list_of_trees_is_named(proposed):
    class Odd(GuessSource):
        def propose(self, texts, limits):
            return proposed

    model = lookahead.wrap(tiny_model("llama"), LookaheadConfig(budget=8), source=Odd())
    with pytest.raises(TypeError, match=r"Odd proposes .*: propose a list, of a GuessTree for each sequence"):
        model.generate(IDS, max_new_tokens=4)
