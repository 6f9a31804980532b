"""Claims of streamed AdamW. On host state: at most 1.1 times torch's fused step. On disk: the process holds 8 bytes a
parameter less (12 where weights are bf16 with fp32 masters), and a step takes at most 1.15 times its busiest lane. If
fetching, updating and writing back take equally long, three lanes are at least 2.05 times as fast as one after another.

49.5M parameters as a transformer has them. Times are taken in turns beside torch's own optimizers and the roof of the
machine's memory (`add_`, 12 bytes a number); memory in a process of its own for each place of the state, after the same
steps from the same weights, which must end in the same bits. `--deepspeed` adds DeepSpeedCPUAdam, which has to be
installed in the environment that runs this.
"""

import argparse
import hashlib
import importlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness import interleave, spread, write_result
from planish.memory.allocator import fix_malloc_thresholds
from planish.memory.far_simulated import Throttled
from planish.memory.lanes import ThreadLane
from planish.memory.meter import ProcessMeter
from planish.optim import StreamAdamW

SHAPES = [(768, 768)] * 28 + [(2048, 768)] * 14 + [(768, 2048)] * 7
NUMEL = sum(rows * cols for rows, cols in SHAPES)
SEED = 0
STEPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one process found.

    Attributes:
        peak_bytes: VmHWM above what was resident before the weights were made.
        wall_s: Of each step, its last write-back included.
        lanes_s: Of each step, what every lane was busy for.
        staging_bytes: Slots and scratch.
        weights: Their digest after the last step.
    """

    peak_bytes: int
    wall_s: list[float]
    lanes_s: list[dict[str, float]]
    staging_bytes: int
    weights: str


def draw(dtype: torch.dtype) -> list[Tensor]:
    """Return the weights with gradients of a usual size."""
    generator = torch.Generator().manual_seed(SEED)
    params = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in SHAPES]
    for param in params:
        param.grad = (torch.randn(param.shape, generator=generator) * 1e-3).to(dtype)
    return params


def roof() -> Callable[[], object]:
    """Return an operation that only moves memory: 12 bytes for each parameter."""
    one, other = torch.ones(NUMEL), torch.ones(NUMEL)
    return lambda: one.add_(other)


def on_host(*, rounds: int, deepspeed: bool) -> dict[str, object]:
    """Return the times of a step with state on the host, beside torch's own."""
    variants: dict[str, Callable[[], object]] = {"memory roof": roof()}
    for math in ("fused", "torch"):
        variants[f"stream, {math}"] = StreamAdamW(draw(torch.float32), math=math).step
    for name, options in (("fused", {"fused": True}), ("foreach", {"foreach": True}), ("loop", {"foreach": False})):
        variants[f"torch, {name}"] = torch.optim.AdamW(draw(torch.float32), **options).step
    if deepspeed:
        kind = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
        variants["deepspeed cpu adam"] = kind(draw(torch.float32), adamw_mode=True).step
    times = interleave(variants, rounds)
    best = {name: each.summary()["wall_s"]["min"] for name, each in times.items()}
    return {
        "times": times,
        "ns_per_parameter": {name: round(seconds / NUMEL * 1e9, 3) for name, seconds in best.items()},
        "ratio_to_torch_fused": round(best["stream, fused"] / best["torch, fused"], 3),
        "ratio_to_torch_loop": round(best["stream, torch"] / best["torch, loop"], 3),
    }


def run(options: argparse.Namespace) -> Measured:
    """Take some steps with the state in one place, in this process."""
    fix_malloc_thresholds()
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    torch.optim.AdamW([torch.ones(64, 64, requires_grad=True)], fused=True).step()
    meter = ProcessMeter()
    params = draw(dtype)
    place = {} if options.variant == "host" else {"disk": 2**34, "folder": options.folder}
    slots = 1 if options.variant == "serial" else options.slots
    optimizer = StreamAdamW(params, lr=1e-3, chunk_bytes=options.chunk_bytes, slots=slots, **place)
    wall_s, lanes_s = [], []
    for _ in range(STEPS):
        before, started = optimizer.traffic, time.perf_counter()
        optimizer.step()
        optimizer.settle()
        wall_s.append(time.perf_counter() - started)
        lanes_s.append({lane: now.busy_s - before[lane].busy_s for lane, now in optimizer.traffic.items()})
    peak_bytes = meter.read().resident_peak_bytes - meter.baseline_bytes
    digest = hashlib.sha256()
    for param in params:
        digest.update(param.detach().view(torch.uint8).numpy())
    return Measured(
        peak_bytes=peak_bytes,
        wall_s=wall_s[1:],  # the first fetches nothing
        lanes_s=lanes_s[1:],
        staging_bytes=sum(each.nbytes for each in optimizer.staging),
        weights=digest.hexdigest(),
    )


