"""The replayed kernels weigh what a ledger counts, to the byte; no layout of documents weighs more than the price."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from planish.memory.ledger import Ledger
from planish.peaks.attention.packed import causal_attention
from planish.price.attention import backward_bytes, forward_bytes
from planish.shapes import AttentionShape, BatchShape

HEADS, KV_HEADS, WIDTH = 8, 2, 16
KINDS = {
    "plain": {},
    "window": {"window": 100},
    "narrow value": {"value": 8},
    "wide value": {"value": 24},
    "softcap": {"softcap": 5.0},
    "softcap and window": {"softcap": 5.0, "window": 100},
    "sinks": {"sinks": True},
    "sinks and window": {"sinks": True, "window": 100},
}


def measured(kind, rows, context, dtype, bounds=None):
    """Return what forward adds, and what backward adds."""
    options = dict(KINDS[kind])
    value_width, with_sinks = options.pop("value", WIDTH), options.pop("sinks", False)
    with FakeTensorMode(), Ledger() as ledger:
        query, key, value = (
            torch.empty(rows, context, heads, width, dtype=dtype).transpose(1, 2).requires_grad_()
            for heads, width in ((HEADS, WIDTH), (KV_HEADS, WIDTH), (KV_HEADS, value_width))
        )
        sinks = [torch.empty(HEADS, dtype=dtype, requires_grad=True)] if with_sinks else []
        before = ledger.live_bytes
        ledger.start_step(1)
        with ledger.phase("forward"):
            out = causal_attention(query, key, value, cu_seq_lens=bounds, sinks=sinks[0] if sinks else None, **options)
        forward = ledger.peak_bytes["forward"] - before
        grad = torch.empty_like(out)
        before = ledger.live_bytes
        ledger.start_step(2)
        with ledger.phase("backward"):
            torch.autograd.grad(out, [query, key, value, *sinks], grad)
        return forward, ledger.peak_bytes["backward"] - before


def priced(kind, dtype, batch):
    options = KINDS[kind]
    shape = AttentionShape(
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        qk_width=WIDTH,
        v_width=options.get("value", WIDTH),
        window=options.get("window"),
        softcapped="softcap" in options,
        sinks=options.get("sinks", False),
    )
    return tuple(price(shape, batch, dtype.itemsize) for price in (forward_bytes, backward_bytes))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "context"), [(1, 7), (2, 229), (1, 1100)])
def test_whole_rows_weigh_their_price(kind, dtype, rows, context):
    batch = BatchShape(rows=rows, context=context, split=False)
    assert priced(kind, dtype, batch) == measured(kind, rows, context, dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_two_documents_weigh_their_price(kind):
    batch = BatchShape(context=640)
    whole, cut = (measured(kind, 1, 640, torch.bfloat16, bounds) for bounds in (None, (0, 1, 640)))
    assert priced(kind, torch.bfloat16, batch) == tuple(map(max, whole, cut))


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_no_documents_weigh_more_than_the_price(data):
    assert_no_documents_weigh_more(data)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_no_documents_weigh_more_than_the_price_in_any_of_many(data):
    assert_no_documents_weigh_more(data)


def assert_no_documents_weigh_more(data):
    kind = data.draw(st.sampled_from(sorted(KINDS)))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    rows, context = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([2, 5, 100, 129, 300, 640]))
    cuts = data.draw(st.lists(st.integers(0, rows * context), max_size=6))
    bounds = tuple(sorted({0, rows * context, *cuts}))
    found = measured(kind, rows, context, dtype, bounds)
    assert all(map(int.__le__, found, priced(kind, dtype, BatchShape(rows=rows, context=context))))
