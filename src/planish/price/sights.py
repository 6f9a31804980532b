"""Which keys of other ranks the queries of a rank see, as plain integers that every rank knows alike.

A rank holds a span of each row, and spans lie one after the other. A document that reaches from one span into a
later one spans all that lies between: so of each row's queries at most those of one document see any other span.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from planish.shapes import spans


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """The first queries of a span, and the keys of an earlier span that they see; all these keys come before them.

    Query `i` sees the keys `lead + i - window < j` of these.

    Attributes:
        row: Row of the batch.
        num_queries: Queries from the beginning of their span, each of which sees a key.
        keys: Positions in the earlier span.
        lead: Tokens from the first of these keys to the first query.
    """

    row: int
    num_queries: int
    keys: slice
    lead: int

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
                    num_queries=last,
                    keys=slice(start - theirs.start, stop - theirs.start),
                    lead=own.start - start,
                )
                found.setdefault((rank, other), []).append(sight)
    return found


def own_bounds(bounds: Sequence[int], *, rows: int, width: int, own: slice) -> tuple[int, ...]:
    """Return where documents begin and end among the tokens of one span of each row."""
    num_own = own.stop - own.start
    inner = (divmod(bound, width) for bound in bounds)
    cuts = {row * num_own + place - own.start for row, place in inner if own.start < place < own.stop}
    return tuple(sorted({*cuts, *range(0, rows * num_own + 1, max(1, num_own))}))
