"""Bytes: what the ledger measures is the price, and nothing depends on the routing."""

import pytest
import torch

from planish.memory.ledger import Ledger
from planish.peaks.dispatch import pipelined
from planish.peaks.dispatch.pipelined import sizes_of
from planish.peaks.dispatch.profiles import ONE_EXPERT, PUBLISHED
from planish.price.dispatch import experts_bytes, tile_rows

FP32, BF16 = torch.float32, torch.bfloat16


def measure(layer, **how):
    """Return (forward peak, kept, backward peak), of bytes beside operands and upstream."""
    upstream = torch.ones_like(layer.hidden)
    with Ledger() as ledger:
        with ledger.phase("forward"):
            result = layer.run(**how)
        kept = ledger.live_bytes - result.nbytes
        with ledger.phase("backward"):
            before = ledger.live_bytes
            grads = torch.autograd.grad(result, layer.leaves, upstream)
            del grads
    return ledger.peak_bytes["forward"], kept, ledger.peak_bytes["backward"] - before


CASES = {
    "fp32": {},
    "bf16": {"dtype": BF16},
    "bf16 and fp32 scores": {"dtype": BF16, "score_dtype": FP32},
    "biases": {"bias": True, "gate": "clamped", "transposed": True},
    "biases bf16": {"bias": True, "gate": "clamped", "transposed": True, "dtype": BF16},
    "no gate": {"gate": "relu2", "dtype": BF16},
}


@pytest.mark.parametrize("narrow_products", [False, True])
@pytest.mark.parametrize("block_rows", [1000, 100])
@pytest.mark.parametrize("case", CASES)
def test_bytes_are_the_price(draw_layer, monkeypatch, case, block_rows, narrow_products):
    if narrow_products:
        monkeypatch.setattr(pipelined, "product_dtype", lambda given: given)
    layer = draw_layer(200, 6, 3, **{"dtype": FP32, "hidden_size": 16, "width": 24} | CASES[case])
    forward, kept, backward = measure(layer, tile_rows=20, block_rows=block_rows)
    sizes = sizes_of(layer.hidden, layer.ids, layer.scores, layer.weights, layer.gate)
    priced = experts_bytes(sizes, len(layer.hidden), tile_rows=20, block_rows=block_rows)
    assert kept == 0
    assert (forward, backward) == (priced.forward, priced.backward)


def test_bytes_do_not_depend_on_the_routing(draw_layer):
    found = set()
    for profile in (*PUBLISHED, ONE_EXPERT):
        ids = profile.ids(300, num_experts=32, top_k=2)
        layer = draw_layer(300, 32, 2, ids=ids, dtype=FP32, hidden_size=16, width=24)
        found.add(measure(layer, tile_rows=16, block_rows=150))
    assert len(found) == 1


def test_live_bytes_are_the_same_after_many_steps(draw_layer):
    layer = draw_layer(50, 6, 3, dtype=FP32, hidden_size=16, width=24)
    live = []
    with Ledger() as ledger:
        for _ in range(20):
            layer.run().sum().backward()
            live.append(ledger.live_bytes)
    assert live[1] == live[19]


def test_a_tile_takes_the_bytes_it_is_given(draw_layer):
    layer = draw_layer(50, 6, 3, dtype=FP32, hidden_size=16, width=24)
    sizes = sizes_of(layer.hidden, layer.ids, layer.scores, layer.weights, layer.gate)
    assert tile_rows(sizes, 2**16) == 2**16 // (4 * (2 * 16 + 4 * 24 + 3))
    assert tile_rows(sizes, 1) == 1
