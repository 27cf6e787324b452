"""The next token after a row of logits on a CPU, chosen as `generate` does, in one call: `choice.cpp`."""

import ctypes
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import torch

from lookahead.compat import multinomial_is_race
from lookahead.cpu import native
from lookahead.cpu.top_k import MAX_COUNT

STATE_BYTES = 5056  # of torch's generator on the CPU: a Mersenne Twister, and a normal variate kept for later
_TRIED = 4099  # variates
_WARP = [ctypes.c_float, ctypes.c_long, ctypes.c_double, ctypes.c_double]
_CHOOSE = [*[ctypes.c_void_p] * 2, ctypes.c_long, *_WARP, ctypes.c_void_p]
_choosers = cache(partial(native.kernels, "choose", native.FLOATS, _CHOOSE))
_DRAW = [ctypes.c_void_p] * 2 + [ctypes.c_long]
_drawers = cache(partial(native.kernels, "draw", (torch.float32,), _DRAW))


class Warp(NamedTuple):
    """How logits are changed before a token is drawn: in this order, as by transformers' processors."""

    temperature: float = 1.0
    top_k: int = 0
    """Up to MAX_COUNT. 0: all tokens are left."""
    top_p: float = 1.0
    min_p: float = 0.0


def serves(logits: torch.Tensor) -> bool:
    """Whether tokens can be chosen after these logits, [..., vocabulary]."""
    return logits.is_cpu and logits.dtype in _choosers() and logits.is_contiguous() and logits.numel() > 0


def argmax(logits: torch.Tensor, row: int = 0) -> int | None:
    """Return the argmax of a row, the first of equals; None if there is a NaN.

    logits: [..., vocabulary]. row: counted over all dimensions but the last.
    """
    return _choose(logits, row, 0, Warp())


def drawn(logits: torch.Tensor, variates: np.ndarray, warp: Warp, row: int = 0) -> int | None:
    """Return the token that torch draws with these variates; None if rounding might decide, or if there is a NaN.

    logits, row: as for `argmax`. variates: float32 [vocabulary], contiguous, as `draw` makes them. None, too, for
    variates of another number of tokens, as after a processor that has changed the number of scores.
    """
    if len(variates) != logits.shape[-1] or warp.top_k > MAX_COUNT:
        return None
    return _choose(logits, row, variates.ctypes.data, warp)


def _choose(logits: torch.Tensor, row: int, variates: int, warp: Warp) -> int | None:
    token, vocabulary = ctypes.c_long(), logits.shape[-1]
    at = logits.data_ptr() + row * vocabulary * logits.element_size()
    _choosers()[logits.dtype](at, variates, vocabulary, *warp, ctypes.byref(token))
    return token.value if token.value >= 0 else None


def draw(state: torch.Tensor, variates: np.ndarray) -> None:
    """Draw exponential variates as ``exponential_()`` does, up to rounding, with the same change of the state.

    state: uint8, of a generator on the CPU. variates: float32 [n], contiguous.
    Raises ValueError for a state that is not of the Mersenne Twister.
    """
    _check(state)
    _drawers()[torch.float32](state.data_ptr(), variates.ctypes.data, len(variates))


def skip(state: torch.Tensor, count: int) -> None:
    """Advance the state as `draw` does for ``count`` variates. Raises ValueError as `draw` does."""
    _check(state)
    _drawers()[torch.float32](state.data_ptr(), None, count)


def _check(state: torch.Tensor) -> None:
    if state.shape != (STATE_BYTES,) or state.dtype != torch.uint8 or not state.is_cpu:
        raise ValueError(f"a state of {tuple(state.shape)} {state.dtype} is not that of torch's generator on the CPU")


@cache
def can_draw() -> bool:
    """Whether `draw` draws as torch does. This is tested, because the format of torch's generator state is private."""
    if torch.float32 not in _drawers() or not multinomial_is_race():
        return False
    generator = torch.Generator().manual_seed(0)
    if generator.get_state().shape != (STATE_BYTES,):  # what is tried writes to it
        return False
    for skipped in range(3):
        torch.rand(skipped, generator=generator, device="cpu")  # takes one of the numbers of which a variate takes two
        state, ours = generator.get_state(), np.empty(_TRIED, np.float32)
        draw(state, ours)
        theirs = torch.empty(_TRIED, dtype=torch.float32, device="cpu").exponential_(1, generator=generator).numpy()
        if not (np.allclose(ours, theirs, rtol=1e-6, atol=0) and torch.equal(state, generator.get_state())):
            return False
    return True
