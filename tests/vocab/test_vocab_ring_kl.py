"""Distillation over one to four processes: every loss and gradient against full logits of all tokens in float64."""

import numpy as np
import pytest
import torch

from planish import linear_logprob, linear_topk_kl
from planish.peaks.vocab import reference
from planish.price.vocab import Head
from planish.price.vocab_pair import Pair
from planish.price.vocab_ring_rows import RingPair, plan_pair_pass, sent_bytes
from vocab import ring_kl_work as work

KINDS = ("forward", "reverse", "jensen-shannon")
LOGITS = {"logit_scale": 0.5, "softcap": 4.0, "teacher_logit_scale": 2.0, "teacher_softcap": 9.0}
SMALLEST_TILE = pytest.mark.filterwarnings("ignore:`tile_bytes`")
TEACHER = ("teacher_hidden", "teacher_weight", "teacher_bias")


def oracle(tokens, *, settings, frozen=(), **problem):
    """Return each rank's loss and all gradients from full logits: the sum over ranks is differentiated."""
    batches, heads = work.draw(tokens, **problem)
    leaves = {name: each.double() for name, each in heads.items()}
    leaves |= {f"{name} {rank}": each.double() for rank, (own, _) in enumerate(batches) for name, each in own.items()}
    leaves = {name: each.requires_grad_(name.split()[0] not in frozen) for name, each in leaves.items()}
    num_valid, losses = sum(int((target != -100).sum()) for _, target in batches), []
    for rank, (_, target) in enumerate(batches):
        y, t = (
            reference.logits(
                leaves[f"{side}hidden {rank}"], leaves[f"{side}weight"], leaves.get(f"{side}bias"),
                logit_scale=settings.get(f"{side}logit_scale", 1.0), softcap=settings.get(f"{side}softcap"),
            )
            for side in work.WIDTHS
        )  # fmt: skip
        found = reference.divergence(
            y, t, kind=settings.get("divergence", "forward"), temperature=settings.get("temperature", 1.0),
            beta=settings.get("beta", 0.5),
        ).where(target != -100, 0.0)  # fmt: skip
        found = found + settings.get("ce_weight", 0.0) * reference.logprob(y, target)["nll"]
        reduction = settings.get("reduction", "mean")
        losses.append(found if reduction == "none" else found.sum() / (num_valid if reduction == "mean" else 1))
    total = sum(each if each.dim() == 0 else (each * torch.arange(1, 1 + len(each))).sum() for each in losses)
    wanted = [name for name, each in leaves.items() if each.requires_grad]
    grads = torch.autograd.grad(total, [leaves[name] for name in wanted], materialize_grads=True)
    return [each.detach().numpy() for each in losses], dict(zip(wanted, grads, strict=True))


def check(pool, size, *, tokens, settings, **problem):
    tokens = tokens[:size]
    answers = pool.run(work.loss, size, tokens=tokens, settings=settings, **problem)
    losses, grads = oracle(tokens, settings=settings, **problem)
    for rank, (loss, _) in enumerate(answers):
        np.testing.assert_allclose(loss, losses[rank], rtol=1e-12, atol=1e-12)
    for name, expected in grads.items():
        leaf, _, rank = name.partition(" ")
        found = answers[int(rank)][1][leaf] if rank else np.concatenate([answer[1][leaf] for answer in answers])
        np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-10, err_msg=name)
    assert all(set(answer[1]) == {name.split()[0] for name in grads} for answer in answers)


