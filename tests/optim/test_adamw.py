"""AdamW against torch's own, bit for bit, and its bytes."""

import pytest
import torch

from planish.peaks.optim.adamw import AdamW

SHAPES = [(7, 5), (64,), (3, 4, 5), (1,), (129, 3)]
OPTIONS = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def parameters(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in SHAPES]


def gradients(step, dtype=torch.float32):
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def test_fp32_is_bitwise_torch_fused():
    ours, theirs = parameters(), parameters()
    optimizer, reference = AdamW(ours, **OPTIONS), torch.optim.AdamW(theirs, fused=True, **OPTIONS)
    for step in range(5):
        for param, other, grad in zip(ours, theirs, gradients(step), strict=True):
            param.grad, other.grad = grad.clone(), grad.clone()
        optimizer.step()
        reference.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_bf16_follows_an_fp32_master_bit_for_bit():
    ours = parameters(torch.bfloat16)
    masters = [param.detach().float().requires_grad_() for param in ours]
    optimizer, reference = AdamW(ours, **OPTIONS), torch.optim.AdamW(masters, fused=True, **OPTIONS)
    for step in range(5):
        for param, master, grad in zip(ours, masters, gradients(step, torch.bfloat16), strict=True):
            param.grad, master.grad = grad.clone(), grad.float()
        optimizer.step()
        reference.step()
    for param, master in zip(ours, masters, strict=True):
        assert torch.equal(optimizer.state[param]["master"], master)
        assert torch.equal(param, master.to(torch.bfloat16))


@pytest.mark.parametrize(("dtype", "master", "bytes_each"), [
    (torch.float32, True, 8), (torch.bfloat16, True, 12), (torch.bfloat16, False, 4),
])  # fmt: skip
def test_state_bytes_are_the_formula_and_exist_before_the_first_step(dtype, master, bytes_each):
    params = parameters(dtype)
    optimizer = AdamW(params, master=master)

    def state_bytes():
        return sum(t.nbytes for state in optimizer.state.values() for name, t in state.items() if name != "step")

    count = sum(param.numel() for param in params)
    assert state_bytes() == bytes_each * count
    for param, grad in zip(params, gradients(0, dtype), strict=True):
        param.grad = grad
    optimizer.step()
    assert state_bytes() == bytes_each * count


def test_gradients_are_left_alone_and_parameters_without_one_too():
    params = parameters(torch.bfloat16)
    before = params[1].detach().clone()
    grad = gradients(0, torch.bfloat16)[0]
    params[0].grad = grad.clone()
    AdamW(params, **OPTIONS).step()
    assert torch.equal(params[0].grad, grad)
    assert torch.equal(params[1], before)


def test_state_dict_round_trip_is_bitwise_mid_run():
    def run(interrupt):
        params = parameters(torch.bfloat16)
        optimizer = AdamW(params, **OPTIONS)
        for step in range(6):
            if interrupt and step == 3:
                saved = optimizer.state_dict()
                optimizer = AdamW(params, **OPTIONS)
                optimizer.load_state_dict(saved)
            for param, grad in zip(params, gradients(step, torch.bfloat16), strict=True):
                param.grad = grad
            optimizer.step()
        return params

    assert all(torch.equal(a, b) for a, b in zip(run(False), run(True), strict=True))
