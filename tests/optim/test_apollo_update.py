"""APOLLO against the textbook step by step in float64, and the paper's claims that its update must show."""

import math

import pytest
import torch

from planish.optim import Apollo
from planish.peaks.optim import apollo_reference as textbook
from planish.peaks.optim import apollo_update
from planish.peaks.optim.apollo_random import ProjectionKey, make_projection

CPU = torch.device("cpu")
OPTIONS = {"lr": 3e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
GAP = 4


def drawn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def gradient(shape, step, dtype=torch.float64):
    """Gradients whose size moves up and down, so that the limiter has work."""
    return drawn(*shape, seed=1000 + step, dtype=dtype) * (1.5 if step % 3 else 0.2)


def projection_of(kind, proj_rank, dim, step):
    key = ProjectionKey(kind=kind, proj_rank=proj_rank, dim=dim, seed=7, epoch=(step - 1) // GAP)
    signs = make_projection(key, CPU, torch.float64)
    return signs if kind == "identity" else signs * proj_rank**-0.5


@pytest.mark.parametrize("limiter", ["safe", "paper", "off"])
@pytest.mark.parametrize("granularity", ["channel", "tensor"])
@pytest.mark.parametrize("kind", ["rademacher", "gaussian"])
@pytest.mark.parametrize(("shape", "side", "proj_rank"), [
    ((6, 17), "auto", 3), ((17, 6), "auto", 3), ((9, 9), "auto", 1), ((17, 6), "left", 17), ((6, 17), "right", 2),
    ((1, 8), "auto", 1), ((3, 6, 17), "auto", 2), ((3, 17, 6), "auto", 2), ((3, 6, 17), "right", 4),
])  # fmt: skip
def test_every_step_is_the_textbook_step(shape, side, proj_rank, kind, granularity, limiter):
    param = drawn(*shape).requires_grad_()
    left = side == "left" or (side == "auto" and shape[-2] < shape[-1])

    def rows_projected(tensor):
        matrices = tensor.detach().reshape(-1, *shape[-2:])
        return matrices.clone() if left else matrices.mT.clone()

    alpha = math.sqrt((shape[-2] if left else shape[-1]) / proj_rank)
    optimizer = Apollo(
        [param], proj_rank=proj_rank, granularity=granularity, limiter=limiter, side=side, projection=kind,
        update_gap=GAP, seed=7, **OPTIONS,
    )  # fmt: skip
    expected = [textbook.start(each, proj_rank) for each in rows_projected(param)]
    for step in range(1, 11):
        param.grad = gradient(shape, step)
        projection = projection_of(kind, proj_rank, shape[-2] if left else shape[-1], step)
        expected = [
            textbook.step(
                each, grad, projection, alpha=alpha, by_channel=granularity == "channel", limiter=limiter, **OPTIONS
            )
            for each, grad in zip(expected, rows_projected(param.grad), strict=True)
        ]
        optimizer.step()
        weights = torch.stack([each.weight for each in expected])
        torch.testing.assert_close(rows_projected(param), weights, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("granularity", ["channel", "tensor"])
@pytest.mark.parametrize("shape", [(6, 17), (17, 6)])
def test_without_projection_it_is_structured_adamw(shape, granularity):
    param, full = drawn(*shape).requires_grad_(), drawn(*shape).requires_grad_()
    optimizer = Apollo(
        [param], proj_rank=6, projection="identity", granularity=granularity, limiter="off", lr=1e-2, betas=(0.9, 0.95)
    )
    adamw = torch.optim.AdamW([full], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(1, 8):
        before = param.detach().clone()
        param.grad, full.grad = gradient(shape, step), gradient(shape, step)
        optimizer.step()
        adamw.step()
        state = adamw.state[full]
        moments = [state["exp_avg"] / (1 - 0.9**step), state["exp_avg_sq"] / (1 - 0.95**step), param.grad]
        columns = [each if shape[0] < shape[1] else each.t() for each in moments]
        update = textbook.structured_adamw(*columns, eps=1e-8, by_channel=granularity == "channel")
        expected = before - 1e-2 * (update if shape[0] < shape[1] else update.t())
        torch.testing.assert_close(param.detach(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("limiter", ["safe", "paper", "off"])
@pytest.mark.parametrize(("granularity", "proj_rank"), [("channel", 3), ("tensor", 1)])
@pytest.mark.parametrize("shape", [(40, 9), (4, 12, 5), (4, 5, 12)])
@pytest.mark.parametrize(("dtype", "master"), [
    (torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, False),
])  # fmt: skip
def test_masked_form_for_accelerators_takes_the_same_steps(
    monkeypatch, shape, granularity, proj_rank, limiter, dtype, master
):
    """The form that reads no number, run here on the CPU: zero, infinite and NaN gradients of some experts included."""

    def run():
        param = drawn(*shape).to(dtype).requires_grad_()
        optimizer = Apollo(
            [param], proj_rank=proj_rank, granularity=granularity, limiter=limiter, update_gap=GAP, refresh="reset",
            master=master, **OPTIONS,
        )  # fmt: skip
        for step in range(1, 10):
            param.grad = gradient(shape, step, torch.float32).to(dtype)
            if limiter == "safe" and step in (1, 3, 5):
                param.grad[1] = {1: 0.0, 3: math.nan, 5: math.inf}[step]
            optimizer.step()
        return param.detach(), optimizer.state[param]

    weight, state = run()
    monkeypatch.setattr(apollo_update, "on_host", lambda _: False)
    masked_weight, masked_state = run()
    ulps = {torch.float32: 1e-5, torch.bfloat16: 2**-7}[dtype]
    torch.testing.assert_close(masked_weight, weight, rtol=ulps, atol=ulps)
    for name, tensor in state.items():
        torch.testing.assert_close(masked_state[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("proj_rank", [1, 8, 64, 256])
@pytest.mark.parametrize("kind", ["rademacher", "gaussian"])
def test_factor_shrinks_by_the_root_of_rank_over_dimension(kind, proj_rank):
    """Theorem A.4: s of a projection is sqrt(proj_rank / dim) of the full s, which `alpha` "auto" undoes."""
    full, projected = (drawn(256, 512, dtype=torch.float32).requires_grad_() for _ in range(2))
    common = {"granularity": "tensor", "limiter": "off", "lr": 1.0, "alpha": 1.0}
    optimizers = [
        Apollo([full], proj_rank=256, projection="identity", **common),
        Apollo([projected], proj_rank=proj_rank, projection=kind, **common),
    ]
    for step in range(1, 31):
        before = [full.detach().clone(), projected.detach().clone()]
        for param, optimizer in zip((full, projected), optimizers, strict=True):
            param.grad = drawn(256, 512, seed=step, dtype=torch.float32)
            optimizer.step()
    moved = [(param.detach() - old).norm().item() for param, old in zip((full, projected), before, strict=True)]
    expected = math.sqrt(proj_rank / 256)
    assert moved[1] / moved[0] == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("shape", [(64, 200), (200, 64)])
@pytest.mark.parametrize(("granularity", "proj_rank"), [("channel", 16), ("tensor", 1)])
def test_low_precision_errs_no_more_than_one_rounding_of_the_gradient(shape, granularity, proj_rank):
    """bf16 gradients against the textbook on the same numbers: the factor is off by less than a bf16 ulp (2^-8)."""
    param = drawn(*shape).to(torch.bfloat16).requires_grad_()
    left = shape[0] < shape[1]
    options = OPTIONS | {"weight_decay": 0.0}
    optimizer = Apollo([param], proj_rank=proj_rank, granularity=granularity, update_gap=GAP, seed=7, **options)
    expected = textbook.start(param.detach() if left else param.detach().t(), proj_rank)
    for step in range(1, 9):
        param.grad = gradient(shape, step).to(torch.bfloat16)
        before, master = expected.weight, optimizer.state[param]["master"].double()
        projection = projection_of("rademacher", proj_rank, 64, step)
        expected = textbook.step(
            expected, param.grad if left else param.grad.t(), projection, alpha=math.sqrt(64 / proj_rank),
            by_channel=granularity == "channel", limiter="safe", **options,
        )  # fmt: skip
        optimizer.step()
        moved = optimizer.state[param]["master"].double() - master
        wanted = expected.weight - before
        error = (moved if left else moved.t()) - wanted
        assert error.norm() < 2**-8 * wanted.norm()
