"""Which rank works on which routes: the same plan on every rank from the same counts, and blocks that no router fills.

[Note: rows and routes] A *route* is one of a token's `top_k` experts. A *row* is a token's hidden state on its way to
one rank, however many of its routes that rank works on; so a rank receives at most one row for each token there is.

[Note: strides] Token `n` of a rank is in stride `n % G`. A block is a few strides in a row: all routes of a token are
in one block, and who is in which block depends on counts alone, so that it is the same when a layer runs again. A rank
receives at most a row for each token of a stride, P * ceil(N / G) of them, which G keeps at most `block_rows` for any
routing. G is prime: a router that repeats itself every so many tokens would otherwise hit the same strides.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np

Counts = np.ndarray[Any, np.dtype[np.int64]]
Shares = tuple[tuple[int, int], ...]
"""Of one expert: (rank, routes that it works on), the owner first where it keeps any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """How far the load is levelled.

    Attributes:
        capacity: A rank takes at most this many times the mean load, where pieces and slots allow.
        min_routes: No smaller piece of an expert is lent, unless it is the last one.
        threshold: Below this ratio of the largest to the mean load of a rank every expert stays at home.
        max_foreign: Experts of others that one rank can hold; None: any number.
    """

    capacity: float = 1.0
    min_routes: int = 1024
    threshold: float = 1.3
    max_foreign: int | None = 4


def native_bounds(num_experts: int, num_ranks: int) -> tuple[int, ...]:
    """Return the first expert of each rank, and the number of experts: as `torch.chunk` and a DTensor cut them."""
    each = ceil(num_experts / num_ranks)
    return tuple(min(rank * each, num_experts) for rank in range(num_ranks + 1))


def assign(loads: Sequence[int], bounds: Sequence[int], balance: Balance) -> tuple[Shares, ...]:
    """Return who works on each expert: the least loaded rank takes what the owner has no room for.

    Experts are visited by decreasing load. An owner keeps what fits beside its experts that are still to come; the rest
    goes to the ranks with the least load, each up to the capacity, ties to the lower number.

    Exactness:     shares add up to the loads; no rank holds an expert twice; every load is at most
                   ceil(capacity * mean) where `min_routes` is 1 and `max_foreign` is None. What no helper may take
                   stays with the owner.

    Args:
        loads: Routes of each expert, over all ranks.
        bounds: The first expert of each rank, and the number of experts.
        balance: How far the load is levelled.

    References:
        Least-Loaded Expert Parallelism (arXiv 2601.17111), algorithms 2 and 3.
    """
    num_ranks, total = len(bounds) - 1, sum(loads)
    owners = [rank for rank in range(num_ranks) for _ in range(bounds[rank], bounds[rank + 1])]
    coming = [sum(loads[bounds[rank] : bounds[rank + 1]]) for rank in range(num_ranks)]
    if num_ranks == 1 or max(coming) * num_ranks < balance.threshold * total or not total:
        return tuple(((owner, load),) if load else () for owner, load in zip(owners, loads, strict=True))
    room = _Room(capacity=ceil(balance.capacity * total / num_ranks), coming=coming, balance=balance)
    shares: list[Shares] = [()] * len(loads)
    for expert in sorted(range(len(loads)), key=lambda each: (-loads[each], each)):
        if loads[expert]:
            shares[expert] = room.place(loads[expert], owners[expert])
    return tuple(shares)


class _Room:
    """What each rank still has room for."""

    def __init__(self, *, capacity: int, coming: list[int], balance: Balance) -> None:
        self._capacity, self._balance = capacity, balance
        self._load = coming  # taken so far, and native experts still to come
        self._foreign = [0] * len(coming)

    def place(self, load: int, owner: int) -> Shares:
        """Return who works on one expert."""
        self._load[owner] -= load
        kept = max(0, min(load, self._capacity - self._load[owner]))
        lent = self._lend(load - kept, owner) if kept < load else ()
        stays = load - sum(routes for _, routes in lent)
        self._load[owner] += stays
        return (((owner, stays),) if stays else ()) + lent

    def _lend(self, rest: int, owner: int) -> Shares:
        """Return who takes how much of `rest`."""
        limit = self._balance.max_foreign
        lent = []
        for rank in sorted(range(len(self._load)), key=self._load.__getitem__):
            full = limit is not None and self._foreign[rank] >= limit
            piece = min(rest, self._capacity - self._load[rank])
            if rank != owner and not full and piece >= max(1, min(rest, self._balance.min_routes)):
                lent.append((rank, piece))
                self._load[rank] += piece
                self._foreign[rank] += 1
                rest -= piece
            if not rest:
                break
        return tuple(lent)


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """One expert that several ranks work on.

    In each stride its routes form a list, by source rank from `stride % P` on and by token; the holders take it in
    pieces one after the other.

    Attributes:
        ranks: The holders.
        bounds: [G, holders + 1], where each holder's piece of a stride's list begins.
        starts: [P, G], where each source's routes begin in a stride's list.
    """

    ranks: tuple[int, ...]
    bounds: Counts
    starts: Counts


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """Who works on what in one layer of one step, in which order.

    Attributes:
        shares: Of each expert.
        splits: The experts that several ranks work on.
        blocks: (first stride, end) of each block.
        loads: [blocks, E], routes of each expert in each block.
    """

    shares: tuple[Shares, ...]
    splits: dict[int, Split]
    blocks: tuple[tuple[int, int], ...]
    loads: Counts

    def arrivals(self, rank: int) -> Counts:
        """Return [blocks, E], the routes of each expert that `rank` works on in each block."""
        alone = np.array([len(shares) == 1 and shares[0][0] == rank for shares in self.shares])
        found = np.where(alone, self.loads, 0)
        for expert, split in self.splits.items():
            if rank in split.ranks:
                index = split.ranks.index(rank)
                pieces = split.bounds[:, index + 1] - split.bounds[:, index]
                found[:, expert] = np.add.reduceat(pieces, [first for first, _ in self.blocks])
        return found

    def foreign(self, bounds: Sequence[int]) -> list[list[int]]:
        """Return the experts of others that each rank works on, in order."""
        found: list[list[int]] = [[] for _ in bounds[1:]]
        for expert, shares in enumerate(self.shares):
            for rank, _ in shares:
                if not bounds[rank] <= expert < bounds[rank + 1]:
                    found[rank].append(expert)
        return found

    def spilled(self, bounds: Sequence[int]) -> int:
        """Return how many routes are not worked on by their expert's owner."""
        return sum(
            routes
            for expert, shares in enumerate(self.shares)
            for rank, routes in shares
            if not bounds[rank] <= expert < bounds[rank + 1]
        )


