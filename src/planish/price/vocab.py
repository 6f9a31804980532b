"""What the head weighs: the sizes of its tiles under a budget, and the bytes alive in each phase.

`peaks.vocab` allocates exactly the buffers that `Tiling.buffers` lists, so these numbers are what a ledger measures.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from math import isqrt, prod
from typing import Literal

Strategy = Literal["gradients-in-forward", "recompute"]

BLOCK = 1024
"""Columns of one canonical block: sums over the vocabulary are formed per block and combined in vocabulary order,
so that they do not depend on the tile. The last block takes the remainder too (`vocab_size % BLOCK`)."""

ROW_STEP = 8
"""Rows of logits are computed in multiples of this, which makes their bits independent of how rows are grouped."""

MIN_ROWS = 256
"""With fewer rows than this, gradients in forward spend their time re-reading the weight's gradient."""

STRIP = 2**19
"""Elements of logits that are exponentiated at a time: they stay in the cache from the maximum to the sum."""

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8}

Buffers = dict[str, tuple[tuple[int, ...], str]]


def round_up(count: int, step: int) -> int:
    """Return the smallest multiple of `step` that is at least `count`."""
    return -(-count // step) * step


def total_bytes(buffers: Buffers) -> int:
    """Return the bytes of all `buffers` together."""
    return sum(prod(shape) * ITEMSIZE[dtype] for shape, dtype in buffers.values())


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
        wanted: Statistics besides nll and lse: any of "entropy", "argmax", "mean".
        grads: Which of "hidden", "weight" and "bias" need a gradient.
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

    @property
    def wide_dtype(self) -> str:
        """Return the dtype in which sums over tokens and over the vocabulary are kept."""
        return "float64" if self.compute_dtype == "float64" else "float32"

    @property
    def blocks(self) -> int:
        """Return the number of canonical blocks of the vocabulary."""
        return max(1, self.vocab_size // BLOCK)

    def widest(self, blocks: int) -> int:
        """Return the most columns that `blocks` canonical blocks in a row can have."""
        return min(self.vocab_size, blocks * BLOCK + self.vocab_size % BLOCK)


def block_ranges(columns: int, step: int) -> Iterator[tuple[int, int, int]]:
    """Yield (first block, first column, last column) of every `step` canonical blocks of `columns` columns."""
    blocks = max(1, columns // BLOCK)
    for block in range(0, blocks, step):
        yield block, block * BLOCK, columns if block + step >= blocks else (block + step) * BLOCK


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """A strategy and the tile it works in: `rows` tokens by `blocks` canonical blocks of the vocabulary."""

    strategy: Strategy
    rows: int
    blocks: int

    def buffers(self, head: Head) -> Buffers:
        """Return shape and dtype of every working buffer, by name."""
        rows, columns, width = self.rows, head.widest(self.blocks), head.hidden_size
        compute, wide = head.compute_dtype, head.wide_dtype
        strip = max(columns, width, min(STRIP, rows * columns))
        one_product = self.strategy == "gradients-in-forward" and head.weight_dtype == compute
        buffers: Buffers = {
            "tile": ((rows, columns), compute),
            "strip": ((strip,), wide),
            "rows": ((rows, width), compute),
            "block_max": ((rows, head.blocks), wide),
            "block_sum": ((rows, head.blocks), wide),
        }
        if "hidden" in head.grads:
            buffers["row_grads"] = ((rows, width), compute if one_product else wide)
        if head.hidden_dtype != compute:
            buffers["gather"] = ((rows, width), head.hidden_dtype)
        if head.weight_dtype != compute:
            buffers["cast"] = ((head.widest(self.cast_blocks(head)), width), compute)
        if compute != wide and head.grads:
            buffers["part"] = ((strip // width, width), compute)
        if "bias" in head.grads:
            buffers["ones"] = ((rows,), wide)
        if "entropy" in head.wanted or (head.capped and head.grads):
            buffers["spare"] = ((strip,), wide)
        kept = {"mean": ("block_logits", wide), "entropy": ("block_energy", wide), "argmax": ("block_argmax", "int64")}
        for statistic in sorted(head.wanted):
            name, dtype = kept[statistic]
            buffers[name] = ((rows, head.blocks), dtype)
        return buffers

    def cast_blocks(self, head: Head) -> int:
        """Return how many canonical blocks of the weight are cast to the compute dtype at a time."""
        return min(self.blocks, max(1, STRIP // (BLOCK * head.hidden_size)))

    def workspace_bytes(self, head: Head) -> int:
        """Return the bytes of all working buffers together."""
        return total_bytes(self.buffers(head))


def choose_tiling(head: Head, *, tile_bytes: int, strategy: Literal["auto"] | Strategy = "auto") -> Tiling:
    """Return the strategy and the largest tile whose working buffers stay within `tile_bytes`.

    "auto" makes the gradients in forward while MIN_ROWS rows of logits fit, and the float32 buffer that a narrower
    weight needs is itself within `tile_bytes`; float16 recomputes, since a gradient that is scaled only afterwards
    would be lost in it. A budget below the smallest tile gets the smallest tile: see `Tiling.workspace_bytes`.
    """
    if strategy != "recompute":
        tiling = _fit_rows(head, "gradients-in-forward", head.blocks, tile_bytes)
        if strategy == "gradients-in-forward" or _suits(tiling, head, tile_bytes):
            return tiling
    side = isqrt(tile_bytes // (2 * ITEMSIZE[head.compute_dtype]))
    tiling = _fit_rows(head, "recompute", min(head.blocks, max(1, side // BLOCK)), tile_bytes)
    if tiling.rows < head.tokens:
        return tiling
    wider = (Tiling(strategy="recompute", rows=tiling.rows, blocks=blocks) for blocks in range(head.blocks, 0, -1))
    return next((each for each in wider if each.workspace_bytes(head) <= tile_bytes), tiling)


def _suits(tiling: Tiling, head: Head, tile_bytes: int) -> bool:
    """Return whether gradients in forward are worth their bytes."""
    narrow = "weight" in head.grads and head.weight_dtype != head.wide_dtype
    buffer_bytes = head.vocab_size * head.hidden_size * ITEMSIZE[head.wide_dtype] if narrow else 0
    return (
        head.compute_dtype != "float16"
        and tiling.rows >= min(MIN_ROWS, head.tokens)
        and max(buffer_bytes, tiling.workspace_bytes(head)) <= tile_bytes
    )


def _fit_rows(head: Head, strategy: Strategy, blocks: int, tile_bytes: int) -> Tiling:
    """Return the tiling with the most rows, no more than there are tokens, whose buffers stay within `tile_bytes`."""
    sizes = range(ROW_STEP, round_up(head.tokens, ROW_STEP) + 1, ROW_STEP)

    def workspace(rows: int) -> int:
        return Tiling(strategy=strategy, rows=rows, blocks=blocks).workspace_bytes(head)

    fitting = bisect_right(sizes, tile_bytes, key=workspace)
    return Tiling(strategy=strategy, rows=ROW_STEP * max(1, fitting), blocks=blocks)
