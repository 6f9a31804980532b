"""The vocabulary over one to four processes: every loss and gradient against full logits of all tokens in float64."""

import numpy as np
import pytest
import torch

from planish.peaks.vocab import reference
from planish.peaks.vocab.losses import linear_cross_entropy
from planish.peaks.vocab.plain import plain_cross_entropy
from vocab import ring_work

MODES = ["weights", "hidden", "gather", "auto"]
SMALLEST_TILE = pytest.mark.filterwarnings("ignore:`tile_bytes`")


def oracle(tokens, *, frozen=(), settings=None, replicated=False, **problem):
    """Return each rank's loss and gradients from full logits: the sum of the results of all ranks is differentiated."""
    settings = dict(settings or {})
    batches, weight, bias = ring_work.draw(tokens, replicated=replicated, **problem)
    batches = batches[:1] if replicated else batches
    leaves = {"weight": weight.double()} | ({} if bias is None else {"bias": bias.double()})
    leaves |= {f"hidden {rank}": hidden.double() for rank, (hidden, _) in enumerate(batches)}
    leaves = {name: each.requires_grad_(name.split()[0] not in frozen) for name, each in leaves.items()}
    logits = {name: settings.pop(name) for name in ("logit_scale", "softcap") if name in settings}
    kind = {name: settings.pop(name) for name in ("label_smoothing", "z_loss") if name in settings}
    reduction, divisor = settings.pop("reduction", "mean"), settings.pop("divisor", None)
    num_valid = sum(int((target != -100).sum()) for _, target in batches)
    losses = []
    for rank, (_, target) in enumerate(batches):
        y = reference.logits(leaves[f"hidden {rank}"], leaves["weight"], leaves.get("bias"), **logits)
        losses.append(reference.cross_entropy(y, target, **kind))
        if reduction != "none":
            losses[-1] = losses[-1].sum() / (1 if reduction == "sum" else divisor or max(1, num_valid))
    total = sum(each if each.dim() == 0 else (each * torch.arange(1, 1 + len(each))).sum() for each in losses)
    wanted = [name for name, each in leaves.items() if each.requires_grad]
    grads = torch.autograd.grad(total, [leaves[name] for name in wanted], materialize_grads=True) if wanted else ()
    return [each.detach().numpy() for each in losses], dict(zip(wanted, grads, strict=True))


def check(pool, size, *, tokens, mode, tolerance=1e-10, upstream=1.0, **problem):
    """Compare every rank's loss and gradients with the oracle's."""
    replicated = mode == "replicated"
    tokens = tokens[:size]
    answers = pool.run(
        ring_work.loss, size, tokens=tokens, mode=mode, upstream=upstream, replicated=replicated, **problem
    )
    losses, grads = oracle(tokens, replicated=replicated, **problem)
    for rank, (loss, _) in enumerate(answers):
        np.testing.assert_allclose(loss, losses[0 if replicated else rank], rtol=1e-12, atol=1e-12)
    for name, expected in grads.items():
        leaf, _, rank = name.partition(" ")
        found = answers[int(rank)][1][leaf] if rank else np.concatenate([answer[1][leaf] for answer in answers])
        np.testing.assert_allclose(found, upstream * expected, rtol=tolerance, atol=tolerance, err_msg=name)
    if replicated and "hidden 0" in grads:
        assert all(np.array_equal(answer[1]["hidden"], answers[0][1]["hidden"]) for answer in answers)
    assert all(set(answer[1]) == {name.split()[0] for name in grads} for answer in answers)
    return answers


