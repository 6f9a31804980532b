"""`planish train` as a user meets it: what it writes, what it refuses, with which exit code and sentence."""

import errno
import io
import json
import math
import os
import shutil
import subprocess
import sys
import time

import pytest
import torch
from transformers import AutoModelForCausalLM

from planish.cli import progress
from planish.cli.main import main
from planish.cli.progress import RunView
from planish.train import session
from planish.train.predict import predict


@pytest.fixture
def train(model_folder, text_file, tmp_path, capsys):
    """Return (*flags, family) -> (exit code, what was said on stderr); the run folder is tmp_path / "run"."""

    def run(*flags, family="llama", model=None, data=text_file):
        words = ["train", "--model.from", str(model or model_folder(family)), "--data.train", str(data)]
        words += ["--data.context", "32", "--train.steps", "3", "--model.dtype", "fp32"]
        code = main([*words, "--save.dir", str(tmp_path / "run"), *map(str, flags)])
        return code, capsys.readouterr().err

    return run


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("family", ["llama", "qwen3-moe", "gemma2", "gemma3"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "bf16-pure"])
def test_a_run_leaves_what_the_contract_names(train, tmp_path, text_file, family, dtype):
    code, said = train("--model.dtype", dtype, "--data.eval", text_file, "--data.eval_tokens", 64, family=family)
    assert (code, said) == (0, "")
    run = tmp_path / "run"
    metrics = lines(run / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2, 3, 3]
    assert all(math.isfinite(line["loss"]) for line in metrics[:3])
    assert metrics[3]["eval/loss"] > 0
    assert {line["step"] for line in lines(run / "memory.jsonl")} == {0, 1, 2, 3}
    assert (run / "latest").read_text() == "step-00000003\n"
    assert "<svg" in (run / "report.html").read_text()
    checkpoint = run / "checkpoints" / "step-00000003"
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert {param.dtype for param in model.parameters()} == {torch.float32 if dtype == "fp32" else torch.bfloat16}


def test_an_upcycled_mixture_trains_with_pipelined_experts(train, tmp_path):
    """Its price is refused or not before it begins, its routing is in the metrics, and what it leaves opens."""
    moe = ["--model.moe.experts", 4, "--model.moe.top_k", 2, "--plan.dispatch", "pipelined"]
    assert train(*moe, "--memory.budget", "300KiB")[0] == 3
    assert train(*moe, "--memory.budget", "100MiB") == (0, "")
    metrics = lines(tmp_path / "run" / "metrics.jsonl")
    assert all(1.0 <= line["moe/max_over_mean"] <= 2.0 for line in metrics)
    assert {(line["moe/spilled_rows"], line["moe/blocks"]) for line in metrics} == {(0, 1)}
    assert "pipelined" in (tmp_path / "run" / "plan.toml").read_text()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoints" / "step-00000003")
    assert model.config.num_local_experts == 4


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3", "granite", "cohere"])
def test_tied_capped_and_scaled_heads_train_as_the_plain_one(train, tmp_path, model_folder, family):
    model, losses = model_folder(family), []
    strategies = [("--plan.vocab.strategy", each) for each in ("gradients-in-forward", "recompute")]
    for vocab in (("--plan.vocab", "plain"), *strategies):
        assert train(*vocab, "--overwrite", model=model) == (0, "")
        losses.append([line["loss"] for line in lines(tmp_path / "run" / "metrics.jsonl")])
    assert len(losses[0]) == 3
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[2] == pytest.approx(losses[0], rel=1e-4)


