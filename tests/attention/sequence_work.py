"""What each rank does in the tests of attention over ranks; all draw the same rows and keep their span of them."""

import torch

from planish.comm.ring import Circle
from planish.memory.ledger import Ledger
from planish.peaks.attention.reference import reference_attention
from planish.peaks.attention.sequence import sequence_attention
from planish.shapes import spans


def draw(*, rows, width, heads, kv_heads, qk_width=8, v_width=8, sinks=False, dtype=torch.float64, seed=0):
    """Return query, key, value, the output's gradient, and sinks, of whole rows."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    query, key, value = (
        normal(rows, each, width, size) for each, size in ((heads, qk_width), (kv_heads, qk_width), (kv_heads, v_width))
    )
    return query, key, value, normal(rows, width, heads, v_width), normal(heads) if sinks else None


def expected(*, bounds=None, window=None, softcap=None, scale=0.3, **problem):
    """Return output and gradients of whole rows by the textbook, in float64."""
    query, key, value, grad, sinks = (each if each is None else each.double() for each in draw(**problem))
    leaves = [each.requires_grad_() for each in (query, key, value, sinks) if each is not None]
    out = reference_attention(
        query, key, value, cu_seq_lens=bounds, window=window, softcap=softcap, sinks=sinks, scale=scale
    )
    return out.detach(), *torch.autograd.grad(out, leaves, grad)


def attend(group, *, bounds=None, window=None, softcap=None, scale=0.3, **problem):
    """Return this rank's span of the output and its gradients; of sinks its part of the sum."""
    query, key, value, grad, sinks = draw(**problem)
    rows, width = query.shape[0], query.shape[2]
    own = spans(width, group.size())[group.rank()]
    parts = [each[:, :, own].clone().requires_grad_() for each in (query, key, value)]
    leaves = parts if sinks is None else [*parts, sinks.requires_grad_()]
    out = sequence_attention(
        *parts,
        circle=Circle.of(group),
        cu_seq_lens=tuple(range(0, rows * width + 1, width)) if bounds is None else bounds,
        window=window,
        softcap=softcap,
        sinks=sinks,
        scale=scale,
    )
    found = out.detach(), *torch.autograd.grad(out, leaves, grad[:, own].contiguous())
    return [each.float().numpy() if each.dtype == torch.bfloat16 else each.numpy() for each in found]


def peaks(group, *, circle=None, bounds=None, window=None, softcap=None, **problem):
    """Return the most bytes beyond the operands of a forward, what is kept of it, and the most of a backward."""
    query, key, value, grad, sinks = draw(**problem)
    circle = Circle.of(group) if circle is None else circle
    rows, width = query.shape[0], query.shape[2]
    own = spans(width, circle.size)[circle.rank]
    parts = [
        each[:, :, own].transpose(1, 2).clone(memory_format=torch.contiguous_format) for each in (query, key, value)
    ]
    parts = [each.transpose(1, 2).requires_grad_() for each in parts]
    grad = grad[:, own].clone(memory_format=torch.contiguous_format)
    leaves = parts if sinks is None else [*parts, sinks.requires_grad_()]
    bounds = tuple(range(0, rows * width + 1, width)) if bounds is None else bounds
    with Ledger() as ledger:
        with ledger.phase("forward"):
            out = sequence_attention(
                *parts, circle=circle, cu_seq_lens=bounds, window=window, softcap=softcap, sinks=sinks, scale=0.3
            )
        kept = ledger.live_bytes
        with ledger.phase("backward"):
            torch.autograd.grad(out, leaves, grad)
    return ledger.peak_bytes["forward"], kept, ledger.peak_bytes["backward"]
