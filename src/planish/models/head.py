"""Hidden states and targets in, summed loss out, by the method that the plan names."""

from collections.abc import Callable
from typing import assert_never

import torch.distributed as dist
from torch import Tensor

from planish.comm.ring import ALONE, Circle
from planish.errors import UsageError
from planish.methods import Blocked, Plain, Ring, Vocab
from planish.models.anatomy import Anatomy
from planish.models.low_rank import is_adapted, low_rank
from planish.peaks.vocab.filter import GradientFilter
from planish.peaks.vocab.losses import linear_cross_entropy
from planish.peaks.vocab.plain import plain_cross_entropy
from planish.peaks.vocab.ring import ring_linear_cross_entropy

HeadLoss = Callable[[Tensor, Tensor, int], Tensor]


def filter_of(method: Vocab) -> GradientFilter | None:
    """Return what leaves part of the head's gradients out and counts it; None where nothing does."""
    if not isinstance(method, Blocked) or method.gradient_filter is None:
        return None
    return GradientFilter(threshold=method.gradient_filter, ordered=method.filter_order)


def head_loss(
    anatomy: Anatomy,
    method: Vocab,
    *,
    group: dist.ProcessGroup | None = None,
    gradient_filter: GradientFilter | None = None,
) -> HeadLoss:
    """Return (hidden [B, S, D], target [B, S], num_valid) -> fp32 sum of the counted tokens' losses.

    With `ring` the ranks of `group` share the head, as a DTensor with `Shard(0)`, and all call it together.

    Args:
        anatomy: The model's parts.
        method: How the head is bounded.
        group: The ranks that share it.
        gradient_filter: `filter_of(method)`, for whoever reads its counts.

    Raises:
        UsageError: A head that the method does not take.
    """
    head, softcap, scale = anatomy.head, anatomy.softcap, anatomy.logit_scale
    circle = ALONE if group is None else Circle.of(group)
    match method:
        case Plain():

            def loss(hidden: Tensor, target: Tensor, _num_valid: int) -> Tensor:
                return plain_cross_entropy(
                    hidden,
                    head.weight,
                    target,
                    bias=head.bias,
                    adapter=low_rank(head, hidden),
                    softcap=softcap,
                    logit_scale=scale,
                    reduction="sum",
                )

        case Blocked(tile_bytes=tile_bytes, strategy=strategy):
            gradient_filter = gradient_filter or filter_of(method)

            def loss(hidden: Tensor, target: Tensor, num_valid: int) -> Tensor:
                return linear_cross_entropy(
                    hidden,
                    head.weight,
                    target,
                    bias=head.bias,
                    adapter=low_rank(head, hidden),
                    softcap=softcap,
                    logit_scale=scale,
                    reduction="sum",
                    tile_bytes=tile_bytes,
                    strategy=strategy,
                    num_valid=num_valid,
                    gradient_filter=gradient_filter,
                )

        case Ring(tile_bytes=tile_bytes, mode=mode):
            if is_adapted(head):
                raise UsageError(
                    "`plan.vocab` = ring shares one weight between ranks and takes no adapter on it; leave the head "
                    "out of the adapter's targets, or set `plan.vocab` = blocked."
                )

            def loss(hidden: Tensor, target: Tensor, num_valid: int) -> Tensor:
                return ring_linear_cross_entropy(
                    hidden,
                    head.weight,
                    target,
                    group=circle,
                    mode=mode,
                    bias=head.bias,
                    vocab_size=head.out_features,
                    softcap=softcap,
                    logit_scale=scale,
                    reduction="sum",
                    tile_bytes=tile_bytes,
                    num_valid=num_valid,
                )

        case _:
            assert_never(method)
    return loss