def test_accumulation_is_normalised_by_all_valid_tokens(train, tmp_path, model_folder):
    """Two rows at once, and one after the other, are the same step up to the order of summation."""
    folder = model_folder()
    losses = []
    for flags in (("--train.grad_accum", 1), ("--train.grad_accum", 2)):
        assert train("--train.global_tokens", 64, *flags, "--overwrite", model=folder)[0] == 0 or not losses
        losses.append([line["loss"] for line in lines(tmp_path / "run" / "metrics.jsonl")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_loss_falls_when_trained_on_one_text(train, tmp_path):
    code, _ = train("--train.steps", 40, "--train.lr", 1e-2, "--train.warmup", 4)
    assert code == 0
    losses = [line["loss"] for line in lines(tmp_path / "run" / "metrics.jsonl")]
    assert sum(losses[-5:]) / 5 < losses[0] - 0.5


def test_a_resumed_run_is_bit_identical(train, tmp_path, model_folder):
    folder = model_folder()
    steps = ("--train.schedule", "constant", "--save.every", 2, "--model.dtype", "bf16")
    assert train("--train.steps", 6, *steps, model=folder)[0] == 0
    whole = [float.hex(line["loss"]) for line in lines(tmp_path / "run" / "metrics.jsonl")]
    assert train("--train.steps", 4, *steps, "--overwrite", model=folder)[0] == 0
    assert train("--train.steps", 6, *steps, "--resume", model=folder)[0] == 0
    assert [float.hex(line["loss"]) for line in lines(tmp_path / "run" / "metrics.jsonl")] == whole


def test_old_checkpoints_go(train, tmp_path):
    assert train("--train.steps", 6, "--save.every", 1, "--save.keep", 2)[0] == 0
    assert sorted(p.name for p in (tmp_path / "run/checkpoints").iterdir()) == ["step-00000005", "step-00000006"]


def test_a_run_folder_is_not_lost_by_accident(train, tmp_path):
    assert train()[0] == 0
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    code, said = train()
    assert code == 2
    assert "--resume" in said
    assert "--overwrite" in said
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--train.step", "3"], "unknown key `train.step`; did you mean `steps`?"),
        (["--model.rop", "x"], "did you mean `rope`?"),
        (["--memory", "-1"], "must be a positive size"),
        (["--memory", "0"], "needs a unit"),
        (["--memory", "4"], 'write for example "4GiB"'),
        (["--memory", "4XB"], "unknown unit 'XB'"),
        (["--memory", "0GiB"], "must be above zero"),
        (["--train.lr", "0"], "`train.lr` must be above 0"),
        (["--train.lr", "inf"], "`train.lr` must be above 0 and finite"),
        (["--train.eps", "nan"], "`train.eps` must be above 0 and finite"),
        (["--train.weight_decay", "inf"], "`train.weight_decay` must be 0 or more and finite"),
        (["--train.clip", "nan"], "`train.clip` must be 0 or more and finite"),
        (["--train.seed", "-1"], "`train.seed` must be in 0 to 2^63 - 1"),
        (["--train.steps", "1.5"], '`train.steps` must be a whole number such as 4096 or "4K", got 1.5'),
        (["--data.train", ""], "`data.train` must be text that is not empty"),
        (["--save.dir", ""], "`save.dir` must be a path that is not empty"),
        ([""], "an argument is empty"),
        (["--ressume"], "has no option `--ressume`; did you mean `--resume`?"),
        (["--steps", "3"], "did you mean `--train.steps`?"),
        (["one.toml", "two.toml"], "takes no further argument 'two.toml'"),
        (["--train.warmup", "9"], "must not exceed `train.steps`"),
        (["--train.global_tokens", "33"], "must be a multiple of `data.context`"),
        (["--data.context", "300"], "longer than the model's 256 positions"),
        (["--data.train", "nowhere.txt"], "nowhere.txt"),
        (["--data.train", "builtin:englich"], "did you mean `english`?"),
        (["--model.from", "nowhere"], "neither a folder nor a built-in model"),
        (["--model.config", "config.json"], "exactly one of"),
        (["--plan.vocab", "block"], "did you mean `blocked`?"),
        (["--plan.vocab.tile_bytes", "0KiB"], "must be above zero"),
        (["--resume", "--overwrite"], "exclude each other"),
        (["--resume"], "no run to resume"),
    ],
)
def test_bad_settings_get_one_sentence_and_nothing_is_written(train, tmp_path, flags, said):
    code, error = train(*flags)
    assert code == 2
    assert said in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", "empty"), (b"good text\xff\xfe", "byte 9"), (b"\x00\x01\x02\x00", "byte 0")],
)
def test_bad_text_is_named_with_its_byte(train, tmp_path, content, said):
    path = tmp_path / "bad.txt"
    path.write_bytes(content)
    code, error = train("--data.train", path)
    assert code == 2
    assert "bad.txt" in error
    assert said in error
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_beyond_the_vocabulary_is_refused(train, model_folder, tiny_tokenizer):
    code, error = train(model=model_folder(vocab_size=200))
    assert code == 2
    assert f"ids up to {len(tiny_tokenizer) - 1}" in error
    assert "ends at 199" in error


