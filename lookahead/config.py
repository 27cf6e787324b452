"""The settings of a wrapped model."""

from dataclasses import dataclass
from typing import Final, Literal

AUTO: Final = "auto"
# Most rows of one sequence in a pass. Beyond this, a row costs as much as a token, and the logits take gigabytes.
MAX_ROWS = 1024
MAX_NGRAM_SIZE = 32
NGRAM_SIZE = 3  # the default for a window whose size is given
STRATEGIES = ("lookahead", "jacobi")


@dataclass(frozen=True, kw_only=True)
class LookaheadConfig:
    """Settings of a wrapped model. They change how long a text takes, not the text.

    In half precision, however, each setting can change the order of a sum, and so decide between two nearly tied
    tokens.

    Raises ValueError for a value out of range, or if a pass would have more than MAX_ROWS rows of one sequence.
    """

    strategy: str = "lookahead"
    """``lookahead``: guess from the n-gram pool, which a Jacobi window feeds. ``jacobi``: plain Jacobi decoding, which
    guesses what the last step chose at the same positions (Santilli et al. 2023, arXiv 2305.10427)."""

    budget: int | Literal["auto"] = AUTO
    """Most guesses that a step verifies, below MAX_ROWS; 0 makes no guesses. ``auto``: in each step, the number that
    gains the most tokens per second (`budget.Pace`). With ``jacobi``, the positions of the block; ``auto`` is 16."""

    window_size: int | Literal["auto"] = AUTO
    """W, the columns of the Jacobi window, below MAX_ROWS; 0 turns it off. ``auto``: the window is tried now and then,
    and used while it pays (`budget.Trials`). No effect with ``jacobi``."""

    ngram_size: int | Literal["auto"] = AUTO
    """N, the length of the window's n-grams, in 2..MAX_NGRAM_SIZE; the window has N - 1 rows. ``auto``: NGRAM_SIZE for
    a window whose size is given, otherwise tried together with the size."""

    pool_memory_mb: float = 16
    """Size in MiB of the pool that `wrap` makes (`NgramPool`). No effect if you pass a pool, or if the model has one
    from an earlier wrap."""

    cpu_kernels: bool = True
    """Whether passes on a CPU use this package's kernels: fused passes for families that have them (`passes.fused`),
    products and attention for others. They round differently from torch's. No effect on other devices."""

    pack_weights: bool | Literal["auto"] = AUTO
    """Whether fused passes read the weights from a packed copy, which has the same numbers in fewer bits
    (`cpu.blocks`): bf16 in 12, GGUF files in as many as their format has. ``auto``: if the copy takes at most half as
    much memory as the weights, or at most 1 GiB. Set False if you write to a few weights in place through ``.data`` or
    numpy within a call: with a copy, only the next call is certain to notice that."""

    allow_row_dependent: bool = False
    """Whether to decode models whose logits depend on the other rows of a pass by more than rounding, for example
    because they quantize activations in each pass. The texts of such models differ from plain decoding's."""

    cuda_graphs: bool = False
    """Whether steps are replayed as CUDA graphs (`passes.graphs`), so that a GPU need not launch each kernel again.
    Only for single sequences of models on one GPU whose family has fused passes (`models.families`) and whose layers
    keep no state; others run without graphs. A KV cache as long as the longest text so far stays on the GPU between
    calls."""

    def __post_init__(self) -> None:
        if not isinstance(self.pack_weights, bool) and self.pack_weights != AUTO:  # 1 == True, but is not True
            raise ValueError(f"pack_weights={self.pack_weights!r} must be True, False or {AUTO!r}")
        for name in ("cpu_kernels", "allow_row_dependent", "cuda_graphs"):
            if not isinstance(getattr(self, name), bool):  # a text would count as True
                raise ValueError(f"{name}={getattr(self, name)!r} must be True or False")
        if self.strategy not in STRATEGIES:
            raise ValueError(f"strategy={self.strategy!r} is not one of {', '.join(STRATEGIES)}")
        bounds = {"budget": (0, MAX_ROWS - 1), "window_size": (0, MAX_ROWS - 1), "ngram_size": (2, MAX_NGRAM_SIZE)}
        for name, (least, most) in bounds.items():
            value = getattr(self, name)
            if value != AUTO and (not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most):
                raise ValueError(f"{name}={value!r} must be a whole number in {least}..{most}, or {AUTO!r}")
        rows = 1 if self.budget == AUTO else 1 + self.budget  # the root's, and those of the settings that are not auto
        if self.strategy == "lookahead" and self.window_size != AUTO:
            rows += self.window_size * (self.window_ngram_size - 1)
        if rows > MAX_ROWS:
            raise ValueError(
                f"budget={self.budget!r}, window_size={self.window_size!r} and ngram_size={self.ngram_size!r} make "
                f"passes of {rows} rows, above {MAX_ROWS}: lower one of them; the window has "
                "window_size * (ngram_size - 1) rows"
            )
        from ngram_pool.pool import check_memory  # not above: --help would have to wait for numpy

        check_memory("pool_memory_mb", self.pool_memory_mb)

    @property
    def window_ngram_size(self) -> int:
        """N of a window whose size is given."""
        return NGRAM_SIZE if self.ngram_size == AUTO else self.ngram_size
