"""Claim: with embedding and head shared, the ranks of a pipeline hold and compute alike, whatever the microbatches.

A model of eight layers whose head costs five, on four ranks of one thread each: CPU seconds of each rank in a step
(the least of several), and the most bytes alive on it (weights, gradients and all that a step makes, by the ledger),
for Vocab-2 on 1F1B, and Vocab-1 and Vocab-2 on V-Half, beside torch's own 1F1B with embedding and head on its ends,
layers even or moved off the last stage. Then the bytes that a step makes for m, 2m and 4m microbatches, beside torch's
Interleaved1F1B.
"""

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.utils.checkpoint import checkpoint

from harness import write_result
from planish.memory.ledger import Ledger
from planish.methods import Pipeline
from planish.peaks.vocab.inputs import Options
from planish.peaks.vocab.shard import Shard, ShardedHead, shard_ranges
from planish.pipeline.layers import redistribute
from planish.pipeline.run.flow import Flow
from planish.pipeline.run.pace import Pace
from planish.pipeline.run.runner import Parts, PipelineRun, StageLayers
from planish.pipeline.workload import Workload

RANKS, LAYERS, D, ROWS, S = 4, 8, 256, 2, 256
V = 5 * 9 * D  # a layer has 9 D^2 weights
SEED = 0


class Microbatch(NamedTuple):
    """Ids and targets [ROWS, S], all counted."""

    input_ids: Tensor
    target: Tensor
    num_valid: int


