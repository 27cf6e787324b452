"""How to look ahead: the few settings of a wrap."""

from dataclasses import dataclass

STRATEGIES = ("lookahead", "jacobi")


@dataclass(frozen=True, kw_only=True)
class LookaheadConfig:
    """Settings of a wrapped model. None of them can change the text, only how many steps it takes.

    Raises ValueError for a value out of range.
    """

    strategy: str = "lookahead"
    """``lookahead``: guesses from the n-gram pool, and a Jacobi window that feeds it. ``jacobi``: plain Jacobi
    decoding, the guesses are what the last step said of the same positions (Santilli et al. 2023, arXiv 2305.10427)."""

    budget: int = 16
    """Most guesses verified in a step; with ``jacobi`` the number of positions iterated on. 0 guesses nothing."""

    window_size: int = 0
    """W, columns of the Jacobi window; 0 turns it off. Of no effect with ``jacobi``."""

    ngram_size: int = 3
    """N, length of the n-grams that the window closes; it has N - 1 rows. At least 2."""

    pool_memory_mb: float = 16
    """Memory in MiB of a pool that is made here; of no effect where a pool is given."""

    pack_weights: bool = True
    """Whether `wrap` packs the weights of a model on the CPU (`packing.pack`); of no effect elsewhere."""

    @property
    def largest_step(self) -> int:
        """Most tokens of one forward pass: root, guesses and window."""
        return 1 + self.budget + self.window_size * (self.ngram_size - 1)

    def __post_init__(self):
        if self.strategy not in STRATEGIES:
            raise ValueError(f"strategy={self.strategy!r} is not one of {', '.join(STRATEGIES)}")
        for name, least in (("budget", 0), ("window_size", 0), ("ngram_size", 2)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name}={value!r} must be a whole number of at least {least}")
        if not self.pool_memory_mb > 0:
            raise ValueError(f"pool_memory_mb={self.pool_memory_mb!r} must be above 0")
