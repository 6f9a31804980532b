"""When a checkpoint counts: once every file of it is durable, and listed with its checksum."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from planish.train.run_folder import RunFolder, fsync_folder, write_atomically

_NAME = re.compile(r"step-(\d{8,})")
_MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsealed:
    """A checkpoint all of whose files are written, or will be, and that does not count yet.

    Attributes:
        folder: Of the run.
        step: Optimizer steps done.
    """

    folder: RunFolder
    step: int

    @property
    def path(self) -> Path:
        """Where it will be."""
        return self.folder.checkpoints / f"step-{self.step:08d}"

    @property
    def partial(self) -> Path:
        """Where it is."""
        return self.path.with_name(f".{self.path.name}.partial")

    def seal(self, keep: int) -> None:
        """Make the checkpoint complete and durable, the newest of the run; older ones than the `keep` newest go.

        Raises:
            OSError: The disk refuses; earlier checkpoints stay.
        """
        _seal(self.partial, self.step)
        _publish(self.partial, self.path)
        write_atomically(self.folder.latest, f"{self.path.name}\n")
        _prune(self.folder, self.step, keep)

    def drop(self) -> None:
        """Remove what is there of it."""
        shutil.rmtree(self.partial, ignore_errors=True)


def recover(folder: RunFolder) -> None:
    """Remove what a killed save or removal left; put back a checkpoint that was about to be replaced."""
    for hidden in folder.checkpoints.glob(".step-*"):
        final = hidden.with_name(hidden.stem.removeprefix("."))
        if hidden.suffix == ".replaced" and not final.exists():
            hidden.rename(final)
        else:
            shutil.rmtree(hidden)


def damage_of(path: Path, *, checksums: bool) -> str | None:
    """Return which file is not what was written, or None."""
    try:
        manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
        listed = {"step": manifest["step"], "files": manifest["files"]}
        if manifest["sha256"] != digest(json.dumps(listed)):
            return f"{_MANIFEST} was altered"
    except (OSError, ValueError, LookupError, TypeError):
        return f"{_MANIFEST} is missing or unreadable"
    for name, written in manifest["files"].items():
        try:
            with (path / name).open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size != written["bytes"]:
                    return f"{name} has {size} bytes where {written['bytes']} were written"
                if checksums and hashlib.file_digest(file, "sha256").hexdigest() != written["sha256"]:
                    return f"{name} was altered (its checksum differs)"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return None


def checkpoints_in(folder: Path) -> Iterator[tuple[int, Path]]:
    """Yield the step and the path of each checkpoint that has its name."""
    for path in folder.glob("step-*"):
        if name := _NAME.fullmatch(path.name):
            yield int(name.group(1)), path


def digest(text: str) -> str:
    """Return the SHA-256 of `text`."""
    return hashlib.sha256(text.encode()).hexdigest()


def _seal(partial: Path, step: int) -> None:
    """Make every file durable and list it; the list comes last, so that what has one is complete."""
    files = {}
    for path in sorted(path for path in partial.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            checksum = hashlib.file_digest(file, "sha256").hexdigest()
        files[str(path.relative_to(partial))] = {"bytes": path.stat().st_size, "sha256": checksum}
    fsync_folder(partial / "state")
    listed = {"step": step, "files": files}
    write_atomically(partial / _MANIFEST, json.dumps(listed | {"sha256": digest(json.dumps(listed))}, indent=1))


def _publish(partial: Path, final: Path) -> None:
    replaced = final.with_name(f".{final.name}.replaced")
    if final.exists():  # saved before at this step, or damaged and reached again from an older one
        final.rename(replaced)
    partial.rename(final)
    fsync_folder(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _prune(folder: RunFolder, step: int, keep: int) -> None:
    """Remove all but the `keep` newest up to `step`; later ones were damaged, and the run went back behind them."""
    found = sorted(checkpoints_in(folder.checkpoints))
    older = [path for at, path in found if at <= step]
    for path in older[:-keep] + [path for at, path in found if at > step]:
        removed = path.with_name(f".{path.name}.removed")
        path.rename(removed)
        shutil.rmtree(removed)
