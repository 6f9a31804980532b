"""Projections are pure functions: Philox by its published answers, every slice by itself, and fair coins."""

import math

import pytest
import torch

from planish.peaks.optim.apollo_random import ProjectionKey, make_projection, philox

CPU = torch.device("cpu")
FROZEN = [
    [1, 1, -1, 1, -1, 1, 1, -1, -1, 1, 1, 1, -1, 1, 1, -1],
    [1, 1, 1, 1, -1, -1, 1, -1, 1, -1, 1, -1, -1, 1, 1, 1],
]


def key(kind="rademacher", *, proj_rank=5, dim=700, seed=11, epoch=3):
    return ProjectionKey(kind=kind, proj_rank=proj_rank, dim=dim, seed=seed, epoch=epoch)


def make(each, dtype=torch.float32, **slices):
    return make_projection(each, CPU, dtype, **slices)


@pytest.mark.parametrize(("counter", "seed", "words"), [
    ([0] * 4, 0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([2**32 - 1] * 4, 2**64 - 1, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        0xA4093822 | 0x299F31D0 << 32,
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
])  # fmt: skip
def test_philox_gives_the_published_words(counter, seed, words):
    assert philox(tuple(torch.tensor(word) for word in counter), seed).tolist() == words


@pytest.mark.parametrize("kind", ["rademacher", "gaussian"])
@pytest.mark.parametrize("proj_rank", [1, 3, 31, 32, 33, 128, 200])
def test_any_slice_and_any_smaller_rank_are_parts_of_the_whole(kind, proj_rank):
    whole = make(key(kind, proj_rank=200))
    part = make(key(kind, proj_rank=proj_rank), start=123, stop=456)
    assert torch.equal(part, whole[:proj_rank, 123:456])


def test_signs_are_signs_in_every_dtype():
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        signs = make(key(proj_rank=40), dtype)
        assert signs.dtype == dtype
        assert torch.equal(signs.abs(), torch.ones_like(signs))
        assert torch.equal(signs.float(), make(key(proj_rank=40)))


def test_the_same_signs_forever():
    """Guards saved runs: another generator would change what their moments mean."""
    signs = make(key(proj_rank=2, dim=16, seed=2**63 + 5, epoch=1)).int().tolist()
    assert signs == FROZEN


@pytest.mark.parametrize("changed", [{"seed": 12}, {"seed": 11 + 2**40}, {"epoch": 4}, {"dim": 701}])
def test_seed_epoch_and_dimension_give_unrelated_projections(changed):
    one, other = make(key(proj_rank=64)), make(key(proj_rank=64, **changed))[:, :700]
    agreement = (one * other).mean().item()
    assert abs(agreement) < 5 / math.sqrt(one.numel())


def test_signs_are_fair_and_rows_and_columns_are_uncorrelated():
    signs = make(key(proj_rank=256, dim=1024))
    assert abs(signs.mean().item()) < 5 / math.sqrt(signs.numel())
    for gram, length in ((signs @ signs.t(), 1024), (signs.t() @ signs, 256)):
        off = gram - torch.diag(gram.diagonal())
        assert torch.equal(gram.diagonal(), torch.full((len(gram),), float(length)))
        assert abs(off.square().sum().item() / (len(off) * (len(off) - 1)) / length - 1) < 0.02
        assert off.abs().max() < 6.5 * math.sqrt(length)


def test_normals_have_the_moments_of_a_normal():
    normals = make(key("gaussian", proj_rank=256, dim=1024), torch.float64)
    error = 5 / math.sqrt(normals.numel())
    assert abs(normals.mean().item()) < error
    assert abs(normals.square().mean().item() - 1) < error * math.sqrt(2)
    assert abs(normals.pow(4).mean().item() - 3) < error * math.sqrt(96)
