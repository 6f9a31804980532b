"""The plan of a layer: shares, pieces and blocks, for any routing."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planish.peaks.dispatch.least_loaded import Balance, assign, native_bounds, plan_layer
from planish.peaks.dispatch.profiles import ONE_EXPERT, PUBLISHED, Profile
from planish.price.dispatch_ranks import num_strides

LEVEL = Balance(min_routes=1, threshold=1.0, max_foreign=None)


def assert_sound(shares, loads, bounds, balance):
    num_ranks = len(bounds) - 1
    load, foreign = [0] * num_ranks, [0] * num_ranks
    for expert, each in enumerate(shares):
        ranks = [rank for rank, _ in each]
        assert len(set(ranks)) == len(ranks)
        assert sum(routes for _, routes in each) == loads[expert]
        assert all(routes > 0 for _, routes in each)
        for rank, routes in each:
            load[rank] += routes
            foreign[rank] += not bounds[rank] <= expert < bounds[rank + 1]
    assert balance.max_foreign is None or max(foreign) <= balance.max_foreign
    return load


@settings(deadline=None, max_examples=200)
@given(
    loads=st.lists(st.integers(0, 2000), min_size=1, max_size=40),
    num_ranks=st.integers(1, 9),
    capacity=st.sampled_from([1.0, 1.1, 2.0]),
)
def test_shares_add_up_and_no_rank_is_above_the_capacity(loads, num_ranks, capacity):
    bounds = native_bounds(len(loads), num_ranks)
    balance = Balance(min_routes=1, threshold=1.0, max_foreign=None, capacity=capacity)
    shares = assign(loads, bounds, balance)
    load = assert_sound(shares, loads, bounds, balance)
    assert max(load) <= np.ceil(capacity * sum(loads) / num_ranks)
    assert shares == assign(list(loads), tuple(bounds), balance)


@settings(deadline=None, max_examples=200)
@given(
    loads=st.lists(st.integers(0, 2000), min_size=1, max_size=40),
    num_ranks=st.integers(1, 9),
    min_routes=st.integers(1, 500),
    max_foreign=st.integers(0, 3),
)
def test_pieces_and_slots_are_limited_and_levelling_never_makes_it_worse(loads, num_ranks, min_routes, max_foreign):
    bounds = native_bounds(len(loads), num_ranks)
    balance = Balance(min_routes=min_routes, threshold=1.0, max_foreign=max_foreign)
    shares = assign(loads, bounds, balance)
    load = assert_sound(shares, loads, bounds, balance)
    native = [sum(loads[bounds[rank] : bounds[rank + 1]]) for rank in range(num_ranks)]
    assert max(load) <= max(*native, np.ceil(sum(loads) / num_ranks))
    for expert, each in enumerate(shares):
        lent = [routes for rank, routes in each if not bounds[rank] <= expert < bounds[rank + 1]]
        assert all(routes >= min_routes for routes in lent[:-1])


def test_a_load_near_the_mean_stays_at_home():
    loads, bounds = [13, 10, 9, 10], native_bounds(4, 4)
    assert assign(loads, bounds, Balance(min_routes=1)) == (((0, 13),), ((1, 10),), ((2, 9),), ((3, 10),))
    assert assign([14, 10, 9, 9], bounds, Balance(min_routes=1))[0] == ((0, 11), (2, 2), (3, 1))


def test_what_was_sent_twice_elsewhere_is_held_once():
    """A remainder was once forced on a rank that already held the expert: the load is one more than whole shares."""
    assert assign([1001, 0, 0, 0], native_bounds(4, 4), LEVEL)[0] == ((0, 251), (1, 251), (2, 251), (3, 248))


def test_native_experts_need_not_divide_by_ranks():
    assert native_bounds(7, 3) == (0, 3, 6, 7)
    assert native_bounds(2, 4) == (0, 1, 2, 2, 2)
    assert native_bounds(6, 4) == (0, 2, 4, 6, 6)


def draw_counts(rng, num_ranks, tokens, strides, num_experts, top_k, ids=None):
    counts = np.zeros((num_ranks, num_experts, strides), np.int64)
    in_stride = np.zeros((num_ranks, strides), np.int64)
    for rank in range(num_ranks):
        chosen = ids
        if chosen is None:
            weights = rng.dirichlet(np.full(num_experts, 0.3)) + 1e-9
            keys = rng.exponential(size=(tokens[rank], num_experts)) / weights
            chosen = np.argsort(keys, 1)[:, :top_k]
        stride = np.arange(tokens[rank]) % strides
        np.add.at(counts[rank], (chosen[: tokens[rank]], stride[:, None]), 1)
        in_stride[rank] = np.bincount(stride, minlength=strides)
    return counts, in_stride


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_ranks=st.integers(1, 5),
    num_experts=st.integers(1, 12),
    budget=st.integers(1, 40),
    data=st.data(),
)
def test_no_block_holds_more_rows_than_the_budget(seed, num_ranks, num_experts, budget, data):
    rng = np.random.default_rng(seed)
    top_k = data.draw(st.integers(1, num_experts))
    tokens = data.draw(st.lists(st.integers(0, 50), min_size=num_ranks, max_size=num_ranks))
    block_rows = budget + num_ranks - 1
    strides = num_strides(max(1, *tokens), block_rows, num_ranks)
    counts, in_stride = draw_counts(rng, num_ranks, tokens, strides, num_experts, top_k)
    bounds = native_bounds(num_experts, num_ranks)
    plan = plan_layer(counts, in_stride, bounds=bounds, block_rows=block_rows, balance=LEVEL)
    assert plan.blocks[0][0] == 0
    assert plan.blocks[-1][1] == strides
    assert all(left[1] == right[0] for left, right in zip(plan.blocks, plan.blocks[1:], strict=False))
    shares = np.zeros((num_experts, num_ranks), np.int64)
    for expert, each in enumerate(plan.shares):
        for rank, routes in each:
            shares[expert, rank] = routes
    arrivals = np.stack([plan.arrivals(rank) for rank in range(num_ranks)], 2)
    assert (arrivals.sum(0) == shares).all()
    assert [[bool(shares[e, rank]) for e in each] for rank, each in enumerate(plan.foreign(bounds))] == [
        [True] * len(each) for each in plan.foreign(bounds)
    ]
    for block, (first, end) in enumerate(plan.blocks):
        assert (arrivals[block].sum(1) == counts[:, :, first:end].sum((0, 2))).all()
        # Rows, counted from the pieces themselves.
        received = np.zeros((num_ranks, num_ranks), np.int64)
        for stride in range(first, end):
            routes = np.zeros((num_ranks, num_ranks), np.int64)
            for expert in range(num_experts):
                for source in range(num_ranks):
                    for occurrence in range(counts[source, expert, stride]):
                        routes[source, holder(plan, expert, source, stride, occurrence)] += 1
            received += np.minimum(routes, in_stride[:, stride, None])
        assert received.sum(0).max() <= block_rows
        assert received.sum(1).max() <= block_rows


def holder(plan, expert, source, stride, occurrence):
    if expert not in plan.splits:
        return plan.shares[expert][0][0]
    split = plan.splits[expert]
    position = split.starts[source, stride] + occurrence
    return split.ranks[int(np.searchsorted(split.bounds[stride], position, side="right")) - 1]


def test_strides_are_prime_and_few_tokens_are_one_block():
    assert num_strides(128, 4096, 8) == 1
    assert num_strides(65536, 65536, 8) == 11
    assert num_strides(65536, 8192, 8) == 67
    with pytest.raises(ValueError, match="8 is the smallest that works"):
        num_strides(128, 7, 8)


def test_even_routing_gets_few_blocks_and_the_worst_gets_more():
    """Eight ranks, 4,096 rows at a time: strides that share a factor with the experts would need one block each."""
    tokens, experts, bounds = 4096, 128, native_bounds(128, 8)
    strides = num_strides(tokens, 4096, 8)
    blocks = {}
    for profile in (*PUBLISHED, ONE_EXPERT):
        ids = profile.ids(tokens, num_experts=experts, top_k=2).numpy()
        counts, in_stride = draw_counts(None, 8, [tokens] * 8, strides, experts, 2, ids)
        for levelled in (Balance(min_routes=1), Balance(max_foreign=0)):
            plan = plan_layer(counts, in_stride, bounds=bounds, block_rows=4096, balance=levelled)
            blocks[profile.name, levelled.max_foreign] = len(plan.blocks)
    assert blocks["balanced", 4] <= 3
    assert max(number for (_, foreign), number in blocks.items() if foreign) <= 3
    assert blocks["100/1", 0] == strides == 11


def published_send_ratio(profile, *, tokens, num_ranks, num_experts, top_k, chunks):
    """Return (most sent to one rank / mean) over sources and strided chunks, with experts cut by global intervals."""
    flat = profile.ids(tokens, num_experts=num_experts, top_k=top_k).numpy().ravel()
    order = np.argsort(flat, kind="stable")
    loads = np.bincount(flat, minlength=num_experts)
    shares = assign((loads * num_ranks).tolist(), native_bounds(num_experts, num_ranks), LEVEL)
    chunk = order // top_k % chunks
    worst = 0.0
    for source in range(num_ranks):
        ranks = np.concatenate(
            [
                np.repeat([rank for rank, _ in each], [count for _, count in each])[source * load : (source + 1) * load]
                for each, load in zip(shares, loads, strict=True)
                if load
            ]
        )
        sent = np.bincount(chunk * num_ranks + ranks, minlength=chunks * num_ranks).reshape(chunks, num_ranks)
        worst = max(worst, (sent.max(1) / sent.mean(1)).max())
    return worst


@pytest.mark.parametrize(
    ("profile", "published"),
    [
        (Profile(), 1.00),
        (Profile(percent=95, hot=16), 1.35),
        (Profile(percent=80, hot=16), 2.40),
        (Profile(percent=50, hot=4), 2.29),
    ],
)
def test_intervals_send_what_was_published(profile, published):
    ratio = published_send_ratio(profile, tokens=65536, num_ranks=8, num_experts=128, top_k=8, chunks=10)
    assert round(ratio, 2) == published