def test_extended_positions_train(train):
    assert train("--data.context", 300, "--model.extend_positions")[0] == 0


def test_a_run_file_and_flags_are_one_tree(train, tmp_path, model_folder, text_file):
    path = tmp_path / "run.toml"
    path.write_text(
        f'[model]\nfrom = "{model_folder()}"\n[data]\ntrain = "{text_file}"\ncontext = 32\n[train]\nstep = 2\n'
    )
    assert main(["train", str(path)]) == 2
    path.write_text(path.read_text().replace("step = 2", "steps = 2"))
    assert main(["train", str(path), "--save.dir", str(tmp_path / "out"), "--train.lr", "1e-5"]) == 0
    assert main(["train", str(tmp_path / "out"), "--resume", "--train.steps", "3"]) == 0
    assert [line["step"] for line in lines(tmp_path / "out" / "metrics.jsonl")] == [1, 2, 3]


def test_what_does_not_fit_is_refused_before_anything_is_written(train, tmp_path, model_folder):
    folder = model_folder()
    assert train("--memory", "40MiB", model=folder)[0] == 0
    run = tmp_path / "run"
    peak = json.loads((run / "plan.json").read_text())["peak_bytes"]
    measured = max(line["peak_bytes"] for line in lines(run / "memory.jsonl"))
    assert measured <= peak <= 1.01 * measured
    shutil.rmtree(run)
    code, error = train("--memory", f"{peak - 1}B", model=folder)
    assert code == 3
    assert "the smallest budget that would do is" in error
    assert not run.exists()
    assert train("--memory", f"{peak}B", model=folder)[0] == 0


def test_a_shorter_context_is_named_when_it_would_fit(train, model_folder):
    folder = model_folder(max_position_embeddings=4096)
    code, error = train("--memory", "10MiB", "--data.context", "4096", model=folder)
    assert code == 3
    longest = int(error.split("`data.context = ")[1].split("`")[0])
    assert train("--memory", "10MiB", "--data.context", longest, "--train.steps", 1, model=folder)[0] == 0
    assert train("--memory", "10MiB", "--data.context", longest + 512, "--overwrite", model=folder)[0] == 3


def test_a_budget_broken_while_running_stops_with_the_table_in_the_folder(train, tmp_path, monkeypatch):
    monkeypatch.setattr(session, "check_fit", predict)
    code, error = train("--memory", "400KiB")
    assert code == 4
    assert "over the budget" in error
    assert "No step had been saved." in error
    table = tmp_path / "run" / "budget-exceeded.txt"
    assert error.count("\n") == 1
    assert f"The whole table is in {table}." in error
    assert "bytes alive" in table.read_text()
    assert "over the budget" in (tmp_path / "run" / "report.html").read_text()


def test_a_budget_broken_by_the_weights_shows_its_table_too(train, tmp_path, monkeypatch):
    monkeypatch.setattr(session, "check_fit", predict)
    code, error = train("--memory", "20KiB")
    assert code == 4
    assert error.startswith("bytes alive")
    assert not (tmp_path / "run").exists()


