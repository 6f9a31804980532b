"""Bits: the lse of a token is the same in any tile, beside any other tokens, with any number of threads."""

import pytest
import torch

from planish.peaks.vocab.losses import linear_cross_entropy, linear_logprob

TILE_BYTES = (2**16, 2**18, 2**20, 2**26)
pytestmark = pytest.mark.filterwarnings("ignore:`tile_bytes`:UserWarning")


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "width", "vocab"), [(130, 64, 3500), (70, 33, 2049), (3, 256, 7168), (130, 8, 900)])
def test_lse_does_not_depend_on_the_tile(draw_head, threads, dtype, tokens, width, vocab):
    head = draw_head(tokens, width, vocab, dtype=dtype, bias=True, ignored=0.1)
    found = [
        linear_logprob(*head.operands, bias=head.bias, want=("nll", "lse"), tile_bytes=each) for each in TILE_BYTES
    ]
    for other in found[1:]:
        assert torch.equal(found[0].lse, other.lse)
        assert torch.equal(found[0].nll, other.nll)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_depends_neither_on_the_tile_nor_on_the_strategy(draw_head, threads, dtype):
    head = draw_head(130, 64, 3500, dtype=dtype)
    losses = {
        linear_cross_entropy(*head.operands, tile_bytes=each, strategy=strategy).item()
        for each in TILE_BYTES
        for strategy in ("gradients-in-forward", "recompute")
    }
    assert len(losses) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_does_not_feel_its_neighbours(draw_head, dtype):
    head = draw_head(40, 64, 2500, dtype=dtype)
    whole = linear_logprob(*head.operands).nll
    for rows in (slice(0, 1), slice(3, 12), slice(5, 40)):
        assert torch.equal(linear_logprob(head.hidden[rows], head.weight, head.target[rows]).nll, whole[rows])


@pytest.mark.parametrize("strategy", ["gradients-in-forward", "recompute"])
def test_runs_repeat_bit_for_bit(draw_head, threads, strategy):
    def run():
        head = draw_head(200, 32, 3000, dtype=torch.bfloat16, bias=True, ignored=0.2)
        loss = linear_cross_entropy(*head.operands, bias=head.bias, strategy=strategy)
        return [loss, *head.gradients(loss)]

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))
