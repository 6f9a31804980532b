"""The race finder finds the races of the field's bug reports on a CPU, where none of them would ever happen."""

import pytest
import torch

from planish.memory.far import FarTier
from planish.memory.far_host import HostSlab
from planish.memory.far_simulated import Clock, VirtualLane
from planish.memory.happens_before import Journal


class Forgetful(FarTier):
    """A tier that orders nothing: the later transfer on a region knows nothing of the earlier."""

    def write(self, region, source):
        region.last_read = region.last_write = None
        return super().write(region, source)

    def read(self, region, target):
        region.last_write = None
        return super().read(region, target)


@pytest.fixture
def watched():
    def make(kind=FarTier):
        clock = Clock()
        lanes = {name: VirtualLane(clock, bytes_per_s=1e9) for name in ("outward", "inward")}
        tier = kind("far", HostSlab(2**16, lock=False), **lanes)
        journal = Journal()
        journal.watch(tier)
        return tier, journal, tier.slab.cut(1024, 2)

    return make


def test_a_proper_round_is_silent(watched):
    tier, journal, pool = watched()
    region = pool.acquire()
    for _ in range(3):
        source, target = torch.randn(256), torch.empty(256)
        tier.write(region, source).wait()
        del source
        tier.read(region, target).wait()
        journal.touch(target, writes=False)
        del target
    assert journal.races == []


def test_a_source_freed_while_it_is_copied(watched):
    tier, journal, pool = watched()
    source = torch.randn(256)
    tier.write(pool.acquire(), source)
    del source
    assert len(journal.races) == 1
    assert "a write by caller is not ordered after a read by far out" in journal.races[0]


def test_a_source_overwritten_while_it_is_copied(watched):
    tier, journal, pool = watched()
    source = torch.randn(256)
    event = tier.write(pool.acquire(), source)
    journal.touch(source, writes=True)
    event.wait()
    assert len(journal.races) == 1


def test_a_target_used_before_it_has_come(watched):
    tier, journal, pool = watched()
    region, source, target = pool.acquire(), torch.randn(256), torch.empty(256)
    tier.write(region, source).wait()
    event = tier.read(region, target)
    journal.touch(target, writes=False)
    event.wait()
    assert "a read by caller is not ordered after a write by far in" in journal.races[0]


def test_a_target_freed_before_it_has_come(watched):
    tier, journal, pool = watched()
    region, source, target = pool.acquire(), torch.randn(256), torch.empty(256)
    tier.write(region, source).wait()
    tier.read(region, target)
    del target
    assert len(journal.races) == 1


def test_a_slot_written_again_while_it_is_read_from_the_step_before(watched):
    for kind, races in ((FarTier, 0), (Forgetful, 2)):
        tier, journal, pool = watched(kind)
        region, first, second, target = pool.acquire(), torch.randn(256), torch.randn(256), torch.empty(256)
        tier.write(region, first)
        read = tier.read(region, target)
        write = tier.write(region, second)
        read.wait()
        write.wait()
        assert len(journal.races) == races, kind


def test_slots_that_do_not_overlap_need_no_order(watched):
    tier, journal, pool = watched(Forgetful)
    source, target = torch.randn(256), torch.empty(256)
    events = [tier.write(pool.acquire(), source), tier.read(pool.acquire(), target)]
    for event in events:
        event.wait()
    assert journal.races == []
