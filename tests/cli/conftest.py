"""What tests of several verbs share."""

import pytest

from planish.cli.main import main


@pytest.fixture
def plan(capsys):
    """Return (*words) -> (exit code, stdout, stderr)."""

    def run(*words):
        code = main([*map(str, words)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run
