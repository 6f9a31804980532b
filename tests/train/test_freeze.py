"""Weights that are named stay bit for bit, hold no gradient and no state, and the prediction knows it."""

import json

import pytest
from safetensors.torch import load_file

from planish.cli.main import main


@pytest.fixture
def run(model_folder, text_file, tmp_path):
    def make(family, *words):
        model = model_folder(family)
        folder = tmp_path / "run"
        flags = ["--model.from", str(model), "--model.dtype", "fp32", "--data.train", str(text_file)]
        flags += ["--data.context", "32", "--train.steps", "2", "--save.dir", str(folder), "--memory", "64MiB"]
        return model, folder, main(["train", *flags, *words])

    return make


@pytest.mark.parametrize("dispatch", ["batched", "pipelined"])
def test_experts_and_router_stay_bit_for_bit(run, dispatch):
    model, folder, code = run("qwen3-moe", "--model.freeze", '["experts", "gate"]', "--plan.dispatch", dispatch)
    assert code == 0
    before = load_file(model / "model.safetensors")
    after = {}
    for path in (folder / "checkpoints" / "step-00000002").glob("*.safetensors"):
        after |= load_file(path)
    assert before.keys() == after.keys()
    frozen = {name for name in before if "experts" in name.split(".") or "gate" in name.split(".")}
    assert frozen
    same = {name for name in before if before[name].equal(after[name])}
    assert same == frozen
    told = json.loads((folder / "plan.json").read_text())
    steps = [json.loads(line) for line in (folder / "memory.jsonl").read_text().splitlines()]
    held = max(phase["peak_bytes"] for each in steps for phase in each["phases"].values())
    assert held <= told["peak_bytes"] <= 1.05 * held


def test_names_that_are_not_there_are_refused(run, capsys):
    assert run("llama", "--model.freeze", "expert")[2] == 2
    assert "`model.freeze` = 'expert' is in no weight's name" in capsys.readouterr().err
    assert run("llama", "--model.freeze", "model")[2] == 2
    assert "leaves nothing to train" in capsys.readouterr().err
