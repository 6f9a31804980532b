"""Results that survive an interruption: a line each in a file that belongs to one set of inputs."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planish.errors import WorldFailed


def key_of(*parts: Any) -> str:
    """Return a hash of what results depend on, of anything that JSON can say."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Journal:
    """Named results in a JSON-lines file, read again when it was written for the same inputs.

    Args:
        path: The file; None keeps results in memory alone.
        key: A hash of the inputs; a file of others is begun anew.
    """

    def __init__(self, path: Path | None, key: str) -> None:
        self._path = path
        self._found: dict[str, Any] = {}
        if path is None:
            return
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        entries = [entry for entry in map(_parsed, lines) if entry is not None]
        if entries and entries[0].get("key") == key:
            self._found = {entry["name"]: entry["value"] for entry in entries[1:]}
        else:
            self._write({"key": key}, mode="w")

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def __getitem__(self, name: str) -> Any:
        return self._found[name]

    @property
    def entries(self) -> Mapping[str, Any]:
        """Every result by name."""
        return self._found

    def put(self, name: str, value: Any) -> None:
        """Keep a result; it is on disk when this returns.

        Raises:
            WorldFailed: The disk refuses.
        """
        self._found[name] = value
        if self._path is not None:
            self._write({"name": name, "value": value}, mode="a")

    def _write(self, entry: dict[str, Any], *, mode: str) -> None:
        path = self._path
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open(mode, encoding="utf-8") as file:
                file.write("\n" + json.dumps(entry) + "\n")  # a line that was cut off stays a line of its own
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise WorldFailed(f"{path} cannot be written: {error.strerror or error}.") from error


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError:
        return None
    return entry if isinstance(entry, dict) else None
