"""What an expert does between its two products, into buffers that exist, and its gradient by hand.

A gate takes `inner` [N, C], what the first product made, to `outer` [N, F], what the second one takes.
"""

from dataclasses import dataclass
from math import frexp, inf
from typing import Literal, assert_never

import torch
from torch import Tensor

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class Glu:
    """outer = activation(left) * right, with inner = [left | right]; C = 2F."""

    activation: Activation


@dataclass(frozen=True, slots=True, kw_only=True)
class ClampedGlu:
    """outer = (right + 1) * left * sigmoid(alpha * left), both clamped, with their columns taking turns; C = 2F."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Single:
    """outer = activation(inner); C = F."""

    activation: Activation


Gate = Glu | ClampedGlu | Single


def columns(gate: Gate) -> int:
    """Return C / F."""
    return 1 if isinstance(gate, Single) else 2


def gate_forward(gate: Gate, inner: Tensor, outer: Tensor, scratch: Tensor) -> None:
    """Write the gate's result into `outer`; `inner` stays, `scratch` [N, F] does not."""
    match gate:
        case Glu(activation=activation):
            left, right = inner.chunk(2, 1)
            _activate(activation, left, outer)
            outer.mul_(right)
        case ClampedGlu(alpha=alpha, limit=limit):
            left, right = inner[:, ::2], inner[:, 1::2]
            torch.clamp(left, max=limit, out=scratch)
            _silu_of_scaled(scratch, alpha, outer)
            torch.clamp(right, -limit, limit, out=scratch)
            outer.mul_(scratch.add_(1))
        case Single(activation=activation):
            _activate(activation, inner, outer)
        case _:
            assert_never(gate)


def gate_backward(gate: Gate, inner: Tensor, grad: Tensor, scratch: Tensor) -> None:
    """Turn `inner` into its gradient, given `grad` [N, F] of the result; `grad` and `scratch` [N, F] are used up."""
    match gate:
        case Glu(activation=activation):
            left, right = inner.chunk(2, 1)
            _activate(activation, left, scratch)
            scratch.mul_(grad)
            _derive(activation, grad.mul_(right), left)
            right.copy_(scratch)
        case ClampedGlu(alpha=alpha, limit=limit):
            _clamped_backward(inner[:, ::2], inner[:, 1::2], grad, scratch, alpha=alpha, limit=limit)
        case Single(activation=activation):
            _derive(activation, grad, inner)
        case _:
            assert_never(gate)


def _clamped_backward(
    left: Tensor, right: Tensor, grad: Tensor, scratch: Tensor, *, alpha: float, limit: float
) -> None:
    # The clamps' gradients pass at the limit itself; hardtanh's stop there, so they are given the next number.
    past = limit + torch.finfo(grad.dtype).eps * 2.0 ** (frexp(limit)[1] - 1)
    torch.clamp(right, -limit, limit, out=scratch)
    scratch.add_(1).mul_(grad)
    _aten.hardtanh_backward.grad_input(grad, right, -past, past, grad_input=grad)
    torch.clamp(left, max=limit, out=right)
    right.mul_(alpha)
    _aten.silu_backward.grad_input(scratch, right, grad_input=scratch)
    _aten.silu.out(right, out=right)
    right.mul_(1 / alpha).mul_(grad)
    _aten.hardtanh_backward.grad_input(scratch, left, -inf, past, grad_input=left)


def _silu_of_scaled(inner: Tensor, alpha: float, out: Tensor) -> None:
    """Write inner * sigmoid(alpha * inner) into `out`."""
    torch.mul(inner, alpha, out=out)
    _aten.silu.out(out, out=out)
    out.mul_(1 / alpha)


def _activate(activation: Activation, inner: Tensor, out: Tensor) -> None:
    match activation:
        case "silu":
            _aten.silu.out(inner, out=out)
        case "gelu":
            _aten.gelu.out(inner, out=out)
        case "gelu_tanh":
            _aten.gelu.out(inner, approximate="tanh", out=out)
        case "relu":
            torch.clamp(inner, min=0, out=out)
        case "relu2":
            torch.clamp(inner, min=0, out=out)
            out.mul_(out)
        case _:
            assert_never(activation)


def _derive(activation: Activation, grad: Tensor, inner: Tensor) -> None:
    """Turn `inner` into its gradient."""
    match activation:
        case "silu":
            _aten.silu_backward.grad_input(grad, inner, grad_input=inner)
        case "gelu":
            _aten.gelu_backward.grad_input(grad, inner, grad_input=inner)
        case "gelu_tanh":
            _aten.gelu_backward.grad_input(grad, inner, approximate="tanh", grad_input=inner)
        case "relu":
            _aten.threshold_backward.grad_input(grad, inner, 0, grad_input=inner)
        case "relu2":
            inner.clamp_(min=0).mul_(2).mul_(grad)
        case _:
            assert_never(activation)
