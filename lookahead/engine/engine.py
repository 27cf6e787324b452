"""The engine of a wrapped model: its settings, its pool, its sources of guesses and its statistics."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from transformers import GenerationConfig, PreTrainedModel

from lookahead.compat import is_tensor_parallel
from lookahead.config import AUTO, LookaheadConfig
from lookahead.guessing.bigrams import new_pool
from lookahead.guessing.budget import Pace, Trials
from lookahead.guessing.combine import Ledger, needs_of
from lookahead.guessing.jacobi import WINDOW_SIZES, WindowSource
from lookahead.guessing.pool import PoolSource, check_pool
from lookahead.guessing.source import GuessSource, Needs, can_guess
from lookahead.models.adapter import ModelAdapter, vocabulary_of
from lookahead.passes.capabilities import choose_runner
from lookahead.passes.costs import step_costs
from lookahead.passes.packed import packed_of
from lookahead.passes.runner import EagerRunner
from lookahead.stats import Stats
from ngram_pool import NgramPool
from ngram_pool.forks import Lock

if TYPE_CHECKING:
    from lookahead.passes.graphs import StepGraphs

JACOBI_SIZE = 16  # positions of a Jacobi block, by default
# Guesses of a step whose budget must not depend on time.
BUDGET_WITHOUT_COSTS = 16
GREEDY_TEMPERATURE = 0.5  # for learning from logits in greedy decoding


def default_sources(config: LookaheadConfig) -> list[GuessSource]:
    """The default sources of guesses."""
    if config.strategy == "jacobi":
        from lookahead.sources.jacobi import JacobiSource  # only settings that ask for it need it

        return [JacobiSource(JACOBI_SIZE if config.budget == AUTO else config.budget)]
    if config.window_size == AUTO:
        sizes = [(size, n if config.ngram_size == AUTO else config.ngram_size) for size, n in WINDOW_SIZES]
        return [PoolSource(), WindowSource(sizes, Trials(len(sizes)))]
    return [PoolSource(), WindowSource([(config.window_size, config.window_ngram_size)] if config.window_size else [])]


def check_settings(config: object, pool: object) -> None:
    """Raise TypeError for what is no setting of a wrap, or no pool. Each may be None."""
    if not isinstance(config, LookaheadConfig | None):
        raise TypeError(f"config={config!r:.80} must be a LookaheadConfig, such as LookaheadConfig(budget=8)")
    check_pool(pool)


def check_source(source: object) -> None:
    """Raise TypeError for what is no source of guesses."""
    if not (isinstance(source, GuessSource) and can_guess(source)):
        raise TypeError(
            f"source={source!r} is no source of guesses: give an object of a class that is derived from "
            "lookahead.GuessSource and defines propose(texts, limits), or start(batch)"
        )
    if not isinstance(source.needs, Needs):
        raise TypeError(f"{type(source).__name__}.needs={source.needs!r:.80} must be a lookahead.extending.Needs")


@dataclass
class Lookahead:
    """The engine of a wrapped model, ``model.lookahead``."""

    config: LookaheadConfig
    pool: NgramPool
    """The pool of all calls while the model is wrapped."""
    source: GuessSource | Sequence[GuessSource] | None = None
    """One source of guesses, or several, as passed to `wrap`; None: `default_sources`."""
    made: NgramPool | None = None
    """A pool that was made for this model, not given by the user. While it is in use, it may be replaced."""
    lacks_bigrams: bool = False
    """Whether the pool started empty, because `lookahead tune --bigrams` has stored no bigrams of this model."""
    stats: Stats = field(default_factory=Stats)
    """Statistics of all calls together."""
    last: Stats = field(default_factory=Stats)
    """Statistics of the call that began last, in any thread, also while it runs."""
    pace: Pace | None = None
    """Chooses budgets; None until a call needs it."""
    graphs: "StepGraphs | None" = None
    """CUDA graphs of the model, if the settings ask for them."""
    adapter: ModelAdapter | None = None
    """The adapter that the last call used, or `wrap` found before the first call."""
    passes: str = EagerRunner.name
    """How the last call ran its steps."""
    copied_bytes: int = 0
    """Bytes of the packed copy of weights (`pack_weights`) in the last call."""
    bytes_in_blocks: int = 0
    """Bytes of weights read from the blocks of a GGUF file in the last call."""
    lock: Lock = field(default_factory=Lock, repr=False)
    """Guards what several threads write to here."""
    _running: int = field(default=0, init=False)  # number of running calls
    why_not_faster: dict[str, str] = field(default_factory=dict)
    """Reasons against faster passes in the last call, by the name of the passes."""

    def __post_init__(self) -> None:
        given = default_sources(self.config) if self.source is None else self.source
        self.sources: list[GuessSource] = list(given) if isinstance(given, Sequence) else [given]
        for source in self.sources:
            check_source(source)
        if not self.sources:
            raise ValueError("source=[] holds no source of guesses: leave it out for the n-gram pool")
        self.ledger = Ledger(self.sources)

    @contextmanager
    def call(self) -> Iterator[None]:
        """Count the block as a running call."""
        with self.lock:
            self._running += 1
        try:
            yield
        finally:
            with self.lock:
                self._running -= 1

    @contextmanager
    def while_idle(self, what: str) -> Iterator[None]:
        """Let no call begin in this block. Raises RuntimeError, naming ``what`` cannot be done, if a call is
        running."""
        with self.lock:
            if self._running:
                raise RuntimeError(f"a model cannot be {what} while it decodes: wait until generate() has ended")
            yield

    def fit_pool(self, model: PreTrainedModel) -> None:
        """Begin a new pool if ours holds tokens that the model has lost (`resize_token_embeddings`)."""
        with self.lock:
            if self.pool is self.made and self.pool.largest_token >= vocabulary_of(model):
                self.pool = self.made = new_pool(model, self.config)

    def add(self, stats: Stats) -> None:
        """Add the statistics of a call to those of all calls."""
        with self.lock:
            self.stats += stats

    def decode_plainly(self, model: PreTrainedModel, reason: str) -> None:
        """Warn that the model's own decoding takes over a call, and store the reason for `report`."""
        from lookahead.engine.plain import warn_plain  # other calls need no warning

        self.last = Stats(plain=reason)
        warn_plain(model, reason)

    def report(self) -> str:
        """Lines of text: how passes are run, why not in a faster way, and what the sources did in all calls."""
        from lookahead.engine.report import report  # who decodes need not ask

        return report(self)

    @property
    def needs(self) -> Needs:
        """What all sources together need."""
        return needs_of(self.sources)

    def find_runner(self, model: PreTrainedModel, needs: Needs | None = None) -> EagerRunner:
        """The fastest runner that the settings allow and that supports the model.

        needs: of the sources of a call; by default, of all sources.
        """
        layers = (needs or self.needs).hidden_states
        runner, self.why_not_faster = choose_runner(model, self.config, layers)
        if self.config.cuda_graphs:
            from lookahead.passes.graphs import GraphRunner, StepGraphs  # other settings do not need them

            with self.lock:
                self.graphs = self.graphs or StepGraphs(model)
            runner = GraphRunner(self.graphs, runner)
        # The runner itself is not kept: it holds the model, which holds this.
        self.adapter, self.passes, packed = runner.adapter, runner.name, packed_of(model)
        self.copied_bytes, self.bytes_in_blocks = packed.copied_bytes, packed.bytes_in_blocks
        return runner

    @property
    def windows(self) -> WindowSource | None:
        """The source of Jacobi windows, if the engine has one."""
        return next((source for source in self.sources if isinstance(source, WindowSource)), None)

    def max_guesses(self, sequences: int, pace: Pace | None) -> int | None:
        """Guesses that a step of this many sequences verifies; None: as many as pay. pace: from `find_pace`."""
        budget = self.config.budget
        if self._is_plain_jacobi:
            return sequences * (JACOBI_SIZE if budget == AUTO else budget)
        if budget == AUTO:
            return None if pace else BUDGET_WITHOUT_COSTS
        return budget

    @property
    def goes_by_costs(self) -> bool:
        """Whether a choice depends on step costs, so that they must be measured (`costs.step_costs`)."""
        chooses = self.config.budget == AUTO and not self._is_plain_jacobi
        return chooses or (self.windows is not None and self.windows.trials is not None)

    @property
    def _is_plain_jacobi(self) -> bool:
        """Whether the settings ask for plain Jacobi decoding, and no other sources were given."""
        return self.source is None and self.config.strategy == "jacobi"

    @staticmethod
    def temperature(generation: GenerationConfig) -> float:
        """Temperature of the distribution that the next tokens come from, for learning from logits."""
        return float(generation.temperature or 1.0) if generation.do_sample else GREEDY_TEMPERATURE

    def prepare(self, model: PreTrainedModel) -> None:
        """Find the runner and measure step costs now, as far as needed, so that no call waits for it."""
        self.find_pace(self.find_runner(model))

    def find_pace(self, runner: EagerRunner) -> Pace | None:
        """The pace by which budgets and windows are chosen; None if nothing is chosen.

        The processes of a tensor-parallel model must take the same steps, but each would measure other times. So
        nothing is chosen by time there.
        """
        if not self.goes_by_costs or is_tensor_parallel(runner.model):
            return None
        costs = step_costs(runner)
        fresh = Pace(costs)
        with self.lock:
            if self.pace is None or self.pace.costs is not costs:
                self.pace = fresh
            return self.pace

    def __getstate__(self) -> dict:
        return vars(self) | {"_running": 0}
