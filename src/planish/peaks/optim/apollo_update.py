"""APOLLO's update of one parameter: project the gradient, keep its moments, scale the raw gradient by channel.

Shape letters: `E` experts (1 for a plain matrix), `A` rows, `B` columns, `C` channels, `R` proj_rank. A factor has the
channels' dimension and 1 elsewhere: [E, 1, C] where rows are projected, [E, C, 1] where columns are, [E, 1, 1] for one
factor a matrix.

[Note: host and device]
What is one number a matrix (counts, norms, a common factor, whether a gradient is usable) is read and becomes a float
where the parameter lies on the CPU: matrices are taken one by one, and an unusable one is skipped by an `if`. On an
accelerator each reading would stall the stream, so that there these numbers stay tensors [E, 1, 1], many matrices go
together, and unusable ones are masked out. On fake tensors every reading is 1.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.adamw import adamw

from planish.peaks.optim.apollo_options import ApolloOptions
from planish.peaks.optim.apollo_random import ProjectionKey
from planish.peaks.optim.apollo_shard import LocalMatrix, local_matrix, to_local
from planish.peaks.optim.apollo_workspace import Workspace, block_elements
from planish.peaks.optim.int8_weight import Int8Step, Int8Weight

_NARROW_PRODUCT_RANK = 8
"""From this rank on, arithmetic takes the time, and an accelerator projects bf16 gradients in bf16."""


def new_state(param: Tensor, options: ApolloOptions, *, master: bool) -> dict[str, Tensor]:
    """Return the state of what is here of a projected parameter: `MatrixShape.state_bytes` bytes of plain tensors."""
    local, matrix = local_matrix(param, options.shape_of(param.shape))
    dtype = torch.promote_types(param.dtype, torch.float32)

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=param.device)

    state = {
        "step": torch.zeros((), dtype=torch.float32, device="cpu"),
        "exp_avg": zeros(*matrix.moment_shape(options.proj_rank)),
        "exp_avg_sq": zeros(*matrix.moment_shape(options.proj_rank)),
        "num_updates": zeros(matrix.experts, 1, 1),
        "norm": zeros(matrix.experts, 1, 1),
    }
    if options.refresh == "reset":
        state["num_since_refresh"] = zeros(matrix.experts, 1, 1)
    if master and dtype != param.dtype and not isinstance(param, Int8Weight):
        state["master"] = local.detach().to(dtype, copy=True)
    return state


def update(param: Tensor, grad: Tensor, state: dict[str, Tensor], options: ApolloOptions, work: Workspace) -> None:
    """Update one parameter and its state in place; what is split over ranks, together with them."""
    shape = options.shape_of(param.shape)
    param, matrix = local_matrix(param, shape)
    grad = to_local(grad)
    if matrix.experts == 0:
        return None
    calls = int(_read(state["step"].add_(1)))
    epoch, since_refresh = divmod(calls - 1, options.update_gap)
    if options.refresh == "reset" and since_refresh == 0:
        state["exp_avg"].zero_()
        state["num_since_refresh"].zero_()
    key = ProjectionKey(
        kind=options.projection, proj_rank=options.proj_rank, dim=matrix.dim, seed=options.seed, epoch=epoch
    )
    # fp16 sums might overflow, and many CPUs multiply bf16 a hundred times slower than fp32
    narrow = grad.dtype == torch.bfloat16 and options.proj_rank >= _NARROW_PRODUCT_RANK and not on_host(grad)
    projection = work.projection(key, grad.device, grad.dtype if narrow else state["exp_avg"].dtype)
    projection = matrix.columns_of(projection)
    tensors = {name: each for name, each in state.items() if name != "step"} | {"grad": grad}
    if isinstance(param, Int8Weight):
        part = {name: each if each.ndim == 3 else each.unsqueeze(0) for name, each in tensors.items()}
        return _update_matrices(part, projection, matrix, options, work, Int8Step(weight=param, number=calls))
    tensors["weight"] = param
    whole = {name: each if each.ndim == 3 else each.unsqueeze(0) for name, each in tensors.items()}
    together = 1 if on_host(param) else max(1, block_elements(param.device) // max(1, matrix.rows * matrix.cols))
    if together >= matrix.experts:
        return _update_matrices(whole, projection, matrix, options, work)
    for first in range(0, matrix.experts, together):
        part = {name: each[first : first + together] for name, each in whole.items()}
        _update_matrices(part, projection, matrix, options, work)
    return None


def on_host(tensor: Tensor) -> bool:
    """Return whether a number may be read where `tensor` lies [Note: host and device]."""
    return tensor.device.type == "cpu"


def _read(tensor: Tensor) -> float:
    return 1.0 if isinstance(tensor, FakeTensor) else tensor.item()


def _update_matrices(
    part: dict[str, Tensor],
    projection: Tensor,
    matrix: LocalMatrix,
    options: ApolloOptions,
    work: Workspace,
    int8: Int8Step | None = None,
) -> None:
    grad, usable = part["grad"], None
    projected, square_sum = _project(grad, projection, matrix, options, work)
    if options.limiter == "safe":
        total = square_sum
        if options.granularity == "channel":
            total = square_sum.sum((-2, -1), keepdim=True)
            matrix.sum_channels(total)
        largest = torch.finfo(total.dtype).max / matrix.dim  # up to here, squares of the projected gradient are finite
        if not on_host(grad):
            usable = (total > 0) & (total < largest)
            projected.masked_fill_(~usable, 0)
            square_sum.masked_fill_(~usable, 0)
        elif not 0 < _read(total) < largest:
            return
    keep = 1.0 if usable is None else usable.to(projected.dtype)
    factor = _factor(projected, square_sum, keep, part, matrix, options, work)
    if int8 is None:
        _apply(part, factor, usable, matrix, options, work)
    else:
        _apply_int8(int8, grad[0], factor, usable, options, work)


def _project(
    grad: Tensor, projection: Tensor, matrix: LocalMatrix, options: ApolloOptions, work: Workspace
) -> tuple[Tensor, Tensor]:
    """Return P G (or G P^T), [E, R, C] (or [E, C, R]), and the sum of squares of each channel or matrix of G.

    A narrow gradient is multiplied as it is where arithmetic takes the time, and as fp32 blocks where reading it does.
    """
    experts, device, dtype = len(grad), grad.device, torch.promote_types(grad.dtype, torch.float32)
    by_channel, whole = options.granularity == "channel", projection.dtype == grad.dtype
    shape = (experts, *matrix.moment_shape(options.proj_rank)[1:])
    projected = work.buffer("projected", shape, device, dtype)
    if whole:
        product = projected if grad.dtype == dtype else work.buffer("product", shape, device, grad.dtype)
        _multiply(product, grad, slice(None), projection, matrix)
        if product is not projected:
            projected.copy_(product)
    if grad.dtype == dtype and not by_channel:
        square_sum = torch.linalg.vector_norm(grad, dim=(-2, -1), keepdim=True).square_()
        return _over_ranks(projected, square_sum, matrix, options)
    square_sum = torch.zeros(experts, *matrix.factor_shape(by_channel=by_channel), device=device, dtype=dtype)
    for rows in _row_blocks(grad, matrix):
        block = grad[:, rows]
        buffer = work.buffer("block", block.shape, device, dtype)
        if grad.dtype != dtype:
            block = buffer.copy_(block)
            if not whole:
                _multiply(projected, block, rows, projection, matrix)
        sums = square_sum if matrix.left or not by_channel else square_sum[:, rows]
        sums += _square_sum(block, buffer, matrix, options)
    return _over_ranks(projected, square_sum, matrix, options)


def _over_ranks(
    projected: Tensor, square_sum: Tensor, matrix: LocalMatrix, options: ApolloOptions
) -> tuple[Tensor, Tensor]:
    """Add up what ranks share, and make up for the number of signs."""
    if matrix.left and matrix.rows == 0:
        projected.zero_()
    matrix.sum_rows(projected)
    matrix.sum_rows(square_sum)
    if options.granularity == "tensor":
        matrix.sum_channels(square_sum)
    if options.projection != "identity" and options.proj_rank > 1:
        projected.mul_(options.proj_rank**-0.5)
    return projected, square_sum


def _multiply(projected: Tensor, block: Tensor, rows: slice, projection: Tensor, matrix: LocalMatrix) -> None:
    """Write P G of some rows of G; where rows are projected, the first block overwrites and others add."""
    if matrix.left:
        left, right, beta = projection[:, rows].expand(len(block), -1, -1), block, 1 if rows.start else 0
    else:
        projected, beta = projected[:, rows], 0
        left, right = block, projection.t().expand(len(block), -1, -1)
    torch.baddbmm(projected, left, right, beta=beta, out=projected)


def _factor(
    projected: Tensor,
    square_sum: Tensor,
    keep: Tensor | float,
    state: dict[str, Tensor],
    matrix: LocalMatrix,
    options: ApolloOptions,
    work: Workspace,
) -> Tensor | float:
    """Take the projected gradient into the moments and return -lr alpha s, which multiplies the raw gradient."""
    beta1, beta2 = options.betas
    num_updates = _count(state["num_updates"], keep)
    since_refresh = _count(state["num_since_refresh"], keep) if "num_since_refresh" in state else num_updates
    root2 = (1 - beta2**num_updates) ** 0.5
    correction = root2 / (1 - beta1**since_refresh)
    eps = options.eps if options.limiter == "paper" else options.eps * root2

    buffer = work.buffer("direction", projected.shape, projected.device, projected.dtype)
    before = _square_sum(projected, buffer, matrix, options)
    once = 1.0
    if on_host(projected):
        once = _fused_direction(projected, state, buffer, options, num_updates=num_updates, eps=eps / root2)
    else:
        squares = torch.mul(projected, projected, out=buffer)
        state["exp_avg"].lerp_(projected, (1 - beta1) * keep)
        state["exp_avg_sq"].lerp_(squares, (1 - beta2) * keep)
        torch.div(state["exp_avg"], torch.sqrt(state["exp_avg_sq"], out=buffer).add_(eps), out=buffer)
    after = _square_sum(buffer, buffer, matrix, options)
    if options.granularity == "tensor":
        matrix.sum_channels(before)
        matrix.sum_channels(after)

    scale = _root_of_ratio(after, before, as_number=on_host(after) and options.granularity == "tensor")
    first, last = (1.0, correction) if options.limiter == "paper" else (correction, 1.0)
    scale = scale * (first / once)
    if options.limiter != "off":
        limit = _limit_on_host if on_host(square_sum) else _limit_on_device
        scale = scale * limit(_norm(scale, square_sum, matrix, options), keep, num_updates, state["norm"], options)
    scale = scale * (last * -options.lr * options.scale_of(matrix))
    return scale.to(projected.dtype) if isinstance(scale, Tensor) else scale


def _fused_direction(
    projected: Tensor,
    state: dict[str, Tensor],
    buffer: Tensor,
    options: ApolloOptions,
    *,
    num_updates: float,
    eps: float,
) -> float:
    """Write -c exp_avg / (sqrt(exp_avg_sq) + eps), AdamW's step from zero, in one pass; return c, its correction."""
    beta1, beta2 = options.betas
    adamw(
        [buffer.zero_()],
        [projected],
        [state["exp_avg"]],
        [state["exp_avg_sq"]],
        [],
        [torch.tensor(num_updates - 1)],
        fused=True,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=1.0,
        weight_decay=0.0,
        eps=eps,
        maximize=False,
    )
    return (1 - beta2**num_updates) ** 0.5 / (1 - beta1**num_updates)


