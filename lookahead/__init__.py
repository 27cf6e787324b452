"""Draft-free, lossless lookahead decoding for Hugging Face causal language models.

model = lookahead.wrap(model)  # generate() now decodes by lookahead: same signature, same result
"""

from pathlib import Path

from lookahead.architecture import UnsupportedModelError
from lookahead.config import LookaheadConfig
from lookahead.decoding import Lookahead, decode
from lookahead.stats import Stats
from lookahead.streaming import stream
from lookahead.vocabulary import vocabulary_fingerprint
from lookahead.wrapping import unwrap, wrap
from ngram_pool import NgramPool, PoolFileError, Source

__version__ = "0.1.0"

DEMO_MODEL = Path(__file__).parent / "demo_model"
"""Folder of the small model that the package carries, in Hugging Face format."""

__all__ = [
    "DEMO_MODEL",
    "Lookahead",
    "LookaheadConfig",
    "NgramPool",
    "PoolFileError",
    "Source",
    "Stats",
    "UnsupportedModelError",
    "decode",
    "stream",
    "unwrap",
    "vocabulary_fingerprint",
    "wrap",
]
