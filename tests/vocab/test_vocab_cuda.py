"""What differs on CUDA: products of narrow numbers come out in float32, tiles are wide, strips are longer.

Without a GPU the products are replaced by equal ones, or made of fake tensors, and everything else runs.
"""

import dataclasses

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from planish.memory.ledger import Ledger
from planish.peaks.vocab import reference, tile
from planish.peaks.vocab.blocked import GradientsInForward, Objective, Recompute
from planish.peaks.vocab.losses import linear_cross_entropy
from planish.peaks.vocab.task import Task
from planish.price.vocab import Head, choose_tiling, cross_entropy_phases

STRATEGIES = ("gradients-in-forward", "recompute")
BF16 = torch.bfloat16


def cuda_task(*, tokens, num_valid, strategy, tile_bytes=2**22, softcap=None, bias=True, logit_scale=1.0):
    head = Head(
        tokens=tokens,
        hidden_size=64,
        vocab_size=3000,
        hidden_dtype="bfloat16",
        weight_dtype="bfloat16",
        compute_dtype="bfloat16",
        bias_dtype="bfloat16" if bias else None,
        capped=softcap is not None,
        wanted=frozenset({"lse"}),
        grads=frozenset({"hidden", "weight", "bias"} if bias else {"hidden", "weight"}),
        device="cuda",
    )
    tiling = choose_tiling(head, tile_bytes=tile_bytes, strategy=strategy)
    return Task(
        head=head, tiling=tiling, ignore_index=-100, num_valid=num_valid, softcap=softcap, logit_scale=logit_scale
    )


def summed_loss(task, hidden, weight, bias, target):
    if task.tiling.keeps_tiles:
        return GradientsInForward.apply(hidden, weight, bias, target, task, None, Objective())
    return Recompute.apply(hidden, weight, bias, target, task)[0].sum()


@pytest.mark.parametrize("how", [{}, {"softcap": 4.0, "logit_scale": 0.5}])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_wide_tiles_are_as_exact_as_float32_logits(draw_head, monkeypatch, strategy, how):
    def widened(a, b, *, out):
        return torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)

    monkeypatch.setattr(tile, "_multiply", widened)
    head = draw_head(200, 64, 3000, dtype=BF16, bias=True, ignored=0.2, scale=0.4)
    task = cuda_task(tokens=200, num_valid=head.num_valid, strategy=strategy, **how)
    ours = summed_loss(task, head.hidden, head.weight, head.bias, head.target)
    exact = reference.cross_entropy(reference.logits(head.hidden, head.weight, head.bias, **how), head.target).sum()
    wide = linear_cross_entropy(*head.operands, bias=head.bias, reduction="sum", logits_dtype="float32", **how)
    torch.testing.assert_close(ours, wide, rtol=1e-6, atol=0.0)
    for mine, true in zip(head.gradients(ours), head.gradients(exact), strict=True):
        # One rounding of the derivative of each logit to bf16, one of the result.
        assert (mine.double() - true.double()).norm() <= 2**-8 * true.double().norm()


@pytest.mark.parametrize("num_valid", [400, 600])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bytes_of_wide_tiles(strategy, num_valid):
    task = cuda_task(tokens=600, num_valid=num_valid, strategy=strategy, bias=False)
    with FakeTensorMode(), torch.no_grad():
        hidden, weight = (torch.empty(rows, 64, dtype=BF16) for rows in (600, 3000))
        target = torch.empty(600, dtype=torch.long)
        with Ledger() as ledger, ledger.phase("head"):
            summed_loss(task, hidden, weight, None, target)
    priced = cross_entropy_phases(task.head, task.tiling, num_valid=num_valid)
    assert ledger.peak_bytes["head"] == priced.forward
    assert task.tiling.workspace_bytes(task.head) <= 2**22


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_on_a_gpu(draw_head, assert_all_close, strategy, dtype):
    head = draw_head(500, 64, 3000, dtype=dtype, bias=True, ignored=0.2, scale=0.4)
    there = dataclasses.replace(
        head,
        **{name: getattr(head, name).detach().cuda().requires_grad_() for name in ("hidden", "weight", "bias")},
        target=head.target.cuda(),
    )
    ours = linear_cross_entropy(*there.operands, bias=there.bias, strategy=strategy)
    theirs = linear_cross_entropy(*head.operands, bias=head.bias, logits_dtype="float32")
    tolerance = 1e-2 if dtype == BF16 else 1e-5
    assert_all_close([ours.cpu()], [theirs], 1e-5)
    assert_all_close([each.cpu() for each in there.gradients(ours)], head.gradients(theirs), tolerance)
