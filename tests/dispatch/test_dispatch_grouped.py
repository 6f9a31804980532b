"""Grouped products, as on a GPU: the reference's values and gradients, and the price's bytes."""

import pytest
import torch

from planish.memory.ledger import Ledger
from planish.peaks.dispatch import grouped, pipelined
from planish.peaks.dispatch.pipelined import sizes_of
from planish.peaks.dispatch.profiles import ONE_EXPERT, PUBLISHED
from planish.price.dispatch import experts_bytes

FP32, BF16 = torch.float32, torch.bfloat16
FORMS = {
    "plain": {},
    "biases": {"bias": True},
    "transposed": {"transposed": True},
    "clamped": {"gate": "clamped", "bias": True, "transposed": True},
    "no gate": {"gate": "relu2"},
}


@pytest.fixture(autouse=True)
def _grouped_anywhere(monkeypatch):
    """torch has the same products on a CPU; there a loop is faster, so that nothing takes them by itself."""
    monkeypatch.setattr(pipelined, "has_grouped_products", lambda *_: True)
    monkeypatch.setattr(pipelined, "product_dtype", lambda given: given)


@pytest.mark.parametrize("how", [{"tile_rows": 7}, {"tile_rows": 64, "block_rows": 30}, {"tile_rows": 1000}])
@pytest.mark.parametrize("form", FORMS)
def test_every_kind_of_expert(draw_layer, form, how):
    layer = draw_layer(60, 6, 3, dtype=FP32, hidden_size=16, width=24, **FORMS[form])
    result, expected = layer.run(**how), layer.reference()
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(result.double(), expected.double(), rtol=1e-5, atol=1e-5)
    theirs = torch.autograd.grad(expected, layer.leaves, upstream.to(expected.dtype))
    for mine, other in zip(layer.gradients(result, upstream), theirs, strict=True):
        torch.testing.assert_close(mine.double(), other.double(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("profile", [*PUBLISHED, ONE_EXPERT], ids=lambda each: each.name)
def test_any_routing(draw_layer, profile):
    layer = draw_layer(96, 32, 2, ids=profile.ids(96, num_experts=32, top_k=2), dtype=FP32, hidden_size=16, width=24)
    torch.testing.assert_close(layer.run(tile_rows=40), layer.reference().float(), rtol=1e-5, atol=1e-5)


def test_no_tokens_have_no_tiles(draw_layer):
    layer = draw_layer(0, 4, 2, dtype=FP32, hidden_size=16, width=24)
    result = layer.run()
    assert result.shape == (0, 16)
    assert all(not grad.any() for grad in layer.gradients(result, torch.zeros(0, 16)))


@pytest.mark.parametrize("tile_rows", [20, 10_000])
@pytest.mark.parametrize("block_rows", [1000, 100])
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("form", FORMS)
def test_bytes_are_the_price(draw_layer, form, dtype, block_rows, tile_rows):
    layer = draw_layer(200, 6, 3, dtype=dtype, hidden_size=16, width=24, **FORMS[form])
    how = {"tile_rows": tile_rows, "block_rows": block_rows}
    upstream = torch.ones_like(layer.hidden)
    with Ledger() as ledger:
        with ledger.phase("forward"):
            result = layer.run(**how)
        with ledger.phase("backward"):
            before = ledger.live_bytes
            grads = torch.autograd.grad(result, layer.leaves, upstream)
            del grads
    sizes = sizes_of(layer.hidden, layer.ids, layer.scores, layer.weights, layer.gate)
    priced = experts_bytes(sizes, 200, **how)
    assert ledger.peak_bytes["forward"] == priced.forward
    assert ledger.peak_bytes["backward"] - before == priced.backward


@pytest.mark.parametrize(
    ("dtype", "hidden_size", "width", "taken"),
    [(BF16, 16, 24, True), (BF16, 12, 24, False), (BF16, 16, 20, False), (torch.float64, 16, 24, False)],
)
def test_a_gpu_takes_them_where_rows_are_aligned(draw_layer, dtype, hidden_size, width, taken):
    layer = draw_layer(4, 2, 1, dtype=dtype, hidden_size=hidden_size, width=width)
    hidden = torch.empty(4, hidden_size, dtype=dtype, device="meta")
    assert grouped.has_grouped_products(_OnGpu(hidden), layer.weights) is taken
    assert not grouped.has_grouped_products(layer.hidden, layer.weights)


class _OnGpu:
    """Says of a tensor that it lies on a GPU."""

    def __init__(self, tensor):
        self.shape, self.dtype, self.itemsize = tensor.shape, tensor.dtype, tensor.itemsize
        self.device = torch.device("cuda")
