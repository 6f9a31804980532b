"""Measures and crashes in forked processes: they start in milliseconds, since torch is loaded already."""

import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

# OpenMP's threads do not survive a fork: a child that asks for the pool waits for ever.
os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))


def run_in_child(work: Callable[[], Any]) -> Any:
    """Return what `work` returns in a forked process."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, pickle.dumps(work()))
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as answer:
        data = answer.read()
    os.waitpid(child, 0)
    return pickle.loads(data)


def measure_peak(work: Callable[[], object], warm_up: Callable[[], object]) -> int:
    """Return by how many bytes VmHWM rises above what is resident when `work` begins, in a process of its own."""

    def measure() -> int:
        def status(key: str) -> int:
            return int(re.search(rf"{key}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024

        warm_up()  # a forked process pages in the libraries as it goes
        Path("/proc/self/clear_refs").write_text("5")
        before = status("VmRSS")
        work()
        return status("VmHWM") - before

    return run_in_child(measure)


@pytest.fixture
def peak_above_bytes() -> Callable[..., int]:
    """`measure_peak`, for tests."""
    return measure_peak
