"""Training on a CPU: texts, optimizers and steps."""

import hashlib
import math
import time
from collections.abc import Callable, Iterator

import click
import torch
from torch import nn

from lookahead.tools.prompts import STANDARD_LIBRARY


def standard_library() -> tuple[list[str], list[str]]:
    """Return the texts of the standard library's modules: (for training, held out)."""
    train, held_out = [], []
    for path in sorted(STANDARD_LIBRARY.rglob("*.py")):
        name = path.relative_to(STANDARD_LIBRARY).as_posix()
        if "site-packages" in name:
            continue
        text = path.read_text(encoding="utf-8", errors="ignore").expandtabs(4)
        digest = hashlib.sha256(name.encode()).digest()
        (held_out if digest[0] % 20 == 0 else train).append(text)
    return train, held_out


def optimizers(matrices: list, others: list, rate: float) -> list[torch.optim.Optimizer]:
    """Return Muon for matrices of layers, and AdamW for other parameters, or for groups with their own rates."""
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def schedule(step: int, steps: int) -> float:
    """Return the factor on the learning rate: 2% linear warm-up, constant, then linear to zero over the last 60%."""
    return min(1.0, (step + 1) / (0.02 * steps), (steps - step) / (0.6 * steps))


def descend(
    model: nn.Module, optimizers: list[torch.optim.Optimizer], steps: int, next_loss: Callable[[], torch.Tensor]
) -> Iterator[tuple[int, float, float]]:
    """Train a model; yield, after each step, its number from 1, its loss and the minutes left.

    optimizers: with their peak rates. Raises ClickException if a loss is not finite.
    """
    peaks = [(group, group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]
    start = time.perf_counter()
    for step in range(steps):
        for group, peak in peaks:
            group["lr"] = peak * schedule(step, steps)
        loss = next_loss()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if not math.isfinite(loss.item()):
            rate = peaks[0][1]
            raise click.ClickException(f"the loss is {loss.item()} at step {step}: lower --rate, which is {rate}")
        yield step + 1, loss.item(), (time.perf_counter() - start) / (step + 1) * (steps - step - 1) / 60
