"""Distributed tensors: local shards count, FSDP2's frees are seen, and fakes agree from the second step on."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from planish.memory.ledger import Ledger

WORLD_SIZE = 4


@pytest.fixture
def mesh():
    """A mesh of four ranks of which this process is the first; collectives leave the data as it is."""
    dist.init_process_group("fake", rank=0, world_size=WORLD_SIZE, store=FakeStore())
    yield init_device_mesh("cpu", (WORLD_SIZE,))
    dist.destroy_process_group()


def test_a_distributed_tensor_counts_as_its_shard(mesh):
    with Ledger() as ledger:
        x = DTensor.from_local(torch.zeros(4, 64), mesh, [Shard(0)])
        assert ledger.live_bytes == 1024
        y = x + 1
        assert ledger.live_bytes == 2048
        whole = y.redistribute(mesh, [Replicate()])
        whole.to_local()
        assert ledger.live_bytes == 2048 + WORLD_SIZE * 1024
        ledger.adopt([x, whole], "parameters", owner="w")
        assert ledger.live_by_category["parameters"] == 1024 + WORLD_SIZE * 1024
        del x, y, whole
    assert ledger.live_bytes == 0


def sharded_steps(run_class, mesh, *, fake):
    with FakeTensorMode() if fake else contextlib.nullcontext(), Ledger() as ledger:
        with ledger.phase("init"):
            run = run_class(attention="causal_without_mask", checkpointed=True, foreach=False)
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            for layer in run.model.model.layers:
                fully_shard(layer, mesh=mesh, mp_policy=policy)
            fully_shard(run.model, mesh=mesh, mp_policy=policy)
            run.optimizer = torch.optim.AdamW(run.model.parameters(), foreach=False)
        memories = []
        with ledger.watch(run.model, head=run.head):
            for step in range(3):
                ledger.start_step(step)
                run.optimizer.zero_grad(set_to_none=True)
                with ledger.phase("forward"):
                    loss = run.model(input_ids=run.ids, labels=run.ids).loss
                with ledger.phase("backward"):
                    loss.backward()
                del loss
                with ledger.phase("optimizer"):
                    torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
                    run.optimizer.step()
                    ledger.adopt(run.state(), "optimizer state", owner="AdamW")
                memories.append(ledger.end_step())
        shards = [each.to_local() for each in run.model.parameters()]
    return memories, ledger, shards


def test_fully_sharded_steps_count_the_same_on_fakes_and_leave_shards_alone(tiny_run, mesh, bytes_of):
    real, ledger, shards = sharded_steps(tiny_run, mesh, fake=False)
    assert ledger.live_by_category["layer working set"] == 0  # whole parameters were freed by resize_
    assert ledger.live_by_category["parameters"] == bytes_of(shards)
    fake, *_ = sharded_steps(tiny_run, mesh, fake=True)
    for ours, theirs in zip(real[1:], fake[1:], strict=True):
        for phase, peak in ours.phases.items():
            assert peak.peak_bytes == theirs.phases[phase].peak_bytes
            assert peak.categories == theirs.phases[phase].categories
