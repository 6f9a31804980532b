"""Far tiers: bytes come back as they went, in any order that events give, and failures surface where one waits."""

import contextlib
import ctypes
import errno
import gc
import mmap
import os
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from planish.errors import UsageError, WorldFailed
from planish.memory import far_disk
from planish.memory.far_disk import CHUNK_BYTES, RING_BYTES, disk_tier
from planish.memory.far_host import HostSlab, host_tier, identity_tier
from planish.memory.far_simulated import Clock, dry_tier, simulated_tier, throttled_tier
from planish.memory.happens_before import Journal
from planish.memory.ledger import Ledger

MIB = 2**20


TIERS = {
    "disk": disk_tier,
    "cached": lambda folder, nbytes: disk_tier(folder, nbytes, cached=True),
    "identity": lambda folder, nbytes: identity_tier(nbytes),
    "throttled": lambda folder, nbytes: throttled_tier(HostSlab(nbytes, lock=False), bytes_per_s=4e9),
    "simulated": lambda folder, nbytes: simulated_tier(HostSlab(nbytes, lock=False), Clock(), bytes_per_s=1e9),
}


@pytest.mark.parametrize("kind", TIERS)
@pytest.mark.parametrize("nbytes", [1, 4095, 4096, CHUNK_BYTES, 2 * CHUNK_BYTES + 12345])
def test_bytes_come_back_as_they_went(tmp_path, kind, nbytes):
    tier = TIERS[kind](tmp_path, 32 * MIB)
    pool = tier.slab.cut(nbytes, 3)
    sources = [torch.randint(0, 256, (nbytes,), dtype=torch.uint8) for _ in range(3)]
    regions = [pool.acquire() for _ in sources]
    written = [tier.write(region, source) for region, source in zip(regions, sources, strict=True)]
    targets = [torch.zeros(nbytes, dtype=torch.uint8) for _ in sources]
    read = [tier.read(region, target) for region, target in zip(regions, targets, strict=True)]
    for event in [*written, *read]:
        event.wait()
    assert all(torch.equal(source, target) for source, target in zip(sources, targets, strict=True))
    assert tier.written_bytes == tier.read_bytes == 3 * nbytes
    tier.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64])
def test_every_dtype_keeps_its_bits_not_a_numbers_too(tmp_path, dtype):
    tier = disk_tier(tmp_path, MIB)
    region = tier.slab.cut(8 * 1000, 1).acquire()
    bits = torch.randint(0, 256, (1000 * dtype.itemsize,), dtype=torch.uint8)
    source, target = bits.view(dtype).view(10, 100), torch.empty(10, 100, dtype=dtype)
    tier.write(region, source)
    tier.read(region, target).wait()
    assert torch.equal(target.view(-1).view(torch.uint8), bits)
    tier.close()


def test_a_prefix_of_a_slot_holds_a_shorter_tensor(tmp_path):
    tier = disk_tier(tmp_path, MIB)
    region = tier.slab.cut(MIB, 1).acquire()
    for length in (200_000, 7, 99_999):
        source = torch.randn(length)
        tier.write(region, source).wait()
        target = torch.empty(length)
        tier.read(region, target).wait()
        assert torch.equal(source, target)
    tier.close()


@settings(deadline=None, max_examples=20)
@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=40))
def test_reads_see_the_last_write_before_them_and_writes_wait_for_reads(operations):
    slow = throttled_tier(HostSlab(MIB, lock=False), bytes_per_s=1e9, latency_s=2e-4)
    journal = Journal()
    journal.watch(slow)
    pool = slow.slab.cut(1024, 3)
    regions = [pool.acquire() for _ in range(3)]
    last, reads, writes = {}, [], []
    for number, (which, writing) in enumerate(operations):
        if writing:
            source = torch.full((128,), number)
            writes.append((slow.write(regions[which], source), source))
            last[which] = number
        elif which in last:
            target = torch.empty(128, dtype=torch.int64)
            reads.append((slow.read(regions[which], target), target, last[which]))
    for event, target, expected in reads:
        event.wait()
        assert torch.equal(target, torch.full((128,), expected))
    for event, _ in writes:
        event.wait()
    reads.clear()
    writes.clear()
    slow.close()
    assert journal.races == []


