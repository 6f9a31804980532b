"""Claim: inside 4 GiB of tensors SmolLM2-135M trains at a longer context with boundaries on disk than plain.

`plain` is transformers with every layer checkpointed and logits formed, attention without a mask as SDPA has it for one
document; `planish` is `planish train` with `model.extend_positions`, the head in tiles, layer inputs and attention's
output on disk. The longest context of each is that of its price. With `--measure` each then trains one step at its
longest context, and one at `--at` tokens, by the very command; that takes long.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import write_result
from planish.runfile import RunFile, load
from planish.train.fit import context_that_fits
from planish.train.predict import predict

MODEL = "smollm2-135m"
OFFLOAD = {"plan.boundary": "offload", "plan.boundary.disk": "64GiB", "plan.boundary.keep_attention": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"plan.vocab": "plain", "plan.boundary": "checkpoint"},
    "planish": OFFLOAD,
}


def settings(variant: str, context: int, options: argparse.Namespace) -> list[tuple[str, Any]]:
    """Return the settings of one run."""
    return [
        ("model.from", MODEL),
        ("model.dtype", options.dtype),
        ("model.extend_positions", True),
        ("data.train", "builtin:english"),
        ("data.context", context),
        ("train.steps", 1),
        ("memory.budget", options.budget),
        *VARIANTS[variant].items(),
    ]


def longest(variant: str, options: argparse.Namespace) -> int:
    """Return the longest context whose price is within the budget."""
    run: RunFile = load(None, settings(variant, options.at, options))
    prediction = predict(run, lambda sentence: print(sentence, file=sys.stderr))
    found = context_that_fits(run, prediction, run.memory.budget or 0)
    assert found is not None, f"{variant} fits no context"
    return found


def measured(variant: str, context: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return what `planish train` writes about one step, or why it was not begun."""
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        found = [*settings(variant, context, options), ("save.dir", f"{folder}/run")]
        found += [("plan.boundary.folder", folder)] if variant == "planish" else []
        flags = [
            word for name, value in found for word in (f"--{name}", str(value).lower() if value is True else str(value))
        ]
        done = subprocess.run(
            [sys.executable, "-m", "planish", "train", *flags], check=False, capture_output=True, text=True
        )
        if done.returncode:
            return {"exit_code": done.returncode, "said": done.stderr.strip()}
        line = json.loads((Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()[0])
        baseline = json.loads((Path(folder) / "run" / "plan.json").read_text())["baseline_bytes"]
        return {"baseline_bytes": baseline} | line


def main() -> None:
    """Price, measure on request, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", default="4GiB")
    parser.add_argument("--dtype", choices=["bf16", "fp32", "bf16-pure"], default="bf16")
    parser.add_argument("--at", type=int, default=16384)
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--measure", action="store_true")
    options = parser.parse_args()
    contexts = {variant: longest(variant, options) for variant in VARIANTS}
    figures: dict[str, Any] = {"budget": options.budget, "dtype": options.dtype, "longest_context": contexts}
    figures["ratio"] = round(contexts["planish"] / contexts["plain"], 2)
    print(json.dumps(figures, indent=2))
    if options.measure:
        figures["measured"] = {
            variant: {str(context): measured(variant, context, options) for context in sorted({options.at, longest_})}
            for variant, longest_ in contexts.items()
        }
        print(json.dumps(figures["measured"], indent=2))
        print(write_result("context_4gib", figures, seed=0))


if __name__ == "__main__":
    main()
