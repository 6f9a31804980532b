"""Documents of a packed batch and the blocks of queries that they are worked in, as plain integers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of one call: rows of the batch, queries of a row and keys of a row (more than queries behind a cache)."""

    rows: int
    queries: int
    keys: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Queries of one document, and the keys that any of them sees.

    Query `i` of the block sees the keys `lead + i - window < j <= lead + i` of the block.

    Attributes:
        rows: Rows of the batch.
        queries: Positions in the row.
        keys: Positions in the row.
        lead: Keys of the block before the first query's own.
        is_triangle: Query `i` sees keys 0 to `i`; `lead` is 0 and the window does not matter.
    """

    rows: slice
    queries: slice
    keys: slice
    lead: int
    is_triangle: bool

    @property
    def num_queries(self) -> int:
        """Queries in the block."""
        return self.queries.stop - self.queries.start

    @property
    def num_keys(self) -> int:
        """Keys in the block."""
        return self.keys.stop - self.keys.start


def document_bounds(cu_seq_lens: Sequence[int] | Tensor | None, shape: Shape) -> tuple[int, ...]:
    """Return where documents begin and end among the `rows x queries` tokens, edges of rows included.

    Args:
        cu_seq_lens: Ascending token offsets from 0 to the last token; a tensor is read once; None: a row a document.
        shape: Sizes of the call.

    Raises:
        ValueError: Offsets that do not ascend from 0 to the number of tokens.
    """
    num_tokens = shape.rows * shape.queries
    edges = tuple(range(0, num_tokens + 1, shape.queries)) if num_tokens else ()
    if cu_seq_lens is None:
        return edges
    given = cu_seq_lens.tolist() if isinstance(cu_seq_lens, Tensor) else list(cu_seq_lens)
    if given != sorted(given) or not given or given[0] != 0 or given[-1] != num_tokens:
        raise ValueError(
            f"`cu_seq_lens_q` must ascend from 0 to the {num_tokens} tokens of the batch ({shape.rows} x "
            f"{shape.queries}), got {_abridged(given)}; give the offset of each document and the end of the last."
        )
    bounds = tuple(sorted({*given, *edges}))
    if shape.keys != shape.queries and len(bounds) > len(edges):
        raise ValueError(
            f"`cu_seq_lens_q` must not divide rows behind a key-value cache ({shape.queries} queries, {shape.keys} "
            "keys); generate from one document a row."
        )
    return bounds


def query_blocks(
    bounds: Sequence[int], shape: Shape, *, window: int | None, num_queries: int, triangle_first: bool
) -> Iterator[Block]:
    """Yield every document's queries in blocks, each with the keys that it sees; rows that are a document share them.

    Args:
        bounds: What `document_bounds` returned.
        shape: Sizes of the call.
        window: Keys that a query sees, its own included; None: all before it.
        num_queries: Most queries in a block.
        triangle_first: The first block of a document is as long as a plain lower triangle can be, whatever
            `num_queries`; there is none behind a cache.
    """
    past = shape.keys - shape.queries
    for rows, begin, end in _documents(bounds, shape):
        reach = end + past if window is None else window
        triangle = min(begin + reach, end) if triangle_first and past == 0 else begin
        starts = [*([begin] if triangle > begin else []), *range(triangle, end, num_queries)]
        for start, stop in zip(starts, [*starts[1:], end], strict=True):
            first_key = max(begin, start + past - reach + 1)
            keys = slice(first_key, stop + past)
            lead = start + past - first_key
            yield Block(rows=rows, queries=slice(start, stop), keys=keys, lead=lead, is_triangle=stop <= triangle)


def far_blocks(shape: Shape, *, lead: int, window: int | None, num_queries: int | None) -> Iterator[Block]:
    """Yield the queries in blocks, each with the keys that it sees, where all keys come before all queries.

    Args:
        shape: Sizes of the call; each query sees a key.
        lead: Tokens from the first key to the first query.
        window: Keys that a query sees, its own included; None: all.
        num_queries: Most queries in a block; None: all.
    """
    step = num_queries or max(1, shape.queries)
    for start in range(0, shape.queries, step):
        stop = min(start + step, shape.queries)
        first_key = 0 if window is None else max(0, lead + start - window + 1)
        yield Block(
            rows=slice(0, shape.rows),
            queries=slice(start, stop),
            keys=slice(first_key, shape.keys),
            lead=lead + start - first_key,
            is_triangle=False,
        )


def hidden(num_queries: int, num_keys: int, lead: int, window: int | None, device: torch.device) -> Tensor | None:
    """Return which keys a block's queries must not see (`[num_queries, num_keys]`, True is hidden); None: no key is.

    Memory:        three bytes a cell until the return, one after it.
    """
    reach = lead + num_queries if window is None else window
    if lead + 1 >= num_keys and lead + num_queries <= reach:
        return None
    cells = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    return cells.triu(lead + 1).logical_or_(cells.tril(lead - reach))


def _documents(bounds: Sequence[int], shape: Shape) -> Iterator[tuple[slice, int, int]]:
    """Yield (rows, begin, end) for each document; one for all rows where each of them is one document."""
    if len(bounds) == shape.rows + 1:
        yield slice(0, shape.rows), 0, shape.queries
        return
    for start, stop in pairwise(bounds):
        row, begin = divmod(start, shape.queries)
        yield slice(row, row + 1), begin, begin + stop - start


def _abridged(offsets: list[int]) -> str:
    if len(offsets) <= 6:
        return str(tuple(offsets))
    return f"({', '.join(map(str, offsets[:3]))}, ..., {', '.join(map(str, offsets[-2:]))})"