def test_a_caller_does_not_wait_for_a_slow_lane_and_the_time_is_accounted():
    slow = throttled_tier(HostSlab(MIB, lock=False), bytes_per_s=1e12, latency_s=0.1)
    region = slow.slab.cut(MIB // 2, 1).acquire()
    started = time.perf_counter()
    event = slow.write(region, torch.zeros(MIB // 2, dtype=torch.uint8))
    assert time.perf_counter() - started < 0.05
    time.sleep(0.2)
    event.wait()
    assert slow.hidden_fraction > 0.9
    slow.write(region, torch.zeros(MIB // 2, dtype=torch.uint8)).wait()
    assert 0.3 < slow.hidden_fraction < 0.6
    slow.close()


def test_a_pending_write_holds_its_source_and_lets_go_before_it_is_done():
    slow = throttled_tier(HostSlab(MIB, lock=False), bytes_per_s=1e12, latency_s=0.05)
    region = slow.slab.cut(1024, 1).acquire()
    expected = torch.randn(256)
    source = expected.clone()
    deaths = []
    weakref.finalize(source.untyped_storage(), lambda: deaths.append(threading.current_thread()))
    event = slow.write(region, source)
    event.wait()
    assert deaths == []
    del source
    gc.collect()
    assert deaths == [threading.main_thread()]
    target = torch.empty(256)
    slow.read(region, target).wait()
    assert torch.equal(target, expected)
    slow.close()


def test_virtual_time_is_a_list_schedule():
    clock = Clock()
    tier = simulated_tier(HostSlab(MIB, lock=False), clock, bytes_per_s=1000.0)
    regions = [tier.slab.cut(500, 1).acquire() for _ in range(3)]
    source = torch.zeros(500, dtype=torch.uint8)
    events = [tier.write(region, source) for region in regions]
    clock.compute(0.7)
    events[0].wait()
    assert clock.now_s == 0.7
    events[2].wait()
    assert clock.now_s == 1.5
    tier.read(regions[0], source.clone())  # its own lane, from now on
    second = tier.read(regions[1], source.clone())
    second.wait()
    assert clock.now_s == 2.5
    assert tier.hidden_fraction == pytest.approx(1 - (0.8 + 1.0) / 2.5)


def test_the_file_has_no_name_and_its_blocks_are_taken_at_once(tmp_path):
    before = far_disk.os.statvfs(tmp_path).f_bavail
    tier = disk_tier(tmp_path, 64 * MIB)
    assert list(tmp_path.iterdir()) == []
    block = far_disk.os.statvfs(tmp_path).f_frsize
    assert (before - far_disk.os.statvfs(tmp_path).f_bavail) * block > 48 * MIB  # others write here too
    tier.close()


def cached_bytes(tier):
    """Return how many of the file's bytes lie in the page cache."""
    slab = tier.medium
    view = mmap.mmap(slab._fd, slab.capacity_bytes)
    pages = (ctypes.c_ubyte * (slab.capacity_bytes // 4096))()
    anchor = ctypes.c_char.from_buffer(view)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(ctypes.addressof(anchor)), ctypes.c_size_t(len(view)), pages) == 0
    del anchor
    view.close()
    return sum(page & 1 for page in pages) * 4096


@pytest.mark.parametrize("direct", [True, False])
def test_nothing_stays_in_the_page_cache(tmp_path, monkeypatch, direct):
    if not direct:
        monkeypatch.setattr(far_disk, "_go_direct", lambda fd: False)
    with contextlib.nullcontext() if direct else pytest.warns(UserWarning, match="has no direct file access"):
        tier = disk_tier(tmp_path, 8 * MIB)
    region = tier.slab.cut(8 * MIB, 1).acquire()
    tier.write(region, torch.ones(8 * MIB, dtype=torch.uint8))
    target = torch.zeros(8 * MIB, dtype=torch.uint8)
    tier.read(region, target).wait()
    assert target.sum() == 8 * MIB
    assert cached_bytes(tier) == 0
    tier.close()


def test_pages_stay_where_they_are_asked_to(tmp_path):
    tier = disk_tier(tmp_path, 8 * MIB, cached=True)
    region = tier.slab.cut(8 * MIB, 1).acquire()
    tier.write(region, torch.ones(8 * MIB, dtype=torch.uint8)).wait()
    assert cached_bytes(tier) == 8 * MIB
    tier.close()


def test_the_ledger_sees_the_ring_and_nothing_else_of_a_disk(tmp_path):
    with Ledger() as ledger:
        with ledger.category("staging"):
            tier = disk_tier(tmp_path, 32 * MIB)
            pool = tier.slab.cut(8 * MIB, 4)
        assert ledger.live_by_category["staging"] == RING_BYTES
        source = torch.ones(8 * MIB, dtype=torch.uint8)
        before = ledger.live_bytes
        tier.write(pool.acquire(), source).wait()
        assert ledger.live_bytes == ledger.run_peak_bytes["init"] == before
    tier.close()


def test_a_dry_tier_has_the_same_slots_and_staging():
    with Ledger() as ledger:
        tier = dry_tier("disk", 32 * MIB, staging_bytes=RING_BYTES)
        assert ledger.live_bytes == RING_BYTES
        region = tier.slab.cut(8 * MIB, 4).acquire()
        target = torch.zeros(10)
        tier.write(region, torch.ones(10)).wait()
        tier.read(region, target).wait()
        assert not target.any()
        tier.close()


def test_a_folder_in_memory_is_refused(tmp_path):
    if far_disk._filesystem(Path("/dev/shm")) != "tmpfs":
        pytest.skip("no tmpfs here")
    with pytest.raises(UsageError, match=r"`disk` memory in /dev/shm would lie in memory \(tmpfs\); name a folder"):
        disk_tier(Path("/dev/shm"), MIB)


def test_too_little_space_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"`disk` memory of 1048576.00 GiB does not fit in .* GiB free; free some"):
        disk_tier(tmp_path, 2**50)


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"`disk` memory needs an existing folder, got .*missing"):
        disk_tier(tmp_path / "missing", MIB)


@contextlib.contextmanager
def as_nobody(*folders):
    """Be, where this is root, somebody whom the mode of a file concerns and who may enter `folders`."""
    for each in folders:
        each.chmod(0o755)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    folder = tmp_path / "read-only"
    folder.mkdir()
    folder.chmod(0o555)
    refused = pytest.raises(UsageError, match=r"`disk` memory needs a folder it can write, .*: Permission denied")
    with as_nobody(tmp_path, *tmp_path.parents[:2]), refused:
        disk_tier(folder, MIB)


def test_space_that_is_gone_by_then_is_refused(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(far_disk.os, "posix_fallocate", refuse)
    with pytest.raises(UsageError, match=r"could not be taken in .*: No space left on device; free some or ask"):
        disk_tier(tmp_path, MIB)


def test_a_disk_that_fails_says_so_to_whoever_waits_and_to_every_later_reader(tmp_path, monkeypatch):
    tier = disk_tier(tmp_path, MIB)
    region = tier.slab.cut(1000, 1).acquire()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(far_disk.os, "pwrite", full)
    event = tier.write(region, torch.zeros(250))
    sentence = "writing 1000 B of far memory in .* failed: No space left on device; the last checkpoint is intact"
    with pytest.raises(WorldFailed, match=sentence):
        event.wait()
    with pytest.raises(WorldFailed, match=sentence):
        tier.read(region, torch.zeros(250)).wait()
    tier.close()


def test_host_memory_is_no_far_memory_for_a_cpu():
    with pytest.raises(ValueError, match="`host` memory is the device's own on a CPU and lowers no peak there"):
        host_tier(MIB, torch.device("cpu"))


def test_memory_that_cannot_be_locked_is_said():
    if torch.cuda.is_available():
        pytest.skip("it can be locked here")
    with pytest.warns(
        UserWarning, match=r"1.0 MiB of host memory could not be page-locked \(no CUDA device is there\)"
    ):
        HostSlab(MIB, lock=True)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_host_memory_takes_exactly_its_size_and_moves_bytes_beside_the_device():
    tier = host_tier(3 * MIB, torch.device("cuda"))
    region = tier.slab.cut(3 * MIB, 1).acquire()
    source = torch.randn(3 * MIB // 4, device="cuda")
    target = torch.empty_like(source)
    tier.write(region, source)
    tier.read(region, target).wait()
    assert torch.equal(source, target)
    assert tier.medium.view(0, source).is_pinned()
    tier.close()


def test_the_device_s_own_memory_can_be_worked_on_in_place():
    tier = identity_tier(MIB)
    region = tier.slab.cut(4000, 1).acquire()
    tier.write(region, torch.zeros(1000)).wait()
    tier.medium.view(region.offset, torch.empty(1000)).add_(1)
    target = torch.empty(1000)
    tier.read(region, target).wait()
    assert torch.equal(target, torch.ones(1000))
