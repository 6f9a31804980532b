"""The recomputed head in Triton, for CUDA devices: logits become statistics or derivatives before they are written.

[Note: in one kernel] A tile of logits in float32 is the largest thing that the head moves on a GPU. Here the product
stays in registers: the forward kernel writes a maximum and a sum for each row and canonical block, the backward kernel
the derivative in the dtype in which the two products after it multiply. No atomics and no locks: each program owns what
it writes, so a result does not change from run to run.
"""

# ruff: noqa: ANN001, ANN202, PLR0913  (what a kernel is given has no Python type)

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS, DEPTH = 64, 128, 64
"""Of one program's tile, and the width that it multiplies at a time."""


@triton.jit
def _logits(
    h_ptr, w_ptr, b_ptr, rows, columns, num_rows, stop, width, h_stride, w_stride, scale, softcap,
    BIASED: tl.constexpr, CAPPED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Return softcap(scale * (h @ w^T + b)) of some rows and columns."""
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    row_start = rows.to(tl.int64)[:, None] * h_stride
    column_start = columns.to(tl.int64)[None, :] * w_stride
    for start in range(0, width, DEPTH):
        k = start + tl.arange(0, DEPTH)
        h = tl.load(h_ptr + row_start + k[None, :], mask=(rows[:, None] < num_rows) & (k[None, :] < width), other=0.0)
        w = tl.load(w_ptr + column_start + k[:, None], mask=(columns[None, :] < stop) & (k[:, None] < width), other=0.0)
        total = tl.dot(h, w, total, input_precision="ieee")
    if BIASED:
        total += tl.load(b_ptr + columns, mask=columns < stop, other=0.0).to(tl.float32)[None, :]
    total *= scale
    if CAPPED:  # tanh(x) = 1 - 2 / (exp(2 x) + 1), whose ends are right where exp overflows or is 0
        total = softcap * (1.0 - 2.0 / (tl.exp(2.0 * total / softcap) + 1.0))
    return total


@triton.jit
def _fold(
    h_ptr, w_ptr, b_ptr, target_ptr, top_ptr, sum_ptr, hit_ptr,
    num_rows, num_columns, num_blocks, width, h_stride, w_stride, out_stride, scale, softcap, floor,
    BLOCK: tl.constexpr, BIASED: tl.constexpr, CAPPED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Write maximum, sum of exponentials and target's logit of one canonical block of some rows."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    block = tl.program_id(1)
    begin = block * BLOCK
    stop = tl.where(block + 1 == num_blocks, num_columns, begin + BLOCK)
    target = tl.load(target_ptr + rows, mask=rows < num_rows, other=-1)
    top = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    hit = tl.zeros((ROWS,), dtype=tl.float32)
    for start in range(begin, stop, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        y = _logits(
            h_ptr, w_ptr, b_ptr, rows, columns, num_rows, stop, width, h_stride, w_stride, scale, softcap,
            BIASED, CAPPED, ROWS, COLUMNS, DEPTH,
        )  # fmt: skip
        hit += tl.sum(tl.where(columns[None, :] == target[:, None], y, 0.0), axis=1)
        y = tl.where(columns[None, :] < stop, y, float("-inf"))
        higher = tl.maximum(top, tl.max(y, axis=1))
        finite = tl.maximum(higher, floor)
        total = total * tl.exp(top - finite) + tl.sum(tl.exp(y - finite[:, None]), axis=1)
        top = higher
    out = rows.to(tl.int64) * out_stride + block
    tl.store(top_ptr + out, tl.maximum(top, floor), mask=rows < num_rows)
    tl.store(sum_ptr + out, total, mask=rows < num_rows)
    tl.store(hit_ptr + rows.to(tl.int64) * num_blocks + block, hit, mask=rows < num_rows)


@triton.jit
def _derive(
    h_ptr, w_ptr, b_ptr, target_ptr, lse_ptr, softmax_ptr, hit_ptr, uniform_ptr, out_ptr,
    num_rows, num_columns, width, h_stride, w_stride, scale, softcap,
    BIASED: tl.constexpr, CAPPED: tl.constexpr, WEIGHED: tl.constexpr, HIT: tl.constexpr, UNIFORM: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Write the derivative by the logits before the soft cap."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = rows < num_rows
    y = _logits(
        h_ptr, w_ptr, b_ptr, rows, columns, num_rows, num_columns, width, h_stride, w_stride, scale, softcap,
        BIASED, CAPPED, ROWS, COLUMNS, DEPTH,
    )  # fmt: skip
    grad = tl.exp(y - tl.load(lse_ptr + rows, mask=there, other=0.0)[:, None])
    if WEIGHED:
        grad *= tl.load(softmax_ptr + rows, mask=there, other=0.0)[:, None]
    if HIT:
        target = tl.load(target_ptr + rows, mask=there, other=-1)
        hit = tl.load(hit_ptr + rows, mask=there, other=0.0)
        grad -= tl.where(columns[None, :] == target[:, None], hit[:, None], 0.0)
    if UNIFORM:
        grad -= tl.load(uniform_ptr + rows, mask=there, other=0.0)[:, None]
    if CAPPED:
        part = y / softcap
        grad *= 1.0 - part * part
    out = rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
    tl.store(out_ptr + out, grad.to(out_ptr.dtype.element_ty), mask=there[:, None] & (columns[None, :] < num_columns))


def fold(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    top: Tensor,
    total: Tensor,
    *,
    logit_scale: float,
    softcap: float | None,
    block: int,
    floor: float,
) -> Tensor:
    """Write the maximum and the sum of exponentials of each canonical block, and return the targets' logits.

    Args:
        rows: Hidden states [N, D], as `weight` in float32 or narrower.
        weight: Of these classes, [V, D].
        bias: Of them, [V].
        target: Each row's column, [N]; below 0 it lies outside.
        top: Place of the maxima, [N, blocks], at least `floor`; a row of a matrix that may be wider.
        total: Place of the sums, like `top`.
        logit_scale: Multiplies the logits.
        softcap: Bounds them.
        block: Columns of a canonical block; the last takes the remainder too.
        floor: Stands for -inf.

    Returns:
        y[n, target[n]] in float32, [N]; 0 outside.
    """
    (num_rows, width), num_columns = rows.shape, len(weight)
    num_blocks = max(1, num_columns // block)
    hits = torch.empty(num_rows, num_blocks, dtype=torch.float32, device=rows.device)
    if num_rows:
        _fold[(triton.cdiv(num_rows, ROWS), num_blocks)](
            rows, weight, weight if bias is None else bias, target, top, total, hits,
            num_rows, num_columns, num_blocks, width, rows.stride(0), weight.stride(0), top.stride(0),
            logit_scale, 1.0 if softcap is None else softcap, floor,
            BLOCK=block, BIASED=bias is not None, CAPPED=softcap is not None,
            ROWS=ROWS, COLUMNS=COLUMNS, DEPTH=DEPTH,
        )  # fmt: skip
    return hits.sum(1)


def derive(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    lse: Tensor,
    out: Tensor,
    *,
    softmax: Tensor | None,
    hit: Tensor | None,
    uniform: Tensor | None,
    logit_scale: float,
    softcap: float | None,
) -> None:
    """Write (softmax p - hit [v == target] - uniform) (1 - (y / softcap)^2) to `out` [N, V], p = exp(y - lse).

    Args:
        rows: Hidden states [N, D].
        weight: Of these classes, [V, D].
        bias: Of them, [V].
        target: Each row's column, [N]; below 0 it lies outside.
        lse: Of each row, [N].
        out: The derivative by the logits as the scale left them, contiguous.
        softmax: Slope of each row's probabilities, [N]; None is 1.
        hit: Slope of its target, [N]; None is 0.
        uniform: Slope of every class, [N]; None is 0.
        logit_scale: Multiplies the logits.
        softcap: Bounds them.
    """
    (num_rows, width), num_columns = rows.shape, len(weight)
    if not num_rows:
        return
    slopes = [lse if each is None else each for each in (softmax, hit, uniform)]
    _derive[(triton.cdiv(num_rows, ROWS), triton.cdiv(num_columns, COLUMNS))](
        rows, weight, weight if bias is None else bias, target, lse, *slopes, out,
        num_rows, num_columns, width, rows.stride(0), weight.stride(0),
        logit_scale, 1.0 if softcap is None else softcap,
        BIASED=bias is not None, CAPPED=softcap is not None,
        WEIGHED=softmax is not None, HIT=hit is not None, UNIFORM=uniform is not None,
        ROWS=ROWS, COLUMNS=COLUMNS, DEPTH=DEPTH,
    )  # fmt: skip