class Layer(nn.Module):
    """Mixes each token with those before it, then a network four times as wide."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.mix, self.up, self.down = nn.Linear(D, D), nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        """Return hidden states behind the layer."""
        y = torch.cumsum(self.mix(self.norm(x)), 1) / x.shape[1]
        return x + self.down(nn.functional.gelu(self.up(y)))


class Stage(nn.Module):
    """Checkpointed layers, with the embedding before or the head behind them on torch's end stages."""

    def __init__(self, layers: int, *, first: bool = False, last: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, D) if first else None
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(D, V, bias=False) if last else None

    def forward(self, x: Tensor, _batch: object = None) -> Tensor:
        """Return hidden states, or logits."""
        x = x if self.embedding is None else self.embedding(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if torch.is_grad_enabled() else layer(x)
        return x if self.head is None else self.head(x)


def batches(size: int) -> list[Microbatch]:
    """Return microbatches that are the same on every rank."""
    torch.manual_seed(SEED)
    ids, target = torch.randint(0, V, (2, ROWS, S))
    return [Microbatch(ids, target, ROWS * S)] * size


def ours(rank: int, vocabulary: dist.ProcessGroup, method: str, head: str) -> tuple[list[Tensor], Callable[[int], Any]]:
    """Return parameters, and (microbatches) -> a step."""
    pace = Pace(
        Pipeline(method=method, head=head), Workload(layers=LAYERS, microbatches=1, layer_backward=3, head=5), RANKS
    )
    mine = [stage for stage, where in enumerate(pace.schedule(1).stage_ranks) if where == rank]
    stages = [Stage(pace.layers[stage]) for stage in mine]
    rows = shard_ranges(V, RANKS)[rank]
    embedding, weight = (nn.Parameter(0.02 * torch.randn(rows.stop - rows.start, D)) for _ in range(2))
    parts = Parts(
        stages=[StageLayers(forward=stage, modules=list(stage.layers)) for stage in stages],
        embedding=Shard(weight=embedding, start=rows.start, vocab_size=V),
        head=ShardedHead(
            shard=Shard(weight=weight, start=rows.start, vocab_size=V),
            options=Options(ignore_index=-100, tile_bytes=2**20),
        ),
    )
    flow = Flow(width=D, dtype=torch.float32, device=torch.device("cpu"))
    run = PipelineRun(pace.schedule, parts, flow, group=dist.group.WORLD, vocabulary_group=vocabulary)
    params = [embedding, weight, *(each for stage in stages for each in stage.parameters())]
    return params, lambda size: run.step(batches(size), upstream=1 / (size * ROWS * S))


def torchs(rank: int, _: dist.ProcessGroup, *, counts: tuple[int, ...]) -> tuple[list[Tensor], Callable[[int], Any]]:
    """Return parameters, and (microbatches) -> a step of torch's 1F1B, interleaved where ranks have several stages."""
    last = len(counts) - 1
    mine = range(rank, len(counts), RANKS)
    modules = [Stage(counts[i], first=i == 0, last=i == last) for i in mine]

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")

    def step(size: int) -> None:
        stages = [
            PipelineStage(module, i, len(counts), torch.device("cpu")) for i, module in zip(mine, modules, strict=True)
        ]
        schedule = Schedule1F1B if len(stages) == 1 else ScheduleInterleaved1F1B
        run = schedule(stages[0] if len(stages) == 1 else stages, size, loss_fn=loss, scale_grads=False)
        microbatches = batches(size)
        ids = (torch.cat([each.input_ids for each in microbatches]),) if rank == 0 else ()
        target = torch.cat([each.target for each in microbatches]) if last in mine else None
        run.step(*ids, target=target, return_outputs=False)

    return [each for module in modules for each in module.parameters()], step


WAYS = {
    "vocab-2 1f1b": partial(ours, method="1f1b", head="vocab-2"),
    "vocab-1 v-half": partial(ours, method="v-half", head="vocab-1"),
    "vocab-2 v-half": partial(ours, method="v-half", head="vocab-2"),
    "torch 1f1b, even layers": partial(torchs, counts=(2, 2, 2, 2)),
    "torch 1f1b, redistributed": partial(torchs, counts=redistribute(LAYERS, RANKS, 5.0)),
}
GROWING = {
    "vocab-2 1f1b": WAYS["vocab-2 1f1b"],
    "vocab-1 v-half": WAYS["vocab-1 v-half"],
    "torch interleaved 1f1b": partial(torchs, counts=(1,) * LAYERS),
}


def measure(rank: int, way: Callable[..., Any], sizes: list[int], rounds: int, meeting: str) -> dict[str, Any]:
    """Return one rank's CPU seconds for `sizes[0]`, its peak, and what a step makes for each of `sizes`."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS, timeout=timedelta(seconds=120)
    )
    torch.manual_seed(SEED)
    params, step = way(rank, dist.new_group())
    step(sizes[0])
    seconds = []
    for _ in range(rounds):
        before = time.process_time()
        step(sizes[0])
        seconds.append(time.process_time() - before)
    static = sum(each.nbytes + (0 if each.grad is None else each.grad.nbytes) for each in params)
    made = []
    for size in sizes:
        with Ledger() as ledger, ledger.phase("forward"):
            step(size)
        made.append(max(ledger.run_peak_bytes.values()))
    dist.destroy_process_group()
    return {"cpu_s": min(seconds, default=None), "peak_bytes": static + made[0], "made_bytes": made}


def _worker(pipe: Any, *arguments: Any) -> None:
    pipe.send(measure(*arguments))


def on_ranks(way: Callable[..., Any], sizes: list[int], rounds: int) -> list[dict[str, Any]]:
    """Return what `measure` says on each rank, in processes of their own."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe() for _ in range(RANKS)]
        processes = [
            context.Process(target=_worker, args=(theirs, rank, way, sizes, rounds, f"{folder}/meeting"))
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for each in processes:
            each.start()
        found = [mine.recv() for mine, _ in pipes]
        for each in processes:
            each.join()
    return found


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    size = options.microbatches
    figures: dict[str, Any] = {"balance": {}, "growth": {}}
    for name, way in WAYS.items():
        ranks = on_ranks(way, [size], options.rounds)
        cpu, peak = [each["cpu_s"] for each in ranks], [each["peak_bytes"] for each in ranks]
        figures["balance"][name] = {"cpu_s": cpu, "peak_bytes": peak}
        print(
            f"{name:26s} CPU s {' '.join(f'{each:6.2f}' for each in cpu)}  max/min {max(cpu) / min(cpu):5.2f}   "
            f"peak MiB {' '.join(f'{each / 2**20:6.1f}' for each in peak)}  max/min {max(peak) / min(peak):5.2f}",
            flush=True,
        )
    for name, way in GROWING.items():
        sizes = [size, 2 * size, 4 * size]
        made = [max(column) for column in zip(*(each["made_bytes"] for each in on_ranks(way, sizes, 0)), strict=True)]
        figures["growth"][name] = dict(zip(map(str, sizes), made, strict=True))
        print(f"{name:26s} made MiB for m = {sizes}: {' '.join(f'{each / 2**20:8.2f}' for each in made)}", flush=True)
    print(write_result("pipeline_vocab", figures, seed=SEED))


if __name__ == "__main__":
    main()
