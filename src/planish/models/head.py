"""Hidden states and targets in, summed loss out, by the method that the plan names."""

from collections.abc import Callable
from typing import assert_never

import torch.distributed as dist
from torch import Tensor

from planish.comm.ring import ALONE, Circle
from planish.methods import Blocked, Plain, Ring, Vocab
from planish.models.anatomy import Anatomy
from planish.models.low_rank import low_rank
from planish.peaks.vocab.losses import linear_cross_entropy
from planish.peaks.vocab.plain import plain_cross_entropy
from planish.peaks.vocab.ring import ring_linear_cross_entropy

HeadLoss = Callable[[Tensor, Tensor, int], Tensor]


def head_loss(anatomy: Anatomy, method: Vocab, *, group: dist.ProcessGroup | None = None) -> HeadLoss:
    """Return (hidden [B, S, D], target [B, S], num_valid) -> fp32 sum of the counted tokens' losses.

    With `ring` the ranks of `group` share the head, as a DTensor with `Shard(0)`, and all call it together.
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
                )

        case Ring(tile_bytes=tile_bytes, mode=mode):

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
