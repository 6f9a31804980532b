"""How APOLLO sees a weight: which dimension is projected, and the bytes of its state as arithmetic."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

Side = Literal["auto", "left", "right"]

CPU_BLOCK = 2**18
"""Elements at work at a time on a CPU: what stays in a core's cache."""

NARROW_PRODUCT_RANK = 8
"""From this rank on, arithmetic takes the time, and bf16 gradients are projected in bf16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixShape:
    """A weight as `experts` matrices of `rows` x `cols`, projected from the left (rows) or from the right (columns).

    Attributes:
        experts: Matrices that lie in one parameter; 1 for a plain weight.
        rows: Rows of each.
        cols: Columns of each.
        left: Rows are projected and columns are the channels; otherwise the other way round.
    """

    experts: int
    rows: int
    cols: int
    left: bool

    @classmethod
    def of(cls, shape: Sequence[int], side: Side = "auto") -> "MatrixShape":
        """Return the shape of a weight [rows, cols] or [experts, rows, cols]; "auto" projects the smaller dimension."""
        if len(shape) not in (2, 3):
            raise ValueError(
                f"a projected parameter must have 2 or 3 dimensions, got {list(shape)}; "
                "put it in a group with `proj_rank` = None (AdamW)."
            )
        rows, cols = shape[-2:]
        left = rows < cols if side == "auto" else side == "left"
        return cls(experts=prod(shape[:-2]), rows=rows, cols=cols, left=left)

    @property
    def dim(self) -> int:
        """The projected dimension."""
        return self.rows if self.left else self.cols

    @property
    def channels(self) -> int:
        """The dimension that stays: each channel has a factor of its own where `granularity` is "channel"."""
        return self.cols if self.left else self.rows

    @property
    def channel_axis(self) -> int:
        """The dimension of [experts, rows, cols] that norms of a channel run over."""
        return -2 if self.left else -1

    def moment_shape(self, proj_rank: int) -> tuple[int, int, int]:
        """Return the shape of the projected gradient and of both moments."""
        if self.left:
            return self.experts, proj_rank, self.cols
        return self.experts, self.rows, proj_rank

    def factor_shape(self, *, by_channel: bool) -> tuple[int, int]:
        """Return the shape of one matrix's factors, which broadcast against [rows, cols]."""
        if not by_channel:
            return 1, 1
        return (1, self.cols) if self.left else (self.rows, 1)

    def block_rows(self, elements: int, *, together: int = 1) -> int:
        """Return how many rows of `together` matrices are at work at a time: at most `elements`, one row at least."""
        return min(self.rows, max(1, elements // (together * self.cols)))

    def state_bytes(self, proj_rank: int, *, refresh: str = "keep", master: bool = False) -> int:
        """Return the bytes of one parameter's state: 8 n r of moments, 8 (12) a matrix, 4 for the step, the master."""
        counters = 3 if refresh == "reset" else 2
        moments = 2 * prod(self.moment_shape(proj_rank))
        weights = self.experts * self.rows * self.cols if master else 0
        return 4 * (moments + counters * self.experts + 1 + weights)


def workspace_bytes(
    matrices: Iterable[MatrixShape], proj_rank: int, *, by_channel: bool, narrow_grad: bool, narrow_weight: bool = False
) -> int:
    """Return the bytes of the buffers of one step on a CPU, whatever the number of parameters.

    That is a projection for each distinct dimension, twice the largest projected gradient of one matrix, and a block
    for the squares or the fp32 gradient, another for the fp32 weight where it is narrow and has no master. What lives
    for a moment beside them: the words of the projection that is being made, or six numbers a channel.

    Args:
        matrices: The projected parameters.
        proj_rank: Of all of them.
        by_channel: Factors are by channel.
        narrow_grad: Gradients are bf16.
        narrow_weight: Weights have, too, and no master.
    """
    every = list(matrices)
    narrow_product = narrow_grad and proj_rank >= NARROW_PRODUCT_RANK
    projections = sum(proj_rank * dim for dim in {each.dim for each in every})
    projected = max(proj_rank * each.channels for each in every)
    block = max(each.block_rows(CPU_BLOCK) * each.cols for each in every)
    blocks = (by_channel or narrow_grad) + narrow_weight
    return (2 if narrow_product else 4) * projections + (10 if narrow_product else 8) * projected + 4 * blocks * block
