"""Memory by counting: what is alive on each rank along its list, as numbers of buffers and as bytes.

The order of a rank's actions alone decides, so the counts hold whatever the passes take.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from planish.pipeline.actions import PASSES, Action, Head, Kind
from planish.pipeline.schedule import Schedule


class Buffer(StrEnum):
    """What a rank holds for one microbatch; all but activation and softmax are the size of a hidden state [T, D]."""

    ACTIVATION = "activation"  # what a stage keeps from its forward to the end of its backward
    SOFTMAX = "softmax"  # the head's own shard, from S to T; nothing where T computes it again
    HIDDEN = "hidden"  # last hidden state on a vocabulary shard, from C0 to T
    HEAD_GRAD = "head-grad"  # its gradient, partial until the barrier, then whole on the last stage's rank
    EMBEDDING = "embedding"  # rows of the embedding, partial until CIF, then whole on the first stage's rank
    EMBEDDING_GRAD = "embedding-grad"  # their gradient, from the first stage's backward to IB
    RESULT = "result"  # a hidden state, or its gradient, from the pass that made it to its send or its use on the rank
    RECEIVED = "received"  # a hidden state, or its gradient, between its receive and the pass that uses it


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes.

    Attributes:
        static: Parameters, gradients and optimizer state of each rank.
        activation: What each stage keeps of a microbatch.
        hidden: One hidden state [T, D].
        softmax: A shard's softmax [T, V / p] where it is kept from S to T; 0 where T computes it again.
    """

    static: Sequence[int]
    activation: Sequence[int]
    hidden: int = 0
    softmax: int = 0

    def of(self, buffer: Buffer, stage: int) -> int:
        """Return the bytes of one `buffer`."""
        match buffer:
            case Buffer.ACTIVATION:
                return self.activation[stage]
            case Buffer.SOFTMAX:
                return self.softmax
            case _:
                return self.hidden


def peak_counts(schedule: Schedule) -> tuple[Counter[Buffer], ...]:
    """Return, for each rank, the largest number of each buffer that is alive at once."""
    peaks = []
    for rank in range(schedule.num_ranks):
        live, peak = Counter[Buffer](), Counter[Buffer]()
        for buffer, _, change in _changes(schedule, rank):
            live[buffer] += change
            peak[buffer] = max(peak[buffer], live[buffer])
        peaks.append(peak)
    return tuple(peaks)


