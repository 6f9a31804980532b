"""Experts over one to four processes: the textbook over all tokens of all ranks, whatever the routing."""

import numpy as np
import pytest
import torch

import ranks as pool
from dispatch import rank_work
from planish.peaks.dispatch.experts import Weights
from planish.peaks.dispatch.pipelined import Options, pipelined_experts
from planish.peaks.dispatch.profiles import ONE_EXPERT, PUBLISHED
from planish.peaks.dispatch.reference import experts_reference

LEVEL = {"min_routes": 1, "threshold": 1.0, "max_foreign": None}
HOME = {"max_foreign": 0}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    found = pool.Ranks(tmp_path_factory.mktemp("ranks"))
    yield found
    found.close()


def check(ranks, size, *, tokens, **how):
    """Compare results and gradients of all ranks with the reference; return the loads that rank 0 saw."""
    problem = {name: how[name] for name in ("num_experts", "top_k", "routing")}
    answers = ranks.run(rank_work.layer, size, tokens=tokens, **how)
    parts, up, down = rank_work.draw(tokens, **problem)
    hidden, ids, scores, upstream = (torch.cat(each) for each in zip(*parts, strict=True))
    leaves = [each.requires_grad_() for each in (hidden, scores, up, down)]
    expected = experts_reference(hidden, ids, scores, Weights(up=up, down=down), rank_work.GATE)
    grads = torch.autograd.grad(expected, leaves, upstream, materialize_grads=True)
    ours = [np.concatenate([answer[1][index] for answer in answers]) for index in range(4)]
    np.testing.assert_allclose(np.concatenate([each[0] for each in answers]), expected.detach(), rtol=1e-12, atol=1e-12)
    for mine, other in zip(ours, grads, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-10, atol=1e-10)
    assert all(answer[2] == answers[0][2] for answer in answers)
    return answers[0][2]


@pytest.mark.parametrize("balance", [LEVEL, HOME, {"min_routes": 4, "max_foreign": 1, "threshold": 1.0}])
@pytest.mark.parametrize("routing", ["drawn", "uneven", (100, 1), (50, 2)])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_any_number_of_ranks_computes_the_textbook(ranks, size, routing, balance):
    top_k = 1 if routing == (100, 1) else 2
    tokens = [17, 5, 0, 12][:size]
    check(ranks, size, tokens=tokens, num_experts=7, top_k=top_k, routing=routing, block_rows=9, balance=balance)


@pytest.mark.parametrize("block_rows", [3, 7, 1000])
def test_blocks_of_any_size(ranks, block_rows):
    loads = check(
        ranks, 3, tokens=[11, 20, 6], num_experts=5, top_k=3, routing="drawn", block_rows=block_rows, balance=LEVEL
    )
    assert (loads[0][2] == 1) == (block_rows == 1000)


def test_more_ranks_than_experts_and_a_token_for_every_expert(ranks):
    check(ranks, 4, tokens=[3, 4, 2, 5], num_experts=3, top_k=3, routing="drawn", block_rows=5, balance=LEVEL)


def test_a_launch_for_more_tokens_than_there_are(ranks):
    loads = check(
        ranks, 2, tokens=[6, 4], num_experts=4, top_k=2, routing="drawn", block_rows=20, balance=LEVEL, max_tokens=500
    )
    assert loads[0][2] == 1


def test_all_tokens_on_one_expert_are_worked_on_by_all_ranks(ranks):
    loads = check(ranks, 4, tokens=[40] * 4, num_experts=8, top_k=1, routing=(100, 1), block_rows=64, balance=LEVEL)
    assert loads == [(8.0, 120, loads[0][2])]


def test_ids_above_256_survive(ranks):
    """They were once sent as bfloat16."""
    check(ranks, 2, tokens=[20, 20], num_experts=300, top_k=8, routing="drawn", block_rows=30, balance=LEVEL)


def errors_of(found, expected):
    """Return, for each of result and gradients, the worst error in units of its largest number."""
    return [np.abs(mine - other).max() / np.abs(other).max() for mine, other in zip(found, expected, strict=True)]


def test_narrow_numbers_lose_no_more_than_on_one_rank(ranks):
    problem = {"num_experts": 6, "top_k": 3, "routing": "drawn", "hidden_size": 32, "width": 24}
    tokens, narrow = [50, 30, 41, 7], torch.bfloat16
    parts, up, down = rank_work.draw(tokens, **problem, dtype=narrow)
    hidden, ids, scores, upstream = (torch.cat(each) for each in zip(*parts, strict=True))
    leaves = [each.requires_grad_() for each in (hidden, scores, up, down)]
    weights = Weights(up=up, down=down)

    def with_gradients(result):
        grads = torch.autograd.grad(result, leaves, upstream.to(result.dtype))
        return [each.detach().double().numpy() for each in (result, *grads)]

    exact = with_gradients(experts_reference(hidden, ids, scores, weights, rank_work.GATE))
    options = Options(gate=rank_work.GATE, tile_rows=5, block_rows=1000)
    one = errors_of(with_gradients(pipelined_experts(hidden, ids, scores, weights, options)), exact)
    answers = ranks.run(
        rank_work.layer, 4, tokens=tokens, block_rows=20, balance=LEVEL, dtype=narrow, tile_rows=5, **problem
    )
    found = [np.concatenate(each) for each in zip(*([each[0], *each[1]] for each in answers), strict=True)]
    ulp = torch.finfo(narrow).eps
    assert all(mine <= 2 * other + ulp for mine, other in zip(errors_of(found, exact), one, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_bytes_are_the_price_for_every_routing_and_do_not_grow(ranks, size, dtype):
    problem = {"num_experts": 20, "top_k": 2, "hidden_size": 24, "width": 16, "dtype": dtype}
    for profile in (*PUBLISHED, ONE_EXPERT):
        changes = {"top_k": 1} if profile is ONE_EXPERT else {}
        for found, priced, *live in ranks.run(
            rank_work.peaks,
            size,
            tokens=[80, 64, 70, 33][:size],
            block_rows=40,
            balance={"min_routes": 1, "max_foreign": 4},
            routing=(profile.percent, profile.hot),
            **(problem | changes),
        ):
            assert found == priced
            assert live == [0, 0]


def test_more_tokens_than_announced_are_refused(ranks):
    with pytest.raises(pool.RankFailed, match="`max_tokens` is 3 and this rank has 4 tokens"):
        ranks.run(
            rank_work.layer, 1, tokens=[4], max_tokens=3, num_experts=2, top_k=1, routing="drawn", block_rows=4,
            balance=LEVEL,
        )  # fmt: skip
