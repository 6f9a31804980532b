"""A feed-forward network of the ReLU family as one node that keeps what is not zero of its activations (BitSparse).

[Note: tiles] Tokens pass in tiles of at most `tile_bytes` of one [tokens, F] array, through both projections, so that a
dense activation exists for one tile at a time in forward and backward alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from planish.kernels.bitmap import codec
from planish.peaks.activation import formula as ops
from planish.peaks.activation.formula import Formula
from planish.peaks.activation.keep import Keeper, restore
from planish.peaks.activation.sums import WeightSum
from planish.peaks.activation.tiled import tiles
from planish.price.activation import tile_tokens

TILE_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """x W^T + b."""

    weight: Tensor
    bias: Tensor | None = None

    @classmethod
    def of(cls, linear: nn.Linear) -> "Projection":
        """Return the weights of a module."""
        return cls(weight=linear.weight, bias=linear.bias)


def sparse_feed_forward(
    x: Tensor,
    formula: Formula,
    *,
    inner: Projection,
    down: Projection,
    up: Projection | None = None,
    norm: nn.Module | None = None,
    tile_bytes: int = TILE_BYTES,
    keeper: Keeper | None = None,
) -> Tensor:
    """Return the network's output; of its activations, what is not zero waits for backward, packed.

    y = h D^T, with h of `formula` (see `planish.peaks.activation.formula`), or y = norm(h) D^T.

    Memory:        two [tile, F] arrays at work, three with two projections; from forward to backward x and, for each
                   stream, (density * itemsize + 1/512) F bytes a token, and F / 8 for both.
    Exactness:     with one tile, output and gradients are bitwise those of autograd, for finite values and an x that
                   nothing else uses in between; NaN, infinities, -0.0 and denormals of r survive. With several tiles
                   gradients of weights add up in another order, in float32 at least.

    Args:
        x: [..., D].
        formula: Which activation.
        inner: What goes through the activation, [F, D]: the gate where there are two.
        down: [D, F].
        up: What the activation is multiplied by, [F, D], where `formula` is gated.
        norm: A module between h and `down` that takes each token by itself (BitNet).
        tile_bytes: Bytes of one [tile, F] array at most; a token is the least tile.
        keeper: Keeps the tiles, and tells how dense they were; None: one that allocates exactly what is needed.

    Raises:
        ValueError: Shapes or dtypes that do not go together.
    """
    _check(x, formula, inner, down, up, tile_bytes)
    keeper = Keeper(codec(x.device)) if keeper is None else keeper
    parts = [inner, up, down]
    weights = [None if each is None else each.weight for each in parts]
    biases = [None if each is None else each.bias for each in parts]
    norm_params = [] if norm is None else list(norm.parameters())
    tensors = (x, *weights, *biases, *norm_params)
    tile = _Tile(tokens=tile_tokens(tile_bytes, inner.weight.shape[0], x.element_size()), norm=norm)
    trained = torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in tensors)
    flat = x.reshape(-1, x.shape[-1])
    with torch.autocast(x.device.type, enabled=False):
        y = _SparseFeedForward.apply(formula, tile, keeper if trained else None, flat, *tensors[1:])
    return y.view(*x.shape[:-1], y.shape[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tile:
    """How tokens pass: how many at a time, and what stands before the last projection."""

    tokens: int
    norm: nn.Module | None


class _SparseFeedForward(torch.autograd.Function):
    """See `sparse_feed_forward`."""

    @staticmethod
    def forward(
        ctx: Any, formula: Formula, tile: _Tile, keeper: Keeper | None, x: Tensor, *tensors: Tensor | None
    ) -> Tensor:
        """Return y [T, D]; keep x and the packed tiles."""
        w_inner, w_up, w_down, b_inner, b_up, b_down, *_ = tensors
        width = min(tile.tokens, x.shape[0])
        room = [x.new_empty(width, w_inner.shape[0]) for _ in range(formula.num_streams + formula.both)]
        y = x.new_empty(x.shape[0], w_down.shape[0])
        kept = None if keeper is None else keeper.open()
        for at in tiles(x.shape[0], tile.tokens):
            r, up, h = _activations(formula, x[at], room, (w_inner, b_inner), (w_up, b_up))
            if formula.both:
                h = ops.hidden(formula, r, up, h)
                ops.mark(formula, r, up)
            if kept is not None:
                kept.add(r, up)
            if not formula.both:
                h = ops.hidden(formula, r, up, r)
            _linear(h if tile.norm is None else tile.norm(h), w_down, b_down, y[at])
        if keeper is not None:
            keeper.close(kept)
            ctx.formula, ctx.tile, ctx.codec, ctx.kept = formula, tile, keeper.codec, kept.kept
            ctx.num_tensors = len(tensors)
            ctx.save_for_backward(x, *tensors, *(kept.payload or ()))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, weights, biases and the norm's parameters."""
        x, *rest = ctx.saved_tensors
        tensors, payload = rest[: ctx.num_tensors], rest[ctx.num_tensors :]
        return None, None, None, *_Backward(ctx, x, tensors).run(grad.contiguous(), list(payload))


