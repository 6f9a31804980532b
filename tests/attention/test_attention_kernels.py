"""Packed attention equals the textbook in float64: values, gradients, any documents, window, softcap, sinks, widths."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from planish.peaks.attention.documents import Shape, document_bounds
from planish.peaks.attention.flash import FlashKernel
from planish.peaks.attention.kernel import Attention
from planish.peaks.attention.packed import causal_attention
from planish.peaks.attention.reference import reference_attention
from planish.peaks.attention.tiled import TiledKernel

VALUE_BOUND, GRADIENT_BOUND = 1e-12, 1e-10
SCALE = 0.3


def draw_inputs(sizes, *, sinks=False, dtype=torch.float64, seed=0):
    rows, heads, kv_heads, queries, keys, width, value_width = sizes
    generator = torch.Generator().manual_seed(seed)
    shapes = [(rows, queries, heads, width), (rows, keys, kv_heads, width), (rows, keys, kv_heads, value_width)]
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64).transpose(1, 2) for shape in shapes]
    if sinks:
        inputs.append(torch.randn(heads, generator=generator, dtype=torch.float64))
    return [each.to(dtype).requires_grad_() for each in inputs]


def as_options(inputs, **options):
    """Return query, key and value, and the options with sinks where `inputs` has them."""
    query, key, value, *sinks = inputs
    return (query, key, value), options | {"scale": SCALE, "sinks": sinks[0] if sinks else None}


def tiled_attention(query, key, value, *, cu_seq_lens=None, window=None, softcap=None, sinks=None, scale):
    """The kernel that serves every device, without a softcap too."""
    shape = Shape(rows=query.shape[0], queries=query.shape[2], keys=key.shape[2])
    bounds = document_bounds(cu_seq_lens, shape)
    kernel = TiledKernel(bounds=bounds, window=window, softcap=softcap, scale=scale)
    return Attention.apply(kernel, query, key, value, sinks)


def assert_equals_reference(attention, inputs, **options):
    operands, options = as_options(inputs, **options)
    out, expected = attention(*operands, **options), reference_attention(*operands, **options)
    torch.testing.assert_close(out, expected, atol=VALUE_BOUND, rtol=0.0)
    upstream = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for got, want in zip(
        torch.autograd.grad(out, inputs, upstream), torch.autograd.grad(expected, inputs, upstream), strict=True
    ):
        torch.testing.assert_close(got, want, atol=GRADIENT_BOUND, rtol=0.0)


def windows():
    return st.sampled_from([None, 1, 2, 5, 60, 140, 1000])


@st.composite
def cases(draw):
    rows = draw(st.integers(1, 3))
    kv_heads, group = draw(st.sampled_from([(1, 1), (1, 4), (2, 3), (64, 1)]))
    queries = draw(st.integers(1, 20) | st.integers(120, 300))
    inner = draw(st.sets(st.integers(1, rows * queries), max_size=6))
    sizes = (rows, kv_heads * group, kv_heads, queries, queries, draw(st.integers(1, 9)), draw(st.integers(1, 9)))
    bounds = draw(st.sampled_from([None, tuple(sorted({0, *inner, rows * queries}))]))
    options = {"cu_seq_lens": bounds, "window": draw(windows()), "softcap": draw(st.sampled_from([None, 0.7]))}
    return sizes, draw(st.booleans()), draw(st.integers(0, 99)), options


@pytest.mark.parametrize("attention", [causal_attention, tiled_attention])
@settings(deadline=None, max_examples=50)
@given(case=cases())
def test_equals_the_reference(attention, case):
    sizes, sinks, seed, options = case
    assert_equals_reference(attention, draw_inputs(sizes, sinks=sinks, seed=seed), **options)


@pytest.mark.parametrize("attention", [causal_attention, tiled_attention])
@settings(deadline=None, max_examples=30)
@given(
    queries=st.integers(1, 4) | st.integers(120, 200),
    past=st.integers(1, 200),
    window=windows(),
    softcap=st.sampled_from([None, 0.7]),
    sinks=st.booleans(),
)
def test_equals_the_reference_behind_a_cache(attention, queries, past, window, softcap, sinks):
    inputs = draw_inputs((2, 4, 2, queries, queries + past, 6, 4), sinks=sinks)
    assert_equals_reference(attention, inputs, window=window, softcap=softcap)


@pytest.mark.parametrize("softcap", [None, 0.7])
def test_keys_in_several_tiles_and_a_mask_held_to_its_bytes(softcap):
    """Tiles whose first keys are hidden from some queries, too: 64 heads leave 64 keys to a tile."""
    assert_equals_reference(tiled_attention, draw_inputs((1, 64, 64, 300, 300, 1, 1)), window=5, softcap=softcap)
    inputs = draw_inputs((1, 4, 2, 300, 5000, 2, 3), sinks=True)
    assert_equals_reference(causal_attention, inputs, window=4500, softcap=softcap)
    assert_equals_reference(tiled_attention, inputs, window=None, softcap=softcap)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("value_width", [2, 3, 5])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (2, None), (None, 0.7), (2, 0.7)])
def test_gradcheck(sinks, value_width, window, softcap):
    query, key, value, *sink = draw_inputs((1, 4, 2, 7, 7, 3, value_width), sinks=sinks)
    attention = tiled_attention if softcap else causal_attention

    def function(query, key, value, *sink):
        operands, options = as_options([query, key, value, *sink], cu_seq_lens=(0, 5, 6, 7), window=window)
        return attention(*operands, **options, softcap=softcap)

    assert torch.autograd.gradcheck(function, (query, key, value, *sink))


def sdpa_attention(query, key, value, *, cu_seq_lens, window, softcap, sinks, scale):
    """`scaled_dot_product_attention` with the whole mask; a sink is one more key, of zeros, without gradient."""
    assert softcap is None
    value_width, width, (_, heads, num_tokens, _) = value.shape[-1], query.shape[-1], query.shape
    position = torch.arange(num_tokens)
    distance = position[:, None] - position
    document = torch.bucketize(position, torch.tensor(cu_seq_lens), right=True)
    visible = (distance >= 0) & (distance < (window or num_tokens)) & (document[:, None] == document)
    mask = torch.zeros(visible.shape, dtype=query.dtype).masked_fill(~visible, -math.inf)
    if sinks is not None:
        column = sinks.detach().view(1, heads, 1, 1).expand(1, heads, num_tokens, 1)
        mask = torch.cat([mask.expand(1, heads, -1, -1), column], -1)
        key, value = (F.pad(each, (0, 0, 0, 1)) for each in (key, value))
    value = F.pad(value, (0, width - value_width))
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=True)
    return out[..., :value_width].transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("window", "softcap", "value_width"), [(None, None, 16), (40, None, 8), (None, 3.0, 16)])
def test_no_less_precise_than_plain_attention(dtype, sinks, window, softcap, value_width):
    """Error against float64 at most twice that of what would run otherwise, and one unit in the last place.

    Otherwise SDPA would run, or textbook attention where SDPA cannot: with a softcap, and for the gradient of sinks.
    """
    inputs = draw_inputs((1, 4, 2, 400, 400, 16, value_width), sinks=sinks, dtype=dtype)
    upstream = torch.randn(1, 400, 4, value_width, generator=torch.Generator().manual_seed(2)).to(dtype)

    def results(attention, inputs, **more):
        operands, options = as_options(inputs, cu_seq_lens=(0, 90, 91, 400), window=window, softcap=softcap)
        out = attention(*operands, **options, **more)
        return [out, *torch.autograd.grad(out, inputs, upstream.to(out.dtype), allow_unused=True)]

    exact = results(reference_attention, [each.detach().double().requires_grad_() for each in inputs])
    plain = results(reference_attention, inputs, dtype=dtype)
    if softcap is None:
        plain[:4] = results(sdpa_attention, inputs)[:4]
    for want, other, got in zip(exact, plain, results(causal_attention, inputs), strict=True):
        assert got.dtype == dtype
        assert (got - want).norm() <= 2 * (other - want).norm() + torch.finfo(dtype).eps * want.norm()


@pytest.mark.parametrize("softcap", [None, 0.7])
def test_any_memory_layout_and_upstream(softcap):
    """Head-major, transposed and expanded inputs, and an upstream gradient without memory of its own."""
    inputs = draw_inputs((2, 4, 2, 9, 9, 4, 4))
    expected = torch.autograd.grad(reference_attention(*inputs, scale=SCALE, softcap=softcap).sum(), inputs)
    for arrange in (torch.Tensor.contiguous, lambda x: x.mT.contiguous().mT, lambda x: x.flip(0).flip(0)):
        arranged = [arrange(each) for each in inputs]
        out = causal_attention(*arranged, scale=SCALE, softcap=softcap)
        for got, want in zip(torch.autograd.grad(out.sum(), inputs), expected, strict=True):
            torch.testing.assert_close(got, want, atol=GRADIENT_BOUND, rtol=0.0)


@pytest.mark.parametrize(("rows", "tokens"), [(1, 0), (0, 5), (3, 0)])
@pytest.mark.parametrize("softcap", [None, 0.7])
def test_no_token(rows, tokens, softcap):
    inputs = draw_inputs((rows, 4, 2, tokens, tokens, 3, 2), sinks=True)
    query, key, value, sinks = inputs
    out = causal_attention(query, key, value, cu_seq_lens=(0,), softcap=softcap, sinks=sinks)
    assert out.shape == (rows, tokens, 4, 2)
    grads = torch.autograd.grad(out.sum(), inputs)
    assert [each.shape for each in grads] == [each.shape for each in inputs]
    assert not grads[-1].any()


@pytest.mark.parametrize("softcap", [None, 0.7])
def test_frozen_inputs_second_call_and_second_backward(softcap):
    query, key, value, sinks = draw_inputs((1, 4, 2, 20, 20, 3, 3), sinks=True)
    options = {"cu_seq_lens": (0, 7, 20), "window": 3, "softcap": softcap}
    out = causal_attention(query, key, value, sinks=sinks, **options)
    full = torch.autograd.grad(out.sum(), (query, key, value, sinks), retain_graph=True)
    again = torch.autograd.grad(out.sum(), (query, key, value, sinks))
    assert all(map(torch.equal, full, again))
    partly = causal_attention(query.detach(), key, value.detach(), sinks=sinks.detach(), **options)
    assert torch.equal(partly, out)
    assert torch.equal(torch.autograd.grad(partly.sum(), key)[0], full[1])
    with torch.no_grad():
        assert not causal_attention(query, key, value, sinks=sinks, **options).requires_grad


def test_a_sink_far_above_every_score_takes_all_weight():
    query, key, value, _ = draw_inputs((1, 4, 2, 9, 9, 3, 3), sinks=True)
    sinks = torch.tensor([-1e4, 0.0, 1e4, math.inf], dtype=torch.float64)
    out = causal_attention(query, key, value, sinks=sinks, scale=SCALE)
    expected = reference_attention(query, key, value, sinks=sinks[:3].repeat(2)[:4], scale=SCALE)
    torch.testing.assert_close(out[:, :, :2], expected[:, :, :2], atol=VALUE_BOUND, rtol=0.0)
    assert not out[:, :, 2:].any()


def test_scores_beyond_the_range_of_float32_exp():
    inputs = [each.detach() * 40 for each in draw_inputs((1, 2, 2, 300, 300, 8, 8), dtype=torch.float32)]
    exact = reference_attention(*inputs, window=50, scale=1.0)
    plain_error = (reference_attention(*inputs, window=50, scale=1.0, dtype=torch.float32) - exact).norm()
    for attention in (causal_attention, tiled_attention):
        assert (attention(*inputs, window=50, scale=1.0) - exact).norm() <= 2 * plain_error


def test_what_does_not_fit_is_refused():
    query, key, value = draw_inputs((1, 4, 2, 5, 5, 3, 3))
    for wrong in (key[:, :, :4], key[..., :2], key.repeat(1, 3, 1, 1)[:, :3], key.repeat(2, 1, 1, 1)):
        with pytest.raises(ValueError, match=r"must be \[B, H, S, d\]"):
            causal_attention(query, wrong, wrong)
    with pytest.raises(ValueError, match="must have one dtype"):
        causal_attention(query, key.float(), value)
    with pytest.raises(ValueError, match="`window` must be 1 or more, got 0"):
        causal_attention(query, key, value, window=0)


@pytest.mark.slow
def test_equals_the_reference_over_a_grid():
    lengths, widths = (1, 127, 128, 129, 257), (3, 8)
    for queries, window, value_width, sinks in itertools.product(lengths, (None, 1, 64, 128), widths, (False, True)):
        for rows, kv_heads in ((1, 1), (2, 2), (1, 4)):
            inputs = draw_inputs((rows, 4, kv_heads, queries, queries, 8, value_width), sinks=sinks)
            bounds = tuple(sorted({0, queries // 3, queries // 2, rows * queries}))
            for attention in (causal_attention, tiled_attention):
                assert_equals_reference(attention, inputs, cu_seq_lens=bounds, window=window)


def test_the_kernels_are_the_ones_meant(monkeypatch):
    """On CPU a softcap goes in tiles, all else through the flash operator."""
    used = []
    for kernel in (FlashKernel, TiledKernel):
        forward = kernel.forward
        monkeypatch.setattr(
            kernel, "forward", lambda self, *a, forward=forward: (used.append(type(self)), forward(self, *a))[1]
        )
    inputs = draw_inputs((1, 4, 2, 9, 9, 3, 4))
    causal_attention(*inputs, window=2)
    causal_attention(*inputs, softcap=1.0)
    assert used == [FlashKernel, TiledKernel]
