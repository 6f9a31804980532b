"""Attention over ranks that share each row: the numbers of whole rows, whichever way keys and queries meet."""

from itertools import pairwise

import pytest
import torch

from attention import sequence_work
from planish.comm.ring import Circle
from planish.peaks.attention.heads import head_ranges
from planish.peaks.attention.sequence import sequence_attention
from planish.price.sights import position, sights, turned, turned_bounds, turned_sights

# Two rows of 23: spans of 11 and 12, or of 5, 6, 6 and 6; documents within a span, over one edge and over all.
ROWS = {"rows": 2, "width": 23}
DOCUMENTS = (0, 3, 4, 20, 23, 45, 46)
BY_HEADS, SHARED_HEADS = {"heads": 8, "kv_heads": 4}, {"heads": 4, "kv_heads": 1}
BY_SPANS = {"heads": 3, "kv_heads": 1}  # no rank can have whole heads
KINDS = {
    "rows": {},
    "documents": {"bounds": DOCUMENTS},
    "window": {"window": 7},
    "short window": {"window": 2, "bounds": DOCUMENTS},
    "sinks": {"sinks": True, "bounds": DOCUMENTS},
    "softcap": {"softcap": 2.0, "bounds": DOCUMENTS, "window": 9},
    "latent": {"qk_width": 12, "v_width": 8},
    "wide value": {"v_width": 12, "bounds": DOCUMENTS},
    "one row": {"rows": 1, "width": 22, "window": 5, "sinks": True},
    "few tokens": {"width": 5},
}


def assert_whole(answers, problem, tolerance):
    """Hold the ranks' spans, put together, to the textbook."""
    out, *grads = sequence_work.expected(**problem)
    parts = [[torch.from_numpy(each) for each in column] for column in zip(*answers, strict=True)]
    found = [torch.cat(parts[0], 1), *(torch.cat(each, 2) for each in parts[1:4])]
    found += [sum(parts[4])] if len(parts) == 5 else []
    for name, ours, theirs in zip(("out", "query", "key", "value", "sinks"), found, (out, *grads), strict=False):
        assert torch.allclose(ours.double(), theirs, rtol=tolerance, atol=tolerance), name


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("heads", [BY_HEADS, SHARED_HEADS, BY_SPANS], ids=["heads", "shared heads", "spans"])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_compute_whole_rows(pool, kind, heads, size):
    problem = {**ROWS, **heads, **KINDS[kind]}
    assert_whole(pool.run(sequence_work.attend, size, **problem), problem, 1e-10)


