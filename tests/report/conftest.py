"""Run folders written by hand, line by line as a run writes them: SmolLM2-135M in bf16 at a context of 4,096."""

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path

import pytest

MIB = 2**20
LAYERS = 30
PARAMETERS, STATE = 269_030_016, 1_614_180_096  # bf16 weights; fp32 master and two moments
BOUNDARY = 4096 * 576 * 2
LAYER = 151 * MIB
TILE = 64 * MIB
HEAD_GRADIENT = 49152 * 576 * 2

RUN_TOML = """
[model]
from = "smollm2-135m"
dtype = "bf16"

[data]
train = ["builtin:english"]
eval = ["builtin:english"]
context = 4096

[train]
steps = {steps}
lr = 0.0001
schedule = "cosine"
a_key_of_a_later_version = true

[memory]
budget = "{budget}"
on_exceed = "strict"
"""

PLAN_TOML = """
[plan.attention]
method = "packed"

[plan.vocab]
method = "blocked"
tile_bytes = "64MiB"
strategy = "auto"

[plan.boundary]
method = "checkpoint"
"""


@dataclass
class RunBuilder:
    """Writes the files of one run folder."""

    path: Path

    def settings(self, *, steps: int = 4, budget: str = "3GiB") -> "RunBuilder":
        self.path.mkdir(exist_ok=True)
        (self.path / "run.toml").write_text(RUN_TOML.format(steps=steps, budget=budget))
        (self.path / "plan.toml").write_text(PLAN_TOML)
        return self

    def lines(self, name: str, *records: dict) -> "RunBuilder":
        with (self.path / name).open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
        return self

    def file(self, name: str, text: str) -> "RunBuilder":
        (self.path / name).write_text(text)
        return self

    def steps(self, count: int, *, seed: int = 0) -> "RunBuilder":
        """Metrics of `count` steps, and their memory with the timeline where a run writes one."""
        draw = random.Random(seed)
        self.lines("memory.jsonl", init_line())
        metrics, memory = [], []
        for step in range(1, count + 1):
            extra = 2 * MIB * (step % 3 == 0)
            tokens_per_s = (141 if step == 1 else 158) + draw.uniform(-6, 6)
            line = step_line(step, extra)
            metrics.append(
                {
                    "step": step,
                    "loss": 3.1 + 0.55 * math.exp(-step / max(2, count / 5)) + draw.gauss(0, 0.02),
                    "grad_norm": 1.4 + draw.uniform(-0.2, 0.2),
                    "lr": 1e-4,
                    "tokens": 4096,
                    "valid_tokens": 4095,
                    "step_s": round(4096 / tokens_per_s, 4),
                    "tokens_per_s": round(tokens_per_s, 1),
                    "memory/peak_bytes": line["peak_bytes"],
                    "memory/vm_hwm_bytes": 3_190_000_000 + 1_000_000 * min(step, 40),
                    "a_key_of_a_later_version": "x",
                }
            )
            if step not in (1, 3):
                del line["timeline"]
            memory.append(line)
        self.lines("metrics.jsonl", *metrics).lines("memory.jsonl", *memory)
        return self

    def evaluations(self, *steps: int) -> "RunBuilder":
        for step in steps:
            loss = 3.24 + 0.4 * math.exp(-step / 3)
            record = {"step": step, "eval/loss": loss, "eval/bits_per_byte": loss / 3.31, "eval/num_valid": 1023}
            self.lines("metrics.jsonl", record).lines("memory.jsonl", eval_line(step))
        return self

    def prediction(self, **over: float) -> "RunBuilder":
        """A `plan.json` equal to the steps' memory, except that the named phases were predicted `over` times it."""
        phases = {**step_line(3, 2 * MIB)["phases"], **eval_line(3)["phases"]}
        tree = {
            phase: {
                "peak_bytes": round(each["peak_bytes"] * over.get(phase, 1.0)),
                "categories": {name: round(size * over.get(phase, 1.0)) for name, size in each["categories"].items()},
            }
            for phase, each in phases.items()
        }
        return self.file("plan.json", json.dumps({"phases": tree, "a_key_of_a_later_version": 1}))


@pytest.fixture
def builder(tmp_path):
    return RunBuilder(tmp_path / "smollm2-english")


@pytest.fixture
def finished(builder):
    """A run of four steps that ended well."""
    return builder.settings().steps(4).evaluations(4)


def init_line() -> dict:
    held = {"parameters": PARAMETERS, "optimizer state": STATE}
    live = sum(held.values())
    timeline = [[0.0, 0, "init"], [2.1, PARAMETERS, "init"], [2.9, live, "init"]]
    return memory_line(0, {"init": phase_tree(2.9, held)}, timeline)


