"""Boundaries on disk as a user meets them: the same losses, lanes on record, and every refusal in one sentence."""

import errno
import json
from pathlib import Path

import pytest
from transformers.modeling_layers import GradientCheckpointingLayer

from planish.cli.main import main
from planish.memory import far_disk
from planish.memory.far_disk import _filesystem

LAYERS = 4
BOUNDARY_BYTES = 32 * 32 * 4


@pytest.fixture
def train(model_folder, text_file, tmp_path, capsys):
    """Return (*flags) -> (exit code, what was said on stderr); the run folder is tmp_path / "run"."""
    model = model_folder(num_hidden_layers=LAYERS)

    def run(*flags):
        words = ["train", "--model.from", str(model), "--data.train", str(text_file), "--data.context", "32"]
        words += ["--train.steps", "3", "--model.dtype", "fp32", "--save.every", "1"]
        code = main([*words, "--save.dir", str(tmp_path / "run"), *map(str, flags)])
        return code, capsys.readouterr().err

    return run


def offload(folder, disk="1MiB"):
    return ["--plan.boundary", "offload", "--plan.boundary.disk", disk, "--plan.boundary.folder", str(folder)]


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("keep", [[], ["--plan.boundary.keep_attention"]], ids=["inputs", "inputs and attention"])
def test_a_run_with_boundaries_on_disk_is_the_checkpointed_run_bit_for_bit(train, tmp_path, keep):
    assert train() == (0, "")
    expected = [(line["loss"].hex(), line["grad_norm"].hex()) for line in metrics(tmp_path / "run")]
    assert train("--overwrite", *offload(tmp_path), *keep) == (0, "")
    lines = metrics(tmp_path / "run")
    assert [(line["loss"].hex(), line["grad_norm"].hex()) for line in lines] == expected
    kept_bytes = 32 * 4 * (8 * 4 + 4) if keep else 0
    for line in lines:
        assert line["far/disk-out/bytes"] == line["far/disk-in/bytes"] == (LAYERS - 1) * (BOUNDARY_BYTES + kept_bytes)
        assert line["far/disk-out/busy_s"] > 0
    assert main(["report", str(tmp_path / "run")]) == 0


def test_a_disk_that_fills_up_ends_with_exit_code_5_and_the_last_checkpoint_goes_on(train, tmp_path, monkeypatch):
    assert train()[0] == 0
    expected = [line["loss"].hex() for line in metrics(tmp_path / "run")]
    write, left = far_disk.os.pwrite, iter(range(LAYERS + 1))

    def full(*args):
        if next(left, None) is None:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*args)

    with monkeypatch.context() as patch:
        patch.setattr(far_disk.os, "pwrite", full)
        code, said = train("--overwrite", *offload(tmp_path))
    assert code == 5
    assert "far memory in" in said
    assert "No space left on device; the last checkpoint is intact" in said
    assert said.count("\n") == 1
    assert (tmp_path / "run" / "latest").read_text() == "step-00000001\n"
    assert train("--resume", *offload(tmp_path))[0] == 0
    assert [line["loss"].hex() for line in metrics(tmp_path / "run")] == expected


def test_far_memory_that_cannot_be_had_is_refused_and_nothing_is_written(train, tmp_path):
    cases = [
        (offload(tmp_path, "2KiB"), "`disk` = 2.0 KiB holds no boundary, each takes 4.0 KiB"),
        (offload(tmp_path / "none"), "needs an existing folder"),
        (["--plan.boundary", "offload"], 'needs `host` or `disk`; write for instance disk = "20GiB"'),
        (["--plan.boundary.host", "1MiB"], "`host` memory is the device's own on a CPU"),
        ([*offload(tmp_path), "--plan.boundary.keep_attention", "--plan.attention", "plain"], "set `plan.attention`"),
    ]
    if Path("/proc").is_dir():
        cases.append((offload("/proc"), "which has"))
    if Path("/dev/shm").is_dir() and _filesystem(Path("/dev/shm")) == "tmpfs":
        cases.append((offload("/dev/shm"), "would lie in memory (tmpfs)"))
    for flags, sentence in cases:
        code, said = train(*flags)
        assert code == 2, flags
        assert sentence in said
        assert said.count("\n") == 1
        assert not (tmp_path / "run").exists()


def test_layers_that_take_the_hidden_state_by_keyword_are_refused(train, tmp_path, monkeypatch):
    call = GradientCheckpointingLayer.__call__
    monkeypatch.setattr(
        GradientCheckpointingLayer, "__call__", lambda layer, hidden, **rest: call(layer, hidden_states=hidden, **rest)
    )
    code, said = train(*offload(tmp_path))
    assert code == 2
    assert "layer 0 takes its hidden state by keyword, which checkpointing keeps on the device" in said
