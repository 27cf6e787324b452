"""Draft-free, lossless lookahead decoding for Hugging Face causal language models.

model = lookahead.wrap(model)  # generate() now decodes by lookahead: same signature, same result
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lookahead.config import LookaheadConfig as LookaheadConfig
    from lookahead.engine.custom import decode as decode
    from lookahead.engine.engine import Lookahead as Lookahead
    from lookahead.guessing.pool import PoolSource as PoolSource
    from lookahead.guessing.source import Guesser as Guesser
    from lookahead.guessing.source import GuessSource as GuessSource
    from lookahead.models.adapter import UnsupportedModelError as UnsupportedModelError
    from lookahead.sequences import Sequences as Sequences
    from lookahead.sources.draft import DraftModelSource as DraftModelSource
    from lookahead.sources.eagle import EagleSource as EagleSource
    from lookahead.sources.layer_skip import LayerSkipSource as LayerSkipSource
    from lookahead.sources.medusa import MedusaSource as MedusaSource
    from lookahead.sources.mtp import MtpSource as MtpSource
    from lookahead.sources.retrieval import RetrievalSource as RetrievalSource
    from lookahead.stats import Stats as Stats
    from lookahead.streaming import stream as stream
    from lookahead.tools.gguf import load_gguf as load_gguf
    from lookahead.tools.trace import Trace as Trace
    from lookahead.tools.trace import trace as trace
    from lookahead.vocabulary import vocabulary_fingerprint as vocabulary_fingerprint
    from lookahead.wrapping import unwrap as unwrap
    from lookahead.wrapping import wrap as wrap
    from ngram_pool import GuessTree as GuessTree
    from ngram_pool import NgramPool as NgramPool
    from ngram_pool import Origin as Origin
    from ngram_pool import PoolFileError as PoolFileError

__version__ = "0.1.0"

DEMO_MODEL = Path(__file__).parent / "demo_model"
"""Folder of the small model that the package carries, in Hugging Face format."""

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
    "decode": "lookahead.engine.custom",
    "load_gguf": "lookahead.tools.gguf",
    "stream": "lookahead.streaming",
    "trace": "lookahead.tools.trace",
    "unwrap": "lookahead.wrapping",
    "vocabulary_fingerprint": "lookahead.vocabulary",
    "wrap": "lookahead.wrapping",
}
__all__ = ["DEMO_MODEL", *_HOMES]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
