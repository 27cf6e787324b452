"""Replaces the loop of generate(): runs a call of lookahead (`call`), or the model's own decoding."""

from collections.abc import Callable, Sequence
from contextlib import closing
from copy import copy
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import BaseStreamer, MaxLengthCriteria
from transformers.utils import ModelOutput

from lookahead import compat
from lookahead.cpu import choice
from lookahead.engine.call import Call, Decoding
from lookahead.engine.draws import Race
from lookahead.engine.engine import Lookahead
from lookahead.engine.fallback import why_plain
from lookahead.engine.sampling import NewTokensProcessor, NextTokenRule, Settings, for_sequence, goes_by_sequence, whole
from lookahead.models.state import looked_at
from lookahead.passes.runner import Output

if TYPE_CHECKING:
    from lookahead.engine.batch_draws import BatchDraws


def run(engine: Lookahead, plain: Callable, *args: Any, **kwargs: Any) -> torch.Tensor | ModelOutput:
    """Decode by lookahead; or by ``plain``, the model's own method of the same signature, with one warning.

    Arguments as for `decoding`.
    """
    with closing(decoding(engine, plain, *args, **kwargs)) as steps:
        output: Output | None = None
        while True:
            try:
                wanted = next(steps) if output is None else steps.send(output)
            except StopIteration as end:
                return end.value
            except RuntimeError as error:
                if (stop := _stop_of_users(error)) is None:
                    raise
                raise stop from None
            output = None
            if wanted is not None:  # outside of the try: a hook's own StopIteration must not end the call
                output = wanted.runner.run(wanted.steps, wanted.cache, wanted.last, wanted.top_k, wanted.others_ran)


def _stop_of_users(error: RuntimeError) -> StopIteration | None:
    """The StopIteration that a callback raised, and that Python replaced as it left a generator of ours."""
    cause = error.__cause__
    if not isinstance(cause, StopIteration) or cause.__traceback__ is None:
        return None
    generator: str = cause.__traceback__.tb_frame.f_globals.get("__name__", "")
    return cause if generator.startswith("lookahead.") else None


def decoding(
    engine: Lookahead,
    plain: Callable,
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer: BaseStreamer | None = None,
    draft_model: PreTrainedModel | None = None,
    seeds: Sequence[int] | None = None,
    **model_kwargs: Any,
) -> Decoding:
    """`run`, but yields the passes of steps, and receives their outputs.

    Yields None between passes of prefills. Texts that ``plain`` decodes are complete when this returns.

    draft_model: one more source of guesses.
    seeds: a seed for each sequence. It is then sampled as it would be alone after ``torch.manual_seed(seed)``, whatever
        else is in the batch. No effect if ``plain`` decodes.
    """
    if input_ids.shape[1] == 0 and model_kwargs.get("inputs_embeds") is None:
        raise ValueError("the prompt is empty: give at least one token, such as the tokenizer's bos_token_id")
    if len(input_ids) == 0:
        raise ValueError("the batch is empty: give at least one prompt")
    with engine.call():
        with looked_at(model):
            generation = _with_length(generation_config, stopping_criteria, input_ids.shape[1])
            reason = why_plain(
                model, input_ids, generation, synced_gpus, model_kwargs, engine.config, engine.adapter is not None
            )
            if reason is None:
                rules, draws = _rules(
                    input_ids, logits_processor, stopping_criteria, generation_config, streamer, seeds
                )
                engine.fit_pool(model)
                callbacks = [*logits_processor, *stopping_criteria, *filter(None, [streamer])]
                call = Call(
                    engine, model, input_ids, generation, draft_model, model_kwargs, rules, draws, streamer,
                    callbacks,
                )  # fmt: skip
                steps = call.decode()
                next(steps)
                return steps
        engine.decode_plainly(model, reason)
        ended = plain(
            model, input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer,
            **model_kwargs,
        )  # fmt: skip
        return _ended(ended)


def _with_length(generation: GenerationConfig, criteria: StoppingCriteriaList, width: int) -> GenerationConfig:
    """The settings, with the length at which the text ends: a caller's criterion replaces that of generate().

    width: of the prompt, to which one token is always added.
    """
    lengths = [whole(criterion.max_length) for criterion in criteria if type(criterion) is MaxLengthCriteria]
    length = min(lengths, default=whole(generation.max_length))
    if isinstance(generation.max_length, int) and length == generation.max_length:
        return generation
    changed = copy(generation)
    changed.max_length = max(length, width + 1)
    return changed


def _ended(result: torch.Tensor | ModelOutput) -> Decoding:
    return result
    yield


def _rules(
    ids: torch.Tensor,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    generation: GenerationConfig,
    streamer: BaseStreamer | None,
    seeds: Sequence[int] | None,
) -> "tuple[list[NextTokenRule], BatchDraws | None]":
    """One rule for each sequence, so that they advance independently; or one for all, so that they advance together.

    In plain decoding they advance together. Callbacks that may see the whole batch need that.
    seeds: as for `decoding`. Also returns what the rules draw from, if it must be finished.
    """
    wants_dict = generation.return_dict_in_generate
    keeps = wants_dict and generation.output_scores, wants_dict and generation.output_logits
    pads = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
    at_own_pace = (
        (len(ids) > 1 or seeds is not None)
        and not (any(keeps) or streamer is not None)
        and all(map(goes_by_sequence, (*processors, *criteria)))
        and not (len(ids) > 1 and any(isinstance(processor, NewTokensProcessor) for processor in processors))
        and (pads or all(type(criterion) is MaxLengthCriteria for criterion in criteria))
    )
    pad_token = compat.pad_token(generation) if pads else None
    settings = Settings(generation.do_sample, pad_token, *keeps, streamer)
    if not at_own_pace:
        return [NextTokenRule(ids, processors, criteria, settings, _seeded(seeds, ids.device) if seeds else None)], None
    own = [
        LogitsProcessorList(for_sequence(processor, b, len(ids)) for processor in processors) for b in range(len(ids))
    ]
    # Each sequence has its own draws, so that they do not depend on how far the others advance in a step.
    draws: Sequence[Sequence[torch.Generator] | Race | None] = [None] * len(ids)
    of_batch = None
    if generation.do_sample and seeds is None and ids.is_cpu and choice.can_draw():
        from lookahead.engine.batch_draws import BatchDraws  # other calls draw nothing for several sequences

        of_batch = BatchDraws(len(ids))
        draws = of_batch.races()
    elif generation.do_sample:
        seeds = torch.randint(2**62, (len(ids),), device="cpu").tolist() if seeds is None else seeds
        draws = [[generator] for generator in _seeded(seeds, ids.device)]
    rules = [NextTokenRule(ids[b : b + 1], own[b], criteria, settings, draws[b]) for b in range(len(ids))]
    return rules, of_batch


def _seeded(seeds: Sequence[int], device: torch.device) -> list[torch.Generator]:
    return [torch.Generator(device).manual_seed(seed) for seed in seeds]
