"""Verification: walk the guess trees by the rule that `generate` itself uses for the next token."""

from collections.abc import Sequence

import torch

from lookahead.engine.sampling import NextTokenRule
from lookahead.step import Step


def walk(
    steps: Sequence[Step], logits: torch.Tensor, rules: Sequence[NextTokenRule]
) -> tuple[list[list[int]], list[list[int]]]:
    """Emit tokens from the roots on for as long as the trees guessed them, plus those that they did not.

    steps, logits: [live, T, vocabulary], of all live sequences, rule by rule.
    A guess is a point distribution, so drawing a token by the ordinary rule and looking for it in the tree accepts it
    with the probability that rejection sampling would (Leviathan et al. 2023, arXiv 2211.17192, section 2.3).
    Returns for each sequence the path (rows to commit, from the root's 0 on) and the emitted tokens, as many as the
    path has rows.
    """
    children = [step.children() for step in steps]
    paths: list[list[int]] = [[0] for _ in steps]
    tokens: list[list[int]] = [[] for _ in steps]
    begin = 0
    for rule in rules:
        index = {sequence: begin + i for i, sequence in enumerate(rule.live)}
        begin += len(index)
        rows = list(index)  # from here on, of the guesses that the tokens are; -1 where none is
        while rows and -1 not in rows:
            at = [index[sequence] for sequence in rule.live]
            row = paths[at[0]][-1]  # the usual case of one sequence is spared an index
            here = logits[at[0], row : row + 1] if len(at) == 1 else logits[at, [paths[i][-1] for i in at]]
            for i, token in zip(at, rule.emit(here), strict=True):
                tokens[i].append(token)
            at = [index[sequence] for sequence in rule.live]
            rows = [children[i].get((paths[i][-1], tokens[i][-1]), -1) for i in at]
            if -1 not in rows:
                for i, row in zip(at, rows, strict=True):
                    paths[i].append(row)
    return paths, tokens
