"""APOLLO's update of one parameter: project the gradient, keep its moments, scale the raw gradient by channel.

Shape letters: `E` experts (1 for a plain matrix), `A` rows, `B` columns, `C` channels, `R` proj_rank. A factor has the
channels' dimension and 1 elsewhere: [E, 1, C] where rows are projected, [E, C, 1] where columns are, [E, 1, 1] for one
factor a matrix.

[Note: what is read on the host]
The step count lies on the CPU and the matrices of a parameter on a CPU are taken one by one, so that an unusable
gradient is found by an `if` and skipped. On an accelerator that `if` would stall the stream once a parameter: there
matrices go together and unusable ones are masked out of every update instead.
"""

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from planish.peaks.optim.apollo_options import ApolloOptions
from planish.peaks.optim.apollo_random import ProjectionKey
from planish.peaks.optim.apollo_shape import MatrixShape
from planish.peaks.optim.apollo_workspace import Workspace, block_elements, row_blocks


def new_state(param: Tensor, options: ApolloOptions, *, master: bool) -> dict[str, Tensor]:
    """Return the state of a projected parameter, `MatrixShape.state_bytes` bytes of plain tensors."""
    matrix = options.shape_of(param.shape)
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
    if master and dtype != param.dtype:
        state["master"] = param.detach().to(dtype, copy=True)
    return state


