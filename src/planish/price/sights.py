"""Which keys of other ranks the queries of a rank see, as plain integers that every rank knows alike.

A rank holds a span of each row, and spans lie one after the other. A document that reaches from one span into a
later one spans all that lies between: so of each row's queries at most those of one document see any other span.

[Note: turned] The later a span, the more keys its queries see. Where no window bounds them, rank r of P works on two
half spans instead, the r-th from the front and the r-th from the back, one after the other as if they were one span:
then each pair of ranks has as much to do as any other. Rank r sees the first half of an earlier rank with all its
queries, and both halves of a later rank with those of its second half.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product

from planish.shapes import spans


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """The first queries of a span, and the keys of an earlier span that they see; all these keys come before them.

    Query `i` sees the keys `lead + i - window < j` of these.

    Attributes:
        row: Row of the batch.
        queries: Positions in their span; each sees a key.
        keys: Positions in the other span.
        lead: Tokens from the first of these keys to the first query.
    """

    row: int
    queries: slice
    keys: slice
    lead: int

    @property
    def num_queries(self) -> int:
        """Queries that see any."""
        return self.queries.stop - self.queries.start

    @property
    def num_keys(self) -> int:
        """Keys that are seen."""
        return self.keys.stop - self.keys.start


def sights(
    bounds: Sequence[int], *, rows: int, width: int, num_ranks: int, window: int | None, last_alone: bool = False
) -> dict[tuple[int, int], list[Sight]]:
    """Return what each rank sees of each earlier one, by (rank that sees, rank that is seen); pairs that see nothing
    are left out.

    Args:
        bounds: Where documents begin and end among the `rows x width` tokens; edges of rows included.
        rows: Rows of the batch.
        width: Tokens of a row, over all ranks.
        num_ranks: Ranks that share each row.
        window: Keys that a query sees, its own included; None: all before it.
        last_alone: Only what the last rank sees.
    """
    found: dict[tuple[int, int], list[Sight]] = {}
    parts = spans(width, num_ranks)
    for rank, own in enumerate(parts):
        if own.start == own.stop or (last_alone and rank < num_ranks - 1):
            continue
        for row in range(rows):
            after = bisect_right(bounds, row * width + own.start)
            begin, end = (bound - row * width for bound in bounds[after - 1 : after + 1])
            if window is not None:
                begin = max(begin, own.start - window + 1)
            for other, theirs in enumerate(parts[:rank]):
                start, stop = max(begin, theirs.start), theirs.stop
                if start >= stop:
                    continue
                last = min(end, own.stop) - own.start
                if window is not None:
                    last = min(last, stop - 1 + window - own.start)
                sight = Sight(
                    row=row,
                    queries=slice(0, last),
                    keys=slice(start - theirs.start, stop - theirs.start),
                    lead=own.start - start,
                )
                found.setdefault((rank, other), []).append(sight)
    return found


Two = tuple[slice, slice]


def turned(width: int, num_ranks: int) -> tuple[Two, ...]:
    """Return the two parts of a row of `width` tokens that each rank works on; none are longer than the longest span.

    Example:
        >>> [[(each.start, each.stop) for each in two] for two in turned(8, 2)]
        [[(0, 2), (6, 8)], [(2, 4), (4, 6)]]
    """
    longest = -(-width // num_ranks)
    edges = [min(width, half * longest // 2) for half in range(2 * num_ranks + 1)]
    halves = [slice(start, stop) for start, stop in pairwise(edges)]
    return tuple((halves[rank], halves[-1 - rank]) for rank in range(num_ranks))


def position(two: Two, token: int) -> int:
    """Return how many tokens of two parts come before `token`."""
    return sum(min(max(token - part.start, 0), part.stop - part.start) for part in two)


def turned_sights(
    bounds: Sequence[int], *, rows: int, width: int, num_ranks: int, last_alone: bool = False
) -> dict[tuple[int, int], list[Sight]]:
    """Return `sights` of ranks that work on two parts each, of either of which the keys are seen apart.

    Args:
        bounds: Where documents begin and end among the `rows x width` tokens; edges of rows included.
        rows: Rows of the batch.
        width: Tokens of a row, over all ranks.
        num_ranks: Ranks that share each row.
        last_alone: Only what the last rank sees, with all its queries half the keys of each other.
    """
    found: dict[tuple[int, int], list[Sight]] = {}
    parts = turned(width, num_ranks)
    for rank, other in product(range(num_ranks - 1 if last_alone else 0, num_ranks), range(num_ranks)):
        own, theirs = parts[rank], parts[other]
        first = own[0] if other < rank and own[0].start < own[0].stop else own[1]
        if rank == other or first.start == first.stop:
            continue
        seen = theirs[:1] if other < rank else theirs
        for row, keys in product(range(rows), seen):
            after = bisect_right(bounds, row * width + first.start)
            begin, end = (bound - row * width for bound in bounds[after - 1 : after + 1])
            start = max(begin, keys.start)
            if start >= keys.stop:
                continue
            sight = Sight(
                row=row,
                queries=slice(position(own, first.start), position(own, end)),
                keys=slice(position(theirs, start), position(theirs, keys.stop)),
                lead=first.start - start,
            )
            found.setdefault((rank, other), []).append(sight)
    return found


def turned_bounds(bounds: Sequence[int], *, rows: int, width: int, own: Two) -> tuple[int, ...]:
    """Return where documents begin and end among the tokens of two parts of each row, one part after the other."""
    num_own = position(own, width)
    cuts = set(range(0, rows * num_own + 1, max(1, num_own)))
    for row, token in (divmod(bound, width) for bound in bounds):
        if any(part.start < token < part.stop for part in own) or own[0].stop <= token <= own[1].start:
            cuts.add(row * num_own + position(own, token))
    return tuple(sorted(cuts))


def own_bounds(bounds: Sequence[int], *, rows: int, width: int, own: slice) -> tuple[int, ...]:
    """Return where documents begin and end among the tokens of one span of each row."""
    num_own = own.stop - own.start
    inner = (divmod(bound, width) for bound in bounds)
    cuts = {row * num_own + place - own.start for row, place in inner if own.start < place < own.stop}
    return tuple(sorted({*cuts, *range(0, rows * num_own + 1, max(1, num_own))}))
