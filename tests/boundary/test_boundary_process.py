"""What the operating system says: with boundaries on disk the process really holds all of them but two less."""

import subprocess
import sys
from pathlib import Path

import pytest

from planish.memory import allocator
from planish.memory.far_disk import RING_BYTES

PROGRAM = Path(__file__).with_name("process_layers.py")
LAYERS, NBYTES = 20, 8 * 2**20


def peak(argument):
    done = subprocess.run([sys.executable, PROGRAM, argument], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    nbytes, grads = done.stdout.split()
    return int(nbytes), grads


@pytest.mark.skipif("glibc" not in allocator.describe().split(":")[0], reason="the thresholds are glibc's")
def test_the_process_s_peak_falls_by_all_boundaries_but_two(tmp_path):
    plain_bytes, plain_grads = peak("plain")
    ours_bytes, our_grads = peak(str(tmp_path))
    assert our_grads == plain_grads
    saved_bytes = plain_bytes - (ours_bytes - RING_BYTES)
    assert saved_bytes == pytest.approx((LAYERS - 2) * NBYTES, rel=0.05)
