"""`planish train` and `planish plan` over ranks: what is refused, by which rank, with which exit code and sentence."""

import dataclasses
import json
import os
import tomllib

import pytest

from planish.errors import UsageError
from planish.methods import Pipeline
from planish.plan.estimate import Estimate, PhasePrice
from planish.train import fit, job
from planish.train.predict import Prediction
from planish.train.turns import Turns


@pytest.fixture
def words(model_folder, text_file, tmp_path):
    """Return (verb, *flags) -> the words of a run over ranks in tmp_path / "run"."""
    model = model_folder(num_hidden_layers=4)

    def make(verb, *flags):
        settings = ["--model.from", model, "--data.train", text_file, "--data.context", 32, "--model.dtype", "fp32"]
        return [verb, *settings, "--train.steps", 3, "--save.dir", tmp_path / "run", "--mesh.timeout_s", 60, *flags]

    return make


@pytest.mark.parametrize(
    "mesh", [("--mesh.dp", 2), ("--mesh.replicate", 2), ("--mesh.pp", 2, "--plan.pipeline", "1f1b")], ids=str
)
def test_what_does_not_fit_is_refused_by_every_rank_as_plan_says(torchrun, words, tmp_path, mesh):
    [(code, out, _)] = torchrun(*words("plan", *mesh, "--json"), ranks=1)
    tree = json.loads(out)
    peak_bytes = tree["peak_bytes"]
    assert (code, tree["ranks"]) == (0, 2)
    refused = torchrun(*words("train", *mesh, "--memory", f"{peak_bytes - 1}B"), ranks=2)
    assert [code for code, *_ in refused] == [3, 3]
    sentences = [said.removeprefix("planish: ") for *_, said in refused]
    assert "the smallest budget that would do is" in sentences[0]
    assert sentences[1] == f"rank 0 stopped: {sentences[0]}"
    assert not (tmp_path / "run").exists()
    accepted = torchrun(*words("train", *mesh, "--memory", f"{peak_bytes + 2**16}B"), ranks=2)
    assert [(code, said) for code, _, said in accepted] == [(0, ""), (0, "")]
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert max(line["memory/peak_bytes"] for line in metrics) <= peak_bytes + 2**16
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["peak_bytes"] == peak_bytes


def test_plan_names_the_ranks(torchrun, words):
    [(code, said, _)] = torchrun(*words("plan", "--mesh.dp", 4, "--memory", "300MiB"), ranks=1)
    assert code == 0
    assert "each of 4 ranks (replicate 1 x dp 4)" in said


def test_plan_names_what_each_stage_holds(torchrun, words):
    [(code, said, _)] = torchrun(*words("plan", "--mesh.pp", 2, "--memory", "300MiB", "--prove"), ranks=1)
    assert code == 0
    assert "each phase is that of the stage that holds most" in said
    assert "rank 0 " in said
    assert "on rank " in said


def test_every_rank_takes_the_schedule_that_was_chosen(torchrun, words, tmp_path, monkeypatch):
    small = Estimate(phases={"forward": PhasePrice(peak_bytes=1, categories={}, owners=(), where="")})

    def choose(run, _):
        run = dataclasses.replace(run, plan=dataclasses.replace(run.plan, pipeline=Pipeline(method="v-half")))
        return Turns(
            run=run, prediction=Prediction(estimate=small, table=None, plan=run.plan), reasons=("because it fits",)
        )

    monkeypatch.setattr(fit, "take_turns", choose)
    ended = torchrun(*words("train", "--mesh.pp", 2, "--memory", "300MiB"), ranks=2)
    assert [code for code, *_ in ended] == [0, 0]
    assert "because it fits" in ended[0][1]
    assert tomllib.loads((tmp_path / "run" / "plan.toml").read_text())["plan"]["pipeline"]["method"] == "v-half"
    passes = json.loads((tmp_path / "run" / "pipeline.json").read_text())["passes"]
    assert {word for word, *_ in passes} >= {"0I0", "1I0", "2W0", "3W0"}
    [(code, out, _)] = torchrun("plan", "--pipeline", tmp_path / "run", ranks=1)
    assert (code, out.splitlines()[0]) == (
        0,
        "v-half, head vocab-2: 2 ranks, 4 layers, 1 microbatch; times in seconds",
    )


def test_a_budget_broken_while_running_ends_every_rank_with_4_and_the_table(torchrun, words, tmp_path, monkeypatch):
    monkeypatch.setattr(fit, "check_fit", lambda *_: None)
    ended = torchrun(*words("train", "--mesh.dp", 2, "--memory", "500KiB"), ranks=2)
    assert [code for code, *_ in ended] == [4, 4]
    assert all("over the budget of 0.5 MiB" in said for *_, said in ended)
    tables = sorted((tmp_path / "run").glob("budget-exceeded*.txt"))
    assert all("bytes alive" in table.read_text() for table in tables)
    assert all(f"The whole table is in {table}" in "".join(said for *_, said in ended) for table in tables)
    assert [code for code, *_ in torchrun(*words("train", "--mesh.dp", 2, "--overwrite"), ranks=2)] == [0, 0]
    assert not list((tmp_path / "run").glob("budget-exceeded*.txt"))


def test_a_fault_of_one_rank_ends_all_of_them(torchrun, words, tmp_path, monkeypatch):
    def fails(*_args, **_options):
        if os.environ["RANK"] == "1":  # noqa: TID251 - as torchrun sets it
            raise UsageError("this rank has no data.")

    monkeypatch.setattr(job, "open_run_feed", fails)
    (code, _, said), (other_code, _, other_said) = torchrun(*words("train", "--mesh.dp", 2), ranks=2)
    assert (code, other_code) == (2, 2)
    assert said.startswith("planish: rank 1 stopped: this rank has no data.")
    assert other_said == "planish: this rank has no data.\n"
    assert not (tmp_path / "run").exists()
