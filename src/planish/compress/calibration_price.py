"""What one pass of text through a parent holds, as arithmetic: no torch."""

from dataclasses import dataclass, replace

from planish.compress.space import (
    KeepExperts,
    KeepHeads,
    LayerSpace,
    LinearAttention,
    LinearFfn,
    SlidingWindow,
    Space,
    Width,
)
from planish.errors import DoesNotFit
from planish.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Sizes of one pass.

    Attributes:
        rows: Rows of text.
        judging_rows: Of them, those that choose and judge.
        context: Tokens in each.
        batch_rows: Rows that run at once, at most.
        itemsize: Bytes of a weight and of a hidden state's number.
        largest_layer_bytes: Weights of the largest layer.
        resident_bytes: Weights that are in memory all the time; 0 where layers are read one at a time.
        ends_bytes: Embedding, norm and head, which are read before the first layer.
    """

    rows: int
    judging_rows: int
    context: int
    batch_rows: int
    itemsize: int
    largest_layer_bytes: int
    resident_bytes: int
    ends_bytes: int


def calibration_bytes(space: Space, sizes: Pass) -> int:
    """Return the bytes that tensors hold at most while `calibrate` runs.

    Hidden states of all rows, and the larger of: embedding and head, with what is mapped of their file while they are
    read; or the worst layer with its normal equations and either a batch on its way through or one solve.
    """
    hidden = sizes.rows * sizes.context * space.hidden_size * sizes.itemsize
    ids = 8 * sizes.rows * sizes.context
    layers = max(_layer_bytes(space, layer, sizes) for layer in space.layers)
    ends = 0 if sizes.resident_bytes else 2 * sizes.ends_bytes
    return sizes.resident_bytes + hidden + ids + max(ends, layers)


def batch_that_fits(space: Space, sizes: Pass, budget_bytes: int) -> Pass:
    """Return `sizes` with the most rows at once, up to those asked for, that `budget_bytes` hold.

    Raises:
        DoesNotFit: Not even one.
    """
    for batch_rows in range(sizes.batch_rows, 0, -1):
        fitting = replace(sizes, batch_rows=batch_rows)
        if calibration_bytes(space, fitting) <= budget_bytes:
            return fitting
    least = calibration_bytes(space, replace(sizes, batch_rows=1))
    raise DoesNotFit(
        f"making the library needs {format_bytes(least)} with one row of {sizes.context} tokens at a time, "
        f"`memory.budget` leaves {format_bytes(budget_bytes)}; raise it, shorten the rows, or give fewer."
    )


def _layer_bytes(space: Space, layer: LayerSpace, sizes: Pass) -> int:
    sum_size = 8 if sizes.itemsize == 8 else 4
    d, q = space.hidden_size, space.num_heads * space.head_dim
    parent = layer.attention[0]
    width = layer.ffn[0].width if isinstance(layer.ffn[0], Width) else 0
    equations = 3 * width * width * sum_size + 8 * width
    equations += 6 * d * d * sum_size * ((LinearAttention() in layer.attention) + (LinearFfn() in layer.ffn))
    for option in layer.attention[1:]:
        if isinstance(option, KeepHeads | SlidingWindow):
            own = 2 * option.kv_heads * space.head_dim * d * sizes.itemsize
            ways = 1 if option.kv_heads == parent.kv_heads else 2
            equations += ways * 3 * (q * q + q * d) * sum_size
            equations += ways * own + (d * q * sizes.itemsize if ways == 2 else 0)
    weights = 0 if sizes.resident_bytes else sizes.largest_layer_bytes
    tokens = sizes.batch_rows * sizes.context
    batch, solve = _batch_bytes(tokens, space, layer, width, sizes), _solve_bytes(d, q, width, sizes.itemsize)
    if isinstance(layer.ffn[0], KeepExperts) and space.mixture is not None:
        smaller = [each for each in layer.ffn[1:] if isinstance(each, KeepExperts)]
        equations += _mixture_sums(layer.ffn[0], smaller, d, sizes)
        batch = max(batch, _mixture_batch(layer.ffn[0], space.mixture.top_k, tokens, d, sizes))
        solve = max(solve, _mixture_solve(layer.ffn[0], smaller, batch, d, sizes))
    return weights + equations + max(batch, solve)


def _mixture_sums(parent: KeepExperts, smaller: list[KeepExperts], d: int, sizes: Pass) -> int:
    """Return what is kept of a mixture's text: what judges it, and sums of each expert's channels."""
    kept = sizes.judging_rows * sizes.context * (2 * d * sizes.itemsize + 8) if smaller else 0
    narrow = any(each.experts == parent.experts for each in smaller)
    sum_size = 8 if sizes.itemsize == 8 else 4
    return kept + (parent.experts * (3 * parent.width**2 * sum_size + 8 * parent.width) if narrow else 0)


def _mixture_batch(parent: KeepExperts, top_k: int, tokens: int, d: int, sizes: Pass) -> int:
    """Return what a batch holds in a mixture: rows on their way through experts, and what comes of them."""
    return tokens * (top_k * max(4 * d, d + 4 * parent.width) + 4 * d + 2 * parent.experts) * sizes.itemsize


def _mixture_solve(parent: KeepExperts, smaller: list[KeepExperts], batch: int, d: int, sizes: Pass) -> int:
    """Return what writing smaller mixtures holds: last matrices of all widths; one solve, or a mixture in use."""
    narrow = [each.width for each in smaller if each.experts == parent.experts]
    cuts = parent.experts * sum(narrow) * (d * sizes.itemsize + 16)
    largest = max((each.experts * each.width for each in smaller), default=0)
    starts = (sum(narrow) + 3 * parent.width) * d * sizes.itemsize
    solve = starts + _solve_bytes(d, 0, parent.width, sizes.itemsize) if narrow else 0
    mixture = 3 * d * largest * sizes.itemsize
    return cuts + max(solve, mixture + max(mixture, batch))


def _batch_bytes(tokens: int, space: Space, layer: LayerSpace, width: int, sizes: Pass) -> int:
    """Return what a batch holds in attention, or in the network: on its way through, or while it is counted."""
    item, d, q = sizes.itemsize, space.hidden_size, space.num_heads * space.head_dim
    windowed = any(isinstance(each, SlidingWindow) for each in layer.attention)
    kv = max(each.kv_heads for each in layer.attention if isinstance(each, KeepHeads | SlidingWindow)) * space.head_dim
    copies = 1 if item >= 4 else 2  # of what is counted, weighed by token and in the sums' dtype
    rotation = 2 * space.head_dim * item
    attention = (2 * d + 4 * q + 3 * kv) * item + rotation
    counted = (2 * d + 2 * q) * item + max(copies * max(q, d) * max(item, 4) + 4 * d * (copies - 1), 2 * 8 * d)
    network = (2 * d + 3 * width) * item
    network_counted = (3 * d + width) * item + max(copies * width * max(item, 4), 2 * 8 * d) + 4 * d * (copies - 1)
    mask = sizes.context**2
    if windowed:  # torch attends by a mask then: in whole numbers while it is made, with heads repeated when it is used
        attention, mask = attention + 2 * q * item, 32 * mask
    return tokens * max(attention, counted, network, network_counted) + mask


def _solve_bytes(d: int, q: int, width: int, itemsize: int) -> int:
    """Return what the largest solve in float64 holds: the matrix, its factor, and both sides."""
    channels = 4 * width * width * 8 + 3 * width * d * 8
    heads = 3 * max(q, d) ** 2 * 8 + 4 * max(q, d) * d * 8
    return max(channels, heads) + (width + q) * d * itemsize
