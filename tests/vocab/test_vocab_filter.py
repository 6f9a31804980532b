"""What a gradient filter leaves out: nothing of the loss, next to nothing of the gradients, and it says how much."""

from contextlib import nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from planish import linear_cross_entropy
from planish.errors import UsageError
from planish.memory.ledger import Ledger
from planish.methods import Blocked, Plan
from planish.peaks.vocab.filter import GradientFilter
from planish.peaks.vocab.inputs import Options, prepare

STRATEGIES = ("gradients-in-forward", "recompute")
VOCAB = 5000


@pytest.fixture(params=[torch.float32, torch.bfloat16])
def peaked(request, draw_head):
    """A head whose probability lies on a few hundred classes in a row, as a tokenizer's order leaves it."""
    head = draw_head(200, 32, VOCAB, dtype=request.param, ignored=0.2, bias=True, frozen=("bias",), scale=0.6)
    with torch.no_grad():
        head.bias[700:] -= 12.0
    head.target[head.target >= 0] %= 700
    return head


def run(head, found=None, *, strategy, factor=1.0, **how):
    loss = linear_cross_entropy(
        *head.operands, bias=head.bias, strategy=strategy, gradient_filter=found, tile_bytes=2**21, **how
    )
    return loss.detach(), head.gradients(factor * loss)


def error(ours, exact):
    return ((ours - exact).double().norm() / exact.double().norm()).item()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("how", [{}, {"z_loss": 0.1}, {"softcap": 20.0}])
def test_most_is_skipped_and_little_is_lost(peaked, strategy, ordered, how):
    found = GradientFilter(ordered=ordered)
    loss, (d_hidden, d_weight) = run(peaked, found, strategy=strategy, **how)
    exact_loss, (exact_hidden, exact_weight) = run(peaked, strategy=strategy, **how)
    assert torch.equal(loss, exact_loss)
    assert error(d_weight, exact_weight) < (1e-2 if d_weight.dtype == torch.bfloat16 else 1e-6)
    assert found.skipped_fraction > 0.8
    assert found.seen == peaked.num_valid * VOCAB
    assert 0 < error(d_hidden, exact_hidden) < 4e-3


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bringing_columns_together_skips_more(peaked, strategy):
    loose, ordered = GradientFilter(threshold=0.01), GradientFilter(threshold=0.01, ordered=True)
    for found in (loose, ordered):
        run(peaked, found, strategy=strategy)
    assert loose.skipped < ordered.skipped < ordered.seen


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_weight_s_gradient_is_filtered_on_demand(peaked, strategy):
    _, (_, d_weight) = run(peaked, GradientFilter(weight=True), strategy=strategy)
    _, (_, exact) = run(peaked, strategy=strategy)
    assert error(d_weight, exact) < 4e-3
    assert exact[1000:].any()
    assert not d_weight[1000:].any()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_threshold_that_nothing_is_below_is_exact(draw_head, assert_all_close, strategy):
    head = draw_head(100, 8, 3000, ignored=0.2)
    for ordered in (False, True):
        found = GradientFilter(threshold=1e-300, ordered=ordered, weight=True)
        ours = linear_cross_entropy(*head.operands, strategy=strategy, gradient_filter=found)
        theirs = linear_cross_entropy(*head.operands, strategy=strategy)
        assert_all_close(head.gradients(ours), head.gradients(theirs), 1e-12)
        assert found.skipped == 0


def test_a_loss_that_is_scaled_skips_the_same(peaked):
    """CCE compares with the threshold before the upstream: scaled by 1e-4 it would keep what counts for nothing."""
    counts = []
    for factor in (1.0, 1e-4, 1e4):
        found = GradientFilter()
        _, (d_hidden, _) = run(peaked, found, strategy="recompute", factor=factor)
        counts.append(found.skipped)
        _, (exact, _) = run(peaked, strategy="recompute", factor=factor)
        assert error(d_hidden, exact) < 4e-3
    assert counts[0] == counts[1] == counts[2]


def test_a_token_of_little_weight_is_skipped_beside_one_of_much(peaked):
    upstream = torch.full((200,), 1e-6)
    upstream[int((peaked.target >= 0).nonzero()[0])] = 1.0
    found = [GradientFilter(threshold=2.0**-8, ordered=True) for _ in range(2)]
    for each, weights in zip(found, (torch.ones(200), upstream), strict=True):
        losses = linear_cross_entropy(
            *peaked.operands, bias=peaked.bias, reduction="none", gradient_filter=each, tile_bytes=2**24
        )
        peaked.gradients((losses * weights).sum())
    assert found[1].skipped > found[0].skipped


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("ordered", [False, True])
def test_what_is_not_a_number_passes(peaked, strategy, ordered):
    with torch.no_grad():
        peaked.hidden[7, 0] = torch.nan
    peaked.target[7] = 0
    _, (d_hidden, _) = run(peaked, GradientFilter(ordered=ordered), strategy=strategy)
    assert d_hidden[7].isnan().any()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fakes_weigh_no_less_than_real_tensors_and_stay_within_their_bytes(peaked, strategy):
    peak = {}
    mode = FakeTensorMode()
    for name in ("real", "fake"):
        each = [t.detach() if name == "real" else mode.from_tensor(t.detach()) for t in peaked.operands]
        hidden, weight = (t.requires_grad_() for t in each[:2])
        how = {"strategy": strategy, "tile_bytes": 2**21, "num_valid": peaked.num_valid}
        with mode if name == "fake" else nullcontext(), Ledger() as ledger, ledger.phase("head"):
            loss = linear_cross_entropy(hidden, weight, each[2], gradient_filter=GradientFilter(ordered=True), **how)
            loss.backward()
        peak[name] = ledger.peak_bytes["head"]
    assert peak["real"] <= peak["fake"]
    options = Options(ignore_index=-100, tile_bytes=2**21, strategy=strategy, gradient_filter=GradientFilter())
    head = prepare(*peaked.operands, None, options, wanted=frozenset()).task
    assert "column_tops" in head.tiling.buffers(head.head, head.tiling.passes[-1])
    assert head.tiling.workspace_bytes(head.head) <= 2**21


def test_a_plan_says_that_it_is_approximate():
    plan = Plan(vocab=Blocked(gradient_filter=2.0**-12, filter_order=True))
    assert Plan.from_toml(plan.to_toml()) == plan
    assert "gradients below the head are approximate" in plan.approximations[0]
    assert Plan().approximations == ()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("gradient_filter = 1.5", r"must be in \(0, 1\), got 1.5"),
        ("filter_order = true", "`gradient_filter` lets pass"),
    ],
)
def test_mistakes(settings, words):
    with pytest.raises(UsageError, match=words):
        Plan.from_toml(f'[plan.vocab]\nmethod = "blocked"\n{settings}\n')
    with pytest.raises(ValueError, match="`threshold` must be above 0"):
        GradientFilter(threshold=0.0)
