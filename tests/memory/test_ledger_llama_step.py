"""A real transformers model: what is alive after a step, and fakes that count the same to the byte."""

import contextlib
import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from planish.memory.ledger import Ledger


class CheckedLedger(Ledger):
    """A ledger whose categories are added up after every operation."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(func, types, args, kwargs)
        assert sum(self.live_by_category.values()) == self.live_bytes
        return result


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_after_a_step_parameters_gradients_and_optimizer_state_are_alive_and_nothing_else(
    tiny_run, bytes_of, checkpointed, dtype
):
    run = tiny_run(checkpointed=checkpointed, dtype=dtype)
    parameters = list(run.model.parameters())
    with CheckedLedger() as ledger, ledger.watch(run.model, head=run.head):
        for step in range(2):
            ledger.start_step(step)
            run.step(ledger)
            memory = ledger.end_step()
    buffers = bytes_of(run.model.buffers())
    assert {name: nbytes for name, nbytes in ledger.live_by_category.items() if nbytes} == {
        "parameters": bytes_of(parameters),
        "gradients": bytes_of([each.grad for each in parameters]),
        "optimizer state": bytes_of(run.state()),
        "other": buffers,
    }
    assert ledger.live_bytes - buffers == bytes_of([*parameters, *(each.grad for each in parameters), *run.state()])
    assert list(memory.phases) == ["forward", "head", "backward", "optimizer"]
    for peak in memory.phases.values():
        assert sum(peak.categories.values()) == peak.peak_bytes
    del run, parameters
    assert ledger.live_bytes == 0


def test_checkpointing_keeps_one_hidden_state_a_layer(tiny_run):
    peaks = {}
    for checkpointed in (False, True):
        run = tiny_run(checkpointed=checkpointed)
        with Ledger() as ledger, ledger.watch(run.model, head=run.head):
            run.step(ledger)
            peaks[checkpointed] = ledger.end_step().phases["forward"]
    hidden_bytes = run.ids.numel() * 64 * 4
    kept = {held.owner: held.total_bytes for held in peaks[True].owners if "layers.*" in held.owner}
    assert kept["model.layers.*"] == 3 * hidden_bytes
    assert peaks[True].peak_bytes < peaks[False].peak_bytes / 2


def whole_run(run_class, *, fake, **options):
    """Return the records of set-up, three steps (the second from resumed state), evaluation and saving."""
    with FakeTensorMode() if fake else contextlib.nullcontext(), Ledger() as ledger:
        with ledger.phase("init"):
            run = run_class(attention="causal_without_mask", **options)
        memories = [ledger.end_step()]
        with ledger.watch(run.model, head=run.head):
            for step in range(3):
                ledger.start_step(step)
                run.step(ledger)
                if step == 0:
                    with ledger.phase("resume"):
                        run.optimizer.load_state_dict(run.optimizer.state_dict())
                        ledger.adopt(run.state(), "optimizer state", owner="AdamW")
                if step == 2:
                    run.evaluate(ledger)
                    run.save(ledger)
                memories.append(ledger.end_step())
    assert set(ledger.run_peak_bytes) == {"init", "forward", "head", "backward", "optimizer", "eval", "save", "resume"}
    return memories


COMBINATIONS = [
    {"checkpointed": checkpointed, "dtype": dtype, **optimizer}
    for checkpointed, dtype, optimizer in itertools.product(
        (False, True),
        (torch.float32, torch.bfloat16),
        ({"foreach": False}, {"foreach": True}, {"fused": True}),
    )
]
FAST = COMBINATIONS[::5]


@pytest.mark.parametrize(
    "options",
    [pytest.param(each, marks=() if each in FAST else pytest.mark.slow) for each in COMBINATIONS],
    ids=lambda options: "-".join(str(value) for value in options.values()),
)
def test_fakes_count_as_real_tensors_do_to_the_byte(tiny_run, options):
    real, fake = (whole_run(tiny_run, fake=fake, **options) for fake in (False, True))
    for ours, theirs in zip(real, fake, strict=True):
        assert list(ours.phases) == list(theirs.phases)
        for phase, peak in ours.phases.items():
            other = theirs.phases[phase]
            assert (peak.peak_bytes, peak.categories, peak.owners) == (other.peak_bytes, other.categories, other.owners)
        assert [nbytes for _, nbytes, _ in ours.timeline] == [nbytes for _, nbytes, _ in theirs.timeline]