def in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Return, for each rank, the largest number of microbatches alive at once, summed over its stages."""
    return tuple(peak[Buffer.ACTIVATION] for peak in peak_counts(schedule))


def in_flight_of_stages(schedule: Schedule) -> tuple[int, ...]:
    """Return, for each stage, the largest number of microbatches alive at once."""
    live, peak = [0] * schedule.num_stages, [0] * schedule.num_stages
    for rank in range(schedule.num_ranks):
        for buffer, stage, change in _changes(schedule, rank):
            if buffer is Buffer.ACTIVATION:
                live[stage] += change
                peak[stage] = max(peak[stage], live[stage])
    return tuple(peak)


def peak_bytes(schedule: Schedule, footprint: Footprint) -> tuple[int, ...]:
    """Return the most bytes that each rank holds at once."""
    peaks = []
    for rank in range(schedule.num_ranks):
        live = peak = footprint.static[rank]
        for buffer, stage, change in _changes(schedule, rank):
            live += change * footprint.of(buffer, stage)
            peak = max(peak, live)
        peaks.append(peak)
    return tuple(peaks)


def enough_microbatches(plan: Callable[[int], Schedule], num_microbatches: int) -> int:
    """Return how many microbatches hold as much at once, on every rank, as `num_microbatches` do: it stops growing.

    Args:
        plan: Microbatches in, schedule with its communication out.
        num_microbatches: Of a step.
    """
    num_ranks = plan(1).num_ranks
    settled = min(num_microbatches, 4 * num_ranks + 9)
    most = _extent(plan(settled))
    fewer = (each for each in (2 * num_ranks + 2, 3 * num_ranks + 2) if each < settled)
    return next((each for each in fewer if _extent(plan(each)) == most), settled)


def holds_no_more(schedule: Schedule, other: Schedule, footprint: Footprint, *, spare: int = 0) -> bool:
    """Return whether no rank holds more with `schedule` than with `other`, whatever its passes take for a moment.

    For each kind of pass, the most that is alive beside one of them is compared.

    Args:
        schedule: What may be taken.
        other: What was planned with.
        footprint: What is alive weighs this.
        spare: What may come on top.
    """
    for rank in range(schedule.num_ranks):
        allowed = _beside_passes(other, rank, footprint)
        found = _beside_passes(schedule, rank, footprint)
        if any(most > allowed.get(kind, 0) + spare for kind, most in found.items()):
            return False
    return True


def _beside_passes(schedule: Schedule, rank: int, footprint: Footprint) -> dict[Kind, int]:
    """Return the most that is alive while a pass of each kind runs."""
    live, found = footprint.static[rank], dict[Kind, int]()
    for action in schedule.ranks[rank]:
        begins, ends = _lifetimes(schedule, action)
        live += sum(footprint.of(buffer, action.stage) for buffer in begins)
        if action.kind in PASSES:
            found[action.kind] = max(live, found.get(action.kind, 0))
        live -= sum(footprint.of(buffer, action.stage) for buffer in ends)
    return found


def _extent(schedule: Schedule) -> tuple[Any, ...]:
    """Return what a schedule holds at most: each kind of buffer, all together, and with weight halves that wait."""
    stages = [1] * schedule.num_stages
    sizes = [Footprint(static=[0] * schedule.num_ranks, activation=stages, hidden=hidden) for hidden in (0, 1)]
    waiting = tuple(_most_with_waiting(schedule, rank) for rank in range(schedule.num_ranks))
    return peak_counts(schedule), *(peak_bytes(schedule, each) for each in sizes), waiting


def _most_with_waiting(schedule: Schedule, rank: int, weight: int = 8) -> int:
    """Return the most buffers of a rank, what waits for a weight half counted `weight` times."""
    live = most = 0
    for action in schedule.ranks[rank]:
        begins, ends = _lifetimes(schedule, action)
        live += len(begins) + weight * ((action.kind is Kind.I) - (action.kind is Kind.W))
        most = max(most, live)
        live -= len(ends)
    return most


def _changes(schedule: Schedule, rank: int) -> Iterator[tuple[Buffer, int, int]]:
    """Yield what each action of `rank` brings to life (+1), then what it ends (-1)."""
    for action in schedule.ranks[rank]:
        begins, ends = _lifetimes(schedule, action)
        yield from ((buffer, action.stage, 1) for buffer in begins)
        yield from ((buffer, action.stage, -1) for buffer in ends)


def _lifetimes(schedule: Schedule, action: Action) -> tuple[list[Buffer], list[Buffer]]:
    """Return what `action` brings to life and what it ends."""
    match action.kind:
        case Kind.F | Kind.B | Kind.I | Kind.W:
            return _lifetimes_of_stage(schedule, action)
        case Kind.SEND_F | Kind.SEND_B:
            return [], [Buffer.RESULT]
        case Kind.RECV_F | Kind.RECV_B:
            return [Buffer.RECEIVED], []
        case Kind.IF | Kind.CIF | Kind.CIB | Kind.IB:
            return _lifetimes_of_embedding(schedule, action)
        case _:
            return _lifetimes_of_head(schedule, action)


def _lifetimes_of_stage(schedule: Schedule, action: Action) -> tuple[list[Buffer], list[Buffer]]:
    begins = [Buffer.ACTIVATION] if action.kind is Kind.F else []
    ends = [Buffer.ACTIVATION] if action.kind is schedule.release else []
    if action.kind is Kind.F:
        before, after = action.stage - 1, action.stage + 1
        from_vocabulary, to_vocabulary = Buffer.EMBEDDING, Buffer.RESULT
    elif action.kind is schedule.backward:
        before, after = action.stage + 1, action.stage - 1
        from_vocabulary, to_vocabulary = Buffer.HEAD_GRAD, Buffer.EMBEDDING_GRAD
    else:
        return begins, ends
    if 0 <= before < schedule.num_stages:
        near = schedule.stage_ranks[before] == schedule.rank_of(action)
        ends.append(Buffer.RESULT if near else Buffer.RECEIVED)
    elif schedule.head.shared:
        ends.append(from_vocabulary)
    if 0 <= after < schedule.num_stages:
        begins.append(Buffer.RESULT)
    elif schedule.head.shared:
        begins.append(to_vocabulary)
    return begins, ends


def _lifetimes_of_embedding(schedule: Schedule, action: Action) -> tuple[list[Buffer], list[Buffer]]:
    """Return what comes and goes of the embedding; the first stage's passes end its rows and begin their gradient."""
    owns_first = action.stage == schedule.stage_ranks[0]
    match action.kind:
        case Kind.IF:
            return [Buffer.EMBEDDING], []
        case Kind.CIF:
            return [], [] if owns_first else [Buffer.EMBEDDING]
        case Kind.CIB:
            return [] if owns_first else [Buffer.EMBEDDING_GRAD], []
        case _:
            return [], [Buffer.EMBEDDING_GRAD]


def _lifetimes_of_head(schedule: Schedule, action: Action) -> tuple[list[Buffer], list[Buffer]]:
    owns_last = action.stage == schedule.stage_ranks[-1]
    begins, ends = [], []
    match action.kind:
        case Kind.C0:
            begins.append(Buffer.HIDDEN)
            if owns_last:
                ends.append(Buffer.RESULT)
        case Kind.S:
            begins.append(Buffer.SOFTMAX)
        case Kind.T:
            ends += [Buffer.SOFTMAX, Buffer.HIDDEN]
    if action.kind is (Kind.S if schedule.head is Head.VOCAB_2 else Kind.T):
        begins.append(Buffer.HEAD_GRAD)
    if action.kind is schedule.head.chain[-1] and not owns_last:
        ends.append(Buffer.HEAD_GRAD)
    return begins, ends
