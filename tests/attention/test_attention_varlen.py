"""The CUDA branch, with the fused kernel's documented contract stood in for by float64 on CPU: bounds, windows, sinks.

What a CPU cannot check is the kernel itself; the last test does where there is a device.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from planish.peaks.attention.choose import choose_kernel
from planish.peaks.attention.documents import Shape, document_bounds
from planish.peaks.attention.kernel import Attention
from planish.peaks.attention.packed import causal_attention
from planish.peaks.attention.reference import reference_attention
from planish.peaks.attention.tiled import TiledKernel
from planish.peaks.attention.varlen import VarlenKernel

FORWARD = torch.ops.torch_attn._varlen_attn.default
BACKWARD = torch.ops.torch_attn._varlen_attn_backward.default


class StandIn(TorchDispatchMode):
    """Answers both operators as FlashAttention documents them, and refuses what it would refuse."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is FORWARD:
            query, key, value, cu_q, cu_k, max_q, max_k, is_causal, scale, window_size, *_ = args
            scores = self.scores(query, key, cu_q, cu_k, max_q, max_k, is_causal, scale, window_size)
            out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), self.repeated(value, query))
            return out.to(query.dtype), scores.logsumexp(-1), torch.zeros(2, dtype=torch.uint64)
        if func is BACKWARD:
            grad, query, key, value, out, lse, cu_q, cu_k, max_q, max_k, is_causal, _, scale, window_size = args
            scores = self.scores(query, key, cu_q, cu_k, max_q, max_k, is_causal, scale, window_size)
            assert lse.shape == scores.shape[:2]
            assert all(each.is_contiguous() for each in (grad, out, lse))
            weights = (scores - lse.unsqueeze(-1)).exp()
            delta = (grad * out).sum(-1).T.unsqueeze(-1)
            grad_scores = weights * (torch.einsum("qhd,khd->hqk", grad, self.repeated(value, query)) - delta) * scale
            grad_query = torch.einsum("hqk,khd->qhd", grad_scores, self.repeated(key, query))
            grad_key = torch.einsum("hqk,qhd->khd", grad_scores, query)
            grad_value = torch.einsum("hqk,qhd->khd", weights, grad)
            groups = (key.shape[1], -1)
            return grad_query, grad_key.unflatten(1, groups).sum(2), grad_value.unflatten(1, groups).sum(2)
        return func(*args, **(kwargs or {}))

    @staticmethod
    def repeated(tensor, query):
        return tensor.repeat_interleave(query.shape[1] // tensor.shape[1], 1)

    def scores(self, query, key, cu_q, cu_k, max_q, max_k, is_causal, scale, window_size):
        assert cu_q.dtype == cu_k.dtype == torch.int32
        assert torch.equal(cu_q, cu_k)
        assert max_q == max_k == cu_q.diff().max().item()
        assert query.shape[-1] == key.shape[-1]
        assert query.shape[-1] % 8 == 0
        assert all(each.is_contiguous() for each in (query, key))
        left, right = window_size
        assert right == 0
        assert is_causal == (left == -1)
        position = torch.arange(len(query))
        distance = position[:, None] - position
        document = torch.bucketize(position, cu_q, right=True)
        visible = (distance >= 0) & (document[:, None] == document)
        if left >= 0:
            visible &= distance <= left
        scores = torch.einsum("qhd,khd->hqk", query, self.repeated(key, query)) * scale
        return scores.masked_fill(~visible, -torch.inf)


def draw_inputs(value_width, sinks, dtype=torch.float64, device="cpu"):
    shapes = [(2, 30, 4, 6), (2, 30, 2, 6), (2, 30, 2, value_width)]
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64).transpose(1, 2) for shape in shapes]
    inputs += [torch.randn(4, generator=generator, dtype=torch.float64)] * sinks
    return [each.to(device, dtype).requires_grad_() for each in inputs]


