"""No order of threads can break a step: every access is ordered by an event, and leaving one out is found."""

import pytest

from planish.memory.far_host import HostSlab
from planish.memory.far_simulated import Clock, simulated_tier
from planish.memory.happens_before import Journal
from planish.peaks.boundary.parked import Parked
from planish.price.boundary import slot_bytes

NBYTES = 3 * 5 * 16 * 4


@pytest.fixture
def watched(make_store):
    """Return a store whose lanes, and whose user, are watched."""

    def make(slots=6, every=1):
        tier = simulated_tier(HostSlab(slots * slot_bytes(NBYTES), lock=False), Clock(), bytes_per_s=1e6)
        journal = Journal()
        journal.watch(tier)
        store = make_store(tier=tier, slots=slots, every=every)
        unpack = store._unpack

        def used(packed):
            tensor = unpack(packed)
            journal.touch(tensor, writes=False)
            return tensor

        store._unpack = used
        return store, journal

    return make


def train(model, store, kind, *, steps=3, in_flight=1):
    checkpoints = [store.checkpoint(index, kind) for index in range(len(model.layers))]
    for step in range(steps):
        losses = [model(model.tokens(seed=step + each), checkpoints) for each in range(in_flight)]
        for loss in losses:
            loss.backward(retain_graph=True)
            loss.backward()
        del loss, losses


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("in_flight", [1, 3])
@pytest.mark.parametrize("slots", [2, 6, 12])
def test_steps_that_reuse_slots_have_no_race(stack, watched, kind, every, in_flight, slots):
    store, journal = watched(slots, every)
    train(stack(), store, kind, in_flight=in_flight)
    assert store.num_offloaded
    assert journal.races == []


def test_a_source_that_is_dropped_before_it_has_left_is_found(stack, watched, kind, monkeypatch):
    monkeypatch.setattr(Parked, "leave", lambda parked: setattr(parked, "_tensor", None))
    store, journal = watched()
    train(stack(), store, kind, steps=1)
    assert any("a write by caller is not ordered after a read by simulated out" in race for race in journal.races)


def test_a_boundary_that_is_used_before_it_is_back_is_found(stack, watched, kind, monkeypatch):
    def again(parked, label):
        parked.fetch(label)
        (tensor, _), parked._fetched = parked._fetched, None
        return tensor

    monkeypatch.setattr(Parked, "again", again)
    store, journal = watched()
    train(stack(), store, kind, steps=1)
    assert any("a read by caller is not ordered after a write by simulated in" in race for race in journal.races)
