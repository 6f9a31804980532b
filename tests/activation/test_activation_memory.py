"""Feed-forward networks hold what their price says, to the byte, in forward, in between and in backward."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from transformers.activations import ReLUSquaredActivation

from planish.kernels.bitmap import codec
from planish.memory.ledger import Ledger
from planish.peaks.activation.arena import Arena
from planish.peaks.activation.keep import Keeper
from planish.peaks.activation.tiled import tiled
from planish.price.activation import arena_bytes, bitmap_bytes, tile_tokens, tiled_bytes
from planish.shapes import FeedForwardShape

TOKENS, HIDDEN, WIDTH = 90, 16, 64
CPU = torch.device("cpu")


def draw(make_network, kind, dtype, biased):
    net = make_network(kind, dtype=dtype, shape=(TOKENS,), hidden=HIDDEN, width=WIDTH, biased=biased)
    shape = FeedForwardShape(
        hidden_size=HIDDEN,
        width=WIDTH,
        itemsize=dtype.itemsize,
        gated=net.formula.gated,
        both=net.formula.both,
        biased=biased,
    )
    return net, shape


def measure(net, run):
    """Return the bytes of forward, in between, and of backward."""
    grad = torch.ones_like(net.x)
    with Ledger() as ledger:
        ledger.adopt([*net.leaves, grad], "other")
        start = ledger.live_bytes
        with ledger.phase("forward"):
            y = run(net.x)
        kept = ledger.live_bytes - start - y.nbytes
        before = ledger.live_bytes
        with ledger.phase("backward"):
            torch.autograd.grad(y, net.leaves, grad)
    return ledger.peak_bytes["forward"] - start, kept, ledger.peak_bytes["backward"] - before


@pytest.mark.parametrize("kind", ["relu", "relu2", "reglu", "relu2-glu", "drelu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_packed_networks_hold_their_price(make_network, kind, dtype):
    for biased, tokens in ((False, 7), (True, 45), (False, TOKENS), (True, 500)):
        net, shape = draw(make_network, kind, dtype, biased)
        tile_bytes = net.tile_bytes(tokens)
        for arena in (Arena(2**20, CPU), None):
            keeper = Keeper(codec(CPU), arena)
            found = measure(net, lambda x: net.forward(x, keeper=keeper, tile_bytes=tile_bytes))  # noqa: B023
            assert keeper.last.kept == "packed"
            count = round(keeper.last.density * TOKENS * WIDTH) if arena is None else 0
            price = bitmap_bytes(shape, TOKENS, tile_bytes, num_values=count)
            assert found[1:] == (price.kept, price.backward)
            assert found[0] == price.forward if arena else found[0] <= price.forward
            assert keeper.last.kept_bytes == (found[1] if arena is None else found[1] + arena_values(keeper))


def arena_values(keeper):
    last = keeper.last
    return round(last.density * last.dense_bytes)


@pytest.mark.parametrize("kind", ["relu2", "relu2-glu"])
def test_what_is_computed_again_takes_no_more_than_what_is_unpacked(make_network, kind):
    net, shape = draw(make_network, kind, torch.bfloat16, biased=False)
    tile_bytes, keeper = net.tile_bytes(20), Keeper(codec(CPU), Arena(0, CPU))
    forward, kept, backward = measure(net, lambda x: net.forward(x, keeper=keeper, tile_bytes=tile_bytes))
    price = bitmap_bytes(shape, TOKENS, tile_bytes)
    assert keeper.last.kept == "recomputed"
    assert (kept, backward) == (0, price.backward)
    assert forward <= price.forward


ACTIVATIONS = {"input": F.silu, "result": F.relu, "root": ReLUSquaredActivation()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["relu", "reglu"])
@pytest.mark.parametrize("keeps", ACTIVATIONS)
def test_tiled_networks_hold_their_price_and_nothing_as_wide_as_all_tokens(make_network, kind, dtype, keeps):
    act = ACTIVATIONS[keeps]

    def block(net):
        (inner, down, up), (of_inner, of_down, of_up) = net.weights, net.biases
        if up is None:
            return lambda x: F.linear(act(F.linear(x, inner, of_inner)), down, of_down)
        return lambda x: F.linear(act(F.linear(x, inner, of_inner)) * F.linear(x, up, of_up), down, of_down)

    for biased, tokens in ((False, 7), (True, 45), (False, TOKENS), (True, 500)):
        net, shape = draw(make_network, kind, dtype, biased)
        shape, tile_bytes = replace(shape, keeps=keeps), net.tile_bytes(tokens)
        assert tile_tokens(tile_bytes, WIDTH, dtype.itemsize) == tokens
        found = measure(net, lambda x: tiled(block(net), x, net.leaves[1:], tokens=tokens))  # noqa: B023
        price = tiled_bytes(shape, TOKENS, tile_bytes)
        assert found == (price.forward, price.kept, price.backward)


def test_a_million_tokens_hold_a_tile():
    wide = FeedForwardShape(hidden_size=4096, width=21504, itemsize=2, gated=True)
    price = tiled_bytes(wide, 2**20, 64 * 2**20)
    weights = 3 * 4096 * 21504
    rows = 2**20 * 4096 * 2
    assert price.forward < rows + 5 * 64 * 2**20
    assert price.backward < rows + (4 + 2) * weights + 8 * 64 * 2**20  # one [T, F] array alone would be 42 GiB


def test_an_arena_has_room_for_half_of_everything_and_some_more():
    shape = FeedForwardShape(hidden_size=8, width=1000, itemsize=2, gated=True)
    assert arena_bytes(shape, 100, 3) == 3 * (55_000 + 4096) * 2 * 2