@pytest.mark.parametrize("heads", [BY_HEADS, BY_SPANS], ids=["heads", "spans"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_dtypes_err_as_one_rank_does(pool, heads, dtype):
    problem = {"rows": 1, "width": 96, **heads, "sinks": True, "bounds": (0, 10, 96)}
    exact = sequence_work.expected(**problem, dtype=dtype)
    [alone] = pool.run(sequence_work.attend, 1, **problem, dtype=dtype)
    four = pool.run(sequence_work.attend, 4, **problem, dtype=dtype)
    for index, whole in enumerate(exact):
        parts = [torch.from_numpy(each[index]).double() for each in four]
        found = sum(parts) if index == 4 else torch.cat(parts, 1 if index == 0 else 2)
        allowed = 2 * (torch.from_numpy(alone[index]).double() - whole).norm() + torch.finfo(dtype).eps * whole.norm()
        assert (found - whole).norm() <= allowed, index


@pytest.mark.parametrize("dims", [(8, 4, 4), (8, 8, 2), (4, 1, 4), (8, 2, 4), (32, 8, 16)])
def test_ranks_take_heads_and_the_keys_that_these_read(dims):
    num_heads, num_kv_heads, size = dims
    heads, kv_heads = head_ranges(*dims)
    for own, keys in zip(heads, kv_heads, strict=True):
        read = [head * num_kv_heads // num_heads for head in range(own.start, own.stop)]
        group = len(read) // (keys.stop - keys.start)  # as the kernel counts: as many query heads for each key head
        assert read == [keys.start + index // group for index in range(len(read))]
    assert len(heads) == size


@pytest.mark.parametrize("dims", [(3, 1, 2), (12, 4, 3), (4, 4, 8), (6, 2, 4)])
def test_heads_that_cannot_be_dealt_out(dims):
    assert head_ranges(*dims) is None


def shown_by_masks(bounds, *, rows, width):
    """Return each (row, key, query) of one document, the key before the query."""
    document = [sum(bound <= token for bound in bounds) for token in range(rows * width)]
    return {
        (row, key, query)
        for row in range(rows)
        for query in range(width)
        for key in range(query)
        if document[row * width + key] == document[row * width + query]
    }


@pytest.mark.parametrize("window", [None, 1, 3, 6, 100])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_what_is_seen_is_what_masks_show(window, num_ranks):
    rows, width = ROWS["rows"], ROWS["width"]
    bounds = tuple(sorted({*DOCUMENTS, 23}))
    found = sights(bounds, rows=rows, width=width, num_ranks=num_ranks, window=window)
    shown = {
        (row, key, query)
        for (rank, other), each in found.items()
        for sight in each
        for row in [sight.row]
        for query in range(rank * width // num_ranks, rank * width // num_ranks + sight.queries.stop)
        for key in range(other * width // num_ranks + sight.keys.start, other * width // num_ranks + sight.keys.stop)
        if window is None or query - key < window
    }
    span = [next(r for r in range(num_ranks) if t < (r + 1) * width // num_ranks) for t in range(width)]
    wanted = {
        (row, key, query)
        for row, key, query in shown_by_masks(bounds, rows=rows, width=width)
        if span[key] != span[query] and (window is None or query - key < window)
    }
    assert shown == wanted


def shown_by_turns(bounds, *, rows, width, num_ranks):
    """Return each rank's (row, key, query), of keys before queries, in tokens of whole rows."""
    parts = turned(width, num_ranks)
    tokens = [[*range(low.start, low.stop), *range(high.start, high.stop)] for low, high in parts]
    shown = [set() for _ in parts]
    for (rank, other), each in turned_sights(bounds, rows=rows, width=width, num_ranks=num_ranks).items():
        for sight in each:
            for key in tokens[other][sight.keys]:
                shown[rank] |= {(sight.row, key, query) for query in tokens[rank][sight.queries]}
    for rank, own in enumerate(tokens):
        for begin, end in pairwise(turned_bounds(bounds, rows=rows, width=width, own=parts[rank])):
            there = [divmod(at, len(own)) for at in range(begin, end)]
            shown[rank] |= {(row, own[key], own[query]) for row, query in there for _, key in there if key < query}
    return shown


@pytest.mark.parametrize("bounds", [(0, 3, 4, 20, 23, 45, 46), (0, 23, 46), (0, 11, 12, 23, 24, 46)])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5, 30])
def test_what_is_seen_by_turns_is_what_masks_show(bounds, num_ranks):
    shown = shown_by_turns(bounds, **ROWS, num_ranks=num_ranks)
    wanted = shown_by_masks(bounds, **ROWS)
    assert set().union(*shown) == wanted
    assert sum(map(len, shown)) == len(wanted)  # none twice


@pytest.mark.parametrize("width", [1, 5, 23, 24, 96])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7])
def test_turned_parts_are_all_tokens_and_none_longer_than_a_span(width, num_ranks):
    parts = turned(width, num_ranks)
    assert sorted(token for two in parts for each in two for token in range(each.start, each.stop)) == [*range(width)]
    assert max(position(two, width) for two in parts) <= -(-width // num_ranks)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_by_turns_all_ranks_have_as_much_to_do(num_ranks):
    """Where the last span would see 2P - 1 times what the first one sees."""
    width = 12 * num_ranks
    work = [len(each) for each in shown_by_turns((0, width), rows=1, width=width, num_ranks=num_ranks)]
    assert len(set(work)) == 1


def test_a_span_of_another_length_is_refused():
    query = torch.zeros(1, 2, 5, 8)
    with pytest.raises(ValueError, match=r"rank 0 of 2 must hold its span of each of 1 rows, .* ends at 16 tokens"):
        sequence_attention(query, query, query, circle=Circle(rank=0, size=2, group=None), cu_seq_lens=(0, 16))
