"""The head as transformers runs it: all logits at once in the compute dtype, raised to float32, then the loss."""

import torch
import torch.nn.functional as F
from torch import Tensor


def plain_cross_entropy(  # noqa: PLR0913
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    adapter: tuple[Tensor, Tensor] | None = None,
    ignore_index: int = -100,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    reduction: str = "sum",
) -> Tensor:
    """Return the cross-entropy of full logits; nothing is bounded.

    Memory: tokens x vocabulary three times or more: the logits in the compute dtype, their float32 copy, its
        log-softmax, and in backward the gradients of both.
    Exactness: this is what `blocked` is compared with.

    Args:
        hidden: Hidden states, [..., D].
        weight: The head's weight, [V, D].
        target: Class of each token, [...]; `ignore_index` marks tokens that count for nothing.
        bias: The head's bias, [V].
        adapter: (low, second), [..., R] and [V, R]: adds low @ second^T.
        ignore_index: Target of tokens that are left out.
        logit_scale: Multiplies the logits before `softcap` (Granite, Cohere).
        softcap: Bounds logits to softcap * tanh(logits / softcap) (Gemma).
        reduction: "sum", "mean" or "none", as in `torch.nn.functional.cross_entropy`.
    """
    logits = F.linear(hidden, weight, bias)
    if adapter is not None:
        low, second = adapter
        logits = (logits + F.linear(low.to(second.dtype), second)).to(logits.dtype)
    if logit_scale != 1.0:
        logits = logits * logit_scale
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    flat = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    flat = flat.reshape(-1, flat.shape[-1])
    loss = F.cross_entropy(flat, target.reshape(-1).to(flat.device), ignore_index=ignore_index, reduction=reduction)
    return loss.reshape(target.shape) if reduction == "none" else loss
