"""Claim: all methods over four ranks cost few more CPU seconds than one rank's step, and each rank holds its price.

Four gloo processes on this machine's cores, each bound to one thread, train a mixture of experts by every method at
once: weights sharded by four (FSDP2), rows by two, experts by four, the vocabulary by two, boundaries and optimizer
state on the disk. One process trains it on the same global tokens by the same methods without ranks. Measured: CPU
seconds of a step, all ranks and threads together, the least of the steps after the first two; the most bytes that any
rank's ledger saw, and what the dry run had said.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from harness import ROOT, spread, write_result
from planish.comm.world import ALONE, World, join, launched_size
from planish.data.batch import Batch
from planish.memory.ledger import Ledger
from planish.runfile import RunFile, load
from planish.train.engine import build_engine
from planish.train.facts import MeasuredFacts
from planish.train.job import Job, span_of
from planish.train.loop import train_step
from planish.train.optimizer import build_optimizer
from planish.train.predict import by_dry_run

SEED = 0
SIZES = {
    "hidden_size": 384,
    "intermediate_size": 1024,
    "moe_intermediate_size": 384,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 16384,
}
RANKS = {"mesh.dp": 4, "mesh.cp": 2, "mesh.ep": 4, "mesh.vp": 2, "plan.vocab.method": "ring"}


class Drawn:
    """Endless batches of random tokens, this rank's part of them; each row is three documents."""

    def __init__(self, run: RunFile, world: World) -> None:
        self._run, self._world = run, world
        self._generator = torch.Generator().manual_seed(SEED)

    def next(self) -> Batch:
        """Return the next batch."""
        (reader, readers), rows, context = self._world.reader, self._run.rows_per_microbatch, self._run.data.context
        ids = torch.randint(1, SIZES["vocab_size"], (rows * readers, context), generator=self._generator)
        ids = ids[reader * rows : (reader + 1) * rows]
        cuts = (0, context // 5, context // 2)
        position = torch.cat(
            [torch.arange(stop - start) for start, stop in zip(cuts, (*cuts[1:], context), strict=True)]
        )
        batch = Batch(
            input_ids=ids,
            target=ids.roll(-1, 1),
            position_ids=position.expand(rows, -1).contiguous(),
            cu_seq_lens=(*(row * context + cut for row in range(rows) for cut in cuts), rows * context),
            num_valid=ids.numel(),
        )
        return span_of(batch, self._world.place)


def settings(folder: Path, options: argparse.Namespace, *, ranks: bool) -> RunFile:
    """Return the run over four ranks, or of one."""
    tree: dict[str, Any] = {
        "model.config": str(folder / "config.json"),
        "model.tokenizer": "none",
        "model.dtype": "fp32",
        "data.train": ["builtin:english"],
        "data.context": options.context,
        "train.global_tokens": options.context * options.rows,
        "train.steps": options.steps,
        "plan.dispatch.method": "pipelined",
        "plan.boundary.method": "offload",
        "plan.boundary.disk": "1GiB",
        "plan.boundary.folder": str(folder),
        "plan.optim.method": "stream-adamw",
        "plan.optim.disk": "2GiB",
        "plan.optim.folder": str(folder),
        **(RANKS if ranks else {}),
    }
    return load(None, list(tree.items()))


def work(run: RunFile, world: World) -> dict[str, Any]:
    """Train, and return each step's CPU and wall seconds, its loss, and the most bytes that were held."""
    torch.manual_seed(SEED)
    with ExitStack() as scope:
        ledger = scope.enter_context(Ledger())
        config = Qwen3MoeConfig.from_pretrained(run.model.config.parent)
        engine = build_engine(
            lambda: AutoModelForCausalLM.from_config(config, dtype=torch.float32),
            run.plan,
            tokens=run.tokens_per_microbatch,
            ledger=ledger,
            facts=MeasuredFacts(),
            scope=scope,
            world=world,
        )
        optimizer = build_optimizer(engine, run, scope)
        job = Job(
            run=run, tokenizer=None, engine=engine, optimizer=optimizer, feed=Drawn(run, world), eval_batches=list
        )
        found: dict[str, Any] = {"cpu_s": [], "wall_s": [], "loss": [], "peak_bytes": 0}
        for step in range(1, run.train.steps + 1):
            world.barrier()
            cpu, wall = time.process_time(), time.perf_counter()
            report = train_step(job, step)
            found["cpu_s"].append(time.process_time() - cpu)
            found["wall_s"].append(time.perf_counter() - wall)
            found["loss"].append(report.loss)
            if step > 2:
                found["peak_bytes"] = max(found["peak_bytes"], report.memory.peak_bytes)
    return found


def launch(folder: Path, words: list[str], *, ranks: int) -> list[dict[str, Any]]:
    """Return what each of `ranks` processes has found."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    subprocess.run([*command, str(Path(__file__).resolve()), *words, "--inside", str(folder)], check=True, cwd=ROOT)
    return [json.loads((folder / f"{ranks}-{rank}.json").read_text()) for rank in range(ranks)]


def inside(folder: Path, options: argparse.Namespace) -> None:
    """Be one rank."""
    torch.set_num_threads(1)
    size = launched_size()
    run = settings(folder, options, ranks=size > 1)
    if size == 1:
        rank, found = 0, work(run, ALONE)
    else:
        with join(run.mesh, device_type="cpu") as world:
            rank, found = world.rank, work(run, world)
    (folder / f"{size}-{rank}.json").write_text(json.dumps(found))


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one rank and of four."""
    words = [f"--{name}={getattr(options, name)}" for name in ("context", "rows", "steps")]
    figures: dict[str, Any] = {}
    for name, ranks in (("one rank", 1), ("four ranks", 4)):
        answers = launch(folder, words, ranks=ranks)
        run = settings(folder, options, ranks=ranks > 1)
        steps = [sum(each) for each in zip(*(answer["cpu_s"] for answer in answers), strict=True)][2:]
        slowest = [max(each) for each in zip(*(answer["wall_s"] for answer in answers), strict=True)][2:]
        figures[name] = {
            "cpu_s": spread(tuple(steps)),
            "wall_s": spread(tuple(slowest)),
            "peak_bytes": max(answer["peak_bytes"] for answer in answers),
            "loss": answers[0]["loss"][-1],
            "priced_bytes": priced(run),
        }
    one, four = figures.values()
    figures["ratio of CPU seconds"] = four["cpu_s"]["min"] / one["cpu_s"]["min"]
    figures["peak over price"] = {
        name: figures[name]["peak_bytes"] / figures[name]["priced_bytes"] for name in list(figures)[:2]
    }
    return figures


def priced(run: RunFile) -> int:
    """Return the most that training will hold, as the dry run says; dealing out the weights comes before it."""
    phases = by_dry_run(replace(run, data=replace(run.data, eval=()))).phases
    return max(phases[phase].peak_bytes for phase in ("forward", "head", "backward", "optimizer"))


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=4, help="rows of a step over all ranks")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--dry", action="store_true", help="show the figures, write no result")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside is not None:
        inside(options.inside, options)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        Qwen3MoeConfig(**SIZES).save_pretrained(folder)
        figures = measure(folder, options)
    print(json.dumps(figures, indent=2))
    if not options.dry:
        shape = {"model": SIZES, "context": options.context, "rows": options.rows}
        print(write_result("compose", {**shape, **figures}, seed=SEED))


if __name__ == "__main__":
    main()
