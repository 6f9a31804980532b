"""Every query of a packed batch is worked in exactly one block, which shows it the keys of its definition alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from planish.peaks.attention.documents import Shape, document_bounds, hidden, query_blocks

CPU = torch.device("cpu")


@st.composite
def packed_batches(draw):
    rows, queries = draw(st.integers(1, 3)), draw(st.integers(1, 24))
    inner = draw(st.sets(st.integers(1, rows * queries)))
    return rows, queries, tuple(sorted({0, *inner, rows * queries}))


def visible_pairs(bounds, shape, window, num_queries, triangle_first):
    """Return (row, query, key) of every pair that some block shows, each as often as it is shown."""
    pairs, queries_seen = [], []
    for block in query_blocks(bounds, shape, window=window, num_queries=num_queries, triangle_first=triangle_first):
        num_block_queries, num_keys = block.num_queries, block.num_keys
        if block.is_triangle:
            cells = torch.ones(num_block_queries, num_keys).triu(1).bool()
            assert num_block_queries == num_keys
        else:
            assert num_block_queries <= num_queries
            cells = hidden(num_block_queries, num_keys, block.lead, window, CPU)
            cells = torch.zeros(num_block_queries, num_keys, dtype=torch.bool) if cells is None else cells
        for row in range(block.rows.start, block.rows.stop):
            queries_seen += [(row, block.queries.start + i) for i in range(num_block_queries)]
            pairs += [(row, block.queries.start + i, block.keys.start + j) for i, j in (~cells).nonzero().tolist()]
    assert len(queries_seen) == len(set(queries_seen)) == shape.rows * shape.queries
    return pairs


@settings(deadline=None, max_examples=200)
@given(packed_batches(), st.none() | st.integers(1, 30), st.integers(1, 9), st.booleans())
def test_blocks_show_each_query_the_keys_of_its_document_and_window(batch, window, num_queries, triangle_first):
    rows, queries, given_bounds = batch
    shape = Shape(rows=rows, queries=queries, keys=queries)
    bounds = document_bounds(given_bounds, shape)
    document = torch.bucketize(torch.arange(rows * queries), torch.tensor(given_bounds), right=True).view(rows, queries)
    expected = [
        (row, i, j)
        for row in range(rows)
        for i in range(queries)
        for j in range(i + 1)
        if document[row, i] == document[row, j] and (window is None or i - j < window)
    ]
    assert sorted(visible_pairs(bounds, shape, window, num_queries, triangle_first)) == expected


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 12), st.integers(0, 20), st.none() | st.integers(1, 30), st.integers(1, 9), st.booleans())
def test_behind_a_cache_the_last_query_stands_at_the_last_key(queries, past, window, num_queries, triangle_first):
    shape = Shape(rows=1, queries=queries, keys=queries + past)
    reach = shape.keys if window is None else window
    expected = [(0, i, j) for i in range(queries) for j in range(max(0, i + past - reach + 1), i + past + 1)]
    pairs = visible_pairs(document_bounds(None, shape), shape, window, num_queries, triangle_first)
    assert sorted(pairs) == expected


@pytest.mark.parametrize(
    ("given_bounds", "expected"),
    [
        (None, (0, 5, 10)),
        ((0, 10), (0, 5, 10)),
        ((0, 3, 7, 10), (0, 3, 5, 7, 10)),
        ([0, 3, 3, 10, 10], (0, 3, 5, 10)),
        (torch.tensor([0, 4, 10], dtype=torch.int32), (0, 4, 5, 10)),
    ],
)
def test_bounds_count_the_edges_of_rows(given_bounds, expected):
    assert document_bounds(given_bounds, Shape(rows=2, queries=5, keys=5)) == expected


def test_rows_that_are_one_document_each_share_their_blocks():
    shape = Shape(rows=8, queries=5, keys=5)
    bounds = document_bounds(None, shape)
    [block] = query_blocks(bounds, shape, window=None, num_queries=2, triangle_first=True)
    assert (block.rows, block.queries, block.is_triangle) == (slice(0, 8), slice(0, 5), True)


@pytest.mark.parametrize("wrong", [(), (0,), (1, 10), (0, 9), (0, 11), (0, 7, 3, 10)])
def test_offsets_that_do_not_fit_are_refused(wrong):
    with pytest.raises(ValueError, match=r"`cu_seq_lens_q` must ascend from 0 to the 10 tokens"):
        document_bounds(wrong, Shape(rows=2, queries=5, keys=5))


def test_documents_behind_a_cache_are_refused():
    shape = Shape(rows=2, queries=5, keys=9)
    assert document_bounds((0, 5, 10), shape) == (0, 5, 10)
    with pytest.raises(ValueError, match="behind a key-value cache"):
        document_bounds((0, 3, 10), shape)
