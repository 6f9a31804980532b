"""What attention weighs while it runs: the allocations of its CPU kernels, replayed with sizes in place of tensors.

The two functions follow `peaks.attention` line by line, and count from the moment attention is called.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from planish.price.tally import Tally
from planish.shapes import AttentionShape, BatchShape

_BLOCK_BYTES = 4 * 2**20
_BLOCK_QUERIES = 128
_WIDE = 4
# Blocks or tiles that are replayed at either end of a long row of them; those between are like their neighbours.
_EDGE = 3


@lru_cache(maxsize=256)
def forward_bytes(attention: AttentionShape, batch: BatchShape, itemsize: int) -> int:
    """Return the most bytes that the forward pass adds, output and lse included."""
    call = Call(attention=attention, rows=batch.rows, context=batch.context, itemsize=itemsize)

    def replay(tally: Tally, documents: list[Document]) -> None:
        replay_forward(tally, call, documents)
        if attention.sinks:
            fold_sinks(tally, call)

    return _most(replay, batch)


@lru_cache(maxsize=256)
def backward_bytes(attention: AttentionShape, batch: BatchShape, itemsize: int) -> int:
    """Return the most bytes that the backward pass adds, the gradients of query, key and value included."""
    call = Call(attention=attention, rows=batch.rows, context=batch.context, itemsize=itemsize)

    def replay(tally: Tally, documents: list[Document]) -> None:
        if attention.sinks:
            sink_gradient(tally, call)
        replay_backward(tally, call, documents)

    return _most(replay, batch)


def replay_forward(tally: Tally, call: "Call", documents: list["Document"]) -> None:
    """Hold what the products of a forward pass hold, and leave its results as `out` and `lse`, or as their parts."""
    (_tiled_forward if call.attention.softcapped else _flash_forward)(tally, call, documents)


def replay_backward(tally: Tally, call: "Call", documents: list["Document"]) -> None:
    """Hold what the products of a backward pass hold."""
    (_tiled_backward if call.attention.softcapped else _flash_backward)(tally, call, documents)


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """Documents of one length, one in each of `rows` rows, that the kernel may take at once."""

    rows: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """Queries of a document and the keys that they see; `lead` keys come before the first query's own."""

    rows: int
    queries: int
    keys: int
    lead: int
    is_triangle: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Sizes of one call, and of its tensors for `rows` rows and `queries` or `keys` tokens.

    Attributes:
        attention: What it is given.
        rows: Rows of the batch.
        context: Queries of a row.
        itemsize: Bytes of one number.
        far: Keys of a row and tokens from the first of them to the first query, where all keys come before all queries;
            None: keys are those of the queries.
    """

    attention: AttentionShape
    rows: int
    context: int
    itemsize: int
    far: tuple[int, int] | None = None

    @property
    def num_keys(self) -> int:
        """Keys of a row."""
        return self.context if self.far is None else self.far[0]

    @property
    def width(self) -> int:
        """Width at which the flash kernel works."""
        return max(self.attention.qk_width, self.attention.v_width)

    def query_bytes(self, rows: int, queries: int, width: int, itemsize: int) -> int:
        """Return the bytes of `width` numbers for each query and head."""
        return rows * queries * self.attention.num_heads * width * itemsize

    def key_bytes(self, rows: int, keys: int, width: int, itemsize: int) -> int:
        """Return the bytes of `width` numbers for each key and key head."""
        return rows * keys * self.attention.num_kv_heads * width * itemsize

    def lse_bytes(self, rows: int, queries: int) -> int:
        """Return the bytes of an lse for each query and head."""
        return self.query_bytes(rows, queries, 1, _WIDE)


def _most(replay: Callable[[Tally, list[Document]], None], batch: BatchShape) -> int:
    """Return the largest peak over the ways to lay documents into the batch between which every other one lies."""
    layouts = [[Document(rows=batch.rows, tokens=batch.context)]]
    if batch.split and batch.context > 1:
        whole = [Document(rows=1, tokens=batch.context)] * min(2, batch.rows - 1)
        layouts.append([Document(rows=1, tokens=1), Document(rows=1, tokens=batch.context - 1), *whole])
    peaks = []
    for documents in layouts:
        tally = Tally()
        replay(tally, documents)
        peaks.append(tally.peak_bytes)
    return max(peaks)


def _ends(first: list[int], rest: range, edge: int) -> list[int]:
    """Return `first` and `rest`, but for most of the middle."""
    if len(first) + len(rest) <= 2 * edge:
        return [*first, *rest]
    return [*first, *rest[: edge - len(first)], *rest[-edge:]]


def _blocks(
    document: Document, *, window: int | None, queries: int, triangle_first: bool, edge: int = _EDGE
) -> Iterator[_Block]:
    """Yield the blocks of a document as `peaks.attention.documents.query_blocks` does, without most of the middle."""
    tokens = document.tokens
    reach = tokens if window is None else window
    triangle = min(reach, tokens) if triangle_first else 0
    for start in _ends([0] if triangle else [], range(triangle, tokens, queries), edge):
        stop = triangle if start < triangle else min(tokens, start + queries)
        first_key = max(0, start - reach + 1)
        yield _Block(
            rows=document.rows,
            queries=stop - start,
            keys=stop - first_key,
            lead=start - first_key,
            is_triangle=start < triangle,
        )


def _far_blocks(call: Call, *, queries: int | None, edge: int) -> Iterator[_Block]:
    """Yield blocks as `peaks.attention.documents.far_blocks` does, without most of the middle."""
    assert call.far is not None
    keys, lead = call.far
    window, step = call.attention.window, queries or max(1, call.context)
    for start in _ends([], range(0, call.context, step), edge):
        first_key = 0 if window is None else max(0, lead + start - window + 1)
        yield _Block(
            rows=call.rows,
            queries=min(start + step, call.context) - start,
            keys=keys - first_key,
            lead=lead + start - first_key,
            is_triangle=False,
        )


def _is_masked(queries: int, keys: int, lead: int, window: int | None) -> bool:
    """Return whether any of these queries must not see one of these keys."""
    return lead + 1 < keys or (window is not None and lead + queries > window)


def _flash_blocks(call: Call, documents: list[Document]) -> list[_Block]:
    window, keys = call.attention.window, call.num_keys
    reach = min(window or keys, keys) + _BLOCK_QUERIES
    queries = max(1, min(_BLOCK_QUERIES, _BLOCK_BYTES // (call.itemsize * reach)))
    if call.far is not None:
        return list(_far_blocks(call, queries=None if window is None else queries, edge=_EDGE))
    each = (_blocks(one, window=window, queries=queries, triangle_first=True) for one in documents)
    return [block for blocks in each for block in blocks]


def _hold_operands(tally: Tally, call: Call, block: _Block, *, backward: bool) -> None:
    """Allocate what the flash kernel is given beside the tensors themselves: zero-padded copies and a mask."""
    attention, width, itemsize = call.attention, call.width, call.itemsize
    if attention.qk_width < width:
        tally.hold(query=call.query_bytes(block.rows, block.queries, width, itemsize))
        tally.hold(key=call.key_bytes(block.rows, block.keys, width, itemsize))
    if attention.v_width < width:
        tally.hold(value=call.key_bytes(block.rows, block.keys, width, itemsize))
        if backward:
            padded = call.query_bytes(block.rows, block.queries, width, itemsize)
            tally.hold(grad_out=padded, out_again=padded)
    if not block.is_triangle and _is_masked(block.queries, block.keys, block.lead, attention.window):
        cells = block.queries * block.keys
        tally.spike(3 * cells)
        tally.hold(cells=cells, mask=cells * itemsize)
        tally.drop("cells")


def _drop_operands(tally: Tally) -> None:
    tally.drop("query", "key", "value", "grad_out", "out_again", "mask")


def _flash_forward(tally: Tally, call: Call, documents: list[Document]) -> None:
    blocks = _flash_blocks(call, documents)
    out = call.query_bytes(call.rows, call.context, call.attention.v_width, call.itemsize)
    if len(blocks) > 1:
        tally.hold(out=out, lse=call.lse_bytes(call.rows, call.context))
    for block in blocks:
        _hold_operands(tally, call, block, backward=False)
        tally.hold(part=call.query_bytes(block.rows, block.queries, call.width, call.itemsize))
        tally.hold(part_lse=call.lse_bytes(block.rows, block.queries))
        _drop_operands(tally)
        if len(blocks) == 1 and call.attention.v_width < call.width:
            tally.hold(out=out)
        if len(blocks) > 1 or call.attention.v_width < call.width:
            tally.drop("part")
        if len(blocks) > 1:
            tally.drop("part_lse")


def _flash_backward(tally: Tally, call: Call, documents: list[Document]) -> None:
    blocks = _flash_blocks(call, documents)
    attention, whole = call.attention, (call.rows, call.context)
    if len(blocks) > 1:
        tally.hold(grad_query=call.query_bytes(*whole, attention.qk_width, call.itemsize))
        tally.hold(grad_key=call.key_bytes(call.rows, call.num_keys, attention.qk_width, call.itemsize))
        tally.hold(grad_value=call.key_bytes(call.rows, call.num_keys, attention.v_width, call.itemsize))
    for block in blocks:
        _hold_operands(tally, call, block, backward=True)
        keys = call.key_bytes(block.rows, block.keys, call.width, call.itemsize)
        tally.hold(new_query=call.query_bytes(block.rows, block.queries, call.width, call.itemsize))
        tally.hold(new_key=keys, new_value=keys)
        _drop_operands(tally)
        tally.rename(query_part="new_query", key_part="new_key", value_part="new_value")


def _tile_keys(call: Call) -> int:
    return max(1, _BLOCK_BYTES // (call.attention.num_heads * _BLOCK_QUERIES * _WIDE))


def _tiles(block: _Block, call: Call) -> Iterator[tuple[int, bool]]:
    """Yield the keys of each tile of a block, and whether it is masked; not most of the middle ones."""
    step = _tile_keys(call)
    for start in _ends([], range(0, block.keys, step), _EDGE):
        keys = min(step, block.keys - start)
        yield keys, _is_masked(block.queries, keys, block.lead - start, call.attention.window)


def _tiled_blocks(call: Call, documents: list[Document]) -> Iterator[_Block]:
    two_tiles = _EDGE + 2 * _tile_keys(call) // _BLOCK_QUERIES
    window = call.attention.window
    if call.far is not None:
        for block in _far_blocks(call, queries=_BLOCK_QUERIES, edge=two_tiles):
            yield from [block] * min(2, block.rows)
    for document in documents:
        for block in _blocks(document, window=window, queries=_BLOCK_QUERIES, triangle_first=False, edge=two_tiles):
            yield from [block] * min(2, block.rows)


def _hold_cells(tally: Tally, queries: int, keys: int, *, masked: bool) -> None:
    cells = queries * keys if masked else 0
    tally.spike(3 * cells)
    tally.hold(cells=cells)


def _hold_scaled(tally: Tally, query: int) -> None:
    tally.hold(grouped=query)
    tally.hold(scaled=query)
    tally.drop("grouped")


def _tiled_forward(tally: Tally, call: Call, documents: list[Document]) -> None:
    attention = call.attention
    narrow = call.itemsize < _WIDE
    tally.hold(out=call.query_bytes(call.rows, call.context, attention.v_width, call.itemsize))
    tally.hold(lse=call.lse_bytes(call.rows, call.context))
    for block in _tiled_blocks(call, documents):
        line = call.lse_bytes(1, block.queries)
        _hold_scaled(tally, call.query_bytes(1, block.queries, attention.qk_width, _WIDE))
        tally.hold(largest=line, total=line)
        tally.hold(mixed=call.query_bytes(1, block.queries, attention.v_width, _WIDE))
        for keys, masked in _tiles(block, call):
            _hold_cells(tally, block.queries, keys, masked=masked)
            tally.hold(key=narrow * call.key_bytes(1, keys, attention.qk_width, _WIDE))
            tally.hold(scores=call.query_bytes(1, block.queries, keys, _WIDE))
            tally.drop("key")
            tally.hold(amax=line, new_largest=line)
            tally.drop("amax")
            tally.rename(before="largest")
            tally.rename(largest="new_largest", weights="scores")
            tally.hold(decay=line)
            tally.spike(max(line, narrow * call.key_bytes(1, keys, attention.v_width, _WIDE)))
    for name in ("scaled", "largest", "total", "mixed", "cells", "weights", "before", "decay"):
        tally.drop(name)


def _tiled_backward(tally: Tally, call: Call, documents: list[Document]) -> None:
    attention, rows, keys_of_row = call.attention, call.rows, call.num_keys
    narrow = call.itemsize < _WIDE
    tally.hold(grad_query=call.query_bytes(rows, call.context, attention.qk_width, call.itemsize))
    tally.hold(grad_key=call.key_bytes(rows, keys_of_row, attention.qk_width, _WIDE))
    tally.hold(grad_value=call.key_bytes(rows, keys_of_row, attention.v_width, _WIDE))
    for block in _tiled_blocks(call, documents):
        query = call.query_bytes(1, block.queries, attention.qk_width, _WIDE)
        mixed = call.query_bytes(1, block.queries, attention.v_width, _WIDE)
        line = call.lse_bytes(1, block.queries)
        _hold_scaled(tally, query)
        for name in ("new_grad_mixed", "new_mixed"):
            tally.hold(cast=narrow * mixed)
            tally.hold(**{name: mixed})
            tally.drop("cast")
        tally.hold(new_lse=line)
        tally.rename(grad_mixed="new_grad_mixed", mixed="new_mixed", block_lse="new_lse")
        tally.hold(product=mixed, delta=line)
        tally.drop("product")
        tally.hold(grad_scaled=query)
        for keys, masked in _tiles(block, call):
            tile = call.query_bytes(1, block.queries, keys, _WIDE)
            _hold_cells(tally, block.queries, keys, masked=masked)
            tally.hold(new_key=narrow * call.key_bytes(1, keys, attention.qk_width, _WIDE))
            tally.hold(new_value=narrow * call.key_bytes(1, keys, attention.v_width, _WIDE))
            tally.rename(tile_key="new_key", tile_value="new_value")
            tally.hold(scores=tile, weights=tile)
            tally.spike(call.key_bytes(1, keys, attention.v_width, _WIDE))
            tally.hold(grad_scores=tile)
            tally.spike(call.key_bytes(1, keys, attention.qk_width, _WIDE))
    if narrow:
        tally.hold(key_cast=call.key_bytes(rows, keys_of_row, attention.qk_width, call.itemsize))
        tally.hold(value_cast=call.key_bytes(rows, keys_of_row, attention.v_width, call.itemsize))


def part_tokens(call: Call) -> int:
    """Return the tokens whose float32 copy is made at once."""
    token_bytes = call.query_bytes(call.rows, 1, call.attention.v_width, 4)
    return min(call.context, max(1, _BLOCK_BYTES // token_bytes))


def fold_sinks(tally: Tally, call: Call) -> None:
    """Hold what folding sinks into output and lse holds, and leave `new_lse`."""
    if call.itemsize < _WIDE:
        tally.hold(sinks=call.attention.num_heads * _WIDE)
    tally.spike(2 * call.lse_bytes(call.rows, part_tokens(call)))
    tally.hold(new_lse=call.lse_bytes(call.rows, call.context))


def sink_gradient(tally: Tally, call: Call) -> None:
    """Hold what the sinks' gradient holds, and leave it as `total`."""
    tally.hold(total=call.attention.num_heads * _WIDE)
    product = call.query_bytes(call.rows, part_tokens(call), call.attention.v_width, _WIDE)
    tally.spike(2 * product if call.itemsize < _WIDE else product + call.lse_bytes(call.rows, part_tokens(call)))
    tally.hold(total=call.attention.num_heads * call.itemsize)
