"""Held-out loss and bits per byte, inside the same memory bounds as training."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from planish.data.batch import Batch
from planish.errors import NotFinite, UsageError
from planish.train.engine import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalReport:
    """Held-out quality; `bits_per_byte` compares across tokenizers, and is None where the text is not known."""

    loss: float
    bits_per_byte: float | None
    num_valid: int


@torch.no_grad()
def evaluate(engine: Engine, batches: Iterable[Batch]) -> EvalReport:
    """Return the mean loss in nats per token and the bits per byte over `batches`, those of all ranks together.

    Memory:        the forward pass of one batch without gradients, one head tile.

    Raises:
        UsageError: No target counts in any batch.
        NotFinite: The loss is NaN or infinite.
    """
    model, losses, num_valid = engine.anatomy.model, 0.0, 0
    num_bytes: int | None = 0
    model.eval()
    with engine.ledger.phase("eval"):
        for batch in batches:
            losses += engine.facts.number(engine.loss(engine.take(batch)))
            num_valid += batch.num_valid
            num_bytes = None if num_bytes is None or batch.num_bytes is None else num_bytes + batch.num_bytes
    model.train()
    everywhere = engine.world.gather([losses, num_valid, num_bytes])
    ranks = [everywhere[rank] for rank in engine.world.peers]
    total, num_valid = sum(rank[0] for rank in ranks), sum(rank[1] for rank in ranks)
    num_bytes = None if any(rank[2] is None for rank in ranks) else sum(rank[2] for rank in ranks)
    if num_valid == 0:
        raise UsageError("`data.eval` holds no token to predict; name a longer text.")
    if not math.isfinite(total):
        raise NotFinite(f"the held-out loss is {total}; the model's weights or its logits are not finite.")
    return EvalReport(
        loss=total / num_valid,
        bits_per_byte=total / math.log(2) / num_bytes if num_bytes else None,
        num_valid=num_valid,
    )