def update(param: Tensor, grad: Tensor, state: dict[str, Tensor], options: ApolloOptions, work: Workspace) -> None:
    """Update one parameter and its state in place."""
    matrix = options.shape_of(param.shape)
    state["step"] += 1
    calls = 1 if isinstance(state["step"], FakeTensor) else int(state["step"])
    epoch, since_refresh = divmod(calls - 1, options.update_gap)
    if options.refresh == "reset" and since_refresh == 0:
        state["exp_avg"].zero_()
        state["num_since_refresh"].zero_()
    key = ProjectionKey(
        kind=options.projection, proj_rank=options.proj_rank, dim=matrix.dim, seed=options.seed, epoch=epoch
    )
    projection = work.projection(key, grad.device, state["exp_avg"].dtype)
    tensors = {name: each for name, each in state.items() if name != "step"} | {"weight": param, "grad": grad}
    whole = {name: each if each.ndim == 3 else each.unsqueeze(0) for name, each in tensors.items()}
    together = 1 if reads_host(param) else max(1, block_elements(param.device) // (matrix.rows * matrix.cols))
    for first in range(0, matrix.experts, together):
        part = {name: each[first : first + together] for name, each in whole.items()}
        _update_matrices(part, projection, matrix, options, work)


def reads_host(tensor: Tensor) -> bool:
    """Return whether a flag may be read where `tensor` is [Note: what is read on the host]."""
    return tensor.device.type == "cpu"


def _update_matrices(
    part: dict[str, Tensor], projection: Tensor, matrix: MatrixShape, options: ApolloOptions, work: Workspace
) -> None:
    grad = part["grad"]
    projected, square_sum = _project(grad, projection, matrix, options, work)
    usable = None
    if options.limiter == "safe":
        total = square_sum.sum((-2, -1), keepdim=True)
        usable = (total > 0) & total.isfinite()
        if reads_host(grad):
            if not isinstance(usable, FakeTensor) and not usable:
                return
            usable = None
        else:
            projected.masked_fill_(~usable, 0)
    keep = 1.0 if usable is None else usable.to(projected.dtype)
    factor = _factor(projected, square_sum, keep, part, matrix, options, work)
    _apply(part, factor, usable, options, work)


def _project(
    grad: Tensor, projection: Tensor, matrix: MatrixShape, options: ApolloOptions, work: Workspace
) -> tuple[Tensor, Tensor]:
    """Return P G (or G P^T), [E, R, C] (or [E, C, R]), and the sum of squares of each channel or matrix of G."""
    experts, device, dtype = len(grad), grad.device, projection.dtype
    by_channel = options.granularity == "channel"
    projected = work.buffer("projected", (experts, *matrix.moment_shape(options.proj_rank)[1:]), device, dtype)
    square_sum = torch.zeros(experts, *matrix.factor_shape(by_channel=by_channel), device=device, dtype=dtype)
    alpha = 1.0 if options.projection == "identity" else options.proj_rank**-0.5
    if grad.dtype == dtype:
        _multiply(projected, grad, slice(None), projection, alpha, matrix)
        if not by_channel:
            return projected, square_sum.add_(torch.linalg.vector_norm(grad, dim=(-2, -1), keepdim=True).square_())
    for rows in row_blocks(grad):
        block = grad[:, rows]
        buffer = work.buffer("block", block.shape, device, dtype)
        if grad.dtype == dtype:
            squares = torch.mul(block, block, out=buffer)
        else:
            _multiply(projected, buffer.copy_(block), rows, projection, alpha, matrix)
            squares = buffer.square_()
        if matrix.left or not by_channel:
            square_sum += squares.sum(matrix.channel_axis if by_channel else (-2, -1), keepdim=True)
        else:
            torch.sum(squares, -1, keepdim=True, out=square_sum[:, rows])
    return projected, square_sum


def _multiply(
    projected: Tensor, block: Tensor, rows: slice, projection: Tensor, alpha: float, matrix: MatrixShape
) -> None:
    """Write alpha P G of some rows of G; where rows are projected, the first block overwrites and others add."""
    if matrix.left:
        left, right, beta = projection[:, rows].expand(len(block), -1, -1), block, 1 if rows.start else 0
    else:
        projected, beta = projected[:, rows], 0
        left, right = block, projection.t().expand(len(block), -1, -1)
    torch.baddbmm(projected, left, right, beta=beta, alpha=alpha, out=projected)


def _factor(
    projected: Tensor,
    square_sum: Tensor,
    keep: Tensor | float,
    state: dict[str, Tensor],
    matrix: MatrixShape,
    options: ApolloOptions,
    work: Workspace,
) -> Tensor:
    """Take the projected gradient into the moments and return -lr alpha s, which multiplies the raw gradient."""
    beta1, beta2 = options.betas
    num_updates = state["num_updates"].add_(keep)
    since_refresh = state["num_since_refresh"].add_(keep) if "num_since_refresh" in state else num_updates
    root2 = (1 - beta2 ** num_updates.double().clamp_(min=1)).sqrt_()
    correction = (root2 / (1 - beta1 ** since_refresh.double().clamp_(min=1))).to(projected.dtype)
    eps = options.eps if options.limiter == "paper" else (options.eps * root2).to(projected.dtype)
    axes = matrix.channel_axis if options.granularity == "channel" else (-2, -1)

    buffer = work.buffer("direction", projected.shape, projected.device, projected.dtype)
    squares = torch.mul(projected, projected, out=buffer)
    before = squares.sum(axes, keepdim=True)
    state["exp_avg"].lerp_(projected, (1 - beta1) * keep)
    state["exp_avg_sq"].lerp_(squares, (1 - beta2) * keep)
    root = torch.sqrt(state["exp_avg_sq"], out=buffer).add_(eps)
    direction = torch.div(state["exp_avg"], root, out=buffer)
    after = direction.square_().sum(axes, keepdim=True)

    scale = after.div_(before).sqrt_().masked_fill_(before == 0, 0)
    if options.limiter != "paper":
        scale.mul_(correction)
    if options.limiter != "off":
        scale.mul_(_limit(scale, square_sum, keep, state, options))
    if options.limiter == "paper":
        scale.mul_(correction)
    return scale.mul_(-options.lr * options.scale_of(matrix))


def _limit(
    scale: Tensor, square_sum: Tensor, keep: Tensor | float, state: dict[str, Tensor], options: ApolloOptions
) -> Tensor:
    """Return what keeps the update's norm within `growth` of the norm before, [E, 1, 1], and remember the new one.

    "paper" remembers the last norm, so that one vanishing update holds all later ones down; "safe" lets the memory fall
    by `growth` a step at most, and has none before the first update that moves the weight.
    """
    memory = state["norm"]
    norm = (scale.square() * square_sum).sum((-2, -1), keepdim=True).sqrt_()
    cap = options.growth * memory
    free = (state["num_updates"] <= 1) if options.limiter == "paper" else (memory == 0)
    ratio = (cap / norm).masked_fill_(free | (norm <= cap), 1)
    limited = norm.mul_(ratio)
    if options.limiter == "safe":
        limited = torch.maximum(limited, memory / options.growth)
    memory.copy_(limited if isinstance(keep, float) else torch.where(keep > 0, limited, memory))
    return ratio


def _apply(
    part: dict[str, Tensor], factor: Tensor, usable: Tensor | None, options: ApolloOptions, work: Workspace
) -> None:
    """Decay the weight and add factor * gradient, in the master where there is one."""
    grad, weight = part["grad"], part.get("master", part["weight"])
    device, dtype = grad.device, factor.dtype
    decay = 1 - options.lr * options.weight_decay * (1.0 if usable is None else usable.to(dtype))
    copied, narrow = grad.dtype != dtype or usable is not None, weight.dtype != dtype
    for rows in row_blocks(grad) if copied or narrow or options.weight_decay else (slice(None),):
        block, wide = grad[:, rows], weight[:, rows]
        if copied:
            block = work.buffer("block", block.shape, device, dtype).copy_(block)
        if usable is not None:
            block.masked_fill_(~usable, 0)
        if narrow:
            wide = work.buffer("weight", wide.shape, device, dtype).copy_(wide)
        if options.weight_decay:
            wide.mul_(decay)
        wide.addcmul_(block, factor[:, rows] if factor.shape[-2] > 1 else factor)
        if part["weight"].dtype != dtype:
            part["weight"][:, rows].copy_(wide)
