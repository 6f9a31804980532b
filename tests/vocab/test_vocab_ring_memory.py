"""Bytes of the ring: the ledger measures and ranks send what the price says; tokens add vectors and no logits."""

import dataclasses

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from planish.comm.ring import Circle
from planish.memory.ledger import Ledger
from planish.peaks.vocab import ring
from planish.peaks.vocab.shard import shard_ranges
from planish.price.processor import product_dtype
from planish.price.vocab import Head, Phases
from planish.price.vocab_ring import Party, fewest_bytes, plan_pass, ring_phases, sent_bytes
from vocab import ring_work

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
MODES = ["weights", "hidden", "gather", "replicated"]
pytestmark = pytest.mark.filterwarnings("ignore:`tile_bytes`:UserWarning")


@pytest.fixture
def parties(monkeypatch):
    """The party of every call."""
    seen = []
    monkeypatch.setattr(ring, "Party", lambda **fields: seen.append(Party(**fields)) or seen[-1])
    return seen


def measure(head, rows, circle, **how):
    """Return the phases of one loss of one rank as the ledger sees them, the operands not counted."""
    weight, bias = (None if each is None else each.detach()[rows].requires_grad_(each.requires_grad)
                    for each in (head.weight, head.bias))  # fmt: skip
    with Ledger() as ledger:
        with ledger.phase("head"):
            loss = ring.ring_linear_cross_entropy(
                head.hidden, weight, head.target, bias=bias, group=circle, vocab_size=len(head.weight),
                reduction="sum", **how,
            )  # fmt: skip
        kept = ledger.live_bytes
        with ledger.phase("backward"):
            loss.backward()
    return Phases(forward=ledger.peak_bytes["head"], kept=kept, backward=ledger.peak_bytes["backward"])


def operands(dtype, weight_dtype, *, bias=False, ignored=0.0, frozen=()):
    return {"dtype": dtype, "weight_dtype": weight_dtype, "bias": bias, "ignored": ignored, "frozen": frozen}


@pytest.mark.parametrize(("rank", "tile_bytes"), [(0, 2**25), (2, 2**17)])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("given", "loss"),
    [
        (operands(FP32, FP32), {}),
        (operands(FP32, FP32, bias=True, ignored=0.3), {}),
        (operands(FP64, FP64, ignored=0.3, frozen=("hidden",)), {}),
        (operands(BF16, BF16, ignored=0.3), {}),
        (operands(BF16, BF16, bias=True, frozen=("weight",)), {}),
        (operands(BF16, FP32, bias=True, ignored=0.3), {}),
        (operands(FP32, BF16, bias=True), {}),
        (operands(BF16, BF16, bias=True), {"softcap": 4.0, "label_smoothing": 0.1}),
        (operands(FP32, FP32, ignored=0.3), {"z_loss": 0.1}),
    ],
)
def test_price_is_what_the_ledger_measures(draw_head, parties, with_instructions, given, loss, rank, mode, tile_bytes):
    with_instructions(True)
    vocab, width = 6200, 24
    head, circle = draw_head(150, width, vocab, **given), Circle(rank=rank, size=3, group=None)
    measured = measure(head, shard_ranges(vocab, 3)[rank], circle, mode=mode, tile_bytes=tile_bytes, **loss)
    [party] = parties
    options = {name: name in loss for name in ("label_smoothing", "z_loss")}
    assert measured == ring_phases(party, mode, tile_bytes=tile_bytes, **options)


def party_of(rank, *, tokens, vocab, width, dtype, bias, frozen=(), ignored="some"):
    """Return what the ranks of `ring_work.own_part` know."""
    batches, _, _ = ring_work.draw(tokens, vocab=vocab, width=width, dtype=dtype, bias=bias, ignored=ignored)
    name, rows = (
        str(dtype).removeprefix("torch."),
        [each.stop - each.start for each in shard_ranges(vocab, len(tokens))],
    )
    head = Head(
        tokens=tokens[rank], hidden_size=width, vocab_size=rows[rank], hidden_dtype=name, weight_dtype=name,
        compute_dtype=product_dtype(name), bias_dtype=name if bias else None, wanted=frozenset({"lse"}),
        grads=frozenset({"hidden", "weight", "bias"} if bias else {"hidden", "weight"}) - set(frozen),
    )  # fmt: skip
    valid = tuple(int((target != -100).sum()) for _, target in batches)
    return Party(head=head, rank=rank, rows=tuple(rows), valid=valid)


