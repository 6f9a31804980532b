"""Claim: APOLLO-Mini's step takes at most 1.3 times fused AdamW's CPU seconds; rank 192 at most 1.25 times its product
and one fused AdamW pass together. State is the formula to the byte.

49.5M parameters as a transformer has them: 7 layers of four 768 x 768, two 2048 x 768 and one 768 x 2048. CPU seconds
of the process, so that a busy machine counts for less. With `--reference`, the published package (which has to be
installed in the environment that runs this) takes its turns too.
"""

import argparse
import importlib
from collections.abc import Callable

import torch
from torch import Tensor

from harness import Times, interleave, write_result
from planish.optim import Apollo
from planish.peaks.optim.adamw import AdamW
from planish.price.apollo import MatrixShape

SHAPES = [(768, 768)] * 28 + [(2048, 768)] * 14 + [(768, 2048)] * 7
SEED = 0
MINI = {"proj_rank": 1, "granularity": "tensor"}
METHODS = {"mini": MINI, "rank 64": {"proj_rank": 64}, "rank 192": {"proj_rank": 192}}


def draw(dtype: torch.dtype) -> list[Tensor]:
    """Return the weights with gradients of a usual size."""
    generator = torch.Generator().manual_seed(SEED)
    params = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in SHAPES]
    for param in params:
        param.grad = (torch.randn(param.shape, generator=generator) * 1e-3).to(dtype)
    return params


def product(params: list[Tensor], proj_rank: int) -> Callable[[], object]:
    """Return the one product that a projection to `proj_rank` cannot do without; in fp32, as it is taken on a CPU."""
    projection, grads = torch.ones(proj_rank, 768), [param.grad.float() for param in params]

    def run() -> None:
        for grad in grads:
            rows, cols = grad.shape
            projection @ grad if rows < cols else grad @ projection.t()

    return run


def reference(params: list[Tensor], options: dict[str, int | str]) -> Callable[[], object]:
    """Return the step of the published package."""
    group = {"params": params, "rank": options["proj_rank"], "scale_type": options.get("granularity", "channel")}
    group |= {"proj": "random", "update_proj_gap": 200, "scale": 1.0, "proj_type": "std"}
    return importlib.import_module("apollo_torch").APOLLOAdamW([group], lr=1e-4).step


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of all state tensors."""
    return sum(tensor.nbytes for state in optimizer.state.values() for tensor in state.values())


def measure(dtype: torch.dtype, *, master: bool, rounds: int, with_reference: bool) -> dict[str, Times | int]:
    """Return the times of every optimizer on the same weights, and the bytes of APOLLO's state."""
    params = draw(dtype)
    adamw = AdamW(params, lr=1e-4, master=master)
    variants: dict[str, Callable[[], object]] = {"fused adamw": adamw.step}
    figures: dict[str, Times | int] = {"fused adamw state bytes": state_bytes(adamw)}
    for name, options in METHODS.items():
        optimizer = Apollo(params, lr=1e-4, master=master, **options)
        expected = sum(
            MatrixShape.of(shape).state_bytes(options["proj_rank"], master=master and dtype != torch.float32)
            for shape in SHAPES
        )
        if state_bytes(optimizer) != expected:
            raise AssertionError(f"{name}: {state_bytes(optimizer)} bytes of state, the formula says {expected}")
        figures[f"{name} state bytes"] = expected
        variants[name] = optimizer.step
        if with_reference:
            variants[f"{name}, published package"] = reference(params, options)
    for proj_rank in (64, 192):
        variants[f"product {proj_rank}"] = product(params, proj_rank)
    return figures | interleave(variants, rounds)


def main() -> None:
    """Measure every dtype, print the ratios and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--reference", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    figures = {}
    for name, dtype, master in (
        ("fp32", torch.float32, True), ("bf16, fp32 master", torch.bfloat16, True), ("bf16", torch.bfloat16, False),
    ):  # fmt: skip
        times = figures[name] = measure(dtype, master=master, rounds=options.rounds, with_reference=options.reference)
        cpu = {key: each.summary()["cpu_s"]["min"] for key, each in times.items() if isinstance(each, Times)}
        floor = cpu["product 192"] + cpu["fused adamw"]
        print(
            f"{name}: fused adamw {cpu['fused adamw']:.4f} s  mini {cpu['mini']:.4f} s  "
            f"ratio {cpu['mini'] / cpu['fused adamw']:.2f}  "
            f"rank 192 {cpu['rank 192']:.4f} s  ratio to product + adamw {cpu['rank 192'] / floor:.2f}"
        )
    print(write_result("apollo_step", figures, seed=SEED))


if __name__ == "__main__":
    main()
