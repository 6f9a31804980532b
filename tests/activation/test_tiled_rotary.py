"""Rotary positions in tiles: transformers' bits, of any family that turns halves, and room for one tile."""

import pytest
import torch
from transformers.models.glm4.modeling_glm4 import apply_rotary_pos_emb as of_glm4
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as of_llama

from planish.memory.ledger import Ledger
from planish.methods import Plan, Tiled
from planish.models.install import install
from planish.models.rotary import _is_ours
from planish.peaks.activation.rotary import rotated


def drawn(dtype, *, tokens=7, width=8, rows=2):
    generator = torch.Generator().manual_seed(0)
    sizes = ((rows, 3, tokens, width), (rows, 1, tokens, width), (1, tokens, width), (1, tokens, width))
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tile_bytes", [1, 300, 2**20])
@pytest.mark.parametrize("turned", [False, True])
def test_bits_are_those_of_transformers(dtype, tile_bytes, turned):
    query, key, cos, sin = drawn(dtype)
    if turned:  # as attention has them: heads before tokens in shape, after them in memory
        query = query.transpose(1, 2).contiguous().transpose(1, 2)
    leaves = [each.clone().requires_grad_() for each in (query, key)]
    expected = of_llama(*leaves, cos, sin)
    grads = torch.autograd.grad([each.square().sum() for each in expected], leaves)
    found = [rotated(each, cos, sin, tile_bytes=tile_bytes) for each in leaves]
    found_grads = torch.autograd.grad([each.square().sum() for each in found], leaves)
    for a, b in zip([*found, *found_grads], [*expected, *grads], strict=True):
        assert torch.equal(a, b)


def test_its_gradient_is_the_derivative():
    query, _, cos, sin = drawn(torch.float64, tokens=3, width=4)
    assert torch.autograd.gradcheck(lambda x: rotated(x, cos, sin, tile_bytes=100), query.requires_grad_())
    assert rotated(query[:, :, :0], cos[:, :0], sin[:, :0], tile_bytes=100).shape == (2, 3, 0, 4)


def test_it_holds_the_result_and_one_tile():
    query, _, cos, sin = drawn(torch.float32, tokens=1024, width=64, rows=1)
    tile_bytes = 3 * 64 * 4 * 16

    def peak(run):
        with Ledger() as ledger, ledger.phase("forward"):
            before = ledger.live_bytes
            run()
        return ledger.end_step().phases["forward"].peak_bytes - before

    ours = peak(lambda: rotated(query, cos, sin, tile_bytes=tile_bytes))
    assert ours == query.nbytes + tile_bytes
    assert peak(lambda: of_llama(query, query[:, :1], cos, sin)) >= 3 * query.nbytes


def test_another_formula_is_left_alone():
    assert _is_ours(of_llama)
    assert not _is_ours(of_glm4)  # turns pairs, and part of a head


@pytest.mark.parametrize("family", ["llama", "qwen3-moe", "gemma2"])
def test_a_model_computes_the_same_bits(tiny_model, family):
    ids = torch.arange(24).view(2, 12)

    def learned(plan):
        model = tiny_model(family).train()
        installed = install(model, plan)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        sentences = [each for each in installed.replaced if "rotations" in each]
        installed.undo()
        return loss, {name: each.grad for name, each in model.named_parameters()}, sentences, model

    loss, grads, nothing, _ = learned(Plan())
    found, found_grads, [sentence], model = learned(Plan(activation=Tiled(norms=True)))
    layers = model.config.num_hidden_layers
    assert nothing == []
    assert sentence == f"{layers} rotations of queries and keys: in tiles"
    assert torch.equal(found, loss)
    for name, grad in grads.items():
        assert torch.allclose(found_grads[name], grad, rtol=1e-4, atol=1e-6), name  # norms sum in another order
    assert not any("forward" in vars(each) for each in model.modules())
