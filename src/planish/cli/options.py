"""Arguments in, a verb's own options and the run file's settings out; what is wrong with them in one sentence."""

import contextlib
import dataclasses
import io
import re
import sys
from collections.abc import Callable, Sequence
from itertools import dropwhile, takewhile
from typing import Any, TypeVar

import tyro

from planish.cli.settings import describe_settings, setting_flags
from planish.decode import nearest
from planish.errors import UsageError
from planish.runfile import split_flags
from planish.units import parse_bytes, parse_count

T = TypeVar("T")

_FRAME = re.compile(r"^[│╭╰|+] ?|[ ─]*[│╮╯|+]$")
_RULE = re.compile(r"\s*[─-]*\s*")


def parse(options: type[T], words: list[str], *, verb: str) -> tuple[T, list[tuple[str, Any]]]:
    """Return the verb's options and the run file's settings (`--section.key value`) that `words` hold.

    Raises:
        UsageError: Arguments that cannot be used.
    """
    settings, rest = split_flags(words)
    try:
        return _parse(options, rest, verb, setting_flags()), settings
    except SystemExit:  # the verb's own help was shown
        sys.stdout.write(f"\nSettings of the run file, also as flags:\n{describe_settings()}\n")
        raise


def parse_plain(options: type[T], words: list[str], *, verb: str) -> T:
    """Return the options of a verb that takes no run file.

    Raises:
        UsageError: Arguments that cannot be used.
    """
    return _parse(options, words, verb)


def _parse(options: type[T], words: list[str], verb: str, flags: Sequence[str] = ()) -> T:
    known = [*(f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(options)), *flags]
    for before, word in zip(["", *words], words, strict=False):
        if not word or (word.startswith("--") and word.endswith("=")):
            name = word.rstrip("=") or before
            raise UsageError(f"{f'`{name}`' if name.startswith('--') else 'an argument'} is empty; leave it out.")
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(options, args=words, prog=f"planish {verb}", config=(tyro.conf.FlagCreatePairsOff,))
    except SystemExit as stop:
        if not stop.code:
            raise
        raise UsageError(_sentence(said.getvalue(), known, verb)) from None


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


def _sentence(box: str, known: Sequence[str], verb: str) -> str:
    """Return what tyro frames in a box as a sentence, made of the text between its title and the first rule."""
    lines = [_FRAME.sub("", line).rstrip() for line in box.splitlines()[1:]]
    head = list(takewhile(lambda line: not _RULE.fullmatch(line), dropwhile(_RULE.fullmatch, lines)))
    text = " ".join(" ".join(head).split()).rstrip(".")
    if match := re.match(r"Unrecognized options: (-[^\s,]*)", text):
        return f"`planish {verb}` has no option `{match[1]}`; {nearest(match[1], known)}"
    if match := re.match(r"Unrecognized options: (\S+)", text):
        text = f"`planish {verb}` takes no further argument {match[1]!r}"
    elif text.startswith("Missing"):  # a line a little indented for each, its meaning further in below
        names = re.findall(r"^ {4,6}(\S+)", "\n".join(head), re.MULTILINE)
        text = f"`planish {verb}` needs {' and '.join(names)}"
    return f"{text}; see `planish {verb} --help`."
