"""Checkpoints that are written behind training: the same bytes, whatever happens meanwhile the last one is whole."""

import dataclasses
import errno
import json
import os
import signal
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch

from forks import start_child
from planish.comm.world import ALONE
from planish.errors import WorldFailed
from planish.memory.ledger import Ledger
from planish.runfile import load as load_run
from planish.train import behind as behind_module
from planish.train.behind import BLOCKS, Behind, at_once, open_behind, room_for
from planish.train.checkpoint import latest
from planish.train.predict import price, read_table
from planish.train.run_folder import follow_run_folder
from planish.train.session import _Records
from train.rank_steps import next_losses, train_and_save

ROOM = 2**16


def idle(behind):
    while behind.busy:
        time.sleep(0.001)


def manifest(folder, step):
    """Return what a checkpoint's files of tensors are, by name."""
    tree = json.loads((folder / "checkpoints" / f"step-{step:08d}" / "manifest.json").read_text())
    return {name: each["sha256"] for name, each in tree["files"].items() if name.endswith(".safetensors")}


def saving(run, path, **changes):
    save = dataclasses.replace(run.save, dir=path, every=1, keep=9, **changes)
    return dataclasses.replace(run, save=save)


def test_bytes_of_a_tensor_are_those_of_the_array(tmp_path):
    """The way that a device's bytes take, here from the host."""
    drawn = torch.arange(3 * ROOM + 5, dtype=torch.int32).view(torch.uint8)
    behind = Behind(torch.empty(ROOM, dtype=torch.uint8))
    for name, opened in (("at-once", at_once), ("behind", behind.file)):
        with opened(tmp_path / name) as file:
            file.write(b"head")
            file.write(drawn)
    idle(behind)
    assert behind.error is None
    behind.stop()
    assert {(tmp_path / name).read_bytes() for name in ("at-once", "behind")} == {b"head" + drawn.numpy().tobytes()}


def test_the_room_is_page_locked_for_cuda_as_long_as_the_thread_lives(monkeypatch):
    """CUDA's calls, written down by one that is not there."""
    calls = []

    class Runtime:
        def cudaHostRegister(self, at, nbytes, flags):  # noqa: N802 - CUDA's
            calls.append(("lock", at, nbytes))
            return 0

        def cudaHostUnregister(self, at):  # noqa: N802 - CUDA's
            calls.append(("unlock", at, threads()))

    def threads():
        return sum(each.name == "planish-checkpoint" for each in threading.enumerate())

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    room, before = torch.empty(ROOM, dtype=torch.uint8), threads()
    with ExitStack() as scope:
        open_behind(room, scope, device_type="cuda")
        assert calls == [("lock", room.data_ptr(), ROOM)]
    assert calls[1:] == [("unlock", room.data_ptr(), before)]
    with ExitStack() as scope:
        open_behind(room, scope, device_type="cpu")
    assert len(calls) == 2


def test_files_are_what_was_written_in_less_room(tmp_path):
    block = ROOM // BLOCKS
    rng = np.random.default_rng(0)
    files = [
        [rng.integers(0, 256, size, dtype=np.uint8) for size in sizes]
        for sizes in ([], [0, 1], [block - 1, block, block + 1], [5 * ROOM + 3, 7])
    ]
    behind = Behind(torch.empty(ROOM, dtype=torch.uint8))
    for i, parts in enumerate(files):
        for folder, opened in (("at-once", at_once), ("behind", behind.file)):
            path = tmp_path / f"{folder}-{i}"
            with opened(path) as file:
                for part in parts:
                    copy = part.copy()
                    file.write(copy)
                    copy[:] = 0
                file.write(b"end")
    idle(behind)
    behind.stop()
    assert behind.error is not None
    for i in range(len(files)):
        assert (tmp_path / f"behind-{i}").read_bytes() == (tmp_path / f"at-once-{i}").read_bytes()


def test_after_an_error_nothing_is_done_and_nobody_waits(tmp_path):
    behind = Behind(torch.empty(ROOM, dtype=torch.uint8))
    with behind.file(tmp_path / "missing" / "file") as file:
        file.write(np.zeros(3 * ROOM, dtype=np.uint8))
    done = []
    behind.then(lambda: done.append(1))
    idle(behind)
    assert isinstance(behind.error, FileNotFoundError)
    assert not done
    behind.stop()


