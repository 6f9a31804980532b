"""From the losses of tokens to one number: sums, means, weights of classes, and what must fit for them."""

import math
from typing import Literal

from torch import Tensor

from planish.peaks.vocab.blocked import weights_of

Reduction = Literal["mean", "sum", "none"]


def check_reduction(reduction: str, divisor: float | Tensor | None) -> None:
    """Refuse a reduction that does not exist, and a divisor out of range or without effect."""
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'`reduction` must be "mean", "sum" or "none", got {reduction!r}.')
    if divisor is not None and reduction != "mean":
        raise ValueError(f'`divisor` has no effect with reduction="{reduction}"; use reduction="mean".')
    if isinstance(divisor, int | float) and not 0 < divisor < math.inf:
        raise ValueError(f"`divisor` must be above 0, got {divisor}.")


def reduce(total: Tensor, reduction: str, divisor: float | Tensor) -> Tensor:
    """Return the sum as it is, or divided for "mean"."""
    return total if reduction == "sum" else total / divisor


def check_weights(
    weight: Tensor, target: Tensor, target_probs: Tensor | None, class_weight: Tensor | None, strategy: str
) -> None:
    """Refuse weights of classes or of targets that do not fit."""
    if target_probs is not None and target_probs.shape != target.shape:
        raise ValueError(
            f"`target_probs` must have the shape of `target`, {list(target.shape)}, got {list(target_probs.shape)}."
        )
    if target_probs is not None and strategy == "gradients-in-forward":
        raise ValueError(
            '`strategy` "gradients-in-forward" knows one target a token; use "recompute" with `target_probs`.'
        )
    if class_weight is None:
        return
    if target_probs is not None:
        raise ValueError("`class_weight` and `target_probs` exclude each other; multiply the probabilities by weights.")
    if class_weight.shape != weight.shape[:1] or class_weight.requires_grad:
        raise ValueError(
            f"`class_weight` must be {len(weight)} numbers without gradient, one a class, got shape "
            f"{list(class_weight.shape)}{', with gradient' if class_weight.requires_grad else ''}."
        )


def divisor_of(
    divisor: float | Tensor | None,
    num_valid: int | Tensor,
    target: Tensor,
    ignore_index: int,
    class_weight: Tensor | None,
) -> float | Tensor:
    """Return what "mean" divides by: the divisor, else the number of valid tokens or the sum of their weights."""
    if divisor is not None or class_weight is None:
        return num_valid if divisor is None else divisor
    total = weights_of(class_weight, target).masked_fill(target == ignore_index, 0.0).sum()
    return total.masked_fill(total == 0, 1.0)


def num_tokens(valid: Tensor, *, several: bool) -> Tensor:
    """Return how many tokens have a valid target."""
    return (valid.any(-1) if several else valid).sum()
