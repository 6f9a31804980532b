"""The optimizers whose state is bounded: `from planish.optim import Apollo`."""

from planish.peaks.optim.apollo import Apollo

__all__ = ["Apollo"]
