"""What tests of several verbs share."""

import contextlib
import functools
import io
import os

import pytest

from forks import answers_of, launched_store, start_child
from planish.cli.main import main


@pytest.fixture
def plan(capsys):
    """Return (*words) -> (exit code, stdout, stderr)."""

    def run(*words):
        code = main([*map(str, words)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


@pytest.fixture
def on_tiny_model(model_folder, text_file, tmp_path, capsys):
    """Return (*settings) -> (verb, *flags, family) -> (exit code, stdout, stderr); a run goes to tmp_path / "run"."""

    def with_settings(*settings):
        def run(verb, *flags, family="llama"):
            folder = tmp_path / f"model-{family}"
            words = [verb, "--model.from", str(folder if folder.exists() else model_folder(family))]
            words += ["--data.train", str(text_file), "--data.context", "32", *settings]
            words += ["--save.dir", str(tmp_path / "run"), "--train.schedule", "constant"]
            code = main([*words, *map(str, flags)])
            said = capsys.readouterr()
            return code, said.out, said.err

        return run

    return with_settings


@pytest.fixture
def torchrun():
    """Return (*words, ranks) -> (exit code, stdout, stderr) of each rank, forked as `torchrun` would start them.

    `before` is called in each rank's process before it begins, `meanwhile` here with all processes once they have.
    """

    def take_part(words, rank, ranks, port, before):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        place |= {"TORCHELASTIC_RUN_ID": "test", "TORCHELASTIC_USE_AGENT_STORE": True}
        os.environ.update({name: str(value) for name, value in place.items()})  # noqa: TID251 - as torchrun does
        before()
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
            code = main([*map(str, words)])
        return code, out.getvalue(), err.getvalue()

    def run(*words, ranks, before=lambda: None, meanwhile=lambda _: None):
        with launched_store() as port:
            work = [functools.partial(take_part, words, rank, ranks, port, before) for rank in range(ranks)]
            children = [start_child(each) for each in work]
            meanwhile([process for process, _ in children])
            return answers_of(children)

    return run
