"""Claim: on one rank, pipelined experts beat every way that transformers has, and run near their own products.

Forward and backward of 32 experts, 4 a token, 512 wide, 1024 inside, of 8192 tokens; CPU seconds on one thread, even
routing and routing with one expert at six times the mean. The floor is the matrix products alone into tensors that
exist, nine units of tokens x width x inner width where all activations are kept, eleven as here, where the first
product is made again in backward. transformers' `batched_mm` copies each route's weights (192 GiB here) and takes part
only where that is at most 4 GiB.
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from harness import Times, interleave, write_result
from planish.models.experts import gate_of, weights_of
from planish.peaks.dispatch.pipelined import Options, pipelined_experts, sizes_of
from planish.price.dispatch import tile_rows
from planish.price.processor import product_dtype

E, K, H, F = 32, 4, 512, 1024
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
COPIES_BYTES = 2**32
SEED = 0


def draw_ids(tokens: int, *, skewed: bool) -> Tensor:
    """Return a routing [tokens, K] without repetition in a token; `skewed`: the first expert has six times the mean."""
    generator = torch.Generator().manual_seed(SEED)
    keys = torch.rand(tokens, E, generator=generator)
    if skewed:
        keys[:, 0] = torch.where(torch.rand(tokens, generator=generator) < 6 * K / E, 2.0, -1.0)
    return keys.argsort(1, descending=True)[:, :K].contiguous()


def experts(dtype: torch.dtype) -> Qwen3MoeExperts:
    """Return experts as Qwen3-MoE has them."""
    config = Qwen3MoeConfig(num_experts=E, hidden_size=H, moe_intermediate_size=F, hidden_act="silu")
    module = Qwen3MoeExperts(config).to(dtype)
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for each in module.parameters():
            each.copy_(torch.randn(each.shape, generator=generator) * each.shape[-1] ** -0.5)
    return module


def ours(tile_bytes: int) -> Callable[..., Tensor]:
    """Return the pipelined experts as a function of a module."""

    def run(module: Qwen3MoeExperts, hidden: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
        weights, gate = weights_of(module), gate_of(module)
        rows = tile_rows(sizes_of(hidden, ids, scores, weights, gate), tile_bytes)
        return pipelined_experts(
            hidden, ids, scores, weights, Options(gate=gate, tile_rows=rows, block_rows=len(hidden))
        )

    return run


def theirs(name: str) -> Callable[..., Tensor]:
    """Return one of transformers' ways."""

    def run(module: Qwen3MoeExperts, hidden: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
        module.config._experts_implementation = name
        return module(hidden, ids, scores)

    return run


def products(ids: Tensor, dtype: torch.dtype, *, again: bool) -> Callable[[], object]:
    """Return the products of forward and backward in `dtype`, with the first one made `again` or not."""
    counts = torch.bincount(ids.flatten(), minlength=E).tolist()
    most = max(counts)
    x, inner, outer = (torch.randn(most, width).to(dtype) for width in (H, 2 * F, F))
    up, down = torch.randn(E, 2 * F, H).to(dtype), torch.randn(E, H, F).to(dtype)
    by_up, by_down = torch.zeros_like(up), torch.zeros_like(down)

    def run() -> None:
        for expert, count in enumerate(counts):
            rows, made, gated = x[:count], inner[:count], outer[:count]
            for _ in range(1 + again):
                torch.mm(rows, up[expert].t(), out=made)
            torch.mm(gated, down[expert].t(), out=rows)
            torch.mm(rows, down[expert], out=gated)
            torch.mm(rows.t(), gated, out=by_down[expert])
            torch.mm(made.t(), rows, out=by_up[expert])
            torch.mm(made, up[expert], out=rows)

    return run


def measure(dtype: str, *, skewed: bool, options: argparse.Namespace) -> dict[str, Times]:
    """Return the times of every variant."""
    tokens, module, ids = options.tokens, experts(DTYPES[dtype]), draw_ids(options.tokens, skewed=skewed)
    generator = torch.Generator().manual_seed(SEED)
    hidden = torch.randn(tokens, H, generator=generator).to(DTYPES[dtype]).requires_grad_()
    scores = torch.rand(tokens, K, generator=generator).to(DTYPES[dtype]).requires_grad_()
    upstream = torch.randn(tokens, H, generator=generator).to(DTYPES[dtype])
    leaves = [hidden, scores, *module.parameters()]

    def step(way: Callable[..., Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(way(module, hidden, ids, scores), leaves, upstream)

    multiplied = getattr(torch, product_dtype(dtype))
    variants = {f"{name} products": products(ids, multiplied, again=name == "eleven") for name in ("nine", "eleven")}
    variants |= {f"planish {size} MiB": step(ours(size * 2**20)) for size in options.tile}
    variants |= {name: step(theirs(name)) for name in options.rival}
    if tokens * K * 3 * H * F * hidden.itemsize <= COPIES_BYTES:
        variants["batched_mm"] = step(theirs("batched_mm"))
    return interleave(variants, options.rounds)


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=list(DTYPES))
    parser.add_argument("--tile", type=int, nargs="+", default=[8, 32], help="MiB")
    parser.add_argument("--rival", nargs="*", default=["eager", "grouped_mm"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dry", action="store_true", help="write no result")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures = {}
    for dtype in options.dtype:
        for skewed in (False, True):
            case = f"{dtype} {'skewed' if skewed else 'even'}"
            found = figures[case] = measure(dtype, skewed=skewed, options=options)
            print(case)
            for name, times in found.items():
                print(f"  {name:18s} {min(times.cpu_s):8.3f} s")
    if not options.dry:
        print(write_result(f"dispatch_local_{options.tokens}", figures, seed=SEED))


if __name__ == "__main__":
    main()