def _square_sum(tensor: Tensor, buffer: Tensor, matrix: LocalMatrix, options: ApolloOptions) -> Tensor:
    """Return the sum of squares of each channel or matrix; `buffer` may be overwritten."""
    if options.granularity == "tensor":
        return torch.linalg.vector_norm(tensor, dim=(-2, -1), keepdim=True).square_()
    if matrix.left:  # norms over rows are slow on a CPU
        return torch.mul(tensor, tensor, out=buffer).sum(-2, keepdim=True)
    return torch.linalg.vector_norm(tensor, dim=-1, keepdim=True).square_()


def _root_of_ratio(above: Tensor, below: Tensor, *, as_number: bool) -> Tensor | float:
    """Return sqrt(above / below), 0 where `below` is 0."""
    if as_number:
        divisor = _read(below)
        return math.sqrt(_read(above) / divisor) if divisor else 0.0
    return above.div_(below).sqrt_().masked_fill_(below == 0, 0)


def _norm(scale: Tensor | float, square_sum: Tensor, matrix: LocalMatrix, options: ApolloOptions) -> Tensor | float:
    """Return the norm of each gradient whose channels are scaled."""
    if isinstance(scale, float):
        return scale * math.sqrt(_read(square_sum))
    square = (scale.square() * square_sum).sum((-2, -1), keepdim=True)
    if options.granularity == "channel":
        matrix.sum_channels(square)
    norm = square.sqrt_()
    return _read(norm) if on_host(norm) else norm


