"""The small verbs: help without torch, generate, eval, data stats, doctor, demo's own arithmetic."""

import json
import math
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from planish.cli import demo, demo_dispatch, demo_puzzle
from planish.cli.main import VERBS, main
from planish.errors import VerificationFailed
from planish.runfile import load


def test_help_names_every_verb_and_imports_no_torch():
    code = "import sys; from planish.cli.main import main; main(['--help']); print('torch' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert all(f"  {verb} " in said for verb in VERBS)
    assert said.endswith("False\n")


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself(verb, capsys):
    assert main([verb, "--help"]) == 0
    assert f"usage: planish {verb}" in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["train", "plan", "verify"])
def test_help_lists_every_setting_with_its_default(verb, capsys):
    assert main([verb, "--help"]) == 0
    said = capsys.readouterr().out
    for name in ("--model.from", "--data.context", "--train.global_tokens", "--memory X", "--save.keep"):
        assert name in said
    assert "Peak learning rate. (default: 0.0001)" in said
    assert "--plan.vocab METHOD`. (default: blocked)" in said
    assert 'inside one product, 64 MiB. (default: "60MiB")' in said


@pytest.mark.parametrize("verb", ["generate", "eval", "report", "data"])
def test_what_is_missing_is_named(verb, capsys):
    assert main([verb]) == 2
    said = capsys.readouterr().err
    assert "needs" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(("target", "code"), [("/dev/full", 5), ("/dev/null", 0)])
def test_output_that_nobody_takes_is_one_sentence(target, code):
    with open(target, "w") as file:  # noqa: PTH123
        done = subprocess.run(
            [sys.executable, "-m", "planish", "--help"], stdout=file, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == code
    assert done.stderr.count("\n") == int(code > 0)


def test_a_closed_output_is_one_sentence():
    command = f"{sys.executable} -m planish --help >&-"
    done = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (5, 1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], ""),
        (["trian"], "did you mean `train`?"),
        (["demo", "vocabulary"], "did you mean `vocab`?"),
        (["eval", "x", "y", "--memory", "4XB"], "unknown unit 'XB'"),
        (["data", "stats", "y", "--context", "x"], "`--context` must be a whole number"),
        (["data", "stats", "nowhere.txt"], "nowhere.txt"),
        (["generate", "nowhere", "--prompt", "x"], "neither a folder nor a built-in model"),
    ],
)
def test_usage_errors_end_with_2(words, said, capsys):
    assert main(words) == 2
    assert said in capsys.readouterr().err


def test_generate_continues_as_transformers_does(model_folder, tiny_tokenizer, capsys):
    folder = model_folder()
    assert main(["generate", str(folder), "--prompt", "The lady", "--max-tokens", "8", "--dtype", "fp32"]) == 0
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = tiny_tokenizer("The lady", return_tensors="pt").input_ids
    expected = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
    assert capsys.readouterr().out == tiny_tokenizer.decode(expected, skip_special_tokens=True) + "\n"