def eval_line(step: int) -> dict:
    held = {"parameters": PARAMETERS, "optimizer state": STATE, "layer working set": LAYER // 2, "head tiles": TILE}
    return memory_line(step, {"eval": phase_tree(3.2, held)}, None)


def step_line(step: int, extra: int = 0) -> dict:
    """One checkpointed step: boundaries grow in forward, gradients in backward, a saw tooth for every layer."""
    base = PARAMETERS + STATE
    kept = LAYERS * BOUNDARY
    grads = PARAMETERS
    forward = {"parameters": PARAMETERS, "optimizer state": STATE, "boundaries": kept, "layer working set": LAYER // 2}
    head = {**forward, "layer working set": 0, "head tiles": TILE + HEAD_GRADIENT + 2 * BOUNDARY}
    backward = {**forward, "gradients": grads, "layer working set": LAYER + extra, "boundaries": 2 * BOUNDARY}
    optimizer = {"parameters": PARAMETERS, "optimizer state": STATE, "gradients": grads, "staging": 27 * MIB}
    timeline, at_s = [[0.0, base, "forward"]], 0.0

    def point(seconds: float, live: int, phase: str) -> None:
        nonlocal at_s
        at_s += seconds
        timeline.append([round(at_s, 6), live, phase])

    for layer in range(LAYERS):
        for part in (0.3, 1.0, 0.6, 0.0):
            point(0.062, int(base + layer * BOUNDARY + part * LAYER / 2), "forward")
    forward_peak_s = at_s - 0.062
    for _ in range(25):
        point(0.024, base + kept + TILE + HEAD_GRADIENT + 2 * BOUNDARY, "head")
        point(0.024, base + kept + HEAD_GRADIENT, "head")
    head_peak_s = at_s
    for layer in range(LAYERS, 0, -1):
        done = grads * (LAYERS - layer + 1) / LAYERS
        for part in (0.4, 0.7, 1.0, 0.8, 0.2):
            room = LAYER + (extra if layer == 1 else 0)
            point(0.1, int(base + layer * BOUNDARY + done + part * room), "backward")
    backward_peak_s = at_s - 0.2
    for part in range(30):
        point(0.05, base + int(grads * (1 - part / 60)) + 27 * MIB * (part % 2 == 0), "optimizer")
    phases = {
        "forward": phase_tree(forward_peak_s, forward),
        "head": phase_tree(head_peak_s, head),
        "backward": phase_tree(backward_peak_s, backward),
        "optimizer": phase_tree(backward_peak_s + 0.3, optimizer),
    }
    top = max(each["peak_bytes"] for each in phases.values())
    timeline = [[seconds, min(live, top), phase] for seconds, live, phase in timeline]
    at = next(index for index, point in enumerate(timeline) if point[0] >= backward_peak_s - 1e-6)
    timeline[at][1] = top
    return memory_line(step, phases, timeline)


def phase_tree(at_s: float, categories: dict[str, int]) -> dict:
    categories = {name: size for name, size in categories.items() if size}
    owners = {
        "parameters": ("model.embed_tokens.weight", [49152, 576], "bfloat16", 1, 49152 * 576 * 2),
        "optimizer state": ("AdamW", [49152, 576], "float32", 3, 3 * 49152 * 576 * 4),
        "gradients": ("model.embed_tokens.weight", [49152, 576], "bfloat16", 1, 49152 * 576 * 2),
        "boundaries": ("model.layers.*", [1, 4096, 576], "bfloat16", 2, 2 * BOUNDARY),
        "layer working set": ("model.layers.0.mlp.act_fn", [1, 4096, 1536], "bfloat16", 4, 4 * 4096 * 1536 * 2),
        "head tiles": ("lm_head", [682, 49152], "bfloat16", 1, 682 * 49152 * 2),
        "staging": ("optimizer", [576, 576], "float32", 2, 2 * 576 * 576 * 4),
    }
    rows = []
    for name, size in categories.items():
        owner, shape, dtype, count, total = owners[name]
        rows.append([owner, name, shape, dtype, count, min(total, size)])
        if name in ("parameters", "gradients", "optimizer state"):
            part = (size - rows[-1][-1]) // 3
            for projection in ("gate_proj", "up_proj", "down_proj"):
                each = f"model.layers.*.mlp.{projection}.weight" if name != "optimizer state" else "AdamW"
                rows.append([each, name, [1536, 576], dtype, LAYERS, part])
    rows.sort(key=lambda row: -row[-1])
    return {
        "peak_bytes": sum(categories.values()),
        "at_s": round(at_s, 6),
        "categories": categories,
        "owners": rows[:20],
    }


def memory_line(step: int, phases: dict, timeline: list | None) -> dict:
    top = max(phases, key=lambda phase: phases[phase]["peak_bytes"])
    line = {"step": step, "peak_bytes": phases[top]["peak_bytes"], "peak_phase": top, "phases": phases}
    return line if timeline is None else {**line, "timeline": timeline}
