"""Calls of generate() with an assistant model, which becomes one more source of guesses."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import ModelOutput

from lookahead.config import LookaheadConfig
from lookahead.engine import loop
from lookahead.engine.engine import Lookahead
from lookahead.guessing.combine import trials_of
from lookahead.guessing.source import GuessSource
from lookahead.models.adapter import UnsupportedModelError
from lookahead.sources.draft import DraftModelSource
from lookahead.vocabulary import vocabulary_fingerprint

ASSISTED_ARGUMENTS = ("inputs_tensor", "tokenizer", "assistant_tokenizer")
"""Arguments that generate() passes only to assisted decoding, beside the assistant model."""

# Settings of assisted decoding for other guesses than those of an assistant model, or for another text.
OTHER_ASSISTANCE = (
    "assistant_early_exit", "assistant_ensemble_weight", "prompt_lookup_num_tokens", "speculation_type", "use_mtp",
)  # fmt: skip


def run(
    engine: Lookahead | None,
    own: Callable,
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    *,
    assistant_model: PreTrainedModel | None = None,
    **kwargs: Any,
) -> torch.Tensor | ModelOutput:
    """Decode by lookahead, or by ``own``, the model's own method, with one warning. engine: None: the model has none.

    Arguments as for `loop.run`.
    """
    arguments = {name: kwargs.pop(name) for name in ASSISTED_ARGUMENTS if name in kwargs}
    plain = partial(own, assistant_model=assistant_model, **arguments)
    if engine is None:
        return plain(model, input_ids, **kwargs)
    reason = why_no_draft_model(assistant_model, kwargs["generation_config"], arguments, engine.config)
    if reason is not None:
        engine.decode_plainly(model, reason)
        return plain(model, input_ids, **kwargs)
    return loop.run(engine, plain, model, input_ids, draft_model=assistant_model, **kwargs)


def sources_with(engine: Lookahead, draft_model: PreTrainedModel) -> list[GuessSource]:
    """The sources of a call. The last is the assistant model passed to generate().

    All draft models of a wrap share one account in the ledger.
    """
    source = DraftModelSource(draft_model, engine.config)
    trials = trials_of(source)  # not below: it makes a lock, and a fork waits for both
    with engine.lock:
        if len(engine.ledger.trials) == len(engine.sources):
            engine.ledger.enter(source, trials)
    return [*engine.sources, source]


def why_no_draft_model(
    assistant: object, generation: GenerationConfig, arguments: dict, config: LookaheadConfig
) -> str | None:
    """Why an assistant model cannot be a source of guesses, or None if it can.

    arguments: the given ones of ASSISTED_ARGUMENTS.
    """
    for name in OTHER_ASSISTANCE:
        if getattr(generation, name, None):
            return f"with {name}"
    if not isinstance(assistant, PreTrainedModel) or assistant.config.is_encoder_decoder:
        return f"with an assistant model of class {type(assistant).__name__}"
    tokenizers = [arguments.get(name) for name in ("tokenizer", "assistant_tokenizer")]
    if all(tokenizers) and len({vocabulary_fingerprint(tokenizer) for tokenizer in tokenizers if tokenizer}) > 1:
        return "with an assistant model of another vocabulary"
    try:
        DraftModelSource(assistant, config).check()
    except UnsupportedModelError as error:
        return f"with this assistant model ({error})"
    return None
