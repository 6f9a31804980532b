"""What an MoE layer's experts weigh: the tile that one expert works in, and the bytes alive in each phase.

`peaks.dispatch` allocates exactly the buffers that are listed here, so these numbers are what a ledger measures. None
of them depends on what the router chose.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, prod
from typing import Literal

from planish.price.tally import Tally

Kind = Literal["given", "product", "wide", "score", "index", "code", "byte"]
"""A buffer's numbers: as the hidden states, as the products are made, at least float32, as the scores, or whole."""

Buffers = dict[str, tuple[tuple[int, ...], Kind]]

_INDEX = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The experts of one layer on one rank.

    Attributes:
        hidden_size: Width of a hidden state.
        width: Width of an expert.
        columns: Columns of the first product: `width`, or twice that where there is a gate.
        num_experts: Experts that this rank holds.
        top_k: Experts of one token.
        itemsize: Bytes of one number of hidden states and weights.
        product_itemsize: Of one number of the products; more than `itemsize` where the CPU has no such products.
        score_itemsize: Of one number of the scores.
        biased: Whether both products have a bias.
        transposed: Whether a row multiplies the weights as they are.
        grouped: Whether a tile spans experts, and each of its products returns a tensor of its own.
    """

    hidden_size: int
    width: int
    columns: int
    num_experts: int
    top_k: int
    itemsize: int
    product_itemsize: int
    score_itemsize: int
    biased: bool = False
    transposed: bool = False
    grouped: bool = False

    @property
    def wide_itemsize(self) -> int:
        """Bytes of one number of the sums over routes."""
        return max(4, self.itemsize)

    @property
    def weight_shapes(self) -> tuple[tuple[int, ...], ...]:
        """One expert's up, down, and their biases if there are any."""
        up, down = (self.columns, self.hidden_size), (self.hidden_size, self.width)
        weights = (up[::-1], down[::-1]) if self.transposed else (up, down)
        return (*weights, (self.columns,), (self.hidden_size,)) if self.biased else weights

    def nbytes(self, buffers: Buffers) -> int:
        """Return the bytes of all `buffers` together."""
        return sum(prod(shape) * self.sizeof(kind) for shape, kind in buffers.values())

    def sizeof(self, kind: Kind) -> int:
        """Return the bytes of one number."""
        sizes = {
            "given": self.itemsize,
            "product": self.product_itemsize,
            "wide": self.wide_itemsize,
            "score": self.score_itemsize,
            "index": _INDEX,
            "code": 4,
            "byte": 1,
        }
        return sizes[kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsBytes:
    """Bytes of the experts beside their arguments.

    Attributes:
        forward: The most that the forward pass adds, the result included.
        backward: The most that the backward pass adds, all gradients included.
    """

    forward: int
    backward: int


@lru_cache(maxsize=256)
def tile_rows(experts: Experts, tile_bytes: int) -> int:
    """Return how many routes of one expert are at work at once."""
    numbers = sum(prod(shape) for shape, _ in _tile(experts, 1, backward=True).values())
    numbers += _returned(experts, backward=True)
    return max(1, tile_bytes // (numbers * experts.product_itemsize))


def forward_buffers(experts: Experts, tokens: int, tile_rows: int, block_rows: int) -> Buffers:
    """Return what the forward pass works in, whatever the routing."""
    return _buffers(experts, tokens, tile_rows, block_rows, backward=False)


def backward_buffers(experts: Experts, tokens: int, tile_rows: int, block_rows: int) -> Buffers:
    """Return what the backward pass works in, whatever the routing."""
    return _buffers(experts, tokens, tile_rows, block_rows, backward=True)


@lru_cache(maxsize=256)
def experts_bytes(experts: Experts, tokens: int, tile_rows: int, block_rows: int) -> ExpertsBytes:
    """Return what the experts weigh for `tokens` tokens, all arguments needing gradients."""
    hidden = tokens * experts.hidden_size * experts.itemsize
    routes = _largest_block(tokens, block_rows) * experts.top_k
    forward = Tally()
    forward.hold(buffers=experts.nbytes(forward_buffers(experts, tokens, tile_rows, block_rows)), result=hidden)
    _route(forward, routes, experts.num_experts, grouped_bytes(experts, routes, tile_rows, backward=False))
    backward = Tally()
    backward.hold(buffers=experts.nbytes(backward_buffers(experts, tokens, tile_rows, block_rows)))
    numbers = [experts.num_experts * prod(shape) for shape in experts.weight_shapes]
    grads = sum(numbers) * experts.itemsize
    sums, once = sum(numbers) * experts.wide_itemsize, tokens <= block_rows
    if experts.wide_itemsize == experts.itemsize:
        backward.hold(grads=grads)
    elif once:
        backward.hold(grads=grads, sums=sums // experts.num_experts)
    else:
        backward.hold(sums=sums)
    backward.hold(by_hidden=hidden, by_scores=tokens * experts.top_k * experts.score_itemsize)
    _route(backward, routes, experts.num_experts, grouped_bytes(experts, routes, tile_rows, backward=True))
    backward.spike(0 if once or experts.wide_itemsize == experts.itemsize else grads)
    return ExpertsBytes(forward=forward.peak_bytes, backward=backward.peak_bytes)


def grouped_bytes(experts: Experts, routes: int, tile_rows: int, *, backward: bool) -> int:
    """Return the most that a tile's products return at a time, of as many routes as one block can have."""
    if not experts.grouped:
        return 0
    numbers = min(tile_rows, routes) * _returned(experts, backward=backward)
    return numbers * experts.product_itemsize + experts.num_experts * 4


def _returned(experts: Experts, *, backward: bool) -> int:
    """Return the numbers of one route that are in products' own tensors."""
    first, narrow, wide = experts.columns, experts.width, experts.hidden_size
    if not experts.grouped:
        return 0
    return first + max(narrow, wide) if backward else max(first, wide)


def _route(tally: Tally, routes: int, num_experts: int, products: int) -> None:
    """Sort the routes of a block, work on them, and forget them."""
    tally.hold(chosen=routes * _INDEX, order=routes * _INDEX, experts=num_experts * _INDEX, ends=num_experts * _INDEX)
    tally.drop("ends", "experts", "chosen")
    tally.hold(row=routes * _INDEX)
    tally.spike(products)
    tally.drop("order", "row")


def _largest_block(tokens: int, block_rows: int) -> int:
    return ceil(tokens / max(1, ceil(tokens / block_rows)))


def _buffers(experts: Experts, tokens: int, tile_rows: int, block_rows: int, *, backward: bool) -> Buffers:
    block = _largest_block(tokens, block_rows)
    size = max(1, min(tile_rows, block * experts.top_k if experts.grouped else block))
    found = _tile(experts, size, backward=backward)
    found |= _raised(experts, size) if experts.product_itemsize > experts.itemsize else {}
    if experts.wide_itemsize > experts.product_itemsize:
        found["wide"] = ((size, experts.hidden_size), "wide")
        if backward:
            found["up_part"], found["down_part"] = ((shape, "product") for shape in experts.weight_shapes[:2])
    if experts.wide_itemsize > experts.itemsize:
        found["total"] = ((block, experts.hidden_size), "wide")
    if backward and experts.biased:
        found["by_score"] = ((size,), "product")
        found["up_sum"], found["down_sum"] = ((shape, "wide") for shape in experts.weight_shapes[2:])
    return found


def _tile(experts: Experts, size: int, *, backward: bool) -> Buffers:
    """Return what holds a tile of `size` routes."""
    found: Buffers = {
        "row": ((size, experts.hidden_size), "product"),
        **({} if experts.grouped else {"inner": ((size, experts.columns), "product")}),
        "outer": ((size, experts.width), "product"),
        "scratch": ((size, experts.width), "product"),
        "score": ((size,), "score"),
    }
    if backward:
        found["grad"] = ((size, experts.hidden_size), "product")
        found["column"] = ((size,), "product")
        found["sum"] = ((size,), "wide")
    return found


def _raised(experts: Experts, size: int) -> Buffers:
    """Return where narrow rows wait to be raised, and one expert's raised weights lie."""
    weights = zip(("up", "down", "up_bias", "down_bias"), experts.weight_shapes, strict=False)
    return {"given": ((size, experts.hidden_size), "given"), **{name: (shape, "product") for name, shape in weights}}
