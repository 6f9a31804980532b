"""What a feed-forward network weighs beside its input and weights, by method; the room allocates as written here."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from planish.price.tally import Tally
from planish.shapes import FeedForwardShape

_WIDE = 4
_BLOCK = 4096

DENSITY_PERCENT = 55
"""Of drawn weights half of all activations are not zero; what an arena has room for is some more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForwardBytes:
    """Bytes of one network beside its input, weights and an arena.

    Attributes:
        forward: The most that the forward pass adds, its output and what it keeps included.
        kept: What waits for backward beside the input and the output.
        backward: The most that the backward pass adds to that and the output's gradient, all its gradients included.
    """

    forward: int
    kept: int
    backward: int


def tile_tokens(tile_bytes: int, width: int, itemsize: int) -> int:
    """Return how many tokens of one [tokens, width] array take `tile_bytes`, at least one."""
    return max(1, tile_bytes // (width * itemsize))


def arena_bytes(shape: FeedForwardShape, tokens: int, num_layers: int) -> int:
    """Return the arena in which the values of `num_layers` layers find room up to `DENSITY_PERCENT`."""
    streams = 1 + shape.gated
    return num_layers * (tokens * shape.width * DENSITY_PERCENT // 100 + _BLOCK) * streams * shape.itemsize


def marks_bytes(numel: int) -> int:
    """Return what says where values were: a bit each, and eight bytes a block."""
    return ceil(numel / 8) + 8 * ceil(numel / _BLOCK)


def bitmap_bytes(shape: FeedForwardShape, tokens: int, tile_bytes: int, *, num_values: int = 0) -> FeedForwardBytes:
    """Return what `peaks.activation.bitmap` weighs.

    Args:
        shape: The network.
        tokens: Of its input.
        tile_bytes: Of one [tile, width] array at most.
        num_values: Activations that are not zero, where no arena holds their values; with one they weigh nothing.
    """
    D, F, size = shape.hidden_size, shape.width, shape.itemsize
    tile = tile_tokens(tile_bytes, F, size)
    width, streams = min(tile, tokens), 1 + shape.gated
    tally = Tally()
    tally.hold(room=(streams + shape.both) * width * F * size, y=tokens * D * size)
    kept = num_values * streams * size
    for number, count in enumerate(_tiles(tokens, tile)):
        if shape.both:
            tally.spike(count * F)
        tally.hold(**{f"marks {number}": marks_bytes(count * F)})
        kept += marks_bytes(count * F)
    tally.hold(values=num_values * streams * size)
    return FeedForwardBytes(
        forward=tally.peak_bytes,
        kept=kept,
        backward=_bitmap_backward(shape, tokens, tile),
    )


def _bitmap_backward(shape: FeedForwardShape, tokens: int, tile: int) -> int:
    D, F, size = shape.hidden_size, shape.width, shape.itemsize
    tally, sums = Tally(), _Sums(shape, one=tokens <= tile)
    tally.hold(x_grad=tokens * D * size)
    sums.begin(tally)
    tally.hold(room=(2 + shape.gated) * min(tile, tokens) * F * size)
    for count in _tiles(tokens, tile):
        for name in ("down", "up", "inner"):
            sums.add_product(tally, name)
        tally.spike(count * D * size * shape.gated)
    sums.end(tally)
    return tally.peak_bytes


class _Sums:
    """The gradients of weights and biases as `peaks.activation.sums` makes them."""

    def __init__(self, shape: FeedForwardShape, *, one: bool) -> None:
        D, F = shape.hidden_size, shape.width
        widths = {"inner": F, "up": F * shape.gated, "down": D}
        self.weights = {"inner": D * F, "up": D * F * shape.gated, "down": D * F}
        self.biases = {name: width * shape.biased for name, width in widths.items()}
        self.size, self.wide, self.one = shape.itemsize, max(_WIDE, shape.itemsize), one

    def begin(self, tally: Tally) -> None:
        """Several tiles: make the sums."""
        if not self.one:
            for name, bias in self.biases.items():
                tally.hold(**{f"sum {name}": (self.weights[name] + bias) * self.wide})

    def add_product(self, tally: Tally, name: str) -> None:
        """Add one tile's product, which is the gradient where there is but one."""
        weight, bias = (each[name] * self.size for each in (self.weights, self.biases))
        if self.one:
            tally.hold(**{name: weight, f"{name} bias": bias})
            return
        if self.size < _WIDE:
            tally.spike(weight)
        tally.spike(bias)

    def end(self, tally: Tally) -> None:
        """Several tiles: round each sum to its parameter's dtype."""
        if self.one or self.size == self.wide:
            return
        for name, weight in self.weights.items():
            tally.hold(**{f"narrow {name}": weight * self.size})
            tally.free(weight * self.wide)
        for name, bias in self.biases.items():
            tally.hold(**{f"narrow {name} bias": bias * self.size})
            tally.free(bias * self.wide)


def _tiles(tokens: int, tile: int) -> Iterator[int]:
    for begin in range(0, max(1, tokens), tile):
        yield min(tile, tokens - begin)


def tiled_bytes(shape: FeedForwardShape, tokens: int, tile_bytes: int) -> FeedForwardBytes:
    """Return what `peaks.activation.tiled` weighs over act(x W^T) D^T, or act(x G^T) * (x W^T) D^T where it is gated.

    The activation keeps its input and nothing else, as silu and gelu do.
    """
    D, F, size = shape.hidden_size, shape.width, shape.itemsize
    tile = tile_tokens(tile_bytes, F, size)
    tally = Tally()
    for number, count in enumerate(_tiles(tokens, tile)):
        _tiled_forward(tally, shape, count)
        if not number:
            tally.hold(y=tokens * D * size)
        tally.drop("part")
    return FeedForwardBytes(forward=tally.peak_bytes, kept=0, backward=_tiled_backward(shape, tokens, tile))


def _tiled_forward(tally: Tally, shape: FeedForwardShape, count: int) -> None:
    """Allocate as a block does whose intermediate results die when Python has no more use for them."""
    wide, narrow = count * shape.width * shape.itemsize, count * shape.hidden_size * shape.itemsize
    tally.hold(inner=wide, act=wide)
    tally.drop("inner")
    if shape.gated:
        tally.hold(up=wide, product=wide)
        tally.drop("act", "up")
    tally.hold(part=narrow)
    tally.drop("act", "product")


def _tiled_backward(shape: FeedForwardShape, tokens: int, tile: int) -> int:
    """Autograd's order: a node's results come before what it saved and what it was given go."""
    tally, sums = Tally(), _Sums(shape, one=tokens <= tile)
    sums.begin(tally)
    tally.hold(x_grad=tokens * shape.hidden_size * shape.itemsize)
    for count in _tiles(tokens, tile):
        _tile_backward(tally, shape, sums, count)
        if not sums.one:
            tally.drop(*(f"by {name}" for name in sums.weights))
    return tally.peak_bytes


def _tile_backward(tally: Tally, shape: FeedForwardShape, sums: _Sums, count: int) -> None:
    array, rows = count * shape.width * shape.itemsize, count * shape.hidden_size * shape.itemsize

    def gradient(name: str) -> None:
        tally.hold(**{f"by {name}": (sums.weights[name] + sums.biases[name]) * shape.itemsize})

    tally.hold(inner=array, act=array)
    if shape.gated:
        tally.hold(up=array, product=array)
    tally.hold(y=rows, by_h=array)
    gradient("down")
    if shape.gated:
        tally.drop("product")
        tally.hold(by_act=array, by_up=array)
        tally.drop("up", "act", "by_h")
        tally.hold(x_by_up=rows)
        gradient("up")
        tally.drop("by_up")
    else:
        tally.drop("act")
        tally.rename(by_act="by_h")
    tally.hold(by_inner=array)
    tally.drop("by_act", "inner")
    tally.hold(x_by_inner=rows)
    gradient("inner")
    tally.drop("by_inner", "x_by_up", "y", "x_by_inner")
