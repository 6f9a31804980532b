"""What each lane did when in one step: computing, each kind of collective, each way of far memory.

[Note: one step] Every operation of the step passes through Python, which costs microseconds each; so one step is
watched, and none before or after it. What a collective is doing is known to the library alone: gloo tells when most
are done, by the thread that did it. One that does not tell is one that its caller waits for, so it is over when the
next operation begins; what is sent to one rank or received from one is over once it has been waited for.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from planish.memory.lanes import Lane, Span
from planish.train.job import Job
from planish.train.timelines import write_lanes

_COLLECTIVES = {
    "alltoall_base_": "all-to-all",
    "alltoall_": "all-to-all",
    "_allgather_base_": "all-gather",
    "allgather_": "all-gather",
    "allgather_into_tensor_coalesced_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_": "reduce-scatter",
    "reduce_scatter_tensor_coalesced_": "reduce-scatter",
    "allreduce_": "all-reduce",
    "allreduce_coalesced_": "all-reduce",
    "send": "ring",
    "recv_": "ring",
}
_WAITED_FOR = ("send", "recv_")
WATCHED = 3
"""Which of a run's steps is watched."""

_MOST_SPANS = 500


class StepWatch(TorchDispatchMode):
    """Notes, inside it, when this rank computed, and when its collectives and transfers were under way.

    Memory: about a hundred bytes for each collective and transfer of the step, and a fixed number of those.

    Args:
        lanes: Those of far memory, by name.
    """

    def __init__(self, lanes: dict[str, Lane]) -> None:
        super().__init__()
        self._far = lanes
        self._spans: dict[str, list[Span]] = {}
        self._open: list[tuple[str, float, dist.Work | None]] = []
        self._start = 0.0

    def __enter__(self) -> "StepWatch":
        for lane in self._far.values():
            lane.seen = []
        self._start = time.perf_counter()
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._look(time.perf_counter(), last=True)
        for name, lane in self._far.items():
            self._spans[name], lane.seen = lane.seen or [], None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func` and note when."""
        if any(is_traceable_wrapper_subclass_type(each) for each in types):
            return NotImplemented  # it comes back as operations on what is wrapped
        start = time.perf_counter()
        if self._open:
            self._look(start)
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self._begun(func.overloadpacket.__name__, start, result)
        else:
            self._computed(start, time.perf_counter())
        return result

    def spans(self) -> dict[str, list[Span]]:
        """Return when each lane was at work, in seconds since the step began; of very many spans neighbours as one."""
        return {
            name: [(start - self._start, end - self._start) for start, end in thinned(sorted(spans))]
            for name, spans in self._spans.items()
            if spans
        }

    def _computed(self, start: float, end: float) -> None:
        spans = self._spans.setdefault("compute", [])
        if spans and start - spans[-1][1] < end - start:  # a pause shorter than the operation is Python's
            spans[-1] = spans[-1][0], end
        else:
            spans.append((start, end))
            if len(spans) > 4 * _MOST_SPANS:
                spans[:] = thinned(spans, 2 * _MOST_SPANS)

    def _begun(self, name: str, start: float, result: Any) -> None:
        """Note a collective, which may go on."""
        lane = _COLLECTIVES.get(name, "other collectives")
        spans = self._spans.setdefault(lane, [])
        work = dist.Work.unbox(result[-1] if isinstance(result, tuple | list) else result)
        if name in _WAITED_FOR:
            self._open.append((lane, start, work))
            return
        try:
            future = work.get_future()
        except RuntimeError:  # of a kind that does not tell
            self._open.append((lane, start, None))
            return
        future.add_done_callback(lambda _: spans.append((start, time.perf_counter())))

    def _look(self, now: float, *, last: bool = False) -> None:
        """Close what is over; nothing here holds the tensors of what has been waited for."""
        going = []
        for lane, start, work in self._open:
            if last or work is None or work.is_completed():
                self._spans[lane].append((start, now))
            else:
                going.append((lane, start, work))
        self._open = going


@contextmanager
def watched(job: Job, folder: Path, step: int) -> Iterator[None]:
    """Note what each lane does meanwhile, where any is beside the computation; a GPU keeps its own time.

    Raises:
        OSError: The disk refuses.
    """
    alone = job.engine.world.size == 1 and not job.lanes
    if alone or job.engine.device.type != "cpu":
        yield
        return
    with StepWatch(job.lanes) as watch:
        yield
    write_lanes(folder, step, watch.spans())


def thinned(spans: Iterable[Span], most: int = _MOST_SPANS) -> list[Span]:
    """Return at most `most` spans that cover those given, the shortest pauses filled; they are in order of start."""
    found: list[Span] = []
    for start, end in spans:
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    if len(found) <= most:
        return found
    pauses = sorted(after[0] - before[1] for before, after in pairwise(found))
    least = pauses[len(found) - most - 1]
    joined = found[:1]
    for start, end in found[1:]:
        if start - joined[-1][1] <= least:
            joined[-1] = joined[-1][0], end
        else:
            joined.append((start, end))
    return joined
