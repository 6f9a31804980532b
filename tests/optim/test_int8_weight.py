"""Weights of one byte: exact extremes, unbiased rounding, sticky groups, layers as wide ones, and Q-APOLLO's step."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from planish.memory.ledger import Ledger
from planish.optim import Apollo, quantize_weights
from planish.peaks.optim import apollo_update
from planish.peaks.optim.int8_weight import GROUP, Int8Weight

MINI = {"proj_rank": 1, "granularity": "tensor"}


def drawn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def grouped(weight):
    """Return [A, groups, GROUP], the last group filled with its own last element."""
    cols = weight.shape[1]
    padded = torch.cat([weight, weight[:, -1:].expand(-1, -cols % GROUP)], dim=1)
    return padded.unflatten(1, (-1, GROUP))


def level(int8):
    return ((int8.high - int8.low) / 255).repeat_interleave(GROUP, dim=1)[:, : int8.shape[1]]


@pytest.mark.parametrize("cols", [1, 100, 128, 129, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extremes_are_exact_and_the_rest_within_half_a_level(cols, dtype):
    weight = drawn(9, cols, dtype=dtype)
    int8 = Int8Weight.quantize(weight)
    wide = torch.cat([int8.read(tile) for tile in int8.tiles()])
    assert torch.equal(grouped(wide).amin(-1), grouped(weight).amin(-1).float())
    assert torch.equal(grouped(wide).amax(-1), grouped(weight).amax(-1).float())
    assert ((wide - weight.float()).abs() <= level(int8) * 0.5001).all()
    assert int8.codes.nbytes + int8.low.nbytes + int8.high.nbytes == 9 * (cols + 8 * math.ceil(cols / GROUP))


def test_14_a_group_far_from_zero_and_a_constant_one():
    """The published zero point is clamped to 0 ... 255: errors of 0.5 on [0.5, 0.6] there."""
    far = torch.linspace(0.5, 0.6, GROUP).view(1, GROUP)
    assert (Int8Weight.quantize(far).dequantize() - far).abs().max() <= 0.1 / 255 / 2 * 1.001
    constant = torch.full((2, GROUP), 0.02)
    assert torch.equal(Int8Weight.quantize(constant).dequantize(), constant)


def test_14_random_rounding_is_unbiased_also_at_the_extremes():
    """400 draws of 4 x 256 weights: the mean error is below 3 sigma, and each weight's is as chance has it."""
    base, draws = drawn(4, 2 * GROUP), 400
    target = base.clone()
    inner = target.unflatten(1, (2, GROUP))
    low, high = inner.amin(-1, keepdim=True), inner.amax(-1, keepdim=True)
    target = (low + (high - low) * torch.rand(inner.shape, generator=torch.Generator().manual_seed(1))).flatten(1)
    target[:, :2] = torch.stack([low[:, 0, 0], high[:, 0, 0]], dim=1)
    errors = []
    for draw in range(draws):
        int8 = Int8Weight.quantize(base)
        int8.write(slice(0, 4), target.clone(), torch.Generator().manual_seed(draw))
        errors.append((int8.read(slice(0, 4)) - target).double())
    errors = torch.stack(errors)
    assert not errors[:, :, :2].any()
    width = level(Int8Weight.quantize(base)).double()
    assert (errors.abs() <= width * 1.001).all()
    assert abs(errors.mean()) < 3 * errors.std() / math.sqrt(errors.numel())
    chance = ((target - low.expand_as(inner).flatten(1)) / width).frac()  # of the upper level
    between = (chance > 0.05) & (chance < 0.95)  # where 400 draws are as good as normal
    z = errors.mean(0) / (width * (chance * (1 - chance) / draws).sqrt())
    assert abs(z[between].square().mean() - 1) < 3 * math.sqrt(2 / between.sum())


