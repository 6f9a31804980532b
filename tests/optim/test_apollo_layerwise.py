"""The optimizer inside the backward pass: the same bits as `step`, with accumulation, and one gradient at a time."""

import contextlib

import pytest
import torch

from planish.memory.ledger import Ledger
from planish.optim import Apollo
from planish.peaks.optim.apollo_options import split_parameters

OPTIONS = {"lr": 1e-2, "weight_decay": 0.1, "update_gap": 2}


def make(model, options):
    projected, rest = split_parameters(model, "all-linear")
    experts = [param for param in rest if param.ndim == 3]
    others = [param for param in rest if param.ndim < 3]
    return Apollo([{"params": projected + experts, **options}, {"params": others}], **OPTIONS)


def train(model, optimizer, microbatches, *, in_backward, steps=4):
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        for microbatch in range(microbatches):
            ids = torch.randint(0, 300, (2, 12), generator=generator)
            last = in_backward and microbatch == microbatches - 1
            with optimizer.update_in_backward() if last else contextlib.nullcontext():
                model(input_ids=ids, labels=ids).loss.backward()
        if not in_backward:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [
    {"proj_rank": 1, "granularity": "tensor"}, {"proj_rank": 4, "refresh": "reset"},
])  # fmt: skip
def test_update_in_backward_is_bitwise_step(tiny_model, family, microbatches, dtype, options):
    kind = {} if family == "llama" else {"experts_implementation": "eager"}  # batched_mm sums in no fixed order
    models = [tiny_model(family, dtype=dtype, **kind) for _ in range(2)]
    before = [param.detach().clone() for param in models[0].parameters()]
    for model, in_backward in zip(models, (False, True), strict=True):
        train(model, make(model, options), microbatches, in_backward=in_backward)
    for old, one, other in zip(before, models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)
        assert not torch.equal(one, old)
        assert other.grad is None


def test_gradient_of_an_earlier_microbatch_alone_is_not_lost():
    first, second = (torch.ones(4, 3, requires_grad=True) for _ in range(2))
    optimizer = Apollo([first, second], proj_rank=1)
    (first * torch.arange(12.0).view(4, 3)).sum().backward()
    with optimizer.update_in_backward():
        second.square().sum().backward()
    assert not torch.equal(first, torch.ones(4, 3))
    assert first.grad is None


def test_hooks_are_gone_afterwards_even_when_backward_fails():
    weight = torch.ones(4, 3, requires_grad=True)
    optimizer = Apollo([weight], proj_rank=1)
    with pytest.raises(RuntimeError, match="does not require grad"), optimizer.update_in_backward():
        torch.ones(()).backward()
    weight.square().sum().backward()
    assert torch.equal(weight, torch.ones(4, 3))
    assert torch.equal(weight.grad, torch.full((4, 3), 2.0))


def test_gradients_are_alive_one_at_a_time():
    """A chain of equal layers: with `step` all gradients are alive together, inside backward two at most."""
    layers, width = 12, 64
    peaks = {}
    for in_backward in (False, True):
        weights = [torch.randn(width, width).div_(8).requires_grad_() for _ in range(layers)]
        optimizer = Apollo(weights, proj_rank=1, granularity="tensor")
        with Ledger() as ledger, ledger.phase("backward"):
            hidden = torch.ones(1, width)
            for weight in weights:
                hidden = torch.tanh(hidden @ weight)
            with optimizer.update_in_backward() if in_backward else contextlib.nullcontext():
                hidden.sum().backward()
            peaks[in_backward] = ledger.peak_bytes["backward"]
    gradient_bytes = 4 * width * width
    assert peaks[False] > layers * gradient_bytes
    assert peaks[True] < 3 * gradient_bytes
