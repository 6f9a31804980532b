"""Every byte of APOLLO is a formula: state, the step's buffers, and what the ledger sees at the step's peak."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from planish.memory.ledger import Ledger
from planish.optim import Apollo
from planish.price.apollo import CPU_BLOCK, MatrixShape, making_bytes, workspace_bytes

SHAPES = [(300, 1200), (1200, 300), (300, 300), (4, 200, 700), (1500, 700)]
METHODS = {
    "mini": {"proj_rank": 1, "granularity": "tensor"},
    "rank 64": {"proj_rank": 64, "granularity": "channel"},
    "reset": {"proj_rank": 16, "granularity": "channel", "refresh": "reset"},
}


def make(method, dtype, master):
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in SHAPES]
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(dtype)
    return params, Apollo(params, lr=1e-3, master=master, **METHODS[method])


def state_bytes(optimizer):
    return sum(tensor.nbytes for state in optimizer.state.values() for tensor in state.values())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("dtype", "master"), [
    (torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, False),
])  # fmt: skip
def test_state_is_the_formula_and_exists_before_the_first_step(method, dtype, master):
    options = METHODS[method]
    params, optimizer = make(method, dtype, master)
    narrow = dtype != torch.float32
    expected = sum(
        MatrixShape.of(shape).state_bytes(
            options["proj_rank"], refresh=options.get("refresh", "keep"), master=master and narrow
        )
        for shape in SHAPES
    )
    assert state_bytes(optimizer) == expected
    before = {name: tensor.data_ptr() for name, tensor in optimizer.state[params[0]].items()}
    optimizer.step()
    assert state_bytes(optimizer) == expected
    assert {name: tensor.data_ptr() for name, tensor in optimizer.state[params[0]].items()} == before


def test_the_papers_formulas_hold_up_to_the_counters():
    """Table 1: 2 n r + 2 numbers for APOLLO and 2 n + 2 for Mini, here and with the step count."""
    assert MatrixShape.of((768, 2048)).state_bytes(192) == 4 * (2 * 2048 * 192 + 2 + 1)
    assert MatrixShape.of((2048, 768)).state_bytes(1) == 4 * (2 * 2048 + 2 + 1)


def peak_of_a_step(*make_arguments):
    with Ledger() as ledger:
        params, optimizer = make(*make_arguments)
        ledger.start_step(1)
        held = ledger.live_bytes
        with ledger.phase("optimizer"):
            optimizer.step()
        assert ledger.live_bytes == held
        assert len(params) == len(SHAPES)
    return ledger.peak_bytes["optimizer"] - held


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("dtype", "master"), [
    (torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, False),
])  # fmt: skip
def test_peak_of_a_step_is_the_workspace_and_no_temporary_of_a_weights_size(method, dtype, master):
    """Above the formula there are six numbers a channel, or the words of the projection that is being made."""
    options, narrow = METHODS[method], dtype != torch.float32
    matrices = [MatrixShape.of(shape) for shape in SHAPES]
    expected = workspace_bytes(
        matrices,
        options["proj_rank"],
        by_channel=options["granularity"] == "channel",
        narrow_grad=narrow,
        narrow_weight=narrow and not master and options["granularity"] == "channel",
    )
    making = making_bytes(max(each.dim for each in matrices), options["proj_rank"], normal=False)
    moment = max(4 * 6 * max(each.channels for each in matrices), making)
    peak = peak_of_a_step(method, dtype, master)
    assert expected <= peak <= expected + moment
    with FakeTensorMode():
        assert peak_of_a_step(method, dtype, master) == peak


def test_block_bounds_what_is_copied_whatever_the_weight():
    large = MatrixShape.of((8192, 4096))
    assert workspace_bytes([large], 1, by_channel=False, narrow_grad=True) == 4 * (4096 + 2 * 8192 + CPU_BLOCK)
