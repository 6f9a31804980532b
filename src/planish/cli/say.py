"""A line on standard output, at once."""

import sys


def say(text: str) -> None:
    """Write `text` and a line's end, and let no buffer hold it back."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
