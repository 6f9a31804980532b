"""Low precision: no further from float64 than twice what full logits are, plus one unit in the last place."""

from itertools import product

import pytest
import torch

from planish.peaks.vocab import reference
from planish.peaks.vocab.losses import linear_cross_entropy, linear_logprob
from planish.peaks.vocab.plain import plain_cross_entropy

STRATEGIES = ("gradients-in-forward", "recompute")
HOW = ({}, {"softcap": 5.0}, {"logit_scale": 0.5, "softcap": 8.0})


@pytest.fixture
def assert_as_exact():
    """Return (ours, plain, exact): holds the rule for each tensor, its largest error against the largest number."""

    def check(ours, plain, exact):
        for mine, other, true in zip(ours, plain, exact, strict=True):
            error, allowed = ((each.double() - true).abs().max() for each in (mine, other))
            ulp = torch.finfo(mine.dtype).eps * true.abs().max()
            assert error <= 2 * allowed + ulp, f"{error:.3g} > 2 x {allowed:.3g} + {ulp:.3g}"

    return check


def exact(head, **how):
    y = reference.logits(head.hidden, head.weight, head.bias, **how)
    return with_gradients(head, reference.cross_entropy(y, head.target))


def with_gradients(head, losses, total=None):
    """Return each token's loss and the gradients of their mean."""
    return [losses.detach(), *head.gradients((losses.sum() if total is None else total) / head.num_valid)]


def blocked(head, *, logits_dtype="auto", strategy, tile_bytes=2**22, **how):
    how = {"bias": head.bias, "tile_bytes": tile_bytes, "logits_dtype": logits_dtype, **how}
    total = linear_cross_entropy(*head.operands, reduction="sum", strategy=strategy, **how)
    return with_gradients(head, linear_logprob(*head.operands, **how).nll, total)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("dtype", "own"),
    [(torch.float32, False), *product((torch.bfloat16, torch.float16), (False, True))],
)
@pytest.mark.parametrize(
    ("tokens", "width", "vocab"),
    [(100, 64, 2100), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((300, 64, 3000), (40, 256, 2100)))],
)
def test_rule(draw_head, assert_as_exact, with_instructions, tokens, width, vocab, dtype, own, strategy, how):
    with_instructions(own)
    head = draw_head(tokens, width, vocab, dtype=dtype, bias=True, ignored=0.2, scale=0.4)
    plain = plain_cross_entropy(*head.operands, bias=head.bias, reduction="none", **how)
    ours = blocked(head, strategy=strategy, **how)
    assert ours[0].dtype == torch.float32
    assert_as_exact(ours, with_gradients(head, plain), exact(head, **how))


@pytest.mark.parametrize(("dtype", "own"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)])
def test_rule_in_two_sweeps_of_recomputation(draw_head, assert_as_exact, with_instructions, dtype, own):
    """1000 x 64 x 4 bytes are more than `tile_bytes`: the gradient of bf16 hidden gets a sweep of its own."""
    with_instructions(own)
    head = draw_head(1000, 64, 300, dtype=dtype, scale=0.4)
    plain = plain_cross_entropy(*head.operands, reduction="none")
    ours = blocked(head, strategy="recompute", tile_bytes=250_000)
    assert_as_exact(ours, with_gradients(head, plain), exact(head))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("dtype", "weight_dtype"),
    [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float32, torch.bfloat16)],
)
@pytest.mark.parametrize("autocast", [False, True])
def test_mixed_dtypes(draw_head, assert_as_exact, with_instructions, strategy, dtype, weight_dtype, autocast):
    with_instructions(autocast)
    head = draw_head(200, 32, 2100, dtype=dtype, weight_dtype=weight_dtype, bias=True, ignored=0.2, scale=0.4)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        ours = blocked(head, strategy=strategy)
        operands = [head.hidden, head.weight, head.bias]
        hidden, weight, bias = operands if autocast else [each.float() for each in operands]
        plain = plain_cross_entropy(hidden, weight, head.target, bias=bias, reduction="none")
    assert [each.dtype for each in ours] == [torch.float32, dtype, weight_dtype, weight_dtype]
    assert_as_exact(ours, with_gradients(head, plain), exact(head))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_float32_logits_of_bf16_operands(draw_head, assert_as_exact, strategy):
    head = draw_head(200, 64, 2100, dtype=torch.bfloat16, ignored=0.2)
    wide = plain_cross_entropy(head.hidden.float(), head.weight.float(), head.target, reduction="none")
    ours = blocked(head, strategy=strategy, logits_dtype="float32")
    assert_as_exact(ours, with_gradients(head, wide), exact(head))


def test_entropy_and_lse_of_bf16(draw_head, assert_as_exact):
    head = draw_head(300, 64, 2100, dtype=torch.bfloat16, scale=0.4)
    found = linear_logprob(*head.operands, want=("nll", "lse", "entropy"))
    true = reference.logprob(reference.logits(head.hidden, head.weight), head.target)
    logits = torch.nn.functional.linear(head.hidden, head.weight).float()
    plain = reference.logprob(logits, head.target)
    names = ("nll", "lse", "entropy")
    assert_as_exact(found[:3], [plain[name].float() for name in names], [true[name] for name in names])
    assert all(each.dtype == torch.float32 for each in found[:3])


def test_log_probabilities_are_never_positive(draw_head):
    head = draw_head(200, 16, 500, dtype=torch.bfloat16, scale=4.0)
    best = linear_logprob(*head.operands, want=("argmax",)).argmax
    assert (linear_logprob(head.hidden, head.weight, best).nll >= 0).all()
