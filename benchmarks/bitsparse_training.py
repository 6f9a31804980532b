"""Claim: a ReLU^2 model trains to the same bits with its activations packed, in less memory and about the same time.

The comparison that the publication lacks: whole training, AdamW with its state included, plain and packed from the same
drawn weights, the same text in the same order and the same random state. Every network passes its tokens in one tile,
so that not even an order of summation differs. Each variant has a process of its own; losses and gradient norms of all
steps are compared as hexadecimal numbers before anything counts. Nothing is checkpointed: activations of all layers
wait for backward.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import planish
from harness import spread, write_result
from planish.memory.allocator import fix_malloc_thresholds
from planish.memory.ledger import Ledger
from planish.memory.meter import ProcessMeter
from planish.methods import Bitmap, Plain, Plan
from planish.runfile import DataSection, ModelSection, RunFile, TrainSection
from planish.train.job import build
from planish.train.loop import train_step

SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one process found.

    Attributes:
        loss: Of each step, in hexadecimal.
        grad_norm: Of each step, in hexadecimal.
        peak_bytes: Of tensors, with optimizer state, in the worst step.
        categories: Of that peak.
        vm_hwm_bytes: Of the process, above what it held before the first tensor.
        step_s: Of each step.
        densities: Of all activations together, every tenth step.
        layers: Density of each layer in the last step.
    """

    loss: list[str]
    grad_norm: list[str]
    peak_bytes: int
    categories: dict[str, int]
    vm_hwm_bytes: int
    step_s: list[float]
    densities: list[float]
    layers: list[float]


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a byte-level tokenizer of the built-in English: with a small vocabulary activations show in the total."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = (Path(planish.__file__).parent / "data" / "english.txt").read_text(encoding="utf-8")
    tokenizer.train_from_iterator([text[:200_000]], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(folder)


def run_file(options: argparse.Namespace, config: Path) -> RunFile:
    """Return the run of one variant."""
    write_tokenizer(config.parent, options.vocab)
    activation = Bitmap(tile_bytes=2**40) if options.variant == "packed" else Plain()
    sizes = {
        "model_type": "nanochat",
        "vocab_size": options.vocab,
        "hidden_size": options.hidden,
        "intermediate_size": 4 * options.hidden,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.hidden // 64,
        "num_key_value_heads": options.hidden // 64,
        "max_position_embeddings": options.context,
        "tie_word_embeddings": True,
    }
    config.write_text(json.dumps(sizes))
    return RunFile(
        model=ModelSection(config=config, dtype=options.dtype),
        data=DataSection(train=("builtin:english",), context=options.context),
        train=TrainSection(steps=options.steps, lr=1e-3, warmup=min(10, options.steps), seed=SEED),
        plan=replace(Plan(), boundary=Plain(), activation=activation),
    )


def run(options: argparse.Namespace) -> Measured:
    """Train one variant in this process."""
    fix_malloc_thresholds()
    torch.set_num_threads(options.threads)
    torch.ones(64, 64).matmul(torch.ones(64, 64))
    meter, reports, densities, layers = ProcessMeter(), [], [], []
    with tempfile.TemporaryDirectory() as name, ExitStack() as scope:
        ledger = scope.enter_context(Ledger())
        job = build(run_file(options, Path(name) / "config.json"), ledger, scope)
        for step in range(1, options.steps + 1):
            reports.append(train_step(job, step))
            layers = [each.last.density for each in job.engine.keepers.values()]
            if layers and (step % 10 == 1 or step == options.steps):
                densities.append(sum(layers) / len(layers))
    worst = max((each.memory for each in reports), key=lambda memory: memory.peak_bytes)
    return Measured(
        loss=[each.loss.hex() for each in reports],
        grad_norm=[each.grad_norm.hex() for each in reports],
        peak_bytes=worst.peak_bytes,
        categories=dict(worst.phases[worst.peak_phase].categories),
        vm_hwm_bytes=meter.read().resident_peak_bytes - meter.baseline_bytes,
        step_s=[each.step_s for each in reports],
        densities=densities,
        layers=layers,
    )


def elsewhere(variant: str) -> Measured:
    """Return what a fresh process measures with the same options."""
    command = [sys.executable, __file__, *sys.argv[1:], "--variant", variant]
    shown = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return Measured(**json.loads(shown.splitlines()[-1]))


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Train both variants and return what they say of the claim."""
    plain, packed = (elsewhere(variant) for variant in ("plain", "packed"))
    assert plain.loss == packed.loss, "packing changed a loss"
    assert plain.grad_norm == packed.grad_norm, "packing changed a gradient"
    after = slice(1, None) if options.steps > 1 else slice(None)
    times = {name: spread(tuple(each.step_s[after])) for name, each in (("plain", plain), ("packed", packed))}
    return {
        "steps": options.steps,
        "context": options.context,
        "dtype": options.dtype,
        "same bits": {"losses": len(plain.loss), "gradient norms": len(plain.grad_norm)},
        "loss": {"first": float.fromhex(plain.loss[0]), "last": float.fromhex(plain.loss[-1])},
        "peak_bytes": {"plain": plain.peak_bytes, "packed": packed.peak_bytes},
        "peak against plain": round(packed.peak_bytes / plain.peak_bytes - 1, 4),
        "categories": {"plain": plain.categories, "packed": packed.categories},
        "vm_hwm_bytes": {"plain": plain.vm_hwm_bytes, "packed": packed.vm_hwm_bytes},
        "step_s": times,
        "step_s against plain": round(times["packed"]["median"] / times["plain"]["median"], 4),
        "density every tenth step": [round(each, 4) for each in packed.densities],
        "density by layer at the end": [round(each, 4) for each in packed.layers],
    }


def main() -> None:
    """Measure, print and write the result; with `--variant` train one variant here and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--dtype", choices=["bf16", "bf16-pure", "fp32"], default="fp32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--variant", choices=["plain", "packed"])
    options = parser.parse_args()
    if options.variant:
        print(json.dumps(asdict(run(options))))
        return
    figures = compare(options)
    print(json.dumps(figures, indent=2))
    print(write_result("bitsparse_training", figures, seed=SEED))


if __name__ == "__main__":
    main()