def test_plan_answers_as_the_run_would(model_folder, text_file, capsys):
    words = ["plan", "--model.from", str(model_folder()), "--data.train", str(text_file), "--data.context", "64"]
    assert main([*words, "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["phases"][tree["peak_phase"]]["peak_bytes"] == tree["peak_bytes"]
    assert main([*words, "--memory", f"{tree['peak_bytes'] - 1}B"]) == 3
    said = capsys.readouterr()
    assert "parameters" in said.out
    assert "smallest budget" in said.err
    assert main([*words, "--memory", "1KiB", "--json"]) == 3
    assert not json.loads(capsys.readouterr().out)["fits"]
    assert main([*words, "--train.step", "1", "--json"]) == 2
    said = capsys.readouterr()
    assert "did you mean" in json.loads(said.out)["error"]
    assert said.err == ""


def test_nan_names_step_and_layer_and_keeps_the_last_checkpoint(train, tmp_path, tiny_model, tiny_tokenizer):
    model = tiny_model()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = math.nan
    model.save_pretrained(tmp_path / "broken")
    tiny_tokenizer.save_pretrained(tmp_path / "broken")
    code, error = train(model=tmp_path / "broken")
    assert code == 6
    assert "step 1" in error
    assert "model.layers.1.mlp.up_proj" in error
    assert "No step had been saved." in error
    assert "train.lr" not in error


def test_nan_after_an_update_names_what_is_kept_and_the_learning_rate(train, tmp_path):
    assert train("--train.steps", 2, "--train.schedule", "constant", "--save.every", 1)[0] == 0
    code, error = train("--train.steps", 9, "--train.schedule", "constant", "--train.lr", 1e30, "--resume")
    assert code == 6
    assert "lower `train.lr`" in error
    assert "Step 2 is saved" in error


def test_weights_that_an_update_broke_are_not_saved(train, tmp_path):
    code, error = train("--train.lr", 1e38, "--train.steps", 1)
    assert code == 6
    assert "is not finite after the update" in error
    assert not (tmp_path / "run" / "latest").exists()


@pytest.mark.parametrize("part", ["--data.train", "--data.eval"])
@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("z.txt", b"then \xff", "not UTF-8 at byte 5"),
        ("z.txt", b"then \0", "byte 5 is NUL"),
        ("z.jsonl", b'{"text": "a"}\n{"text": \n', "z.jsonl:2 is not JSON"),
        ("z.bin", b"\xff\x7f" * 40, "has id 32767"),
    ],
)
def test_a_bad_file_among_good_ones_is_found_at_launch(train, tmp_path, part, name, content, said):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("Some good words first. " * 8)
    (folder / name).write_bytes(content)
    code, error = train(part, folder, "--save.dir", tmp_path / "runs" / "deep" / "run")
    assert code == 2
    assert error.count("\n") == 1
    assert name in error
    assert said in error
    assert not (tmp_path / "runs").exists()


