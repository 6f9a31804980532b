"""What one pass over a vocabulary shard weighs: the tiles of S and of T, and what waits between them.

[Note: no buffer for hidden's gradient] A shard's share of it grows in place in the wide tensor [N, D] that is then
reduced over ranks, so that the buffers it takes on one device are not needed: heads here ask for the weight's alone.
"""

from dataclasses import dataclass, replace

from planish.price.vocab import ITEMSIZE, Buffers, Head, Tiling, choose_tiling, total_bytes


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
    if not narrow:
        buffers.pop("column_grads", None)
    return ShardPass(head=head, tiling=tiling, buffers=buffers)


def waiting_bytes(head: Head, *, num_valid: int, statistics: int, product: bool) -> int:
    """Return the bytes of what S leaves for the barrier: `statistics` numbers a token, the product, their positions."""
    numbers = num_valid * (statistics + (head.hidden_size if product else 0))
    return numbers * ITEMSIZE[head.wide_dtype] + (8 * num_valid if num_valid < head.tokens else 0)
