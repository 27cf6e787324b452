"""Draft-free, lossless lookahead decoding for Hugging Face causal language models.

model = lookahead.wrap(model)  # generate() now decodes by lookahead: same signature, same result
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lookahead.config import LookaheadConfig
    from lookahead.engine.engine import Lookahead
    from lookahead.engine.loop import decode
    from lookahead.guessing.pool import PoolSource
    from lookahead.guessing.source import Guesser, GuessSource
    from lookahead.models.adapter import UnsupportedModelError
    from lookahead.sequences import Sequences
    from lookahead.sources.draft import DraftModelSource
    from lookahead.sources.eagle import EagleSource
    from lookahead.sources.layer_skip import LayerSkipSource
    from lookahead.sources.medusa import MedusaSource
    from lookahead.sources.mtp import MtpSource
    from lookahead.sources.retrieval import RetrievalSource
    from lookahead.stats import Stats
    from lookahead.streaming import stream
    from lookahead.tools.trace import Trace, trace
    from lookahead.vocabulary import vocabulary_fingerprint
    from lookahead.wrapping import unwrap, wrap
    from ngram_pool import GuessTree, NgramPool, Origin, PoolFileError

__version__ = "0.1.0"

DEMO_MODEL = Path(__file__).parent / "demo_model"
"""Folder of the small model that the package carries, in Hugging Face format."""

__all__ = [
    "DEMO_MODEL",
    "DraftModelSource",
    "EagleSource",
    "GuessSource",
    "GuessTree",
    "Guesser",
    "LayerSkipSource",
    "Lookahead",
    "LookaheadConfig",
    "MedusaSource",
    "MtpSource",
    "NgramPool",
    "Origin",
    "PoolFileError",
    "PoolSource",
    "RetrievalSource",
    "Sequences",
    "Stats",
    "Trace",
    "UnsupportedModelError",
    "decode",
    "stream",
    "trace",
    "unwrap",
    "vocabulary_fingerprint",
    "wrap",
]

# Imported when first asked for (PEP 562), since torch and transformers take seconds.
_HOMES = {
    "DraftModelSource": "lookahead.sources.draft",
    "EagleSource": "lookahead.sources.eagle",
    "GuessSource": "lookahead.guessing.source",
    "Guesser": "lookahead.guessing.source",
    "GuessTree": "ngram_pool",
    "LayerSkipSource": "lookahead.sources.layer_skip",
    "Lookahead": "lookahead.engine.engine",
    "LookaheadConfig": "lookahead.config",
    "MedusaSource": "lookahead.sources.medusa",
    "MtpSource": "lookahead.sources.mtp",
    "NgramPool": "ngram_pool",
    "PoolFileError": "ngram_pool",
    "PoolSource": "lookahead.guessing.pool",
    "RetrievalSource": "lookahead.sources.retrieval",
    "Sequences": "lookahead.sequences",
    "Origin": "ngram_pool",
    "Stats": "lookahead.stats",
    "Trace": "lookahead.tools.trace",
    "UnsupportedModelError": "lookahead.models.adapter",
    "decode": "lookahead.engine.loop",
    "stream": "lookahead.streaming",
    "trace": "lookahead.tools.trace",
    "unwrap": "lookahead.wrapping",
    "vocabulary_fingerprint": "lookahead.vocabulary",
    "wrap": "lookahead.wrapping",
}


def __getattr__(name: str) -> object:
    if name == "Source":  # its name until it was told from sources of guesses
        name = "Origin"
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
