"""The optimizers whose state is bounded: `from planish.optim import Apollo, StreamAdamW`."""

from planish.peaks.optim.apollo import Apollo
from planish.peaks.optim.int8_weight import quantize_weights
from planish.peaks.optim.stream_adamw import StreamAdamW

__all__ = ["Apollo", "StreamAdamW", "quantize_weights"]
