"""What lives from the first step to the last, and what updating it takes: parameters, gradients, optimizer state."""

from collections.abc import Sequence

from planish.price.tally import Tally
from planish.shapes import TensorShape

_WIDE = 4
_BATCH_TOKEN_BYTES = 24
"""Of a batch: token ids, targets and positions, int64 each."""


def parameter_bytes(tensors: Sequence[TensorShape]) -> int:
    """Return the bytes of all parameters; their gradients have as many."""
    return sum(each.numel * each.count * each.itemsize for each in tensors)


def adamw_bytes(tensors: Sequence[TensorShape], *, master: bool) -> int:
    """Return AdamW's state: two moments, a step count, and the fp32 master of a narrower parameter.

    Per bf16 parameter 12 bytes with `master` and 4 without; per fp32 parameter 8.
    """
    total = 0
    for each in tensors:
        itemsize = _WIDE if master else each.itemsize
        copies = 3 if itemsize != each.itemsize else 2
        total += each.count * (_WIDE + copies * itemsize * each.numel)
    return total


def resume_bytes(tensors: Sequence[TensorShape], *, master: bool) -> int:
    """Return the most that reading a checkpoint adds: one tensor of parameters or state, and the one before it."""
    return 2 * max(each.numel * (_WIDE if master else each.itemsize) for each in tensors)


def batch_bytes(tokens: int) -> int:
    """Return the bytes of one microbatch's ids, targets and positions."""
    return tokens * _BATCH_TOKEN_BYTES


def update_bytes(tensors: Sequence[TensorShape], *, master: bool, microbatches: int) -> int:
    """Return the most that an optimizer step adds: every gradient's norm, or one gradient in fp32."""
    tally = Tally()
    norms = sum(each.count * each.itemsize for each in tensors)
    scalar = max(each.itemsize for each in tensors)
    tally.hold(norms=norms, stacked=norms, total=scalar)
    tally.drop("norms", "stacked")
    tally.spike(_WIDE * (microbatches + 1))
    tally.spike(3 * scalar)
    tally.spike(max(each.numel * _WIDE if master and each.itemsize < _WIDE else 0 for each in tensors))
    return tally.peak_bytes
