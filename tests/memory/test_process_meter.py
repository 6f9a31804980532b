"""The process meter against memory that is really touched."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from planish.memory import meter
from planish.memory.meter import ProcessMeter

MIB = 2**20


def test_the_peak_rises_with_what_is_touched_and_starts_anew_on_reset():
    ours = ProcessMeter()
    assert ours.baseline_bytes > 50 * MIB  # torch alone
    held = torch.ones(100 * MIB, dtype=torch.uint8)
    reading = ours.read()
    assert reading.resident_bytes - ours.baseline_bytes > 90 * MIB
    assert reading.peak_bytes == reading.resident_peak_bytes >= reading.resident_bytes
    assert reading.device_peak_bytes is None
    del held
    assert ours.read().resident_peak_bytes == pytest.approx(reading.resident_peak_bytes, abs=MIB)
    if not ours.resettable:
        pytest.skip("this kernel does not reset VmHWM")
    ours.reset()
    assert ours.read().resident_peak_bytes < reading.resident_peak_bytes - 90 * MIB


def test_a_kernel_that_refuses_the_reset_is_told_apart(monkeypatch, tmp_path):
    monkeypatch.setattr(meter, "_CLEAR_REFS", tmp_path / "no" / "clear_refs")
    ours = ProcessMeter()
    assert ours.resettable is False
    before = ours.read().resident_peak_bytes
    ours.reset()
    assert ours.read().resident_peak_bytes >= before


def test_without_proc_the_peak_is_that_of_getrusage(monkeypatch, tmp_path):
    in_proc = ProcessMeter().read()
    monkeypatch.setattr(meter, "_STATUS", tmp_path / "status")
    reading = ProcessMeter().read()
    assert reading.resident_peak_bytes == pytest.approx(in_proc.resident_peak_bytes, rel=0.5)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_the_allocator_is_read():
    device = torch.device("cuda")
    ours = ProcessMeter(device)
    ours.reset()
    before = ours.read()
    held = torch.ones(100 * MIB, dtype=torch.uint8, device=device)
    reading = ours.read()
    assert reading.device_bytes - before.device_bytes == held.nbytes
    assert reading.peak_bytes == reading.device_peak_bytes >= reading.device_bytes
    assert reading.device_reserved_peak_bytes >= reading.device_peak_bytes
    del held
    ours.reset()
    assert ours.read().device_peak_bytes == before.device_bytes


STEP = """
import sys
import torch
from planish.memory.allocator import fix_malloc_thresholds

setting = fix_malloc_thresholds()
from planish.memory.ledger import Ledger
from planish.memory.meter import ProcessMeter

torch.set_num_threads(1)
sys.path.insert(0, sys.argv[1])
from process_step import train

train(Ledger(), tokens=16, vocab=64)  # kernels, autograd, lazily imported modules
meter = ProcessMeter()
with Ledger() as ledger:
    train(ledger, tokens=4096, vocab=24576)
print(setting.applied, meter.baseline_bytes, meter.read().resident_peak_bytes, max(ledger.run_peak_bytes.values()))
"""


def test_vmhwm_is_the_baseline_and_the_ledgers_peak_within_five_percent():
    """A training step of more than 1 GiB in a process of its own, malloc's thresholds fixed."""
    command = [sys.executable, "-c", STEP, str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 0, done.stderr
    applied, baseline_bytes, peak_bytes, ledger_bytes = done.stdout.split()
    if applied == "False":
        pytest.skip("the thresholds are glibc's")
    assert int(ledger_bytes) > 2**30
    above_bytes = int(peak_bytes) - int(baseline_bytes)
    assert 0.95 * int(ledger_bytes) <= above_bytes <= 1.05 * int(ledger_bytes)
