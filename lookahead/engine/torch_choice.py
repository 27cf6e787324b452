"""The next token as `generate` itself chooses it: by transformers' processors and torch's own functions.

`NextTokenRule` needs it for processors of users, sequences that go in step, scores that are kept, criteria that see
ids, other devices, and where rounding might decide.
"""

from collections.abc import Sequence

import torch
from transformers import LogitsProcessorList

from lookahead.cpu.choice import Warp
from lookahead.engine.sampling import NextTokenRule
from lookahead.step import Step


def emit(rule: NextTokenRule, logits: torch.Tensor, changed: torch.Tensor | None = None) -> list[int]:
    """`NextTokenRule.emit`. logits: [live, vocabulary].

    changed: the scores after the changes of `NextTokenRule.shortcut`, if it has any.
    """
    settings = rule.settings
    raw = _with_ended(rule, logits.to(dtype=torch.float32, device=rule.ids.device, copy=True))
    scores, done = (raw, 0) if changed is None or rule.shortcut is None else (changed, len(rule.shortcut[0]))
    if rule.ids.shape[1] == rule.width:  # once alone: it inspects signatures, which takes as long as some processors
        scores = LogitsProcessorList(rule.processors[done:])(rule.ids, scores)  # type: ignore[arg-type]  # of int64
    else:
        for processor in rule.processors[done:]:
            scores = processor(rule.ids, scores)
    if rule.scores is not None:
        rule.scores += (scores,)
    if rule.logits is not None:
        rule.logits += (raw,)
    has_rows = isinstance(scores, torch.Tensor) and scores.dtype == torch.float32 and scores.ndim == 2
    is_usual = has_rows and len(scores) == 1
    token, no_choice = rule.choose(scores, 0, Warp()) if is_usual else None, None
    if token is not None:
        chosen = scores.new_tensor([token], dtype=torch.long)
    elif settings.do_sample:
        probabilities = torch.nn.functional.softmax(scores, dim=-1)
        no_choice = probabilities[:, 0].isnan()  # one NaN in a row, or nothing but -inf, makes all of it NaN
        if no_choice.is_cpu and no_choice.any():  # nothing is drawn yet; a GPU would have to be waited for
            raise _nothing_to_draw(rule.ids.shape[1])
        probabilities.masked_fill_(no_choice[:, None], 1.0)  # on a GPU, multinomial would end the process
        pairs = zip(probabilities.chunk(len(rule.generators)), rule.generators, strict=True)
        chosen = torch.cat([torch.multinomial(part, 1, generator=own) for part, own in pairs]).squeeze(1)
    else:
        chosen = torch.argmax(scores, dim=-1)  # a NaN ranks highest, as it does to generate()
    if settings.pad_token is not None and len(rule.ids) > 1:
        chosen = chosen.where(rule.unfinished, settings.pad_token)
    return _record(rule, chosen, no_choice)


def record(rule: NextTokenRule, token: int) -> int:
    """`NextTokenRule.record` for criteria that see the ids of each token."""
    (written,) = _record(rule, torch.tensor([token], device=rule.ids.device))
    return written


def _record(rule: NextTokenRule, chosen: torch.Tensor, no_choice: torch.Tensor | None = None) -> list[int]:
    """Add the chosen tokens to their sequences, see which of these end, and stream them.

    no_choice: the sequences, bool [sequences], of which no token could be drawn; None: there are none.
    """
    rule.extend(chosen)
    rule.unfinished = rule.unfinished & ~rule.criteria(rule.ids, rule.scores)
    # A criterion may write another token into the ids. Plain decoding reads it there, and streams the chosen one.
    of_each = [chosen, rule.ids[:, -1], rule.unfinished.long(), *([] if no_choice is None else [no_choice.long()])]
    tokens, written, unfinished, *spoiled = torch.stack(of_each).tolist()
    if any(map(any, spoiled)):
        raise _nothing_to_draw(rule.ids.shape[1] - 1)
    emitted = [written[sequence] for sequence in rule.live]
    if len(rule.ids) == 1:
        rule.new += emitted
        if rule.may_be_rewritten:  # in other columns, too
            rule.new[:] = rule.ids[0, rule.width :].tolist()
    if rule.drops_ended or not any(unfinished):
        rule.select([sequence for sequence in rule.live if unfinished[sequence]])
    if rule.settings.streamer is not None:
        rule.settings.streamer.put(torch.tensor(tokens, device="cpu"))
    return emitted


def _nothing_to_draw(position: int) -> RuntimeError:
    """The error that multinomial raises on a CPU."""
    return RuntimeError(
        f"the scores of the token at position {position} are NaN, or all -inf: the model's weights or a logits "
        "processor are at fault, or the dtype is too narrow"
    )


def _with_ended(rule: NextTokenRule, rows: torch.Tensor) -> torch.Tensor:
    """Add rows of zeros for the sequences that have ended, in their places. rows: one for each live sequence."""
    if len(rule.live) == len(rule.ids):
        return rows
    live = torch.tensor(rule.live, device=rows.device)
    return rows.new_zeros(len(rule.ids), *rows.shape[1:]).index_copy_(0, live, rows)


def walk_in_step(
    rule: NextTokenRule, steps: Sequence[Step], logits: torch.Tensor, first: Sequence[int]
) -> tuple[list[list[int]], list[list[int]]]:
    """`walk` for a rule whose sequences all go as far as each of them has guessed. first: the rows of their roots."""
    children, index = [step.children() for step in steps], {sequence: i for i, sequence in enumerate(rule.live)}
    paths: list[list[int]] = [[0] for _ in steps]
    tokens: list[list[int]] = [[] for _ in steps]
    while rule.live:
        at = [index[sequence] for sequence in rule.live]
        for i, token in zip(at, rule.emit(logits[[first[i] + paths[i][-1] for i in at]]), strict=True):
            tokens[i].append(token)
        at = [index[sequence] for sequence in rule.live]
        rows = [children[i].get((paths[i][-1], tokens[i][-1]), -1) for i in at]
        if -1 in rows:
            break
        for i, row in zip(at, rows, strict=True):
            paths[i].append(row)
    return paths, tokens
