"""What may go wrong around a run folder and its checkpoints, as a user meets it: on one rank, and on each of two."""

import errno
import json
import os
import resource
import signal
import time

import pytest

from planish.train.run_folder import open_run_folder


@pytest.fixture(params=[1, 2], ids=["alone", "ranks"])
def train(request, torchrun, model_folder, text_file, tmp_path):
    """Return (*flags) -> (exit code, sentence), the same on every rank; the run folder is tmp_path / "run"."""
    model_folder()

    def run(*flags, model=tmp_path / "model-llama", **during):
        words = ["train", "--model.from", model, "--data.train", text_file, "--data.context", 32]
        words += ["--model.dtype", "fp32", "--mesh.timeout_s", 60, "--save.dir", tmp_path / "run"]
        words += [] if "--train.steps" in flags else ["--train.steps", 2]
        said = torchrun(*words, *flags, ranks=request.param, **during)
        codes, (first, *others) = {code for code, *_ in said}, [error for *_, error in said]
        assert len(codes) == 1, "\n".join(error for *_, error in said)
        assert all(first.removeprefix("planish: ") in error for error in others)
        assert first.count("\n") <= 1
        return codes.pop(), first

    run.ranks = request.param
    return run


def steps(run):
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def checkpoints(run):
    return sorted(each.name for each in (run / "checkpoints").iterdir())


def test_a_checkpoint_of_another_model_is_refused(train, model_folder, tmp_path):
    assert train()[0] == 0
    model_folder(num_hidden_layers=3)  # in its place
    code, said = train("--resume", "--train.steps", 3)
    assert code == 2
    assert "step-00000002 is of another model: `model.layers.2." in said
    assert steps(tmp_path / "run") == [1, 2]


def test_a_checkpoint_of_another_tokenizer_is_refused(train, tmp_path):
    assert train()[0] == 0
    path = tmp_path / "model-llama" / "tokenizer.json"
    tree = json.loads(path.read_text())
    tree["model"]["merges"].pop()
    path.write_text(json.dumps(tree))
    code, said = train("--resume", "--train.steps", 3)
    assert code == 2
    assert "step-00000002 is of another tokenizer: its vocabulary or its rules differ" in said
    assert steps(tmp_path / "run") == [1, 2]


def test_weights_of_which_a_file_is_missing_are_refused(train, tiny_model, tmp_path):
    folder = tmp_path / "model-llama"
    (folder / "model.safetensors").unlink()
    tiny_model().save_pretrained(folder, max_shard_size="20KB")
    next(iter(sorted(folder.glob("model-*.safetensors")))).unlink()
    code, said = train()
    assert code == 2
    assert "model-00001-of" in said
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_with_fewer_files_than_it_names_is_passed_over(train, tmp_path):
    assert train("--save.every", 1)[0] == 0
    run = tmp_path / "run"
    assert checkpoints(run) == ["step-00000001", "step-00000002"]
    (run / "checkpoints" / "step-00000002" / "model.safetensors").unlink()
    assert train("--resume") == (0, "")  # from step 1
    assert steps(run) == [1, 2]
    for each in (run / "checkpoints").iterdir():
        (each / "model.safetensors").unlink()
    code, said = train("--resume", "--train.steps", 3)
    assert code == 5
    assert "model.safetensors cannot be read (No such file or directory)" in said
    assert "No intact checkpoint is left" in said


def test_a_disk_that_refuses_a_checkpoint_keeps_the_last_one(train, tmp_path):
    assert train("--train.steps", 1)[0] == 0
    weights = tmp_path / "run" / "checkpoints" / "step-00000001" / "model.safetensors"
    limit_bytes = weights.stat().st_size - 1

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    code, said = train("--resume", before=limit)
    assert code == 5
    assert f"saving step-00000002 failed: {os.strerror(errno.EFBIG)}; complete checkpoints are intact" in said
    assert checkpoints(tmp_path / "run") == ["step-00000001"]
    assert train("--resume") == (0, "")
    assert checkpoints(tmp_path / "run") == ["step-00000001", "step-00000002"]
    assert steps(tmp_path / "run") == [1, 2]


def test_a_second_run_in_the_folder_is_refused(train, tmp_path):
    assert train()[0] == 0
    with open_run_folder(tmp_path / "run", resume=True, overwrite=False):
        code, said = train("--resume", "--train.steps", 3)
    assert code == 2
    assert f"in use by process {os.getpid()}" in said
    assert steps(tmp_path / "run") == [1, 2]


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes somebody who may not write")
def test_a_read_only_folder_is_refused(train, tmp_path):
    parent = tmp_path / "read-only"
    parent.mkdir(mode=0o555)
    for each in (tmp_path, *tmp_path.parents[:2]):
        each.chmod(0o755)
    code, said = train("--save.dir", parent / "run", before=lambda: os.seteuid(65534))
    assert code == 2
    assert f"run folder {parent / 'run'} cannot be written: Permission denied" in said


def test_sigterm_saves_and_ends_with_130(train, tmp_path):
    run = tmp_path / "run"

    def stop(processes):
        while not (run / "metrics.jsonl").exists() or len(steps(run)) < 2:
            time.sleep(0.05)
        for process in processes:
            os.kill(process, signal.SIGTERM)

    code, said = train("--train.steps", 100_000, meanwhile=stop)
    assert code == 130
    assert "continue with `--resume`" in said
    done = steps(run)[-1]
    assert (run / "latest").read_text() == f"step-{done:08d}\n"
    assert train("--resume", "--train.steps", done + 1) == (0, "")
    assert steps(run) == [*range(1, done + 2)]


@pytest.mark.parametrize(("flags", "ranks", "said"), [
    (("--mesh.dp", 2), 1, "`mesh.replicate` x `mesh.dp` (1 x 2) must be the 1 ranks that were started"),
    (("--mesh.dp", 3), 2, "`mesh.replicate` x `mesh.dp` (1 x 3) must be the 2 ranks that were started"),
    (("--mesh.replicate", 3), 2, "`mesh.replicate` (3) must divide the 2 ranks that were started; one of 1, 2."),
    (("--train.global_tokens", 64), 3, "`train.global_tokens` (64) must be a multiple of"),
])  # fmt: skip
def test_degrees_that_cannot_be_are_refused_by_every_rank(
    torchrun, model_folder, text_file, tmp_path, flags, ranks, said
):
    words = ["train", "--model.from", model_folder(), "--data.train", text_file, "--data.context", 32]
    words += ["--train.steps", 1, "--save.dir", tmp_path / "run", "--model.dtype", "fp32"]
    assert torchrun(*words, ranks=1)[0][0] == 0
    for code, _, error in torchrun(*words, "--resume", "--train.steps", 2, *flags, ranks=ranks):
        assert code == 2
        assert said in error
        assert error.count("\n") == 1
    assert steps(tmp_path / "run") == [1]
