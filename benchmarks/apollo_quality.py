"""Claim: trained from scratch, APOLLO and APOLLO-Mini end at or below AdamW's held-out loss, Q-APOLLO-Mini near it.

A LLaMA-like model of 3.4M parameters on the built-in corpora (English, and the installed Python's own sources), one
epoch of tokens, fp32, rows of 256 tokens, 10 % warm-up, cosine to a tenth. Each method tries its learning rates on one
seed and runs two more seeds at the best; the table holds mean, least and largest held-out loss. The paper (60M
parameters on C4, perplexity): AdamW 34.06, GaLore 34.88, APOLLO 31.55, Mini 31.93. GaLore is here alone, for the bench.

Every run appends one line to `runs.jsonl` in `--out` when it is done, and one that is there is not run again, so that
the bench may be stopped and started at will. With all runs done it writes its result. `--share` trains on less.
"""

import argparse
import json
import math
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import planish.data
from harness import write_result
from planish.optim import Apollo, quantize_weights
from planish.peaks.optim.adamw import AdamW

TOKENS, ROWS, CONTEXT, VOCAB, WIDTH = 1_000_000, 16, 256, 2048, 192
HELD_OUT_ROWS, GAP, RANK, SEEDS = 192, 50, WIDTH // 4, 3
CLIP, BETAS = 1.0, (0.9, 0.999)


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """An optimizer and the learning rates that it tries."""

    make: Callable[[LlamaForCausalLM], torch.optim.Optimizer]
    rates: tuple[float, ...]


class GaLore(torch.optim.Optimizer):
    """AdamW on the gradient's projection to its leading singular vectors, projected back: W <- W - lr a P^T adam(P G).

    References:
        Zhao et al., GaLore (2024), algorithm 2, with a = 0.25.
    """

    def __init__(self, params: list[Tensor]) -> None:
        super().__init__(params, {"lr": 1e-3})

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter."""
        for group in self.param_groups:
            for param in group["params"]:
                left = param.shape[0] < param.shape[1]
                grad, state = param.grad if left else param.grad.t(), self.state[param]
                number = state["step"] = state.get("step", 0) + 1
                if number % GAP == 1:
                    state["basis"] = torch.linalg.svd(grad, full_matrices=False).U[:, :RANK].t().contiguous()
                small = state["basis"] @ grad
                first = state.setdefault("exp_avg", torch.zeros_like(small)).lerp_(small, 1 - BETAS[0])
                second = state.setdefault("exp_avg_sq", torch.zeros_like(small))
                second.lerp_(small.square(), 1 - BETAS[1])
                bias1, bias2 = (1 - beta**number for beta in BETAS)
                update = state["basis"].t() @ ((first / bias1) / ((second / bias2).sqrt() + 1e-8))
                param.add_(update if left else update.t(), alpha=-0.25 * group["lr"])


class Both(torch.optim.Optimizer):
    """GaLore for the layers' matrices, AdamW for the rest."""

    def __init__(self, galore: GaLore, rest: AdamW) -> None:
        super().__init__(
            [param for each in (galore, rest) for group in each.param_groups for param in group["params"]], {}
        )
        self.parts = (galore, rest)
        self.param_groups = [*galore.param_groups, *rest.param_groups]

    def step(self) -> None:
        """Update every parameter."""
        for each in self.parts:
            each.step()


def parameters(model: LlamaForCausalLM) -> tuple[list[Tensor], list[Tensor]]:
    """Return (the layers' matrices, the rest)."""
    named = dict(model.named_parameters())
    inside = [param for name, param in named.items() if ".layers." in name and param.ndim == 2]
    return inside, [param for name, param in named.items() if not (".layers." in name and param.ndim == 2)]


def adamw(model: LlamaForCausalLM) -> AdamW:
    """Return AdamW."""
    return AdamW(list(model.parameters()), betas=BETAS)


def apollo(**options: Any) -> Callable[[LlamaForCausalLM], Apollo]:
    """Return a maker of APOLLO for the layers' matrices, AdamW for the rest."""

    def make(model: LlamaForCausalLM) -> Apollo:
        inside, rest = parameters(model)
        return Apollo([{"params": inside, "update_gap": GAP, **options}, {"params": rest}], betas=BETAS)

    return make


def q_apollo_mini(model: LlamaForCausalLM) -> Apollo:
    """Return APOLLO-Mini over int8 weights."""
    quantize_weights([each for name, each in model.named_modules() if ".layers." in name and "proj" in name])
    return apollo(proj_rank=1, granularity="tensor")(model)


def galore(model: LlamaForCausalLM) -> Both:
    """Return GaLore."""
    inside, rest = parameters(model)
    return Both(GaLore(inside), AdamW(rest, betas=BETAS))


METHODS = {
    "adamw": Method(make=adamw, rates=(2e-3, 5e-3, 1e-2)),
    "apollo": Method(make=apollo(proj_rank=RANK), rates=(3e-3, 1e-2, 2e-2)),
    "apollo-mini": Method(make=apollo(proj_rank=1, granularity="tensor"), rates=(3e-3, 1e-2, 2e-2)),
    "q-apollo-mini": Method(make=q_apollo_mini, rates=(3e-3, 1e-2, 2e-2)),
    "galore": Method(make=galore, rates=(5e-3, 1e-2, 2e-2)),
}


