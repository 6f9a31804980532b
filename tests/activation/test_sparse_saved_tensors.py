"""Saved-tensor hooks change nothing but what waits for backward."""

import doctest
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import planish
from planish.kernels.bitmap import num_bits_bytes, num_blocks
from planish.memory.ledger import Ledger
from planish.peaks.activation import saved


def model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 64)).to(dtype)


def gradients(net, x, scope):
    with scope as found:
        loss = net(x).square().sum()
    loss.backward()
    grads = [each.grad.clone() for each in net.parameters()]
    net.zero_grad()
    return [loss.detach(), *grads], found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_loss_and_gradients_are_the_same_bits(dtype):
    net, x = model(dtype), torch.randn(128, 64).to(dtype)
    expected, _ = gradients(net, x, nullcontext())
    found, kept = gradients(net, x, planish.sparse_saved_tensors(min_bytes=0))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    # Each ReLU's result is saved twice, for itself and for the product behind it, and packed once.
    assert kept.num_packed == 2
    assert kept.dense_bytes == 128 * (256 + 64) * dtype.itemsize
    assert kept.packed_bytes < 0.75 * kept.dense_bytes


def test_what_waits_is_what_was_counted():
    x = torch.randn(64, 1024).requires_grad_()
    with Ledger() as ledger, saved.sparse_saved_tensors() as kept:
        ledger.adopt(x, "other")
        before = ledger.live_bytes
        loss = torch.relu(x).sum()
        held = ledger.live_bytes - before - loss.nbytes
    count = int((x > 0).sum())
    assert held == kept.packed_bytes == count * 4 + num_bits_bytes(x.numel()) + 8 * num_blocks(x.numel())


def test_a_storage_that_changed_or_died_is_packed_anew():
    x, kept = torch.zeros(2, 300).requires_grad_(), []
    with saved.sparse_saved_tensors(min_bytes=0) as found:
        for number in range(1, 20):
            with torch.no_grad():
                x[0, number] = number
            kept.append((torch.relu(x) * torch.relu(x)).sum())  # each dies, the next one takes its memory
    for number, loss in enumerate(kept, start=1):
        (grad,) = torch.autograd.grad(loss, x)
        assert grad.sum() == number * (number + 1)
    assert found.num_packed == 2 * len(kept)


def test_any_layout_comes_back_as_it_was():
    for x in (torch.randn(6, 10).t(), torch.randn(2, 3, 4).permute(2, 0, 1), torch.randn(5, 8)[:, ::2], torch.randn(3)):
        leaf = x.detach().relu().requires_grad_()
        with saved.sparse_saved_tensors(min_bytes=0):
            y = (leaf * 1).square()
        (grad,) = torch.autograd.grad(y.sum(), leaf)
        assert torch.equal(grad, 2 * leaf)


def test_parameters_small_and_dense_tensors_are_left_alone():
    weight = nn.Parameter(torch.eye(256))
    x = torch.randn(256, 256)
    with saved.sparse_saved_tensors() as found:
        (F.linear(x, weight) + F.linear(x, weight.t())).sum()
        torch.relu(torch.randn(4, 4, requires_grad=True)).sum()
        torch.exp(torch.randn(256, 256, requires_grad=True)).sum()
    assert found.num_packed == 0
    with (
        pytest.raises(ValueError, match="`min_bytes` must be 0 or more, got -1"),
        saved.sparse_saved_tensors(min_bytes=-1),
    ):
        pass


def test_checkpointing_and_a_second_backward():
    net, x = model(), torch.randn(64, 64)
    expected, _ = gradients(net, x, saved.sparse_saved_tensors(min_bytes=2**40))
    with saved.sparse_saved_tensors(min_bytes=0):
        loss = checkpoint(net, x, use_reentrant=False).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert all(torch.allclose(each.grad, 2 * want) for each, want in zip(net.parameters(), expected[1:], strict=True))


def test_the_example_in_the_documentation():
    assert doctest.testmod(saved, extraglobs={"torch": torch}).failed == 0
