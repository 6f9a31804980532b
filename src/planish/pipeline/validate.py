"""The validator: a schedule with its communication is refused, with the step and the ranks, unless it runs to its end.

Every action is there exactly once; what an action needs stands before it; all ranks list the collectives in one order;
and nobody waits for ever, whether sends are eager (over at once) or rendezvous (over when the receive is reached, which
also fixes one order of transfers between two ranks). `memory` counts what is alive meanwhile.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Literal

from planish.errors import UsageError
from planish.pipeline.actions import COLLECTIVES, Action, Kind
from planish.pipeline.deadlock import Wait, deadlock
from planish.pipeline.schedule import Schedule, collectives_of, needs, peer, transfer

Sends = Literal["eager", "rendezvous"]


def validate(schedule: Schedule) -> None:
    """Do nothing if `schedule` runs to its end, whatever its passes take.

    Raises:
        UsageError: The first fault, with the step and the ranks.
    """
    _check_complete(schedule)
    _check_needs(schedule)
    _check_collectives(schedule)
    for sends in ("eager", "rendezvous"):
        _check_progress(schedule, sends)


def expected_actions(schedule: Schedule) -> Iterable[Action]:
    """Yield every action that a complete schedule holds."""
    backward = (Kind.I, Kind.W) if schedule.split_backward else (Kind.B,)
    vocabulary = (Kind.IF, *schedule.head.passes, Kind.IB, *collectives_of(schedule)) if schedule.head.shared else ()
    for i in range(schedule.num_microbatches):
        for stage in range(schedule.num_stages):
            for kind in (Kind.F, *backward):
                action = Action(stage, kind, i)
                yield action
                yield from transfer(schedule, action) or ()
        for rank in range(schedule.num_ranks):
            for kind in vocabulary:
                yield Action(rank, kind, i)


def _check_complete(schedule: Schedule) -> None:
    if schedule.num_microbatches < 1:
        raise UsageError(f"`microbatches` must be 1 or more, got {schedule.num_microbatches}.")
    if schedule.stage_ranks[: schedule.num_ranks] != tuple(range(schedule.num_ranks)):
        raise UsageError(f"`stages` must begin with ranks 0, 1, 2, ... in order, got {schedule.stage_ranks}.")
    expected = set(expected_actions(schedule))
    seen: dict[Action, tuple[int, int]] = {}
    for rank, actions in enumerate(schedule.ranks):
        for step, action in enumerate(actions):
            where = f"rank {rank}, step {step}: {action}"
            if action not in expected:
                raise UsageError(
                    f"{where} has no place in {schedule.num_stages} stages, {schedule.num_microbatches} microbatches "
                    f"and head {schedule.head}; remove it."
                )
            if schedule.rank_of(action) != rank:
                raise UsageError(f"{where} belongs to rank {schedule.rank_of(action)}; move it there.")
            if action in seen:
                raise UsageError(f"{where} is there already, at step {seen[action][1]}; remove one of them.")
            seen[action] = rank, step
    if missing := sorted(expected - seen.keys()):
        action = missing[0]
        raise UsageError(f"rank {schedule.rank_of(action)}: {action} is missing, and {len(missing) - 1} more; add it.")


def _check_needs(schedule: Schedule) -> None:
    for rank, actions in enumerate(schedule.ranks):
        position = {action: step for step, action in enumerate(actions)}
        for step, action in enumerate(actions):
            for each in needs(schedule, action):
                if position[each] > step:
                    raise UsageError(
                        f"rank {rank}, step {step}: {action} needs {each}, which comes at step {position[each]}; "
                        "move it before."
                    )


def _check_collectives(schedule: Schedule) -> None:
    lists = [[(step, a) for step, a in enumerate(rank) if a.kind in COLLECTIVES] for rank in schedule.ranks]
    for rank, listed in enumerate(lists):
        for (step, action), (first_step, first) in zip(listed, lists[0], strict=True):
            if (action.kind, action.microbatch) != (first.kind, first.microbatch):
                raise UsageError(
                    f"all ranks must list collectives in one order, but rank {rank} has {action} at step {step} where "
                    f"rank 0 has {first} at step {first_step}; reorder one of them."
                )


def _check_progress(schedule: Schedule, sends: Sends) -> None:
    """Play the lists: a rank arrives at an action and passes it once its partners have arrived at theirs."""
    game = _Game(schedule, sends)
    moving = set(range(schedule.num_ranks))
    while moving:
        moving |= game.move(moving.pop())
    waits = {}
    for rank, actions in enumerate(schedule.ranks):
        step = game.step[rank]
        if step < len(actions) and (absent := game.absent(actions[step])) is not None:
            waits[rank] = Wait(step, actions[step], schedule.rank_of(absent))
    if waits:
        raise deadlock(waits, f" under {sends} sends")


class _Game:
    """Where each rank stands, and what was reached so far."""

    def __init__(self, schedule: Schedule, sends: Sends) -> None:
        self.schedule, self.sends = schedule, sends
        self.step = [0] * schedule.num_ranks
        self.arrived: set[Action] = set()
        self.joined: Counter[tuple[Kind, int]] = Counter()

    def move(self, rank: int) -> set[int]:
        """Advance `rank` until it waits; return the ranks that may go on because of it."""
        woken = set()
        actions = self.schedule.ranks[rank]
        while self.step[rank] < len(actions):
            action = actions[self.step[rank]]
            if action not in self.arrived:
                self.arrived.add(action)
                woken |= self.meet(action)
            if self.absent(action) is not None:
                break
            self.step[rank] += 1
        return woken

    def meet(self, action: Action) -> set[int]:
        """Count `action` in; return the ranks that may wait for it."""
        if action.kind in COLLECTIVES:
            meeting = action.kind, action.microbatch
            self.joined[meeting] += 1
            return set(range(self.schedule.num_ranks)) if self.joined[meeting] == self.schedule.num_ranks else set()
        other = peer(action)
        return {self.schedule.rank_of(other)} if other is not None else set()

    def absent(self, action: Action) -> Action | None:
        """Return an action that must be reached before `action` is over, if there is one."""
        _, kind, i = action
        if kind in COLLECTIVES:
            if self.joined[kind, i] == self.schedule.num_ranks:
                return None
            everyone = (Action(rank, kind, i) for rank in range(self.schedule.num_ranks))
            return next(each for each in everyone if each not in self.arrived)
        if self.sends == "eager" and kind in (Kind.SEND_F, Kind.SEND_B):
            return None
        other = peer(action)
        return None if other is None or other in self.arrived else other
