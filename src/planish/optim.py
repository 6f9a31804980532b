"""The optimizers whose state is bounded: `from planish.optim import Apollo`."""

from planish.peaks.optim.apollo import Apollo
from planish.peaks.optim.int8_weight import quantize_weights

__all__ = ["Apollo", "quantize_weights"]
