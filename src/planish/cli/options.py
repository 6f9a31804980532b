"""Arguments in, a verb's own options and the run file's settings out."""

import sys
from typing import Any, TypeVar

import tyro

from planish.runfile import describe, split_flags

T = TypeVar("T")


def parse(options: type[T], words: list[str], *, verb: str) -> tuple[T, list[tuple[str, Any]]]:
    """Return the verb's options and the run file's settings (`--section.key value`) that `words` hold."""
    settings, rest = split_flags(words)
    return _tyro(options, rest, verb=verb), settings


def parse_plain(options: type[T], words: list[str], *, verb: str) -> T:
    """Return the options of a verb that takes no run file."""
    return _tyro(options, words, verb=verb)


def show_settings() -> None:
    """Print every setting of a run file with its meaning."""
    sys.stdout.write(f"\nsettings of the run file, also as flags:\n\n{describe()}\n")


def _tyro(options: type[T], words: list[str], *, verb: str) -> T:
    return tyro.cli(options, args=words, prog=f"planish {verb}", config=(tyro.conf.FlagCreatePairsOff,))
