"""Bytes: the ledger measures what the price says, to the byte, real or fake; tokens add only what is counted."""

import dataclasses

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from planish.memory.ledger import Ledger
from planish.peaks.vocab import inputs
from planish.peaks.vocab.losses import linear_cross_entropy, linear_logprob
from planish.price.vocab import Phases, cross_entropy_phases
from planish.price.vocab_targets import targets_phases

WIDTH, VOCAB = 48, 2100
STRATEGIES = ("gradients-in-forward", "recompute")
BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
pytestmark = pytest.mark.filterwarnings("ignore:`tile_bytes`:UserWarning")


@pytest.fixture
def planned(monkeypatch):
    """The (head, tiling) of every call, as they are chosen."""
    calls = []

    def choose(head, **budget):
        tiling = choose_tiling(head, **budget)
        calls.append((head, tiling))
        return tiling

    choose_tiling = inputs.choose_tiling
    monkeypatch.setattr(inputs, "choose_tiling", choose)
    return calls


def measure(head, *, backward=True, **how):
    """Return the phases of one loss as the ledger sees them, the operands not counted."""
    with Ledger() as ledger:
        with ledger.phase("head"):
            loss = linear_cross_entropy(*head.operands, bias=head.bias, reduction="sum", **how)
        kept = ledger.live_bytes
        with ledger.phase("backward"):
            if backward:
                loss.backward()
    return Phases(forward=ledger.peak_bytes["head"], kept=kept, backward=ledger.peak_bytes["backward"])


def operands(dtype, weight_dtype, *, bias=False, ignored=0.0, frozen=()):
    return {"dtype": dtype, "weight_dtype": weight_dtype, "bias": bias, "ignored": ignored, "frozen": frozen}


@pytest.mark.parametrize("tile_bytes", [2**18, 2**25])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("given", "loss"),
    [
        (operands(FP32, FP32), {}),
        (operands(FP32, FP32, bias=True, ignored=0.3), {}),
        (operands(FP64, FP64, ignored=0.3, frozen=("hidden",)), {}),
        (operands(BF16, BF16, ignored=0.3), {}),
        (operands(BF16, BF16, bias=True, frozen=("weight",)), {}),
        (operands(BF16, FP32, bias=True, ignored=0.3), {}),
        (operands(FP32, BF16, frozen=("hidden",)), {}),
        (operands(BF16, BF16, bias=True), {"softcap": 4.0}),
        (operands(BF16, BF16, bias=True), {"label_smoothing": 0.1}),
        (operands(FP32, FP32, ignored=0.3), {"z_loss": 0.1, "label_smoothing": 0.1}),
    ],
)
@pytest.mark.parametrize("own", [False, True])
def test_price_is_what_the_ledger_measures(
    draw_head, planned, with_instructions, own, given, strategy, tile_bytes, loss
):
    with_instructions(own)
    head = draw_head(150, WIDTH, VOCAB, **given)
    measured = measure(head, strategy=strategy, tile_bytes=tile_bytes, **loss)
    [(sizes, tiling)] = planned
    options = {name: name in loss for name in ("label_smoothing", "z_loss")}
    assert measured == cross_entropy_phases(sizes, tiling, num_valid=head.num_valid, **options)


KINDS = [{}, {"label_smoothing": 0.1}, {"z_loss": 0.1}, {"label_smoothing": 0.1, "z_loss": 0.1}]


@pytest.mark.parametrize("loss", KINDS)
@pytest.mark.parametrize("given", [operands(FP32, FP32), operands(BF16, BF16, ignored=0.3)])
@pytest.mark.parametrize(("tokens", "vocab", "tile_bytes"), [(150, VOCAB, 2**18), (2000, 130, 2**14)])
def test_weights_and_several_targets_are_priced_too(draw_head, planned, given, loss, tokens, vocab, tile_bytes):
    head = draw_head(tokens, WIDTH, vocab, **given)
    options = {name: name in loss for name in ("label_smoothing", "z_loss")}
    for strategy in STRATEGIES:
        head.hidden.grad = head.weight.grad = None
        weights = torch.rand(vocab)
        measured = measure(head, strategy=strategy, tile_bytes=tile_bytes, class_weight=weights, **loss)
        price = cross_entropy_phases(*planned[-1], num_valid=head.num_valid, class_weight=True, **options)
        assert measured == price
    for count in (1, 3, 16):
        head.hidden.grad = head.weight.grad = None
        target = torch.randint(0, vocab, (tokens, count)).masked_fill((head.target == -100).unsqueeze(1), -100)
        several = dataclasses.replace(head, target=target)
        measured = measure(several, tile_bytes=tile_bytes, target_probs=torch.rand(tokens, count), **loss)
        price = targets_phases(*planned[-1], count, num_valid=head.num_valid, **options)
        assert measured == price


