"""`[plan.optim]` as a user meets it: trained, resumed across a refresh, planned, verified, and refused by name."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from planish.cli.main import main

MINI = ("--plan.optim", "apollo", "--plan.optim.update_gap", "3")
BUILT_IN = ["--model.from", "smollm2-135m", "--data.context", "1024"]


@pytest.fixture
def say(on_tiny_model):
    return on_tiny_model("--model.dtype", "bf16")


def losses(tmp_path):
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    return [float.hex(json.loads(line)["loss"]) for line in lines]


@pytest.mark.parametrize("flags", [
    (), ("--plan.optim.in_backward", "--train.clip", 0, "--train.grad_accum", 2), ("--plan.optim.weights", "int8"),
])  # fmt: skip
def test_a_resumed_run_is_bit_identical_across_a_refresh(say, tmp_path, flags):
    """Refreshes come after steps 3 and 6; the run is cut at 5."""
    assert say("train", "--train.steps", 8, "--save.every", 5, *MINI, *flags)[0] == 0
    whole = losses(tmp_path)
    assert say("train", "--train.steps", 5, *MINI, *flags, "--overwrite")[0] == 0
    assert say("train", "--train.steps", 8, *MINI, *flags, "--resume")[0] == 0
    assert losses(tmp_path) == whole


def test_in_backward_is_bitwise_the_step_after_it(say, tmp_path):
    runs = []
    for flags in ((), ("--plan.optim.in_backward",)):
        words = ("--train.steps", 4, "--train.clip", 0, "--train.weight_decay", 0.1, "--overwrite")
        assert say("train", *words[: 6 + bool(runs)], *MINI, *flags, family="qwen3")[0] == 0
        lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        runs.append([(each["loss"], pytest.approx(each["grad_norm"], rel=1e-2)) for each in map(json.loads, lines)])
    assert runs[0] == runs[1]


@pytest.mark.parametrize(("changed", "message"), [
    (("--plan.optim.seed", 1), "`plan.optim.seed` is 0 in the checkpoint and 1 here"),
    (("--plan.optim.proj_rank", 2), "`plan.optim.proj_rank` is 1 in the checkpoint and 2 here"),
    (("--plan.optim.projection", "gaussian"), "`plan.optim.projection` is 'rademacher' in the checkpoint"),
    (("--plan.optim", "adamw"), "`plan.optim.proj_rank` is 1 in the checkpoint and None here"),
])  # fmt: skip
def test_a_resume_under_another_projection_is_refused(say, changed, message):
    assert say("train", "--train.steps", 1, "--plan.optim.proj_rank", 1)[0] == 0
    code, _, err = say("train", "--train.steps", 2, "--plan.optim.proj_rank", 1, *changed, "--resume")
    assert code == 2
    assert "is of another optimizer" in err
    assert message in err


def test_int8_weights_are_published_wide_and_learn(say, tmp_path):
    flags = ("--plan.optim.weights", "int8", "--plan.optim.in_backward", "--train.clip", 0, "--train.lr", 1e-2)
    assert say("train", "--train.steps", 12, *flags)[0] == 0
    first, *_, last = map(float.fromhex, losses(tmp_path))
    assert last < first - 0.2
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoints" / "step-00000012")
    weight = model.model.layers[0].mlp.up_proj.weight
    assert weight.dtype == torch.bfloat16
    assert weight.isfinite().all()
    code, _, err = say("train", "--plan.optim.weights", "int8", "--overwrite", family="qwen3-moe")
    assert code == 2
    assert "`plan.optim.weights` = int8 takes weights of linear layers, and `model.layers.0.mlp.experts" in err


@pytest.mark.parametrize("verb", ["train", "plan"])
@pytest.mark.parametrize(("flags", "message"), [
    (("--plan.optim.proj_rank", 17), r"`plan.optim.proj_rank` (17) must not exceed the smaller dimension (16) of"),
    (("--plan.optim.proj_rank", 0), "`plan.optim.proj_rank` must be"),
    (("--plan.optim.projection", "svd"), 'must be one of "rademacher", "gaussian", got'),
    (("--plan.optim", "appollo"), "did you mean `apollo`?"),
    (("--plan.optim.alpha", -1), "`plan.optim.alpha` must be a number above 0, got -1.0"),
    (("--plan.optim.seed", -1), "`plan.optim.seed` must be in [0, 2^63), got -1"),
    (("--plan.optim", "apollo", "--plan.optim.in_backward"), "set `train.clip = 0`"),
])  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(say, verb, flags, message):
    code, _, err = say(verb, *flags)
    assert code == 2
    assert message in err


def test_plan_and_verify_name_the_approximation(say, capsys):
    assert main(["plan", *BUILT_IN, "--plan.optim", "apollo", "--json"]) == 0
    apollo = json.loads(capsys.readouterr().out)
    assert main(["plan", *BUILT_IN, "--json"]) == 0
    adamw = json.loads(capsys.readouterr().out)
    state = [each["phases"]["init"]["categories"]["optimizer state"] for each in (apollo, adamw)]
    assert state[0] < 0.6 * state[1]
    assert "another optimizer than AdamW" in apollo["approximations"][0]
    assert adamw["approximations"] == []
    code, out, _ = say("verify", *MINI)
    assert code == 0
    assert "not compared: `plan.optim` = apollo is another optimizer than AdamW" in out