@pytest.mark.parametrize("mesh", [{}, {"dp": 2}])
def test_a_run_saves_the_same_bytes_and_goes_on(run_of, ranks, tmp_path, mesh):
    run = run_of("llama", mesh, ("model.dtype", "bf16"))
    waits = saving(run, tmp_path / "waits")
    goes_on = saving(run, tmp_path / "goes-on", host=ROOM)
    for each in (waits, goes_on):
        ranks(lambda world, each=each: train_and_save(each, world), **mesh)
    for step in (1, 2, 3):
        found = manifest(goes_on.save.dir, step)
        assert found == manifest(waits.save.dir, step)
        assert found
    later = [dataclasses.replace(each, train=dataclasses.replace(run.train, steps=5)) for each in (waits, goes_on)]
    first, second = (ranks(lambda world, each=each: next_losses(each, world, held_out=False), **mesh) for each in later)
    assert first == second


def test_training_goes_on_while_the_disk_is_slow(run_of, ranks, tmp_path, monkeypatch):
    """Steps end and the checkpoint does not count, until its files are durable."""
    run = saving(run_of("llama", None, ("train.steps", 4)), tmp_path / "run", host=2**24)
    run = dataclasses.replace(run, save=dataclasses.replace(run.save, every=2))
    released, durable, seen = threading.Event(), behind_module._make_durable, {}

    def slow(file):
        released.wait()
        durable(file)

    monkeypatch.setattr(behind_module, "_make_durable", slow)

    def work(world):
        step = _Records.step

        def noted(self, report):
            step(self, report)
            folder = run.save.dir / "checkpoints"
            seen[report.step] = sorted(path.name for path in folder.glob("step-*"))
            if report.step == 3:
                released.set()

        monkeypatch.setattr(_Records, "step", noted)
        train_and_save(run, world)
        return seen, sorted(path.name for path in (run.save.dir / "checkpoints").iterdir())

    [(found, at_end)] = ranks(work)
    assert found[3] == []
    assert at_end == ["step-00000002", "step-00000004"]


def test_a_kill_while_writing_leaves_the_checkpoint_before(run_of, tmp_path, monkeypatch):
    run = saving(run_of("llama"), tmp_path / "run", host=2**24)
    durable, second = behind_module._make_durable, tmp_path / "second"

    def stuck(file):
        if "step-00000002" in Path(f"/proc/self/fd/{file.fileno()}").readlink().parts[-2]:
            second.touch()
            threading.Event().wait()
        durable(file)

    monkeypatch.setattr(behind_module, "_make_durable", stuck)
    child, read = start_child(lambda: train_and_save(run, ALONE))
    os.close(read)
    until = time.monotonic() + 60
    while not second.exists() and time.monotonic() < until:
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    folder = follow_run_folder(run.save.dir, resume=True)
    assert (folder.checkpoints / ".step-00000002.partial").is_dir()
    assert latest(folder).step == 1
    assert [path.name for path in folder.checkpoints.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize("mesh", [{}, {"dp": 2}])
def test_what_the_disk_refuses_stops_every_rank_at_the_next_step(run_of, ranks, tmp_path, monkeypatch, mesh):
    run = saving(run_of("llama", mesh), tmp_path / "run", host=2**24)
    failing = mesh.get("dp", 1) - 1

    def work(world):
        durable = behind_module._make_durable

        def full(file):
            if world.rank == failing and "step-00000002" in str(Path(f"/proc/self/fd/{file.fileno()}").readlink()):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            durable(file)

        monkeypatch.setattr(behind_module, "_make_durable", full)
        with pytest.raises(WorldFailed) as raised:
            train_and_save(run, world)
        return str(raised.value)

    for said in ranks(work, **mesh):
        assert said.startswith(f"saving step-00000002 failed on rank {failing}: No space left on device; complete")
    assert [path.name for path in (run.save.dir / "checkpoints").iterdir()] == ["step-00000001"]


def test_the_room_is_on_the_books_and_in_the_price():
    run = load_run(None, [("model.from", "smollm2-135m"), ("data.train", "builtin:english"), ("data.context", 64)])
    with_room = saving(run, run.save.dir, host=2**20)
    with Ledger() as ledger:
        room = room_for(with_room.save.host, ledger)
        assert ledger.live_bytes == 2**20 == room.nbytes
        assert ledger.end_step().phases["init"].categories == {"staging": 2**20}
    table = read_table(run)
    without, found = price(run, table), price(with_room, table)
    for phase, each in found.phases.items():
        assert each.peak_bytes == without.phases[phase].peak_bytes + 2**20
        assert sum(each.categories.values()) == each.peak_bytes


def test_too_little_room_is_refused(run_of):
    with pytest.raises(ValueError, match=r'`save.host` must be at least "64KiB", got 100 bytes'):
        saving(run_of("llama"), Path("run"), host=100)
