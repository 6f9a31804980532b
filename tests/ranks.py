"""A pool of gloo processes that tests share: started once, asked often, killed when one fails or hangs."""

import multiprocessing
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SIZE = 4
TIME_OUT_S = 120
_SECOND: dict[int, dist.ProcessGroup] = {}


class RankFailed(Exception):
    """What a rank raised, or that it did not answer."""


class Ranks:
    """Four processes; a function runs on the last `size` of them, so that numbers in the group are not global ones.

    Args:
        folder: Where they meet.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._number = folder, 0
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "torch.distributed"])
        self._start()

    def run(self, function: Callable[..., Any], size: int, **arguments: Any) -> list[Any]:
        """Return what `function(group, **arguments)` returns on each rank; it lives in a file without pytest.

        Raises:
            RankFailed: The traceback of the first rank that failed; the pool is fresh again.
        """
        for pipe in self._pipes[SIZE - size :]:
            pipe.send((function, size, arguments))
        answers = []
        for rank, pipe in enumerate(self._pipes[SIZE - size :]):
            answer = pipe.recv() if pipe.poll(TIME_OUT_S) else (False, f"rank {rank} did not answer")
            if not answer[0]:
                self.close()
                self._start()
                raise RankFailed(answer[1])
            answers.append(answer[1])
        return answers

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()

    def _start(self) -> None:
        self._number += 1
        ends = [self._context.Pipe() for _ in range(SIZE)]
        self._pipes = [mine for mine, _ in ends]
        meeting = str(self._folder / f"meeting-{self._number}")
        self._processes = [
            self._context.Process(target=_serve, args=(theirs, rank, meeting), daemon=True)
            for rank, (_, theirs) in enumerate(ends)
        ]
        for process, (_, theirs) in zip(self._processes, ends, strict=True):
            process.start()
            theirs.close()


def second_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return another group of the same processes, on a rank."""
    return _SECOND[dist.get_world_size(group)]


def _serve(pipe: Any, rank: int, meeting: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=SIZE, timeout=timedelta(seconds=60)
    )
    groups = {size: dist.new_group(list(range(SIZE - size, SIZE))) for size in range(1, SIZE + 1)}
    _SECOND.update({size: dist.new_group(list(range(SIZE - size, SIZE))) for size in range(1, SIZE + 1)})
    while True:
        function, size, arguments = pipe.recv()
        try:
            pipe.send((True, function(groups[size], **arguments)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
