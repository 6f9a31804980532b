"""What the head weighs: the sizes of its tiles under a budget, and the bytes alive in each phase.

`peaks.vocab` allocates exactly the buffers that `Tiling.buffers` lists, so these numbers are what a ledger measures.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import isqrt, prod
from typing import Literal

from planish.price.phases import Phases

Strategy = Literal["gradients-in-forward", "recompute"]
Pass = Literal["statistics", "gradients", "both"]

BLOCK = 1024
"""Columns of one canonical block: sums over the vocabulary are formed per block and combined in vocabulary order,
so that they do not depend on the tile. The last block takes the remainder too (`vocab_size % BLOCK`)."""

ROW_STEP = 8
"""Rows of logits are computed in multiples of this, which makes their bits independent of how rows are grouped."""

MIN_ROWS = 256
"""With fewer rows than this, gradients in forward spend their time re-reading the weight's gradient."""

KEPT_BLOCKS = 4
"""Blocks of one tile where all tiles of a row group are kept: small enough to be derived and multiplied in cache."""

STRIP = 2**19
"""Elements of logits that are exponentiated at a time: they stay in a CPU's cache from the maximum to the sum."""

CUDA_STRIP = 2**23
"""The same on a GPU, where each operation must be long enough to outweigh its launch."""

CACHED_BYTES = 2**24
"""Bytes of a tile that is computed again, on a CPU: a larger one multiplies no faster and falls out of the cache."""

FILTER_BLOCK = 128
"""Columns that a gradient filter keeps or skips together, as many as are multiplied at full speed."""

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8}

Buffers = dict[str, tuple[tuple[int, ...], str]]


