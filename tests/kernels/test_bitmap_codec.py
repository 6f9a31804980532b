"""Packed and unpacked is the same bit pattern, by every kernel, at every size, density and thread count."""

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from planish.kernels.bitmap import BLOCK, TorchCodec, TwinCodec, codec, num_bits_bytes, num_blocks
from planish.kernels.bitmap_native import NativeCodec, describe
from planish.kernels.native import LEVELS, library_path

INTS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
SIZES = [0, 1, 7, 8, 9, 31, 33, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 17]


def codecs():
    path = library_path("bitmap")
    natives = [] if path is None else [NativeCodec(ctypes.CDLL(str(path)), level) for level in range(len(LEVELS))]
    return [TwinCodec(), TorchCodec(), *natives]


def patterns(x):
    return x.view(INTS[x.element_size()])


def draw(numel, density, dtype, seed=0):
    """Return any bit patterns, NaN, infinities, -0.0 and denormals among them, zero with probability 1 - density."""
    generator = torch.Generator().manual_seed(seed)
    whole = INTS[dtype.itemsize]
    info = torch.iinfo(whole)
    x = torch.randint(info.min, info.max, (numel,), dtype=whole, generator=generator)
    return x.masked_fill_(torch.rand(numel, generator=generator) >= density, 0).view(dtype)


def packed(kernels, x, room):
    bits = torch.full((num_bits_bytes(x.numel()),), 255, dtype=torch.uint8)
    base = torch.full((num_blocks(x.numel()),), -1, dtype=torch.int64)
    values = torch.ones(room, dtype=x.dtype)
    return bits, base, values, kernels.pack(x, bits, base, values)


@settings(deadline=None, max_examples=40)
@given(
    numel=st.one_of(st.sampled_from(SIZES), st.integers(0, 200_000)),
    density=st.sampled_from([0.0, 0.01, 0.1, 0.5, 0.97, 1.0]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]),
    slack=st.sampled_from([0, 3, 2 * BLOCK]),
    threads=st.sampled_from([1, 3]),
)
def test_every_kernel_returns_every_bit(numel, density, dtype, slack, threads):
    x, other = draw(numel, density, dtype), draw(numel, 1.0, dtype, seed=1)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for kernels in codecs():
            expected = int((patterns(x) != 0).sum())
            assert kernels.count(x) == expected
            bits, base, values, count = packed(kernels, x, expected + slack)
            assert count == expected
            seconds = torch.empty_like(values)
            kernels.compact(other, bits, base, seconds)
            marked = patterns(other).masked_fill(patterns(x) == 0, 0)
            in_order = torch.equal(base, base.sort().values)
            for reader in codecs():  # whoever packed, anybody unpacks
                if isinstance(reader, TorchCodec) and not in_order:
                    continue
                for stream, want in ((values, patterns(x)), (seconds, marked)):
                    out = torch.ones_like(x)
                    reader.unpack(stream[:expected].clone(), bits, base, out)
                    assert torch.equal(patterns(out), want)
    finally:
        torch.set_num_threads(before)


def test_what_relu_keeps_is_kept():
    x = torch.tensor([float("nan"), -0.0, 0.0, 1e-40, float("inf"), -float("inf"), 2.0], dtype=torch.bfloat16)
    assert codec(x.device).count(x) == 6  # all but +0.0, 1e-40 being a denormal in bf16


def test_a_stream_without_room_is_reported_and_not_run_over():
    x = draw(5 * BLOCK, 0.5, torch.float32)
    expected = int((patterns(x) != 0).sum())
    for kernels in codecs():
        room = torch.ones(expected, dtype=x.dtype)
        for short in (0, 1, BLOCK, expected - 1):
            room.fill_(1.0)
            bits, base = torch.empty(num_bits_bytes(x.numel()), dtype=torch.uint8), torch.empty(5, dtype=torch.int64)
            assert kernels.pack(x, bits, base, room[:short]) == expected
            assert (room[short:] == 1.0).all()


def test_bits_and_blocks_are_laid_out_as_documented():
    x = torch.zeros(BLOCK + 9, dtype=torch.bfloat16)
    x[[0, 9, BLOCK + 8]] = torch.tensor([1.0, 2.0, 3.0], dtype=x.dtype)
    for kernels in codecs():
        bits, base, values, count = packed(kernels, x, 3)
        assert count == 3
        assert values.tolist() == [1.0, 2.0, 3.0]
        assert base.tolist() == [0, 2]
        assert (bits[0], bits[1], bits[BLOCK // 8 + 1]) == (1, 2, 1)
        assert bits.sum() == 4


def test_triton_kernels_in_the_interpreter():
    pytest.importorskip("triton", reason="the `triton` extra is not installed")
    script = Path(__file__).with_name("process_triton.py")
    command = ["env", "TRITON_INTERPRET=1", sys.executable, str(script)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "checked\n"


def test_the_kernels_of_this_machine_are_named():
    assert describe() in LEVELS if library_path("bitmap") else "NumPy" in describe()
