"""What several targets a token weigh beside the head with one."""

from planish.price.phases import Phases
from planish.price.vocab import ITEMSIZE, Head, Tiling, cross_entropy_phases


def targets_phases(
    head: Head,
    tiling: Tiling,
    targets: int,
    *,
    num_valid: int | None = None,
    label_smoothing: bool = False,
    z_loss: bool = False,
) -> Phases:
    """Return what the summed cross-entropy of K targets with probabilities weighs, to the byte on a CPU.

    Their classes take 8 bytes each until backward, and each has a number in the wide dtype while it is worked on.

    Args:
        head: See `cross_entropy_phases`.
        tiling: Of "recompute".
        targets: K.
        num_valid: Tokens that have a target; None is all of them.
        label_smoothing: Whether some of the loss is spread over the vocabulary.
        z_loss: Whether lse^2 is part of the loss.
    """
    valid, tokens, wide = head.tokens if num_valid is None else num_valid, head.tokens, head.wide_bytes
    plain = cross_entropy_phases(head, tiling, num_valid=valid, label_smoothing=label_smoothing, z_loss=z_loss)
    rows = min(valid, tiling.group_rows(valid))
    classes, numbers, per_token = 8 * tokens * targets, wide * tokens * targets, wide * tokens
    picking, deriving = (rows * (targets - 1) * (16 + wide + each) for each in (ITEMSIZE[head.product_dtype], wide))
    statistics = per_token * len(({"lse"} if head.grads else set()) | head.wanted)
    objective = 2 * per_token if label_smoothing else (per_token + wide) * z_loss
    weighing = classes + numbers + statistics + per_token + max(numbers, objective)
    return Phases(
        forward=max(plain.forward + classes + numbers - per_token + picking, weighing),
        kept=plain.kept + classes,
        backward=plain.backward + classes + 2 * numbers + deriving - per_token * label_smoothing,
    )
