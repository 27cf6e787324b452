"""How to look ahead: the few settings of a wrap."""

from dataclasses import dataclass
from typing import Final, Literal

AUTO: Final = "auto"
MAX_ROWS = 1024  # of one sequence in a pass; beyond, rows cost as much as tokens, and logits take gigabytes
MAX_NGRAM_SIZE = 32
NGRAM_SIZE = 3  # of a window of a given size
STRATEGIES = ("lookahead", "jacobi")


@dataclass(frozen=True, kw_only=True)
class LookaheadConfig:
    """Settings of a wrapped model. None of them changes the text, only how long it takes; in half precision, each may
    change which of two nearly tied tokens is written, as whatever decides the shape or order of a sum does.

    Raises ValueError for a value out of range, or where a pass would have more than MAX_ROWS rows of one sequence.
    """

    strategy: str = "lookahead"
    """``lookahead``: guesses from the n-gram pool, and a Jacobi window that feeds it. ``jacobi``: plain Jacobi
    decoding, the guesses are what the last step said of the same positions (Santilli et al. 2023, arXiv 2305.10427)."""

    budget: int | Literal["auto"] = AUTO
    """Most guesses verified in a step, below MAX_ROWS; 0 guesses nothing. ``auto``: in each step as many as gain the
    most tokens per second (`budget.Pace`). With ``jacobi`` the number of positions iterated on, of which ``auto``
    takes 16."""

    window_size: int | Literal["auto"] = AUTO
    """W, columns of the Jacobi window, below MAX_ROWS; 0 turns it off. ``auto``: tried now and then, kept where it
    pays (`budget.WindowTrials`). Of no effect with ``jacobi``."""

    ngram_size: int | Literal["auto"] = AUTO
    """N, length of the n-grams that the window closes; it has N - 1 rows. At least 2, at most MAX_NGRAM_SIZE.
    ``auto``: NGRAM_SIZE for a window of a given size, else tried along with it."""

    pool_memory_mb: float = 16
    """Memory in MiB of a pool that is made here, as `NgramPool` takes it; of no effect where a pool is given."""

    cpu_kernels: bool = True
    """Whether passes on a CPU use kernels of our own for products and attention (`products`, `tree_attention`), which
    round otherwise than torch's; of no effect elsewhere."""

    allow_row_dependent: bool = False
    """Whether a model is decoded by lookahead whose logits depend on the other rows of a pass by more than rounding,
    as they do where activations are quantized in each pass. Its texts then part from plain decoding's."""

    compile_passes: bool = False
    """Whether the passes of single sequences are compiled (`passes.compiled`). Off by default, for the first text of a
    process then waits for it, 5 to 20 seconds for twelve layers on two cores, and it needs a C++ compiler."""

    cuda_graphs: bool = False
    """Whether steps are replayed as CUDA graphs (`passes.graphs`), which spares a GPU the launch of every kernel.
    Off by default. For single sequences, and models on one GPU all of whose layers attend to everything; others go
    without. Keeps a KV cache on the GPU from call to call, as long as the longest text so far."""

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ValueError(f"strategy={self.strategy!r} is not one of {', '.join(STRATEGIES)}")
        bounds = {"budget": (0, MAX_ROWS - 1), "window_size": (0, MAX_ROWS - 1), "ngram_size": (2, MAX_NGRAM_SIZE)}
        for name, (least, most) in bounds.items():
            value = getattr(self, name)
            if value != AUTO and (not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most):
                raise ValueError(f"{name}={value!r} must be a whole number in {least}..{most}, or {AUTO!r}")
        rows = self._given_rows()
        if rows > MAX_ROWS:
            raise ValueError(
                f"budget={self.budget!r}, window_size={self.window_size!r} and ngram_size={self.ngram_size!r} make "
                f"passes of {rows} rows, of which {MAX_ROWS} are the most: lower one of them, the window has "
                "window_size * (ngram_size - 1) rows"
            )
        from ngram_pool.pool import check_memory  # imports numba, which takes longer than the command line's help

        check_memory("pool_memory_mb", self.pool_memory_mb)

    def _given_rows(self) -> int:
        """Rows of one sequence in a pass: the root and what is not left to ``auto``."""
        rows = 1 if self.budget == AUTO else 1 + self.budget
        if self.strategy == "lookahead" and self.window_size != AUTO:
            rows += self.window_size * (self.given_ngram_size - 1)
        return rows

    @property
    def given_ngram_size(self) -> int:
        """N of a window of a given size."""
        return NGRAM_SIZE if self.ngram_size == AUTO else self.ngram_size