@pytest.mark.parametrize("frozen", [(), ("weight",), ("hidden",)])
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("mode", ["weights", "hidden"])
def test_ranks_hold_and_send_what_the_price_says(pool, mode, dtype, frozen):
    problem = {"tokens": [150, 0, 90, 200], "vocab": 6200, "width": 24, "dtype": dtype, "bias": True, "frozen": frozen}
    answers = pool.run(ring_work.bytes_of, 4, mode=mode, tile_bytes=2**17, **problem)
    for rank, (forward, backward, *sent) in enumerate(answers):
        party = party_of(rank, **problem)
        phases = ring_phases(party, mode, tile_bytes=2**17)
        late = 2**13  # what gloo's threads hold of the hop before, now and then
        assert phases.forward <= forward <= phases.forward + late
        assert phases.backward <= backward <= phases.backward + late
        assert sent == [sent_bytes(party, mode, "statistics"), sent_bytes(party, mode, "gradients")]


def test_auto_counts_bytes():
    """The paper's rule, weights where N > V / P, but for the few numbers that travel with a token."""
    head = Head(tokens=0, hidden_size=64, vocab_size=100, wanted=frozenset({"lse"}))
    for tokens, weights in ((50, False), (96, False), (97, True), (400, True)):
        party = Party(head=head, rank=0, rows=(100,) * 4, valid=(tokens,) * 4)
        assert fewest_bytes(party, "gradients") == ("weights" if weights else "hidden")
        frozen = dataclasses.replace(party, head=dataclasses.replace(head, grads=frozenset({"hidden"})))
        assert fewest_bytes(frozen, "gradients") == ("weights" if tokens > 41 else "hidden")


def test_pieces_are_the_same_whatever_a_rank_holds():
    head = Head(tokens=300, hidden_size=64, vocab_size=2100, weight_dtype="bfloat16", wanted=frozenset({"lse"}))
    rows, valid = (2100, 2100, 1800), (300, 0, 7)
    heads = [dataclasses.replace(head, tokens=valid[rank], vocab_size=rows[rank]) for rank in range(3)]
    ranks = [Party(head=each, rank=rank, rows=rows, valid=valid) for rank, each in enumerate(heads)]
    for mode in ("weights", "hidden"):
        for which in ("statistics", "gradients"):
            plans = [plan_pass(party, mode, which, tile_bytes=2**20) for party in ranks]
            assert len({plan.lengths for plan in plans}) == 1
            assert [sum(each) for each in plans[0].lengths] == list(
                ranks[0].rows if mode == "weights" else ranks[0].valid
            )


@pytest.mark.parametrize("mode", ["weights", "hidden"])
def test_tokens_add_their_own_bytes_and_no_logits(mode):
    """Twice the tokens add hidden's gradient and vectors; the tiles and what travels stay."""
    found = []
    for tokens in (2**14, 2**15):
        head = Head(tokens=tokens, hidden_size=512, vocab_size=2**13, wanted=frozenset({"lse"}))
        party = Party(head=head, rank=0, rows=(2**13,) * 4, valid=(tokens,) * 4)
        phases = ring_phases(party, mode, tile_bytes=2**23)
        found.append((phases.forward, phases.backward - tokens * 512 * 4))
        for which in ("statistics", "gradients"):
            assert plan_pass(party, mode, which, tile_bytes=2**23).workspace_bytes <= 2**23
    assert found[1][0] - found[0][0] <= 2**14 * 4 * 2 * (4 * 4 + 2)
    assert found[1][1] - found[0][1] <= 2**14 * 4 * 6


def test_fake_ranks_hold_what_real_ones_do(draw_head):
    head = draw_head(150, 24, 6200, dtype=FP32)
    circle = Circle(rank=0, size=3, group=None)
    real = measure(head, slice(0, 2067), circle, mode="weights", tile_bytes=2**18)
    with FakeTensorMode() as mode:
        fakes = {name: mode.from_tensor(getattr(head, name)) for name in ("hidden", "weight", "target")}
        fake = measure(dataclasses.replace(head, **fakes), slice(0, 2067), circle, mode="weights", tile_bytes=2**18)
    assert fake == real
