"""The simulator: a schedule and its costs in, a timeline with makespan and bubble out; and communication put in place.

Passes of a rank run in the order of its list; transfers and collectives start as soon as their data are there and run
beside the passes, collectives one after another. Events are handled in order of time, so that the order in which things
begin is one global order that all ranks can share.
"""

import heapq
from collections import Counter, defaultdict
from dataclasses import dataclass, replace

from planish.pipeline.actions import COLLECTIVES, PASSES, Action, Kind
from planish.pipeline.costs import Costs
from planish.pipeline.deadlock import Wait, deadlock
from planish.pipeline.schedule import Schedule, collectives_of, contribution, needs, peer, transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A pass (one action), a transfer (a send and its receive) or a collective (one action per rank) in time."""

    start: float
    end: float
    actions: tuple[Action, ...]

    @property
    def is_pass(self) -> bool:
        """Whether a rank computes meanwhile."""
        return self.actions[0].kind in PASSES


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What a schedule does in time.

    Attributes:
        schedule: The passes that ran, in the order in which they ran.
        spans: Passes, transfers and collectives, as they became ready to start.
    """

    schedule: Schedule
    spans: tuple[Span, ...]

    @property
    def makespan(self) -> float:
        """Time from the first start to the last end."""
        return max(span.end for span in self.spans)

    @property
    def busy(self) -> tuple[float, ...]:
        """Time that each rank spends in passes."""
        busy = [0.0] * self.schedule.num_ranks
        for span in self.spans:
            if span.is_pass:
                busy[self.schedule.rank_of(span.actions[0])] += span.end - span.start
        return tuple(busy)

    @property
    def bubble(self) -> float:
        """Share of the ranks' time in which no pass runs."""
        return 1 - sum(self.busy) / (self.makespan * self.schedule.num_ranks)

    def lower(self) -> Schedule:
        """Return the schedule with its communication.

        Sends, receives and collectives go into the lists of all ranks that take part at the same point of one global
        order, and a rank waits only for what is earlier in it: nothing can deadlock, whether sends wait or not.
        """
        lists: list[list[Action]] = [[] for _ in range(self.schedule.num_ranks)]
        for span in self.spans:
            for action in span.actions:
                lists[self.schedule.rank_of(action)].append(action)
        return replace(self.schedule, ranks=tuple(map(tuple, lists)))


def simulate(schedule: Schedule, costs: Costs, *, flexible: bool = False) -> Timeline:
    """Return the timeline of the passes of `schedule`.

    Args:
        schedule: Its communication, if any, is placed anew.
        costs: What passes and transfers take.
        flexible: Before its first backward and after its last forward a rank may run any pass that is ready, the
            earliest of its list first. As many microbatches are in flight as before: none overtakes a backward.

    Raises:
        UsageError: The ranks wait for one another (each with its step), or a pass has no cost.
    """
    return _Simulation(schedule.passes(), costs, flexible).run()


