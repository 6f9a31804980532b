"""The run folder: who may use it, what a run writes into it, and lines that survive a kill."""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from planish.errors import UsageError, WorldFailed

_LOCK = ".lock"
# What a run writes beside its checkpoints and `run.toml`, which marks a run folder.
_WRITTEN = ("plan.toml", "plan.json", "metrics.jsonl", "memory.jsonl", "report.html", "latest")
_WRITTEN += ("pipeline.json", "pipeline-planned.svg", "pipeline-measured.svg", "lanes.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """A folder that this process alone may write a run into, until `close` or the end of the process.

    Attributes:
        path: The folder.
        resume: The run in it goes on.
        made: Folders that `open_run_folder` made, innermost first.
        lock: Descriptor of the locked file; the lock goes with it.
        leads: This process writes; where several ranks share a run, rank 0 alone.
    """

    path: Path
    resume: bool
    made: tuple[Path, ...] = field(repr=False)
    lock: int = field(repr=False)
    leads: bool = True

    @property
    def run_toml(self) -> Path:
        """The settings of the run; a folder without this file is not a run folder."""
        return self.path / "run.toml"

    @property
    def metrics(self) -> Path:
        """One line per step: loss, speed, memory."""
        return self.path / "metrics.jsonl"

    @property
    def memory(self) -> Path:
        """One line per phase and step: what the bytes were."""
        return self.path / "memory.jsonl"

    @property
    def report(self) -> Path:
        """The run, drawn."""
        return self.path / "report.html"

    @property
    def latest(self) -> Path:
        """Names the newest complete checkpoint."""
        return self.path / "latest"

    @property
    def checkpoints(self) -> Path:
        """One folder per checkpoint."""
        return self.path / "checkpoints"

    def begin(self, *, run_toml: str, plan_toml: str, step: int = 0) -> None:
        """Make the folder this run's, once all that can be refused has been: nothing was changed before.

        A run that goes on at `step` loses the lines beyond it; one that overwrites loses what the earlier run wrote,
        and nothing else.

        Raises:
            WorldFailed: The disk refuses.
        """
        if not self.leads:
            return
        with disk_errors(f"writing the run folder {self.path}"):
            if self.resume:
                cut_lines(self.metrics, step)
                cut_lines(self.memory, step)
                self._forget_excess()
            else:
                self._clear()
            self.checkpoints.mkdir(exist_ok=True)
        self.replan(run_toml=run_toml, plan_toml=plan_toml)

    def replan(self, *, run_toml: str, plan_toml: str) -> None:
        """Note that the run goes on by another plan, and would be resumed with it."""
        if self.leads:
            with disk_errors(f"writing the run folder {self.path}"):
                write_atomically(self.path / "plan.toml", plan_toml)
                write_atomically(self.run_toml, run_toml)

    def close(self) -> None:
        """Let others use the folder; of a run that never began nothing stays, not even its folder's parents."""
        if self.leads and not self.run_toml.exists():
            (self.path / _LOCK).unlink(missing_ok=True)
            _remove_empty(self.made)
        os.close(self.lock)

    def _forget_excess(self) -> None:
        for table in self.path.glob("budget-exceeded*.txt"):  # a rank's own has its number
            table.unlink()

    def _clear(self) -> None:
        self._forget_excess()
        for name in _WRITTEN:
            (self.path / name).unlink(missing_ok=True)
        for checkpoint in [*self.checkpoints.glob("step-*"), *self.checkpoints.glob(".step-*")]:
            shutil.rmtree(checkpoint)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class JsonLines:
    """Appends one JSON object a line; a line is whole in the file, kill or not, once `write` has returned.

    Write a step's line before its checkpoint: a run that goes on from there keeps the lines up to that step.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append `record`.

        Raises:
            WorldFailed: The disk refuses.
        """
        line = memoryview(json.dumps(record).encode() + b"\n")
        with disk_errors(f"writing {self._path}"):
            while line:
                line = line[self._file.write(line) :]

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def open_run_folder(path: Path, *, resume: bool, overwrite: bool) -> RunFolder:
    """Return the folder, locked for this process and otherwise untouched; `begin` makes it the run's.

    Raises:
        UsageError: It holds a run and neither `resume` nor `overwrite` was given (or both), it has no run to resume,
            it holds something that is not a run, another process uses it, or it cannot be written.
    """
    if resume and overwrite:
        raise UsageError("`--resume` and `--overwrite` exclude each other; give the one you mean.")
    made: tuple[Path, ...] = ()
    folder = None
    try:
        _check(path, resume=resume, overwrite=overwrite)
        made = tuple(each for each in (path, *path.parents) if not each.exists())
        path.mkdir(parents=True, exist_ok=True)
        folder = RunFolder(path=path, resume=resume, made=made, lock=_lock(path))
        _check(path, resume=resume, overwrite=overwrite)  # again: another run may have come and gone before the lock
    except BaseException as error:
        if folder is not None:
            folder.close()
        else:
            if isinstance(error, KeyboardInterrupt) and path in made:  # stopped while the lock was being taken
                (path / _LOCK).unlink(missing_ok=True)
            _remove_empty(made)
        if not isinstance(error, OSError):
            raise
        reason = error.strerror or error
        raise UsageError(f"run folder {path} cannot be written: {reason}; set `save.dir` to another one.") from error
    return folder


def follow_run_folder(path: Path, *, resume: bool) -> RunFolder:
    """Return the folder that another rank of the run has opened and writes."""
    return RunFolder(path=path, resume=resume, made=(), lock=os.open(os.devnull, os.O_RDONLY), leads=False)


def cut_lines(path: Path, step: int) -> None:
    """Drop the lines whose `step` is beyond `step`, and those that a kill left torn."""
    if not path.exists():
        return
    kept = path.with_name(f".{path.name}.kept")
    with path.open("rb") as lines, kept.open("wb") as file:
        file.writelines(line for line in lines if _is_kept(line, step))
        file.flush()
        os.fsync(file.fileno())
    kept.replace(path)
    fsync_folder(path.parent)


def write_atomically(path: Path, text: str) -> None:
    """Write `text` so that a reader finds the old file or the new one, whenever the power goes."""
    new = path.with_name(f".{path.name}.new")
    with new.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    fsync_folder(path.parent)


def fsync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def disk_errors(doing: str) -> Iterator[None]:
    """Turn what the disk refuses (full, quota, file too large, gone) into `WorldFailed`."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise WorldFailed(
            f"{doing} failed: {reason}; complete checkpoints are intact, make room and go on with `--resume`."
        ) from error


def _remove_empty(folders: tuple[Path, ...]) -> None:
    with suppress(OSError):  # it was never made, or something else was put there meanwhile
        for folder in folders:
            folder.rmdir()


def _check(path: Path, *, resume: bool, overwrite: bool) -> None:
    if path.exists() and not path.is_dir():
        raise UsageError(f"run folder {path} is a file; set `save.dir` to a folder.")
    holds_run = (path / "run.toml").is_file()
    if holds_run and not (resume or overwrite):
        raise UsageError(f"run folder {path} holds a run; add `--resume` to go on with it or `--overwrite` to lose it.")
    if holds_run:
        return
    if path.is_dir() and any(each.name != _LOCK for each in path.iterdir()):
        raise UsageError(
            f"folder {path} is not empty and not a run folder (it has no run.toml), so nothing in it is touched; "
            "set `save.dir` to another one."
        )
    if resume:
        raise UsageError(f"run folder {path} has no run to resume; leave `--resume` out to start one.")


def _lock(path: Path) -> int:
    lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)
    except BlockingIOError as error:
        holder = os.pread(lock, 20, 0).decode()
        os.close(lock)
        raise UsageError(
            f"run folder {path} is in use by process {holder}; wait for it or set `save.dir` to another one."
        ) from error
    except OSError:
        os.close(lock)
        raise
    return lock


def _is_kept(line: bytes, step: int) -> bool:
    try:
        record = json.loads(line)
    except ValueError:
        return False
    return line.endswith(b"\n") and isinstance(record, dict) and (record.get("step") or 0) <= step
