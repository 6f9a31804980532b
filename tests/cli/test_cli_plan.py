"""`planish plan` as a user meets it: at once, one JSON object where asked, with the exit code of its answer."""

import json
import resource
import subprocess
import sys

import pytest

from planish.methods import Checkpoint, Plan
from planish.train import predict

SETTINGS = ("data.context", "train.global_tokens")
BUILT_IN = ["plan", "--model.from", "smollm2-135m", "--data.context", "4096"]


@pytest.fixture
def tiny(model_folder):
    return ["plan", "--model.from", str(model_folder()), "--data.context", "64"]


def cpu_s():
    """Return the seconds of all ended child processes: those that pass on a busy machine say nothing."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_the_built_in_model_is_answered_at_once_and_without_torch():
    code = "import sys; from planish.cli.main import main; code = main(sys.argv[1:]); "
    code += "sys.exit(100 * ('torch' in sys.modules or 'transformers' in sys.modules) + code)"
    words = [*BUILT_IN, "--memory", "3GiB"]
    before = cpu_s()
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert cpu_s() - before < 2
    assert (done.returncode, done.stderr) == (0, "")
    assert "fits 3.00 GiB" in done.stdout
    chosen = Plan.from_toml(done.stdout[done.stdout.index("[plan.attention]") :])
    assert chosen == Plan(boundary=Checkpoint(keep_attention=True))


def test_the_table_names_every_phase_and_its_holders(plan):
    code, out, err = plan(*BUILT_IN)
    assert (code, err) == (0, "")
    header, *rows = out.splitlines()
    assert header.split() == ["GiB", "init", "forward", "head", "backward", "optimizer", "eval", "save", "resume"]
    cells = {row[:17].strip(): row[17:].split() for row in rows[: rows.index("")]}
    assert cells["optimizer state"] == ["1.503"] * 8
    assert cells["peak"][3] == max(cells["peak"])
    assert "held by optimizer state of AdamW 1.50 GiB, parameters of model.embed_tokens.weight 54.0 MiB" in out
    assert "with nothing bounded it would be" in out


def test_json_is_all_that_is_said(plan):
    code, out, err = plan(*BUILT_IN, "--json", "--memory", "3GiB")
    assert (code, err) == (0, "")
    tree = json.loads(out)
    assert tree["fits"]
    assert tree["exit_code"] == 0
    assert tree["phases"][tree["peak_phase"]]["peak_bytes"] == tree["peak_bytes"] < 3 * 2**30
    assert tree["plain"]["peak_bytes"] > 3 * 2**30
    assert tree["longest_context"] > 4096
    assert tree["choice"]["peak_bytes"] <= 3 * 2**30
    assert tree["plan"]["boundary"]["method"] == "checkpoint"


def test_what_does_not_fit_is_exit_3_with_what_would(plan):
    code, out, err = plan(*BUILT_IN, "--memory", "2.12GiB")
    assert code == 3
    assert "peak" in out
    smallest = err.split('the smallest budget that would do is "')[1].split('"')[0]
    longest = int(err.split("`data.context = ")[1].split("`")[0])
    assert plan(*BUILT_IN, "--memory", smallest)[0] == 0
    assert plan(*BUILT_IN, "--memory", "2.12GiB", "--data.context", longest)[0] == 0
    assert plan(*BUILT_IN, "--memory", "2.12GiB", "--data.context", longest + 1)[0] == 3
    code, out, err = plan(*BUILT_IN, "--memory", "1GiB", "--json")
    assert (code, err) == (3, "")
    assert "no context fits it" in json.loads(out)["error"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--train.step", "1"], "did you mean `steps`?"),
        (["--model.from", "nowhere"], "neither a folder nor a built-in model"),
        (["--memory", "0GiB"], "must be above zero"),
        (["--prov"], "--prov"),
        (["nowhere.toml"], "does not exist"),
    ],
)
def test_a_mistake_is_one_json_object_too(plan, words, said):
    code, out, err = plan(*BUILT_IN, "--json", *words)
    assert (code, err) == (2, "")
    tree = json.loads(out)
    assert said in tree["error"]
    assert tree["exit_code"] == 2


def test_a_fault_of_ours_and_help_are_one_json_object_too(plan, monkeypatch):
    code, out, err = plan(*BUILT_IN, "--json", "--help")
    assert (code, err) == (0, "")
    assert "usage: planish plan" in json.loads(out)["help"]

    def fail(*_args, **_named):
        raise ZeroDivisionError("by nobody")

    monkeypatch.setattr("planish.cli.plan_run.predict", fail)
    code, out, err = plan(*BUILT_IN, "--json")
    assert (code, err) == (1, "")
    assert "ZeroDivisionError: by nobody" in json.loads(out)["traceback"]


def test_a_refusal_names_the_tensors_and_settings_that_fit(plan):
    words = [*BUILT_IN, "--memory", "2.3GiB", "--train.global_tokens", "16384", "--plan.attention", "packed", "--json"]
    code, out, _ = plan(*words, "--plan.vocab", "blocked", "--plan.boundary", "checkpoint")
    tree = json.loads(out)
    assert code == 3
    assert "boundaries of model.layers.* 0.53 GiB" in tree["error"]
    context, tokens = (int(tree["error"].split(f"`{name} = ")[1].split("`")[0]) for name in SETTINGS)
    assert tokens == 4 * context
    assert tree["phases"]["backward"]["owners"][0] == ["AdamW", "optimizer state", 1614181184]


def test_a_model_that_is_not_built_in_is_fitted_once(plan, tiny, monkeypatch, tmp_path):
    monkeypatch.setattr(predict, "cache_folder", lambda: tmp_path / "cache")
    code, _, err = plan(*tiny)
    assert code == 0
    assert "fitting this model's table" in err
    assert plan(*tiny)[2] == ""


def test_the_proof_stands_beside_the_prices(plan, tiny):
    code, out, _ = plan(*tiny, "--prove")
    assert code == 0
    assert "dry run" in out
    differences = next(line for line in out.splitlines() if line.startswith("difference")).split()[1:]
    assert all(each in ("-", "+0.000%") for each in differences)
    assert len(differences) == 8


def test_a_price_that_is_disproved_is_exit_6(plan, tiny, monkeypatch):
    from planish.price import state

    monkeypatch.setattr(state, "batch_bytes", lambda tokens: 240 * tokens)
    code, out, err = plan(*tiny, "--prove", "--json")
    assert (code, err) == (6, "")
    tree = json.loads(out)
    assert "away from the dry run" in tree["error"]
    assert max(tree["proof"]["differences"].values()) > 0.005


def test_the_least_bounded_plan_that_fits_is_the_one_to_paste(plan):
    code, out, _ = plan(*BUILT_IN, "--memory", "16GiB")
    assert code == 0
    assert Plan.from_toml(out[out.index("[plan.attention]") :]) == Plan.plain()
    code, out, _ = plan(*BUILT_IN, "--memory", "16GiB", "--plan.vocab", "blocked")
    assert Plan.from_toml(out[out.index("[plan.attention]") :]).vocab == Plan().vocab


def test_a_context_beyond_the_positions_is_answered_and_said(plan):
    code, out, _ = plan(*BUILT_IN, "--data.context", "64K", "--json")
    assert code == 0
    assert "8,192 positions" in json.loads(out)["assumed"][0]


def test_settings_may_come_from_a_run_file(plan, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[model]\nfrom = "smollm2-135m"\n[data]\ntrain = "x"\ncontext = "4K"\n[memory]\nbudget = "3GiB"\n')
    assert plan("plan", path)[0] == 0
    assert plan("plan", path, "--memory", "1GiB")[0] == 3


@pytest.mark.parametrize("settings", [("mesh.vp", "plan.vocab", "ring"), ("mesh.cp",)])
def test_ranks_that_share_are_planned_for_once_they_are_counted(plan, tiny, settings):
    shared = [f"--{settings[0]}", "2", *(f"--{settings[1]}={settings[2]}" for _ in settings[2:])]
    assert plan(*tiny, *shared)[::2] == (
        2,
        f"planish: `{settings[0]}` (2) is a part of the ranks that hold shards, and none were started to be counted; "
        "set `mesh.dp`, such as `mesh.dp = 2`.\n",
    )
    words = [sys.executable, "-m", "planish", *tiny, *shared, "--mesh.dp", "2", "--memory", "1GiB"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)  # which is then a rank of two for good
    assert done.returncode == 0, done.stderr
    assert "nothing bounded" in done.stdout
