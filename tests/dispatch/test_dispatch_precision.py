"""In bf16 and fp16 the error against float64 is at most twice that of transformers' way, and one rounding."""

import pytest
import torch
from torch.nn import functional as F

from planish.peaks.dispatch import pipelined


def grouped(layer):
    """Return the layer's result as transformers' grouped experts form it: weighted in its dtype, summed wide."""
    num_experts, top_k = layer.weights.num_experts, layer.ids.shape[1]
    chosen = layer.ids.flatten()
    out = layer.hidden.new_empty(len(chosen), layer.hidden.shape[1])
    parts = []
    for expert in range(num_experts):
        place = (chosen == expert).nonzero().flatten()
        left, right = F.linear(layer.hidden[place // top_k], layer.weights.up[expert]).chunk(2, -1)
        made = F.linear(F.silu(left) * right, layer.weights.down[expert])
        parts.append((place, made * layer.scores.flatten()[place, None]))
    places, made = (torch.cat(each) for each in zip(*parts, strict=True))
    out = made[places.argsort()]
    return out.view(*layer.ids.shape, -1).sum(1).to(layer.hidden.dtype)


@pytest.mark.parametrize("narrow_products", [False, True])
@pytest.mark.parametrize("blocks", [{"block_rows": 1000}, {"block_rows": 17, "tile_rows": 3}], ids=["whole", "blocks"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_errors_are_no_larger_than_twice_the_plain_ones(draw_layer, monkeypatch, dtype, blocks, narrow_products):
    if narrow_products:
        monkeypatch.setattr(pipelined, "product_dtype", lambda given: given)
    layer = draw_layer(120, 5, 3, dtype=dtype, hidden_size=24, width=32)
    upstream = torch.randn(120, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    exact = layer.reference()
    truth = [exact, *torch.autograd.grad(exact, layer.leaves, upstream)]
    errors = {}
    for name, result in (("ours", layer.run(**blocks)), ("plain", grouped(layer))):
        found = [result, *layer.gradients(result, upstream)]
        errors[name] = [(mine.double() - true).norm() / true.norm() for mine, true in zip(found, truth, strict=True)]
    ulp = torch.finfo(dtype).eps / 2
    for ours, plain in zip(errors["ours"], errors["plain"], strict=True):
        assert ours <= 2 * plain + ulp