def elsewhere(variant: str, dtype: str) -> Measured:
    """Return what a fresh process measures with the same options."""
    command = [sys.executable, __file__, *sys.argv[1:], "--variant", variant, "--dtype", dtype]
    shown = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return Measured(**json.loads(shown.splitlines()[-1]))


def on_disk(dtype: str, options: argparse.Namespace) -> dict[str, object]:
    """Return what a disk saves and costs: peaks of fresh processes, wall against the busiest lane."""
    found: dict[str, list[Measured]] = {"host": [], "disk": [], "serial": []}
    for number in range(options.processes):
        for variant in reversed(found) if number % 2 else found:
            found[variant].append(elsewhere(variant, dtype))
    assert len({each.weights for measured in found.values() for each in measured}) == 1, "the disk changed a bit"
    host, disk = (min(each.peak_bytes for each in found[variant]) for variant in ("host", "disk"))
    wall = {name: spread(tuple(wall for each in measured for wall in each.wall_s)) for name, measured in found.items()}
    steps = [pair for each in found["disk"] for pair in zip(each.wall_s, each.lanes_s, strict=True)]
    staging_bytes = found["disk"][0].staging_bytes
    scratch_bytes = staging_bytes - options.slots * options.chunk_bytes
    assert scratch_bytes == (options.chunk_bytes // 3 if dtype == "bfloat16" else 0)
    return {
        "peak_bytes": {"host": host, "disk": disk},
        "saved_bytes_per_parameter": round((host - disk) / NUMEL, 3),
        "saved_bytes_per_parameter_besides_staging": round((host - disk + staging_bytes) / NUMEL, 3),
        "staging_bytes": staging_bytes,
        "wall_s": wall,
        "speedup_over_one_slot": round(wall["serial"]["median"] / wall["disk"]["median"], 3),
        "busiest_lane_s": spread(tuple(max(lanes.values()) for _, lanes in steps)),
        "lanes_s": {lane: spread(tuple(lanes[lane] for _, lanes in steps)) for lane in steps[0][1]},
        "wall_to_busiest_lane": spread(tuple(round(wall / max(lanes.values()), 3) for wall, lanes in steps)),
    }


def throttled(slots: int, options: argparse.Namespace) -> StreamAdamW:
    """Return an optimizer each of whose lanes takes `lane_s` for a chunk: real work, and sleep for the rest."""
    optimizer = StreamAdamW(draw(torch.float32), engine="device", chunk_bytes=options.chunk_bytes, slots=slots)
    (tier,) = optimizer.tiers
    tier.medium = Throttled(tier.medium, bytes_per_s=options.chunk_bytes / options.lane_s)
    tier.inward, tier.outward = ThreadLane("slow-in"), ThreadLane("slow-out")
    update = optimizer._work

    def work(*args: Any, **named: Any) -> None:
        started = time.perf_counter()
        update(*args, **named)
        time.sleep(max(0.0, options.lane_s - (time.perf_counter() - started)))

    optimizer._work = work
    return optimizer


def equal_lanes(options: argparse.Namespace) -> dict[str, object]:
    """Return how much faster three lanes are than one after another, where all three take equally long."""
    variants = {}
    for name, slots in (("three lanes", options.slots), ("one after another", 1)):
        optimizer = throttled(slots, options)

        def step(optimizer: StreamAdamW = optimizer) -> None:
            optimizer.step()
            optimizer.settle()

        variants[name], chunks = step, len(optimizer.chunks)
    times = interleave(variants, options.rounds)
    wall = {name: each.summary()["wall_s"]["median"] for name, each in times.items()}
    ideal = 3 * chunks / (chunks + 2)
    return {
        "times": times,
        "chunks": chunks,
        "lane_s_per_chunk": options.lane_s,
        "speedup": round(wall["one after another"] / wall["three lanes"], 3),
        "speedup_by_formula": round(ideal, 3),
    }


def main() -> None:
    """Measure, print and write the result; with `--variant` do one variant here and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--slots", type=int, default=3)
    parser.add_argument("--chunk-bytes", type=int, default=16 * 2**20 // 24576 * 24576)
    parser.add_argument("--lane-s", type=float, default=0.025)
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--deepspeed", action="store_true")
    parser.add_argument("--variant", choices=["host", "disk", "serial"])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    options = parser.parse_args()
    if options.variant:
        print(json.dumps(asdict(run(options))))
        return
    torch.set_num_threads(options.threads)
    figures = {
        "parameters": NUMEL,
        "host": on_host(rounds=options.rounds, deepspeed=options.deepspeed),
        "disk, fp32": on_disk("float32", options),
        "disk, bf16 with fp32 masters": on_disk("bfloat16", options),
        "equal lanes": equal_lanes(options),
    }
    shown = {name: each for name, each in figures.items() if name != "parameters"}
    print(json.dumps({name: {k: v for k, v in each.items() if k != "times"} for name, each in shown.items()}, indent=2))
    print(write_result("stream_adamw", figures, seed=SEED))


if __name__ == "__main__":
    main()
