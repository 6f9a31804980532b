import ctypes

import pytest
import torch

from planish.kernels.native import LEVELS, library_path
from planish.kernels.softmax import SoftmaxKernels, describe, softmax_kernels

PATH = library_path("softmax")
KERNELS = [] if PATH is None else [SoftmaxKernels(ctypes.CDLL(str(PATH)), level) for level in range(len(LEVELS))]
DTYPES = (torch.float32, torch.bfloat16)
BLOCK = 64
WIDTHS = (1, 63, 64, 65, 127, 128, 200, 1000)
UNIT = {torch.float32: 2e-6, torch.bfloat16: 2**-8}

every_kernel = pytest.mark.parametrize("kernels", KERNELS, ids=[LEVELS[each.level] for each in KERNELS])
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_width = pytest.mark.parametrize("width", WIDTHS)


def draw(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    return (4 * torch.randn(rows, width, generator=torch.Generator().manual_seed(width))).to(dtype)


def folded(kernels: SoftmaxKernels, tile: torch.Tensor, *, keep: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = max(1, tile.shape[1] // BLOCK)
    room = torch.full((2, len(tile), blocks + 3), 7.0)
    kernels.fold(tile, room[0, :, 2:], room[1, :, 2:], block=BLOCK, keep=keep)
    assert bool((room[:, :, :2] == 7.0).all())
    assert bool((room[:, :, blocks + 2 :] == 7.0).all())
    return room[0, :, 2 : blocks + 2].clone(), room[1, :, 2 : blocks + 2].clone()


def blocks_of(tile: torch.Tensor) -> list[torch.Tensor]:
    count = max(1, tile.shape[1] // BLOCK)
    return list(tile.double().tensor_split([BLOCK * each for each in range(1, count)], dim=1))


@every_kernel
@every_dtype
@every_width
def test_a_block_gives_its_maximum_and_the_sum_of_its_exponentials(kernels, dtype, width) -> None:
    tile = draw(5, width, dtype)
    top, total = folded(kernels, tile)
    for number, block in enumerate(blocks_of(tile)):
        want = block.amax(1)
        assert torch.equal(top[:, number].double(), want)
        torch.testing.assert_close(total[:, number].double(), (block - want[:, None]).exp().sum(1), rtol=1e-6, atol=0)


@every_kernel
@every_width
def test_kept_exponentials_are_those_that_were_summed(kernels, width) -> None:
    tile = draw(3, width, torch.float32)
    kept = tile.clone()
    top, total = folded(kernels, kept, keep=True)
    assert torch.equal(total, folded(kernels, tile)[1])
    for number, (block, was) in enumerate(zip(blocks_of(kept), blocks_of(tile), strict=True)):
        torch.testing.assert_close(block, (was - top[:, number, None]).exp(), rtol=2e-6, atol=1e-38)


@every_kernel
@every_dtype
@every_width
@pytest.mark.parametrize("kept", [False, True], ids=["lse", "kept"])
def test_gradients_are_those_of_the_formula_rounded_once(kernels, dtype, width, kept) -> None:
    tile = draw(6, width, dtype)
    slope, uniform, hit = torch.randn(3, 6).unbind()
    column = torch.tensor([0, width - 1, width // 2, 0, width // 3, width - 1])
    want = tile.double()
    lse = torch.logsumexp(want, 1).float()
    factor = torch.rand(6, max(1, width // BLOCK))
    if kept:
        parts = [block * factor[:, number, None] for number, block in enumerate(blocks_of(tile))]
        want = torch.cat(parts, 1) * slope[:, None]
    else:
        want = (want - lse[:, None]).exp() * slope[:, None]
    want = (want - uniform[:, None]).scatter_add(1, column[:, None], hit.double()[:, None])
    kernels.derive(
        tile,
        lse=None if kept else lse,
        factor=factor if kept else None,
        block=BLOCK,
        slope=slope,
        uniform=uniform,
        hit=hit,
        column=column,
    )
    torch.testing.assert_close(tile.double(), want, rtol=UNIT[dtype], atol=1e-6)


@every_kernel
@every_dtype
def test_what_is_left_out_counts_as_one_or_nothing(kernels, dtype) -> None:
    tile = draw(4, 130, dtype)
    lse = torch.logsumexp(tile.double(), 1).float()
    want = (tile.double() - lse[:, None]).exp()
    column = torch.zeros(4, dtype=torch.int64)
    kernels.derive(tile, lse=lse, factor=None, block=BLOCK, slope=None, uniform=None, hit=None, column=column)
    torch.testing.assert_close(tile.double(), want, rtol=UNIT[dtype], atol=1e-37)


@every_kernel
@every_dtype
def test_what_is_not_a_number_reaches_the_sum_and_nothing_else(kernels, dtype) -> None:
    inf = float("inf")
    tile = draw(5, 200, dtype)
    tile[1, 70] = float("nan")
    tile[2, 199] = inf
    tile[3] = -inf
    tile[4, 3] = -inf
    top, total = folded(kernels, tile)
    assert total[1].isnan().tolist() == [False, True, False]
    assert total[2].isnan().tolist() == [False, False, True]
    assert torch.equal(top[3], torch.full((3,), -1e38))
    assert torch.equal(total[3], torch.zeros(3))
    assert bool(total[[0, 4]].isfinite().all())


@every_kernel
def test_narrow_numbers_are_rounded_to_even_and_nan_stays_nan(kernels) -> None:
    exact = torch.tensor([[1.0, 1.00390625, 1.01171875, -1.00390625, float("nan")]])
    tile, zero = exact.to(torch.bfloat16), torch.zeros(1)
    kept = torch.tensor([[0.501953125]])
    kernels.derive(
        tile, lse=None, factor=kept, block=BLOCK, slope=torch.tensor([2.0]), uniform=zero, hit=None,
        column=torch.zeros(1, dtype=torch.int64),
    )  # fmt: skip
    assert torch.equal(
        tile.nan_to_num(nan=7.0), (exact.to(torch.bfloat16).float() * 1.00390625).to(torch.bfloat16).nan_to_num(nan=7.0)
    )


@every_kernel
@pytest.mark.parametrize("size", [0, 1, 63, 64, 1000, 700_001])
def test_narrow_parts_are_added_exactly(kernels, size) -> None:
    part, total = torch.randn(size).to(torch.bfloat16), torch.randn(size)
    want = total + part.float()
    kernels.add(total, part)
    assert torch.equal(total, want)


@pytest.mark.skipif(not KERNELS, reason="no C++ compiler when planish was installed")
@every_dtype
def test_every_level_and_any_number_of_threads_sum_alike(dtype) -> None:
    tile = draw(300, 4096, dtype)
    with_fma = [each for each in KERNELS if each.level > 0] or KERNELS
    threads = torch.get_num_threads()
    found = []
    for kernels in with_fma:
        for count in (1, 3):
            torch.set_num_threads(count)
            found.append(folded(kernels, tile))
    torch.set_num_threads(threads)
    assert all(torch.equal(each[1], found[0][1]) for each in found)


def test_only_real_tensors_on_a_cpu_are_served() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.empty(2, 64)
    unserved = [fake, torch.empty(2, 64, device="meta"), torch.empty(2, 64, dtype=torch.float64)]
    assert [softmax_kernels(each) for each in unserved] == [None] * 3
    assert (softmax_kernels(torch.empty(2, 64)) is None) == (PATH is None)
    assert describe() in LEVELS if PATH else "torch" in describe()
