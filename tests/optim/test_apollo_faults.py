"""What the published implementation gets wrong, one test a fault: here it is right."""

import math
import subprocess
import sys

import pytest
import torch

from planish.optim import Apollo
from planish.peaks.optim.apollo_options import ApolloOptions
from planish.peaks.optim.apollo_random import ProjectionKey, make_projection

MINI = {"proj_rank": 1, "granularity": "tensor"}
CHANNEL = {"proj_rank": 4, "granularity": "channel"}
SHAPE = (16, 24)


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weight(*shape, dtype=torch.float32):
    return drawn(*(shape or SHAPE)).to(dtype).requires_grad_()


def walk(optimizer, param, steps, spoil=None):
    """Return the norm of each step's movement; `spoil` changes the gradient of a step."""
    moved = []
    for step in range(1, steps + 1):
        param.grad = drawn(*param.shape, seed=step).to(param.dtype)
        if spoil is not None:
            spoil(step, param.grad)
        before = param.detach().clone()
        optimizer.step()
        moved.append((param.detach() - before).float().norm().item())
    return moved


def test_1_a_projection_of_fp16_gradients_does_not_overflow():
    param = weight(16, 24, dtype=torch.float16)
    optimizer = Apollo([param], lr=1e-2, proj_rank=16)
    param.grad = torch.full((16, 24), 3e4, dtype=torch.float16)
    optimizer.step()
    assert all(tensor.isfinite().all() for tensor in optimizer.state[param].values())


@pytest.mark.parametrize("options", [MINI, CHANNEL])
@pytest.mark.parametrize("value", [0.0, 1e-30, 3e17, math.nan, math.inf])
def test_1_zero_or_non_finite_gradient_traps_nothing(value, options):
    def spoil(step, grad):
        if step == 20:
            grad.fill_(value)

    param, clean = weight(), weight()
    optimizer = Apollo([param], lr=1e-2, weight_decay=0.1, **options)
    moved = walk(optimizer, param, 60, spoil)
    expected = walk(Apollo([clean], lr=1e-2, weight_decay=0.1, **options), clean, 60)
    assert moved[19] == 0
    assert all(0.5 < a / b < 2 for a, b in zip(moved[20:], expected[20:], strict=True))
    assert all(tensor.isfinite().all() for tensor in optimizer.state[param].values())


def test_1_the_paper_limiter_is_trapped_which_is_why_it_is_not_the_default():
    def spoil(step, grad):
        if step == 20:
            grad.zero_()

    param = weight()
    moved = walk(Apollo([param], lr=1e-2, limiter="paper", **MINI), param, 60, spoil)
    assert moved[18] > 0
    assert not any(moved[19:])


@pytest.mark.parametrize("options", [MINI, CHANNEL])
def test_1_an_unusable_gradient_leaves_one_expert_alone_and_moves_the_others(options):
    def spoil(step, grad):
        if step == 3:
            grad[1], grad[2] = 0.0, math.nan

    param = weight(4, *SHAPE)
    optimizer = Apollo([param], lr=1e-2, weight_decay=0.1, **options)
    walk(optimizer, param, 2)
    before = {name: tensor.clone() for name, tensor in optimizer.state[param].items()} | {"w": param.detach().clone()}
    param.grad = drawn(*param.shape, seed=3)
    spoil(3, param.grad)
    optimizer.step()
    after = optimizer.state[param] | {"w": param.detach()}
    for name in ("w", "exp_avg", "exp_avg_sq", "num_updates", "norm"):
        same = [torch.equal(after[name][expert], before[name][expert]) for expert in range(4)]
        assert same == [False, True, True, False], name


def test_1_an_idle_expert_goes_on_where_it_stopped():
    """Thirty-five steps without a token later, its step is what the next one would have been."""
    param, busy = weight(2, *SHAPE), weight(2, *SHAPE)
    optimizers = [Apollo([each], lr=1e-2, **MINI) for each in (param, busy)]
    for each, optimizer in zip((param, busy), optimizers, strict=True):
        walk(optimizer, each, 4)
    for step in range(5, 40):
        param.grad = drawn(*param.shape, seed=step)
        param.grad[0].zero_()
        optimizers[0].step()
    for each, optimizer in zip((param, busy), optimizers, strict=True):
        each.grad = drawn(*param.shape, seed=99)
        optimizer.step()
    assert torch.equal(param[0], busy[0])
    assert not torch.equal(param[1], busy[1])


