import json

import pytest

from planish.errors import UsageError
from planish.memory import book
from planish.report import record as names
from planish.report.read import read_run


def test_phases_and_categories_are_those_of_the_book():
    assert names.PHASES == book.PHASES
    assert names.CATEGORIES == book.CATEGORIES


def test_a_finished_run_is_read_whole(finished):
    run = read_run(finished.path)
    assert (run.steps_done, run.steps_planned, run.budget_bytes) == (4, 4, 3 * 2**30)
    assert run.peak is not None
    assert (run.peak.phase, run.peak.step) == ("backward", 3)
    assert list(run.phases) == ["init", "forward", "head", "backward", "optimizer", "eval"]
    assert run.phases["eval"].step == 4
    assert max(live for _, live, _ in run.timeline) == run.peak.peak_bytes == sum(run.peak.categories.values())
    assert [step for step, _ in run.series("loss")] == [1, 2, 3, 4]
    assert run.series("a_key_of_a_later_version") == []
    assert run.plan["vocab"]["method"] == "blocked"
    assert (run.predicted, run.exceeded, run.notes) == (None, None, ())


def test_what_the_ledger_writes_is_read_back(builder):
    torch = pytest.importorskip("torch")
    from planish.memory.ledger import Ledger

    ledger = Ledger()
    ledger.start_step(1)
    with ledger, ledger.phase("forward"):
        kept = torch.zeros(1024)
        ledger.adopt(kept, "boundaries", owner="model.layers.3")
        torch.zeros(4096).add(1)
    step = ledger.end_step()
    builder.settings().lines("memory.jsonl", step.to_dict())
    run = read_run(builder.path)
    assert run.peak is not None
    assert (run.peak.phase, run.peak.peak_bytes) == (step.peak_phase, step.peak_bytes)
    assert run.peak.categories == step.phases["forward"].categories
    assert [(each.owner, each.total_bytes) for each in run.peak.holders] == [
        (each.owner, each.total_bytes) for each in step.phases["forward"].owners
    ]
    assert [point[1:] for point in run.timeline] == [point[1:] for point in step.timeline]


def test_the_worst_of_each_phase_is_kept_with_its_step(builder):
    line = {"at_s": 0.1, "owners": []}

    def step(number, **peaks):
        phases = {name: {"peak_bytes": size, "categories": {"other": size}, **line} for name, size in peaks.items()}
        return {"step": number, "phases": phases}

    builder.settings().lines("memory.jsonl", step(1, forward=5, head=9), step(2, forward=7, head=9), step(2, eval=8))
    run = read_run(builder.path)
    assert {name: (peak.step, peak.peak_bytes) for name, peak in run.phases.items()} == {
        "forward": (2, 7),
        "head": (1, 9),
        "eval": (2, 8),
    }
    assert run.peak == run.phases["head"]
    assert run.timeline == ()


def test_time_begins_with_the_first_event_of_the_recording(builder):
    """A recording waits for its step, while files are opened and rows read."""
    head = {"peak_bytes": 9, "categories": {"other": 9}, "at_s": 2.5, "owners": []}
    timeline = [[2.0, 4, "forward"], [2.5, 9, "head"]]
    builder.settings().lines("memory.jsonl", {"step": 1, "phases": {"head": head}, "timeline": timeline})
    run = read_run(builder.path)
    assert run.timeline == ((0.0, 4, "forward"), (0.5, 9, "head"))
    assert run.peak.at_s == 0.5


@pytest.mark.parametrize("name", ["metrics.jsonl", "memory.jsonl"])
def test_a_torn_last_line_is_left_out_and_noted(finished, name):
    whole = read_run(finished.path)
    with (finished.path / name).open("a") as file:
        file.write('{"step": 5, "loss": 3.')
    run = read_run(finished.path)
    assert run.notes == (f"{name}: the last line is torn and was left out; the run was killed or is at work.",)
    assert (run.metrics, run.phases) == (whole.metrics, whole.phases)


