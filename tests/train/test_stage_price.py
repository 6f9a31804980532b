"""The price of a pipeline's ranks is the dry run of each of them, phase by phase."""

import json
from dataclasses import replace

import pytest

from forks import run_in_child
from planish.decode import decode
from planish.methods import Checkpoint, Plan
from planish.plan.answer import plan_tables
from planish.plan.question import Candidate, Question
from planish.price.config import read_config
from planish.price.hardware import KNOWN
from planish.runfile import RunFile, load
from planish.shapes import MeshShape
from planish.train import predict
from planish.train.predict import by_dry_run
from planish.train.stage_plan import price_of_stages

BASE = [("data.context", 32), ("train.grad_accum", 4), ("mesh.pp", 2), ("train.global_tokens", 256)]
CASES = {
    "vocab-2, tied, bf16": ("qwen3", [*BASE, ("model.dtype", "bf16")], {"tie_word_embeddings": True}),
    "vocab-1, three ranks, uneven rows": (
        "llama",
        [*BASE, ("mesh.pp", 3), ("plan.pipeline.head", "vocab-1"), ("model.dtype", "fp32")],
        {"vocab_size": 301},
    ),
}
MORE = {
    "everything kept": ("llama", [*BASE, ("plan.boundary", "plain"), ("model.dtype", "fp32")], {}),
    "attention kept, experts": (
        "qwen3-moe",
        [*BASE, ("plan.dispatch", "pipelined"), ("plan.boundary.keep_attention", True)],
        {},
    ),
    "four ranks, more microbatches than settle it": (
        "llama",
        [*BASE, ("mesh.pp", 4), ("train.grad_accum", 32), ("train.global_tokens", 2048)],
        {},
    ),
    "tiled": ("llama", [*BASE, ("plan.activation", "tiled"), ("plan.activation.tile_bytes", "8KiB")], {}),
}
# What rank 0 holds while it deals out the weights, and what ranks bring together for a checkpoint, is bounded alone.
BOUNDED = ("init", "save", "optimizer")


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(each, marks=pytest.mark.slow) for each in MORE)])
def test_the_price_of_each_rank_is_its_dry_run(model_folder, text_file, monkeypatch, case):
    family, settings, config = (CASES | MORE)[case]
    data = [("data.train", str(text_file)), ("data.eval", str(text_file))]
    run = load(None, [("model.from", str(model_folder(family, num_hidden_layers=4, **config))), *data, *settings])
    said = []
    monkeypatch.setattr(predict, "NEAR", 0)  # every rank is asked about both kinds of rows
    priced, dry = run_in_child(lambda: (predict.predict(run, said.append), by_dry_run(run)))
    assert priced.table is not None
    for phase, found in dry.phases.items():
        price = priced.estimate.phases[phase]
        difference = price.peak_bytes - found.peak_bytes
        if phase in BOUNDED:
            assert -64 <= difference <= 0.005 * found.peak_bytes, phase
        else:
            assert difference == 0, phase
            assert price.where.split(" ")[-1] == found.where.split(" ")[-1]  # the same rank
    assert priced.estimate.ranks == dry.ranks


@pytest.mark.slow
def test_what_ranks_of_a_stage_share_is_bounded(model_folder, text_file):
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6, "vocab_size": 512}
    folder = model_folder("llama", **sizes)
    tree = json.loads((folder / "config.json").read_text())
    shape = read_config(tree)
    asked = Question(shape=shape, dtype="bf16", context=128, rows=None, devices=4, hardware=KNOWN["cpu"])
    mesh = MeshShape(dp=2, pp=2)
    plan = Plan(boundary=Checkpoint())
    candidate = Candidate(replace(asked, stages=price_of_stages(shape, tree)), mesh, 1, 4, plan)
    tables = plan_tables(candidate) | {"model": {"config": str(folder / "config.json")}}
    tables["model"] |= {"dtype": "bf16", "extend_positions": True}
    tables["data"] |= {"train": str(text_file), "eval": str(text_file)}
    del tables["memory"]
    dry = run_in_child(lambda: by_dry_run(decode(RunFile, tables)))
    for phase, found in dry.phases.items():
        if phase not in BOUNDED[:1]:
            difference = candidate.estimate.phases[phase].peak_bytes - found.peak_bytes
            layer = candidate.table.gathered.layer if phase in ("forward", "backward", "eval") else 0
            assert -64 <= difference <= 0.005 * found.peak_bytes + layer, phase
