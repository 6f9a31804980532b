"""What waits for backward packed gives the output and gradients of autograd: bit for bit, however it was kept."""

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from planish.kernels.bitmap import codec
from planish.peaks.activation.arena import Arena
from planish.peaks.activation.bitmap import Projection, sparse_feed_forward
from planish.peaks.activation.formula import Formula
from planish.peaks.activation.keep import Keeper, break_even

CPU = torch.device("cpu")
KINDS = ["relu", "relu2", "reglu", "relu2-glu", "drelu"]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def keeper(arena_bytes=None):
    return Keeper(codec(CPU), None if arena_bytes is None else Arena(arena_bytes, CPU))


def equal(found, expected):
    return [torch.equal(a, b) for a, b in zip(found, expected, strict=True)] == [True] * len(expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_tile_is_autograd_bit_for_bit_however_it_is_kept(make_network, kind, dtype):
    for shape, biased in (((37,), False), ((3, 21), True)):
        net = make_network(kind, dtype=dtype, shape=shape, biased=biased)
        expected = net.eager()
        for arena_bytes, kept in ((None, "packed"), (2**20, "packed"), (16, "recomputed")):
            keeps = keeper(arena_bytes)
            assert equal(net.ours(keeper=keeps), expected)
            assert keeps.last.kept == kept
        keeps._dense = True
        for arena in (None, Arena(2**20, CPU)):
            keeps.arena = arena
            keeps._dense = True
            assert equal(net.ours(keeper=keeps), expected)
            assert keeps.last.kept == "dense"


@settings(deadline=None, max_examples=40)
@given(
    kind=st.sampled_from(KINDS),
    tokens=st.integers(1, 70),
    tile=st.integers(1, 80),
    biased=st.booleans(),
    arena_bytes=st.sampled_from([None, 2**20, 2000, 0]),
)
def test_any_tile_is_exact_in_float64(make_network, errors_of, tokens, tile, kind, biased, arena_bytes):
    net = make_network(kind, dtype=torch.float64, shape=(tokens,), biased=biased, seed=tokens)
    found, expected = net.ours(keeper=keeper(arena_bytes), tile_bytes=net.tile_bytes(tile)), net.eager()
    assert max(errors_of(found[:1], expected[:1])) <= 1e-12
    assert max(errors_of(found[1:], expected[1:])) <= 1e-10


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tiles_in_low_precision_are_as_exact_as_autograd(make_network, errors_of, kind, dtype):
    net = make_network(kind, dtype=dtype, shape=(200,), biased=True)
    exact = net.to(torch.float64).eager()
    plain = errors_of(net.eager(), exact)
    for found, allowed in zip(errors_of(net.ours(tile_bytes=net.tile_bytes(13)), exact), plain, strict=True):
        assert found <= 2 * allowed + torch.finfo(dtype).eps


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck_and_no_second_derivative(make_network, kind):
    net = make_network(kind, dtype=torch.float64, shape=(5,), hidden=3, width=7, biased=True)

    def run(x, *_):
        return net.forward(x, tile_bytes=net.tile_bytes(2))

    assert torch.autograd.gradcheck(run, tuple(net.leaves), atol=1e-6)
    (grad,) = torch.autograd.grad(net.forward().square().sum(), net.x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()


def test_frozen_parts_no_tokens_strides_and_a_second_backward(make_network):
    net = make_network("reglu", biased=True)
    expected = net.eager()
    for frozen in range(len(net.leaves)):
        some = make_network("reglu", biased=True)
        some.leaves[frozen].requires_grad_(False)
        wanted = [each for each in some.leaves if each.requires_grad]
        found = torch.autograd.grad(some.forward(), wanted, some.grad)
        assert equal(found, [each for index, each in enumerate(expected[1:]) if index != frozen])
    strided = net.x.detach().t().contiguous().t().requires_grad_()
    y = net.forward(strided)
    first = torch.autograd.grad(y, [strided, net.weights[0]], net.grad, retain_graph=True)
    assert equal(first, torch.autograd.grad(y, [strided, net.weights[0]], net.grad))
    assert equal(first, expected[1:3])
    none = make_network("reglu", shape=(0,))
    assert [each.abs().sum().item() for each in none.ours()] == [0.0] * 5
    with torch.no_grad():
        assert torch.equal(net.forward(), expected[0])


def test_what_is_not_finite_shows_as_in_autograd(make_network):
    # NaN, infinities, a denormal and -0.0 before the ReLU, whose own result for each is kept.
    net = make_network("relu2", hidden=6, width=6, shape=(6,))
    with torch.no_grad():
        net.x.copy_(torch.diag(torch.tensor([float("nan"), float("inf"), 1e-41, -0.0, 3.0, -1.0])))
        net.weights[0].copy_(torch.eye(6))
    found, expected = net.ours(), net.eager()
    assert all(torch.equal(a.isnan(), b.isnan()) for a, b in zip(found, expected, strict=True))
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(found, expected, strict=True))


def test_a_layer_that_does_not_fit_leaves_the_arena_to_others(make_network):
    net = make_network("relu2")
    arena = Arena(4000, CPU)  # room for one layer of 37 x 40 values half dense, and not for two
    first, second = Keeper(codec(CPU), arena), Keeper(codec(CPU), arena)
    y, z = net.forward(keeper=first), net.forward(keeper=second, tile_bytes=net.tile_bytes(8))
    assert (first.last.kept, second.last.kept) == ("packed", "recomputed")
    assert second.last.kept_bytes == 0
    assert second.last.density == first.last.density  # what is not kept is counted all the same
    expected = net.eager()[1:]
    assert equal(torch.autograd.grad(y, net.leaves, net.grad), expected)
    for a, b in zip(torch.autograd.grad(z, net.leaves, net.grad), expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)
    assert arena.taken_bytes == 0


def test_the_arena_is_free_after_backward_after_a_lost_graph_and_in_a_checkpoint(make_network):
    net, keeps = make_network("reglu"), keeper(2**20)
    y = net.forward(keeper=keeps)
    held = keeps.arena.taken_bytes
    assert held >= 2 * keeps.last.density * net.x.shape[0] * net.width * 4
    y.backward(net.grad, retain_graph=True)
    assert keeps.arena.taken_bytes == held  # a second backward may come
    y.backward(net.grad)
    assert keeps.arena.taken_bytes == 0
    y = net.forward(keeper=keeps)
    del y
    gc.collect()
    assert keeps.arena.taken_bytes == 0
    y = checkpoint(lambda x: net.forward(x, keeper=keeps), net.x, use_reentrant=False)
    assert keeps.arena.taken_bytes == 0
    found = torch.autograd.grad(y, net.leaves, net.grad)
    assert equal(found, net.eager()[1:])
    assert keeps.arena.taken_bytes == 0


def test_the_payload_passes_through_saved_tensor_hooks(make_network):
    net, seen = make_network("relu"), []

    def pack(tensor):
        seen.append(tensor.nbytes)
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = net.forward(keeper=keeper(2**20))
    assert equal(torch.autograd.grad(y, net.leaves, net.grad), net.eager()[1:])
    assert sum(seen) < net.x.nbytes + sum(each.nbytes for each in net.weights[:2]) + 37 * 40 * 4


def test_above_break_even_the_next_forward_keeps_dense_until_the_density_has_fallen(make_network):
    assert break_even(2, 1) == 15 / 16
    assert break_even(4, 1) == 31 / 32
    net, keeps = make_network("relu", biased=True), keeper()
    bias, kept = net.biases[0], []
    before = (net.x @ net.weights[0].t()).detach()
    for density in (0.5, 1.0, 1.0, 0.94, 0.94, 0.5, 0.5):
        with torch.no_grad():
            bias.fill_(1e-3 - before.quantile(1 - density))
        assert equal(net.ours(keeper=keeps), net.eager())
        kept.append((round(keeps.last.density, 2), keeps.last.kept))
    assert [how for _, how in kept] == ["packed", "packed", "dense", "dense", "dense", "dense", "packed"]
    assert kept[1][0] == 1.0
    assert 31 / 32 - 1 / 16 < kept[3][0] < 31 / 32  # below break-even, and not far enough below to change


def test_tensors_that_do_not_go_together_are_refused(make_network):
    net = make_network("relu")
    inner, down = (Projection(weight=each) for each in net.weights[:2])
    for options, said in (
        ({"formula": Formula(gated=True)}, "`up` must be given if `formula` is gated"),
        ({"up": inner}, "left out if it is not"),
        ({"tile_bytes": 0}, "`tile_bytes` must be 1 or more, got 0"),
        ({"down": inner}, r"`down` has width 24, `inner` \[40, 24\] needs 40"),
        ({"x": net.x.bfloat16()}, "one dtype"),
        ({"x": net.x[:, :4]}, "`x` has width 4"),
    ):
        given = {"x": net.x, "formula": net.formula, "inner": inner, "down": down} | options
        x, formula = given.pop("x"), given.pop("formula")
        with pytest.raises(ValueError, match=said):
            sparse_feed_forward(x, formula, **given)
    with pytest.raises(ValueError, match="`both` is dReLU"):
        Formula(both=True)
    with pytest.raises(ValueError, match="`arena_bytes` must be 0 or more, got -1"):
        Arena(-1, CPU)
