"""`plan.optim` = stream-adamw as a user meets it: AdamW's run bit for bit, resumed, refused, failing, planned."""

import errno
import json

import pytest
from safetensors.torch import load_file

from planish.cli.main import main
from planish.memory import far_disk

SMALL = ("--plan.optim.chunk_bytes", "16KiB", "--plan.optim.slots", 2)


@pytest.fixture
def say(on_tiny_model):
    return on_tiny_model("--train.weight_decay", "0.1")


def on_disk(folder, *more):
    place = ("--plan.optim.disk", "8MiB", "--plan.optim.folder", folder)
    return ("--plan.optim", "stream-adamw", *place, *SMALL, *more)


def metrics(tmp_path):
    return [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]


def numbers(tmp_path):
    return [(float.hex(line["loss"]), float.hex(line["grad_norm"])) for line in metrics(tmp_path)]


def tensors(tmp_path, step):
    """Return every tensor of a checkpoint: weights, and the state of the optimizer."""
    folder = tmp_path / "run" / "checkpoints" / f"step-{step:08d}"
    found = {}
    for path in sorted(folder.rglob("*.safetensors")):
        found |= {f"{path.parent.name}/{name}": tensor for name, tensor in load_file(path).items()}
    return found


def same(ones, others):
    return ones.keys() == others.keys() and all(ones[name].equal(others[name]) for name in ones)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "bf16-pure"])
@pytest.mark.parametrize("place", ["disk", "both", "beside boundaries"])
def test_a_streamed_run_is_adamw_s_bit_for_bit(say, tmp_path, dtype, place):
    """Losses, norms, weights and state, with accumulation and clipping, on a model whose embedding is its head."""
    words = ("--train.steps", 3, "--train.grad_accum", 2, "--train.clip", 0.5, "--model.dtype", dtype, "--overwrite")
    assert say("train", *words[:-1])[0] == 0
    expected, saved = numbers(tmp_path), tensors(tmp_path, 3)
    more = {"disk": (), "both": ("--plan.optim.host", "64KiB"), "beside boundaries": (
        "--plan.boundary", "offload", "--plan.boundary.disk", "1MiB", "--plan.boundary.folder", tmp_path)}  # fmt: skip
    assert say("train", *words, *on_disk(tmp_path), *more[place])[0] == 0
    assert numbers(tmp_path) == expected
    assert same(tensors(tmp_path, 3), saved)
    assert any(name.endswith("exp_avg_sq") for name in saved)
    last = metrics(tmp_path)[-1]
    assert last["far/optim-disk-out/bytes"] == last["far/optim-disk-in/bytes"] > 0
    assert last["far/optim-update/busy_s"] > 0
    assert ("far/disk-out/bytes" in last) == (place == "beside boundaries")
    assert main(["report", str(tmp_path / "run")]) == 0


@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
def test_in_backward_is_the_step_after_it(say, tmp_path, family):
    words = ("--train.steps", 3, "--train.grad_accum", 2, "--train.clip", 0, "--model.dtype", "bf16")
    assert say("train", *words, family=family)[0] == 0
    expected = [line["loss"] for line in metrics(tmp_path)]
    saved = tensors(tmp_path, 3)
    assert say("train", *words, "--overwrite", *on_disk(tmp_path, "--plan.optim.in_backward"), family=family)[0] == 0
    assert [line["loss"] for line in metrics(tmp_path)] == expected
    assert same(tensors(tmp_path, 3), saved)


@pytest.mark.parametrize("ways", [("stream", "stream"), ("adamw", "stream"), ("stream", "adamw")])
def test_a_run_goes_on_bit_for_bit_in_either_optimizer(say, tmp_path, ways):
    words = ("--model.dtype", "bf16", "--train.warmup", 1)
    assert say("train", "--train.steps", 5, *words)[0] == 0
    expected, saved = numbers(tmp_path), tensors(tmp_path, 5)
    for way, steps, how in zip(ways, (3, 5), ("--overwrite", "--resume"), strict=True):
        flags = on_disk(tmp_path) if way == "stream" else ()
        assert say("train", "--train.steps", steps, *words, how, *flags)[0] == 0
    assert numbers(tmp_path) == expected
    assert same(tensors(tmp_path, 5), saved)


def test_a_disk_that_fails_in_a_step_ends_with_exit_code_5_and_the_last_checkpoint_goes_on(say, tmp_path, monkeypatch):
    words = ("--train.steps", 3, "--save.every", 1, "--model.dtype", "fp32")
    assert say("train", *words)[0] == 0
    expected = numbers(tmp_path)
    write, left = far_disk.os.pwrite, iter(range(30))  # of 20 in a step

    def full(*args):
        if next(left, None) is None:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*args)

    with monkeypatch.context() as patch:
        patch.setattr(far_disk.os, "pwrite", full)
        code, _, err = say("train", *words, "--overwrite", *on_disk(tmp_path))
    assert code == 5
    assert "No space left on device; the last checkpoint is intact" in err
    assert (tmp_path / "run" / "latest").read_text() == "step-00000001\n"
    assert say("train", *words, "--resume", *on_disk(tmp_path))[0] == 0
    assert numbers(tmp_path) == expected


@pytest.mark.parametrize("verb", ["train", "plan"])
@pytest.mark.parametrize(("flags", "message"), [
    ((), '`plan.optim` = stream-adamw needs `host` or `disk`; write for instance `plan.optim.disk = "20GiB"`'),
    (("--plan.optim.disk", "64KiB"), "more than `host` and `disk` hold; disk = "),
    (("--plan.optim.disk", "8MiB", "--plan.optim.chunk_bytes", 5000), "`chunk_bytes` (5000) must hold a page of each"),
    (("--plan.optim.disk", "8MiB", "--plan.optim.slots", 0), "`plan.optim.slots` must be"),
    (("--plan.optim.disk", "8MiB", "--plan.optim.in_backward"), "set `train.clip = 0`."),
])  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(say, tmp_path, verb, flags, message):
    code, _, err = say(verb, "--plan.optim", "stream-adamw", *flags)
    assert code == 2
    assert message in err
    assert not (tmp_path / "run").exists()


def test_a_folder_that_is_not_there_is_refused(say, tmp_path):
    code, _, err = say("train", *on_disk(tmp_path / "none"))
    assert code == 2
    assert "needs an existing folder" in err


def test_plan_says_what_far_memory_takes_and_that_nothing_is_approximate(say, tmp_path, capsys):
    built_in = ["plan", "--model.from", "smollm2-135m", "--data.context", "1024", "--json"]
    assert main(built_in) == 0
    adamw = json.loads(capsys.readouterr().out)
    assert main([*built_in, "--plan.optim", "stream-adamw", "--plan.optim.disk", "2GiB"]) == 0
    ours = json.loads(capsys.readouterr().out)
    assert ours["approximations"] == []
    state = [each["phases"]["init"]["categories"]["optimizer state"] for each in (adamw, ours)]
    assert ours["far"]["optim disk"] == pytest.approx(state[0], rel=1e-3)
    assert state[1] == 4 * 272
    assert adamw["peak_bytes"] - ours["peak_bytes"] > 0.9 * state[0]
    code, out, _ = say("plan", *on_disk(tmp_path))
    assert code == 0
    assert "on the disk" in out
    code, _, _ = say("verify", *on_disk(tmp_path))
    assert code == 0
