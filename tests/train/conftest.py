"""Measures, crashes and ranks in forked processes."""

import functools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forks import answers_of, launched_store, run_in_child, start_child
from planish.comm.world import World, join
from planish.runfile import load
from planish.sections import MeshSection


def run_ranks(
    work: Callable[[World], Any],
    *,
    dp: int = 1,
    replicate: int = 1,
    ep: int = 1,
    vp: int = 1,
    cp: int = 1,
    pp: int = 1,
    timeout_s: float = 60,
) -> list[Any]:
    """Return what `work` returns on each of `dp` x `replicate` x `pp` forked ranks, by rank."""
    size = dp * replicate * pp
    mesh = MeshSection(dp=dp, replicate=replicate, ep=ep, vp=vp, cp=cp, pp=pp, timeout_s=timeout_s)

    def take_part(port: int, rank: int) -> Any:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "TORCHELASTIC_USE_AGENT_STORE": True}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in place.items()})  # noqa: TID251 - as torchrun does
        with join(mesh, device_type="cpu") as world:
            return work(world)

    with launched_store() as port:
        children = [start_child(functools.partial(take_part, port, rank)) for rank in range(size)]
        return answers_of(children)


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
