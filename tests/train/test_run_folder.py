import errno
import json
import os
import resource
import signal
import tempfile
from pathlib import Path

import pytest

from planish.errors import UsageError, WorldFailed
from planish.train.run_folder import JsonLines, cut_lines, open_run_folder, write_atomically


def begin(path, **options):
    with open_run_folder(path, **{"resume": False, "overwrite": False} | options) as folder:
        folder.begin(run_toml="[model]\n", plan_toml="[plan]\n")
    return folder


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_new_folder_holds_the_settings_and_nothing_else(tmp_path):
    folder = begin(tmp_path / "runs" / "one")
    assert sorted(each.name for each in folder.path.iterdir()) == [".lock", "checkpoints", "plan.toml", "run.toml"]
    assert folder.run_toml.read_text() == "[model]\n"


def test_nothing_is_left_of_a_run_that_never_began(tmp_path):
    with open_run_folder(tmp_path / "runs" / "deep" / "run", resume=False, overwrite=False):
        pass
    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_that_was_there_stays(tmp_path):
    with open_run_folder(tmp_path, resume=False, overwrite=False):
        pass
    assert tmp_path.is_dir()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_a_run_names_both_remedies(tmp_path):
    begin(tmp_path)
    with pytest.raises(UsageError, match=r"holds a run; add `--resume` .* or `--overwrite`"):
        open_run_folder(tmp_path, resume=False, overwrite=False)


def test_resume_and_overwrite_exclude_each_other(tmp_path):
    with pytest.raises(UsageError, match="exclude each other"):
        open_run_folder(tmp_path, resume=True, overwrite=True)


@pytest.mark.parametrize("options", [{}, {"overwrite": True}, {"resume": True}])
def test_a_folder_that_is_not_a_run_is_never_touched(tmp_path, options):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match="not a run folder"):
        begin(tmp_path, **options)
    assert [each.name for each in tmp_path.iterdir()] == ["thesis.tex"]


def test_resume_needs_a_run(tmp_path):
    with pytest.raises(UsageError, match="has no run to resume"):
        open_run_folder(tmp_path / "run", resume=True, overwrite=False)
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_not_a_folder(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(UsageError, match="is a file"):
        open_run_folder(tmp_path / "run", resume=False, overwrite=False)


def test_overwrite_removes_what_a_run_writes_once_it_begins(tmp_path):
    folder = begin(tmp_path)
    written = [folder.metrics, folder.memory, folder.report, folder.latest]
    for each in written:
        each.write_text("old")
    (folder.checkpoints / "step-00000001").mkdir()
    (folder.checkpoints / ".step-00000002.partial").mkdir()
    (folder.checkpoints / "mine").mkdir()
    (folder.path / "notes.txt").write_text("mine")
    with open_run_folder(tmp_path, resume=False, overwrite=True) as again:
        assert all(each.exists() for each in written)
        again.begin(run_toml="[new]\n", plan_toml="")
    assert not any(each.exists() for each in written)
    assert [each.name for each in folder.checkpoints.iterdir()] == ["mine"]
    assert (folder.path / "notes.txt").read_text() == "mine"
    assert folder.run_toml.read_text() == "[new]\n"


def test_a_folder_that_cannot_be_made_is_refused():
    with pytest.raises(UsageError, match="cannot be written"):
        begin(Path("/proc/run"))


@pytest.fixture
def as_nobody():
    """Root may write anywhere, so it becomes somebody else for the length of a test."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    yield
    if root:
        os.seteuid(0)


@pytest.mark.parametrize("mode", [0o555, 0o000])
def test_a_folder_without_permission_is_refused(as_nobody, mode):
    with tempfile.TemporaryDirectory() as parent:
        begin(Path(parent) / "run")
        (Path(parent) / "run" / ".lock").unlink()
        Path(parent, "run").chmod(mode)
        with pytest.raises(UsageError, match="cannot be written: Permission denied"):
            open_run_folder(Path(parent) / "run", resume=True, overwrite=False)
        Path(parent, "run").chmod(0o755)


def test_a_second_run_is_refused_with_the_pid_of_the_first(tmp_path):
    begin(tmp_path)
    ready, write = os.pipe()
    first = os.fork()
    if first == 0:
        open_run_folder(tmp_path, resume=True, overwrite=False)
        os.write(write, b"x")
        signal.pause()
    os.read(ready, 1)
    try:
        with pytest.raises(UsageError, match=f"in use by process {first};"):
            open_run_folder(tmp_path, resume=True, overwrite=False)
    finally:
        os.kill(first, signal.SIGKILL)
        os.waitpid(first, 0)
        os.close(ready)
        os.close(write)
    open_run_folder(tmp_path, resume=True, overwrite=False).close()


def test_the_lock_is_ours_twice_over(tmp_path):
    with open_run_folder(tmp_path, resume=False, overwrite=False) as folder:
        folder.begin(run_toml="", plan_toml="")
        with pytest.raises(UsageError, match=f"in use by process {os.getpid()};"):
            open_run_folder(tmp_path, resume=True, overwrite=False)


def test_each_line_is_in_the_file_at_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with JsonLines(path) as lines:
        for step in range(3):
            lines.write({"step": step, "loss": 0.1 * step})
            assert len(lines_of(path)) == step + 1
    assert lines_of(path)[2]["loss"] == 0.1 * 2


def test_resume_drops_torn_lines_and_those_beyond_the_step(tmp_path):
    folder = begin(tmp_path)
    with JsonLines(folder.metrics) as lines:
        for step in range(1, 6):
            lines.write({"step": step})
    folder.memory.write_text('{"phase": "init"}\n{"step": 3}\n{"step": 4}\n{"step": 2, "pea')
    with open_run_folder(tmp_path, resume=True, overwrite=False) as again:
        again.begin(run_toml="", plan_toml="", step=3)
        with JsonLines(again.metrics) as lines:
            lines.write({"step": 4})
    assert [line["step"] for line in lines_of(folder.metrics)] == [1, 2, 3, 4]
    assert lines_of(folder.memory) == [{"phase": "init"}, {"step": 3}]


def test_a_torn_line_inside_costs_no_other_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 1, "lo\n7\n{"step": 2}\n')
    cut_lines(path, 2)
    assert [line["step"] for line in lines_of(path)] == [1, 2]


def test_a_full_disk_is_the_worlds_fault(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with JsonLines(tmp_path / "metrics.jsonl") as lines:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
        try:
            with pytest.raises(WorldFailed, match=os.strerror(errno.EFBIG)) as caught:
                lines.write({"text": "x" * 10000})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.exit_code == 5
    cut_lines(tmp_path / "metrics.jsonl", 0)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


def test_a_reader_finds_the_old_text_or_the_new(tmp_path):
    path = tmp_path / "latest"
    write_atomically(path, "old")
    write_atomically(path, "new")
    assert path.read_text() == "new"
    assert [each.name for each in tmp_path.iterdir()] == ["latest"]
