"""What a feed-forward network weighs beside its input and weights, by method; the room allocates as written here."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from planish.methods import DENSITY_PERCENT, Bitmap, Tiled
from planish.price.tally import Tally
from planish.shapes import FeedForwardShape

_WIDE = 4
_BLOCK = 4096


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


@lru_cache(maxsize=1024)
def feed_forward_bytes(
    shape: FeedForwardShape, method: Tiled | Bitmap, tokens: int, *, trained: bool = True
) -> FeedForwardBytes:
    """Return what one network weighs by `method` for `tokens` tokens, whatever the data, an arena not included.

    Args:
        shape: The network.
        method: How it runs.
        tokens: Rows x context of a microbatch.
        trained: Whether anything waits for backward.
    """
    if isinstance(method, Tiled):
        return tiled_bytes(shape, tokens, method.tile_bytes)
    return bitmap_bytes(shape, tokens, method.tile_bytes, trained=trained)


def tile_tokens(tile_bytes: int, width: int, itemsize: int) -> int:
    """Return how many tokens of one [tokens, width] array take `tile_bytes`, at least one."""
    return max(1, tile_bytes // (width * itemsize))


def arena_bytes(shape: FeedForwardShape, tokens: int, num_layers: int) -> int:
    """Return the arena in which the values of `num_layers` layers find room up to `DENSITY_PERCENT`."""
    streams = 1 + shape.gated
    return num_layers * (tokens * shape.width * DENSITY_PERCENT // 100 + _BLOCK) * streams * shape.itemsize


def whole_arena_bytes(shapes: Iterable[FeedForwardShape], method: Bitmap, tokens: int, *, waiting: bool) -> int:
    """Return the arena of all networks of a model.

    Args:
        shapes: The networks, each as often as it is there.
        method: Says how large it is, or leaves it to the networks.
        tokens: Rows x context of the largest microbatch.
        waiting: Whether all of them wait for backward at once, and not one at a time.
    """
    if method.arena_bytes is not None:
        return method.arena_bytes
    rooms = [arena_bytes(each, tokens, 1) for each in shapes]
    return sum(rooms) if waiting else max(rooms, default=0)


def marks_bytes(numel: int) -> int:
    """Return what says where values were: a bit each, and eight bytes a block."""
    return ceil(numel / 8) + 8 * ceil(numel / _BLOCK)


def bitmap_bytes(
    shape: FeedForwardShape, tokens: int, tile_bytes: int, *, num_values: int = 0, trained: bool = True
) -> FeedForwardBytes:
    """Return what `peaks.activation.bitmap` weighs.

    Args:
        shape: The network.
        tokens: Of its input.
        tile_bytes: Of one [tile, width] array at most.
        num_values: Activations that are not zero, where no arena holds their values; with one they weigh nothing.
        trained: Whether anything waits for backward.
    """
    D, F, size = shape.hidden_size, shape.width, shape.itemsize
    tile = tile_tokens(tile_bytes, F, size)
    width, streams = min(tile, tokens), 1 + shape.gated
    tally = Tally()
    tally.hold(room=(streams + shape.both) * width * F * size, y=tokens * D * size)
    kept = num_values * streams * size
    for number, (count, alike) in enumerate(_tiles(tokens, tile)):
        marks = marks_bytes(count * F) * trained
        tally.hold(**{f"marks before {number}": marks * (alike - 1)})
        if shape.both:
            tally.spike(count * F)
        tally.hold(**{f"marks {number}": marks})
        kept += marks * alike
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
    for count, _ in _tiles(tokens, tile):
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


def _tiles(tokens: int, tile: int) -> Iterator[tuple[int, int]]:
    """Yield the tokens of the first tile, of the second one for all like it, and of a shorter last one; each how often.

    The third tile finds what the second one has left, which is what the second found of the first but for its sizes.
    """
    full, rest = divmod(tokens, tile)
    if full:
        yield tile, 1
    if full > 1:
        yield tile, full - 1
    if rest or not full:
        yield rest, 1


def tiled_bytes(shape: FeedForwardShape, tokens: int, tile_bytes: int) -> FeedForwardBytes:
    """Return what `peaks.activation.tiled` weighs: act(x W^T) D^T, or (act(x G^T) * x W^T) D^T where it is gated."""
    D, F, size = shape.hidden_size, shape.width, shape.itemsize
    tile = tile_tokens(tile_bytes, F, size)
    tally = Tally()
    for number, (count, _) in enumerate(_tiles(tokens, tile)):
        _tiled_forward(tally, shape, count)
        if not number:
            tally.hold(y=tokens * D * size)
        tally.drop("part")
    return FeedForwardBytes(forward=tally.peak_bytes, kept=0, backward=_tiled_backward(shape, tokens, tile))


def _tiled_forward(tally: Tally, shape: FeedForwardShape, count: int) -> None:
    """Allocate as a block does whose intermediate results die when Python has no more use for them."""
    wide, narrow = count * shape.width * shape.itemsize, count * shape.hidden_size * shape.itemsize
    _activate(tally, shape, wide)
    tally.drop("inner", "root")
    if shape.gated:
        tally.hold(up=wide, product=wide)
        tally.drop("act", "up")
    tally.hold(part=narrow)
    tally.drop("act", "product")


def _activate(tally: Tally, shape: FeedForwardShape, wide: int) -> None:
    tally.hold(inner=wide)
    if shape.keeps == "root":
        tally.hold(root=wide)
    tally.hold(act=wide)


def _tiled_backward(shape: FeedForwardShape, tokens: int, tile: int) -> int:
    """Autograd's order: a node's results come before what it saved and what it was given go."""
    tally, sums = Tally(), _Sums(shape, one=tokens <= tile)
    sums.begin(tally)
    tally.hold(x_grad=tokens * shape.hidden_size * shape.itemsize)
    for count, _ in _tiles(tokens, tile):
        _tile_backward(tally, shape, sums, count)
        if not sums.one:
            tally.drop(*(f"by {name}" for name in sums.weights))
    return tally.peak_bytes


def _tile_backward(tally: Tally, shape: FeedForwardShape, sums: _Sums, count: int) -> None:
    array, rows = count * shape.width * shape.itemsize, count * shape.hidden_size * shape.itemsize

    def gradient(name: str) -> None:
        tally.hold(**{f"by {name}": (sums.weights[name] + sums.biases[name]) * shape.itemsize})

    _activate(tally, shape, array)
    if shape.keeps != "input":
        tally.drop("inner")
    if shape.gated:
        tally.hold(up=array, product=array)
    tally.hold(y=rows, by_h=array)
    gradient("down")
    own = () if shape.keeps == "result" else ("act",)
    if shape.gated:
        tally.drop("product")
        tally.hold(by_act=array, by_up=array)
        tally.drop("up", *own, "by_h")
        tally.hold(x_by_up=rows)
        gradient("up")
        tally.drop("by_up")
    else:
        tally.drop(*own)
        tally.rename(by_act="by_h")
    if shape.keeps == "root":
        _unsquare(tally, array)
    tally.hold(by_inner=array)
    tally.drop("by_act", "inner", "act", "root")
    tally.hold(x_by_inner=rows)
    gradient("inner")
    tally.drop("by_inner", "x_by_up", "y", "x_by_inner")


def _unsquare(tally: Tally, wide: int) -> None:
    """Multiply a gradient by twice the root, as autograd does: by 2 r^1, each of both a tensor."""
    tally.hold(power=wide, twice=wide, by_root=wide)
    tally.drop("power", "twice", "by_act")
    tally.rename(by_act="by_root")
