"""A head that peft has given an adapter: what it adds to the logits, without forming a matrix of the head's size."""

import sys
from typing import Any

import torch
from torch import Tensor, nn

from planish.errors import UsageError


def is_adapted(head: nn.Module) -> bool:
    """Return whether peft put LoRA around a linear `head`; where peft was never imported, nothing is."""
    layer: Any = sys.modules.get("peft.tuners.lora.layer")
    return layer is not None and isinstance(head, layer.Linear)


def low_rank(head: Any, hidden: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the `adapter` of `linear_cross_entropy` for the adapters of `head` that are active, or None without any.

    Several stand beside one another; `scale * A(dropout(hidden))` is in the adapter's dtype, as peft has it.

    Raises:
        UsageError: An adapter of another kind than base + B A.
    """
    if not is_adapted(head) or head.disable_adapters or head.merged:
        return None
    names = [name for name in head.active_adapters if name in head.lora_A]
    for name in names:
        if name in head.lora_variant or head.lora_bias[name]:
            kind = "a bias of its own" if head.lora_bias[name] else type(head.lora_variant[name]).__name__
            raise UsageError(
                f"the head's adapter {name!r} has {kind}, which is more than a product of two thin matrices; leave the "
                "head out of its targets, or set `plan.vocab` = plain."
            )
    if not names:
        return None
    lows = []
    for name in names:
        first = head.lora_A[name]
        low = first(head.lora_dropout[name](hidden.to(first.weight.dtype)))
        lows.append(low * head.scaling[name])
    seconds = [head.lora_B[name].weight for name in names]
    return (lows[0], seconds[0]) if len(names) == 1 else (torch.cat(lows, -1), torch.cat(seconds, -1))
