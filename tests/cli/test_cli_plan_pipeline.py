"""`planish plan --pipeline` as a user meets it: at once, as text, picture and JSON, and exit 2 for what cannot be."""

import json
import re
import resource
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

from planish.pipeline.schedule import Schedule
from planish.pipeline.validate import validate

BUILT_IN = ["plan", "--pipeline", "--model.from", "smollm2-135m", "--data.context", "4096"]
FOUR = [*BUILT_IN, "--mesh.pp", "4", "--train.grad-accum", "12"]


def in_a_process(*words):
    """Run the words in a process of their own; exit code 100 and more: with torch."""
    code = "import sys; from planish.cli.main import main; code = main(sys.argv[1:]); "
    code += "sys.exit(100 * ('torch' in sys.modules or 'transformers' in sys.modules) + code)"
    return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)


def test_the_ranks_of_a_pipeline_are_priced_without_torch():
    done = in_a_process(*(word for word in FOUR if word != "--pipeline"), "--memory", "900MiB", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    tree = json.loads(done.stdout)
    assert tree["source"] == "table"
    assert len(tree["peak_bytes_by_rank"]) == 4
    assert max(tree["peak_bytes_by_rank"]) == tree["peak_bytes"]
    assert tree["assumed"][0].startswith("pipeline = 1f1b: ")


def test_it_answers_at_once_and_without_torch():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = in_a_process(*FOUR)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(
        "1f1b, head vocab-2: 4 ranks, 30 layers, 12 microbatches; times in forwards of a layer"
    )
    assert "v-half       vocab-1" in done.stdout
    assert done.stdout.splitlines()[-4].startswith("rank 0 ")


def test_json_is_all_that_is_said(plan):
    code, out, err = plan(*FOUR, "--plan.pipeline", "v-half", "--plan.pipeline.head", "vocab-1", "--json")
    assert (code, err) == (0, "")
    tree = json.loads(out)
    assert (tree["schedule"], tree["head"], tree["exit_code"]) == ("v-half", "vocab-1", 0)
    assert tree["in_flight"] == [10] * 4  # (p + 2) / 2 and 2 of two half-stages
    assert sum(map(sum, tree["layers"])) == 30
    assert ("1f1b", "vocab-2") in {(each["schedule"], each["head"]) for each in tree["others"]}
    validate(Schedule.from_text(tree["actions"]))


def test_settings_may_come_from_a_run_file_and_times_be_measured(plan, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        '[model]\nfrom = "smollm2-135m"\n[data]\ntrain = "x"\ncontext = "4K"\n'
        "[train]\ngrad_accum = 12\n[mesh]\npp = 4\n"
        '[plan.boundary]\nmethod = "plain"\n[plan.pipeline]\nmethod = "1f1b"\nhead = "last-stage"\n'
        "[plan.pipeline.times]\nlayer_s = 0.5\nhead_s = 0.0001\ntransfer_s = 0.0001\n"
    )
    tree = json.loads(plan("plan", path, "--pipeline", "--json")[1])
    # m + p - 1 times the longest stage's forward and backward, less what shorter ones save of the fill.
    assert tree["unit"] == "seconds"
    assert tree["layers"] == [[7], [8], [8], [7]]
    assert 15 * 3 * 8 * 0.5 * 0.97 < tree["step"] < 15 * 3 * 8 * 0.5
    recomputed = json.loads(plan("plan", path, "--pipeline", "--json", "--plan.boundary", "checkpoint")[1])
    assert recomputed["step"] == pytest.approx(tree["step"] * 4 / 3, rel=1e-3)


def test_the_picture_and_the_actions_are_written(plan, tmp_path):
    picture, actions = tmp_path / "schedule.svg", tmp_path / "schedule.txt"
    code, out, _ = plan(*FOUR, "--svg", picture, "--actions", actions)
    assert code == 0
    assert ET.parse(picture).getroot().tag.endswith("svg")
    validate(Schedule.from_text(actions.read_text()))
    again = plan(*FOUR, "--plan.pipeline.file", actions)
    assert again == (0, out, "")
    code, _, err = plan(*FOUR, "--svg", tmp_path / "nowhere" / "x.svg")
    assert code == 2
    assert "x.svg cannot be written" in err


def test_a_schedule_edited_into_a_deadlock_is_refused_with_the_steps_and_the_ranks(plan, tmp_path):
    actions = tmp_path / "schedule.txt"
    plan(*FOUR, "--actions", actions)
    good = actions.read_text()
    # Rank 1 waits for the gradient of microbatch 0 before it sends on what that gradient will come from.
    actions.write_text(good.replace("1SEND_F0 ", "").replace(" 1RECV_B0 ", " 1RECV_B0 1SEND_F0 "))
    assert actions.read_text() != good
    code, _, err = plan(*FOUR, "--plan.pipeline.file", actions)
    assert code == 2
    assert "the schedule deadlocks under eager sends" in err
    assert re.search(r"rank \d stands at step \d+ \(\d\w+\) and waits for rank \d; rank \d stands at step", err)
    code, out, err = plan(*FOUR, "--plan.pipeline.file", actions, "--json")
    assert (code, err) == (2, "")
    assert "deadlocks" in json.loads(out)["error"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--mesh.pp", "31"], "`mesh.pp` (31) takes 31 layers, 1 a rank by 1f1b, and the model has 30; set"),
        (
            ["--mesh.pp", "16", "--plan.pipeline.method", "v-half"],
            "32 layers, 2 a rank by v-half, and the model has 30; set `mesh.pp` to 15 or less.",
        ),
        (["--train.global_tokens", "32768"], "must be a multiple of `data.context` x `train.grad_accum`"),
        (["--mesh.pp", "0"], "`mesh.pp` must be a positive whole number"),
        (["--mesh.pq", "2"], "unknown key `mesh.pq`"),
        (["--plan.pipeline.method", "2f2b"], "`plan.pipeline.method` must be one of"),
        (["--plan.pipeline.head", "first"], "`plan.pipeline.head` must be one of"),
        (["--plan.pipeline.chunks", "2"], "`plan.pipeline.chunks` has no effect"),
        (["--plan.pipeline.rank", "2"], "unknown key `plan.pipeline.rank`"),
        (["--plan.pipeline.times.layer", "2"], "unknown key `plan.pipeline.times.layer`; did you mean `layer_s`?"),
        (["--plan.pipeline.times.layer_s", "0"], "`plan.pipeline.times.layer_s` must be above 0, got 0.0."),
        (["--plan.pipeline.times.head_s", "2"], "`plan.pipeline.times.layer_s` must be given"),
        (["--plan.pipeline.file", "nowhere.txt"], "`plan.pipeline.file` nowhere.txt cannot be read"),
        (["--plan.pipeline.file", "x", "--plan.pipeline.head", "naive"], "unknown key `plan.pipeline.head`"),
        (["--plan.pipeline", "3"], "`plan.pipeline` must be a table, got 3"),
        (["--plan", "3"], "--plan"),
        (["--plan.pipeline.times", "3"], "`plan.pipeline.times` must be a table, got 3"),
        (["--plan.pipeline", "zero-bubble"], "`plan.pipeline.method` must be one of"),
        (["--prove"], "leave it or `--pipeline` out"),
        (["--model.from", "nowhere"], "neither a folder nor a built-in model"),
    ],
)
def test_a_mistake_is_exit_2_and_one_sentence(plan, words, said):
    code, out, err = plan(*FOUR, *words)
    assert (code, out) == (2, "")
    assert said in err
    code, out, err = plan(*FOUR, *words, "--json")
    assert (code, err) == (2, "")
    assert said in json.loads(out)["error"]


def test_a_pipeline_needs_its_ranks_and_a_picture_its_pipeline(plan):
    code, _, err = plan(*BUILT_IN)
    assert code == 2
    assert "`mesh.pp` must be given" in err
    code, _, err = plan("plan", "--model.from", "smollm2-135m", "--svg", "x.svg")
    assert code == 2
    assert "add `--pipeline`" in err


def test_a_schedule_for_other_ranks_is_refused(plan, tmp_path):
    actions = tmp_path / "schedule.txt"
    plan(*FOUR, "--actions", actions)
    for words, said in (
        (["--mesh.pp", "3"], "`mesh.pp` (3) must be the 4 of the schedule."),
        (["--train.grad-accum", "11"], "`train.grad_accum` (11) must be the 12 of the schedule."),
    ):
        code, _, err = plan(*FOUR, "--plan.pipeline.file", actions, *words)
        assert code == 2
        assert said in err
