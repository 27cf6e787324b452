"""What the engine offers to writers of sources of guesses, and of servers.

`lookahead.sources` imports nothing else of this package, and `lookahead.tools.server` nothing else that stands below
`lookahead.sequences` and `lookahead.streaming`.
"""

from lookahead.compat import CACHE, attention_implementation
from lookahead.compat.copies import copy_of_module
from lookahead.compat.mtp import mtp_logits, mtp_model, run_mtp_layer
from lookahead.config import LookaheadConfig
from lookahead.cpu import gemm, products
from lookahead.guessing.budget import Budget, Pace, average_length
from lookahead.guessing.combine import Combined, Ledger
from lookahead.guessing.draws import draws_at
from lookahead.guessing.pool import PoolGuesser, PoolSource
from lookahead.guessing.source import Batch, Guesser, GuessSource, Limits, Needs, Outcome, top_k
from lookahead.models.adapter import UnsupportedModelError, context_length, device_of, vocabulary_of
from lookahead.models.cache import AnyCache, InPlaceLayer, LookaheadCache, copy_of_cache
from lookahead.models.kept import OfModels
from lookahead.models.layers import read_config
from lookahead.models.passed_in import bytes_of, can_be_cut, cut, empty_cache
from lookahead.models.rewinding import can_rewind, part_of, rewind
from lookahead.models.state import state_of
from lookahead.passes import stored
from lookahead.passes.capabilities import can_batch, choose_runner
from lookahead.passes.costs import StepCosts, step_costs
from lookahead.passes.environment import processor
from lookahead.passes.measuring import synchronize, time_passes
from lookahead.passes.replaying import settle
from lookahead.passes.runner import EagerRunner
from lookahead.stats import Stats
from lookahead.step import Step, grow, lay_out

__all__ = [  # noqa: RUF022 - by what they are for
    # What a source is, is shown, and proposes.
    "Batch",
    "Guesser",
    "GuessSource",
    "Limits",
    "Needs",
    "Outcome",
    "draws_at",
    "top_k",
    "Step",
    "grow",
    "lay_out",
    # Sources of a draft model's own, and which of their guesses pay.
    "Budget",
    "Pace",
    "average_length",
    "Combined",
    "Ledger",
    "PoolGuesser",
    "PoolSource",
    "Stats",
    # A model: what it is, and copies of its modules.
    "attention_implementation",
    "copy_of_module",
    "LookaheadConfig",
    "UnsupportedModelError",
    "context_length",
    "device_of",
    "vocabulary_of",
    "read_config",
    "mtp_logits",
    "mtp_model",
    "run_mtp_layer",
    "state_of",
    "OfModels",
    # Passes over it: what runs them, on which cache, and what they cost.
    "gemm",
    "products",
    "AnyCache",
    "InPlaceLayer",
    "LookaheadCache",
    "copy_of_cache",
    "can_rewind",
    "part_of",
    "rewind",
    "CACHE",
    "empty_cache",
    "can_be_cut",
    "cut",
    "bytes_of",
    "can_batch",
    "choose_runner",
    "StepCosts",
    "step_costs",
    "synchronize",
    "time_passes",
    "processor",
    # What was found out about a model, for later processes.
    "stored",
    "EagerRunner",
    "settle",
]