@pytest.mark.parametrize("master", [True, False])
def test_2_second_moment_of_bf16_weights_decays(master):
    param = weight(dtype=torch.bfloat16)
    optimizer = Apollo([param], lr=1e-3, master=master, **CHANNEL)
    walk(optimizer, param, 5, lambda step, grad: grad.mul_(10))
    high = optimizer.state[param]["exp_avg_sq"].mean().item()
    walk(optimizer, param, 500, lambda step, grad: grad.mul_(1e-3))
    assert optimizer.state[param]["exp_avg_sq"].dtype == torch.float32
    assert optimizer.state[param]["exp_avg_sq"].mean().item() == pytest.approx(high * 0.999**500, rel=1e-2)


def test_3_state_dict_is_plain_and_loads_without_pickle(tmp_path):
    param = weight()
    optimizer = Apollo([param], **CHANNEL)
    walk(optimizer, param, 2)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    other = Apollo([param], **CHANNEL)
    other.load_state_dict(saved)
    assert all(type(tensor) is torch.Tensor for tensor in saved["state"][0].values())
    assert all(torch.equal(other.state[param][name], each) for name, each in optimizer.state[param].items())


def test_5_a_group_may_be_added_later():
    first, second = weight(), weight()
    optimizer = Apollo([first], lr=1e-2, **MINI)
    optimizer.add_param_group({"params": [second], "proj_rank": 4, "granularity": "channel"})
    for param in (first, second):
        param.grad = drawn(*SHAPE, seed=1)
    optimizer.step()
    assert not torch.equal(second, weight())
    assert optimizer.state[second]["exp_avg"].shape == (1, 4, 24)