@pytest.mark.parametrize("flags", [
    ["--max-tokens", "0"], ["--temperature", "-1"], ["--temperature", "nan"], ["--temperature", "inf"],
    ["--seed", "99999999999999999999"], ["--seed", "x"], ["--sed", "1"], ["--chat"], ["--prompt", ""],
    ["--dtype", "fp8"],
])  # fmt: skip
def test_generate_refuses(model_folder, flags, capsys):
    assert main(["generate", str(model_folder()), "--prompt", "x", *flags]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_model_that_answers_with_nan_is_said_so(tmp_path, tiny_model, tiny_tokenizer, capsys):
    model = tiny_model()
    torch.nn.init.constant_(model.model.norm.weight, math.nan)
    model.save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    assert main(["generate", str(tmp_path), "--prompt", "x"]) == 6
    assert "answers with NaN" in capsys.readouterr().err


def test_eval_is_the_mean_loss_and_its_bits_per_byte(model_folder, tiny_tokenizer, tmp_path, capsys):
    folder, text = model_folder(), "It was a fine morning, and nobody had come."
    (tmp_path / "held.txt").write_text(text)
    words = ["eval", str(folder), str(tmp_path / "held.txt"), "--context", "200", "--dtype", "fp32", "--json"]
    assert main(words) == 0
    report = json.loads(capsys.readouterr().out)
    ids = torch.tensor([[*tiny_tokenizer(text).input_ids, tiny_tokenizer.eos_token_id]])
    model = AutoModelForCausalLM.from_pretrained(folder)
    total = model(input_ids=ids, labels=ids).loss.item() * (ids.shape[1] - 1)
    assert report["num_valid"] == ids.shape[1] - 1
    assert report["loss"] == pytest.approx(total / report["num_valid"], rel=1e-5)
    assert report["bits_per_byte"] == pytest.approx(total / math.log(2) / len(text), rel=0.05)
    assert main([*words, "--memory", "8KiB"]) == 4


def test_data_stats_counts(model_folder, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("one two three")
    (tmp_path / "b.txt").write_text("")
    assert main(["data", "stats", str(tmp_path), "--tokenizer", str(model_folder()), "--context", "4"]) == 0
    said = capsys.readouterr().out
    assert "1 of 13 B together, 1 empty ones left out" in said
    assert "packed; 1 documents are longer" in said


def test_doctor_says_what_is_here(capsys):
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert torch.__version__ in said
    assert "glibc" in said


def test_demo_fails_when_losses_differ():
    outcome = demo.Outcome(losses=(1.0,), peak_bytes=2, peak_phase="backward", seconds=1.0)
    other = demo.Outcome(losses=(1.01,), peak_bytes=1, peak_phase="backward", seconds=1.0)
    demo._compare(outcome, outcome)
    with pytest.raises(VerificationFailed, match=r"losses differ by 1\.0e-02"):
        demo._compare(outcome, other)


def test_demo_shows_every_method_for_boundaries_with_the_same_bits(model_folder, text_file, monkeypatch, capsys):
    model = model_folder(num_hidden_layers=4)

    def tiny(folder, *, context, plan, budget_bytes):
        words = [("model.from", str(model)), ("data.train", str(text_file)), ("data.context", 128), ("train.steps", 2)]
        return replace(load(None, words), plan=plan)

    monkeypatch.setattr(demo, "settings", tiny)
    demo._boundaries()
    shown = capsys.readouterr().out
    ways = ["plain", "checkpoint", "checkpoint, attention kept", "offload, attention kept"]
    assert re.findall("plan.boundary = (.*)", shown) == ways
    held = re.findall("(.*) held from forward to backward", shown)
    assert len(held) == 3
    assert "losses differ by 0.0e+00" in shown


def test_demo_says_what_skew_does_over_ranks(capsys):
    demo_dispatch._over_ranks()
    shown = {line.split()[0]: line.split()[1:3] for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert shown["balanced"] == ["1.00", "1.00"]
    assert shown["95/16"] == ["7.60", "1.01"]


@pytest.mark.slow
def test_demo_shows_experts(capsys):
    assert main(["demo", "dispatch"]) == 0
    assert "% less, whatever the router does" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("peak", ["attention", "vocab", "boundary"])
def test_demo_shows_one_peak(peak, capsys):
    assert main(["demo", peak]) == 0
    assert "less; losses differ by" in capsys.readouterr().out


def test_demo_shows_a_child_beside_the_best_baseline(model_folder, tmp_path, monkeypatch, capsys):
    from planish.compress.order import Target

    model, asked = model_folder("llama", num_hidden_layers=3, initializer_range=0.2), demo_puzzle.order_of

    def small(folder):
        size = Target(kind="parameters", share=0.8)
        return replace(asked(folder), model=str(model), targets=(size,), rows=(8, 4, 8), context=32, rounds=2)

    monkeypatch.setattr(demo_puzzle, "order_of", small)
    code = main(["demo", "puzzle", "--dir", str(tmp_path / "run")])
    said = capsys.readouterr().out
    assert code in (0, 6)
    assert re.search(r"^   child +\S+%", said, re.MULTILINE)
    lost, theirs = re.search(r"it loses (\S+) nats where the best of \d baselines loses (\S+)", said).groups()
    assert (code == 0) == (float(lost) < float(theirs))