def plan_layer(
    counts: Counts, tokens: Counts, *, bounds: Sequence[int], block_rows: int, balance: Balance
) -> LayerPlan:
    """Return the plan of one layer, equal on all ranks that give equal arguments.

    Exactness:     in no block does a rank send or receive more than `block_rows` rows.

    Args:
        counts: [P, E, G], routes of each source rank, expert and stride.
        tokens: [P, G], tokens of each source rank and stride.
        bounds: The first expert of each rank, and the number of experts.
        block_rows: Rows that a rank may send or receive at a time.
        balance: How far the load is levelled.
    """
    per_stride = counts.sum(0, dtype=np.int64)
    shares = assign(per_stride.sum(1).tolist(), bounds, balance)
    splits = {expert: _split(counts[:, expert], each) for expert, each in enumerate(shares) if len(each) > 1}
    routes = _routes(counts, bounds)
    for expert, each in enumerate(shares):
        owner = bisect_right(bounds, expert) - 1
        if len(each) > 1 or (each and each[0][0] != owner):
            routes[:, owner] -= counts[:, expert]
            for rank, piece in _pieces(counts[:, expert], each, splits.get(expert)):
                routes[:, rank] += piece
    blocks = _merge(np.minimum(routes, tokens[:, None]), block_rows)
    loads = np.add.reduceat(per_stride.T, [first for first, _ in blocks], axis=0)
    return LayerPlan(shares=shares, splits=splits, blocks=blocks, loads=loads)


def _routes(counts: Counts, bounds: Sequence[int]) -> Counts:
    """Return [source, destination, G], routes by their experts' owners."""
    num_ranks = len(bounds) - 1
    routes = np.zeros((len(counts), num_ranks, counts.shape[2]), np.int64)
    holds = [rank for rank in range(num_ranks) if bounds[rank] < bounds[rank + 1]]
    routes[:, holds] = np.add.reduceat(counts, [bounds[rank] for rank in holds], axis=1)
    return routes


def _pieces(counts: Counts, shares: Shares, split: Split | None) -> Iterator[tuple[int, Counts]]:
    """Yield (rank, [P, G] routes of one expert that go there)."""
    if split is None:
        yield shares[0][0], counts
        return
    ends = split.starts + counts
    for index, rank in enumerate(split.ranks):
        begin, end = split.bounds[:, index], split.bounds[:, index + 1]
        yield rank, np.clip(np.minimum(ends, end) - np.maximum(split.starts, begin), 0, None)


def _split(counts: Counts, shares: Shares) -> Split:
    """Return the pieces of one expert, in every stride as near to the shares as whole routes can be."""
    num_ranks, num_strides = counts.shape
    left = np.cumsum(counts.sum(0, dtype=np.int64))  # up to the end of each stride, less those of the holders so far
    rest = sum(routes for _, routes in shares)
    bounds = np.zeros((num_strides, len(shares) + 1), np.int64)
    for index, (_, routes) in enumerate(shares):
        taken = left * routes // rest if rest else left
        bounds[:, index + 1] = bounds[:, index] + np.diff(taken, prepend=0)
        left, rest = left - taken, rest - routes
    order = (np.arange(num_ranks)[:, None] + np.arange(num_strides)) % num_ranks
    listed = np.take_along_axis(counts, order, 0)
    starts = np.empty(counts.shape, np.int64)
    np.put_along_axis(starts, order, np.cumsum(listed, 0, dtype=np.int64) - listed, 0)
    return Split(ranks=tuple(rank for rank, _ in shares), bounds=bounds, starts=starts)


def _merge(rows: Counts, block_rows: int) -> tuple[tuple[int, int], ...]:
    """Return blocks of as many strides as may go together; `rows` is [source, destination, stride], at most."""
    per_stride = np.concatenate([rows.sum(0), rows.sum(1)]).T  # received by, and sent by, each rank
    blocks, first, held = [], 0, np.zeros(per_stride.shape[1], np.int64)
    for stride, added in enumerate(per_stride):
        if stride > first and (held + added).max() > block_rows:
            blocks.append((first, stride))
            first, held = stride, np.zeros_like(held)
        held = held + added
    return (*blocks, (first, len(per_stride)))
