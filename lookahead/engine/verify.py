"""Verification: walk the guess trees by the rule that `generate` itself uses for the next token."""

from collections.abc import Sequence

import numpy as np
import torch

from lookahead.engine.sampling import NextTokenRule
from lookahead.step import Step


def walk(
    steps: Sequence[Step],
    logits: torch.Tensor,
    rules: Sequence[NextTokenRule],
    likeliest: tuple[np.ndarray, np.ndarray] | None = None,
) -> tuple[list[list[int]], list[list[int]]]:
    """Emit tokens as long as the trees have guessed them, and the first token of each sequence that was not guessed.

    A guess is a point distribution. So to draw a token by the ordinary rule, and to look for it in the tree, accepts it
    with the same probability as rejection sampling (Leviathan et al. 2023, arXiv 2211.17192, section 2.3).
    steps, logits: [live, T, vocabulary], of all live sequences, rule by rule.
    likeliest: `Output.likeliest`. A rule that takes the likeliest token then need not look at the logits.
    Returns the path of each sequence (rows to commit, beginning with the root's 0), and its emitted tokens, one for
    each row of the path.
    """
    children = [step.children() for step in steps]
    paths: list[list[int]] = [[0] for _ in steps]
    tokens: list[list[int]] = [[] for _ in steps]
    begin = 0
    for rule in rules:
        index = {sequence: begin + i for i, sequence in enumerate(rule.live)}
        begin += len(index)
        rows = list(index)  # from now on, the row of each emitted token's guess, or -1 if it was not guessed
        while rows and -1 not in rows:
            at = [index[sequence] for sequence in rule.live]
            first, row = at[0], paths[at[0]][-1]  # a single sequence, the usual case, needs no index
            if likeliest and rule.takes_likeliest and likeliest[1][first, row, 0] > 0:  # not after a row with a NaN
                new = rule.emit_token(int(likeliest[0][first, row, 0]))
            elif len(at) == 1:
                new = rule.emit(logits, first * logits.shape[1] + row)
            else:
                new = rule.emit(logits[at, [paths[i][-1] for i in at]])
            for i, token in zip(at, new, strict=True):
                tokens[i].append(token)
            at = [index[sequence] for sequence in rule.live]
            rows = [children[i].get((paths[i][-1], tokens[i][-1]), -1) for i in at]
            if -1 not in rows:
                for i, row in zip(at, rows, strict=True):
                    paths[i].append(row)
    return paths, tokens
