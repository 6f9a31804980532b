"""What a verb gives to its user: a line on standard output, at once, and files where they were asked for."""

import sys
from pathlib import Path

from planish.errors import UsageError


def write_file(path: Path, text: str) -> None:
    """Write `text` into the file that the user named.

    Raises:
        UsageError: It cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}.") from error


def say(text: str) -> None:
    """Write `text` and a line's end, and let no buffer hold it back."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
