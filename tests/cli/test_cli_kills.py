"""A run that is killed at random moments, also while it saves, ends bit for bit where an undisturbed one does."""

import hashlib
import json
import random
import subprocess
import sys
import time

import pytest

STEPS = 30


def words(model, text, run, dtype):
    settings = ["--model.from", str(model), "--data.train", str(text), "--data.context", "32", "--model.dtype", dtype]
    return [*settings, "--train.steps", str(STEPS), "--save.every", "1", "--save.keep", "2", "--save.dir", str(run)]


def start(arguments, log, *flags):
    command = [sys.executable, "-m", "planish", "train", *arguments, *flags]
    with log.open("w") as file:
        return subprocess.Popen(command, stdout=file, stderr=file)


def trace(run):
    """Return every loss in hexadecimal, and the digest of the last checkpoint's tensors."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = run / "checkpoints" / f"step-{STEPS:08d}"
    digest = hashlib.sha256()
    for path in sorted(last.rglob("*.safetensors")):
        digest.update(path.read_bytes())
    return [(line["step"], float.hex(line["loss"])) for line in lines], digest.hexdigest()


@pytest.mark.slow
@pytest.mark.parametrize(("family", "dtype", "streamed"), [
    ("llama", "bf16", False), ("llama", "fp32", False), ("qwen3-moe", "bf16", False), ("qwen3-moe", "fp32", False),
    ("llama", "bf16", True),
])  # fmt: skip
def test_kills_at_random_moments_change_no_bit(model_folder, text_file, tmp_path, family, dtype, streamed):
    """With AdamW's state on disk, which dies with the process, the run is that of state on the device."""
    model = model_folder(family)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    log = tmp_path / "log"
    assert start(words(model, text_file, whole, dtype), log).wait() == 0, log.read_text()
    on_disk = ["--plan.optim.disk", "8MiB", "--plan.optim.folder", str(tmp_path)] if streamed else []
    rng, kills = random.Random(f"{family} {dtype}"), 0
    while True:
        flags = ["--resume"] if (killed / "run.toml").exists() else []
        process = start(words(model, text_file, killed, dtype), log, *on_disk, *flags)
        seen = (killed / "metrics.jsonl").stat().st_size if flags else 0
        while process.poll() is None and not (
            (killed / "metrics.jsonl").exists() and (killed / "metrics.jsonl").stat().st_size > seen
        ):
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.25))
        if process.poll() is None and kills < 6:
            process.kill()
            kills += 1
        if process.wait() == 0:
            break
        assert process.returncode == -9, log.read_text()
    assert kills >= 5
    assert trace(killed) == trace(whole)
