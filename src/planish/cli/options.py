"""Arguments in, a verb's own options and the run file's settings out."""

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import tyro

from planish.errors import UsageError
from planish.runfile import describe, split_flags
from planish.units import parse_bytes, parse_count

T = TypeVar("T")


def parse(options: type[T], words: list[str], *, verb: str) -> tuple[T, list[tuple[str, Any]]]:
    """Return the verb's options and the run file's settings (`--section.key value`) that `words` hold."""
    settings, rest = split_flags(words)
    return _tyro(options, rest, verb=verb), settings


def parse_plain(options: type[T], words: list[str], *, verb: str) -> T:
    """Return the options of a verb that takes no run file."""
    return _tyro(options, words, verb=verb)


def size_bytes(text: str, *, name: str) -> int:
    """Return the bytes of an option such as "4GiB"."""
    return _usage(parse_bytes, text, name)


def count(text: str, *, name: str) -> int:
    """Return the number of an option such as 4096 or "4K"."""
    return _usage(parse_count, text, name)


def _usage(parse_text: Callable[..., int], text: str, name: str) -> int:
    try:
        return parse_text(text, name=name)
    except ValueError as error:
        raise UsageError(str(error)) from error


def show_settings() -> None:
    """Print every setting of a run file with its meaning."""
    sys.stdout.write(f"\nsettings of the run file, also as flags:\n\n{describe()}\n")


def _tyro(options: type[T], words: list[str], *, verb: str) -> T:
    return tyro.cli(options, args=words, prog=f"planish {verb}", config=(tyro.conf.FlagCreatePairsOff,))
