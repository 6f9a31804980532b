"""Claim: what `planish plan` says a run will hold is never below what its ledger counts, and at most 1 % above.

Sixteen small real runs on a CPU: dense, mixtures, every method, one, two and four ranks, three dtypes, with evaluation,
checkpoints and a resumed run. Each is `planish train` as a user starts it; predicted is the `plan.json` that it writes
before its first step, measured the largest peak in `memory.jsonl`, which counts every tensor. Above them stands the
process: VmHWM over the baseline, for the cases that hold more than 1 GiB.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import write_result

SIZES = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 49152,
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
MIXTURE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "decoder_sparse_step": 1}
MODELS = {
    "dense": {"model_type": "llama", **SIZES},
    "tied": {"model_type": "qwen3", **SIZES, "tie_word_embeddings": True},
    "relu": {"model_type": "nemotron", **SIZES, "hidden_act": "relu2"},
    "mixture": {"model_type": "qwen3_moe", **SIZES, **MIXTURE},
    "large": {"model_type": "llama", **SIZES, "hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 24},
}
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "dense, all plain, fp32": (
        "dense",
        1,
        {"plan.attention": "plain", "plan.vocab": "plain", "plan.boundary": "plain", "model.dtype": "fp32"},
    ),
    "dense, default, fp32, evaluation": ("dense", 1, {"model.dtype": "fp32", "data.eval": "builtin:english"}),
    "dense, default, bf16, two microbatches": ("dense", 1, {"train.grad_accum": 2}),
    "tied, attention kept, bf16-pure": ("tied", 1, {"model.dtype": "bf16-pure", "plan.boundary.keep_attention": True}),
    "dense, inputs on disk": ("dense", 1, {"plan.boundary": "offload", "plan.boundary.disk": "1GiB"}),
    "dense, networks in tiles": ("dense", 1, {"plan.activation": "tiled", "plan.activation.tile_bytes": "256KiB"}),
    "dense, state on disk": ("dense", 1, {"plan.optim": "stream-adamw", "plan.optim.disk": "1GiB"}),
    "relu, networks packed": ("relu", 1, {"plan.activation": "bitmap", "plan.boundary": "plain"}),
    "dense, APOLLO": ("dense", 1, {"plan.optim": "apollo", "plan.optim.proj_rank": 4}),
    "mixture, pipelined, fp32": ("mixture", 1, {"plan.dispatch": "pipelined", "model.dtype": "fp32"}),
    "mixture, pipelined, bf16, evaluation": (
        "mixture",
        1,
        {"plan.dispatch": "pipelined", "data.eval": "builtin:english"},
    ),
    "dense, above 1 GiB": ("large", 1, {"data.context": 4096, "model.dtype": "fp32", "plan.vocab": "plain"}),
    "two ranks, shards": ("dense", 2, {"mesh.dp": 2}),
    "two ranks, copies": ("dense", 2, {"mesh.dp": 1, "mesh.replicate": 2}),
    "two ranks, experts spread": (
        "mixture",
        2,
        {"mesh.ep": 2, "mesh.dp": 2, "plan.dispatch": "pipelined", "model.dtype": "fp32"},
    ),
    "four ranks, vocabulary shared": ("dense", 4, {"mesh.vp": 2, "mesh.dp": 4, "plan.vocab": "ring"}),
}
RESUMED = "dense, default, bf16, two microbatches"


def run(folder: Path, model: str, ranks: int, extra: dict[str, Any], *, steps: int, resume: bool = False) -> None:
    """Train as a user does; a run that fails ends the benchmark."""
    config = folder / "config.json"
    config.write_text(json.dumps(MODELS[model]))
    settings = {
        "model.config": config,
        "model.tokenizer": "smollm2-135m",
        "data.train": "builtin:english",
        "data.eval_tokens": 2048,
        "data.context": 1024,
        "train.steps": steps,
        "memory.budget": "8GiB",
        "save.dir": folder / "run",
        **extra,
    }
    flags = [
        word
        for name, value in settings.items()
        for word in (f"--{name}", str(value).lower() if value is True else str(value))
    ]
    words = [sys.executable, "-m", "planish", "train", *flags, *(["--resume"] if resume else [])]
    if ranks > 1:
        words[1:3] = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", "planish"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(map(str, words))}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


def figures_of(folder: Path) -> dict[str, Any]:
    """Return predicted and measured peaks of a run, and of each phase."""
    predicted = json.loads((folder / "run" / "plan.json").read_text())
    lines = [json.loads(line) for line in (folder / "run" / "memory.jsonl").read_text().splitlines()]
    metrics = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    phases: dict[str, int] = {}
    for line in lines:
        for phase, each in line["phases"].items():
            phases[phase] = max(phases.get(phase, 0), each["peak_bytes"])
    measured = max(phases.values())
    process = max(line.get("memory/vm_hwm_bytes", 0) for line in metrics)
    baseline = max(line.get("baseline_bytes", 0) for line in lines)
    found = {
        "predicted_bytes": predicted["peak_bytes"],
        "measured_bytes": measured,
        "difference": round(predicted["peak_bytes"] / measured - 1, 6),
        "phases": {
            phase: round(predicted["phases"][phase]["peak_bytes"] / nbytes - 1, 6)
            for phase, nbytes in phases.items()
            if phase in predicted["phases"]
        },
    }
    if measured > 2**30:
        found["process_bytes_above_baseline"] = process - baseline
    return found


def measure(name: str) -> dict[str, Any]:
    """Return the figures of one case, resumed where it is the case that is."""
    model, ranks, extra = CASES[name]
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        run(folder, model, ranks, extra, steps=2)
        found = figures_of(folder)
        if name == RESUMED:
            run(folder, model, ranks, extra, steps=3, resume=True)
            found["resumed"] = figures_of(folder)
        return found


def main() -> None:
    """Print and write every case, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="cases; default: all")
    names = parser.parse_args().names or list(CASES)
    figures = {}
    for name in names:
        figures[name] = measure(name)
        row = figures[name]
        print(f"{name:42} {row['measured_bytes'] / 2**20:9.2f} MiB  {row['difference']:+.4%}", flush=True)
    if len(names) == len(CASES):
        print(write_result("plan_accuracy", figures, seed=0))


if __name__ == "__main__":
    main()
