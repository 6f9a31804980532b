"""How a layer's activations wait for backward: packed, dense where packing would save nothing, or not at all.

[Note: bounded for any density] Values lie in an arena of fixed size where one is given. A layer that does not fit keeps
nothing and computes its activations again, tile by tile, so that no density of the data can take more than was planned.
Packing a tile takes itemsize * density + 1/8 bytes an element and stream; above the density where that is more than
`itemsize`, the next forward keeps the tile as it is, until the density has fallen below that by `_MARGIN`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from planish.kernels.bitmap import Codec, num_bits_bytes, num_blocks
from planish.peaks.activation.arena import Arena

_MARGIN = 1 / 16

Kept = Literal["packed", "dense", "recomputed"]


class AssumedCodec:
    """Stands in for kernels where tensors are fake: nothing is counted, `density` is assumed, nothing is written."""

    def __init__(self, density: float) -> None:
        self.density = density

    def count(self, x: Tensor) -> int:
        """Return the assumed number of values."""
        return round(self.density * x.numel())

    def pack(self, x: Tensor, bits: Tensor, base: Tensor, values: Tensor) -> int:  # noqa: ARG002
        """Return the assumed number of values."""
        return self.count(x)

    def compact(self, x: Tensor, bits: Tensor, base: Tensor, values: Tensor) -> None:
        """Do nothing."""

    def unpack(self, values: Tensor, bits: Tensor, base: Tensor, out: Tensor) -> None:
        """Do nothing."""


@dataclass(slots=True, kw_only=True)
class Statistics:
    """What one layer's last forward kept.

    Attributes:
        density: Share of r that is not zero.
        dense_bytes: What r, and u beside it, would take as they are.
        kept_bytes: What waits for backward in their place.
        kept: How.
    """

    density: float = 0.0
    dense_bytes: int = 0
    kept_bytes: int = 0
    kept: Kept = "recomputed"


def break_even(itemsize: int, num_streams: int) -> float:
    """Return the density above which packing takes more than the dense arrays: 15/16 for one bf16 stream."""
    return 1 - 1 / (8 * itemsize * num_streams)


class Keeper:
    """Keeps one layer's tiles from forward to backward.

    Args:
        codec: The kernels.
        arena: Where values wait; None: in memory of exactly their size.
    """

    def __init__(self, codec: Codec, arena: Arena | None = None) -> None:
        self.codec, self.arena = codec, arena
        self.last = Statistics()
        self._dense = False

    def open(self) -> "Tiles":
        """Begin a forward."""
        return Tiles(self, dense=self._dense)

    def close(self, tiles: "Tiles") -> None:
        """Note what a forward kept, and whether the next one packs."""
        last = self.last = tiles.statistics()
        limit = break_even(tiles.itemsize, tiles.num_streams)
        self._dense = last.density > (limit - _MARGIN if self._dense else limit)


class Tiles:
    """The tiles of one forward of one layer, as they come."""

    def __init__(self, keeper: Keeper, *, dense: bool) -> None:
        self._codec, self._arena, self._dense = keeper.codec, keeper.arena, dense
        self._numel = self._count = 0
        self.payload: list[Tensor] | None = []
        self.itemsize = self.num_streams = 1

    def add(self, r: Tensor, up: Tensor | None) -> None:
        """Keep r, and `up` where r is not zero; once something has no room, nothing of the layer is kept."""
        streams = [r] if up is None else [r, up]
        self.itemsize, self.num_streams = r.element_size(), len(streams)
        self._numel += r.numel()
        if self.payload is None or self._dense:
            self._count += self._codec.count(r)
            kept = None if self.payload is None else self._copy(streams)
        else:
            kept = self._pack(streams)
        if kept is None:
            self.payload = None
        else:
            self.payload += kept

    @property
    def kept(self) -> Kept:
        """How the layer is kept."""
        return "recomputed" if self.payload is None else "dense" if self._dense else "packed"

    def statistics(self) -> Statistics:
        """Return what was kept."""
        return Statistics(
            density=self._count / max(1, self._numel),
            dense_bytes=self._numel * self.itemsize * self.num_streams,
            kept_bytes=sum(each.nbytes for each in self.payload or ()),
            kept=self.kept,
        )

    def _copy(self, streams: list[Tensor]) -> list[Tensor] | None:
        kept = []
        for each in streams:
            room = torch.empty_like(each) if self._arena is None else self._arena.take(each.dtype, *each.shape)
            if room is None:
                return None
            kept.append(room.copy_(each))
        return kept

    def _pack(self, streams: list[Tensor]) -> list[Tensor] | None:
        r = streams[0]
        bits = torch.empty(num_bits_bytes(r.numel()), dtype=torch.uint8, device=r.device)
        base = torch.empty(num_blocks(r.numel()), dtype=torch.int64, device=r.device)
        if self._arena is None:
            count = self._codec.count(r)
            values = torch.empty(count, dtype=r.dtype, device=r.device)
            self._codec.pack(r, bits, base, values)
        else:
            count = self._codec.pack(r, bits, base, self._arena.room(r.dtype))
            values = self._arena.take(r.dtype, count)
        self._count += count
        kept = [bits, base, values]
        for each in streams[1:]:
            more = torch.empty_like(values) if self._arena is None else self._arena.take(each.dtype, count)
            if values is not None and more is not None:
                self._codec.compact(each, bits, base, more)
            kept.append(more)
        return None if any(each is None for each in kept) else kept


def restore(codec: Codec, kept: Kept, payload: list[Tensor], into: list[Tensor]) -> None:
    """Write the next tile of a layer, taken from the front of `payload`, into r, and u beside it."""
    if kept == "dense":
        for each in into:
            each.copy_(payload.pop(0))
        return
    bits, base = payload.pop(0), payload.pop(0)
    for each in into:
        codec.unpack(payload.pop(0), bits, base, each)


def summary(keepers: Mapping[str, Keeper]) -> dict[str, Any]:
    """Return what the last forwards kept, for a run's record; nothing where nothing is packed.

    Returns:
        The density of all activations together and of each network, the bytes that packing saved, and how many
        networks were kept in each way.
    """
    last = [keeper.last for keeper in keepers.values()]
    if not last:
        return {}
    dense_bytes = sum(each.dense_bytes for each in last)
    return {
        "activation/density": round(sum(each.density * each.dense_bytes for each in last) / max(1, dense_bytes), 6),
        "activation/densities": [round(each.density, 4) for each in last],
        "activation/dense_bytes": dense_bytes,
        "activation/saved_bytes": sum(each.dense_bytes - each.kept_bytes for each in last),
        **{f"activation/{kept}": sum(each.kept == kept for each in last) for kept in get_args(Kept)},
    }
