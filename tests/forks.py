"""Work in forked processes: they start in milliseconds, since torch is loaded already."""

import os
import pickle
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.distributed import TCPStore

# OpenMP's threads do not survive a fork: a child that asks for the pool waits for ever.
os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))


def run_in_child(work: Callable[[], Any]) -> Any:
    """Return what `work` returns in a forked process."""
    return answers_of([start_child(work)])[0]


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


def answers_of(children: list[tuple[int, int]]) -> list[Any]:
    """Return what each child has answered; where one fails or takes too long, all end, with their stacks on stderr."""
    try:
        return [answer_of(*child) for child in children]
    except BaseException:
        for child, _ in children:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(child, signal.SIGABRT)
                os.waitpid(child, 0)
        raise


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


@contextmanager
def launched_store() -> Iterator[int]:
    """Yield the port of a store as a launcher keeps it: in a process of its own, since no fork survives its thread."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(write, str(store.port).encode())
        os.close(write)
        while True:
            signal.pause()
    os.close(write)
    try:
        with os.fdopen(read) as answer:
            port = int(answer.read())
        yield port
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
