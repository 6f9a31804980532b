"""The loss and its gradients against the float64 oracle."""

import pytest
import torch

from planish.peaks.vocab import reference
from planish.peaks.vocab.losses import linear_cross_entropy


@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    ("logits", "loss"),
    [
        ({}, {}),
        ({"softcap": 2.0}, {}),
        ({"logit_scale": 0.3, "softcap": 3.0}, {}),
        ({}, {"label_smoothing": 0.1, "z_loss": 1e-2}),
    ],
)
@pytest.mark.parametrize(("tokens", "width", "vocab"), [(37, 24, 3000), (300, 16, 2500), (1, 3, 50)])
def test_gradients_in_forward_equals_the_oracle(tokens, width, vocab, logits, loss, with_bias, ignored):
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(vocab, width, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(vocab, dtype=torch.float64, requires_grad=True) if with_bias else None
    target = torch.randint(0, vocab, (tokens,))
    if ignored:
        target[::3] = -100
    inputs = [x for x in (hidden, weight, bias) if x is not None]
    ours = linear_cross_entropy(
        hidden,
        weight,
        target,
        bias=bias,
        reduction="sum",
        tile_bytes=2**22,
        strategy="gradients-in-forward",
        **logits,
        **loss,
    )
    theirs = reference.cross_entropy(reference.logits(hidden, weight, bias, **logits), target, **loss).sum()
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    for a, b in zip(torch.autograd.grad(0.37 * ours, inputs), torch.autograd.grad(0.37 * theirs, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
