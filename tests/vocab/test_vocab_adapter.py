"""A thin matrix product beside a frozen weight: the head of base + B A, without the sum."""

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch.autograd import gradcheck

from planish import linear_cross_entropy, linear_logprob
from planish.memory.ledger import Ledger
from planish.peaks.vocab import inputs, reference
from planish.peaks.vocab.plain import plain_cross_entropy
from planish.price.vocab import cross_entropy_phases

STRATEGIES = ("gradients-in-forward", "recompute")
FROZEN = ("weight", "bias")
SCALE = 0.5
pytestmark = pytest.mark.filterwarnings("ignore:`tile_bytes`:UserWarning")


def thin(head, rank, *, dtype=None, seed=0):
    """Return A [R, D] and B [V, R] beside the head."""
    generator = torch.Generator().manual_seed(seed)
    dtype = head.weight.dtype if dtype is None else dtype

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).mul_(0.5).to(dtype).requires_grad_()

    return normal(rank, head.hidden.shape[-1]), normal(len(head.weight), rank)


def adapter_of(head, first, second):
    return (head.hidden.to(first.dtype) @ first.t() * SCALE, second)


def exact(head, first, second, **how):
    weight = head.weight.double() + SCALE * second.double() @ first.double()
    return reference.logits(head.hidden, weight, head.bias, **how)


@settings(deadline=None, max_examples=40)
@given(
    st.integers(0, 60),
    st.integers(1, 6),
    st.sampled_from([1, 30, 1030, 2500]),
    st.sampled_from(STRATEGIES),
    st.sampled_from([0.0, 0.4]),
    st.sampled_from([FROZEN, (*FROZEN, "hidden")]),
    st.sampled_from([{}, {"softcap": 3.0, "logit_scale": 0.5}]),
    st.sampled_from([1, 2**18, 2**26]),
)
def test_cross_entropy(draw_head, assert_all_close, tokens, rank, vocab, strategy, ignored, frozen, how, tile):
    head = draw_head(tokens, 7, vocab, bias=True, ignored=ignored, frozen=frozen)
    first, second = thin(head, rank)
    ours = linear_cross_entropy(
        *head.operands, bias=head.bias, adapter=adapter_of(head, first, second), strategy=strategy, tile_bytes=tile,
        reduction="sum", **how,
    )  # fmt: skip
    theirs = reference.cross_entropy(exact(head, first, second, **how), head.target).sum()
    leaves = [*head.leaves, first, second]
    assert_all_close([ours], [theirs], 1e-12)
    mine, others = (torch.autograd.grad(0.3 * each, leaves) for each in (ours, theirs))
    assert_all_close(mine, others, 1e-10)


def test_gradcheck_of_every_statistic(draw_head):
    head = draw_head(5, 3, 7, bias=True, frozen=("weight",), ignored=0.3)
    first, second = thin(head, 2)

    def statistics(hidden, bias, first, second):
        adapter = (hidden @ first.t(), second)
        return linear_logprob(
            hidden, head.weight, head.target, bias=bias, adapter=adapter, want=("nll", "lse", "entropy")
        )[:3]

    assert gradcheck(statistics, (head.hidden, head.bias, first, second))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("adapter_dtype", [torch.bfloat16, torch.float32])
def test_low_precision_is_within_twice_full_logits(draw_head, strategy, adapter_dtype):
    head = draw_head(80, 32, 2100, dtype=torch.bfloat16, frozen=("weight",), scale=0.4)
    first, second = thin(head, 4, dtype=adapter_dtype)
    adapter, leaves = adapter_of(head, first, second), [head.hidden, first, second]
    ours = linear_cross_entropy(*head.operands, adapter=adapter, strategy=strategy)
    each = linear_logprob(*head.operands, adapter=adapter).nll
    # An adapter that is wider than the head is multiplied in the head's dtype.
    narrow = tuple(each.to(torch.bfloat16) for each in adapter)
    plain = plain_cross_entropy(*head.operands, adapter=narrow, reduction="none")
    true = F.cross_entropy(exact(head, first, second), head.target, reduction="none")
    found = [
        [losses, *torch.autograd.grad(mean, leaves, retain_graph=True)]
        for losses, mean in ((each, ours), (plain, plain.mean()), (true, true.mean()))
    ]
    for a, b, c in zip(*found, strict=True):
        error, allowed = ((each.double() - c.double()).abs().max() for each in (a, b))
        assert error <= 2 * allowed + torch.finfo(a.dtype).eps * c.abs().max()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtypes", [(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("tile_bytes", [2**18, 2**25])
def test_price_is_what_the_ledger_measures(draw_head, monkeypatch, strategy, dtypes, tile_bytes):
    calls, choose_tiling = [], inputs.choose_tiling

    def choose(head, **budget):
        calls.append((head, choose_tiling(head, **budget)))
        return calls[-1][1]

    monkeypatch.setattr(inputs, "choose_tiling", choose)
    head = draw_head(150, 48, 2100, dtype=dtypes[0], frozen=("weight",), ignored=0.3)
    low = torch.randn(150, 4).to(dtypes[0]).requires_grad_()
    _, second = thin(head, 4, dtype=dtypes[1])
    with Ledger() as ledger:
        with ledger.phase("head"):
            loss = linear_cross_entropy(
                *head.operands, adapter=(low, second), strategy=strategy, tile_bytes=tile_bytes, reduction="sum"
            )
        kept = ledger.live_bytes
        with ledger.phase("backward"):
            loss.backward()
    [(sizes, tiling)] = calls
    priced = cross_entropy_phases(sizes, tiling, num_valid=head.num_valid)
    joined = 150 * (48 + 4) * dtypes[0].itemsize  # hidden states and the adapter's, side by side
    waiting = joined if strategy == "recompute" else 0
    assert (ledger.peak_bytes["head"], kept) == (priced.forward + joined, priced.kept + waiting)
    # Autograd then splits the gradient of what stood side by side.
    assert 0 <= ledger.peak_bytes["backward"] - (priced.backward + waiting) <= joined
    # Nothing of the weight's size: neither the sum nor its gradient.
    assert priced.backward < tiling.workspace_bytes(sizes) + 2100 * 48 * 4


def test_compiles_whole(draw_head):
    head = draw_head(12, 6, 50, frozen=("weight",), ignored=0.3)
    first, second = thin(head, 3)

    def loss(hidden, first, second):
        return linear_cross_entropy(hidden, head.weight, head.target, adapter=(hidden @ first.t(), second))

    operands = (head.hidden, first, second)
    compiled, eager = torch.compile(loss, fullgraph=True, backend="aot_eager")(*operands), loss(*operands)
    torch.testing.assert_close(compiled, eager)
    for a, b in zip(torch.autograd.grad(compiled, operands), torch.autograd.grad(eager, operands), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("low", "second", "trained", "words"),
    [
        ((4, 3), (10, 2), False, r"`adapter` must be \(\[..., R\], \[V, R\]\) beside"),
        ((4, 0), (10, 0), False, "`adapter` must be"),
        ((3, 2), (10, 2), False, "`adapter` must be"),
        ((4, 2), (9, 2), False, "`adapter` must be"),
        ((4, 2), (10, 2), True, "`weight` must be frozen beside an `adapter`"),
    ],
)
def test_mistakes(draw_head, low, second, trained, words):
    head = draw_head(4, 6, 10, frozen=() if trained else ("weight",))
    with pytest.raises(ValueError, match=words):
        linear_cross_entropy(*head.operands, adapter=(torch.ones(low), torch.ones(second)))
