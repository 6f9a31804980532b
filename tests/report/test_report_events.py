import json
import os
import sys

import pytest

from planish.cli.main import main
from planish.report.events import write_events
from planish.report.read import read_run


def test_every_number_of_the_metrics_becomes_an_event(finished):
    pytest.importorskip("tensorboard", reason="the extra planish[tensorboard] is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    finished.lines("metrics.jsonl", {"step": 5, "loss": float("nan"), "grad_norm": 1.0})
    os.utime(finished.path / "metrics.jsonl", (1e9, 1e9))
    run = read_run(finished.path)
    first = write_events(run, finished.path / "tb").read_bytes()
    path = write_events(run, finished.path / "tb")
    assert path.read_bytes() == first
    assert list(path.parent.iterdir()) == [path]

    events = EventAccumulator(str(path.parent), size_guidance={"scalars": 0})
    events.Reload()
    assert set(events.Tags()["scalars"]) == {
        "loss", "grad_norm", "lr", "tokens", "valid_tokens", "step_s", "tokens_per_s", "memory/peak_bytes",
        "memory/vm_hwm_bytes", "eval/loss", "eval/bits_per_byte", "eval/num_valid",
    }  # fmt: skip
    written = [(each.step, each.value) for each in events.Scalars("loss")]
    assert written == [(step, pytest.approx(loss, rel=1e-6)) for step, loss in run.series("loss")]
    seconds = [each.wall_time for each in events.Scalars("step_s")]
    assert seconds[-1] == pytest.approx(1e9)
    assert seconds[1] - seconds[0] == pytest.approx(run.series("step_s")[1][1], abs=1e-3)


def test_the_verb_names_the_event_file(finished, capsys):
    pytest.importorskip("tensorboard", reason="the extra planish[tensorboard] is not installed")
    assert main(["report", str(finished.path), "--json", "--tensorboard"]) == 0
    events = json.loads(capsys.readouterr().out)["tensorboard"]
    assert events == str(finished.path / "tb" / "events.out.tfevents.planish")


def test_without_the_package_the_extra_is_named(finished, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    for name in [name for name in sys.modules if name.startswith("tensorboard.")]:
        monkeypatch.delitem(sys.modules, name)
    assert main(["report", str(finished.path), "--tensorboard"]) == 2
    assert "pip install 'planish[tensorboard]'" in capsys.readouterr().err


def test_a_disk_that_refuses_ends_with_exit_code_5(finished, capsys):
    pytest.importorskip("tensorboard", reason="the extra planish[tensorboard] is not installed")
    finished.file("tb", "a file, not a folder")
    assert main(["report", str(finished.path), "--tensorboard"]) == 5
    assert "events.out.tfevents.planish failed: File exists" in capsys.readouterr().err
