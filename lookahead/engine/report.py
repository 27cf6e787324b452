"""What a wrapped model reports of itself: ``print(model.lookahead.report())``."""

from lookahead.compat import attention_implementation
from lookahead.cpu import native
from lookahead.engine.engine import Lookahead
from lookahead.guessing.pool import PoolSource
from ngram_pool import Origin
from ngram_pool import native as of_pools


def report(engine: Lookahead) -> str:
    """Lines of text: how passes are computed, why not faster, and what the sources did in all calls."""
    if engine.last.plain:
        return f"the model's own decoding: lookahead does not decode {engine.last.plain}"
    adapter = engine.adapter
    if adapter is None:
        return "nothing has been decoded yet"
    missing = native.why_missing() if adapter.uses_kernels else None
    is_ours = adapter.uses_kernels and missing is None
    lines = [
        f"passes: {engine.passes}",
        f"attention: {attention_implementation(adapter.config)}, "
        + ("split into cache and step" if adapter.splits_attention else "with a dense mask"),
        f"kernels: lookahead's, for {native.CAPABILITY}" if is_ours else "kernels: torch's",
        f"guesses: {'trees' if adapter.can_branch else 'single chains'}",
        f"sources: {', '.join(_described(engine, i) for i in range(len(engine.ledger.trials)))}",
        *engine.stats.by_source(),
    ]
    if engine.bytes_in_blocks:
        lines.append(f"weights: {engine.bytes_in_blocks / 1e6:.1f} MB read from the blocks of a GGUF file")
    if engine.copied_bytes:
        lines.append(f"weights: read from a copy of {engine.copied_bytes / 1e6:.1f} MB")
    reasons = list(adapter.given_up)
    reasons += [f"{what}: {reason}" for what, reason in engine.why_not_faster.items()]
    if missing is not None:
        reasons.append(f"lookahead's kernels: {missing}")
    if (slow := of_pools.why_missing()) is not None:
        reasons.append(f"n-gram pools in C++: {slow}")
    if engine.graphs is not None and engine.graphs.why_not is not None:
        reasons.append(f"CUDA graphs: {engine.graphs.why_not}")
    lines += [f"given up: {reason}" for reason in reasons]
    has_pool = any(isinstance(source, PoolSource) for source in engine.sources)
    if engine.lacks_bigrams and has_pool and adapter.can_branch:
        lines.append("missing: bigrams for new pools (made by lookahead tune --bigrams)")
    if not engine.config.pack_weights:
        lines.append("turned off: packed weights (pack_weights=True)")
    if not engine.config.cpu_kernels:
        lines.append("turned off: lookahead's CPU kernels (cpu_kernels=True)")
    return "\n".join(lines)


def _described(engine: Lookahead, source: int) -> str:
    """Name a source of the ledger, and say whether it is asked."""
    name = engine.ledger.names[len(Origin) + source]
    return name if engine.ledger.is_asked(source) else f"{name} (paused: it did not pay)"
