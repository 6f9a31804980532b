"""What one pass over a vocabulary shard weighs: the tiles of S and of T, what waits between them, each pass's peak.

[Note: no buffer for hidden's gradient] A shard's share of it grows in place in the wide tensor [N, D] that is then
reduced over ranks, so that the buffers it takes on one device are not needed: heads here ask for the weight's alone.

`sharded` allocates exactly what is listed here, so these numbers are what a ledger measures. T are the tokens of a
microbatch, N those that are not ignored, V_d the rows of the shard; small tensors are per row of one row group.
"""

from dataclasses import dataclass, replace

from planish.price.vocab import (
    ITEMSIZE,
    ROW_STEP,
    STRIP,
    Buffers,
    Head,
    Tiling,
    cast_bias_bytes,
    choose_tiling,
    round_up,
    total_bytes,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPass:
    """One pass over a shard: the head as the tiles see it, the tile, and every working buffer."""

    head: Head
    tiling: Tiling
    buffers: Buffers

    @property
    def workspace_bytes(self) -> int:
        """Return the bytes of the working buffers."""
        return total_bytes(self.buffers)

    def group_rows(self, num_valid: int) -> int:
        """Return the rows of one row group."""
        groups = max(1, -(-num_valid // self.tiling.rows))
        return min(num_valid, round_up(-(-num_valid // groups), ROW_STEP))

    def group_bytes(self, num_valid: int, row_bytes: int) -> int:
        """Return the bytes beside the buffers: targets as rows of the shard, and `row_bytes` for each row of a group.

        While the targets are looked up, three masks are alive beside them. A bias in another dtype than the products'
        is cast whole.
        """
        targets = 8 * self.head.tokens + max(3 * self.head.tokens, self.group_rows(num_valid) * row_bytes)
        return targets + cast_bias_bytes(self.head)


def scan_pass(head: Head, *, product: bool, tile_bytes: int) -> ShardPass:
    """Return S: statistics in any tile; with `product` all tiles of a row group wait for their statistics."""
    head = replace(head, grads=frozenset({"weight"} if product else ()))
    strategy = "gradients-in-forward" if product else "recompute"
    tiling = choose_tiling(head, tile_bytes=tile_bytes, strategy=strategy)
    return ShardPass(head=head, tiling=tiling, buffers=tiling.buffers(head, "both" if product else "statistics"))


def sweep_pass(head: Head, *, narrow: bool, bias: bool, tile_bytes: int) -> ShardPass:
    """Return T; a weight gradient that is `narrow` is summed in a wide buffer of one tile's columns first."""
    head = replace(head, grads=frozenset({"weight", "bias"} if bias else {"weight"}))
    tiling = choose_tiling(head, tile_bytes=tile_bytes, strategy="recompute")
    buffers = tiling.buffers(head, "gradients")
    for name in ("column_grads", "turned_rows"):
        buffers.pop(name, None)
    if narrow:
        buffers["column_grads"] = ((head.widest(tiling.blocks), head.hidden_size), head.wide_dtype)
    return ShardPass(head=head, tiling=tiling, buffers=buffers)


def waiting_bytes(head: Head, *, num_valid: int, product: bool) -> int:
    """Return the bytes of what S leaves for the barrier: statistics, the positions of valid tokens, the products."""
    statistics = 3 if head.wanted & {"mean", "argmax"} else 2
    numbers = num_valid * (statistics + (head.hidden_size if product else 0))
    positions = 8 * num_valid if num_valid < head.tokens else 0
    return numbers * head.wide_bytes + positions + (_uniform_bytes(head, num_valid) if product else 0)


def scan_peak_bytes(plan: ShardPass, *, num_valid: int) -> int:
    """Return the peak of S: its buffers, what it leaves, and small tensors.

    These are largest where a group's target logits are picked or its statistics combined, or while the uniform part
    of label smoothing is made.
    """
    head, wide, product = plan.head, plan.head.wide_bytes, plan.tiling.keeps_tiles
    picking = 16 + wide + ITEMSIZE[head.compute_dtype]
    combining = (4 + ("mean" in head.wanted)) * wide + (16 if "argmax" in head.wanted else 0)
    small = plan.group_bytes(num_valid, max(picking, combining))
    if product and "mean" in head.wanted:
        slopes = 3 * wide * num_valid + 16 * plan.group_rows(num_valid) if head.capped else 0
        small = max(small - _uniform_bytes(head, num_valid), 8 * head.tokens + slopes)
    return plan.workspace_bytes + waiting_bytes(head, num_valid=num_valid, product=product) + small


def _uniform_bytes(head: Head, num_valid: int) -> int:
    """Return the bytes of the sum of the shard's rows that label smoothing takes, one for each token under a cap."""
    rows = num_valid if head.capped else 1
    return rows * head.hidden_size * head.wide_bytes if "mean" in head.wanted else 0


def sweep_peak_bytes(plan: ShardPass, *, num_valid: int, hidden_grad: bool, z_loss: bool) -> int:
    """Return the peak of T for a token or more, beside the gradients that it adds to: buffers, share, slopes."""
    head, wide = plan.head, plan.head.wide_bytes
    share = num_valid * head.hidden_size if hidden_grad else 0
    bias = head.vocab_size if "bias" in head.grads else 0
    row_bytes = 16 + (2 + z_loss + ("mean" in head.wanted)) * wide
    return plan.workspace_bytes + (share + bias + num_valid) * wide + plan.group_bytes(num_valid, row_bytes)


def rescale_peak_bytes(head: Head, *, num_valid: int) -> int:
    """Return the peak of making the share from the product: slopes, and rows of W at the targets, some at a time."""
    wide, rows = head.wide_bytes, min(num_valid, max(1, STRIP // head.hidden_size))
    row_bytes = ITEMSIZE[head.weight_dtype] + (wide if head.weight_dtype != head.wide_dtype else 0)
    return num_valid * (8 + (2 + ("mean" in head.wanted)) * wide) + rows * head.hidden_size * row_bytes
