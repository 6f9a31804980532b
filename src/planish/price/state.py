"""What lives from the first step to the last, and what updating it takes: parameters, gradients, optimizer state."""

from collections.abc import Sequence
from functools import lru_cache
from typing import assert_never

from planish.methods import AdamW, Apollo, Optim, StreamAdamW
from planish.price.apollo import MatrixShape, making_bytes, projected_names, workspace_bytes
from planish.price.stream import Kept, Placement, kinds_of, place
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


def optimizer_bytes(tensors: Sequence[TensorShape], optim: Optim, *, master: bool, on_host: bool = False) -> int:
    """Return the bytes of all state that lives on the device from step to step, by method."""
    match optim:
        case AdamW():
            return adamw_bytes(tensors, master=master)
        case Apollo():
            projected, rest = split(tensors, optim)
            total = adamw_bytes(rest, master=master)
            for each in projected:
                matrix, widened = MatrixShape.of(each.shape), master and each.itemsize < _WIDE
                total += each.count * matrix.state_bytes(optim.proj_rank, refresh=optim.refresh, master=widened)
            return total
        case StreamAdamW():
            held = 0 if on_host else placement(tensors, optim, master=master).host_bytes
            return held + _WIDE * sum(each.count for each in tensors)
        case _:
            assert_never(optim)


def placement(tensors: Sequence[TensorShape], optim: StreamAdamW, *, master: bool, on_host: bool = False) -> Placement:
    """Return where streamed state lies: on a CPU, or `on_host` beside another device, which stages all of it.

    Raises:
        UsageError: `host` and `disk` do not hold it.
    """
    return place(
        _kinds(tuple(tensors), master=master),
        chunk_bytes=optim.chunk_bytes,
        slots=optim.slots,
        host=optim.host,
        disk=optim.disk,
        in_place=not on_host,
    )


@lru_cache(maxsize=64)
def _kinds(tensors: tuple[TensorShape, ...], *, master: bool) -> tuple[tuple[Kept, int], ...]:
    return kinds_of([(each.numel, each.itemsize) for each in tensors for _ in range(each.count)], master=master)


def split(tensors: Sequence[TensorShape], optim: Apollo) -> tuple[list[TensorShape], list[TensorShape]]:
    """Return (what APOLLO projects, the rest)."""
    names = projected_names({each.name: each.shape for each in tensors}, optim.proj_rank)
    return [each for each in tensors if each.name in names], [each for each in tensors if each.name not in names]


def resume_bytes(tensors: Sequence[TensorShape], *, master: bool) -> int:
    """Return the most that reading a checkpoint adds: one tensor of parameters or state, and the one before it."""
    return 2 * max(each.numel * (_WIDE if master else each.itemsize) for each in tensors)


def batch_bytes(tokens: int) -> int:
    """Return the bytes of one microbatch's ids, targets and positions."""
    return tokens * _BATCH_TOKEN_BYTES


def deal_bytes(tensors: Sequence[TensorShape], num_shards: int) -> int:
    """Return the most that the first rank holds beside its shards while it deals them out: all, and one once more."""
    return num_shards * (parameter_bytes(tensors) + max(each.numel * each.itemsize for each in tensors))


def update_bytes(
    tensors: Sequence[TensorShape], optim: Optim, *, master: bool, microbatches: int, num_shards: int = 1
) -> int:
    """Return the most that an optimizer step adds: every gradient's norm, one gradient in fp32, or APOLLO's buffers.

    The norms of shards are there three times, while DTensor brings them together.
    """
    tally = Tally()
    norms = sum(each.count * each.itemsize for each in tensors) * (3 if num_shards > 1 else 1)
    scalar = max(each.itemsize for each in tensors)
    tally.hold(norms=norms, stacked=norms, total=scalar)
    tally.drop("norms", "stacked")
    tally.spike(_WIDE * (microbatches + 1))
    tally.spike(3 * scalar)
    projected, rest = split(tensors, optim) if isinstance(optim, Apollo) else ([], tensors)
    if isinstance(optim, StreamAdamW):
        tally.spike(_WIDE * (1 + sum(each.count for each in rest)))  # counts of steps; wide gradients have their place
    else:
        tally.spike(max((each.numel * _WIDE if master and each.itemsize < _WIDE else 0 for each in rest), default=0))
    if isinstance(optim, Apollo):
        tally.spike(_apollo_bytes(projected, optim, master=master))
    return tally.peak_bytes


def _apollo_bytes(projected: Sequence[TensorShape], optim: Apollo, *, master: bool) -> int:
    """Return what APOLLO's buffers hold, and what lives for a moment beside them: six numbers a channel at most."""
    matrices = [MatrixShape.of(each.shape) for each in projected]
    narrow, by_channel = any(each.itemsize < _WIDE for each in projected), optim.granularity == "channel"
    buffers = workspace_bytes(
        matrices, optim.proj_rank, by_channel=by_channel, narrow_grad=narrow, narrow_weight=narrow and not master
    )
    factors = 6 * _WIDE * max(each.channels if by_channel else 1 for each in matrices)
    dim = max(each.dim for each in matrices)
    return buffers + max(factors, making_bytes(dim, optim.proj_rank, normal=optim.projection == "gaussian"))
