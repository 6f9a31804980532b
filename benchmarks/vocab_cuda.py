"""Question: what do time and memory of the head come to on a GPU, exactly, beside the paper's?

The paper's shape: 8,192 tokens, 256,000 classes, width 2,304, bf16 (Gemma 2 2B); Apple's CCE takes 1,164 MiB and 145 ms
there on an A100, gradients included, with small derivatives left out. Forward and backward of the mean loss on one GPU:
ours with its kernels and without them, ours with gradients in forward, and full logits where they fit. It ends at once
where there is no GPU.
"""

import argparse
import statistics
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from harness import write_result
from planish.peaks.vocab import tiles
from planish.peaks.vocab.losses import linear_cross_entropy
from planish.peaks.vocab.plain import plain_cross_entropy

TOKENS, CLASSES, WIDTH = 8192, 256_000, 2304
SEED = 0
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def ours(strategy: str, tile_bytes: int, *, kernels: bool = True) -> Loss:
    """Return the head by one strategy, with Triton's kernels or with torch's operations alone."""

    def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        chosen = tiles.head_kernels
        tiles.head_kernels = chosen if kernels else lambda _: None
        try:
            return linear_cross_entropy(hidden, weight, target, strategy=strategy, tile_bytes=tile_bytes)
        finally:
            tiles.head_kernels = chosen

    return loss


def measure(loss: Loss, operands: tuple[Tensor, Tensor, Tensor], rounds: int) -> dict[str, object]:
    """Return the milliseconds of forward and backward, and the bytes beyond the operands at the most."""
    hidden, weight, target = operands
    times = []
    for number in range(rounds + 2):
        hidden.grad = weight.grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        loss(hidden, weight, target).backward()
        end.record()
        torch.cuda.synchronize()
        if number >= 2:
            times.append(start.elapsed_time(end))
    peak = torch.cuda.max_memory_allocated() - before
    return {
        "ms": {"n": rounds, "min": min(times), "median": statistics.median(times), "max": max(times)},
        "bytes": peak,
    }


def main() -> None:
    """Measure every variant and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--tile-mib", type=int, nargs="+", default=[64, 512])
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this bench needs a CUDA device, and there is none")
    generator = torch.Generator("cuda").manual_seed(SEED)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    hidden = normal(options.tokens, WIDTH).requires_grad_()
    weight = normal(CLASSES, WIDTH).mul_(WIDTH**-0.5).requires_grad_()
    target = torch.randint(CLASSES, (options.tokens,), generator=generator, device="cuda")
    variants: dict[str, Loss] = {}
    for mib in options.tile_mib:
        variants[f"recompute, kernels, {mib} MiB"] = ours("recompute", mib * 2**20)
        variants[f"recompute, torch, {mib} MiB"] = ours("recompute", mib * 2**20, kernels=False)
        variants[f"gradients in forward, {mib} MiB"] = ours("gradients-in-forward", mib * 2**20)
    variants["full logits"] = lambda *operands: plain_cross_entropy(*operands, reduction="mean")
    floor = 2 * WIDTH * (options.tokens + CLASSES)  # both gradients
    figures: dict[str, object] = {"device": torch.cuda.get_device_name(), "floor_bytes": floor}
    for name, loss in variants.items():
        found = figures[name] = measure(loss, (hidden, weight, target), options.rounds)
        print(f"{name:32s} {found['ms']['median']:8.1f} ms {found['bytes'] / 2**20:10.0f} MiB", flush=True)
    print(write_result("vocab_cuda", figures, seed=SEED))


if __name__ == "__main__":
    main()
