"""Targets of other kinds: several a token with probabilities, weighted by class, a teacher's best; temperatures."""

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch.autograd import gradcheck

from planish import LinearCrossEntropy, linear_cross_entropy, linear_logprob, linear_topk_kl
from planish.memory.ledger import Ledger
from planish.peaks.vocab import reference

STRATEGIES = ("gradients-in-forward", "recompute")
HOW = ({}, {"softcap": 3.0, "logit_scale": 0.5})
pytestmark = pytest.mark.filterwarnings("ignore:`tile_bytes`:UserWarning")


def several(head, count, *, ignored=0.0, seed=0):
    """Return `count` targets a token, some of them none, and probabilities."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(head.hidden), count)
    classes = torch.randint(0, len(head.weight), shape, generator=generator)
    classes[torch.rand(shape, generator=generator) < ignored] = -100
    return classes, torch.rand(shape, generator=generator, dtype=torch.float64)


def nll_of(y, classes):
    logp = torch.log_softmax(y, -1).gather(-1, classes.clamp(min=0))
    return (-logp).where(classes >= 0, 0.0)


@settings(deadline=None, max_examples=40)
@given(
    st.integers(0, 40),
    st.integers(1, 7),
    st.sampled_from([1, 5, 1030, 2100]),
    st.sampled_from(HOW),
    st.sampled_from([0.0, 0.4, 1.0]),
    st.sampled_from([1, 2**18, 2**26]),
    st.sampled_from([1.0, 0.7, 3.0]),
    st.integers(0, 1000),
)
def test_log_probabilities_of_several_classes(
    draw_head, assert_all_close, tokens, count, vocab, how, ignored, tile, temperature, seed
):
    head = draw_head(tokens, 5, vocab, bias=True, seed=seed)
    classes, upstream = several(head, count, ignored=ignored, seed=seed)
    found = linear_logprob(
        head.hidden, head.weight, classes, bias=head.bias, want=("nll", "lse", "entropy", "argmax"),
        tile_bytes=tile, temperature=temperature, **how,
    )  # fmt: skip
    y = reference.logits(head.hidden, head.weight, head.bias, **how) / temperature
    valid = (classes >= 0).any(-1)
    per_token = reference.logprob(y, torch.zeros(tokens, dtype=torch.long).where(valid, -100))
    expected = {**per_token, "nll": nll_of(y, classes)}
    names = ("nll", "lse", "entropy")
    assert_all_close([getattr(found, name) for name in names], [expected[name] for name in names], 1e-12)
    assert torch.equal(found.argmax, expected["argmax"])
    ours, theirs = (
        (each["nll"] * upstream).sum() + (each["lse"] + 0.3 * each["entropy"]).sum()
        for each in (found._asdict(), expected)
    )
    assert_all_close(head.gradients(ours), head.gradients(theirs), 1e-10)


def test_gradcheck_of_several_classes_under_a_temperature(draw_head):
    head = draw_head(5, 3, 7, bias=True)
    classes, _ = several(head, 3, ignored=0.3)

    def statistics(hidden, weight, bias):
        how = {"want": ("nll", "lse", "entropy"), "softcap": 3.0, "temperature": 0.7}
        return linear_logprob(hidden, weight, classes, bias=bias, **how)[:3]

    assert gradcheck(statistics, (head.hidden, head.weight, head.bias))


@pytest.mark.parametrize("how", [{}, {"label_smoothing": 0.2, "z_loss": 0.1, "softcap": 4.0}])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_soft_targets(draw_head, assert_all_close, how, reduction):
    head = draw_head(20, 6, 1100, bias=True)
    classes, probs = several(head, 4, ignored=0.5)
    ours = linear_cross_entropy(
        head.hidden.view(4, 5, 6), head.weight, classes.view(4, 5, 4), target_probs=probs.view(4, 5, 4),
        bias=head.bias, reduction=reduction, **how,
    )  # fmt: skip
    y = reference.logits(head.hidden, head.weight, head.bias, softcap=how.get("softcap"))
    valid = (classes >= 0).any(-1)
    a, z = how.get("label_smoothing", 0.0), how.get("z_loss", 0.0)
    lse = torch.logsumexp(y, -1)
    losses = (1 - a) * (probs * nll_of(y, classes)).sum(-1) + (a * (lse - y.mean(-1)) + z * lse**2).where(valid, 0.0)
    theirs = {"mean": losses.sum() / valid.sum(), "sum": losses.sum(), "none": losses.view(4, 5)}[reduction]
    assert_all_close([ours], [theirs], 1e-12)
    assert_all_close(head.gradients(ours.square().sum()), head.gradients(theirs.square().sum()), 1e-10)


def test_whole_distributions_are_torch_s_own_targets(draw_head, assert_all_close):
    head = draw_head(12, 6, 30)
    probs = torch.rand(12, 30, dtype=torch.float64).softmax(-1).requires_grad_()
    everything = torch.arange(30).expand(12, 30)
    ours = linear_cross_entropy(head.hidden, head.weight, everything, target_probs=probs)
    theirs = F.cross_entropy(head.hidden @ head.weight.t(), probs)
    assert_all_close([ours, *head.gradients(ours)], [theirs, *head.gradients(theirs)], 1e-10)
    assert_all_close(torch.autograd.grad(ours, probs), torch.autograd.grad(theirs, probs), 1e-10)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("ignored", [0.0, 0.4])
def test_class_weights_are_torch_s(draw_head, assert_all_close, strategy, reduction, ignored):
    head = draw_head(40, 6, 1100, bias=True, ignored=ignored)
    weights = torch.rand(1100, dtype=torch.float64)
    how = {"reduction": reduction, "ignore_index": -100}
    ours = linear_cross_entropy(*head.operands, bias=head.bias, strategy=strategy, class_weight=weights, **how)
    y = reference.logits(head.hidden, head.weight, head.bias)
    theirs = F.cross_entropy(y, head.target, weights, **how)
    assert_all_close([ours, *head.gradients(ours)], [theirs, *head.gradients(theirs)], 1e-10)


def test_class_weights_of_each_token(draw_head, assert_all_close):
    head = draw_head(40, 6, 110, ignored=0.4)
    weights = torch.rand(110, dtype=torch.float64)
    ours = linear_cross_entropy(*head.operands, class_weight=weights, reduction="none")
    theirs = F.cross_entropy(reference.logits(head.hidden, head.weight), head.target, weights, reduction="none")
    assert_all_close([ours, *head.gradients(ours.sum())], [theirs, *head.gradients(theirs.sum())], 1e-10)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_class_weights_weigh_a_token_s_whole_loss(draw_head, assert_all_close, strategy):
    head = draw_head(40, 6, 110, ignored=0.4)
    weights, how = torch.rand(110, dtype=torch.float64), {"label_smoothing": 0.2, "z_loss": 0.1}
    ours = linear_cross_entropy(*head.operands, class_weight=weights, reduction="sum", strategy=strategy, **how)
    y = reference.logits(head.hidden, head.weight)
    theirs = (reference.cross_entropy(y, head.target, **how) * weights[head.target.clamp(min=0)]).sum()
    assert_all_close([ours, *head.gradients(ours)], [theirs, *head.gradients(theirs)], 1e-10)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_weights_that_leave_nothing_are_a_connected_zero(draw_head, strategy):
    head = draw_head(9, 6, 20)
    loss = linear_cross_entropy(*head.operands, class_weight=torch.zeros(20), strategy=strategy)
    loss.backward()
    assert loss.item() == 0
    assert all(torch.equal(leaf.grad, torch.zeros_like(leaf)) for leaf in head.leaves)


def test_the_module_keeps_its_class_weights(draw_head):
    head, weights = draw_head(9, 6, 20), torch.rand(20)
    module = LinearCrossEntropy(class_weight=weights)
    assert torch.equal(module(*head.operands), linear_cross_entropy(*head.operands, class_weight=weights))
    assert module.double().class_weight.dtype == torch.float64


@pytest.mark.parametrize("divergence", ["forward", "reverse", "jensen-shannon"])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_a_teacher_s_best_and_one_rest(draw_head, assert_all_close, divergence, temperature):
    head, teacher = draw_head(20, 6, 1100), draw_head(20, 9, 1100, seed=1, frozen=("hidden", "weight"))
    y, t = (reference.logits(each.hidden, each.weight) / temperature for each in (head, teacher))
    best = t.log_softmax(-1).topk(8)
    best.indices[3, 5:], best.indices[7] = -100, -100
    how = {"divergence": divergence, "temperature": temperature}
    ours = linear_topk_kl(head.hidden, head.weight, best.indices, best.values, reduction="none", **how)

    def merged(logits):
        p = logits.softmax(-1).gather(-1, best.indices.clamp(min=0)).where(best.indices >= 0, 1e-300)
        return torch.cat([p, 1 - p.sum(-1, keepdim=True)], -1).log()

    theirs = reference.divergence(merged(y), merged(t), kind=divergence)
    theirs = theirs.where((best.indices >= 0).any(-1), 0.0)
    assert_all_close([ours], [theirs], 1e-12)
    assert_all_close(head.gradients(ours.sum()), head.gradients(theirs.sum()), 1e-9)
    whole = reference.divergence(y, t, kind=divergence)
    assert (ours <= whole + 1e-12).all()
    every = t.log_softmax(-1).topk(1100)
    exact = linear_topk_kl(head.hidden, head.weight, every.indices, every.values, reduction="none", **how)
    assert_all_close([exact], [whole], 1e-12)


def test_several_classes_are_made_in_the_same_tiles(draw_head):
    head = draw_head(2000, 16, 3000, dtype=torch.float32, frozen=("hidden", "weight"))
    classes, _ = several(head, 16)
    with Ledger() as ledger, ledger.phase("head"):
        linear_logprob(head.hidden, head.weight, classes, tile_bytes=2**20)
    # The classes kept apart from the caller's, their nll, and a few numbers a row for each of them at a time.
    assert ledger.peak_bytes["head"] <= 2**20 + 2000 * (16 * (8 + 4 + 1) + 4) + 2**20


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"target_probs": torch.ones(4)}, r"`target_probs` must have the shape of `target`, \[4, 2\], got \[4\]"),
        ({"strategy": "gradients-in-forward"}, "knows one target a token"),
        ({"class_weight": torch.ones(10)}, "exclude each other"),
        ({"target": torch.zeros(4).long(), "target_probs": None, "class_weight": torch.ones(9)}, "must be 10 numbers"),
        ({"target_probs": None}, "`target` must have the shape of `hidden` without"),
        ({"target": torch.tensor([[0, 1], [2, 3], [4, 10], [0, 0]])}, "got 10 at token 2"),
    ],
)
def test_mistakes(change, words):
    arguments = {
        "hidden": torch.ones(4, 6), "weight": torch.ones(10, 6), "target": torch.zeros(4, 2).long(),
        "target_probs": torch.ones(4, 2),
    }  # fmt: skip
    with pytest.raises(ValueError, match=words):
        linear_cross_entropy(**{**arguments, **change})


def test_mistakes_of_a_teacher_s_best():
    with pytest.raises(ValueError, match=r"must both be \[..., K\] beside `hidden`"):
        linear_topk_kl(torch.ones(4, 6), torch.ones(10, 6), torch.zeros(4).long(), torch.zeros(4))
    with pytest.raises(ValueError, match="`divergence` must be one of"):
        linear_topk_kl(
            torch.ones(4, 6), torch.ones(10, 6), torch.zeros(4, 1).long(), torch.zeros(4, 1), divergence="up"
        )
    with pytest.raises(ValueError, match="`temperature` must be above 0"):
        linear_logprob(torch.ones(4, 6), torch.ones(10, 6), torch.zeros(4).long(), temperature=0.0)
