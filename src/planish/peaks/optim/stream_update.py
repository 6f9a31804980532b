"""One chunk's AdamW update by torch's own arithmetic: the loop that is its default, or its fused kernel."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from planish.peaks.optim.stream_layout import Arrays, Chunk, Flat, Piece

Math = Literal["torch", "fused"]

BLOCK = 2**17
"""Numbers that torch's loop is given at a time."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Due:
    """A parameter that this step updates.

    Attributes:
        group: Its options.
        step: Updates before this one.
        weight: Its numbers in the order of memory.
        grad: Those of its gradient.
    """

    group: dict[str, Any]
    step: Tensor
    weight: Tensor
    grad: Tensor

    @classmethod
    def of(cls, flat: Flat, group: dict[str, Any], step: Tensor) -> "Due":
        """Return what the step needs of a parameter with a gradient."""
        grad = flat.param.grad
        assert grad is not None
        return cls(group=group, step=step, weight=flat.view(), grad=flat.like(grad))


def update(chunk: Chunk, arrays: Arrays, due: Mapping[Tensor, Due], *, math: Math, scratch: Tensor | None) -> None:
    """Update in place the pieces of a chunk whose parameters are due.

    Memory:    none with "fused"; with "torch" two or three arrays of `BLOCK` numbers.
    Exactness: bitwise what torch does to whole parameters: its loop is elementwise, and its fused kernel divides its
        work where chunks are cut.

    Args:
        chunk: Says which parts of which parameters.
        arrays: Its state, on one device.
        due: By parameter.
        math: "torch" is `torch.optim.AdamW`'s default on a CPU, "fused" its `fused=True`.
        scratch: Room for the wide gradients of a chunk, where parameters are narrower than their state.
    """
    pieces = [piece for piece in chunk.pieces if piece.flat.param in due]
    if math == "torch":
        pieces = [block for piece in pieces for block in _blocks(piece)]
    for group, members in _by_group(pieces, due):
        _update(members, arrays, due, group, math=math, scratch=scratch)


def _blocks(piece: Piece) -> Iterable[Piece]:
    """Yield parts of a piece that a core's cache holds: the loop goes over each several times."""
    for start in range(piece.start, piece.stop, BLOCK):
        stop, offset = min(start + BLOCK, piece.stop), piece.offset + start - piece.start
        yield Piece(flat=piece.flat, start=start, stop=stop, offset=offset)


def _by_group(pieces: Iterable[Piece], due: Mapping[Tensor, Due]) -> Iterable[tuple[dict[str, Any], list[Piece]]]:
    found: dict[int, tuple[dict[str, Any], list[Piece]]] = {}
    for piece in pieces:
        group = due[piece.flat.param].group
        found.setdefault(id(group), (group, []))[1].append(piece)
    return found.values()


def _update(
    pieces: list[Piece],
    arrays: Arrays,
    due: Mapping[Tensor, Due],
    group: dict[str, Any],
    *,
    math: Math,
    scratch: Tensor | None,
) -> None:
    device = arrays["exp_avg"].device
    params = [due[piece.flat.param].weight[piece.outside] for piece in pieces]
    apart = "master" in arrays or params[0].device != device
    if "master" in arrays:
        weights = [arrays["master"][piece.inside] for piece in pieces]
    else:
        weights = [param.to(device) for param in params]  # the parameters themselves, where state is on their device
    beta1, beta2 = group["betas"]
    adamw(
        weights,
        [_grad(due[piece.flat.param].grad, piece, device, scratch) for piece in pieces],
        *([arrays[name][piece.inside] for piece in pieces] for name in ("exp_avg", "exp_avg_sq")),
        [arrays["max_exp_avg_sq"][piece.inside] for piece in pieces] if group["amsgrad"] else [],
        [_counter(due[piece.flat.param].step, device, math) for piece in pieces],
        foreach=False,
        fused=math == "fused",
        amsgrad=group["amsgrad"],
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
    )
    for param, weight in zip(params, weights, strict=True) if apart else ():
        param.copy_(weight)


def _grad(grad: Tensor, piece: Piece, device: torch.device, scratch: Tensor | None) -> Tensor:
    part = grad[piece.outside]
    if scratch is None:
        return part.to(device)
    if scratch.device != device:
        return part.to(device, scratch.dtype)
    return scratch[piece.inside].copy_(part)


def _counter(step: Tensor, device: torch.device, math: Math) -> Tensor:
    """Return a count of steps that torch may raise by one: each piece of a parameter has its own."""
    return step.to(device, copy=True) if math == "fused" else step.clone()
