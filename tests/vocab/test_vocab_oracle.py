"""Both strategies and the primitive against the textbook in float64, on ragged sizes."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from planish.peaks.vocab import reference
from planish.peaks.vocab.losses import linear_cross_entropy, linear_logprob, linear_token_accuracy

STRATEGIES = ("gradients-in-forward", "recompute")

sizes = st.fixed_dictionaries(
    {
        "tokens": st.one_of(st.integers(0, 20), st.integers(21, 90)),
        "width": st.integers(1, 24),
        "vocab": st.one_of(st.integers(1, 40), st.integers(1000, 1050), st.integers(2040, 3100)),
        "bias": st.booleans(),
        "ignored": st.sampled_from([0.0, 0.4, 1.0]),
        "frozen": st.sampled_from([(), ("hidden",), ("weight",), ("weight", "bias")]),
        "scale": st.sampled_from([0.1, 1.0, 5.0]),
        "seed": st.integers(0, 2**31),
    }
)
logits = st.fixed_dictionaries(
    {"logit_scale": st.sampled_from([1.0, 0.25, -1.5]), "softcap": st.sampled_from([None, 2.0, 30.0])}
)
# The smallest tile, some rows by one block, and everything at once.
tile_bytes = st.sampled_from([1, 2**18, 2**20, 2**26])
ignore_small_tiles = pytest.mark.filterwarnings("ignore:`tile_bytes`:UserWarning")


@ignore_small_tiles
@settings(deadline=None, max_examples=60)
@given(
    sizes, logits, tile_bytes, st.sampled_from(STRATEGIES), st.sampled_from([0.0, 0.1]), st.sampled_from([0.0, 0.01])
)
def test_cross_entropy(draw_head, assert_all_close, shape, how, tile, strategy, label_smoothing, z_loss):
    head = draw_head(**shape)
    loss = {"label_smoothing": label_smoothing, "z_loss": z_loss}
    ours = linear_cross_entropy(
        *head.operands, bias=head.bias, reduction="sum", tile_bytes=tile, strategy=strategy, **how, **loss
    )
    y = reference.logits(head.hidden, head.weight, head.bias, **how)
    theirs = reference.cross_entropy(y, head.target, **loss).sum()
    assert_all_close([ours], [theirs], 1e-12)
    # An upstream of another microbatch or a divisor; the graph of full logits exists once for both.
    assert_all_close(torch.autograd.grad(0.37 * ours, head.leaves), head.gradients(0.37 * theirs), 1e-10)


@ignore_small_tiles
@settings(deadline=None, max_examples=60)
@given(sizes, logits, tile_bytes, st.sets(st.sampled_from(["nll", "lse", "entropy", "argmax"]), min_size=1))
def test_logprob_under_any_upstream(draw_head, assert_all_close, shape, how, tile, want):
    head = draw_head(**shape)
    found = linear_logprob(*head.operands, bias=head.bias, want=tuple(want), tile_bytes=tile, **how)
    y = reference.logits(head.hidden, head.weight, head.bias, **how)
    expected = reference.logprob(y, head.target)
    assert {name for name, each in found._asdict().items() if each is not None} == want
    smooth = sorted(want - {"argmax"})
    assert_all_close([getattr(found, name) for name in smooth], [expected[name] for name in smooth], 1e-12)
    if "argmax" in want:
        assert torch.equal(found.argmax, expected["argmax"])
    if smooth:
        upstream = torch.randn(len(smooth), len(head.target), dtype=torch.float64)
        ours = sum((getattr(found, name) * each).sum() for name, each in zip(smooth, upstream, strict=True))
        theirs = sum((expected[name] * each).sum() for name, each in zip(smooth, upstream, strict=True))
        assert_all_close(head.gradients(ours), head.gradients(theirs), 1e-10)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_reductions_and_leading_dimensions(draw_head, assert_all_close, strategy, reduction):
    head = draw_head(30, 8, 70, ignored=0.3, bias=True)
    hidden, target = head.hidden.view(2, 3, 5, 8), head.target.view(2, 3, 5)
    strategy = "auto" if reduction == "none" else strategy
    ours = linear_cross_entropy(hidden, head.weight, target, bias=head.bias, reduction=reduction, strategy=strategy)
    y = reference.logits(hidden, head.weight, head.bias)
    theirs = torch.nn.functional.cross_entropy(y.flatten(0, -2), target.flatten(), reduction=reduction)
    theirs = theirs.view_as(target) if reduction == "none" else theirs
    assert_all_close([ours], [theirs], 1e-12)
    assert_all_close(head.gradients(ours.square().sum()), head.gradients(theirs.square().sum()), 1e-10)


@pytest.mark.parametrize("divisor", [7, 7.0, torch.tensor(7)])
def test_divisor_replaces_the_number_of_valid_tokens(draw_head, divisor):
    head = draw_head(9, 4, 20, ignored=0.3)
    mean = linear_cross_entropy(*head.operands, divisor=divisor)
    torch.testing.assert_close(mean, linear_cross_entropy(*head.operands, reduction="sum") / 7)


def test_another_ignore_index_and_narrower_targets(draw_head, assert_all_close):
    head = draw_head(20, 4, 30)
    target = head.target.int()
    target[::4] = 3
    ours = linear_cross_entropy(head.hidden, head.weight, target, ignore_index=3)
    y = reference.logits(head.hidden, head.weight)
    theirs = torch.nn.functional.cross_entropy(y, target.long(), ignore_index=3)
    assert_all_close([ours, *head.gradients(ours)], [theirs, *head.gradients(theirs)], 1e-10)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_operands_that_are_not_contiguous(draw_head, assert_all_close, strategy):
    head = draw_head(24, 6, 1100, ignored=0.2)
    hidden = head.hidden.detach().repeat_interleave(2, 1)[:, ::2].requires_grad_()
    weight = head.weight.detach().t().contiguous().t().requires_grad_()
    assert not hidden.is_contiguous()
    assert not weight.is_contiguous()
    ours = linear_cross_entropy(hidden, weight, head.target, strategy=strategy)
    theirs = linear_cross_entropy(*head.operands, strategy=strategy)
    assert_all_close(torch.autograd.grad(ours, (hidden, weight)), torch.autograd.grad(theirs, head.leaves), 1e-10)


def test_token_accuracy(draw_head):
    head = draw_head(50, 4, 6, bias=True, ignored=0.3)
    best = reference.logits(head.hidden, head.weight, head.bias).argmax(-1)
    expected = (best == head.target).sum() / head.num_valid
    assert linear_token_accuracy(*head.operands, bias=head.bias) == expected
    assert linear_token_accuracy(head.hidden, head.weight, torch.full_like(head.target, -100)) == 0


def test_argmax_takes_the_first_of_equals():
    weight = torch.zeros(5000, 2)
    weight[[700, 2500, 4999]] = 1.0
    target = torch.zeros(3, dtype=torch.long)
    found = linear_logprob(torch.ones(3, 2), weight, target, want=("argmax",), tile_bytes=2**17)
    assert found.argmax.tolist() == [700] * 3
