"""Claim: boundaries on disk lower a process's peak by all of them but two, at no more than 10 % more wall time.

A Llama of SmolLM2-135M's sizes with drawn weights, every layer checkpointed, attention packed and head in tiles, over
microbatches that accumulate: gradients are there from the second one on, so that the peak is where boundaries are most.
(In a first microbatch gradients come as boundaries go, and the fall is less by the gradients of the layers.) Each
variant has a process of its own, in turns. Losses and gradients must agree bit for bit before anything counts.
"""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from harness import Times, spread, write_result
from planish.memory.allocator import fix_malloc_thresholds
from planish.memory.far_disk import RING_BYTES
from planish.memory.meter import ProcessMeter
from planish.methods import Plan
from planish.models.anatomy import find
from planish.models.install import install
from planish.peaks.boundary.offload import FarBudget, open_store
from planish.price.boundary import Depth

SEED = 0
WIDTH = 576


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one process found.

    Attributes:
        peak_bytes: VmHWM above the resident bytes before the model was made.
        wall_s: Of each microbatch.
        cpu_s: Of each microbatch.
        loss: Of each microbatch, in hexadecimal.
        grads: Sum of all gradients after the last, in hexadecimal.
        offloaded: Boundaries that left, in all microbatches.
        hidden: How much of the lanes' time nobody waited for.
        written_bytes: To the disk.
    """

    peak_bytes: int
    wall_s: list[float]
    cpu_s: list[float]
    loss: list[str]
    grads: str
    offloaded: int = 0
    hidden: float = 0.0
    written_bytes: int = 0


def run(options: argparse.Namespace) -> Measured:
    """Take the microbatches of one variant in this process."""
    fix_malloc_thresholds()
    torch.set_num_threads(options.threads)
    config = LlamaConfig(
        vocab_size=options.vocab,
        hidden_size=WIDTH,
        intermediate_size=1536,
        num_hidden_layers=options.layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=options.tokens,
        tie_word_embeddings=True,
        use_cache=False,
    )
    dtype = getattr(torch, options.dtype)
    torch.ones(64, 64).matmul(torch.ones(64, 64))
    meter = ProcessMeter()
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(config).to(dtype).train()
    install(model, Plan())
    store = None
    if options.variant == "offload":
        depth = Depth(num_boundaries=options.layers, boundary_bytes=options.tokens * WIDTH * dtype.itemsize)
        budget = FarBudget(disk_bytes=2**40, folder=options.folder)
        store = open_store(depth, budget, device=torch.device("cpu"), every=options.every)
        for index, layer in enumerate(find(model).layers.values()):
            layer._gradient_checkpointing_func = store.checkpoint(index, layer._gradient_checkpointing_func)
    wall_s, cpu_s, losses = [], [], []
    for seed in range(options.microbatches):
        ids = torch.randint(0, options.vocab, (1, options.tokens), generator=torch.Generator().manual_seed(seed))
        wall, cpu = time.perf_counter(), time.process_time()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        wall_s.append(time.perf_counter() - wall)
        cpu_s.append(time.process_time() - cpu)
        losses.append(loss.item().hex())
        del loss
    peak_bytes = meter.read().resident_peak_bytes - meter.baseline_bytes
    grads = sum(each.grad.double().sum().item() for each in model.parameters()).hex()
    measured = Measured(peak_bytes=peak_bytes, wall_s=wall_s, cpu_s=cpu_s, loss=losses, grads=grads)
    if store is None:
        return measured
    tier = store.tiers[0]
    store.close()
    return Measured(
        **asdict(measured)
        | {"offloaded": store.num_offloaded, "hidden": tier.hidden_fraction or 0.0, "written_bytes": tier.written_bytes}
    )


def elsewhere(variant: str) -> Measured:
    """Return what a fresh process measures with the same options."""
    command = [sys.executable, __file__, *sys.argv[1:], "--variant", variant]
    shown = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return Measured(**json.loads(shown.splitlines()[-1]))


def compare(options: argparse.Namespace) -> dict[str, object]:
    """Measure both variants in turns and return what they say of the claim."""
    rounds: dict[str, list[Measured]] = {"plain": [], "offload": []}
    for number in range(options.rounds):
        for variant in reversed(rounds) if number % 2 else rounds:
            rounds[variant].append(elsewhere(variant))
            print(variant, rounds[variant][-1], file=sys.stderr)
    results = {(tuple(each.loss), each.grads) for variant in rounds.values() for each in variant}
    assert len(results) == 1, "offloading changed a bit"
    plain, ours = (min(each.peak_bytes for each in rounds[variant]) for variant in rounds)
    times = {
        variant: Times(
            wall_s=tuple(each for one in measured for each in one.wall_s[1:]),
            cpu_s=tuple(each for one in measured for each in one.cpu_s[1:]),
        )
        for variant, measured in rounds.items()
    }
    boundary_bytes = options.tokens * WIDTH * getattr(torch, options.dtype).itemsize
    wall = {variant: each.summary()["wall_s"]["median"] for variant, each in times.items()}
    return {
        "tokens": options.tokens,
        "layers": options.layers,
        "dtype": options.dtype,
        "boundary_bytes": boundary_bytes,
        "offloaded": rounds["offload"][0].offloaded // options.microbatches,
        "peak_bytes": {"plain": plain, "offload": ours},
        "saved_boundaries": round((plain - ours) / boundary_bytes, 3),
        "saved_boundaries_besides_the_ring": round((plain - ours + RING_BYTES) / boundary_bytes, 3),
        "times": times,
        "wall_ratio": round(wall["offload"] / wall["plain"], 4),
        "hidden_fraction": spread(tuple(each.hidden for each in rounds["offload"])),
    }


def main() -> None:
    """Measure, print and write the result; with `--variant` do one variant here and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--variant", choices=["plain", "offload"])
    options = parser.parse_args()
    if options.variant:
        print(json.dumps(asdict(run(options))))
        return
    figures = compare(options)
    print(json.dumps({name: each for name, each in figures.items() if name != "times"}, indent=2))
    print(write_result("boundary_disk", figures, seed=SEED))


if __name__ == "__main__":
    main()