class _Backward:
    """One backward: tile by tile, sums over tiles at the end."""

    def __init__(self, ctx: Any, x: Tensor, tensors: Sequence[Tensor | None]) -> None:
        self.formula, self.tile, self.codec, self.kept = ctx.formula, ctx.tile, ctx.codec, ctx.kept
        self.x = x
        self.inner, self.up, self.down, self.b_inner, self.b_up, _, *self.norm_params = tensors
        one = x.shape[0] <= self.tile.tokens
        wanted = ctx.needs_input_grad[3:]
        self.x_grad = torch.empty_like(x) if wanted[0] else None
        self.sums = [WeightSum(each, one=one) if want else None for each, want in zip(tensors, wanted[1:], strict=True)]

    def run(self, grad: Tensor, payload: list[Tensor]) -> list[Tensor | None]:
        """Return all gradients."""
        width, F = min(self.tile.tokens, self.x.shape[0]), self.inner.shape[0]
        room = [self.x.new_empty(width, F) for _ in range(self.formula.num_streams + 1)]
        for at in tiles(self.x.shape[0], self.tile.tokens):
            r, up, h = self._restored(at, room, payload)
            by_h = self._down(grad[at], ops.hidden(self.formula, r, up, h), h)
            self._projections(at, *ops.gradients(self.formula, r, up, by_h))
        return [self.x_grad, *(None if each is None else each.total() for each in self.sums)]

    def _restored(self, at: slice, room: list[Tensor], payload: list[Tensor]) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return r, u and room for h of a tile, from what was kept or computed again."""
        rows = self.x[at]
        if self.kept == "recomputed":
            of_inner, of_up = (self.inner, self.b_inner), (self.up, self.b_up)
            r, up, h = _activations(self.formula, rows, room, of_inner, of_up)
            ops.mark(self.formula, r, up)
            return r, up, h
        streams = [each[: rows.shape[0]] for each in room]
        restore(self.codec, self.kept, payload, streams[: self.formula.num_streams])
        return streams[0], streams[1] if self.formula.gated else None, streams[-1]

    def _down(self, grad: Tensor, h: Tensor, out: Tensor) -> Tensor:
        """Add to the gradients of the last projection and the norm; return that of h in `out`."""
        weight_sum, bias_sum, normed = self.sums[2], self.sums[5], h
        if self.tile.norm is not None:
            leaf = h.detach().requires_grad_()
            with torch.enable_grad():
                normed = self.tile.norm(leaf)
        if weight_sum is not None:
            weight_sum.add_product(grad, normed.detach())
        if bias_sum is not None:
            bias_sum.add(grad.sum(0))
        if self.tile.norm is None:
            return torch.mm(grad, self.down, out=out)
        by_h, *by_params = torch.autograd.grad(normed, (leaf, *self.norm_params), torch.mm(grad, self.down))
        for total, each in zip(self.sums[6:], by_params, strict=True):
            if total is not None:
                total.add(each)
        return by_h

    def _projections(self, at: slice, by_inner: Tensor, by_up: Tensor | None) -> None:
        """Add to the gradients of the first projections, and write that of x."""
        rows = self.x[at]
        for by, weight_sum, bias_sum in ((by_up, self.sums[1], self.sums[4]), (by_inner, self.sums[0], self.sums[3])):
            if by is not None and weight_sum is not None:
                weight_sum.add_product(by, rows)
            if by is not None and bias_sum is not None:
                bias_sum.add(by.sum(0))
        if self.x_grad is not None:
            torch.mm(by_inner, self.inner, out=self.x_grad[at])
            if by_up is not None:
                self.x_grad[at].add_(torch.mm(by_up, self.up))


def _activations(
    formula: Formula, rows: Tensor, room: list[Tensor], inner: tuple[Tensor, Any], up: tuple[Any, Any]
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return r, u and the last of the room, which is r's own where there is room for no more."""
    parts = [each[: rows.shape[0]] for each in room]
    _linear(rows, *inner, parts[0])
    if formula.gated:
        _linear(rows, *up, parts[1])
    return *ops.activate(formula, parts[0], parts[1] if formula.gated else None), parts[-1]


def _linear(rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    if bias is None:
        return torch.mm(rows, weight.t(), out=out)
    return torch.addmm(bias, rows, weight.t(), out=out)


def _check(
    x: Tensor, formula: Formula, inner: Projection, down: Projection, up: Projection | None, tile_bytes: int
) -> None:
    if formula.gated != (up is not None):
        raise ValueError("`up` must be given if `formula` is gated, and left out if it is not.")
    if tile_bytes < 1:
        raise ValueError(f"`tile_bytes` must be 1 or more, got {tile_bytes}.")
    F, D = inner.weight.shape
    shapes = {"x": (x.shape[-1], D), "down": (down.weight.shape[1], F)}
    if up is not None:
        shapes["up"] = (tuple(up.weight.shape), (F, D))
    for name, (got, wanted) in shapes.items():
        if got != wanted:
            raise ValueError(f"`{name}` has width {got}, `inner` [{F}, {D}] needs {wanted}.")
    dtypes = {each.weight.dtype for each in (inner, down, up) if each is not None} | {x.dtype}
    if len(dtypes) > 1:
        raise ValueError(f"x and weights must have one dtype, got {sorted(map(str, dtypes))}.")
