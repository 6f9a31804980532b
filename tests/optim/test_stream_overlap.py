"""The list schedule on a clock that is told, the order of every transfer, and what a step does not wait for."""

import threading

import pytest
import torch

from planish.memory.far_simulated import Clock, VirtualLane
from planish.memory.happens_before import Journal
from planish.memory.lanes import ThreadLane
from planish.optim import StreamAdamW
from planish.peaks.optim import stream_adamw

CHUNK_BYTES = 2**14
NUMEL = 2**11  # fp32 numbers of a chunk: two arrays


def stream(num_chunks, slots):
    param = torch.zeros(num_chunks * NUMEL, requires_grad=True)
    optimizer = StreamAdamW([param], chunk_bytes=CHUNK_BYTES, slots=slots, engine="device")
    assert len(optimizer.chunks) == num_chunks
    return param, optimizer


@pytest.mark.parametrize("num_chunks", [1, 2, 3, 8, 21])
@pytest.mark.parametrize("slots", [1, 2, 3, 4])
@pytest.mark.parametrize(("u", "k", "d"), [(1, 1, 1), (3, 1, 2), (1, 4, 1), (2, 1, 5), (4, 1, 4), (2, 3, 0.5)])
def test_the_makespan_is_the_formula(monkeypatch, num_chunks, slots, u, k, d):
    clock = Clock()
    param, optimizer = stream(num_chunks, slots)
    (tier,) = optimizer.tiers
    tier.inward, tier.outward = (VirtualLane(clock, bytes_per_s=CHUNK_BYTES / seconds) for seconds in (u, d))
    real = stream_adamw.update

    def update(*args, **kwargs):
        real(*args, **kwargs)
        clock.compute(k)

    monkeypatch.setattr(stream_adamw, "update", update)
    for _ in range(3):  # the first step fetches nothing: there is nothing yet
        started_s = clock.now_s
        param.grad = torch.ones_like(param)
        optimizer.step()
        returned_s = clock.now_s
        optimizer.settle()
        took_s = clock.now_s - started_s
    total, period = u + k + d, max(u, k, d, (u + k + d) / slots if slots < num_chunks else 0)
    expected_s = total + (num_chunks - 1) * period
    assert took_s <= expected_s + 1e-9
    if slots >= min(num_chunks, 3) or slots == 1:  # two of many take turns unevenly, and never longer
        assert took_s == pytest.approx(expected_s)
    assert returned_s <= clock.now_s - d + 1e-9  # the last write-back is under way when the step returns


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("in_backward", [False, True])
def test_no_transfer_races_with_another_or_with_the_update(monkeypatch, slots, in_backward):
    journal = Journal()
    param, optimizer = stream(9, slots)
    (tier,) = optimizer.tiers
    journal.watch(tier)
    real = stream_adamw.update

    def update(chunk, arrays, *args, **kwargs):
        real(chunk, arrays, *args, **kwargs)
        for array in arrays.values():
            journal.touch(array, writes=True)

    monkeypatch.setattr(stream_adamw, "update", update)
    for _ in range(4):
        if in_backward:
            with optimizer.update_in_backward():
                param.square().sum().backward()
        else:
            param.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert optimizer.state[param]["exp_avg"].read().shape == param.shape
    assert journal.races == []
    assert tier.written_bytes == 4 * 9 * CHUNK_BYTES


def test_a_slot_that_is_filled_before_it_is_written_back_would_be_found(monkeypatch):
    """The order that the schedule asks for, left out."""
    journal = Journal()
    param, optimizer = stream(9, 2)
    (tier,) = optimizer.tiers
    real = tier.read
    monkeypatch.setattr(tier, "read", lambda region, target, after=(): real(region, target))
    journal.watch(tier)
    for _ in range(2):
        param.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert journal.races


def test_a_step_returns_while_its_last_chunks_are_still_on_their_way(monkeypatch):
    param, optimizer = stream(5, 3)
    (tier,) = optimizer.tiers
    gate = threading.Event()
    tier.inward, tier.outward = ThreadLane("in"), ThreadLane("out")
    real, left = tier.medium.store, iter(range(2 * 2))

    def store(offset, source):
        if next(left, None) is None:
            assert gate.wait(timeout=60)
        real(offset, source)

    monkeypatch.setattr(tier.medium, "store", store)
    param.square().sum().backward()
    optimizer.step()  # three chunks of five cannot be written back yet
    before = tier.medium.view(0, torch.empty(NUMEL)).clone()
    gate.set()
    optimizer.settle()
    assert before.shape == (NUMEL,)
    assert torch.equal(optimizer.state[param]["exp_avg"].read(), torch.zeros_like(param))
    optimizer.close()


def test_lane_times_and_bytes_are_told(far):
    param = torch.ones(2**14, requires_grad=True)
    optimizer = StreamAdamW([param], **far["disk"])
    for _ in range(2):
        param.square().sum().backward()
        optimizer.step()
        optimizer.settle()
    traffic = optimizer.traffic
    assert {name: each.nbytes for name, each in traffic.items()} == {
        "optim-disk-out": 2 * 8 * 2**14, "optim-disk-in": 8 * 2**14, "optim-update": 0,
    }  # fmt: skip
    assert all(each.busy_s > 0 for each in traffic.values())