def test_groups_are_sticky_until_a_weight_passes_an_extreme():
    int8 = Int8Weight.quantize(drawn(3, 2 * GROUP))
    low, high, codes = int8.low.clone(), int8.high.clone(), int8.codes.clone()
    generator = torch.Generator().manual_seed(0)
    int8.write(slice(0, 3), int8.read(slice(0, 3)) * 0.99, generator)
    assert torch.equal(int8.low, low)
    assert torch.equal(int8.high, high)
    assert not torch.equal(int8.codes, codes)
    moved = int8.read(slice(0, 3))
    moved[1, 5] = 100.0
    int8.write(slice(0, 3), moved, generator)
    assert int8.read(slice(0, 3))[1, 5] == 100.0
    changed = int8.high != high
    assert changed.nonzero().tolist() == [[1, 0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_compute_and_learn_as_wide_ones(dtype):
    """Output and every gradient against plain layers with the dequantized weight; several tiles, shared weight too."""
    embedding, linear = nn.Embedding(700, 640, padding_idx=3, dtype=dtype), nn.Linear(640, 700, dtype=dtype)
    linear.weight = embedding.weight
    (weight,) = quantize_weights([embedding, linear])
    assert linear.weight is embedding.weight is weight
    assert len(weight.tiles()) > 1
    wide = weight.dequantize().requires_grad_()
    bias = linear.bias.detach().clone().requires_grad_()
    ids = torch.randint(0, 700, (2, 9), generator=torch.Generator().manual_seed(0))
    upstream = drawn(2, 9, 700, dtype=dtype)
    ours = linear(embedding(ids))
    theirs = F.linear(F.embedding(ids, wide, padding_idx=3), wide, bias)
    ours.backward(upstream)
    theirs.backward(upstream)
    ulp = {torch.float32: 1e-5, torch.bfloat16: 2**-7}[dtype]
    for one, other in ((ours, theirs), (weight.grad, wide.grad), (linear.bias.grad, bias.grad)):
        assert one.dtype == dtype
        assert (one - other).float().norm() <= ulp * other.float().norm()


def test_frozen_weight_and_frozen_input():
    linear = nn.Linear(130, 5)
    quantize_weights([linear])
    x = drawn(3, 130).requires_grad_()
    linear.requires_grad_(False)
    linear(x).sum().backward()
    torch.testing.assert_close(x.grad, linear.weight.dequantize().sum(0).expand(3, -1))
    linear.requires_grad_()
    linear(x.detach()).sum().backward()
    torch.testing.assert_close(linear.weight.grad, x.detach().sum(0).expand(5, -1))


def test_what_an_int8_weight_cannot_do_is_refused_by_name():
    weight = nn.Parameter(Int8Weight.quantize(drawn(4, 130)))
    with pytest.raises(TypeError, match=r"cannot take part in aten\.mul"):
        torch.mul(weight, 2)
    with pytest.raises(ValueError, match="matrix of floats"):
        Int8Weight.quantize(drawn(4))
    with pytest.raises(ValueError, match="needs a group with a `proj_rank`"):
        Apollo([{"params": [weight]}, {"params": [drawn(4, 4).requires_grad_()], **MINI}])
    with pytest.raises(ValueError, match="max_norm"):
        quantize_weights([nn.Embedding(4, 4, max_norm=1.0)])


def tiny_and_optimizer(tiny_model, *, int8=True, **options):
    """Return a tiny Llama, all of whose matrices are int8, embedding and head included, and its optimizer."""
    model = tiny_model("llama", dtype=torch.bfloat16)
    if int8:
        quantize_weights([each for each in model.modules() if isinstance(each, nn.Linear | nn.Embedding)])
    weights = [param for param in model.parameters() if param.ndim == 2]
    vectors = [param for param in model.parameters() if param.ndim == 1]
    return model, Apollo([{"params": weights, **options}, {"params": vectors}], lr=1e-2, update_gap=3)


def step(model, optimizer, seed, *, in_backward=False):
    ids = torch.randint(0, 40, (4, 16), generator=torch.Generator().manual_seed(seed % 4))
    if in_backward:
        with optimizer.update_in_backward():
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
    else:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return loss.item()


def bits(model):
    return [
        each
        for param in model.parameters()
        for each in ((param.codes, param.low, param.high) if isinstance(param, Int8Weight) else (param,))
    ]


@pytest.mark.parametrize("options", [MINI, {"proj_rank": 4}])
def test_a_model_whose_matrices_are_all_int8_learns_as_one_with_a_master(tiny_model, options):
    """After 80 steps the loss has fallen by at least nine tenths of what it falls with fp32 master weights."""
    fallen = {}
    for int8 in (False, True):
        model, optimizer = tiny_and_optimizer(tiny_model, int8=int8, **options)
        losses = [step(model, optimizer, number) for number in range(80)]
        fallen[int8] = sum(losses[:4]) - sum(losses[-4:])
    assert fallen[False] > 2
    assert fallen[True] > 0.9 * fallen[False]


@pytest.mark.parametrize("options", [MINI, {"proj_rank": 4}])
def test_layerwise_is_bitwise_step_and_resumes_bitwise(tiny_model, options):
    model, optimizer = tiny_and_optimizer(tiny_model, **options)
    layerwise, its_optimizer = tiny_and_optimizer(tiny_model, **options)
    for number in range(5):
        step(model, optimizer, number)
        step(layerwise, its_optimizer, number, in_backward=True)
    assert all(torch.equal(*each) for each in zip(bits(model), bits(layerwise), strict=True))
    resumed, again = tiny_and_optimizer(tiny_model, **options)
    for new, old in zip(bits(resumed), bits(model), strict=True):
        new.data.copy_(old)
    again.load_state_dict(optimizer.state_dict())
    for number in range(5, 9):
        step(model, optimizer, number)
        step(resumed, again, number)
    assert all(torch.equal(*each) for each in zip(bits(model), bits(resumed), strict=True))


@pytest.mark.parametrize("value", [0.0, math.nan])
def test_unusable_gradient_leaves_every_code(value):
    weight = nn.Parameter(Int8Weight.quantize(drawn(40, 200)))
    optimizer = Apollo([weight], lr=0.1, weight_decay=0.5, **MINI)
    before = weight.codes.clone(), weight.low.clone(), weight.high.clone()
    weight.grad = torch.full((40, 200), value)
    optimizer.step()
    assert all(map(torch.equal, before, (weight.codes, weight.low, weight.high)))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("options", [MINI, {"proj_rank": 4}])
def test_update_is_the_wide_update_within_a_level(monkeypatch, options, masked):
    """13: weight decay included; on the CPU and in the masked form for accelerators."""
    monkeypatch.setattr(apollo_update, "on_host", lambda _: not masked)
    weight = nn.Parameter(Int8Weight.quantize(drawn(40, 200)))
    wide = weight.dequantize().requires_grad_()
    for param in (weight, wide):
        param.grad = drawn(40, 200, seed=1)
        Apollo([param], lr=1e-2, weight_decay=0.5, **options).step()
    error = (weight.dequantize() - wide.detach()).double()
    assert (error.abs() <= level(weight) * 1.001).all()
    assert abs(error.mean()) < 3 * error.std() / math.sqrt(error.numel())


def test_the_full_precision_weight_never_exists():
    """A step of 2048 x 4096: beside its state, less than a quarter of the fp32 weight's bytes are ever alive."""
    weight = nn.Parameter(Int8Weight.quantize(drawn(2048, 4096).bfloat16()))
    optimizer = Apollo([weight], **MINI)
    weight.grad = drawn(2048, 4096, seed=1).bfloat16()
    with Ledger() as ledger, ledger.phase("optimizer"):
        optimizer.step()
    assert 0 < ledger.peak_bytes["optimizer"] < 2048 * 4096
    assert sum(tensor.nbytes for tensor in optimizer.state[weight].values()) == 4 * (2 * 4096 + 3)