def _count(counter: Tensor, keep: Tensor | float) -> Any:
    """Return how many updates there are with this one, 1 where there is none."""
    counter.add_(keep)
    return _read(counter) if on_host(counter) else counter.double().clamp_(min=1)


def _limit_on_host(norm: float, _: Any, num_updates: float, memory: Tensor, options: ApolloOptions) -> float:
    """Return what keeps the update's norm within `growth` of the one before, and remember the new one.

    "paper" remembers the last norm, so that one vanishing update holds all later ones down; "safe" lets the memory fall
    by `growth` a step at most, and has none before the first update that moves the weight.
    """
    before = _read(memory)
    cap = options.growth * before
    free = num_updates == 1 if options.limiter == "paper" else before == 0
    ratio = 1.0 if free or norm <= cap else cap / norm
    memory.fill_(norm * ratio if options.limiter == "paper" else max(norm * ratio, before / options.growth))
    return ratio


def _limit_on_device(norm: Tensor, keep: Any, num_updates: Tensor, memory: Tensor, options: ApolloOptions) -> Tensor:
    """Do the same as `_limit_on_host` for many matrices without reading any number; `keep` is 0 for unusable ones."""
    cap = options.growth * memory
    free = num_updates == 1 if options.limiter == "paper" else memory == 0
    ratio = (cap / norm).masked_fill_(free | (norm <= cap), 1)
    limited = norm * ratio
    if options.limiter == "safe":
        limited = torch.where(keep > 0, torch.maximum(limited, memory / options.growth), memory)
    memory.copy_(limited)
    return ratio


