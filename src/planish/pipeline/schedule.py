"""Schedules as data: a tuple of actions per rank, what each action waits for, and the text that people edit.

"The paper", here and in the rest of the room, is Vocabulary Parallelism, arXiv 2411.05288.
"""

import re
from dataclasses import dataclass, replace
from typing import Self

from planish.errors import UsageError
from planish.pipeline.actions import COLLECTIVES, PASSES, Action, Head, Kind

_HEADER = re.compile(
    r"(?P<name>\S+) head=(?P<head>\S+) microbatches=(?P<microbatches>\d+) backward=(?P<backward>whole|split) "
    r"stages=(?P<stages>\d+(?:,\d+)*)"
)
_ONLY_BACKWARD = frozenset({Kind.B, Kind.I, Kind.W, Kind.T, Kind.C2, Kind.CIB, Kind.IB, Kind.SEND_B, Kind.RECV_B})


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The actions of one step.

    Attributes:
        name: What it is called, such as "1f1b".
        head: Where the vocabulary layers live.
        num_microbatches: Microbatches of the step.
        stage_ranks: The rank of each stage; stage d lives on rank d for the first of them.
        split_backward: Whether backward runs as I and W rather than as B.
        ranks: The lists, one per rank: passes alone, or with their communication.
    """

    name: str
    head: Head
    num_microbatches: int
    stage_ranks: tuple[int, ...]
    split_backward: bool = False
    ranks: tuple[tuple[Action, ...], ...]

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline."""
        return len(self.ranks)

    @property
    def num_stages(self) -> int:
        """Stages over all ranks."""
        return len(self.stage_ranks)

    @property
    def backward(self) -> Kind:
        """The pass that hands a gradient to the stage before."""
        return Kind.I if self.split_backward else Kind.B

    @property
    def release(self) -> Kind:
        """The pass after which a stage's activations are free."""
        return Kind.W if self.split_backward else Kind.B

    def rank_of(self, action: Action) -> int:
        """Return the rank whose list holds `action`."""
        return self.stage_ranks[action.stage]

    def passes(self) -> Self:
        """Return the schedule without its communication."""
        return replace(self, ranks=tuple(tuple(a for a in rank if a.kind in PASSES) for rank in self.ranks))

    def to_text(self) -> str:
        """Return a header and a line of actions per rank, which `from_text` reads back."""
        header = (
            f"{self.name} head={self.head} microbatches={self.num_microbatches} "
            f"backward={'split' if self.split_backward else 'whole'} stages={','.join(map(str, self.stage_ranks))}"
        )
        lines = (f"rank {rank}: {' '.join(map(str, actions))}".rstrip() for rank, actions in enumerate(self.ranks))
        return "\n".join([header, *lines, ""])

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Return the schedule that `to_text` printed and somebody may have edited; `validate` says whether it runs.

        Raises:
            UsageError: A header that is not one, a word that is no action, or stages on ranks that have no line.
        """
        header, *lines = text.strip().splitlines() or [""]
        match = _HEADER.fullmatch(header.strip())
        if match is None or match["head"] not in set(Head):
            raise UsageError(
                f"a schedule begins with `NAME head={'|'.join(Head)} microbatches=M backward=whole|split "
                f"stages=RANK,RANK,...`, got {header!r}."
            )
        stage_ranks = tuple(map(int, match["stages"].split(",")))
        if sorted(set(stage_ranks)) != list(range(len(lines))):
            raise UsageError(f"`stages` names ranks {sorted(set(stage_ranks))}, but {len(lines)} ranks have a line.")
        return cls(
            name=match["name"],
            head=Head(match["head"]),
            num_microbatches=int(match["microbatches"]),
            stage_ranks=stage_ranks,
            split_backward=match["backward"] == "split",
            ranks=tuple(_parse_line(rank, line) for rank, line in enumerate(lines)),
        )


def _parse_line(rank: int, line: str) -> tuple[Action, ...]:
    prefix, colon, words = line.partition(":")
    if not colon or prefix.split() != ["rank", str(rank)]:
        raise UsageError(f"the line of rank {rank} begins with `rank {rank}:`, got {line[:40]!r}.")
    actions = []
    for step, word in enumerate(words.split()):
        try:
            actions.append(Action.parse(word))
        except ValueError as error:
            raise UsageError(f"rank {rank}, step {step}: {error}") from error
    return tuple(actions)


def check_sizes(**sizes: int) -> None:
    """Raise a UsageError unless every size is 1 or more."""
    for name, size in sizes.items():
        if size < 1:
            raise UsageError(f"`{name}` must be 1 or more, got {size}.")


def needs(schedule: Schedule, action: Action) -> tuple[Action, ...]:
    """Return what must be done on the same rank before `action` starts (paper section 5.1, figure 8).

    Between ranks, a receive also waits for its send, and a collective for all ranks. IF waits for the rows before the
    last ones to have left, so that a rank holds the rows of two microbatches at most (appendix C).
    """
    stage, kind, i = action
    match kind:
        case Kind.F:
            return _needs_of_forward(schedule, stage, i)
        case Kind.B | Kind.I:
            return (Action(stage, Kind.F, i), *_needs_of_backward(schedule, stage, kind, i))
        case Kind.W:
            return (Action(stage, Kind.I, i),)
        case Kind.SEND_F:
            return (Action(stage, Kind.F, i),)
        case Kind.SEND_B:
            return (Action(stage, schedule.backward, i),)
        case Kind.RECV_F | Kind.RECV_B:
            return ()
        case Kind.IF:
            return (Action(stage, Kind.CIF, i - 2),) if i >= 2 else ()
        case Kind.IB:
            return (Action(stage, Kind.CIB, i),)
        case Kind.S | Kind.E | Kind.T:
            before = schedule.head.passes.index(kind)
            return (Action(stage, (Kind.C0, *schedule.head.barriers)[before], i),)
        case _:
            return contribution(schedule, action)


def contribution(schedule: Schedule, action: Action) -> tuple[Action, ...]:
    """Return the pass whose result this rank brings to the collective `action`; nothing where it only receives."""
    rank, kind, i = action
    last = schedule.num_stages - 1
    match kind:
        case Kind.CIF:
            return (Action(rank, Kind.IF, i),)
        case Kind.C0:
            return (Action(last, Kind.F, i),) if rank == schedule.stage_ranks[last] else ()
        case Kind.CIB:
            return (Action(0, schedule.backward, i),) if rank == schedule.stage_ranks[0] else ()
        case _:
            return (Action(rank, schedule.head.passes[schedule.head.barriers.index(kind)], i),)


def transfer(schedule: Schedule, action: Action) -> tuple[Action, Action] | None:
    """Return the send and the receive that carry the result of a stage's pass to another rank, if it goes there."""
    stage, kind, i = action
    if kind is Kind.F:
        other, send = stage + 1, Action(stage, Kind.SEND_F, i)
    elif kind is schedule.backward:
        other, send = stage - 1, Action(stage, Kind.SEND_B, i)
    else:
        return None
    if not 0 <= other < schedule.num_stages or schedule.stage_ranks[other] == schedule.stage_ranks[stage]:
        return None
    receive = peer(send)
    assert receive is not None
    return send, receive


