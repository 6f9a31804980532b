"""Losses of a linear head that never form its logits."""

from typing import Literal

import torch
from torch import Tensor

from planish.peaks.vocab.blocked import GradientsInForward, Objective, Task
from planish.peaks.vocab.inputs import (
    DEFAULT_TILE_BYTES,
    check,
    check_settings,
    compute_dtype,
    find_valid,
    plan_tiling,
)
from planish.price.vocab import Head

Strategy = Literal["auto", "gradients-in-forward", "recompute"]
Reduction = Literal["mean", "sum", "none"]


def linear_cross_entropy(  # noqa: PLR0913
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    divisor: float | Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    logits_dtype: Literal["auto", "float32"] = "auto",
    tile_bytes: int = DEFAULT_TILE_BYTES,
    strategy: Strategy = "auto",
    num_valid: int | None = None,
) -> Tensor:
    """Return the cross-entropy of softcap(logit_scale * (hidden @ weight^T + bias)) without forming it."""
    check(hidden, weight, target, bias)
    check_settings(logit_scale=logit_scale, softcap=softcap, tile_bytes=tile_bytes)
    flat, classes = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1).long()
    index, num_valid = find_valid(classes, ignore_index=ignore_index, vocab_size=len(weight), num_valid=num_valid)
    compute = compute_dtype(hidden, weight, logits_dtype=logits_dtype)
    tensors = {"hidden": hidden, "weight": weight, "bias": bias}
    head = Head(
        tokens=len(flat),
        hidden_size=weight.shape[1],
        vocab_size=len(weight),
        hidden_dtype=str(hidden.dtype).removeprefix("torch."),
        weight_dtype=str(weight.dtype).removeprefix("torch."),
        compute_dtype=str(compute).removeprefix("torch."),
        capped=softcap is not None,
        wanted=frozenset({"mean"} if label_smoothing else ()),
        grads=frozenset(
            name
            for name, tensor in tensors.items()
            if torch.is_grad_enabled() and tensor is not None and tensor.requires_grad
        ),
    )
    task = Task(
        head=head,
        tiling=plan_tiling(
            head, tile_bytes=tile_bytes, strategy="gradients-in-forward" if strategy == "auto" else strategy
        ),
        target=classes,
        index=index,
        num_valid=num_valid,
        logit_scale=logit_scale,
        softcap=softcap,
    )
    objective = Objective(label_smoothing=label_smoothing, z_loss=z_loss)
    with torch.autocast(hidden.device.type, enabled=False):
        total = GradientsInForward.apply(flat, weight, bias, task, objective)
    if reduction == "sum":
        return total
    return total / max(1, num_valid) if divisor is None else total / divisor