@pytest.mark.parametrize("divergence", KINDS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_any_number_of_ranks_computes_the_textbook(pool, size, divergence):
    settings = {"divergence": divergence, "ce_weight": 0.3, "temperature": 2.0}
    check(pool, size, tokens=[7, 0, 12, 5], vocab=50, bias=True, settings=settings)


@SMALLEST_TILE
@pytest.mark.parametrize("divergence", KINDS)
@pytest.mark.parametrize("tile_bytes", [1, 2**19])
def test_every_setting_in_pieces_of_any_size(pool, divergence, tile_bytes):
    settings = {"divergence": divergence, "ce_weight": 0.1, "tile_bytes": tile_bytes, "reduction": "none", **LOGITS}
    settings |= {"beta": 0.2} if divergence == "jensen-shannon" else {}
    check(pool, 3, tokens=[40, 3, 20], vocab=2500, settings=settings, frozen=TEACHER)


@pytest.mark.parametrize(("vocab", "size", "ignored"), [(5, 4, 0.0), (3, 4, 0.3), (1, 2, 0.0)])
def test_shards_may_be_uneven_or_empty(pool, vocab, size, ignored):
    for divergence in KINDS:
        check(pool, size, tokens=[0, 9, 1, 6], vocab=vocab, ignored=ignored, settings={"divergence": divergence})


@pytest.mark.parametrize("frozen", [("weight",), ("hidden", *TEACHER), ("hidden", "weight", "teacher_weight")])
def test_what_is_frozen_gets_no_gradient(pool, frozen):
    for divergence in KINDS:
        check(pool, 2, tokens=[7, 4], vocab=30, settings={"divergence": divergence}, frozen=frozen)


@pytest.mark.parametrize("divergence", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_heads_are_exactly_nothing_apart(pool, divergence, dtype):
    for answer in pool.run(work.equal_heads, 3, tokens=[20, 5, 0], divergence=divergence, dtype=dtype):
        assert not answer.any() if divergence != "jensen-shannon" else abs(answer).max(initial=0.0) < 1e-6


@pytest.mark.parametrize("divergence", KINDS)
def test_low_precision_is_as_good_as_on_one_rank(pool, divergence):
    """Gradients of a narrow weight and hidden state grow wide over all pieces, and are rounded once."""
    how = {"tokens": [40, 30, 20], "vocab": 300, "dtype": torch.bfloat16, "settings": {"divergence": divergence}}
    answers, exact = pool.run(work.loss, 3, **how), oracle(**how)[1]
    batches, heads = work.draw(how["tokens"], vocab=300, dtype=torch.bfloat16)
    leaves = {name: each.requires_grad_() for name, each in heads.items()}
    leaves |= {f"{side}hidden": torch.cat([own[f"{side}hidden"] for own, _ in batches]) for side in work.WIDTHS}
    leaves = {name: each.requires_grad_() for name, each in leaves.items()}
    work.run(None, leaves, torch.cat([target for _, target in batches]), divergence=divergence).backward()
    for name, alone in leaves.items():
        axis = [f"{name} {rank}" for rank in range(3)] if "hidden" in name else [name]
        expected = torch.cat([exact[each] for each in axis])
        found = torch.cat([torch.from_numpy(answer[1][name]) for answer in answers])
        ours, theirs = (float((each.double() - expected).norm() / expected.norm()) for each in (found, alone.grad))
        assert ours <= 2 * theirs + torch.finfo(torch.bfloat16).eps, name


def test_sharded_parameters_keep_their_placement(pool):
    problem = {"tokens": [6, 9], "vocab": 21}
    _, grads = oracle(settings={"reduction": "sum"}, **problem)
    for answer in pool.run(work.sharded_parameter, 2, **problem):
        for name, found in answer.items():
            np.testing.assert_allclose(found, grads[name], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("change", "sentence"), [
    ({"rows": 3}, "rank 1: `teacher_weight` must have the 17 rows of `weight` on each rank, got 3."),
    ({"settings": {"divergence": "reverse"}}, "`divergence` must be the same on all ranks"),
    ({"settings": {"softcap": 2.0}}, "the settings of the student's logits must be the same on all ranks"),
    ({"settings": {"tile_bytes": 0}}, "rank 1: `tile_bytes` must be above 0"),
    ({"frozen": "weight"}, "what needs gradients of the student must be the same on all ranks"),
    ({"target": 50}, "`target` must be in [0, 50) or `ignore_index` (-100), got 50 on rank 1."),
])  # fmt: skip
def test_a_mistake_of_one_rank_is_refused_by_all_in_the_same_words(pool, change, sentence):
    answers = pool.run(work.mistake, 3, change=change)
    assert len(set(answers)) == 1
    assert sentence in answers[0][1]


def ring_pair(tokens, rank, *, vocab, size, num_valid):
    rows = -(-vocab // size)
    shards = tuple(max(0, min(rows, vocab - start)) for start in range(0, rows * size, rows))
    student, teacher = (
        Head(tokens=tokens, hidden_size=width, vocab_size=shards[rank], wanted=frozenset({"lse"}), grads=grads)
        for width, grads in zip(work.WIDTHS.values(), (frozenset({"hidden", "weight"}), frozenset()), strict=True)
    )
    pair = Pair(student=student, teacher=teacher, divergence="forward")
    return RingPair(pair=pair, rows=shards, rank=rank, num_valid=num_valid)


@pytest.mark.parametrize("vocab", [6000, 12000])
def test_bytes_beside_gradients_neither_grow_with_the_vocabulary_nor_exceed_what_is_allowed(pool, vocab):
    """Tokens keep a few numbers each; what travels and the tiles stay within their bytes; every hop is priced."""
    tile_bytes, tokens, size = 2**20, [300, 300], 2
    answers = pool.run(
        work.weigh, size, tokens=tokens, vocab=vocab, dtype=torch.float32, ignored=0.0, frozen=TEACHER,
        settings={"tile_bytes": tile_bytes},
    )  # fmt: skip
    grads = vocab // size * 6 * 4 + 300 * 6 * 4
    for rank, ((forward, backward), (sent, back)) in enumerate(answers):
        ring = ring_pair(300, rank, vocab=vocab, size=size, num_valid=300)
        assert forward <= tile_bytes + 300 * 4 * 12
        assert backward <= tile_bytes + grads + 300 * 4 * 12
        for which in ("statistics", "student"):
            assert plan_pair_pass(ring, which, tile_bytes=tile_bytes).workspace_bytes <= tile_bytes
        assert (sent, back) == (sent_bytes(ring, "statistics"), sent_bytes(ring, "student"))


@pytest.mark.parametrize("divergence", KINDS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@SMALLEST_TILE
def test_a_teacher_s_best_classes_over_ranks_are_those_of_one(pool, size, divergence):
    tokens = [7, 0, 12, 5][:size]
    for vocab, count, tile_bytes in ((50, 4, None), (2500, 3, 2**18), (5, 5, None)):
        problem = {"vocab": vocab, "bias": True}
        settings = {"divergence": divergence, "tile_bytes": tile_bytes, "temperature": 1.5}
        answers = pool.run(work.topk, size, tokens=tokens, count=count, settings=settings, **problem)
        batches, heads = work.draw(tokens, **problem)
        weight, bias = heads["weight"].requires_grad_(), heads["bias"].requires_grad_()
        hidden = torch.cat([own["hidden"] for own, _ in batches]).requires_grad_()
        pairs = [work.best(problem, target, count) for _, target in batches]
        classes, logprobs = (torch.cat(each) for each in zip(*pairs, strict=True))
        alone = linear_topk_kl(hidden, weight, classes, logprobs, bias=bias, **settings)
        grads = torch.autograd.grad(alone, [hidden, weight, bias])
        np.testing.assert_allclose(sum(loss for loss, _ in answers), alone.item(), rtol=1e-12)
        for name, expected in zip(("hidden", "weight", "bias"), grads, strict=True):
            found = np.concatenate([answer[1][name] for answer in answers])
            np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-11, err_msg=name)


@SMALLEST_TILE
@pytest.mark.parametrize("tile_bytes", [1, None])
def test_log_probabilities_over_ranks_are_those_of_one(pool, tile_bytes):
    """For RL on a head that is whole nowhere: any upstream of nll and lse."""
    tokens, settings = [9, 4, 0], {"temperature": 0.7, "softcap": 3.0, "tile_bytes": tile_bytes}
    answers = pool.run(work.logprob, 3, tokens=tokens, settings=settings, vocab=700)
    batches, heads = work.draw(tokens, vocab=700)
    weight, total = heads["weight"].requires_grad_(), 0.0
    for (nll, lse, by_hidden, _), (own, target) in zip(answers, batches, strict=True):
        hidden = own["hidden"].requires_grad_()
        found = linear_logprob(hidden, weight, target, want=("nll", "lse"), temperature=0.7, softcap=3.0)
        np.testing.assert_allclose(nll, found.nll.detach(), rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(lse, found.lse.detach(), rtol=1e-12, atol=1e-12)
        part = (found.nll * torch.arange(1, 1 + len(target)) + 0.5 * found.lse.square()).sum()
        np.testing.assert_allclose(
            by_hidden, torch.autograd.grad(part, hidden, retain_graph=True)[0], rtol=1e-9, atol=1e-11
        )
        total = total + part
    [by_weight] = torch.autograd.grad(total, weight)
    np.testing.assert_allclose(np.concatenate([answer[3] for answer in answers]), by_weight, rtol=1e-9, atol=1e-11)