def peer(action: Action) -> Action | None:
    """Return the receive that belongs to a send, or the send that belongs to a receive."""
    stage, kind, i = action
    match kind:
        case Kind.SEND_F:
            return Action(stage + 1, Kind.RECV_F, i)
        case Kind.RECV_F:
            return Action(stage - 1, Kind.SEND_F, i)
        case Kind.SEND_B:
            return Action(stage - 1, Kind.RECV_B, i)
        case Kind.RECV_B:
            return Action(stage + 1, Kind.SEND_B, i)
        case _:
            return None


def collectives_of(schedule: Schedule) -> tuple[Kind, ...]:
    """Return the collectives that each microbatch passes through, in order."""
    if not schedule.head.shared:
        return ()
    return (Kind.CIF, *(kind for kind in schedule.head.chain if kind in COLLECTIVES), Kind.CIB)


def _needs_of_forward(schedule: Schedule, stage: int, i: int) -> tuple[Action, ...]:
    if stage == 0:
        return (Action(0, Kind.CIF, i),) if schedule.head.shared else ()
    if schedule.stage_ranks[stage - 1] == schedule.stage_ranks[stage]:
        return (Action(stage - 1, Kind.F, i),)
    return (Action(stage, Kind.RECV_F, i),)


def _needs_of_backward(schedule: Schedule, stage: int, kind: Kind, i: int) -> tuple[Action, ...]:
    rank = schedule.stage_ranks[stage]
    if stage == schedule.num_stages - 1:
        return (Action(rank, schedule.head.chain[-1], i),) if schedule.head.shared else ()
    if schedule.stage_ranks[stage + 1] == rank:
        return (Action(stage + 1, kind, i),)
    return (Action(stage, Kind.RECV_B, i),)


def forward_only(schedule: Schedule) -> Schedule:
    """Return the forward half of `schedule`, which runs to its end as the whole does: nothing of it needs the rest."""
    kept = (tuple(each for each in rank if each.kind not in _ONLY_BACKWARD) for rank in schedule.ranks)
    return replace(schedule, ranks=tuple(kept))
