"""Tiles of the head: within the budget, flat in tokens and vocabulary, and the strategy that the rules name."""

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from planish.price.vocab import (
    BLOCK,
    CACHED_BYTES,
    ITEMSIZE,
    MIN_ROWS,
    ROW_STEP,
    Head,
    Tiling,
    block_ranges,
    choose_tiling,
    cross_entropy_phases,
)

DTYPES = st.sampled_from(["float32", "bfloat16", "float16", "float64"])
STRATEGIES = st.sampled_from(["auto", "gradients-in-forward", "recompute"])
heads = st.builds(
    Head,
    tokens=st.one_of(st.integers(0, 300), st.integers(1, 2**20)),
    hidden_size=st.integers(1, 8192),
    vocab_size=st.one_of(st.integers(1, 3000), st.integers(1, 300_000)),
    hidden_dtype=DTYPES,
    weight_dtype=DTYPES,
    compute_dtype=DTYPES,
    capped=st.booleans(),
    wanted=st.frozensets(st.sampled_from(["lse", "entropy", "mean", "argmax"])),
    grads=st.frozensets(st.sampled_from(["hidden", "weight", "bias"])),
    device=st.sampled_from(["cpu", "cuda"]),
)
SMOLLM2 = Head(tokens=8192, hidden_size=576, vocab_size=49152)
GEMMA2 = Head(tokens=4096, hidden_size=2304, vocab_size=256_000, capped=True)
BF16 = {"hidden_dtype": "bfloat16", "weight_dtype": "bfloat16", "compute_dtype": "bfloat16"}


@settings(deadline=None, max_examples=200)
@given(heads, st.sampled_from([1, 2**20, 2**24, 2**26, 2**30]), STRATEGIES)
def test_working_buffers_are_within_the_budget_or_the_smallest(head, tile_bytes, strategy):
    tiling = choose_tiling(head, tile_bytes=tile_bytes, strategy=strategy)
    assert tiling.rows % ROW_STEP == 0
    assert 1 <= tiling.blocks <= head.blocks
    if tiling.workspace_bytes(head) > tile_bytes:
        assert tiling.rows == ROW_STEP
    elif tiling.rows < head.tokens:
        more_rows = replace(tiling, rows=tiling.rows + ROW_STEP)
        tile = more_rows.rows * head.widest(tiling.blocks) * ITEMSIZE[head.product_dtype]
        out_of_cache = head.device == "cpu" and not tiling.keeps_tiles and tile > CACHED_BYTES
        assert more_rows.workspace_bytes(head) > tile_bytes or out_of_cache


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 40_000), st.integers(1, 9))
def test_ranges_of_blocks_are_the_vocabulary_in_order(columns, step):
    head = Head(tokens=1, hidden_size=1, vocab_size=columns)
    ranges = list(block_ranges(columns, step))
    assert [start for _, start, _ in ranges] == [0, *(stop for _, _, stop in ranges[:-1])]
    assert ranges[-1][2] == columns
    assert all(start == block * BLOCK for block, start, _ in ranges)
    assert max(stop - start for _, start, stop in ranges) <= head.widest(step)
    assert min(stop - start for _, start, stop in ranges) >= min(columns, BLOCK)


@given(st.integers(0, 10_000), st.integers(1, 64))
def test_groups_of_rows_are_equal_and_fit(num_valid, eighths):
    tiling = Tiling(strategy="recompute", rows=8 * eighths, blocks=1)
    step = tiling.group_rows(num_valid)
    assert step <= tiling.rows
    assert step % ROW_STEP == 0
    assert -(-num_valid // max(1, step)) <= -(-num_valid // tiling.rows)


@pytest.mark.parametrize(
    ("head", "tile_bytes", "expected"),
    [
        (SMOLLM2, 2**26, "gradients-in-forward"),
        # 256 rows of 49152 logits are 48 MiB.
        (SMOLLM2, 2**25, "recompute"),
        (replace(SMOLLM2, tokens=100), 2**25, "gradients-in-forward"),
        # The float32 sum of 49152 x 576 gradients is 108 MiB.
        (replace(SMOLLM2, **BF16), 2**26, "recompute"),
        (replace(SMOLLM2, **BF16), 2**27, "gradients-in-forward"),
        (replace(SMOLLM2, **BF16, grads=frozenset({"hidden"})), 2**26, "gradients-in-forward"),
        (replace(SMOLLM2, **dict.fromkeys(BF16, "float16")), 2**30, "recompute"),
        (replace(SMOLLM2, grads=frozenset()), 2**26, "recompute"),
        (GEMMA2, 2**26, "recompute"),
    ],
)
def test_auto_makes_gradients_in_forward_where_rows_and_sum_fit(head, tile_bytes, expected):
    tiling = choose_tiling(head, tile_bytes=tile_bytes)
    assert tiling.strategy == expected
    assert tiling.rows >= min(MIN_ROWS, head.tokens)


@pytest.mark.parametrize(
    ("tokens", "sweeps", "products"), [(8192, 1, 4), (2**26 // (576 * 4), 1, 4), (2**26 // (576 * 4) + 1, 2, 5)]
)
def test_a_fifth_product_where_the_sum_of_hidden_gradients_does_not_fit(tokens, sweeps, products):
    head = replace(SMOLLM2, **BF16, tokens=tokens)
    tiling = choose_tiling(head, tile_bytes=2**26, strategy="recompute")
    assert tiling.sweeps == sweeps
    assert tiling.products(head) == products


def test_products_are_those_of_the_gradients_wanted():
    in_forward = Tiling(strategy="gradients-in-forward", rows=8, blocks=1)
    recompute = Tiling(strategy="recompute", rows=8, blocks=1)
    counts = {frozenset(): (1, 1), frozenset({"weight"}): (2, 3), frozenset({"hidden", "weight", "bias"}): (3, 4)}
    for grads, expected in counts.items():
        head = replace(SMOLLM2, grads=grads)
        assert (in_forward.products(head), recompute.products(head)) == expected


@pytest.mark.parametrize("strategy", ["gradients-in-forward", "recompute"])
def test_a_million_tokens_add_nothing_but_their_own_numbers(strategy):
    """Beside gradients of hidden: 4 bytes a token (the losses) and with recomputation 4 more (the lse)."""
    few, many = (replace(SMOLLM2, **BF16, tokens=tokens) for tokens in (2**17, 2**20))
    phases = [
        cross_entropy_phases(head, choose_tiling(head, tile_bytes=2**26, strategy=strategy)) for head in (few, many)
    ]
    tokens = 2**20 - 2**17
    in_forward = strategy == "gradients-in-forward"
    hidden = tokens * 576 * 2
    grown = phases[1].forward - phases[0].forward
    assert abs(grown - (hidden + 4 * tokens if in_forward else 8 * tokens)) < 2**16
    grown = phases[1].backward - phases[0].backward
    assert abs(grown - (hidden if in_forward else hidden + 4 * tokens)) < 2**16