@pytest.mark.parametrize("ignored", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fakes_weigh_what_real_tensors_weigh(draw_head, ignored, strategy):
    head = draw_head(100, WIDTH, VOCAB, dtype=BF16, ignored=ignored)
    real, num_valid = measure(head, strategy=strategy), head.num_valid
    mode = FakeTensorMode()
    operands = {name: mode.from_tensor(getattr(head, name).detach()).requires_grad_() for name in ("hidden", "weight")}
    fake = dataclasses.replace(head, **operands, target=mode.from_tensor(head.target))
    with mode:
        assert measure(fake, strategy=strategy, num_valid=num_valid) == real
        if not ignored:
            assert measure(fake, strategy=strategy) == real


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("ignored", [0.0, 0.3])
def test_without_gradients_one_tile_and_twelve_bytes_a_token(draw_head, planned, dtype, ignored):
    head = draw_head(5000, WIDTH, VOCAB, dtype=dtype, ignored=ignored)
    with torch.no_grad():
        measured = measure(head, backward=False, tile_bytes=2**20)
    [(sizes, tiling)] = planned
    row_bytes = tiling.rows * 24
    assert measured.forward <= tiling.workspace_bytes(sizes) + row_bytes + 12 * 5000
    assert measured.forward == cross_entropy_phases(sizes, tiling, num_valid=head.num_valid).forward


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_twice_the_tokens_add_what_is_counted_and_nothing_else(draw_head, dtype, strategy):
    """In tiles that hold fewer: the gradient of hidden, its float32 sum, 4 bytes a token for each statistic."""
    few, many = (
        measure(draw_head(n, WIDTH, VOCAB, dtype=dtype), strategy=strategy, tile_bytes=2**20) for n in (600, 1200)
    )
    hidden = 600 * WIDTH * dtype.itemsize
    statistic = 600 * 4
    if strategy == "gradients-in-forward":
        counted = {"forward": hidden + statistic, "kept": hidden, "backward": hidden}
    else:
        summed = 600 * WIDTH * 4 if dtype is BF16 else 0
        counted = {"forward": 2 * statistic, "kept": statistic, "backward": statistic + hidden + summed}
    # The equal groups of tokens differ by a few rows, of 32 bytes each beside the tile.
    for phase, size in counted.items():
        assert abs(getattr(many, phase) - getattr(few, phase) - size) <= 16 * 32


def test_two_sweeps_have_no_sum_of_hidden_gradients(draw_head):
    """1200 x 48 x 4 bytes are more than `tile_bytes`, so that nothing but the gradient itself grows with tokens."""
    few, many = (
        measure(draw_head(n, WIDTH, 300, dtype=BF16), strategy="recompute", tile_bytes=200_000) for n in (1200, 2400)
    )
    assert abs(many.backward - few.backward - 1200 * (WIDTH * 2 + 4)) <= 16 * 32


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_earlier_microbatch_adds_its_gradient_and_nothing_else(draw_head, strategy):
    head = draw_head(300, WIDTH, VOCAB, dtype=FP32)
    first = measure(head, strategy=strategy)
    hidden_grad, head.hidden.grad = head.hidden.grad, None
    second = measure(head, strategy=strategy)
    assert second == first
    assert head.hidden.grad.equal(hidden_grad)


def test_statistics_are_made_in_one_tile_each(draw_head, planned):
    head = draw_head(2000, WIDTH, VOCAB, dtype=FP32)
    with torch.no_grad(), Ledger() as ledger, ledger.phase("eval"):
        linear_logprob(*head.operands, want=("nll", "lse", "entropy", "argmax"), tile_bytes=2**20)
    [(sizes, tiling)] = planned
    assert tiling.workspace_bytes(sizes) <= 2**20
    assert ledger.peak_bytes["eval"] <= 2**20 + 2000 * (3 * 4 + 8) + tiling.rows * 48
