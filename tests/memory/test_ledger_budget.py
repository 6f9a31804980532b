"""The budget: raised by the operation that goes over, wherever it is, and the ledger goes on counting."""

import gc
import re
import traceback

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from planish.errors import BudgetExceeded
from planish.memory.ledger import Ledger

KIB = 1024


def peaks_of(run):
    ledger = Ledger()
    with ledger, ledger.watch(run.model, head=run.head):
        run.step(ledger)
    return ledger.peak_bytes


@pytest.mark.parametrize("phase", ["forward", "head", "backward", "optimizer"])
def test_each_phase_is_stopped_at_its_budget_and_the_ledger_stays_usable(tiny_run, phase):
    # Not checkpointed, each phase up to backward is higher than the one before; checkpointed, the optimizer is highest.
    checkpointed = phase == "optimizer"
    peaks = peaks_of(tiny_run(checkpointed=checkpointed))
    budget_bytes = peaks[phase] - 1
    assert all(
        each <= budget_bytes for name, each in peaks.items() if list(peaks).index(name) < list(peaks).index(phase)
    )
    run = tiny_run(checkpointed=checkpointed)
    ledger = Ledger(budget_bytes)
    with ledger, ledger.watch(run.model, head=run.head):
        before = ledger.live_bytes
        with pytest.raises(BudgetExceeded) as caught:
            run.step(ledger)
        message = str(caught.value)
        assert message.startswith(f"{phase}: a (")
        assert re.search(r"float32 tensor of .* for `.+` takes the bytes alive to .*, .* over the budget of ", message)
        assert message.count(". ") == 0
        assert message.endswith(".")
        assert "parameters" in caught.value.table
        assert "lm_head.weight" in caught.value.table
        assert ledger.current_phase == "init"
        del caught
        run.optimizer.zero_grad(set_to_none=True)
        run.optimizer.state.clear()
        gc.collect()
        assert ledger.live_bytes == before
        ledger.budget_bytes = peaks[max(peaks, key=peaks.get)]
        ledger.start_step(1)
        run.step(ledger)
        assert {name: ledger.peak_bytes[name] for name in ("forward", "head", "backward", "optimizer")} == {
            name: nbytes for name, nbytes in peaks.items() if name != "init"
        }


def test_one_byte_less_is_too_little_and_the_peak_is_enough():
    for budget_bytes, fits in ((8 * KIB, True), (8 * KIB - 1, False)):
        with Ledger(budget_bytes) as ledger:
            x = torch.zeros(KIB)
            if fits:
                x + 1
            else:
                with pytest.raises(BudgetExceeded, match=r"init: a \(1024,\) float32 tensor of 4.0 KiB for `init`"):
                    x + 1
            assert ledger.live_bytes == 4 * KIB


def test_of_several_results_the_largest_is_named():
    with Ledger(9 * KIB) as ledger, pytest.raises(BudgetExceeded, match=r"int64 tensor of 8\.0 KiB"):
        torch.zeros(KIB).sort()
    assert ledger.live_bytes == 0


def test_the_tensor_that_broke_it_is_freed_at_once_and_shown_in_the_table():
    with Ledger(10 * KIB) as ledger:
        kept = torch.zeros(2 * KIB)
        with pytest.raises(BudgetExceeded) as caught:
            kept + 1
        assert ledger.live_bytes == kept.nbytes
        assert ledger.peak_bytes["init"] == 16 * KIB
        assert caught.value.table.split()[:4] == ["bytes", "alive", "16.0", "KiB"]


def deep(x):
    for _ in range(6):
        x = x.exp()
    return x


def test_recomputation_inside_backward_is_stopped_cleanly():
    x = torch.zeros(KIB, requires_grad=True)
    with Ledger(20 * KIB) as ledger:  # forward holds two tensors at a time, recomputation six
        with ledger.phase("forward"):
            loss = checkpoint(deep, x, use_reentrant=False).sum()
        with ledger.phase("backward"), pytest.raises(BudgetExceeded, match=r"^backward: ") as caught:
            loss.backward()
        frames = {frame.name for frame in traceback.extract_tb(caught.value.__traceback__)}
        assert {"unpack_hook", "deep"} <= frames
        del loss, caught
        gc.collect()
        assert ledger.live_bytes == 0
        ledger.budget_bytes = None
        with ledger.phase("backward"):
            checkpoint(deep, x, use_reentrant=False).sum().backward()
        assert x.grad is not None
        assert ledger.live_bytes == 4 * KIB


def test_an_autograd_function_is_stopped_in_its_backward():
    class Wasteful(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad + torch.zeros(100 * KIB).sum()

    x = torch.zeros(KIB, requires_grad=True)
    with Ledger(100 * KIB) as ledger, ledger.phase("backward"):
        with pytest.raises(BudgetExceeded, match=r"\(102400,\) float32"):
            Wasteful.apply(x).sum().backward()
    assert x.grad is None


def test_adopting_and_growing_go_over_too():
    w = torch.zeros(KIB)
    with Ledger(6 * KIB) as ledger:
        x = torch.zeros(KIB)
        with pytest.raises(BudgetExceeded, match="for `w`"):
            ledger.adopt(w, "parameters", owner="w")
        del w
        with pytest.raises(BudgetExceeded):
            x.resize_(2 * KIB)
        del x
        x = torch.zeros(KIB)
        with pytest.raises(BudgetExceeded):
            x.untyped_storage().resize_(8 * KIB)


def test_a_warning_is_remembered_once():
    with Ledger(6 * KIB, on_exceed="warn") as ledger:
        first = torch.zeros(KIB)
        assert ledger.first_excess is None
        second = first + 1
        excess = ledger.first_excess
        assert excess.sentence.startswith("init: a (1024,) float32 tensor")
        assert "8.0 KiB" in excess.table
        third = second + 1
        assert ledger.first_excess is excess
        assert ledger.live_bytes == 12 * KIB
        del third


def test_a_dry_run_is_held_to_the_budget_as_well():
    with FakeTensorMode(), Ledger(2**40 - 1) as ledger:
        x = torch.zeros(2**37)
        with pytest.raises(BudgetExceeded, match=r"1024.00 GiB"):
            x * 2
        assert ledger.live_bytes == 2**39
