"""Shards of one vocabulary in one process: every loss and gradient against full logits in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from planish.peaks.vocab import reference
from planish.peaks.vocab.blocked import Objective
from planish.peaks.vocab.inputs import Options
from planish.peaks.vocab.shard import Shard, ShardedHead, shard_ranges
from planish.peaks.vocab.sharded import combine_shards, rescale, s_pass, t_pass, to_tokens

SMALLEST_TILE = pytest.mark.filterwarnings("ignore:`tile_bytes`")


def cut(weight, bias, starts):
    """Return the shards of a weight that begin at `starts`."""
    stops = [*starts[1:], len(weight)]
    return [
        Shard(weight=weight[a:b], start=a, vocab_size=len(weight), bias=None if bias is None else bias[a:b])
        for a, b in zip(starts, stops, strict=True)
    ]


def step(shards, hidden, target, upstream, *, barriers, objective, grad_dtype=None, **options):
    """Run one microbatch over all shards as the stages of a pipeline would; return losses, dX, dW and db.

    The losses and `upstream` are those of the valid tokens.
    """
    heads = [ShardedHead(shard=x, objective=objective, options=Options(ignore_index=-100, **options)) for x in shards]
    scans = [s_pass(head, hidden, target, product=barriers == 1) for head in heads]
    names = heads[0].statistics(labelled=True)
    whole = combine_shards(torch.stack([scan.statistics for scan in scans]), names)
    if barriers == 1:
        shares = [rescale(head, scan, whole, upstream) for head, scan in zip(heads, scans, strict=True)]
    weight_grads = [torch.zeros_like(x.weight, dtype=grad_dtype) for x in shards]
    bias_grads = [None if x.bias is None else torch.zeros_like(x.bias) for x in shards]
    made = [
        t_pass(head, scan.tokens, whole, upstream, weight_grad=dw, bias_grad=db, hidden_grad=barriers == 2)
        for head, scan, dw, db in zip(heads, scans, weight_grads, bias_grads, strict=True)
    ]
    if barriers == 2:
        shares = made
    else:
        assert made == [None] * len(shards)
    d_hidden = to_tokens(scans[0].tokens, torch.stack(shares).sum(0)).view_as(hidden)
    d_bias = None if shards[0].bias is None else torch.cat(bias_grads)
    return whole.losses(objective), d_hidden, torch.cat(weight_grads), d_bias


@st.composite
def problems(draw):
    """Draw sizes, cuts (uneven, empty, more shards than classes) and settings."""
    vocab = draw(st.sampled_from([1, 3, 7, 50, 2500]))
    num_shards = draw(st.integers(1, 5))
    if draw(st.booleans()):
        starts = [each.start for each in shard_ranges(vocab, num_shards)]
    else:
        starts = [0, *sorted(draw(st.lists(st.integers(0, vocab), min_size=num_shards - 1, max_size=num_shards - 1)))]
    return {
        "tokens": draw(st.sampled_from([0, 1, 5, 37])),
        "vocab": vocab,
        "starts": starts,
        "with_bias": draw(st.booleans()),
        "ignored": draw(st.sampled_from(["none", "some", "all"])),
        "seed": draw(st.integers(0, 2**20)),
        "logits": {
            "softcap": draw(st.sampled_from([None, 2.0])),
            "logit_scale": draw(st.sampled_from([1.0, 0.3])),
        },
        "tile_bytes": draw(st.sampled_from([None, 1])),
        "loss": {
            "label_smoothing": draw(st.sampled_from([0.0, 0.1, 1.0])),
            "z_loss": draw(st.sampled_from([0.0, 1e-2])),
        },
    }


def draw_tensors(problem, width=6, dtype=torch.float64):
    torch.manual_seed(problem["seed"])
    hidden = torch.randn(problem["tokens"], width, dtype=dtype, requires_grad=True)
    weight = torch.randn(problem["vocab"], width, dtype=dtype, requires_grad=True)
    bias = torch.randn(problem["vocab"], dtype=dtype, requires_grad=True) if problem["with_bias"] else None
    target = torch.randint(0, problem["vocab"], (problem["tokens"],))
    if problem["ignored"] != "none":
        target[:: 1 if problem["ignored"] == "all" else 3] = -100
    return hidden, weight, bias, target


@SMALLEST_TILE
@pytest.mark.parametrize("barriers", [1, 2])
@settings(deadline=None, max_examples=120)
@given(problem=problems())
def test_loss_and_gradients_equal_full_logits(barriers, problem):
    hidden, weight, bias, target = draw_tensors(problem)
    valid = target != -100
    upstream = torch.randn(int(valid.sum()), dtype=torch.float64)
    logits = reference.logits(hidden, weight, bias, **problem["logits"])
    losses = reference.cross_entropy(logits, target, **problem["loss"])[valid]
    wanted = torch.autograd.grad((losses * upstream).sum(), [hidden, weight] + ([] if bias is None else [bias]))
    found = step(
        cut(weight, bias, problem["starts"]),
        hidden,
        target,
        upstream,
        barriers=barriers,
        objective=Objective(**problem["loss"]),
        tile_bytes=problem["tile_bytes"],
        **problem["logits"],
    )
    torch.testing.assert_close(found[0], losses, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(found[1:], wanted, strict=False):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
