"""Claim: the blocked head runs at the speed of its matrix products and beats every CPU head that was measured.

Forward and backward of the mean loss, 10 % of the targets ignored, CPU seconds on one thread. The floor of a variant
is its own number of products over the valid tokens, into tensors that exist: at 2048 x 512 x 32768 gradients in
forward take at most 1.10 (float32) and 1.20 (bf16) times three of them, and at every size the strategy that "auto"
chooses takes at most 1.10 and 1.20 times its own. torch's chunked default takes twice (float32) and five times (bf16)
as long. With `--reference`, Apple's `cut_cross_entropy` (which has to be installed in the environment that runs this)
takes its turns by its compiled path, the only one that runs on a CPU. Full logits take theirs where they fit.
"""

import argparse
import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import LinearCrossEntropyOptions

from harness import Times, interleave, write_result
from planish.peaks.vocab.inputs import compute_dtype
from planish.peaks.vocab.losses import linear_cross_entropy
from planish.peaks.vocab.plain import plain_cross_entropy
from planish.price.vocab import Head, Tiling, choose_tiling

SIZES = {
    "2048x512x32768": (2048, 512, 32768),
    "8192x576x49152": (8192, 576, 49152),
    "4096x2304x256000": (4096, 2304, 256000),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TILE_BYTES = 60 * 2**20
"""With what is kept of each token and what the library holds inside one product, 64 MiB."""
FULL_LOGITS_BYTES = 2**32
SEED = 0

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operands:
    """A head with 10 % of its targets ignored, and room for its products."""

    hidden: Tensor
    weight: Tensor
    target: Tensor

    @classmethod
    def draw(cls, tokens: int, width: int, vocab: int, dtype: torch.dtype) -> "Operands":
        """Return operands whose logits have a spread of about 1."""
        generator = torch.Generator().manual_seed(SEED)
        hidden = torch.randn(tokens, width, generator=generator).to(dtype)
        weight = torch.randn(vocab, width, generator=generator).mul_(width**-0.5).to(dtype)
        target = torch.randint(0, vocab, (tokens,), generator=generator)
        target[torch.randperm(tokens, generator=generator)[: tokens // 10]] = -100
        return cls(hidden=hidden.requires_grad_(), weight=weight.requires_grad_(), target=target)

    def step(self, loss: Loss) -> Callable[[], object]:
        """Return one forward and backward of `loss`, its gradients left on the operands."""

        def run() -> None:
            self.hidden.grad = self.weight.grad = None
            loss(self.hidden, self.weight, self.target).backward()

        return run

    def tiling(self, strategy: str) -> Tiling:
        """Return the tiling that the head chooses."""
        dtypes = self.hidden.dtype, self.weight.dtype, compute_dtype(self.hidden, self.weight, logits_dtype="auto")
        hidden, weight, compute = (str(each).removeprefix("torch.") for each in dtypes)
        head = Head(
            tokens=len(self.hidden),
            hidden_size=self.hidden.shape[1],
            vocab_size=len(self.weight),
            hidden_dtype=hidden,
            weight_dtype=weight,
            compute_dtype=compute,
            wanted=frozenset({"lse"}),
        )
        return choose_tiling(head, tile_bytes=TILE_BYTES, strategy=strategy)

    def products(self) -> dict[str, Callable[[], object]]:
        """Return three and four products over the valid tokens: logits (once or twice) and both gradients.

        In the dtype in which the head multiplies: bf16 in float32 on a CPU without instructions for it.
        """
        compute = compute_dtype(self.hidden, self.weight, logits_dtype="auto")
        hidden = self.hidden.detach()[self.target != -100].to(compute)
        weight = self.weight.detach().to(compute)
        logits = torch.zeros(len(hidden), len(weight), dtype=weight.dtype)
        d_hidden, d_weight = torch.zeros_like(hidden), torch.zeros_like(weight)

        def run(count: int) -> None:
            for _ in range(count - 2):
                torch.mm(hidden, weight.t(), out=logits)
            torch.mm(logits, weight, out=d_hidden)
            torch.mm(logits.t(), hidden, out=d_weight)

        return {f"{count} products": functools.partial(run, count) for count in (3, 4)}


def ours(strategy: str) -> Loss:
    """Return the blocked head by `strategy`."""
    return lambda *operands: linear_cross_entropy(*operands, strategy=strategy, tile_bytes=TILE_BYTES)


def full_logits(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Return the loss of logits in the operands' dtype, as most training loops have it."""
    return F.cross_entropy(hidden @ weight.t(), target)


def transformers_logits(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Return the loss of logits raised to float32, as transformers has it."""
    return plain_cross_entropy(hidden, weight, target, reduction="mean")


def torch_chunks(options: LinearCrossEntropyOptions) -> Loss:
    """Return torch's own chunked head."""
    return lambda *operands: F.linear_cross_entropy(*operands, options=options)


def apple(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Return the loss by Apple's compiled path."""
    return importlib.import_module("cut_cross_entropy").linear_cross_entropy(
        hidden, weight, target, impl="torch_compile"
    )


class RowLoop(torch.autograd.Function):
    """The loop that everyone writes first: 256 rows at a time, gradients in forward."""

    @staticmethod
    def forward(ctx, hidden, weight, target):  # noqa: ANN001, ANN205, D102
        valid = target != -100
        d_hidden, d_weight = torch.zeros_like(hidden), torch.zeros(weight.shape)
        total = torch.zeros(())
        for rows in range(0, len(hidden), 256):
            chunk, classes, counts = (each[rows : rows + 256] for each in (hidden, target, valid))
            logits = (chunk @ weight.t()).float()
            total += F.cross_entropy(logits, classes, reduction="sum")
            grad = torch.softmax(logits, 1)
            grad[torch.arange(len(grad)), classes.clamp(min=0)] -= 1
            grad = (grad * (counts / valid.sum()).unsqueeze(1)).to(weight.dtype)
            d_hidden[rows : rows + 256] = grad @ weight
            d_weight += grad.t() @ chunk
        ctx.save_for_backward(d_hidden, d_weight.to(weight.dtype))
        return total / valid.sum()

    @staticmethod
    def backward(ctx, upstream):  # noqa: ANN001, ANN205, D102
        return *(each * upstream.to(each.dtype) for each in ctx.saved_tensors), None


def rivals(*, with_full_logits: bool, with_reference: bool) -> dict[str, Loss]:
    """Return what ours is compared with."""
    found: dict[str, Loss] = {
        "torch chunked default": torch_chunks(LinearCrossEntropyOptions()),
        "torch chunked, 256 rows": torch_chunks(
            LinearCrossEntropyOptions(acc_policy="compact", batch_chunk_size=256, chunking_method=None)
        ),
        "256-row loop": RowLoop.apply,
    }
    if with_full_logits:
        found |= {"full logits": full_logits, "full logits in float32": transformers_logits}
        found |= {"apple compiled": apple} if with_reference else {}
    return found


def measure(size: str, dtype: str, options: argparse.Namespace) -> dict[str, Times | str]:
    """Return the times of every variant at one size, and which strategy "auto" is."""
    tokens, width, vocab = SIZES[size]
    tokens = options.tokens or tokens
    operands = Operands.draw(tokens, width, vocab, DTYPES[dtype])
    variants = operands.products()
    variants |= {strategy: operands.step(ours(strategy)) for strategy in ("gradients-in-forward", "recompute")}
    variants |= {
        name: operands.step(loss)
        for name, loss in rivals(
            with_full_logits=tokens * vocab * 4 <= FULL_LOGITS_BYTES, with_reference=options.reference
        ).items()
    }
    wanted = {name: run for name, run in variants.items() if not options.only or name in options.only}
    chosen = operands.tiling("auto")
    return {"auto": f"{chosen.strategy}, {chosen.rows} rows", **interleave(wanted, options.rounds)}


def main() -> None:
    """Measure the sizes and dtypes asked for, print ratios and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, nargs="+", default=list(SIZES))
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=list(DTYPES))
    parser.add_argument("--tokens", type=int, help="fewer tokens than the size has, where time is short")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", help="names of variants; all of them if left out")
    parser.add_argument("--reference", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for size in options.size:
        figures = {}
        for dtype in options.dtype:
            found = figures[dtype] = measure(size, dtype, options)
            print(f"{size} {dtype}, auto is {found['auto']}")
            for name, times in found.items():
                if isinstance(times, Times):
                    print(f"  {name:26s} {min(times.cpu_s):8.3f} s", flush=True)
        name = f"{options.tokens or SIZES[size][0]}x{size.partition('x')[2]}"
        print(write_result(f"vocab_speed_{name}", figures, seed=SEED))


if __name__ == "__main__":
    main()
