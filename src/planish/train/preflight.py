"""What all ranks must have in common before any of them loads a model: plan, settings, versions and files."""

import hashlib
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

from planish.data.sources import files_of
from planish.errors import UsageError
from planish.models.builtin import model_folder
from planish.runfile import RunFile

_LIBRARIES = ("planish", "torch", "transformers")
_CONFIGS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
# Beginning and end of a file that are read; of more files only names and sizes are compared.
_SAMPLE_BYTES, _MOST_SAMPLED = 4096, 1000


def common_facts(run: RunFile) -> dict[str, str]:
    """Return, by what it is of, what `World.require_same` holds the ranks to.

    Data files are told apart by name, size, beginning and end; a change in the middle is not found.

    Raises:
        UsageError: A file that is not there, or cannot be read.
    """
    return {
        "the plan": _digest([run.plan.to_toml().encode()]),
        "settings": _digest([run.to_toml().encode()]),
        "the version of Python": ".".join(map(str, sys.version_info[:3])),
        **{f"the version of {name}": version(name) for name in _LIBRARIES},
        "the files of `data.train`": _files(run.data.train),
        "the files of `data.eval`": _files(run.data.eval),
        "config and tokenizer of the model": _model(run),
    }


def _files(sources: Iterable[str]) -> str:
    found = [each for source in sources for each in files_of(source)]
    sampled = len(found) <= _MOST_SAMPLED
    return _digest(part for path, name in found for part in (name.encode(), *_sample(path, contents=sampled)))


def _sample(path: Path, *, contents: bool) -> Iterable[bytes]:
    try:
        size_bytes = path.stat().st_size
        yield str(size_bytes).encode()
        if contents:
            with path.open("rb") as file:
                yield file.read(_SAMPLE_BYTES)
                file.seek(max(0, size_bytes - _SAMPLE_BYTES))
                yield file.read(_SAMPLE_BYTES)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from error


def _model(run: RunFile) -> str:
    section = run.model
    if section.gguf is not None:
        return _digest(_sample(section.gguf, contents=True))
    folders = [model_folder(each) for each in (section.from_, section.tokenizer) if each is not None]
    paths = [folder / name for folder in folders for name in _CONFIGS]
    paths += [] if section.config is None else [section.config]
    return _digest(path.read_bytes() for path in paths if path.is_file())


def _digest(parts: Iterable[bytes]) -> str:
    """Return a hash of `parts` in their order."""
    total = hashlib.sha256()
    for each in parts:
        total.update(hashlib.sha256(each).digest())
    return total.hexdigest()
