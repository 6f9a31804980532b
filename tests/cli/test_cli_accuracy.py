"""What `planish train` says beforehand is what its ledger counts: a gate over a few small runs.

`benchmarks/plan_accuracy.py` holds sixteen larger ones to the same.
"""

import json

import pytest

RUNS = {
    "head and layers plain, evaluated": (
        "llama",
        *("--plan.vocab", "plain", "--plan.boundary", "plain", "--model.dtype", "fp32"),
        *("--data.eval_tokens", "1024", "--data.eval"),
    ),
    "two microbatches, resumed": ("llama", "--train.grad_accum", "2", "--train.global_tokens", "1024"),
    "a mixture in tiles": ("qwen3-moe", "--plan.dispatch", "pipelined", "--model.dtype", "fp32"),
    "inputs and state on the disk": (
        "llama",
        *("--plan.boundary", "offload", "--plan.boundary.disk", "1MiB"),
        *("--plan.optim", "stream-adamw", "--plan.optim.disk", "8MiB", "--plan.optim.chunk_bytes", "64KiB"),
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_holds_what_was_said_or_up_to_1_per_cent_less(on_tiny_model, text_file, tmp_path, name):
    family, *flags = RUNS[name]
    flags += [str(text_file)] if flags[-1] == "--data.eval" else []
    run = on_tiny_model("--data.context", "512", "--model.extend_positions", "--memory.budget", "1GiB", *flags)
    passes = [("--train.steps", 2), *([("--train.steps", 3, "--resume")] if "resumed" in name else [])]
    for more in passes:
        code, _, error = run("train", *more, family=family)
        assert (code, error) == (0, "")
        predicted = json.loads((tmp_path / "run" / "plan.json").read_text())["peak_bytes"]
        lines = map(json.loads, (tmp_path / "run" / "memory.jsonl").read_text().splitlines())
        assert 0 <= predicted / max(line["peak_bytes"] for line in lines) - 1 <= 0.01