@pytest.mark.parametrize("value_width", [3, 6, 9])
@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("bounds", [None, (0, 1, 40, 60)])
def test_equals_the_reference(value_width, window, sinks, bounds):
    inputs = draw_inputs(value_width, sinks)
    query, key, value, *sink = inputs
    bounds = document_bounds(bounds, Shape(rows=2, queries=30, keys=30))
    with StandIn():
        kernel = VarlenKernel(bounds=bounds, window=window, scale=0.3)
        out = Attention.apply(kernel, query, key, value, *(sink or [None]))
        grads = torch.autograd.grad(out.square().sum(), inputs)
    options = {"cu_seq_lens": bounds, "window": window, "sinks": sink[0] if sink else None, "scale": 0.3}
    expected = reference_attention(query, key, value, **options)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=0.0)
    for got, want in zip(grads, torch.autograd.grad(expected.square().sum(), inputs), strict=True):
        torch.testing.assert_close(got, want, atol=1e-10, rtol=0.0)


@pytest.mark.parametrize(
    ("dtype", "softcap", "width", "fused"),
    [
        (torch.bfloat16, None, 64, True),
        (torch.bfloat16, None, 72, True),
        (torch.float16, None, 256, True),
        (torch.bfloat16, 30.0, 64, False),
        (torch.float32, None, 64, False),
        (torch.bfloat16, None, 264, False),
    ],
)
def test_the_fused_kernel_is_chosen_where_it_applies(dtype, softcap, width, fused):
    with FakeTensorMode():
        query = torch.empty(2, 4, 64, width, dtype=dtype, device="cuda")
        key, value = (torch.empty(2, 2, 64, size, dtype=dtype, device="cuda") for size in (width, width // 2))
        kernel = choose_kernel(query, key, value, bounds=(0, 10, 128), window=None, softcap=softcap, scale=1.0)
        query = torch.empty(2, 4, 1, width, dtype=dtype, device="cuda")
        behind_cache = choose_kernel(query, key, value, bounds=(0, 1, 2), window=None, softcap=softcap, scale=1.0)
    assert type(kernel) is (VarlenKernel if fused else TiledKernel)
    assert type(behind_cache) is TiledKernel


@pytest.mark.parametrize("sinks", [False, True])
def test_a_dry_run_needs_no_kernel(sinks):
    """Both operators have fakes; shapes, dtypes and layouts come out as in a real run."""
    with FakeTensorMode():
        inputs = draw_inputs(9, sinks, dtype=torch.bfloat16)
        query, key, value, *sink = inputs
        kernel = VarlenKernel(bounds=(0, 30, 60), window=5, scale=0.3)
        out = Attention.apply(kernel, query, key, value, *(sink or [None]))
        grads = torch.autograd.grad(out.sum(), inputs)
    assert (out.shape, out.dtype, out.is_contiguous()) == ((2, 30, 4, 9), torch.bfloat16, True)
    assert [each.shape for each in grads] == [each.shape for each in inputs]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("sinks", [False, True])
def test_no_less_precise_than_plain_attention_on_cuda(softcap, window, sinks):
    """Error against float64 at most twice that of textbook attention in bfloat16, and one unit in the last place."""
    inputs = draw_inputs(6, sinks, dtype=torch.bfloat16, device="cuda")

    def results(attention, inputs, **more):
        query, key, value, *sink = inputs
        options = {"window": window, "softcap": softcap, "cu_seq_lens": (0, 1, 40, 60), "scale": 0.3}
        out = attention(query, key, value, sinks=sink[0] if sink else None, **options, **more)
        return [each.cpu() for each in (out, *torch.autograd.grad(out.sum(), inputs))]

    exact = results(reference_attention, [each.detach().cpu().double().requires_grad_() for each in inputs])
    plain = results(reference_attention, inputs, dtype=torch.bfloat16)
    for want, other, got in zip(exact, plain, results(causal_attention, inputs), strict=True):
        assert (got - want).norm() <= 2 * (other - want).norm() + torch.finfo(torch.bfloat16).eps * want.norm()
