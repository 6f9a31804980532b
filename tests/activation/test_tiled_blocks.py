"""A block run in tiles, and again in backward, gives autograd's output and gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from planish.peaks.activation.tiled import tiled


class SwiGlu(nn.Module):
    def __init__(self, dtype, bias=False):
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up = (nn.Linear(24, 40, bias=bias, dtype=dtype) for _ in range(2))
        self.down = nn.Linear(40, 24, bias=bias, dtype=dtype)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


def both(block, x, grad, tokens):
    leaves = [x, *block.parameters()]
    plain, ours = block(x), tiled(block, x, list(block.parameters()), tokens=tokens)
    return (
        [plain, *torch.autograd.grad(plain, leaves, grad)],
        [ours, *torch.autograd.grad(ours, leaves, grad)],
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bias", [False, True])
def test_one_tile_is_autograd_bit_for_bit(dtype, bias):
    x = torch.randn(2, 17, 24).to(dtype).requires_grad_()
    expected, found = both(SwiGlu(dtype, bias), x, torch.randn(2, 17, 24).to(dtype), 34)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("tokens", [1, 5, 33, 34, 100])
def test_any_tile_is_exact_in_float64(errors_of, tokens):
    x = torch.randn(2, 17, 24, dtype=torch.float64).requires_grad_()
    expected, found = both(SwiGlu(torch.float64), x, torch.randn_like(x), tokens)
    assert max(errors_of(found[:1], expected[:1])) <= 1e-12
    assert max(errors_of(found[1:], expected[1:])) <= 1e-10


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_tiles_in_low_precision_are_as_exact_as_autograd(errors_of, dtype):
    x, grad = (torch.randn(1, 300, 24, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    exact, _ = both(SwiGlu(dtype).double(), x.to(dtype).double().requires_grad_(), grad.to(dtype).double(), 300)
    plain, ours = both(SwiGlu(dtype), x.to(dtype).requires_grad_(), grad.to(dtype), 17)
    for found, allowed in zip(errors_of(ours, exact), errors_of(plain, exact), strict=True):
        assert found <= 2 * allowed + torch.finfo(dtype).eps


def test_gradcheck_frozen_weights_no_tokens_and_a_second_backward():
    block = SwiGlu(torch.float64, bias=True)
    x = torch.randn(3, 24, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: tiled(block, x, list(block.parameters()), tokens=2), (x,), fast_mode=True)
    expected, _ = both(block, x, torch.ones_like(x), 2)
    block.up.weight.requires_grad_(False)
    y = tiled(block, x, list(block.parameters()), tokens=2)
    first = torch.autograd.grad(y.sum(), [x, block.down.weight], retain_graph=True)
    assert all(torch.allclose(a, b) for a, b in zip(first, (expected[1], expected[4 + 2]), strict=False))
    assert all(
        torch.equal(a, b) for a, b in zip(first, torch.autograd.grad(y.sum(), [x, block.down.weight]), strict=True)
    )
    frozen = x.detach()
    (grad,) = torch.autograd.grad(tiled(block, frozen, list(block.parameters()), tokens=2).sum(), [block.down.weight])
    assert torch.allclose(grad, first[1])
    assert tiled(block, x[:0], list(block.parameters()), tokens=2).shape == (0, 24)


def test_a_parameter_that_the_block_does_not_read_gets_zero():
    block, spare = SwiGlu(torch.float32), nn.Parameter(torch.ones(3))
    x = torch.randn(9, 24)
    (grad,) = torch.autograd.grad(tiled(block, x, [*block.parameters(), spare], tokens=4).sum(), [spare])
    assert torch.equal(grad, torch.zeros(3))
