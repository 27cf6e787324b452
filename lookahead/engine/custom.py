"""Lookahead decoding of a single call, without `wrap`: for ``generate(custom_generate=lookahead.decode)``."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.utils import ModelOutput

from lookahead.compat.loops import own_loop
from lookahead.config import LookaheadConfig
from lookahead.engine.engine import Lookahead, check_settings
from lookahead.engine.loop import run
from lookahead.guessing.bigrams import new_pool
from lookahead.guessing.source import GuessSource
from ngram_pool import NgramPool


def decode(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    lookahead_config: LookaheadConfig | None = None,
    pool: NgramPool | None = None,
    source: GuessSource | Sequence[GuessSource] | None = None,
    **model_kwargs: Any,
) -> torch.Tensor | ModelOutput:
    """Decode one call by lookahead: ``model.generate(**inputs, custom_generate=lookahead.decode)``.

    generate() prepares all arguments but three, which it passes on:
    lookahead_config: settings.
    pool: the pool to guess from and to learn in; default: a new pool, as for `wrap`.
    source: one source of guesses, or several; default: the pool and its Jacobi window.
    transformers passes neither a streamer nor a tokenizer (for stop strings) to a custom_generate. `wrap` has both.

    Returns the same as generate(): int64 [sequences, n], or a GenerateDecoderOnlyOutput.
    Raises UnsupportedModelError for a model that lookahead cannot decode. Raises ValueError for a source that cannot
    guess for this model, and for beam search, which generate() does not support with custom_generate.
    """
    if generation_config.num_beams > 1:
        raise ValueError(
            f"custom_generate=lookahead.decode does not search with beams (num_beams={generation_config.num_beams}): "
            "call generate() without it"
        )
    check_settings(lookahead_config, pool)
    config = lookahead_config or LookaheadConfig()
    engine = Lookahead(config, pool if pool is not None else new_pool(model, config), source)
    for one in engine.sources:
        one.check_model(model)
    return run(
        engine, own_loop(model), model, input_ids, logits_processor, stopping_criteria, generation_config,
        **model_kwargs,
    )  # fmt: skip