def test_lines_that_are_no_record_are_left_out_and_noted(finished):
    finished.file("metrics.jsonl", '\xff\n[1]\n{"loss": 3.0}\n{"step": 1, "loss": 3.0}\n')
    finished.lines("memory.jsonl", {"step": 9, "phases": {"forward": {"peak_bytes": 10**15}}}, {"step": 10})
    run = read_run(finished.path)
    assert run.notes == (
        "memory.jsonl: a line of step 9 is not the ledger's and was left out.",
        "memory.jsonl: a line of step 10 is not the ledger's and was left out.",
        "metrics.jsonl: line 1 is no JSON object and was left out.",
        "metrics.jsonl: line 2 is no JSON object and was left out.",
    )
    assert run.series("loss") == [(1, 3.0)]
    assert run.peak is not None
    assert run.peak.step == 3


def test_numbers_that_are_not_finite_are_left_out(builder):
    builder.settings().file(
        "metrics.jsonl", '{"step": 1, "loss": NaN}\n{"step": 2, "loss": 1e400}\n{"step": 3, "loss": 2}\n'
    )
    assert read_run(builder.path).series("loss") == [(3, 2)]


def test_a_run_that_never_finished_a_step(builder):
    builder.settings().file("metrics.jsonl", "")
    run = read_run(builder.path)
    assert (run.steps_done, run.peak, run.phases) == (0, None, {})
    assert run.notes == ("memory.jsonl is missing; the run ended before its first line.",)


def test_the_prediction_is_read(finished):
    finished.prediction(backward=1.5)
    run = read_run(finished.path)
    assert run.predicted is not None
    assert list(run.predicted) == ["forward", "head", "backward", "optimizer", "eval"]
    assert run.predicted["backward"].peak_bytes == round(1.5 * run.phases["backward"].peak_bytes)


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"phases": {"forward": {}}}', '{"phases": {"forward": {"peak_bytes": null}}}']
)
def test_a_prediction_that_cannot_be_read_is_noted(finished, text):
    finished.file("plan.json", text)
    run = read_run(finished.path)
    assert run.predicted is None
    assert run.notes == ("plan.json holds no prediction that this version reads and was left out.",)


def test_the_plan_is_that_of_the_run_file_where_plan_toml_is_missing(finished):
    (finished.path / "plan.toml").unlink()
    with (finished.path / "run.toml").open("a") as file:
        file.write('[plan.attention]\nmethod = "plain"\n')
    assert read_run(finished.path).plan == {"attention": {"method": "plain"}}


def test_a_folder_that_is_no_run_folder_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(UsageError, match=r"is no run folder, it holds no run\.toml; name the `save\.dir`"):
            read_run(path)


@pytest.mark.parametrize("text", [b"model = ", b"\xff\xfe"])
def test_a_broken_run_file_is_refused(builder, text):
    builder.settings()
    (builder.path / "run.toml").write_bytes(text)
    with pytest.raises(UsageError, match=r"run\.toml is not the TOML that a run writes"):
        read_run(builder.path)


def test_a_budget_without_a_unit_is_refused(builder):
    builder.settings(budget="3")
    with pytest.raises(UsageError, match=r"run\.toml: `memory\.budget` needs a unit"):
        read_run(builder.path)


def test_sections_of_the_wrong_kind_are_no_settings(builder):
    builder.settings().file("run.toml", "model = 3\nmemory = 4\n").file("plan.toml", "plan = 5\n")
    run = read_run(builder.path)
    assert (run.setting("model", "from"), run.budget_bytes, run.plan) == (None, None, {})


def test_a_key_of_another_version_changes_nothing(finished):
    lines = [
        json.loads(line) | {"later": {"x": 1}} for line in (finished.path / "memory.jsonl").read_text().splitlines()
    ]
    before = read_run(finished.path)
    (finished.path / "memory.jsonl").unlink()
    finished.lines("memory.jsonl", *lines)
    assert read_run(finished.path).phases == before.phases
