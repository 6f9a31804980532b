"""`torchrun` as a user types it: a killed rank is named by the others, and a restarted job goes on bit for bit."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def launch(words, *, ranks, restarts=0):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [f"--max-restarts={restarts}", "--monitor-interval=0.1", "-m", "planish", "train", *words]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # noqa: TID251 - as a user would
    )


@pytest.fixture
def words(model_folder, text_file, tmp_path):
    def make(name, family="qwen3-moe", **config):
        return [
            *("--model.from", str(model_folder(family, **config))),
            *("--data.train", str(text_file)),
            *("--data.context", "32"),
            *("--train.steps", "60"),
            *("--save.every", "5"),
            *("--mesh.timeout-s", "20"),
            *("--save.dir", str(tmp_path / name)),
        ]

    return make


def lines(folder):
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def kill_one(folder, step, how=signal.SIGKILL):
    """Kill, or stall, the rank that began last, once `step` is written."""
    while not any(line["step"] >= step for line in lines(folder)):
        time.sleep(0.05)
    os.kill(max(workers_of(folder)), how)


def workers_of(folder):
    """Return the processes that train in `folder`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (process / "cmdline").read_bytes().decode().split("\0")
            if str(folder) in words and "torch.distributed.run" not in words:
                found.append(int(process.name))
    return found


def test_the_ranks_that_are_left_stop_and_name_the_one_that_is_lost(words, tmp_path):
    with launch(words("run"), ranks=3) as job:
        kill_one(tmp_path / "run", 7)
        said, _ = job.communicate(timeout=120)
    assert re.search(r"planish: rank \d lost in step \d+:.*go on with `--resume`", said), said
    assert re.findall(r"exitcode\s+: (-?\d+)", said).count("5") >= 1, said
    assert (tmp_path / "run" / "latest").read_text().startswith("step-")


def check_restarted(words, tmp_path, *settings, kills, family):
    """Kill a rank after each step of `kills`; the job that went on must be the one that nobody killed."""
    with launch([*words("killed", family), *settings], ranks=2, restarts=len(kills)) as job:
        for step in kills:
            kill_one(tmp_path / "killed", step)
        said, _ = job.communicate(timeout=240)
    assert job.returncode == 0, said
    with launch([*words("whole", family), *settings], ranks=2) as whole:
        said, _ = whole.communicate(timeout=120)
    assert whole.returncode == 0, said
    killed, undisturbed = (
        [(line["step"], line["loss"].hex(), line["grad_norm"].hex()) for line in lines(tmp_path / name)]
        for name in ("killed", "whole")
    )
    assert killed == undisturbed


def test_a_restarted_job_is_the_one_that_was_never_killed(words, tmp_path):
    check_restarted(words, tmp_path, kills=(12, 33), family="qwen3-moe")


EVERYTHING = [
    *("--mesh.cp", "2", "--mesh.ep", "2", "--mesh.vp", "2"),
    *("--plan.vocab.method", "ring", "--plan.dispatch.method", "pipelined", "--plan.dispatch.borrow-routes", "1"),
    *("--plan.boundary.method", "offload", "--plan.boundary.disk", "4MiB"),
    *("--plan.optim.method", "stream-adamw", "--plan.optim.disk", "64MiB"),
]


def test_a_restarted_job_of_every_method_is_the_one_that_was_never_killed(words, tmp_path):
    check_restarted(words, tmp_path, *EVERYTHING, "--train.steps", "30", kills=(12,), family="qwen3-moe")


def test_a_stalled_rank_is_named_with_its_step_and_ends_the_others(words, tmp_path):
    """Whichever group it is that waits for it, and although it can say nothing itself."""
    settings = [*words("run"), *EVERYTHING, "--mesh.timeout-s", "10", "--train.steps", "2000"]
    with launch(settings, ranks=2) as job:
        kill_one(tmp_path / "run", 7, signal.SIGSTOP)
        said, _ = job.communicate(timeout=120)
    assert re.search(r"planish: rank \d lost in step \d+: .*go on with `--resume`", said), said
    assert re.findall(r"exitcode\s+: (-?\d+)", said).count("5") >= 1, said


def test_an_upcycled_mixture_trains_with_its_experts_over_ranks(words, tmp_path):
    upcycled = ["--model.moe.experts", "6", "--model.moe.top-k", "2", "--plan.dispatch.method", "pipelined"]
    upcycled += ["--train.global-tokens", "128", "--model.dtype", "fp32"]
    shared = ["--mesh.ep", "4", "--plan.dispatch.borrow-routes", "1", "--memory", "1GiB"]
    for ranks, mesh in ((4, shared), (1, [])):
        with launch([*words(f"{ranks}", "llama"), *upcycled, *mesh, "--train.steps", "5"], ranks=ranks) as job:
            said, _ = job.communicate(timeout=120)
        assert job.returncode == 0, said
    four, one = (lines(tmp_path / name) for name in ("4", "1"))
    assert [line["loss"] for line in four] == pytest.approx([line["loss"] for line in one], rel=1e-5)
    assert any(line["moe/spilled_rows"] > 0 for line in four)


def test_the_stages_that_are_left_stop_and_name_the_one_that_is_lost(words, tmp_path):
    settings = words("run", "llama", num_hidden_layers=6)
    settings += ["--mesh.pp", "3", "--plan.pipeline", "v-half", "--train.grad-accum", "4", "--train.steps", "2000"]
    with launch(settings, ranks=3) as job:
        kill_one(tmp_path / "run", 7)
        said, _ = job.communicate(timeout=120)
    assert re.search(r"planish: rank \d lost in step \d+:.*go on with `--resume`", said), said
    assert re.findall(r"exitcode\s+: (-?\d+)", said).count("5") >= 1, said
    assert (tmp_path / "run" / "latest").read_text().startswith("step-")


def test_a_restarted_pipeline_is_the_one_that_was_never_killed(words, tmp_path):
    check_restarted(words, tmp_path, "--mesh.pp", "2", "--train.grad-accum", "3", kills=(12,), family="llama")


def test_a_vocabulary_over_ranks_trains_and_resumes_at_another_number(words, tmp_path):
    common = ["--train.global-tokens", "128", "--model.dtype", "fp32", "--train.schedule", "constant"]
    ring = ["--mesh.vp", "4", "--plan.vocab.method", "ring"]
    for name, ranks, more in (("four", 4, ring), ("one", 1, [])):
        with launch([*words(name, "llama"), *common, *more, "--train.steps", "5"], ranks=ranks) as job:
            said, _ = job.communicate(timeout=120)
        assert job.returncode == 0, said
    again = [*words("four", "llama"), *common, "--mesh.vp", "2", "--plan.vocab.method", "ring", "--train.steps", "8"]
    with launch([*again, "--resume"], ranks=2) as job:
        said, _ = job.communicate(timeout=120)
    assert job.returncode == 0, said
    four, one = (lines(tmp_path / name) for name in ("four", "one"))
    assert [line["step"] for line in four] == list(range(1, 9))
    assert [line["loss"] for line in four[:5]] == pytest.approx([line["loss"] for line in one], rel=1e-5)
