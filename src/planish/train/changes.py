"""What differs between the settings of a run and those it is resumed with."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planish.errors import UsageError
from planish.runfile import RunFile

# A row would be another row: what follows would not be the run that began. Other data, weights of sources, tokenizers
# and models are refused by the feed and the checkpoint, which know them by content and not by name.
_FIXED = ("data.context", "data.pack", "data.loss_on", "data.long_documents")


def setting_changes(run: RunFile, run_toml: Path) -> str | None:
    """Return a sentence that names each setting of `run` that differs from `run_toml`, or None.

    Raises:
        UsageError: One differs that makes the continuation another run, or the file cannot be read.
    """
    try:
        before = _flat(tomllib.loads(run_toml.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise UsageError(f"{run_toml} cannot be read: {error}; write it anew, or start a new run folder.") from error
    now = _flat(tomllib.loads(run.to_toml()))
    names = [name for name in sorted(before | now) if before.get(name) != now.get(name) and name != "save.dir"]
    told = [f"`{name}` is {_shown(now.get(name))} and was {_shown(before.get(name))}" for name in names]
    if fixed := [sentence for name, sentence in zip(names, told, strict=True) if name in _FIXED]:
        raise UsageError(
            f"{fixed[0]}, so that what follows would be another run; resume with what it was, or start a new run "
            "whose `model.from` is the checkpoint."
        )
    return f"resuming with other settings: {'; '.join(told)}." if told else None


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


def _shown(value: Any) -> str:
    return "unset" if value is None else repr(value)
