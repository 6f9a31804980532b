"""Bytes of attention over ranks: the ledger measures what the price says, on the rank that sees most."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from attention import sequence_work
from planish.comm.ring import Circle
from planish.price.attention_ranks import by_heads, sequence_bytes
from planish.shapes import AttentionShape, BatchShape

HEADS, SHARED, SPANS = {"heads": 8, "kv_heads": 4}, {"heads": 8, "kv_heads": 1}, {"heads": 3, "kv_heads": 1}
KINDS = {
    "plain": {},
    "window": {"window": 100},
    "short window": {"window": 7},
    "softcap": {"softcap": 5.0},
    "softcap and window": {"softcap": 5.0, "window": 130},
    "narrow value": {"v_width": 4},
    "wide value": {"v_width": 12},
    "one row": {"rows": 1},
}


def price(itemsize, num_ranks, *, rows, width, heads, kv_heads, qk_width=8, v_width=8, window=None, softcap=None):
    shape = AttentionShape(
        num_heads=heads, num_kv_heads=kv_heads, qk_width=qk_width, v_width=v_width, window=window,
        softcapped=softcap is not None,
    )  # fmt: skip
    batch = BatchShape(rows=rows, context=width // num_ranks, split=False, sharers=num_ranks)
    return by_heads(shape, num_ranks), sequence_bytes(shape, batch, itemsize)


@pytest.mark.parametrize("heads", [HEADS, SHARED, SPANS], ids=["heads", "shared heads", "spans"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_price_is_what_the_ledger_measures(kind, dtype, heads):
    problem = {"rows": 2, "width": 640, **heads, **KINDS[kind]}
    dealt, priced = price(dtype.itemsize, 4, **problem)
    assert dealt == (heads is not SPANS)
    with FakeTensorMode():
        circle = Circle(rank=3, size=4, group=None)
        forward, kept, backward = sequence_work.peaks(None, circle=circle, dtype=dtype, **problem)
    assert (forward, kept, backward - kept) == (priced.forward, priced.kept, priced.backward)
