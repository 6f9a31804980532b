"""Claim: at 8,192 tokens, keeping attention's output is 1.12 times as fast in bf16 and 1.08 times in fp32 as plain
checkpointing, and with it on disk the ledger's peak is no higher.

Layers of SmolLM2-135M's sizes with drawn weights, attention packed and head in tiles, one microbatch forward and
backward; variants take turns in one process. `checkpoint` computes attention twice; `kept` keeps its output on the
device, which holds more; `disk` keeps it on disk beside the layers' inputs. Losses and gradients must agree bit for bit
before anything counts. Speed is the ratio of the medians.
"""

import argparse
import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from harness import Times, interleave, write_result
from planish.memory.allocator import fix_malloc_thresholds
from planish.memory.ledger import Ledger
from planish.methods import Boundary, Checkpoint, Offload, Plan
from planish.models.install import install

SEED = 0
BARS = {torch.bfloat16: 1.12, torch.float32: 1.08}


def draw(options: argparse.Namespace, dtype: torch.dtype) -> LlamaForCausalLM:
    """Return some of SmolLM2-135M's layers, with gradients to add to."""
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=options.vocab,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=options.layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=options.tokens,
        tie_word_embeddings=True,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).to(dtype).train()
    for each in model.parameters():
        each.grad = torch.zeros_like(each)
    return model


def step(model: LlamaForCausalLM, ids: torch.Tensor, boundary: Boundary) -> Callable[[], float]:
    """Return one microbatch as a function of nothing."""

    def run() -> float:
        installed = install(model, Plan(boundary=boundary), tokens=ids.numel())
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        installed.undo()
        return loss.item()

    return run


def check(model: LlamaForCausalLM, steps: dict[str, Callable[[], float]]) -> dict[str, int]:
    """Return the ledger's peak of each variant; they must agree in every bit."""
    peaks, found = {}, set()
    for name, run in steps.items():
        for each in model.parameters():
            each.grad.zero_()
        with Ledger() as ledger, ledger.watch(model):
            loss = run()
            peaks[name] = max(ledger.peak_bytes.values())
        found.add((loss.hex(), *(each.grad.double().sum().item().hex() for each in model.parameters())))
    assert len(found) == 1, "keeping attention changed a bit"
    return peaks


def compare(options: argparse.Namespace, dtype: torch.dtype) -> dict[str, object]:
    """Measure the variants in one dtype and return what they say of the claim."""
    model = draw(options, dtype)
    ids = torch.randint(0, options.vocab, (1, options.tokens), generator=torch.Generator().manual_seed(SEED))
    disk = Offload(disk=2**40, folder=options.folder, keep_attention=True)
    boundaries = {"checkpoint": Checkpoint(), "kept": Checkpoint(keep_attention=True), "disk": disk}
    steps = {name: step(model, ids, boundary) for name, boundary in boundaries.items()}
    peaks = check(model, steps)
    times: dict[str, Times] = interleave(steps, options.rounds)
    wall = {name: statistics.median(each.wall_s) for name, each in times.items()}
    cpu = {name: statistics.median(each.cpu_s) for name, each in times.items()}
    return {
        "times": times,
        "tokens_per_s": {name: round(options.tokens / seconds, 1) for name, seconds in wall.items()},
        "speed": {name: round(wall["checkpoint"] / seconds, 4) for name, seconds in wall.items()},
        "cpu_speed": {name: round(cpu["checkpoint"] / seconds, 4) for name, seconds in cpu.items()},
        "bar": BARS[dtype],
        "peak_bytes": peaks,
    }


def main() -> None:
    """Measure both dtypes, print them and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--dtypes", nargs="+", choices=["bfloat16", "float32"], default=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--dry", action="store_true", help="print and write nothing")
    options = parser.parse_args()
    fix_malloc_thresholds()
    torch.set_num_threads(options.threads)
    figures = {name: compare(options, getattr(torch, name)) for name in options.dtypes}
    for name, found in figures.items():
        print(name, json.dumps({key: each for key, each in found.items() if key != "times"}, indent=2))
    if not options.dry:
        figures |= {"tokens": options.tokens, "layers": options.layers}
        print(write_result("attention_recall", figures, seed=SEED))


if __name__ == "__main__":
    main()