def corpus() -> tuple[Tensor, Tensor]:
    """Return the rows to train on and those held out, int64 [rows, CONTEXT + 1]; one document in 20 is held out."""
    english = Path(planish.data.__path__[0], "english.txt").read_text(encoding="utf-8")
    size = len(english) // 100
    texts = [english[at : at + size] for at in range(0, len(english), size)]
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts += [path.read_text(encoding="utf-8", errors="replace") for path in sources]
    kept = [text for number, text in enumerate(texts) if number % 20 != 7]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(kept, trainer)

    def rows(some: list[str]) -> Tensor:
        ids = torch.tensor([token for each in tokenizer.encode_batch(some) for token in each.ids])
        return ids[: ids.numel() // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)

    return rows(kept), rows([text for number, text in enumerate(texts) if number % 20 == 7])


def draw(seed: int) -> LlamaForCausalLM:
    """Return the model with fresh weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=6,
        max_position_embeddings=CONTEXT,
    )
    return LlamaForCausalLM(config)


def train(method: Method, rate: float, seed: int, data: tuple[Tensor, Tensor], num_steps: int) -> dict[str, Any]:
    """Return what one run came to."""
    started, (rows, held_out) = time.process_time(), data
    model = draw(seed)
    optimizer = method.make(model)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    warmup, total = max(1, num_steps // 10), 0.0
    for number in range(num_steps):
        done = max(0.0, (number - warmup) / max(1, num_steps - warmup))
        lr = rate * min((number + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * done))
        for group in optimizer.param_groups:
            group["lr"] = lr
        at = torch.arange(number * ROWS, (number + 1) * ROWS) % len(rows)
        loss = mean_loss(model, rows[order[at]])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        model.zero_grad()
        total += loss.item() if number >= num_steps * 0.9 else 0.0
    with torch.no_grad():
        parts = [mean_loss(model, some).item() for some in held_out[:HELD_OUT_ROWS].split(ROWS) if len(some) == ROWS]
    return {
        "held_out_loss": sum(parts) / len(parts),
        "train_loss": total / (num_steps - math.ceil(num_steps * 0.9)),
        "cpu_s": round(time.process_time() - started, 1),
    }


def mean_loss(model: LlamaForCausalLM, rows: Tensor) -> Tensor:
    """Return the mean loss of the next token."""
    logits = model(input_ids=rows[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def wanted(done: dict[tuple[str, float, int], dict[str, Any]]) -> Iterator[tuple[str, float, int]]:
    """Yield the runs that are missing: every rate on the first seed, then the other seeds at the best rate."""
    for name, method in METHODS.items():
        yield from ((name, rate, 0) for rate in method.rates if (name, rate, 0) not in done)
    for name in METHODS:
        rate = best_rate(name, done)
        yield from ((name, rate, seed) for seed in range(1, SEEDS) if (name, rate, seed) not in done)


def best_rate(name: str, done: dict[tuple[str, float, int], dict[str, Any]]) -> float:
    """Return the rate of the lowest held-out loss on the first seed."""
    return min(METHODS[name].rates, key=lambda rate: done[name, rate, 0]["held_out_loss"])


def table(done: dict[tuple[str, float, int], dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of every method."""
    figures = {}
    for name, method in METHODS.items():
        rate = best_rate(name, done)
        losses = [done[name, rate, seed]["held_out_loss"] for seed in range(SEEDS)]
        figures[name] = {
            "rate": rate,
            "rate_is_at_an_end": rate in (method.rates[0], method.rates[-1]),
            "mean": sum(losses) / SEEDS,
            "min": min(losses),
            "max": max(losses),
            "perplexity": math.exp(sum(losses) / SEEDS),
            "sweep": {str(each): done[name, each, 0]["held_out_loss"] for each in method.rates},
        }
    return figures


def main() -> None:
    """Run what is missing, then write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of runs.jsonl")
    parser.add_argument("--share", type=float, default=1.0, help="share of the tokens; below 1 no result is written")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "runs.jsonl"
    num_steps = max(10, round(TOKENS * options.share / (ROWS * CONTEXT)))
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {(each["method"], each["rate"], each["seed"]): each for each in lines if each["steps"] == num_steps}
    data = corpus()
    print(f"{data[0].numel():,} tokens to train on, {len(data[1])} rows held out, {num_steps} steps", flush=True)
    while (run := next(wanted(done), None)) is not None:
        name, rate, seed = run
        found = {"method": name, "rate": rate, "seed": seed, "steps": num_steps}
        found |= train(METHODS[name], rate, seed, data, num_steps)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")
        done[run] = found
        print(found, flush=True)
    figures = table(done)
    for name, each in figures.items():
        print(f"{name:14} lr {each['rate']:g}  held out {each['mean']:.4f} ({each['min']:.4f} to {each['max']:.4f})")
    if options.share == 1.0:
        print(write_result("apollo_quality", {"steps": num_steps, "methods": figures}, seed=0))


if __name__ == "__main__":
    main()
