"""The malloc setting, each time in a process of its own: it holds for the whole process and for good."""

import subprocess
import sys
from pathlib import Path

import pytest

from planish.memory import allocator

FIXED = """
from planish.memory.allocator import fix_malloc_thresholds
print(fix_malloc_thresholds(int({threshold})))
"""

# Blocks of 1 MiB with small ones between them: free heap under a block in use cannot be given back.
FRAGMENTED = """
import sys
import torch
from planish.memory.allocator import fix_malloc_thresholds
from planish.memory.meter import ProcessMeter

if sys.argv[1] == "fixed":
    assert fix_malloc_thresholds().applied
warm = [torch.ones(2**23, dtype=torch.uint8) for _ in range(2)]  # glibc raises its own threshold when these are freed
del warm
meter = ProcessMeter()
large, small = [], []
for _ in range(200):
    large.append(torch.ones(2**20, dtype=torch.uint8))
    small.append(torch.ones(2**10, dtype=torch.uint8))
del large
print(meter.read().resident_bytes - meter.baseline_bytes)
"""


def output_of(code, *arguments):
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


glibc_only = pytest.mark.skipif("glibc" not in allocator.describe().split(":")[0], reason="the thresholds are glibc's")


@glibc_only
def test_the_setting_is_frozen_data_that_says_what_was_done():
    shown = output_of(FIXED.format(threshold=65536))
    assert shown.startswith("MallocSetting(applied=True, threshold_bytes=65536, reason='glibc 2.")


@glibc_only
def test_freed_blocks_go_back_to_the_system():
    kept_bytes = {how: int(output_of(FRAGMENTED, how)) for how in ("default", "fixed")}
    assert kept_bytes["fixed"] < 10 * 2**20
    assert kept_bytes["default"] > 150 * 2**20


def test_elsewhere_it_says_why_not(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    setting = allocator.fix_malloc_thresholds()
    assert not setting.applied
    assert setting.reason == "darwin has no glibc"
    assert allocator.describe() == "darwin has no glibc: freed blocks may stay resident"


def test_a_c_library_without_the_version_is_not_glibc(monkeypatch):
    class Musl:
        """A C library that lacks glibc's names."""

    monkeypatch.setattr(allocator.sys, "platform", "linux")
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: Musl())
    assert allocator.fix_malloc_thresholds().reason == "the C library is not glibc"


@glibc_only
def test_describe_changes_nothing_and_names_the_library():
    assert allocator.describe().startswith("glibc 2.")
    assert "64.0 KiB" in allocator.describe()


# Faults while 64 MiB are made and written, after a first tensor.
FAULTS = """
import resource
import sys
from planish.memory.allocator import ask_for_large_pages
from planish.memory.pages import in_large_pages
if sys.argv[1] == "torch asks":
    ask_for_large_pages()
import torch
torch.ones(1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
block = torch.empty(2**26, dtype=torch.uint8)
if sys.argv[1] == "we ask":
    block = in_large_pages(block)
block.zero_()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

SYSTEM = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(not SYSTEM.is_file() or "[madvise]" not in SYSTEM.read_text(), reason="programs have no choice")
@pytest.mark.parametrize("who", ["torch asks", "we ask"])
def test_large_pages_spare_faults(who, monkeypatch):
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE", raising=False)  # which training in this process has set
    assert int(output_of(FAULTS, who)) < int(output_of(FAULTS, "nobody")) / 8