@pytest.mark.parametrize("mode", [*MODES, "replicated"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_any_number_of_ranks_computes_the_textbook(pool, size, mode):
    check(pool, size, tokens=[7, 0, 12, 5], vocab=50, width=6, mode=mode, bias=True)


@pytest.mark.parametrize("mode", [*MODES, "replicated"])
@pytest.mark.parametrize(("vocab", "size", "ignored"), [
    (50, 3, "none"), (50, 4, "all"), (5, 4, 1), (5, 4, "all"), (3, 4, "some"), (1, 2, "none"), (1, 2, 1),
])  # fmt: skip
def test_shards_may_be_uneven_or_empty_and_ranks_without_tokens(pool, mode, vocab, size, ignored):
    tokens = [9, 9, 9, 9] if mode == "replicated" else [0, 9, 1, 6]
    check(pool, size, tokens=tokens, vocab=vocab, width=4, mode=mode, bias=True, ignored=ignored)


EVERYTHING = {"logit_scale": 0.7, "softcap": 2.0, "label_smoothing": 0.2, "z_loss": 0.03}


@SMALLEST_TILE
@pytest.mark.parametrize("tile_bytes", [1, pytest.param(2**20, marks=pytest.mark.slow), None])
@pytest.mark.parametrize("settings", [{}, {"reduction": "sum", **EVERYTHING}], ids=["plain", "everything"])
@pytest.mark.parametrize("mode", [*MODES, "replicated"])
def test_every_setting_in_pieces_of_any_size(pool, mode, settings, tile_bytes):
    check(
        pool, 3, tokens=[150, 70, 1], vocab=7000, width=4, mode=mode, bias=True,
        settings={**settings, "tile_bytes": tile_bytes},
    )  # fmt: skip


@pytest.mark.parametrize("mode", [*MODES, "replicated"])
@pytest.mark.parametrize("settings", [
    {"reduction": "none"},
    {"reduction": "none", "label_smoothing": 0.1},
    {"divisor": 31.0},
    {"label_smoothing": 1.0},
    {"z_loss": 0.5},
    {"softcap": 0.5},
    {"logit_scale": -2.0},
])  # fmt: skip
def test_each_setting(pool, mode, settings):
    check(pool, 2, tokens=[8, 13], vocab=40, width=5, mode=mode, settings=settings, upstream=3.0)


@pytest.mark.parametrize("mode", [*MODES, "replicated"])
@pytest.mark.parametrize(
    "frozen", [("weight",), ("hidden",), ("bias",), ("weight", "bias"), ("hidden", "weight", "bias")]
)
def test_what_is_frozen_gets_no_gradient(pool, mode, frozen):
    check(pool, 3, tokens=[8, 3, 5], vocab=40, width=5, mode=mode, bias=True, frozen=frozen)


def test_one_rank_is_the_local_loss_bit_for_bit(pool):
    ((loss, grads),) = pool.run(ring_work.loss, 1, tokens=[40], vocab=3000, width=8, dtype=torch.float32, bias=True)
    [(hidden, target)], weight, bias = ring_work.draw([40], vocab=3000, width=8, dtype=torch.float32, bias=True)
    leaves = [each.requires_grad_() for each in (hidden, weight, bias)]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as ranks have; products of two threads may add up in another order
    expected = linear_cross_entropy(hidden, weight, target, bias=bias)
    expected_grads = torch.autograd.grad(expected, leaves)
    torch.set_num_threads(threads)
    for name, grad in zip(("hidden", "weight", "bias"), expected_grads, strict=True):
        assert np.array_equal(grads[name], grad)
    assert loss == expected.item()


@SMALLEST_TILE
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_of_the_lse_depend_neither_on_mode_nor_rank_nor_pieces(pool, size, dtype):
    """The same tokens on every rank, and the one that owns them in turn; compared bit for bit."""
    problem = {"tokens": [21] * size, "vocab": 9001, "width": 16, "dtype": dtype, "ignored": "none", "replicated": True}
    found = [
        lse
        for mode in (*MODES, "replicated")
        for tile_bytes in (2**16, 2**18, None)
        for lse in pool.run(ring_work.lse, size, mode=mode, tile_bytes=tile_bytes, **problem)
    ]
    assert all(np.array_equal(each, found[0]) for each in found)
    [(hidden, _), *_], weight, _ = ring_work.draw(**problem)
    y = reference.logits(hidden, weight)
    exact = torch.logsumexp(y, -1) - y.mean(-1)
    exact = torch.stack([exact, exact + torch.logsumexp(y, -1) ** 2])
    np.testing.assert_allclose(found[0], exact, rtol=2e-2 if dtype == torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("mode", ["weights", "hidden", "gather"])
def test_low_precision_is_as_good_as_the_dense_head(pool, mode):
    problem = {"vocab": 3000, "width": 64, "dtype": torch.bfloat16, "ignored": "none", "scale": 0.3}
    answers = pool.run(ring_work.loss, 2, tokens=[40, 30], mode=mode, settings={"reduction": "sum"}, **problem)
    losses, exact = oracle([40, 30], settings={"reduction": "sum"}, **problem)
    batches, weight, _ = ring_work.draw([40, 30], **problem)
    leaves = [weight.requires_grad_(), *(hidden.requires_grad_() for hidden, _ in batches)]
    total = sum(plain_cross_entropy(hidden, weight, target, reduction="sum") for hidden, target in batches)
    dense = dict(zip(("weight", "hidden 0", "hidden 1"), torch.autograd.grad(total, leaves), strict=True))
    ours = {"weight": np.concatenate([each[1]["weight"] for each in answers])}
    ours |= {f"hidden {rank}": each[1]["hidden"] for rank, each in enumerate(answers)}
    for name, expected in exact.items():
        error, allowed = (float((each.double() - expected).norm()) for each in (torch.tensor(ours[name]), dense[name]))
        assert error <= 2 * allowed + 2**-8 * float(expected.norm()), name
    assert sum(each[0] for each in answers) == pytest.approx(sum(losses), rel=2e-3)


@pytest.mark.parametrize(("change", "sentence"), [
    ({"mode": "both"}, "rank 1: `mode` must be one of auto, weights, hidden, gather, replicated, got 'both'."),
    ({"settings": {"softcap": -1.0}}, "rank 1: `softcap` must be above 0, got -1.0; leave it out for no cap."),
    ({"settings": {"divisor": 0.0}}, "rank 1: `divisor` must be above 0, got 0.0."),
    ({"width": 7}, "the width of `hidden` must be the same on all ranks of `group`, got 6 on rank 0 and 7 on rank 1."),
    ({"mode": "gather"}, "`mode` must be the same on all ranks of `group`, got weights on rank 0 and gather on"),
    ({"frozen": ("hidden",)}, "what needs gradients must be the same on all ranks of `group`, got hidden, weight"),
    ({"target": 60}, "`target` must be in [0, 50) or `ignore_index` (-100), got 60 on rank 1."),
    ({"target": -3}, "`target` must be in [0, 50) or `ignore_index` (-100), got -3 on rank 1."),
    ({"rows": 50}, "the shards of all ranks must have `vocab_size` (50) rows together, got 83; give each rank its own"),
    ({"rows": 0}, "the shards of all ranks must have `vocab_size` (50) rows together, got 33; give each rank its own"),
    ({"shape": (0,)}, "rank 1: `weight_shard` must be [V, D] with V and D above 0, got [0]; a weight that is sharded"),
    ({"dtype": torch.int64}, "rank 1: `hidden` must be floating point, got torch.int64."),
    ({"num_valid": 3}, "rank 1: `num_valid` must be the number of targets that are not ignored, 5, got 3."),
])  # fmt: skip
def test_a_mistake_of_one_rank_is_refused_by_all_in_the_same_words(pool, change, sentence):
    answers = pool.run(ring_work.mistake, 3, change=change)
    assert len({tuple(each) for each in answers}) == 1, answers
    assert answers[0][1].startswith(sentence), answers[0]


def test_shards_that_are_not_cut_like_chunks_are_refused(pool):
    answers = pool.run(ring_work.mistake, 3, change={"rows": 10}, vocab_size=None)
    assert answers == [("ValueError", answers[0][1])] * 3
    assert answers[0][1].startswith(
        "`weight_shard` must be cut as `torch.chunk` cuts 43 rows for 3 ranks: rank 0 has 17"
    )


def test_different_tokens_are_not_replicated_ones(pool):
    answers = pool.run(ring_work.mistake, 2, change={}, mode="replicated")
    assert answers[0] == answers[1]
    assert answers[0][1].startswith(
        '`target` of mode "replicated" must be the same on all ranks of `group`, got 5 tokens'
    )


HANGING = [
    ("weights", "forward", "leaves"),
    ("hidden", "backward", "leaves"),
    pytest.param("weights", "backward", "stays", marks=pytest.mark.slow),
    pytest.param("hidden", "forward", "stays", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("mode", "phase", "then"), HANGING)
def test_a_rank_that_raises_leaves_no_other_hanging(pool, mode, phase, then):
    answers = pool.run(ring_work.raise_inside, 4, mode=mode, phase=phase, leaves=then == "leaves")
    assert answers[1] == "MemoryError: no room"
    for other in (answers[0], *answers[2:]):
        assert other.startswith("RuntimeError: an exchange between ranks failed: one raised, is gone, or was late by")


@pytest.mark.parametrize("mode", ["weights", "hidden", "gather"])
def test_a_sharded_parameter_keeps_its_placement(pool, mode):
    problem = {"tokens": [8, 13, 2, 5], "vocab": 45, "width": 5}
    answers = pool.run(ring_work.sharded_parameter, 4, mode=mode, **problem)
    losses, grads = oracle(**problem)
    for rank, (loss, weight_grad, hidden_grad) in enumerate(answers):
        np.testing.assert_allclose(loss, losses[rank], rtol=1e-12)
        np.testing.assert_allclose(weight_grad, grads["weight"], rtol=1e-10, atol=1e-10)
        np.testing.assert_allclose(hidden_grad, grads[f"hidden {rank}"], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("placement", "words"), [
    ("replicated", "`weight_shard` is a DTensor that every rank holds whole; give each rank its own rows."),
    ("columns", "`weight_shard` is a DTensor with placements (Shard(dim=1),) on a mesh of [2]; its rows must be cut"),
])  # fmt: skip
def test_a_parameter_that_is_sharded_otherwise_is_refused(pool, placement, words):
    for said in pool.run(ring_work.other_placement, 2, placement=placement):
        assert said.startswith(f"rank 0: {words}")


def test_autocast_and_no_grad(pool):
    for loss, expected, tracked in pool.run(ring_work.under_autocast, 2):
        assert loss == pytest.approx(expected, rel=1e-2)
        assert not tracked
