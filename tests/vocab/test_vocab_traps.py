"""Numbers and uses that break heads: infinities, masked targets, vast caps, a weight used twice, graphs kept."""

import math

import pytest
import torch
import torch.nn.functional as F

from planish.peaks.vocab import reference
from planish.peaks.vocab.losses import linear_cross_entropy, linear_logprob

both_strategies = pytest.mark.parametrize("strategy", ["gradients-in-forward", "recompute"])


def dense(head, **how):
    """Return the mean loss of full logits in float64."""
    return F.cross_entropy(reference.logits(head.hidden, head.weight, head.bias, **how), head.target)


@both_strategies
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_what_is_not_finite_is_never_hidden(draw_head, strategy, poison):
    head = draw_head(10, 4, 2100)
    with torch.no_grad():
        head.hidden[3, 0] = poison
    loss = linear_cross_entropy(*head.operands, strategy=strategy)
    d_hidden, _ = head.gradients(loss)
    assert loss.isnan()
    assert d_hidden[3].isnan().any()
    assert d_hidden[[0, 1, 2, *range(4, 10)]].isfinite().all()


@both_strategies
def test_a_masked_target_is_an_infinite_loss_with_the_gradients_of_full_logits(draw_head, assert_all_close, strategy):
    head = draw_head(10, 4, 2100, bias=True)
    head.target.fill_(1500)
    with torch.no_grad():
        head.bias[1500] = -math.inf
    ours = linear_cross_entropy(*head.operands, bias=head.bias, strategy=strategy)
    assert ours == math.inf
    assert_all_close(head.gradients(ours), head.gradients(dense(head)), 1e-10)


@both_strategies
def test_a_vocabulary_that_is_masked_whole_is_nan_as_full_logits_are(draw_head, strategy):
    head = draw_head(10, 4, 2100, bias=True)
    with torch.no_grad():
        head.bias.fill_(-math.inf)
    assert dense(head).isnan()
    assert linear_cross_entropy(*head.operands, bias=head.bias, strategy=strategy).isnan()
    assert (linear_logprob(*head.operands, bias=head.bias, want=("lse",)).lse == -math.inf).all()


@both_strategies
@pytest.mark.parametrize("how", [{"softcap": 1e30}, {"softcap": 1e-3}, {"logit_scale": 1e4}, {"logit_scale": -1e4}])
def test_vast_caps_and_scales(draw_head, assert_all_close, strategy, how):
    head = draw_head(10, 4, 2100)
    ours, theirs = linear_cross_entropy(*head.operands, strategy=strategy, **how), dense(head, **how)
    assert_all_close([ours, *head.gradients(ours)], [theirs, *head.gradients(theirs)], 1e-10)


@both_strategies
def test_logits_that_lie_far_apart(draw_head, assert_all_close, strategy):
    """Whole blocks whose probabilities are 0 in float32 beside one that holds all."""
    head = draw_head(10, 4, 3000, dtype=torch.float32, bias=True)
    with torch.no_grad():
        head.bias[:1024] -= 1e6
        head.bias[2000:] += 300.0
    ours, theirs = linear_cross_entropy(*head.operands, bias=head.bias, strategy=strategy), dense(head)
    assert_all_close(
        [each.double() for each in (ours, *head.gradients(ours))],
        [each.double() for each in (theirs, *head.gradients(theirs))],
        1e-4,
    )


@both_strategies
def test_two_heads_on_one_weight_add_their_gradients(draw_head, assert_all_close, strategy):
    """As with several predicted tokens, each by hidden states of its own."""
    first, second = draw_head(12, 4, 60), draw_head(9, 4, 60, seed=1)
    leaves = (first.hidden, second.hidden, first.weight)

    def total(loss):
        return loss(first.hidden, first.weight, first.target) + loss(second.hidden, first.weight, second.target)

    ours = total(lambda *operands: linear_cross_entropy(*operands, strategy=strategy))
    theirs = total(lambda hidden, weight, target: F.cross_entropy(hidden @ weight.t(), target))
    assert_all_close(torch.autograd.grad(ours, leaves), torch.autograd.grad(theirs, leaves), 1e-10)


def test_a_kept_graph_does_not_bring_gradients_in_forward_back(draw_head):
    head = draw_head(9, 4, 30)
    loss = linear_cross_entropy(*head.operands, strategy="gradients-in-forward")
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="an earlier backward took them"):
        loss.backward()


@both_strategies
def test_operands_that_overlap_or_step(draw_head, assert_all_close, strategy):
    """Hidden states that are one row seen often, a weight that is every other row of another, a target that steps."""
    head = draw_head(12, 4, 60)
    row = head.hidden.detach()[:1].requires_grad_()
    wide = head.weight.detach().repeat_interleave(2, 0).requires_grad_()
    target = head.target.repeat_interleave(3)[::3]
    ours = linear_cross_entropy(row.expand(12, 4), wide[::2], target, strategy=strategy)
    theirs = F.cross_entropy(row.expand(12, 4) @ wide[::2].t(), target)
    assert_all_close(torch.autograd.grad(ours, (row, wide)), torch.autograd.grad(theirs, (row, wide)), 1e-10)