def round_up(count: int, step: int) -> int:
    """Return the smallest multiple of `step` that is at least `count`."""
    return -(-count // step) * step


def total_bytes(buffers: Buffers) -> int:
    """Return the bytes of all `buffers` together."""
    return sum(prod(shape) * ITEMSIZE[dtype] for shape, dtype in buffers.values())


def block_ranges(columns: int, step: int) -> Iterator[tuple[int, int, int]]:
    """Yield (first block, first column, last column + 1) of every `step` canonical blocks of `columns` columns."""
    blocks = max(1, columns // BLOCK)
    for block in range(0, blocks, step):
        yield block, block * BLOCK, columns if block + step >= blocks else (block + step) * BLOCK


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The head of one call: hidden [tokens, hidden_size], weight [vocab_size, hidden_size]; dtypes by torch's names.

    Attributes:
        tokens: Tokens given, the ignored ones included.
        hidden_size: Width of a hidden state.
        vocab_size: Rows of the weight.
        hidden_dtype: Of the hidden states and their gradient.
        weight_dtype: Of the weight and its gradient.
        compute_dtype: Of the matrix products and the tile.
        bias_dtype: Of the bias; None is no bias.
        capped: Whether logits are soft-capped.
        wanted: Statistics of each token besides nll: any of "lse", "entropy", "argmax", "mean".
        grads: Which of "hidden", "weight" and "bias" need a gradient.
        adapter: Rank of what is added to the weight, which is then frozen: hidden_size is so much wider than the
            weight, and "weight" among `grads` is the adapter's second matrix [vocab_size, adapter].
        adapter_dtype: Of that matrix.
        filtered: Whether a gradient filter looks at the derivatives.
        ordered: Whether it brings those that pass together.
        device: Type of the device; on "cuda" products of narrow numbers come out wide, and so does the tile.
    """

    tokens: int
    hidden_size: int
    vocab_size: int
    hidden_dtype: str = "float32"
    weight_dtype: str = "float32"
    compute_dtype: str = "float32"
    bias_dtype: str | None = None
    capped: bool = False
    wanted: frozenset[str] = frozenset()
    grads: frozenset[str] = frozenset({"hidden", "weight"})
    adapter: int = 0
    adapter_dtype: str | None = None
    filtered: bool = False
    ordered: bool = False
    device: str = "cpu"

    @property
    def trained_width(self) -> int:
        """Return the columns of the weight's gradient."""
        return self.adapter or self.hidden_size

    @property
    def trained_dtype(self) -> str:
        """Return the dtype of the weight's gradient."""
        return self.weight_dtype if self.adapter_dtype is None else self.adapter_dtype

    @property
    def wide_dtype(self) -> str:
        """Return the dtype in which sums over tokens and over the vocabulary are kept."""
        return "float64" if self.compute_dtype == "float64" else "float32"

    @property
    def product_dtype(self) -> str:
        """Return the dtype in which matrix products come out, that of the tile."""
        return self.wide_dtype if self.device == "cuda" else self.compute_dtype

    @property
    def wide_bytes(self) -> int:
        """Return the bytes of one number of the wide dtype."""
        return ITEMSIZE[self.wide_dtype]

    @property
    def blocks(self) -> int:
        """Return the number of canonical blocks of the vocabulary."""
        return max(1, self.vocab_size // BLOCK)

    def widest(self, blocks: int) -> int:
        """Return the most columns that `blocks` canonical blocks in a row can have."""
        return min(self.vocab_size, blocks * BLOCK + self.vocab_size % BLOCK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """A strategy and the tile it works in: `rows` tokens by `blocks` canonical blocks of the vocabulary.

    Attributes:
        strategy: Where the gradients are made.
        rows: Tokens of a tile, a multiple of ROW_STEP.
        blocks: Canonical blocks of a tile.
        sweeps: Of "recompute": 1 makes both gradients at once, that of hidden in a wide buffer of tokens x width if
            hidden is narrower; 2 makes each by itself, without that buffer, at one more product.
    """

    strategy: Strategy
    rows: int
    blocks: int
    sweeps: int = 1

    def products(self, head: Head) -> int:
        """Return how often valid tokens x vocabulary x width is multiplied, both passes; thin products do not count."""
        again = self.sweeps if head.grads and not self.keeps_tiles else 0
        return 1 + again + len(head.grads & ({"hidden"} if head.adapter else {"hidden", "weight"}))

    @property
    def keeps_tiles(self) -> bool:
        """Return whether all tiles of a row group exist at once, from their statistics to their gradients."""
        return self.strategy == "gradients-in-forward"

    @property
    def passes(self) -> tuple[Pass, ...]:
        """Return the passes over the tiles."""
        return ("both",) if self.keeps_tiles else ("statistics", "gradients")

    def buffers(self, head: Head, which: Pass) -> Buffers:
        """Return shape and dtype of every working buffer of one pass."""
        rows, columns, width = self.rows, head.widest(self.blocks), head.hidden_size
        compute, wide = head.compute_dtype, head.wide_dtype
        strip = max(columns, width, min(CUDA_STRIP if head.device == "cuda" else STRIP, rows * columns))
        buffers: Buffers = {
            "tile": ((rows, head.vocab_size if self.keeps_tiles else columns), head.product_dtype),
            "strip": ((strip,), wide),
            "rows": ((rows, width), compute),
        }
        if head.hidden_dtype != compute:
            buffers["gather"] = ((rows, width), head.hidden_dtype)
        if head.weight_dtype != compute or head.adapter:
            buffers["cast"] = ((columns, width), compute)
        if "entropy" in head.wanted or (head.capped and which != "statistics"):
            buffers["spare"] = ((strip,), wide)
        if which != "gradients":
            buffers |= {f"block_{name}": ((rows, head.blocks), wide) for name in ("max", "sum", *head.wanted - {"lse"})}
            if "argmax" in head.wanted:
                buffers["block_argmax"] = ((rows, head.blocks), "int64")
        if which != "statistics":
            buffers |= self._gradient_buffers(head, columns, strip)
        return buffers

    def _gradient_buffers(self, head: Head, columns: int, strip: int) -> Buffers:
        width, compute, wide = head.hidden_size, head.compute_dtype, head.wide_dtype
        buffers: Buffers = {}
        if compute != wide:
            buffers["part"] = ((strip,), head.product_dtype)
        if compute != head.product_dtype:
            buffers["narrow"] = ((self.rows, columns), compute)
        if "bias" in head.grads:
            buffers["column_sums"] = ((columns,), wide)
        if "hidden" in head.grads and not self.sums_hidden(head):
            buffers["row_grads"] = ((self.rows, width), wide)
        if head.filtered:
            buffers["column_tops"] = ((2, round_up(columns, FILTER_BLOCK)), head.product_dtype)
        if head.ordered and "hidden" in head.grads:
            buffers |= {"kept": ((self.rows, columns), compute), "kept_weight": ((columns, width), compute)}
        if self.turns_weight(head):
            buffers["turned_rows"] = ((width, self.rows), compute)
            buffers["column_grads"] = ((width, columns), compute if self.rows >= head.tokens else wide)
        elif "weight" in head.grads and not self.keeps_tiles and head.trained_dtype != wide:
            buffers["column_grads"] = ((columns, head.trained_width), wide)
        return buffers

    def sums_hidden(self, head: Head) -> bool:
        """Return whether the gradient of hidden grows in a wide buffer of valid tokens x width."""
        joint = self.strategy == "recompute" and self.sweeps == 1 and {"hidden", "weight"} <= head.grads
        return joint and head.hidden_dtype != head.wide_dtype

    def turns_weight(self, head: Head) -> bool:
        """Return whether blocks of the weight's gradient are made transposed.

        A CPU that multiplies narrow numbers by its own instructions takes two to three times as long where the tile,
        the larger factor, is the transposed one.
        """
        narrow = head.weight_dtype == head.compute_dtype != head.wide_dtype and head.device == "cpu"
        return narrow and "weight" in head.grads and not self.keeps_tiles and not head.adapter

    def group_rows(self, num_valid: int) -> int:
        """Return how many of `num_valid` tokens are worked on together: equal shares, each at most a tile."""
        groups = max(1, -(-num_valid // self.rows))
        return round_up(-(-num_valid // groups), ROW_STEP)

    def workspace_bytes(self, head: Head) -> int:
        """Return the bytes of the working buffers in the pass that has most."""
        passes = self.passes if head.grads else ("statistics",)
        return max(total_bytes(self.buffers(head, each)) for each in passes)


def choose_tiling(head: Head, *, tile_bytes: int, strategy: Literal["auto"] | Strategy = "auto") -> Tiling:
    """Return a strategy and the largest tile whose working buffers stay within `tile_bytes`.

    "auto" makes the gradients in forward while MIN_ROWS rows of logits fit and the wide buffer that a narrower
    weight needs is itself within `tile_bytes`, and recomputes otherwise; so it does for float16, in which a gradient
    that is scaled only afterwards would be lost, and where no gradient is wanted. Recomputing makes both gradients in
    one sweep while the wide buffer for a narrower hidden is within `tile_bytes`, and in two otherwise.
    A tile that is computed again takes no more than CACHED_BYTES of it on a CPU. A budget below the smallest tile gets
    the smallest tile; `Tiling.workspace_bytes` tells.
    """
    float16 = "float16" in (head.compute_dtype, head.hidden_dtype)
    if head.grads and (strategy == "gradients-in-forward" or (strategy == "auto" and not float16)):
        kept = Tiling(strategy="gradients-in-forward", rows=ROW_STEP, blocks=min(head.blocks, KEPT_BLOCKS))
        tiling = fit_rows(head.tokens, kept, tile_bytes, lambda each: each.workspace_bytes(head))
        narrow = "weight" in head.grads and head.trained_dtype != head.wide_dtype
        sum_bytes = head.vocab_size * head.trained_width * head.wide_bytes if narrow else 0
        enough_rows = tiling.rows >= min(MIN_ROWS, head.tokens)
        fits = enough_rows and max(sum_bytes, tiling.workspace_bytes(head)) <= tile_bytes
        if fits or strategy == "gradients-in-forward":
            return tiling
    one_sweep = Tiling(strategy="recompute", rows=ROW_STEP, blocks=1)
    sum_bytes = head.tokens * head.hidden_size * head.wide_bytes if one_sweep.sums_hidden(head) else 0
    most = min(tile_bytes, CACHED_BYTES) if head.device == "cpu" else tile_bytes

    def weigh(tiling: Tiling) -> int:
        tile = tiling.rows * head.widest(tiling.blocks) * ITEMSIZE[head.product_dtype]
        return tiling.workspace_bytes(head) + (tile_bytes if tile > most else 0)

    return fit_square(
        head,
        replace(one_sweep, sweeps=1 + (sum_bytes > tile_bytes)),
        tile_bytes,
        most // ITEMSIZE[head.product_dtype],
        weigh,
    )


def fit_square(head: Head, tiling: Tiling, tile_bytes: int, elements: int, weigh: Callable[[Tiling], int]) -> Tiling:
    """Return `tiling` as nearly square as half of `elements` are, with the most tokens that `weigh` lets it have."""
    side = isqrt(elements // 2)
    square = replace(tiling, blocks=min(head.blocks, max(1, side // BLOCK)))
    tiling = fit_rows(head.tokens, square, tile_bytes, weigh)
    return tiling if tiling.rows < head.tokens else _fit_blocks(head, tiling, tile_bytes, weigh)


def fit_rows(tokens: int, tiling: Tiling, tile_bytes: int, weigh: Callable[[Tiling], int]) -> Tiling:
    """Return `tiling` with the most rows, no more than there are tokens, that keep it within `tile_bytes`."""
    sizes = range(ROW_STEP, round_up(tokens, ROW_STEP) + 1, ROW_STEP)
    fitting = bisect_right(sizes, tile_bytes, key=lambda rows: weigh(replace(tiling, rows=rows)))
    return replace(tiling, rows=ROW_STEP * max(1, fitting))


def _fit_blocks(head: Head, tiling: Tiling, tile_bytes: int, weigh: Callable[[Tiling], int]) -> Tiling:
    """Return `tiling` with the most blocks, at least its own, that keep it within `tile_bytes`."""
    sizes = range(tiling.blocks, head.blocks + 1)
    fitting = bisect_right(sizes, tile_bytes, key=lambda blocks: weigh(replace(tiling, blocks=blocks)))
    return replace(tiling, blocks=sizes[max(0, fitting - 1)])


def cross_entropy_phases(
    head: Head,
    tiling: Tiling,
    *,
    num_valid: int | None = None,
    label_smoothing: bool = False,
    z_loss: bool = False,
    class_weight: bool = False,
) -> Phases:
    """Return what the summed cross-entropy weighs, to the byte on a CPU.

    Args:
        head: The head, with "mean" among the wanted statistics where `label_smoothing`.
        tiling: The tiling chosen for it.
        num_valid: Tokens that are not ignored; None is all of them.
        label_smoothing: Whether some of the loss is spread over the vocabulary.
        z_loss: Whether lse^2 is part of the loss.
        class_weight: Whether classes have weights, in float32.
    """
    valid = head.tokens if num_valid is None else num_valid
    price = _in_forward if tiling.keeps_tiles else _recomputed
    return price(head, tiling, valid, label_smoothing, z_loss, class_weight)


def _in_forward(head: Head, tiling: Tiling, valid: int, smooth: bool, z_loss: bool, weighted: bool) -> Phases:
    wide, elements = head.wide_bytes, head.vocab_size * head.trained_width
    grads = {
        "hidden": head.tokens * head.hidden_size * ITEMSIZE[head.hidden_dtype],
        "weight": elements * wide,
        "bias": head.vocab_size * wide,
    }
    rounded = {
        "weight": elements * _narrow(head, head.trained_dtype),
        "bias": head.vocab_size * _narrow(head, head.bias_dtype),
    }
    kept = sum(grads[name] for name in head.grads) + wide
    # Alive for each row of a group: lse, nll, target slope and its masked copy, target and column of 8 bytes each.
    row = 4 * wide + 16 + (2 * smooth + z_loss + weighted) * wide
    work = total_bytes(tiling.buffers(head, "both")) + _lookup_bytes(head, valid)
    return Phases(
        forward=kept
        + max(
            work + (valid - 1) * wide + row * min(valid, tiling.group_rows(valid)),
            12 * head.tokens * weighted,
        ),
        kept=kept,
        backward=kept + 2 * wide + sum(rounded.get(name, 0) for name in head.grads),
    )


def _recomputed(head: Head, tiling: Tiling, valid: int, smooth: bool, z_loss: bool, weighted: bool) -> Phases:
    wide, width, rows = head.wide_bytes, head.hidden_size, min(valid, tiling.group_rows(valid))
    ignoring, per_token = valid < head.tokens, head.tokens * wide
    statistics = per_token * len({"nll", *head.wanted} | ({"lse"} if head.grads else set()))
    scan = rows * (wide + 16 + ITEMSIZE[head.product_dtype])
    combine = rows * (3 * wide + smooth * wide)
    scanning = total_bytes(tiling.buffers(head, "statistics")) + _lookup_bytes(head, valid) + max(scan, combine)
    losses = max(per_token * (2 * smooth or z_loss), (20 * head.tokens + wide) * weighted)
    hidden_sum = valid * width * wide if tiling.sums_hidden(head) else 0
    upstream = per_token * (3 * smooth or z_loss + weighted)
    derive = rows * ((ignoring + 3 + smooth) * wide + 16)
    bias = head.vocab_size * _narrow(head, head.bias_dtype) if "bias" in head.grads else 0
    return Phases(
        forward=statistics + max(scanning, losses),
        kept=per_token * (1 + weighted) + wide,
        backward=per_token
        + 2 * wide
        + upstream
        + total_bytes(tiling.buffers(head, "gradients"))
        + _lookup_bytes(head, valid)
        + grad_bytes(head)
        + max(hidden_sum + derive, bias),
    )


def grad_bytes(head: Head) -> int:
    """Return the bytes of the gradients that recomputing makes, that of the bias before it is rounded."""
    sizes = {
        "hidden": head.tokens * head.hidden_size * ITEMSIZE[head.hidden_dtype],
        "weight": head.vocab_size * head.trained_width * ITEMSIZE[head.trained_dtype],
        "bias": head.vocab_size * head.wide_bytes,
    }
    return sum(sizes[name] for name in head.grads)


def _narrow(head: Head, dtype: str | None) -> int:
    """Return the bytes of one number of a copy in `dtype`, none where that is the wide one."""
    return 0 if dtype in (None, head.wide_dtype) else ITEMSIZE[dtype]


def _lookup_bytes(head: Head, valid: int) -> int:
    """Return the bytes of the positions of valid tokens, and of the bias in the compute dtype."""
    return (8 * valid if valid < head.tokens else 0) + cast_bias_bytes(head)


def cast_bias_bytes(head: Head) -> int:
    """Return the bytes of the bias in the compute dtype, none where it is in that."""
    return 0 if head.bias_dtype in (None, head.compute_dtype) else head.vocab_size * ITEMSIZE[head.compute_dtype]
