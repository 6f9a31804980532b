"""The one place that knows torch's private loop over actions, which passes ours through beside its own."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from typing import Any, Protocol

import torch
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime

from planish.errors import UsageError
from planish.pipeline.actions import Action, Kind
from planish.pipeline.run.stages import EmbeddingStage, HeadStage, LayersStage
from planish.pipeline.schedule import Schedule

_TESTED = "2.13."
# What never waits for another rank.
_FREE = frozenset({Kind.RECV_F, Kind.RECV_B, Kind.IF, Kind.W})
_TORCHS = frozenset({Kind.F, Kind.B, Kind.I, Kind.W, Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B})


class OfMicrobatch(Protocol):
    """A pass of the vocabulary, or half of one of its transfers."""

    def __call__(self, i: int, /) -> None:
        """Do it for microbatch `i`."""
        ...


class Half(StrEnum):
    """An action that the lists of a schedule do not have.

    [Note: barriers in two halves] A barrier gathers, computes and reduces. C1 starts the gather, and the host goes on
    with what waits for no other rank; before anything else it does the rest. Later would be too late: a rank that
    waits for a hidden state, its own sum not begun, may wait for one who waits for that sum.
    """

    C1 = "C1-"


def check_torch() -> None:
    """Refuse another torch than the one whose loop this was made for.

    Raises:
        UsageError: Its version.
    """
    if not torch.__version__.startswith(_TESTED):
        raise UsageError(
            f"pipelines run on the action loop of torch {_TESTED}x, which is private and changes; this is torch "
            f"{torch.__version__}, so install torch=={_TESTED}*."
        )


class Dispatch(_PipelineScheduleRuntime):
    """A schedule, lowered, on torch's loop: F, B, I, W and receives are torch's, all others are what `ours` holds.

    Args:
        schedule: With its communication; `validate` has let it through.
        stages: This rank's.
        ours: The passes of the vocabulary and their transfers; the second half of C1 among them.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Sequence[LayersStage | EmbeddingStage | HeadStage],
        ours: Mapping[Kind | Half, OfMicrobatch],
    ) -> None:
        super().__init__(stages=list(stages), n_microbatches=schedule.num_microbatches, scale_grads=False)
        self._schedule = schedule
        layers = {stage.stage_index: stage for stage in stages if isinstance(stage, LayersStage)}
        functions: dict[Any, Any] = {kind: partial(_run, does) for kind, does in ours.items()}
        functions |= {_ComputationType(kind): partial(_send, layers, kind) for kind in (Kind.SEND_F, Kind.SEND_B)}
        self._comp_type_to_function_map = functions
        self.pipeline_order_with_comms = {rank: list(_lower(schedule, rank)) for rank in range(schedule.num_ranks)}
        places = schedule.stage_ranks
        self.stage_index_to_group_rank = dict(enumerate((places[0], *places, places[-1])))
        for stage in stages:
            stage.stage_index_to_group_rank = self.stage_index_to_group_rank

    def run(self) -> None:
        """Run every action of this rank."""
        size = self._schedule.num_microbatches
        with _unlogged():
            self._step_microbatches([()] * size, [{}] * size, return_outputs=False)

    def _initialize_stages(self, *_: Any, **__: Any) -> None:
        """Do nothing: our stages make each buffer when it is needed."""


def _lower(schedule: Schedule, rank: int) -> Iterator[_Action]:
    """Yield the actions of `rank` as torch's, those of the ends of the pipeline and second halves among them."""
    last = schedule.num_stages - 1
    halves: list[_Action] = []
    for action in schedule.ranks[rank]:
        stage, kind, i = action
        if kind not in _FREE:
            yield from halves
            halves.clear()
        if kind is Kind.C1:
            halves.append(_Action(stage + 1, Half.C1, i))  # type: ignore[arg-type]
        if kind is Kind.F and stage == 0:
            yield _Action(0, _ComputationType.FORWARD, i)
        if kind is schedule.backward and stage == last:
            yield _Action(last + 2, _ComputationType.FULL_BACKWARD, i)
        yield _of_torch(action)
        if kind is Kind.F and stage == last:
            yield _Action(last + 2, _ComputationType.FORWARD, i)
        if kind is schedule.backward and stage == 0:
            yield _Action(0, _ComputationType.FULL_BACKWARD, i)
    yield from halves


def _of_torch(action: Action) -> _Action:
    stage, kind, i = action
    return _Action(stage + 1, _ComputationType(kind) if kind in _TORCHS else kind, i)  # type: ignore[arg-type]


def _run(does: OfMicrobatch, action: _Action, _context: Any) -> None:
    assert action.microbatch_index is not None
    does(action.microbatch_index)


def _send(stages: Mapping[int, LayersStage], kind: Kind, action: _Action, _context: Any) -> None:
    assert action.microbatch_index is not None
    stages[action.stage_index].send(kind, action.microbatch_index)


@contextmanager
def _unlogged() -> Iterator[None]:
    """Keep torch from logging the whole schedule where an action fails: the error itself says what is wrong."""
    logger = logging.getLogger(_PipelineScheduleRuntime.__module__)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
