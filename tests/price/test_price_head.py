"""The head weighs what a ledger counts, by each method."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from planish.memory.ledger import Ledger
from planish.methods import Blocked, Plain
from planish.peaks.vocab.losses import linear_cross_entropy
from planish.peaks.vocab.plain import plain_cross_entropy
from planish.price.head import head_bytes
from planish.shapes import BatchShape, HeadShape

LOSS_BYTES = 4
METHODS = {
    "plain": Plain(),
    "in forward": Blocked(strategy="gradients-in-forward"),
    "recompute": Blocked(strategy="recompute"),
    "small tile": Blocked(tile_bytes=2**21, strategy="recompute"),
    "auto": Blocked(),
}
KINDS = {"bare": {}, "softcap": {"softcap": 3.0}, "scale": {"logit_scale": 0.5}, "bias": {"bias": True}}


def measured(method, kind, tokens, hidden_size, vocab_size, dtype, *, trained=True, num_valid=None):
    """Return what forward adds, what waits, and what backward adds; without training what forward adds."""
    options = dict(KINDS[kind])
    with FakeTensorMode(), Ledger() as ledger, torch.set_grad_enabled(trained):
        leaf = torch.empty(2, tokens // 2, hidden_size, dtype=dtype, requires_grad=trained)
        weight = torch.empty(vocab_size, hidden_size, dtype=dtype, requires_grad=trained)
        biases = [torch.empty(vocab_size, dtype=dtype, requires_grad=trained)] if options.pop("bias", False) else []
        target = torch.empty(2, tokens // 2, dtype=torch.int64)
        if biases:
            options["bias"] = biases[0]
        before = ledger.live_bytes
        hidden = leaf + torch.zeros((), dtype=dtype)  # its backward allocates nothing
        start = ledger.live_bytes
        ledger.start_step(1)
        with ledger.phase("head"):
            if isinstance(method, Plain):
                loss = plain_cross_entropy(hidden, weight, target, **options)
            else:
                sizes = {"tile_bytes": method.tile_bytes, "strategy": method.strategy}
                valid = tokens if num_valid is None else num_valid
                loss = linear_cross_entropy(
                    hidden, weight, target, reduction="sum", num_valid=valid, **sizes, **options
                )
            del hidden
        forward = ledger.peak_bytes["head"] - start
        if not trained:
            return forward
        kept = ledger.live_bytes - before - LOSS_BYTES
        upstream = torch.ones(())
        start = ledger.live_bytes
        ledger.start_step(2)
        with ledger.phase("backward"):
            torch.autograd.grad(loss, [leaf, weight, *biases], upstream)
        return forward, kept, ledger.peak_bytes["backward"] - start


@pytest.mark.filterwarnings("ignore:`tile_bytes`:UserWarning")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "hidden_size", "vocab_size"), [(64, 32, 3000), (8, 512, 300), (256, 64, 2048)])
def test_the_head_weighs_its_price(method, kind, dtype, tokens, hidden_size, vocab_size):
    shape = HeadShape(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        itemsize=dtype.itemsize,
        biased=kind == "bias",
        softcapped=kind == "softcap",
        scaled=kind == "scale",
    )
    args = METHODS[method], kind, tokens, hidden_size, vocab_size, dtype
    batch = BatchShape(rows=2, context=tokens // 2, num_valid=tokens)
    price = head_bytes(shape, batch, METHODS[method])
    forward, kept, backward = measured(*args)
    scalars = 4 * LOSS_BYTES  # the loss and its upstream, which the step around the head holds
    assert 0 <= price.forward - forward <= scalars
    assert abs(price.kept - kept) <= scalars
    assert 0 <= price.backward + price.kept - backward - kept <= scalars
    assert 0 <= price.evaluation - measured(*args, trained=False) <= scalars


def test_without_a_number_of_valid_tokens_the_price_is_that_of_the_worse():
    shape, batch = HeadShape(vocab_size=3000, hidden_size=32, itemsize=2), BatchShape(context=64)
    worst = head_bytes(shape, batch, Blocked())
    for num_valid in (0, 1, 40, 63, 64):
        forward, kept, backward = measured(Blocked(), "bare", 64, 32, 3000, torch.bfloat16, num_valid=num_valid)
        assert forward <= worst.forward
        assert backward + kept <= worst.backward + worst.kept
