"""Packs and unpacks by the Triton kernels in Triton's interpreter, which must be chosen before Triton is imported."""

import torch

from planish.kernels.bitmap import BLOCK, TwinCodec, as_integers, num_bits_bytes, num_blocks
from planish.kernels.bitmap_triton import TritonCodec


def draw(numel, dtype, density):
    generator = torch.Generator().manual_seed(numel)
    whole = as_integers(torch.empty(1, dtype=dtype)).dtype
    info = torch.iinfo(whole)
    x = torch.randint(info.min, info.max, (numel,), dtype=whole, generator=generator)
    return x.masked_fill_(torch.rand(numel, generator=generator) >= density, 0).view(dtype)


def check(kernels, x):
    expected = int((as_integers(x) != 0).sum())
    assert kernels.count(x) == expected
    bits = torch.full((num_bits_bytes(x.numel()),), 7, dtype=torch.uint8)
    base, values = torch.empty(num_blocks(x.numel()), dtype=torch.int64), torch.ones(expected, dtype=x.dtype)
    again, short = torch.ones_like(values), torch.ones_like(values)
    assert kernels.pack(x, bits, base, values) == expected
    kernels.compact(x, bits, base, again)
    assert torch.equal(as_integers(again), as_integers(values))
    for reader in (kernels, TwinCodec()):
        out = torch.ones_like(x)
        reader.unpack(values, bits, base, out)
        assert torch.equal(as_integers(out), as_integers(x))
    if expected > 1:  # the last block has no room, and is not written
        assert kernels.pack(x, bits, base, short[: expected - 1]) == expected
        assert short[expected - 1] == 1


if __name__ == "__main__":
    for in_order in (False, True):
        for numel, dtype in ((0, torch.bfloat16), (5, torch.float16), (BLOCK, torch.float32), (9001, torch.bfloat16)):
            for density in (0.0, 0.3, 1.0):
                check(TritonCodec(in_order=in_order), draw(numel, dtype, density))
    print("checked")
