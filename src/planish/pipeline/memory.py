"""Memory by counting: what is alive on each rank along its list, as numbers of buffers and as bytes.

The order of a rank's actions alone decides, so the counts hold whatever the passes take.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from planish.pipeline.actions import Action, Head, Kind
from planish.pipeline.schedule import Schedule


class Buffer(StrEnum):
    """What a rank holds for one microbatch; all but the first two are the size of a hidden state [T, D]."""

    ACTIVATION = "activation"  # what a stage keeps from its forward to the end of its backward
    SOFTMAX = "softmax"  # the head's own shard, from S to T; nothing where T computes it again
    HIDDEN = "hidden"  # last hidden state on a vocabulary shard, from C0 to T
    HEAD_GRAD = "head-grad"  # its gradient, partial until the barrier, then whole on the last stage's rank
    EMBEDDING = "embedding"  # rows of the embedding, partial until CIF, then whole on the first stage's rank
    EMBEDDING_GRAD = "embedding-grad"  # their gradient, from the first stage's backward to IB
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


def _changes(schedule: Schedule, rank: int) -> Iterator[tuple[Buffer, int, int]]:
    """Yield what each action of `rank` brings to life (+1), then what it ends (-1)."""
    for action in schedule.ranks[rank]:
        begins, ends = _lifetimes(schedule, action)
        yield from ((buffer, action.stage, 1) for buffer in begins)
        yield from ((buffer, action.stage, -1) for buffer in ends)


def _lifetimes(schedule: Schedule, action: Action) -> tuple[list[Buffer], list[Buffer]]:
    """Return what `action` brings to life and what it ends."""
    if action.kind in (Kind.F, Kind.B, Kind.I, Kind.W):
        return _lifetimes_of_stage(schedule, action)
    if action.kind in (Kind.RECV_F, Kind.RECV_B):
        return [Buffer.RECEIVED], []
    return _lifetimes_of_vocabulary(schedule, action)


def _lifetimes_of_stage(schedule: Schedule, action: Action) -> tuple[list[Buffer], list[Buffer]]:
    forward, backward = action.kind is Kind.F, action.kind is schedule.backward
    begins, ends = [], []
    if forward:
        begins.append(Buffer.ACTIVATION)
    if action.kind is schedule.release:
        ends.append(Buffer.ACTIVATION)
    edge = 0 if forward else schedule.num_stages - 1
    if (forward or backward) and action.stage != edge:
        neighbour = action.stage + (-1 if forward else 1)
        if schedule.stage_ranks[neighbour] != schedule.rank_of(action):
            ends.append(Buffer.RECEIVED)
    if schedule.head.shared:
        if forward and action.stage == 0:
            ends.append(Buffer.EMBEDDING)
        if backward and action.stage == schedule.num_stages - 1:
            ends.append(Buffer.HEAD_GRAD)
        if backward and action.stage == 0:
            begins.append(Buffer.EMBEDDING_GRAD)
    return begins, ends


def _lifetimes_of_vocabulary(schedule: Schedule, action: Action) -> tuple[list[Buffer], list[Buffer]]:
    owns_first = action.stage == schedule.stage_ranks[0]
    owns_last = action.stage == schedule.stage_ranks[-1]
    gradient_from = Kind.S if schedule.head is Head.VOCAB_2 else Kind.T
    begins, ends = [], []
    match action.kind:
        case Kind.C0:
            begins.append(Buffer.HIDDEN)
        case Kind.S:
            begins.append(Buffer.SOFTMAX)
        case Kind.T:
            ends += [Buffer.SOFTMAX, Buffer.HIDDEN]
        case Kind.IF:
            begins.append(Buffer.EMBEDDING)
        case Kind.CIF if not owns_first:
            ends.append(Buffer.EMBEDDING)
        case Kind.CIB if not owns_first:
            begins.append(Buffer.EMBEDDING_GRAD)
        case Kind.IB:
            ends.append(Buffer.EMBEDDING_GRAD)
    if action.kind is gradient_from:
        begins.append(Buffer.HEAD_GRAD)
    if schedule.head.shared and action.kind is schedule.head.chain[-1] and not owns_last:
        ends.append(Buffer.HEAD_GRAD)
    return begins, ends
