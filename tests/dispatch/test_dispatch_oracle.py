"""One rank against the textbook in float64: values, gradients, and every shape of trouble."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from planish.peaks.dispatch.gates import ClampedGlu, gate_backward, gate_forward
from planish.peaks.dispatch.profiles import ONE_EXPERT, PUBLISHED, Profile
from planish.peaks.dispatch.reference import gate_reference

GATES = ("swiglu", "geglu", "geglu_tanh", "reglu", "clamped", "relu2", "silu")


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("form", ["plain", "biased", "transposed", "biased and transposed"])
def test_every_kind_of_expert(draw_layer, assert_matches, gate, form):
    layer = draw_layer(23, 5, 2, gate=gate, bias="biased" in form, transposed="transposed" in form)
    assert_matches(layer)
    assert_matches(layer, tile_rows=3, block_rows=9)


@settings(deadline=None, max_examples=40)
@given(
    tokens=st.integers(0, 20),
    num_experts=st.integers(1, 9),
    tile_rows=st.integers(1, 8),
    block_rows=st.integers(1, 25),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_any_sizes(draw_layer, assert_matches, tokens, num_experts, tile_rows, block_rows, seed, data):
    top_k = data.draw(st.integers(1, num_experts))
    layer = draw_layer(tokens, num_experts, top_k, seed=seed)
    assert_matches(layer, tile_rows=tile_rows, block_rows=block_rows)


@pytest.mark.parametrize("profile", [*PUBLISHED, ONE_EXPERT, Profile(percent=0, hot=3)], ids=lambda each: each.name)
def test_any_routing(draw_layer, assert_matches, profile):
    ids = profile.ids(40, num_experts=20, top_k=1 if profile is ONE_EXPERT else 2)
    assert_matches(draw_layer(40, 20, ids.shape[1], ids=ids))


def test_an_expert_twice_in_one_token(draw_layer, assert_matches):
    assert_matches(draw_layer(4, 3, 2, ids=torch.tensor([[0, 0], [2, 2], [1, 0], [2, 2]])), tile_rows=1)


@pytest.mark.parametrize(
    "frozen",
    [
        ("up", "down", "up_bias", "down_bias"),
        ("scores",),
        ("hidden",),
        ("down", "down_bias"),
        ("up",),
        ("hidden", "scores"),
        ("hidden", "up", "down", "up_bias", "down_bias"),
    ],
)
def test_what_is_frozen_gets_no_gradient_and_the_rest_the_same(draw_layer, assert_matches, frozen):
    assert_matches(draw_layer(11, 4, 2, bias=True, frozen=frozen))


def test_gradcheck(draw_layer):
    layer = draw_layer(4, 3, 2, bias=True, gate="clamped", transposed=True, width=2, hidden_size=3)
    assert torch.autograd.gradcheck(lambda *_: layer.run(tile_rows=2, block_rows=3), layer.leaves)


def test_operands_that_are_not_contiguous(draw_layer):
    layer = draw_layer(12, 4, 2)
    expected = layer.run()
    hidden = layer.hidden.detach().t().contiguous().t().requires_grad_()
    scores = layer.scores.detach().t().contiguous().t().requires_grad_()
    moved = type(layer)(
        hidden=hidden, ids=layer.ids.t().contiguous().t(), scores=scores, weights=layer.weights, gate=layer.gate
    )
    result = moved.run()
    torch.testing.assert_close(result, expected)
    ours = moved.gradients(result.sum(), torch.ones(()))
    theirs = layer.gradients(expected.sum(), torch.ones(()))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)


def test_clamped_gate_at_its_limit():
    """At the limit itself the gradient passes, just above it does not, in every dtype."""
    gate = ClampedGlu(alpha=1.702, limit=7.0)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        above = 7.0 + torch.finfo(dtype).eps * 4
        inner = torch.tensor([[7.0, 7.0, above, above, -above, -above, -7.0, -7.0, above, -7.0]], dtype=dtype)
        leaf = inner.clone().requires_grad_()
        (expected,) = torch.autograd.grad(gate_reference(leaf, gate).sum(), leaf)
        outer, scratch = torch.empty(2, 1, 5, dtype=dtype)
        gate_forward(gate, inner, outer, scratch)
        torch.testing.assert_close(outer, gate_reference(inner, gate))
        gate_backward(gate, inner, torch.ones(1, 5, dtype=dtype), scratch)
        torch.testing.assert_close(inner, expected)
        assert torch.equal(inner == 0, expected == 0)


def test_bad_operands_are_named(draw_layer):
    layer = draw_layer(4, 3, 2)
    with pytest.raises(TypeError, match="experts' dtype, torch\\.float64; got torch\\.float32"):
        type(layer)(
            hidden=layer.hidden.float(), ids=layer.ids, scores=layer.scores, weights=layer.weights, gate=layer.gate
        ).run()
    with pytest.raises(ValueError, match="for 4 tokens"):
        type(layer)(
            hidden=layer.hidden, ids=layer.ids[:3], scores=layer.scores, weights=layer.weights, gate=layer.gate
        ).run()