def test_a_document_that_is_too_long_is_found_at_launch(train, tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for index in range(9):
        (folder / f"{index}.txt").write_text("Some good words. " * (1 if index else 40))
    code, error = train("--data.long_documents", "refuse", "--train.steps", 1, data=folder)
    assert code == 2
    assert "0.txt has" in error
    assert "more than `data.context` (32)" in error
    assert not (tmp_path / "run").exists()
    (folder / "0.txt").unlink()
    assert train("--data.long_documents", "refuse", data=folder)[0] == 0


def test_data_that_fails_under_way_costs_no_step(train, tmp_path, monkeypatch):
    folder = tmp_path / "texts"
    folder.mkdir()
    for index in range(9):
        (folder / f"{index}.txt").write_text("Some good words. ")

    class SpoilsData(RunView):
        def step(self, report):
            for file in folder.iterdir():
                file.unlink()

    monkeypatch.setattr(progress, "RunView", SpoilsData)
    code, error = train("--data.train", folder, "--data.pack", "none", "--train.steps", 40)
    assert code == 2
    assert ".txt" in error
    done = lines(tmp_path / "run" / "metrics.jsonl")[-1]["step"]
    assert f"Step {done} is saved" in error
    assert (tmp_path / "run" / "latest").read_text() == f"step-{done:08d}\n"


def test_ctrl_c_saves_and_ends_with_130(model_folder, text_file, tmp_path):
    words = ["--model.from", str(model_folder()), "--data.train", str(text_file), "--data.context", "32"]
    words += ["--train.steps", "100000", "--save.dir", str(tmp_path / "run")]
    process = subprocess.Popen([sys.executable, "-m", "planish", "train", *words], stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(2)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130
    saved = (tmp_path / "run" / "latest").read_text().strip()
    assert f"step-{lines(metrics)[-1]['step']:08d}" == saved
    assert "--resume" in said


def test_a_stop_while_starting_leaves_nothing_half_written(model_folder, text_file, tmp_path):
    run = tmp_path / "runs" / "run"
    words = ["--model.from", str(model_folder()), "--data.train", str(text_file), "--data.context", "32"]
    command = [sys.executable, "-m", "planish", "train", *words, "--save.dir", str(run), "--train.steps", "100000"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not run.exists() and time.monotonic() < deadline:
        time.sleep(0.002)
    process.terminate()
    _, said = process.communicate(timeout=120)
    assert (process.returncode, said.count("\n")) == (130, 1)
    assert (run / "latest").exists() if (tmp_path / "runs").exists() else "interrupted" in said


def test_resuming_a_finished_run_does_nothing(train, tmp_path, model_folder):
    folder = model_folder()
    assert train(model=folder)[0] == 0
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert train("--resume", model=folder)[0] == 0
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_a_pointer_that_is_gone_or_empty_loses_nothing(train, tmp_path, model_folder, text_file):
    folder, run = model_folder(), tmp_path / "run"
    assert train(model=folder)[0] == 0
    for spoil in (lambda: (run / "latest").write_text(""), (run / "latest").unlink):
        spoil()
        assert main(["generate", str(run), "--prompt", "The", "--max-tokens", "2"]) == 0
        assert main(["eval", str(run), str(text_file), "--context", "64", "--max-tokens", "64"]) == 0
    assert train("--resume", "--train.steps", 4, model=folder)[0] == 0
    assert [line["step"] for line in lines(run / "metrics.jsonl")] == [1, 2, 3, 4]


def test_generating_from_a_run_without_a_checkpoint_says_so(tmp_path, capsys):
    (tmp_path / "checkpoints").mkdir()
    assert main(["generate", str(tmp_path), "--prompt", "The"]) == 2
    assert "holds no checkpoint yet" in capsys.readouterr().err


def test_resuming_with_other_settings_says_which(train, model_folder, capsys):
    folder = model_folder()
    assert train(model=folder)[0] == 0
    code, error = train("--resume", "--train.steps", 4, "--data.context", 64, model=folder)
    assert code == 2
    assert "`data.context` is 64 and was 32, so that what follows would be another run" in error
    assert train("--resume", "--train.steps", 4, "--train.lr", 2e-4, model=folder)[0] == 0


def test_a_mistake_in_the_run_file_names_it_also_beside_flags(tmp_path, capsys):
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xef\xbb\xbf[train]\nstep = 2\n")  # as some editors write it
    assert main(["train", str(path), "--data.train", "x", "--model.from", "y"]) == 2
    assert f"{path} with its flags: unknown key `train.step`" in capsys.readouterr().err


class FullAfter(io.StringIO):
    """An output that takes some lines and no more."""

    def __init__(self, num_lines: int) -> None:
        super().__init__()
        self._left = num_lines

    def write(self, text: str) -> int:
        if self._left == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._left -= 1
        return super().write(text)


def test_an_output_that_fills_up_costs_no_step(train, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdout", FullAfter(3))  # what is about to run, and two steps
    code, error = train("--train.steps", 9)
    assert code == 5
    assert "the standard output cannot be written: No space left" in error
    assert lines(tmp_path / "run" / "metrics.jsonl")[-1]["step"] == 3
    assert (tmp_path / "run" / "latest").read_text() == "step-00000003\n"
