"""How APOLLO sees a model: which weights and which dimension are projected, and every byte of it as arithmetic."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from planish.errors import UsageError

Side = Literal["auto", "left", "right"]

CPU_BLOCK = 2**18
"""Elements at work at a time on a CPU: what stays in a core's cache."""

_MAKING_SIGNS, _MAKING_NORMALS = 320, 9600
_SIGNS = 128
_IN_LAYER = re.compile(r"\.(\d+|\*)\.")


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
        return max(1, min(self.rows, elements // (together * self.cols)))

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
        narrow_weight: Weights are, too, have no master, and are scaled by channel or decay.
    """
    every = list(matrices)
    projections = sum(proj_rank * dim for dim in {each.dim for each in every})
    projected = max(proj_rank * each.channels for each in every)
    block = max(each.block_rows(CPU_BLOCK) * each.cols for each in every)
    blocks = (by_channel or narrow_grad) + narrow_weight
    return 4 * projections + 8 * projected + 4 * blocks * block


def making_bytes(dim: int, proj_rank: int, *, normal: bool) -> int:
    """Return the most that is alive beside a projection that is made: of each column, the words of 128 rows."""
    return (_MAKING_NORMALS if normal else _MAKING_SIGNS) * -(-proj_rank // _SIGNS) * dim


def projected_names(shapes: Mapping[str, Sequence[int]], proj_rank: int) -> Collection[str]:
    """Return which of a model's parameters a run projects: the matrices and the experts inside its layers.

    Routers, norms, and what is a vector for each expert are matrices by their shape alone; AdamW has them.

    Args:
        shapes: Every parameter that trains by its path, in which `*` may stand for the layer's number.
        proj_rank: Rows of the projection.

    Raises:
        UsageError: There is none, or one that is smaller than the projection.
    """
    inside = {name: tuple(shape) for name, shape in shapes.items() if _IN_LAYER.search(name)}
    num_experts = {shape[0] for shape in inside.values() if len(shape) == 3}

    def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
        plain = len(shape) == 2 and shape[0] not in num_experts and "norm" not in name
        return (plain or len(shape) == 3) and min(shape[-2:]) > 1

    found = {name: min(shape[-2:]) for name, shape in inside.items() if is_matrix(name, shape)}
    if not found:
        raise UsageError("`plan.optim` = apollo finds no matrix to train inside the model's layers; use adamw.")
    smallest = min(found, key=lambda name: found[name])
    if proj_rank > found[smallest]:
        raise UsageError(
            f"`plan.optim.proj_rank` ({proj_rank}) must not exceed the smaller dimension ({found[smallest]}) of "
            f"`{smallest}` {list(inside[smallest])}; {found[smallest]} would do."
        )
    return found
