"""Claim: packed ReLU networks take less memory than any way that runs nothing twice, at no more than 5 % more time.

Two parts. Stack: 8 residual networks with ReLU or ReLU^2 at 50 and 80 % zeros, in four ways: eager autograd,
a function that keeps a dense r alone, packed, and recomputation. Peak bytes of forward and backward are the ledger's,
above weights and gradients; outputs' and gradients' bits are compared before anything counts.

Fit: bytes per token of whole models, as the slope of the ledger's peak over two lengths on fake tensors, at the
densities that the published figures imply, 16 % for a small GPT and 36 % for Nemotron-H. The baseline is the
publication's: eager autograd, which keeps r and r^2. Nemotron-H is without its Mamba layers, whose plain torch form
keeps far more than the fused one that was published with; so its figure is of what remains, and not one to one.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, NanoChatConfig, NemotronHConfig, PretrainedConfig

from harness import interleave, write_result
from planish.kernels.bitmap import codec
from planish.memory.ledger import Ledger
from planish.methods import Activation, Bitmap, Packed, Plain, Plan
from planish.models.install import install
from planish.peaks.activation.bitmap import Projection, sparse_feed_forward
from planish.peaks.activation.formula import Formula
from planish.peaks.activation.keep import AssumedCodec, Keeper

SEED = 0
CPU = torch.device("cpu")


class DenseR(torch.autograd.Function):
    """The last projection of relu(z) or relu(z)^2 that keeps a dense r alone."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, weight: Tensor, squared: bool) -> Tensor:
        """Return D act(z)."""
        r = z.relu()
        ctx.squared = squared
        ctx.save_for_backward(r, weight)
        return F.linear(r.square() if squared else r, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of z and weight."""
        r, weight = ctx.saved_tensors
        h = r.square() if ctx.squared else r
        by_weight, by_h = grad.t() @ h, grad @ weight
        del h
        if ctx.squared:
            by_h.mul_(2 * r)
        return torch.ops.aten.threshold_backward(by_h, r, 0), by_weight, None


class Stack(nn.Module):
    """Residual networks x + D act(W x + b), the bias moving the share of zeros."""

    def __init__(
        self, layers: int, hidden: int, width: int, dtype: torch.dtype, *, squared: bool, shift: float
    ) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.squared = squared
        self.inner = nn.ModuleList(nn.Linear(hidden, width, dtype=dtype) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(width, hidden, bias=False, dtype=dtype) for _ in range(layers))
        self.keepers = [Keeper(codec(CPU)) for _ in range(layers)]
        for each in self.inner:
            nn.init.normal_(each.weight, std=hidden**-0.5)
            nn.init.constant_(each.bias, shift)

    def run(self, x: Tensor, way: str) -> Tensor:
        """Return the output by one of `WAYS`."""
        for inner, down, keeper in zip(self.inner, self.down, self.keepers, strict=True):
            x = x + self._network(F.rms_norm(x, x.shape[-1:]), inner, down, keeper, way)
        return x

    def _network(self, x: Tensor, inner: nn.Linear, down: nn.Linear, keeper: Keeper, way: str) -> Tensor:
        def eager(x: Tensor) -> Tensor:
            r = inner(x).relu()
            return down(r.square() if self.squared else r)

        match way:
            case "eager":
                return eager(x)
            case "dense r":
                return DenseR.apply(inner(x), down.weight, self.squared)
            case "recompute":
                return checkpoint(eager, x, use_reentrant=False, preserve_rng_state=False)
            case _:
                formula = Formula(squared=self.squared)
                parts = {"inner": Projection.of(inner), "down": Projection.of(down)}
                return sparse_feed_forward(x, formula, **parts, keeper=keeper, tile_bytes=2**40)


WAYS = ("eager", "dense r", "packed", "recompute")


def step(stack: Stack, x: Tensor, way: str) -> list[Tensor]:
    """Run forward and backward; return the output and all gradients."""
    y = stack.run(x, way)
    y.backward(torch.ones_like(y))
    found = [y.detach(), *(each.grad for each in stack.parameters())]
    stack.zero_grad(set_to_none=True)
    return found


def peak_bytes(work: Callable[[], object], given: list[Tensor]) -> int:
    """Return the most that `work` holds above what it is given."""
    with Ledger() as ledger:
        ledger.adopt(given, "other")
        before = ledger.live_bytes
        with ledger.phase("forward"):
            work()
    return ledger.peak_bytes["forward"] - before


def stack_case(options: argparse.Namespace, *, squared: bool, zeros: float) -> dict[str, Any]:
    """Return bytes and times of one stack in every way."""
    shift = float(torch.distributions.Normal(0, 1).icdf(torch.tensor(1 - zeros)))
    dtype = getattr(torch, options.dtype)
    stack = Stack(options.layers, options.hidden, options.width, dtype, squared=squared, shift=shift)
    x = torch.randn(options.tokens, options.hidden, generator=torch.Generator().manual_seed(SEED)).to(dtype)
    given = [x, *stack.parameters()]
    bits = [step(stack, x, way) for way in WAYS]
    same = [all(torch.equal(a, b) for a, b in zip(bits[0], each, strict=True)) for each in bits]
    del bits
    assert same[WAYS.index("packed")], "packing changed a bit"
    peaks = {way: peak_bytes(lambda way=way: step(stack, x, way), given) for way in WAYS}
    times = interleave({way: lambda way=way: step(stack, x, way) for way in WAYS}, options.rounds)
    least = {way: min(each.cpu_s) for way, each in times.items()}
    density = sum(each.last.density for each in stack.keepers) / len(stack.keepers)
    return {
        "density": round(density, 4),
        "peak_bytes": peaks,
        "peak against eager": {way: round(each / peaks["eager"] - 1, 4) for way, each in peaks.items()},
        "cpu_s against eager": {way: round(each / least["eager"], 4) for way, each in least.items()},
        "times": times,
    }


def fit_case(config: PretrainedConfig, density: float, method: Activation) -> float:
    """Return the bytes a token of a whole model's forward and backward without its head, on fake tensors."""
    lengths, peaks = (32768, 65536), []
    for tokens in lengths:
        with FakeTensorMode(), Ledger() as ledger:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
            plan = replace(Plan.plain(), attention=Packed(), activation=method)
            for keeper in install(model, plan, tokens=tokens, dry=True).keepers.values():
                keeper.codec, keeper.arena = AssumedCodec(density), None
            ids = torch.zeros(1, tokens, dtype=torch.int64)
            with ledger.phase("forward"):
                bounds = {"cu_seq_lens_q": (0, tokens)}
                y = model.get_decoder()(input_ids=ids, use_cache=False, **bounds).last_hidden_state
            with ledger.phase("backward"):
                y.backward(torch.ones_like(y))
        peaks.append(max(ledger.peak_bytes.values()))
    return (peaks[1] - peaks[0]) / (lengths[1] - lengths[0])


def fit(name: str, config: PretrainedConfig, density: float, published: float) -> dict[str, Any]:
    """Return a model's bytes a token, eager and packed, beside the published difference to the same baseline."""
    eager = fit_case(config, density, Plain())
    packed = fit_case(config, density, Bitmap(tile_bytes=2**26))
    figures = {
        "model": name,
        "density": density,
        "eager keeps": "r and r^2, as transformers' own layers do",
        "bytes per token": {"eager": round(eager), "packed": round(packed)},
        "against eager": round(packed / eager - 1, 4),
        "published": published,
    }
    print(name, json.dumps(figures, indent=1))
    return figures


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--width", type=int, default=4032)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    figures: dict[str, Any] = {"tokens": options.tokens, "dtype": options.dtype}
    for squared in (False, True):
        for zeros in (0.5, 0.8):
            name = f"{'relu^2' if squared else 'relu'}, {zeros:.0%} zeros"
            figures[name] = stack_case(options, squared=squared, zeros=zeros)
            print(name, json.dumps({key: each for key, each in figures[name].items() if key != "times"}, indent=1))
    gpt = NanoChatConfig(
        vocab_size=50304,
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=12,
    )
    figures["fit nano-gpt"] = fit("12 layers, 768 x 3,072", gpt, 0.16, -0.31)
    hybrid = NemotronHConfig(
        hidden_size=4096,
        intermediate_size=21504,
        num_attention_heads=32,
        num_key_value_heads=8,
        layers_block_type=["attention", "mlp", "mlp", "mlp", "mlp", "mlp", "mlp"] * 4,
    )
    figures["fit nemotron-h"] = fit("4 attention and 24 relu^2 layers, no Mamba, 4,096 x 21,504", hybrid, 0.36, -0.30)
    print(write_result("bitsparse_ffn", figures, seed=SEED))


if __name__ == "__main__":
    main()
