import json
import os
import subprocess
import sys

import pytest

from planish.cli.main import main


def test_the_terminal_gets_plain_text(finished, capsys):
    finished.prediction()
    assert main(["report", str(finished.path)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "\x1b" not in out
    lines = out.splitlines()
    assert lines[0] == "All 4 steps are done, inside the budget of 3.00 GiB"
    assert "Memory peaked at 2.16 GiB in backward of step 3, 72% of the budget" in lines
    assert "Predicted and measured are equal to the byte in all 5 phases" in lines
    cells = {line.split("  ")[0]: line.split()[-6:] for line in lines}
    assert cells["measured"] == ["1.754", "1.959", "2.010", "2.163", "2.031", "1.890"]
    assert cells["predicted"] == ["-", "1.959", "2.010", "2.163", "2.031", "1.890"]
    assert cells["in step"] == ["0", "1", "1", "3", "1", "4"]
    holder = next(line for line in lines if line.startswith("model.layers.*.mlp.down_proj.weight"))
    assert holder.split()[-4:] == ["bfloat16", "67.5", "MiB", "3.0%"]
    assert lines[-1] == str(finished.path / "report.html")
    assert (finished.path / "report.html").read_text().startswith("<!doctype html>")


def test_json_is_one_object_and_nothing_else(finished, capsys):
    finished.prediction().file("budget-exceeded.txt", "head: too much.\n")
    assert main(["report", str(finished.path), "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.count("\n") == 1
    tree = json.loads(out)
    assert tree["outcome"] == "The budget stopped the run after 4 of 4 steps"
    assert tree["stopped_by_budget"] == "head: too much."
    assert tree["steps"] == {"done": 4, "planned": 4}
    assert tree["peak"]["phase"] == "backward"
    assert (
        tree["peak"]["peak_bytes"]
        == tree["phases"]["backward"]["peak_bytes"]
        == sum(tree["peak"]["categories"].values())
    )
    assert tree["peak"]["owners"][0]["category"] == "optimizer state"
    assert tree["predicted"]["eval"]["peak_bytes"] == tree["phases"]["eval"]["peak_bytes"]
    assert tree["loss"]["first_step"] == 1
    assert tree["loss"]["last_step"] == tree["eval_loss"]["last_step"] == 4
    assert tree["plan"]["boundary"] == {"method": "checkpoint"}
    assert tree["settings"]["data"]["context"] == 4096
    assert tree["notes"] == []


def test_json_of_a_run_that_recorded_nothing(builder, capsys):
    builder.settings()
    assert main(["report", str(builder.path), "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["outcome"] == "No step was finished"
    for key in ("peak", "predicted", "loss", "eval_loss", "median_tokens_per_s", "vm_hwm_bytes", "stopped_by_budget"):
        assert tree[key] is None
    assert len(tree["notes"]) == 2


def test_out_names_another_file(finished, tmp_path, capsys):
    assert main(["report", str(finished.path), "--out", str(tmp_path / "here.html")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "here.html")
    assert (tmp_path / "here.html").is_file()
    assert not (finished.path / "report.html").exists()


def test_a_folder_that_is_no_run_folder_ends_with_exit_code_2(tmp_path, capsys):
    assert main(["report", str(tmp_path), "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"planish: {tmp_path} is no run folder, it holds no run.toml; name the `save.dir` of a run.\n"
    assert list(tmp_path.iterdir()) == []


def test_a_page_that_cannot_be_written_ends_with_exit_code_5(finished, capsys):
    (finished.path / "report.html").mkdir()
    assert main(["report", str(finished.path)]) == 5
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"planish: writing the report {finished.path}/report.html failed: Is a directory;")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
def test_what_may_not_be_read_or_written_is_said(finished, capsys):
    finished.path.chmod(0o500)
    assert main(["report", str(finished.path)]) == 5
    finished.path.chmod(0o700)
    (finished.path / "memory.jsonl").chmod(0)
    assert main(["report", str(finished.path)]) == 2
    assert "memory.jsonl cannot be read: Permission denied" in capsys.readouterr().err


def test_torch_is_not_imported(finished):
    code = (
        "import sys; from planish.cli.main import main; assert main(['report', sys.argv[1]]) == 0;"
        "assert not {'torch', 'transformers', 'numpy', 'tensorboard'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(finished.path)], capture_output=True, check=True)
