"""Claim: packed attention is no slower than SDPA for one document, and faster than SDPA's S x S mask for short ones.

Forward and backward of one layer, 9 query and 3 key heads of width 64 (SmolLM2), 4,096 tokens: one document, and 16
documents of 256. The mask is made beforehand; SDPA is not charged for it.
"""

import argparse
import os
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from harness import Times, interleave, write_result
from planish.peaks.attention.packed import causal_attention

TOKENS, HEADS, KV_HEADS, WIDTH, DOCUMENT = 4096, 9, 3, 64, 256
SEED = 0


def draw(dtype: torch.dtype) -> list[Tensor]:
    """Return query, key and value as a model's projections leave them: token-major memory, seen head-major."""
    generator = torch.Generator().manual_seed(SEED)
    return [
        torch.randn(1, TOKENS, heads, WIDTH, generator=generator).to(dtype).transpose(1, 2).requires_grad_()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


def step(attention: Callable[..., Tensor], inputs: list[Tensor], upstream: Tensor) -> Callable[[], object]:
    """Return one forward and backward."""
    return lambda: torch.autograd.grad(attention(*inputs), inputs, upstream)


def sdpa(mask: Tensor | None) -> Callable[..., Tensor]:
    """Return SDPA as transformers calls it, with grouped heads; causal where there is no mask."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
        return out.transpose(1, 2).contiguous()

    return attend


def measure(dtype: torch.dtype, bounds: tuple[int, ...] | None, rounds: int) -> dict[str, Times]:
    """Return the times of both, which must agree before either counts."""
    mask = None
    if bounds is not None:
        document = torch.arange(TOKENS) // DOCUMENT
        mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril() & (document[:, None] == document)

    def packed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return causal_attention(query, key, value, cu_seq_lens=bounds)

    inputs = draw(dtype)
    torch.testing.assert_close(packed(*inputs), sdpa(mask)(*inputs))
    upstream = torch.ones(1, TOKENS, HEADS, WIDTH, dtype=dtype)
    return interleave({"packed": step(packed, inputs, upstream), "sdpa": step(sdpa(mask), inputs, upstream)}, rounds)


def main() -> None:
    """Measure both cases in both dtypes, print them and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    figures = {}
    for dtype in (torch.bfloat16, torch.float32):
        for case, bounds in (("one document", None), ("16 documents", tuple(range(0, TOKENS + 1, DOCUMENT)))):
            times = measure(dtype, bounds, options.rounds)
            name = f"{case}, {str(dtype).removeprefix('torch.')}"
            figures[name] = times
            packed, plain = (times[each].summary()["wall_s"]["median"] for each in ("packed", "sdpa"))
            print(f"{name:<26} packed {packed:.3f} s  sdpa {plain:.3f} s  ratio {packed / plain:.3f}")
    print(write_result("attention_packed", figures, seed=SEED))


if __name__ == "__main__":
    main()
