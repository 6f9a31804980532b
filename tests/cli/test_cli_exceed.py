"""What `memory.on_exceed` does, at launch and while running, and what is told of a run that ends by its memory."""

import json
import re
import subprocess
import sys
import tomllib

import pytest

from planish.train import fit, session
from planish.train.predict import predict

BUDGET = ("--memory.budget", "6MiB")
"""Enough for tiles of the head that are finer than usual, and not for usual ones."""


@pytest.fixture
def train(on_tiny_model):
    """Return (*flags) -> (exit code, stdout, stderr) of a run whose head holds most."""
    run = on_tiny_model("--model.dtype", "fp32", "--train.steps", "4", "--data.context", "2048")

    def begin(*flags):
        return run("train", "--model.extend_positions", "--save.every", 1, "--save.keep", 9, *flags)

    return begin


@pytest.fixture
def unpriced(monkeypatch):
    """Begin runs that do not fit, as those do whose step has no price."""
    monkeypatch.setattr(session, "check_fit", lambda *_: None)


def losses(folder):
    return [float.hex(json.loads(line)["loss"]) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def peaks(folder):
    """Return the peak of each step."""
    found = {}
    for line in map(json.loads, (folder / "memory.jsonl").read_text().splitlines()):
        found[line["step"]] = max(found.get(line["step"], 0), line["peak_bytes"])
    return found


def tile_bytes(path):
    return tomllib.loads(path.read_text())["plan"]["vocab"]["tile_bytes"]


def test_a_plan_that_does_not_fit_begins_with_finer_tiles(train, tmp_path):
    run = tmp_path / "run"
    assert train()[0] == 0
    coarse = [float.fromhex(each) for each in losses(run)]
    code, _, error = train("--overwrite", *BUDGET)
    assert (code, tile_bytes(run / "plan.toml")) == (3, "60MiB")
    assert "the smallest budget" in error
    code, said, _ = train("--overwrite", *BUDGET, "--memory.on-exceed", "adapt")
    assert code == 0
    told = re.search(r'finer tiles fit what would need .*: `plan.vocab.tile_bytes = "(\d+KiB)"`', said)
    assert tile_bytes(run / "plan.toml") == told[1]
    assert max(peaks(run).values()) <= 6 * 2**20
    assert [float.fromhex(each) for each in losses(run)] == pytest.approx(coarse, rel=1e-5)


def test_tiles_are_made_finer_between_steps_and_the_run_goes_on_exactly(train, tmp_path, unpriced):
    """It is, bit for bit, the run that is stopped after that step and resumed with the finer plan."""
    run = tmp_path / "run"
    code, said, _ = train(*BUDGET, "--memory.on_exceed", "adapt")
    assert code == 0
    assert said.count("the budget was exceeded; from here on `plan.vocab.tile_bytes = ") == 1
    adapted, finer, of_step = losses(run), tile_bytes(run / "run.toml"), peaks(run)
    assert of_step[1] > 6 * 2**20 >= max(of_step[step] for step in (2, 3, 4))
    assert finer == tile_bytes(run / "plan.toml") != "60MiB"
    assert not (run / "budget-exceeded.txt").exists()
    assert train("--overwrite", "--train.steps", 1)[0] == 0
    assert train("--resume", "--plan.vocab.tile_bytes", finer)[0] == 0
    assert losses(run) == adapted


def test_where_no_tile_helps_it_stops_with_what_would_have_fitted(train, tmp_path, unpriced):
    run = tmp_path / "run"
    small = ("--memory.budget", "5MiB")
    code, _, error = train(*small, "--memory.on_exceed", "adapt")
    assert code == 4
    assert "no finer tiles that have a price would bound it" in error
    assert "Step 1 is saved" in error
    assert error.count("\n") == 1
    text = (run / "budget-exceeded.txt").read_text()
    assert "bytes alive" in text
    context = re.search(r"\n  data.context = (\d+)\n", text)[1]
    assert train("--overwrite", *small, "--data.context", context)[0] == 0


def test_a_strict_run_that_breaks_its_budget_names_budget_and_tiles_that_would_have_done(train, tmp_path, unpriced):
    code, _, error = train(*BUDGET)
    assert code == 4
    assert error.startswith("planish: head: a (")
    assert error.count("\n") == 1
    text = (tmp_path / "run" / "budget-exceeded.txt").read_text()
    assert re.search(r"head tiles +\d", text)
    budget = re.search(r'memory.budget = "(\d+KiB)"', text)[1]
    tile = re.search(r'finer tiles, .*plan.vocab.tile_bytes = "(\d+KiB)"', text)[1]
    assert train("--overwrite", "--memory.budget", budget)[0] == 0
    assert train("--overwrite", *BUDGET, "--plan.vocab.tile_bytes", tile)[0] == 0


def test_a_warning_is_said_once_and_the_run_goes_on(train, tmp_path):
    code, said, error = train(*BUDGET, "--memory.on_exceed", "warn")
    assert code == 0
    assert "the smallest budget that would do" in said
    assert error.count("The run goes on") == error.count("\n") == 1
    assert "bytes alive" in (tmp_path / "run" / "budget-exceeded.txt").read_text()
    assert len(losses(tmp_path / "run")) == 4


def test_ranks_make_tiles_finer_together(torchrun, model_folder, text_file, tmp_path, monkeypatch):
    """Rank 0 had fitted the table before they met; its price is taken to have been too low."""
    monkeypatch.setattr(fit, "check_fit", lambda run, say, *_: predict(run, say) and None)
    words = ["train", "--model.from", model_folder(), "--data.train", text_file, "--data.context", 2048]
    words += ["--model.dtype", "fp32", "--model.extend_positions", "--train.steps", 2, "--save.dir", tmp_path / "run"]
    ended = torchrun(*words, "--mesh.dp", 2, *BUDGET, "--memory.on_exceed", "adapt", ranks=2)
    assert [(code, error) for code, _, error in ended] == [(0, ""), (0, "")]
    assert "the budget was exceeded; from here on `plan.vocab.tile_bytes = " in ended[0][1]
    of_step = peaks(tmp_path / "run")
    assert of_step[1] > 6 * 2**20 >= of_step[2]


def test_a_way_without_a_budget_is_refused(train):
    code, _, error = train("--memory.on_exceed", "adapt")
    assert code == 2
    assert "has no effect without `memory.budget`" in error


def test_a_machine_without_memory_ends_a_run_as_a_budget_does(model_folder, text_file, tmp_path):
    """Exit 4, one sentence, and the table in the folder; the process may grow by 64 MiB."""
    words = ["train", "--model.from", str(model_folder()), "--data.train", str(text_file), "--model.dtype", "fp32"]
    words += ["--data.context", "32768", "--model.extend_positions", "--plan.vocab", "plain"]
    program = f"""
import resource, sys, torch, transformers
from planish.cli.main import main
from planish.train import fit, session
from planish.train.predict import predict
grown = session.train
def train(*args, **options):
    now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + 2**26, now + 2**26))
    grown(*args, **options)
session.train = train
sys.exit(main({[*words, "--save.dir", str(tmp_path / "run")]!r}))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 4, done.stderr
    assert "this machine, with " in done.stderr
    assert done.stderr.count("\n") == 1
    text = (tmp_path / "run" / "budget-exceeded.txt").read_text()
    assert "bytes alive" in text
    assert "this plan is priced at" in text
