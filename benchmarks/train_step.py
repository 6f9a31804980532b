"""Claim: planish's step of SmolLM2-135M is never slower than transformers' at 4,096 tokens, and holds half at 8,192.

One optimizer step on one row of the built-in English text, from the same weights, at the same precision: weights in
fp32, or in bf16 without a master copy. The rival is plain transformers with activation checkpointing, SDPA and fused
AdamW. Every variant has a process of its own, in turns, odd rounds backwards; its first step warms up and is not
counted. Losses must agree before anything counts. VmHWM is what the process held at most beyond what it held before its
first tensor; `planish, budget` is `planish train` under a budget, where freed blocks go back to the system.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoModelForCausalLM

from harness import Times, spread, write_result
from planish.memory.allocator import ask_for_large_pages, fix_malloc_thresholds
from planish.memory.ledger import Ledger
from planish.memory.meter import ProcessMeter
from planish.models.builtin import model_folder
from planish.models.load import load_tokenizer
from planish.runfile import RunFile
from planish.sections import DataSection, ModelSection, SaveSection, TrainSection
from planish.train.job import build, open_run_feed
from planish.train.loop import train_step

SEED = 0
LR = 1e-4
VARIANTS = ("transformers", "planish", "planish, budget")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one process found, a figure per counted step.

    Attributes:
        wall_s: On the clock.
        cpu_s: Of all threads.
        losses: Mean loss of each step, the first included.
        peak_bytes: VmHWM above the resident bytes before the first tensor.
    """

    wall_s: list[float]
    cpu_s: list[float]
    losses: list[float]
    peak_bytes: int


def run_of(tokens: int, dtype: str, folder: Path) -> RunFile:
    """Return the run that both variants take their data, weights and settings from."""
    return RunFile(
        model=ModelSection(from_="smollm2-135m", dtype=dtype),
        data=DataSection(train=("builtin:english",), context=tokens, seed=SEED),
        train=TrainSection(steps=9, lr=LR, schedule="constant", clip=0.0),
        save=SaveSection(dir=folder),
    )


def measure(variant: str, run: RunFile, steps: int) -> Measured:
    """Take one step to warm up and `steps` that count, in this process."""
    if variant != "transformers":
        ask_for_large_pages()
    if variant == "planish, budget":
        fix_malloc_thresholds()
    meter = ProcessMeter(torch.device("cpu"))
    with ExitStack() as scope:
        step = _transformers(run) if variant == "transformers" else _planish(run, scope)
        wall, cpu, losses = [], [], []
        for _ in range(1 + steps):
            before = time.perf_counter(), time.process_time()
            losses.append(step())
            wall.append(time.perf_counter() - before[0])
            cpu.append(time.process_time() - before[1])
        reading = meter.read()
    peak_bytes = reading.resident_peak_bytes - meter.baseline_bytes
    return Measured(wall_s=wall[1:], cpu_s=cpu[1:], losses=losses, peak_bytes=peak_bytes)


def _planish(run: RunFile, scope: ExitStack) -> Callable[[], float]:
    job = build(run, scope.enter_context(Ledger()), scope)
    number = iter(range(1, run.train.steps + 1))
    return lambda: train_step(job, next(number)).loss


def _transformers(run: RunFile) -> Callable[[], float]:
    dtype = torch.float32 if run.model.dtype == "fp32" else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(model_folder("smollm2-135m"), dtype=dtype).train()
    model.activation_checkpointing_enable()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=run.train.betas, eps=run.train.eps, weight_decay=0.0, fused=True
    )
    feed = open_run_feed(run, load_tokenizer(run.model), rows=1)

    def step() -> float:
        batch = feed.next()
        outputs = model(input_ids=batch.input_ids, shift_labels=batch.target, labels=batch.target, use_cache=False)
        outputs.loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return outputs.loss.item()

    return step


def in_process(variant: str, tokens: int, dtype: str, steps: int) -> Measured:
    """Return what a fresh process measures."""
    words = ["--variant", variant, "--tokens", str(tokens), "--dtype", dtype, "--steps", str(steps)]
    done = subprocess.run([sys.executable, __file__, *words], capture_output=True, text=True, check=True)
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def compare(tokens: int, dtype: str, rounds: int, steps: int) -> dict[str, object]:
    """Return both variants' figures and their ratios."""
    found: dict[str, list[Measured]] = {variant: [] for variant in VARIANTS}
    for number in range(rounds):
        for variant in reversed(VARIANTS) if number % 2 else VARIANTS:
            found[variant].append(in_process(variant, tokens, dtype, steps))
    first = [found[variant][0].losses[0] for variant in VARIANTS]
    if max(first) - min(first) > 1e-2:
        raise SystemExit(f"the first losses differ, {first}: nothing counts.")
    figures: dict[str, object] = {"first_losses": dict(zip(VARIANTS, first, strict=True))}
    times = {
        variant: Times(
            wall_s=tuple(each for one in found[variant] for each in one.wall_s),
            cpu_s=tuple(each for one in found[variant] for each in one.cpu_s),
        )
        for variant in VARIANTS
    }
    peaks = {variant: spread(tuple(float(one.peak_bytes) for one in found[variant])) for variant in VARIANTS}
    ratios = {
        variant: {
            "wall": _ratio(times[variant].wall_s, times["transformers"].wall_s),
            "cpu": _ratio(times[variant].cpu_s, times["transformers"].cpu_s),
            "vm_hwm": peaks[variant]["median"] / peaks["transformers"]["median"],
        }
        for variant in VARIANTS[1:]
    }
    print(f"{tokens} tokens, {dtype}, over transformers: {ratios}", flush=True)
    return figures | {"times": times, "vm_hwm_bytes": peaks, "over_transformers": ratios}


def _ratio(ours: tuple[float, ...], theirs: tuple[float, ...]) -> float:
    return spread(ours)["median"] / spread(theirs)["median"]


def main() -> None:
    """Run every case, or one variant of one case for the process that asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 8192])
    parser.add_argument("--dtype", nargs="+", default=["fp32", "bf16-pure"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.variant:
        with TemporaryDirectory() as folder:
            run = run_of(options.tokens[0], options.dtype[0], Path(folder))
            print(json.dumps(asdict(measure(options.variant, run, options.steps))))
        return
    for dtype in options.dtype:
        figures = {
            f"{tokens} tokens": compare(tokens, dtype, options.rounds, options.steps) for tokens in options.tokens
        }
        write_result(f"train_step_{dtype.replace('-', '_')}", figures, seed=SEED)


if __name__ == "__main__":
    main()
