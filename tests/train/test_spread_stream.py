"""Streamed AdamW over ranks: each rank's shards, in far memory of its own, end as AdamW's; saved and dealt anew."""

from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch

from planish.memory.ledger import Ledger
from planish.methods import AdamW, Plan, StreamAdamW
from planish.train.job import build
from planish.train.loop import train_step
from planish.train.run_folder import follow_run_folder
from planish.train.session import _resume, optimizer_tensors
from planish.train.spread import local
from train.rank_steps import train_and_save


class Silent:
    def note(self, _):
        pass


def state_of(job):
    """Return this rank's part of the optimizer's state."""
    named = optimizer_tensors(job)["optimizer"]
    return {
        f"{param}.{name}": local(each if isinstance(each, torch.Tensor) else each.read()).clone()
        for param, state in named.items()
        for name, each in state.items()
    }


def trained(run, world):
    with ExitStack() as scope:
        job = build(run, scope.enter_context(Ledger()), scope, world)
        losses = [train_step(job, step).loss.hex() for step in (1, 2)]
        weights = [local(param.detach()).clone() for param in job.engine.anatomy.model.parameters()]
        return losses, weights, state_of(job)


def resumed(run, world):
    with ExitStack() as scope:
        job = build(run, scope.enter_context(Ledger()), scope, world)
        assert _resume(job, follow_run_folder(run.save.dir, resume=True), Silent()) == 4
        return state_of(job)


def streamed(folder, **options):
    return Plan(optim=StreamAdamW(disk=2**22, folder=folder, chunk_bytes=3 * 2**12, **options))


def assert_same(ones, others):
    assert ones.keys() == others.keys()
    assert [name for name in ones if not torch.equal(ones[name], others[name])] == []


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"dp": 2, "replicate": 2}, {"dp": 1, "replicate": 2}], ids=str)
@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp32", marks=pytest.mark.slow)])
def test_shards_are_bitwise_those_of_adamw(run_of, tmp_path, ranks, mesh, dtype):
    run = run_of("llama", mesh, ("model.dtype", dtype))

    def work(world):
        return [trained(replace(run, plan=plan), world) for plan in (Plan(), streamed(tmp_path))]

    for (losses, weights, state), ours in ranks(work, **mesh):
        assert ours[0] == losses
        assert all(torch.equal(one, other) for one, other in zip(ours[1], weights, strict=True))
        assert_same(ours[2], state)


def test_shards_updated_in_backward_are_too(run_of, tmp_path, ranks):
    run = run_of("llama", {"dp": 2}, ("model.dtype", "bf16"), ("train.clip", 0))

    def work(world):
        return [trained(replace(run, plan=plan), world) for plan in (Plan(), streamed(tmp_path, in_backward=True))]

    for (losses, weights, state), ours in ranks(work, dp=2):
        assert ours[0] == losses
        assert all(torch.equal(one, other) for one, other in zip(ours[1], weights, strict=True))
        assert_same(ours[2], state)


def test_state_that_two_ranks_saved_is_dealt_to_three(run_of, tmp_path, ranks):
    """Read into far memory as into the device's: a tensor's parts come from several files."""
    two, three = (run_of("llama", {"dp": dp}, ("model.dtype", "bf16")) for dp in (2, 3))
    plans = (streamed(tmp_path), Plan(optim=AdamW()))
    ranks(lambda world: train_and_save(replace(two, plan=plans[0]), world), dp=2)
    for ours, theirs in ranks(lambda world: [resumed(replace(three, plan=plan), world) for plan in plans], dp=3):
        assert_same(ours, theirs)