@pytest.mark.parametrize("granularity", ["channel", "tensor"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("shape", [(16, 24), (24, 16), (3, 16, 24)])
def test_6_and_7_every_side_of_every_shape(shape, side, granularity):
    param = weight(*shape)
    optimizer = Apollo([param], proj_rank=2, granularity=granularity, side=side)
    assert all(0 < moved < math.inf for moved in walk(optimizer, param, 3))
    channels = shape[-1] if side == "left" else shape[-2]
    assert optimizer.state[param]["exp_avg"].numel() == math.prod(shape[:-2]) * 2 * channels


def test_7_convolution_and_too_large_a_rank_are_refused_by_name():
    with pytest.raises(ValueError, match=r"2 or 3 dimensions, got \[4, 3, 2, 2\]"):
        Apollo([torch.zeros(4, 3, 2, 2, requires_grad=True)], proj_rank=1)
    with pytest.raises(ValueError, match=r"`proj_rank` \(17\) must not exceed the projected dimension \(16\)"):
        Apollo([weight()], proj_rank=17)


def test_7_a_refused_group_is_not_added():
    optimizer = Apollo([weight()], **MINI)
    with pytest.raises(ValueError, match="proj_rank"):
        optimizer.add_param_group({"params": [weight()], "proj_rank": 99})
    assert len(optimizer.param_groups) == 1


def test_8_parameters_of_one_shape_share_a_projection_and_no_other_dimension_does():
    """Whatever their order and group: two equal gradients move two equal weights alike."""
    ones = [weight(), weight(), weight(16, 40)]
    optimizer = Apollo([{"params": ones[:1]}, {"params": ones[1:]}], lr=1e-2, **MINI)
    for param in ones:
        param.grad = drawn(*param.shape, seed=7)
    optimizer.step()
    assert torch.equal(ones[0], ones[1])
    keys = [ProjectionKey(kind="rademacher", proj_rank=1, dim=dim, seed=0, epoch=0) for dim in (16, 24)]
    signs = [make_projection(key, torch.device("cpu"), torch.float32) for key in keys]
    assert not torch.equal(signs[0], signs[1][:, :16])


@pytest.mark.parametrize("options", [MINI, CHANNEL])
@pytest.mark.parametrize("limiter", ["safe", "paper", "off"])
def test_9_no_number_is_read_back_from_an_accelerator(limiter, options):
    """Tensors of the meta device have no numbers: reading one would raise."""
    params = [torch.zeros(shape, device="meta", requires_grad=True) for shape in ((16, 24), (24, 16), (3, 16, 24))]
    optimizer = Apollo(params, lr=1e-2, weight_decay=0.1, limiter=limiter, refresh="reset", **options)
    for _ in range(2):
        for param in params:
            param.grad = torch.zeros_like(param)
        optimizer.step()
    with pytest.raises(RuntimeError, match="meta"):
        optimizer.state[params[0]]["norm"].item()


def test_10_refresh_keeps_or_resets_the_first_moment():
    """After a refresh "keep" has moments of another projection; "reset" begins the first anew, with its own count."""

    def projected_moment(refresh):
        param = weight()
        optimizer = Apollo([param], update_gap=5, refresh=refresh, betas=(0.9, 0.999), **CHANNEL)
        walk(optimizer, param, 6)
        return optimizer.state[param]

    kept, reset = projected_moment("keep"), projected_moment("reset")
    assert torch.equal(kept["exp_avg_sq"], reset["exp_avg_sq"])
    assert kept["exp_avg"].abs().mean() > 2 * reset["exp_avg"].abs().mean()
    assert (reset["num_updates"].item(), reset["num_since_refresh"].item()) == (6, 1)


def test_11_safe_limiter_makes_no_dip_in_the_first_steps():
    """Before bias correction the limiter sees norms that grow by themselves, and cuts them."""
    moved = {}
    for limiter in ("safe", "paper", "off"):
        param = weight(64, 96)
        moved[limiter] = walk(Apollo([param], lr=1e-2, limiter=limiter, **CHANNEL), param, 15)
    assert min(a / b for a, b in zip(moved["safe"], moved["off"], strict=True)) > 0.95
    assert min(a / b for a, b in zip(moved["paper"], moved["off"], strict=True)) < 0.9


def test_12_importing_it_imports_neither_transformers_nor_bitsandbytes():
    code = "import sys, planish.optim; print([m for m in ('transformers', 'bitsandbytes') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_13_weight_decay_reaches_every_group():
    def moved(weight_decay):
        projected, rest = weight(), weight(5)
        optimizer = Apollo([{"params": [projected], **MINI}, {"params": [rest]}], lr=0.1, weight_decay=weight_decay)
        for param in (projected, rest):
            param.grad = drawn(*param.shape, seed=1)
        optimizer.step()
        return projected.detach(), rest.detach()

    for plain, decayed, before in zip(moved(0.0), moved(0.5), (weight(), weight(5)), strict=True):
        torch.testing.assert_close(plain - decayed, 0.1 * 0.5 * before.detach())


def test_15_transformers_group_without_weight_decay_takes_the_constructors():
    groups = [{"params": [weight(5)]}, {"params": [weight()], "rank": 2, "update_proj_gap": 10, "scale": 4.0}]
    optimizer = Apollo(groups, lr=1e-3, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3)
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.3}
    assert {group["betas"] for group in optimizer.param_groups} == {(0.8, 0.9)}
    assert ApolloOptions.of(optimizer.param_groups[1]).alpha == 2.0
    assert optimizer.param_groups[0]["proj_rank"] is None


def test_16_an_option_without_effect_is_refused():
    with pytest.raises(ValueError, match="`scale_front` has no meaning here"):
        Apollo([{"params": [weight()], "rank": 1, "scale_front": True}])


def test_17_the_update_is_the_full_gradient_scaled_and_not_a_low_rank_one():
    param = weight()
    before = param.detach().clone()
    optimizer = Apollo([param], lr=1e-2, **CHANNEL)
    param.grad = drawn(*SHAPE, seed=1)
    optimizer.step()
    moved = (param.detach() - before).double()
    factors = moved / param.grad.double()
    torch.testing.assert_close(factors, factors.mean(0, keepdim=True).expand(SHAPE), rtol=1e-3, atol=0)
    assert torch.linalg.matrix_rank(moved) == min(SHAPE)
