"""Files written behind training: a thread takes them to the disk from host memory of a fixed size."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Queue, SimpleQueue
from threading import Thread
from typing import IO, Protocol

import numpy as np
import torch
from torch import Tensor

from planish.memory.far_host import page_locked
from planish.memory.ledger import Ledger

BLOCKS = 8

Data = bytes | np.ndarray | Tensor
"""Bytes, [N]; a tensor's may be on a device."""


class Sink(Protocol):
    """A file that is written from its beginning to its end."""

    def write(self, data: Data, /) -> object:
        """Take bytes, which are the caller's again when this returns."""
        ...


Files = Callable[[Path], AbstractContextManager[Sink]]
"""Opens a file, which is durable some time after it is closed."""


@contextmanager
def at_once(path: Path) -> Iterator[Sink]:
    """Yield a file that is durable when it is closed.

    Raises:
        OSError: The disk refuses.
    """
    with path.open("wb") as file:
        yield _AtOnce(file)
        _make_durable(file)


@dataclass(frozen=True, slots=True)
class _AtOnce:
    """A file that takes bytes as they come."""

    file: IO[bytes]

    def write(self, data: Data, /) -> None:
        """Write `data`."""
        self.file.write(data.cpu().numpy() if isinstance(data, Tensor) else data)


class Behind:
    """A thread that writes files, and the memory in which their bytes wait for it.

    Who writes waits only while all of the memory is full, so that it bounds what is held and not what is written. After
    an error nothing more is done; the memory is free again all the same, and `error` says why.

    Memory: `room`, in eight blocks.

    Args:
        room: Bytes on the host.

    Attributes:
        error: What the disk refused; None while all is well.
    """

    def __init__(self, room: Tensor) -> None:
        self.error: Exception | None = None
        self._free: SimpleQueue[np.ndarray] = SimpleQueue()
        for block in room.numpy()[: len(room) // BLOCKS * BLOCKS].reshape(BLOCKS, -1):
            self._free.put(block)
        self._waiting: Queue[Callable[[], object] | None] = Queue()
        self._thread = Thread(target=self._run, name="planish-checkpoint", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether anything is left to do."""
        return self._waiting.unfinished_tasks > 0

    def then(self, work: Callable[[], object]) -> None:
        """Do `work` once all before it is done, unless that has failed."""
        self._waiting.put(lambda: work() if self.error is None else None)

    @contextmanager
    def file(self, path: Path) -> Iterator[Sink]:
        """Yield a file that is durable once the thread is no longer busy."""
        file = _File(path, self)
        self.then(file.open)
        try:
            yield file
        finally:
            file.flush()
            self._waiting.put(file.close)

    def block(self) -> np.ndarray:
        """Return memory to fill, [N], once there is some."""
        return self._free.get()

    def hand_over(self, block: np.ndarray, length: int, use: Callable[[np.ndarray], object]) -> None:
        """Let the thread `use` the first `length` bytes of a block, which is free again then."""
        self.then(partial(use, block[:length]))
        self._waiting.put(partial(self._free.put, block))

    def stop(self) -> None:
        """End the thread; what has not been done is left."""
        self.error = self.error or InterruptedError("the run ended")
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._waiting.get()) is not None:
            try:
                work()
            except Exception as error:  # of any kind: training asks for it
                self.error = self.error or error
            self._waiting.task_done()


class _File:
    """One file of `Behind`."""

    def __init__(self, path: Path, behind: Behind) -> None:
        self._path, self._behind = path, behind
        self._file: IO[bytes] | None = None
        self._block: np.ndarray | None = None
        self._filled = 0

    def write(self, data: Data, /) -> None:
        """Copy `data` for the thread; a device's go straight to the block, which is page-locked for it."""
        left = data if isinstance(data, Tensor) else np.frombuffer(data, dtype=np.uint8)
        while len(left):
            if self._block is None:
                self._block = self._behind.block()
            room = self._block[self._filled :][: len(left)]
            part, left = left[: len(room)], left[len(room) :]
            if isinstance(part, Tensor):
                torch.from_numpy(room).copy_(part)
            else:
                room[:] = part
            self._filled += len(room)
            if self._filled == len(self._block):
                self.flush()

    def flush(self) -> None:
        """Hand over what has been copied."""
        if self._block is not None:
            self._behind.hand_over(self._block, self._filled, self._write)
            self._block, self._filled = None, 0

    def open(self) -> None:
        """Create the file, on the thread."""
        self._file = self._path.open("wb")

    def close(self) -> None:
        """Make it durable where all of it is there, on the thread."""
        if self._file is not None:
            with self._file:
                if self._behind.error is None:
                    _make_durable(self._file)

    def _write(self, part: np.ndarray) -> None:
        assert self._file is not None
        self._file.write(part)


def open_behind(room: Tensor, scope: ExitStack, *, device_type: str) -> Behind:
    """Return a thread that writes files by way of `room`, until `scope` closes.

    Args:
        room: Bytes on the host.
        scope: Ends the thread.
        device_type: Where the tensors are that will be written; for "cuda" `room` is page-locked meanwhile.
    """
    if device_type == "cuda":
        scope.enter_context(page_locked(room))
    behind = Behind(room)
    scope.callback(behind.stop)
    return behind


def room_for(nbytes: int | None, ledger: Ledger) -> Tensor | None:
    """Return the host memory of `save.host`, on the books; None without it."""
    if nbytes is None:
        return None
    with ledger.phase("init"):
        room = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    ledger.adopt(room, "staging", owner="checkpoint")
    return room


def _make_durable(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
