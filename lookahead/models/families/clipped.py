"""Queries, keys and values that a setting clips, as in OLMo, OLMoE, MPT and DBRX."""

from collections.abc import Sequence

from lookahead.cpu.elementwise import Clip
from lookahead.cpu.operations import Value
from lookahead.models.families.page import Page


def clipped(page: Page, limit: float | None, *values: Value) -> Sequence[Value]:
    """Return these values within this limit, if there is one."""
    if limit is None:
        return values
    return [page._add(Clip(x, Value(x.width), float(limit))) for x in values]