class _Simulation:
    """One run: where each rank stands, what is done, and what ends next."""

    def __init__(self, schedule: Schedule, costs: Costs, flexible: bool) -> None:
        self.schedule, self.costs, self.flexible = schedule, costs, flexible
        self.lists = [list(rank) for rank in schedule.ranks]
        self.bounds = [_flexible_bounds(schedule, rank) if flexible else (0, len(rank)) for rank in schedule.ranks]
        self.step = [0] * schedule.num_ranks
        self.busy = [False] * schedule.num_ranks
        self.done: set[Action] = set()
        self.waiting: defaultdict[Action, set[int]] = defaultdict(set)
        self.spans: list[Span] = []
        self.ends: list[tuple[float, int]] = []
        self.channel_free = 0.0
        self.feeds: dict[tuple[int, Kind], Kind] = {}
        self.contributors: Counter[Kind] = Counter()
        for kind in collectives_of(schedule):
            for rank in range(schedule.num_ranks):
                for each in contribution(schedule, Action(rank, kind, 0)):
                    self.feeds[each.stage, each.kind] = kind
                    self.contributors[kind] += 1
        self.brought: Counter[tuple[Kind, int]] = Counter()

    def run(self) -> Timeline:
        for rank in range(self.schedule.num_ranks):
            self.advance(rank, 0.0)
        while self.ends:
            now, index = heapq.heappop(self.ends)
            self.finish(self.spans[index], now)
        self.check_all_ran()
        ran = replace(self.schedule, ranks=tuple(map(tuple, self.lists)))
        return Timeline(schedule=ran, spans=tuple(self.spans))

    def start(self, begin: float, seconds: float, *actions: Action) -> float:
        span = Span(start=begin, end=begin + seconds, actions=actions)
        heapq.heappush(self.ends, (span.end, len(self.spans)))
        self.spans.append(span)
        return span.end

    def finish(self, span: Span, now: float) -> None:
        self.done.update(span.actions)
        if span.is_pass:
            (action,) = span.actions
            if pair := transfer(self.schedule, action):
                self.start(now, self.costs.send, *pair)
            self.contribute(action, now)
            rank = self.schedule.rank_of(action)
            self.busy[rank] = False
            self.advance(rank, now)
        for action in span.actions:
            for rank in self.waiting.pop(action, ()):
                self.advance(rank, now)

    def contribute(self, action: Action, now: float) -> None:
        kind = self.feeds.get((action.stage, action.kind))
        if kind is None:
            return
        i = action.microbatch
        self.brought[kind, i] += 1
        if self.brought[kind, i] == self.contributors[kind]:
            everyone = (Action(rank, kind, i) for rank in range(self.schedule.num_ranks))
            seconds = self.costs.collective(kind)
            self.channel_free = self.start(max(now, self.channel_free), seconds, *everyone)

    def advance(self, rank: int, now: float) -> None:
        """Start the next pass of `rank` that is ready, if it is free."""
        if self.busy[rank]:
            return
        actions, step = self.lists[rank], self.step[rank]
        for candidate in self.candidates(rank):
            missing = [each for each in needs(self.schedule, actions[candidate]) if each not in self.done]
            if not missing:
                action = actions.pop(candidate)
                actions.insert(step, action)
                self.step[rank], self.busy[rank] = step + 1, True
                self.start(now, self.costs.of(action), action)
                return
            for each in missing:
                self.waiting[each].add(rank)

    def candidates(self, rank: int) -> range:
        """Return the steps of `rank` that may run next, the preferred one first."""
        step, (first_backward, last_forward) = self.step[rank], self.bounds[rank]
        if step < first_backward:
            return range(step, first_backward)
        end = len(self.lists[rank])
        return range(step, end if step > last_forward else min(step + 1, end))

    def check_all_ran(self) -> None:
        waits = {}
        for rank, actions in enumerate(self.lists):
            step = self.step[rank]
            if step < len(actions):
                missing = next(each for each in needs(self.schedule, actions[step]) if each not in self.done)
                waits[rank] = Wait(step, actions[step], self.provider(missing))
        if waits:
            raise deadlock(waits)

    def provider(self, missing: Action) -> int:
        """Return a rank that has to act before `missing` can be done."""
        _, kind, i = missing
        if (send := peer(missing)) is not None:
            return self.schedule.rank_of(send)
        if kind in COLLECTIVES:
            ranks = range(self.schedule.num_ranks)
            brings = ((rank, contribution(self.schedule, Action(rank, kind, i))) for rank in ranks)
            return next(rank for rank, brought in brings if not self.done.issuperset(brought))
        return self.schedule.rank_of(missing)


def _flexible_bounds(schedule: Schedule, actions: tuple[Action, ...]) -> tuple[int, int]:
    """Return the steps of the first backward and of the last forward."""
    first_backward = next(step for step, each in enumerate(actions) if each.kind is schedule.backward)
    last_forward = max(step for step, each in enumerate(actions) if each.kind is Kind.F)
    return first_backward, last_forward
