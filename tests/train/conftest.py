"""Measures and crashes in forked processes: they start in milliseconds, since torch is loaded already."""

import functools
import os
import pickle
import re
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from planish.comm.world import World, join
from planish.runfile import load
from planish.sections import MeshSection

# OpenMP's threads do not survive a fork: a child that asks for the pool waits for ever.
os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))


def run_in_child(work: Callable[[], Any]) -> Any:
    """Return what `work` returns in a forked process."""
    return answer_of(*start_child(work))


def start_child(work: Callable[[], Any]) -> tuple[int, int]:
    """Fork a process for `work`; return its number and where its answer comes from. Only the main thread may fork."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = (work(), None)
        except BaseException:
            answer = (None, traceback.format_exc())
        with os.fdopen(write, "wb") as file:
            pickle.dump(answer, file)
        os._exit(0)
    os.close(write)
    return child, read


def answer_of(child: int, read: int) -> Any:
    """Return what a child has answered, once it has."""
    with os.fdopen(read, "rb") as answer:
        data = answer.read()
    _, status = os.waitpid(child, 0)
    if not data:
        raise AssertionError(f"a child ended with {os.waitstatus_to_exitcode(status)} and without an answer")
    result, error = pickle.loads(data)
    if error is not None:
        raise AssertionError(f"a child failed:\n{error}")
    return result


def run_ranks(
    work: Callable[[World], Any], *, dp: int = 1, replicate: int = 1, ep: int = 1, timeout_s: float = 60
) -> list[Any]:
    """Return what `work` returns on each of `dp` x `replicate` forked ranks, by rank."""
    size = dp * replicate
    mesh = MeshSection(dp=dp, replicate=replicate, ep=ep, timeout_s=timeout_s)
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]

    def take_part(rank: int) -> Any:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in place.items()})  # noqa: TID251 - as torchrun does
        with join(mesh, device_type="cpu") as world:
            return work(world)

    children = [start_child(functools.partial(take_part, rank)) for rank in range(size)]
    return [answer_of(*child) for child in children]


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


@pytest.fixture
def ranks() -> Callable[..., list[Any]]:
    """`run_ranks`, for tests."""
    return run_ranks


@pytest.fixture
def run_of(model_folder, text_file, tmp_path):
    """Return (family, mesh, *settings) -> a run of twelve rows a step in two microbatches."""

    def make(family="llama", mesh=None, *settings, **config):
        return load(
            None,
            [
                ("model.from", str(model_folder(family, **config))),
                ("model.dtype", "fp32"),
                ("data.train", [str(text_file)]),
                ("data.context", 16),
                ("train.steps", 3),
                ("train.grad_accum", 2),
                ("train.global_tokens", 24 * 16),
                ("train.lr", 1e-2),
                ("save.dir", str(tmp_path / "run")),
                *((f"mesh.{axis}", degree) for axis, degree in (mesh or {}).items()),
                *settings,
            ],
        )

    return make
