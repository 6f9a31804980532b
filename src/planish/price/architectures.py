"""Well-known public architectures: a name in, its config out; read from a table of sizes, nothing is fetched."""

import json
from functools import cache
from pathlib import Path
from typing import Any

_FILE = Path(__file__).with_suffix(".json")


@cache
def architectures() -> dict[str, dict[str, Any]]:
    """Return every architecture's config by its name in lower case."""
    return json.loads(_FILE.read_text(encoding="utf-8"))


def find_architecture(name: str) -> dict[str, Any] | None:
    """Return the config called `name`, with or without the organisation before it; None where there is none."""
    known = architectures()
    short = name.lower().rpartition("/")[2].removeprefix("meta-")
    for each in (short, short.removesuffix("-base"), short.removesuffix("-instruct"), f"{short}-instruct"):
        if each in known:
            return known[each]
    return None
