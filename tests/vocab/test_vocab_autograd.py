"""Autograd's rules: numerical gradients, going backward twice, microbatches, checkpoints, modes, `torch.compile`."""

import pytest
import torch
from torch.autograd import gradcheck
from torch.utils.checkpoint import checkpoint

from planish import LinearCrossEntropy, linear_cross_entropy, linear_logprob

STRATEGIES = ("gradients-in-forward", "recompute")
HOW = ({}, {"softcap": 3.0, "logit_scale": 0.5}, {"label_smoothing": 0.2, "z_loss": 0.1})


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_loss_grows_as_its_gradient_says(draw_head, strategy, how):
    """Central differences along random directions; `gradcheck` goes backward twice, which one strategy refuses."""
    head = draw_head(5, 3, 7, bias=True, ignored=0.3)
    leaves = [each.detach() for each in head.leaves]

    def loss(hidden, weight, bias):
        return linear_cross_entropy(hidden, weight, head.target, bias=bias, strategy=strategy, **how)

    grads = head.gradients(loss(*head.leaves))
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        steps = [1e-5 * torch.randn(each.shape, generator=generator, dtype=torch.float64) for each in leaves]
        up, down = (loss(*(each + sign * step for each, step in zip(leaves, steps, strict=True))) for sign in (1, -1))
        slope = sum((grad * step).sum() for grad, step in zip(grads, steps, strict=True))
        torch.testing.assert_close((up - down) / 2, slope, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("how", HOW)
def test_gradcheck_of_the_loss(draw_head, how):
    head = draw_head(5, 3, 7, bias=True, ignored=0.3)

    def loss(hidden, weight, bias):
        return linear_cross_entropy(hidden, weight, head.target, bias=bias, strategy="recompute", **how)

    assert gradcheck(loss, (head.hidden, head.weight, head.bias))


def test_gradcheck_of_every_statistic(draw_head):
    head = draw_head(5, 3, 7, bias=True, ignored=0.3)

    def statistics(hidden, weight, bias):
        found = linear_logprob(hidden, weight, head.target, bias=bias, want=("nll", "lse", "entropy"), softcap=3.0)
        return found[:3]

    assert gradcheck(statistics, (head.hidden, head.weight, head.bias))


def test_recompute_goes_backward_twice(draw_head):
    head = draw_head(9, 4, 30)
    loss = linear_cross_entropy(*head.operands, strategy="recompute")
    assert all(torch.equal(a, b) for a, b in zip(head.gradients(loss), head.gradients(loss), strict=True))


def test_gradients_in_forward_say_why_they_go_backward_once(draw_head):
    head = draw_head(9, 4, 30)
    loss = linear_cross_entropy(*head.operands, strategy="gradients-in-forward")
    head.gradients(loss)
    with pytest.raises(RuntimeError, match=r'exist once.*strategy="recompute"'):
        head.gradients(loss)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_second_derivatives_are_refused(draw_head, strategy):
    head = draw_head(9, 4, 30)
    loss = linear_cross_entropy(*head.operands, strategy=strategy)
    with pytest.raises(RuntimeError, match="has no second derivative"):
        torch.autograd.grad(loss, head.leaves, create_graph=True)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_microbatches_add_up_to_the_batch(draw_head, strategy):
    head = draw_head(40, 4, 30, bias=True, ignored=0.3)
    for rows in (slice(0, 7), slice(7, 32), slice(32, 40)):
        total = linear_cross_entropy(
            head.hidden[rows], head.weight, head.target[rows], bias=head.bias, reduction="sum", strategy=strategy
        )
        (total / head.num_valid).backward()
    expected = head.gradients(linear_cross_entropy(*head.operands, bias=head.bias, strategy=strategy))
    for leaf, grad in zip(head.leaves, expected, strict=True):
        torch.testing.assert_close(leaf.grad, grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_inside_a_checkpoint(draw_head, strategy, use_reentrant):
    head = draw_head(9, 4, 30)

    def loss(hidden, weight):
        return linear_cross_entropy(hidden, weight, head.target, strategy=strategy)

    checkpointed = checkpoint(loss, head.hidden, head.weight, use_reentrant=use_reentrant)
    checkpointed.backward()
    expected = head.gradients(loss(head.hidden, head.weight))
    assert all(torch.equal(leaf.grad, grad) for leaf, grad in zip(head.leaves, expected, strict=True))


def test_a_weight_that_changed_before_recomputation_is_noticed(draw_head):
    head = draw_head(9, 4, 30)
    loss = linear_cross_entropy(*head.operands, strategy="recompute")
    with torch.no_grad():
        head.weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_nothing_to_train_makes_no_graph(draw_head):
    head = draw_head(9, 4, 30, frozen=("hidden", "weight"))
    assert not linear_cross_entropy(*head.operands, strategy="gradients-in-forward").requires_grad


def test_module_keeps_its_settings(draw_head):
    head = draw_head(9, 4, 30, ignored=0.3)
    module = LinearCrossEntropy(softcap=5.0, reduction="sum", label_smoothing=0.1)
    expected = linear_cross_entropy(*head.operands, softcap=5.0, reduction="sum", label_smoothing=0.1)
    assert torch.equal(module(*head.operands), expected)
    assert "softcap=5.0" in repr(module)


@pytest.mark.parametrize("how", [*HOW, {"reduction": "none"}])
def test_compiles_whole_for_any_number_of_tokens(draw_head, how):
    def loss(hidden, weight, bias, target):
        return linear_cross_entropy(hidden, weight, target, bias=bias, **how).sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (12, 20, 33):
        head = draw_head(tokens, 4, 50, bias=True, ignored=0.3)
        operands = (head.hidden, head.weight, head.bias, head.target)
        ours, eager = compiled(*operands), loss(*operands)
        torch.testing.assert_close(ours, eager)
        for a, b in zip(torch.autograd.grad(ours, head.leaves), head.gradients(eager), strict=True):
            torch.testing.assert_close(a, b)


def test_compiled_operators_are_declared_truthfully(draw_head):
    head = draw_head(9, 4, 50, dtype=torch.float32, bias=True, ignored=0.3)
    linear_logprob(*head.operands)
    for names in ("lse", "argmax entropy lse mean"):
        how = (torch.float32, -100, 1.0, None, None, names)
        torch.library.opcheck(
            torch.ops.planish.head_statistics, (head.hidden, head.weight, head.bias, head.target, None, *how)
        )


def test_gradients_in_forward_are_refused_in_a_traced_graph(draw_head):
    head = draw_head(9, 4, 50)

    def loss(hidden):
        return linear_cross_entropy(hidden, head.weight, head.target, strategy="gradients-in-forward")

    with pytest.raises(Exception, match="cannot be traced"):
        torch.compile(loss, fullgraph=True, backend="aot_eager")(head.hidden)
