"""One layer's plan as one rank carries it out: what it sends where in which block.

[Note: codes] A route travels as one number, rank * num_experts + expert, for the rank that works on it. Who receives it
finds in a table the slot of an expert at its own desk, or that the route is for another rank.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from planish.peaks.dispatch.least_loaded import Balance, LayerPlan, native_bounds, plan_layer
from planish.peaks.dispatch.pipelined import Load, max_over_mean
from planish.price.dispatch_ranks import Launch

Lending = list[tuple[int, int, int]]
"""(owner, helper, expert) of what is lent in one turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The ranks that share the experts of a layer, and what is fixed at launch.

    Attributes:
        group: Of these ranks alone; they issue the same collectives in the same order.
        num_experts: Of the layer, over all ranks; each holds those of its number in `native_bounds`.
        max_tokens: The most tokens that any rank can have.
        block_rows: Rows that a rank sends or receives at a time.
        balance: How far the load is levelled.
        dry: Tensors are fake: no rank has any route.
    """

    group: dist.ProcessGroup
    num_experts: int
    max_tokens: int
    block_rows: int
    balance: Balance
    dry: bool = False

    @property
    def size(self) -> int:
        """How many ranks."""
        return self.group.size()

    @property
    def rank(self) -> int:
        """This one's number in the group."""
        return self.group.rank()

    @property
    def bounds(self) -> tuple[int, ...]:
        """The first expert of each rank, and the number of experts."""
        return native_bounds(self.num_experts, self.size)

    @property
    def launch(self) -> Launch:
        """What a price needs to know."""
        return Launch(
            num_ranks=self.size,
            num_experts=self.num_experts,
            max_tokens=self.max_tokens,
            block_rows=self.block_rows,
            max_foreign=self.balance.max_foreign,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """What one rank sends, receives and works on in one block.

    Attributes:
        tokens: The token of each row that it sends, by destination; on the host.
        sent: Rows to each rank.
        received: Rows from each rank.
        ends: Where the routes of its experts end that it works on, its own first, in the order of their slots.
    """

    tokens: Tensor
    sent: list[int]
    received: list[int]
    ends: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trip:
    """A layer's routes on their way.

    Attributes:
        codes: [T, K], of this rank's routes.
        slots: [P * E], the slot of each code at this rank's desks, or one past them: for another rank.
        parcels: One for each block, as many on every rank.
        turns: Who lends which expert to whom, one turn after the other.
        foreign: The experts of others that each rank works on, in the order of their slots.
        load: What the router made of the layer.
    """

    codes: Tensor
    slots: Tensor
    parcels: list[Parcel]
    turns: list[Lending]
    foreign: list[list[int]]
    load: Load


def plan_trip(ids: Tensor, ranks: Ranks) -> tuple[Trip, list[Tensor]]:
    """Return the way of this rank's routes, `ids` [T, K], which all ranks plan together, and what was exchanged for it.

    gloo's threads let go of the latter when they come to it; who keeps it for the pass knows what is alive.

    Memory:        4 bytes a route, and for each rank and expert; on the host 4 bytes for each row that there can be.
    Communication: counts of every rank to every rank, 4 bytes times strides times experts; then 4 bytes times strides.

    Raises:
        ValueError: More tokens than `max_tokens`.
    """
    if len(ids) > ranks.max_tokens:
        raise ValueError(f"`max_tokens` is {ranks.max_tokens} and this rank has {len(ids)} tokens; raise it.")
    if ranks.dry:
        return _nowhere(ids, ranks)
    strides, host = ranks.launch.num_strides, ids.cpu().numpy()
    plan, counts = _agree(host, ranks, strides, ids.device)
    holder = _holders(host, plan, ranks, strides)
    codes = torch.from_numpy((holder * np.int32(ranks.num_experts) + host).astype(np.int32))
    foreign, native = plan.foreign(ranks.bounds), range(ranks.bounds[ranks.rank], ranks.bounds[ranks.rank + 1])
    here = [*native, *foreign[ranks.rank]]
    slots = np.full(ranks.size * ranks.num_experts, len(here), np.int32)
    slots[ranks.rank * ranks.num_experts + np.array(here, np.int64)] = np.arange(len(here))
    parcels, sizes = _parcels(holder, plan, ranks, here, ids.device)
    trip = Trip(
        codes=codes.to(ids.device),
        slots=torch.from_numpy(slots).to(ids.device),
        parcels=parcels,
        turns=list(_turns(foreign, ranks.bounds, ranks.launch.num_lent)),
        foreign=foreign,
        load=Load(
            max_over_mean=max_over_mean(plan.loads.sum(0)),
            spilled=plan.spilled(ranks.bounds),
            blocks=len(plan.blocks),
        ),
    )
    return trip, [*counts, *sizes]


def _nowhere(ids: Tensor, ranks: Ranks) -> tuple[Trip, list[Tensor]]:
    """Return a trip without routes, with the tensors of any other."""
    nothing = [0] * ranks.size
    strides, experts = ranks.launch.num_strides, ranks.num_experts
    sizes = (experts, ranks.size * experts, ranks.size, ranks.size)
    exchanged = [ids.new_empty(size * strides, dtype=torch.int32) for size in sizes]
    num_native = ranks.bounds[ranks.rank + 1] - ranks.bounds[ranks.rank]
    parcel = Parcel(tokens=_host_rows(*ids.shape, ranks)[:0], sent=nothing, received=nothing, ends=(0,) * num_native)
    trip = Trip(
        codes=ids.new_zeros(ids.shape, dtype=torch.int32),
        slots=ids.new_zeros(ranks.size * ranks.num_experts, dtype=torch.int32),
        parcels=[parcel],
        turns=[],
        foreign=[[] for _ in range(ranks.size)],
        load=Load(max_over_mean=1.0, spilled=0, blocks=1),
    )
    return trip, exchanged


def _agree(
    host: np.ndarray, ranks: Ranks, strides: int, device: torch.device
) -> tuple[LayerPlan, tuple[Tensor, Tensor]]:
    num_tokens, top_k = host.shape
    flat = (host * strides + (np.arange(num_tokens) % strides)[:, None]).ravel()
    counts = torch.from_numpy(np.bincount(flat, minlength=ranks.num_experts * strides).astype(np.int32)).to(device)
    gathered = torch.empty(ranks.size * len(counts), dtype=torch.int32, device=device)
    dist.all_gather_single(gathered, counts, group=ranks.group)
    table = gathered.cpu().numpy().reshape(ranks.size, ranks.num_experts, strides)
    tokens = table.sum(1, dtype=np.int64) // top_k
    plan = plan_layer(table, tokens, bounds=ranks.bounds, block_rows=ranks.block_rows, balance=ranks.balance)
    return plan, (counts, gathered)


def _holders(host: np.ndarray, plan: LayerPlan, ranks: Ranks, strides: int) -> np.ndarray:
    """Return the rank that works on each route."""
    holder = np.array([each[0][0] if each else 0 for each in plan.shares], np.int32)[host]
    for expert, split in plan.splits.items():
        token, slot = np.nonzero(host == expert)
        stride = token % strides
        order = np.argsort(stride, kind="stable")
        starts = np.searchsorted(stride[order], np.arange(strides))
        occurrence = np.empty_like(token)
        occurrence[order] = np.arange(len(token)) - starts[stride[order]]
        position = split.starts[ranks.rank, stride] + occurrence
        piece = (split.bounds[stride, 1:-1] <= position[:, None]).sum(1)
        holder[token, slot] = np.array(split.ranks, np.int32)[piece]
    return holder


def _parcels(
    holder: np.ndarray, plan: LayerPlan, ranks: Ranks, here: list[int], device: torch.device
) -> tuple[list[Parcel], tuple[Tensor, Tensor]]:
    """Return what goes where, rows in the order of blocks, destinations and tokens; and what was exchanged for it."""
    num_tokens, strides = len(holder), ranks.launch.num_strides
    block_of = np.repeat(np.arange(len(plan.blocks)), [end - first for first, end in plan.blocks])
    member = np.zeros((num_tokens, ranks.size), bool)
    member[np.arange(num_tokens)[:, None], holder] = True
    token, destination = np.nonzero(member)
    key = block_of[token % strides] * ranks.size + destination
    key = key.astype(np.min_scalar_type(strides * ranks.size))  # numpy sorts 16 bits by radix
    rows = _host_rows(num_tokens, holder.shape[1], ranks)[: len(token)]
    rows.numpy()[:] = token[np.argsort(key, kind="stable")]
    sent = np.bincount(key, minlength=strides * ranks.size).reshape(strides, ranks.size)  # at most as many blocks
    mine = torch.from_numpy(np.ascontiguousarray(sent.T).astype(np.int32)).to(device)
    theirs = torch.empty_like(mine)
    dist.all_to_all_single(theirs, mine, group=ranks.group)
    arrivals = np.cumsum(plan.arrivals(ranks.rank)[:, here], 1)
    parts, received = rows.split(sent.sum(1).tolist()), theirs.t().tolist()
    parcels = [
        Parcel(tokens=part, sent=to, received=of, ends=tuple(ends))
        for part, to, of, ends in zip(parts, sent.tolist(), received, arrivals.tolist(), strict=False)
    ]
    return parcels, (mine, theirs)


def _host_rows(num_tokens: int, top_k: int, ranks: Ranks) -> Tensor:
    """Return room for the token of every row that there can be."""
    return torch.empty(num_tokens * min(top_k, ranks.size), dtype=torch.int32, device="cpu")


def _turns(foreign: Sequence[Sequence[int]], bounds: Sequence[int], most: int) -> Iterator[Lending]:
    """Yield what is lent in each turn: a rank takes one expert at most, and gives `most` copies at most."""
    waiting = [
        (int(np.searchsorted(bounds, expert, side="right")) - 1, helper, expert)
        for helper, experts in enumerate(foreign)
        for expert in experts
    ]
    while waiting:
        turn: Lending = []
        given, taken = [0] * len(foreign), [False] * len(foreign)
        for owner, helper, expert in waiting:
            if given[owner] < most and not taken[helper]:
                given[owner] += 1
                taken[helper] = True
                turn.append((owner, helper, expert))
        waiting = [each for each in waiting if each not in turn]
        yield turn