def _apply(
    part: dict[str, Tensor],
    factor: Tensor | float,
    usable: Tensor | None,
    matrix: LocalMatrix,
    options: ApolloOptions,
    work: Workspace,
) -> None:
    """Decay the weight and add factor * gradient, in the master where there is one."""
    grad, weight = part["grad"], part.get("master", part["weight"])
    device, dtype = grad.device, part["exp_avg"].dtype
    decay = 1 - options.lr * options.weight_decay * (1.0 if usable is None else usable.to(dtype))
    copied, narrow = grad.dtype != dtype or usable is not None, weight.dtype != dtype
    if narrow and usable is None and isinstance(factor, float) and not options.weight_decay:
        weight.add_(grad, alpha=factor)  # in fp32, but for the factor, and rounded once
        return
    for rows in _row_blocks(grad, matrix) if copied or narrow or options.weight_decay else (slice(None),):
        block, wide = grad[:, rows], weight[:, rows]
        if copied:
            block = work.buffer("block", block.shape, device, dtype).copy_(block)
        if usable is not None:
            block.masked_fill_(~usable, 0)
        if narrow:
            wide = work.buffer("weight", wide.shape, device, dtype).copy_(wide)
        if options.weight_decay:
            wide.mul_(decay)
        if isinstance(factor, float):
            wide.add_(block, alpha=factor)
        else:
            wide.addcmul_(block, factor[:, rows] if factor.shape[-2] > 1 else factor)
        if part["weight"].dtype != dtype:
            part["weight"][:, rows].copy_(wide)


def _apply_int8(
    int8: Int8Step,
    grad: Tensor,
    factor: Tensor | float,
    usable: Tensor | None,
    options: ApolloOptions,
    work: Workspace,
) -> None:
    """Do what `_apply` does to a weight of which one tile at a time is ever wide."""
    factor, keep = (each[0] if isinstance(each, Tensor) else each for each in (factor, usable))
    decay = 1 - options.lr * options.weight_decay * (1.0 if keep is None else keep.float())
    for rows in int8.weight.tiles():
        block = work.buffer("block", grad[rows].shape, grad.device, torch.float32).copy_(grad[rows])
        if keep is not None:
            block.masked_fill_(~keep, 0)
        by_row = isinstance(factor, Tensor) and factor.shape[0] > 1
        wide = int8.weight.read(rows).mul_(decay).add_(block.mul_(factor[rows] if by_row else factor))
        int8.weight.write(rows, wide, int8.noise(options.seed, rows.start))


def _row_blocks(matrices: Tensor, matrix: LocalMatrix) -> Iterator[slice]:
    step = matrix.block_rows(block_elements(matrices.device), together=len(matrices))
    for first in range(0, matrix.rows, step):
        yield slice(first, min(matrix.rows, first + step))
