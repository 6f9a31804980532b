"""What every kind of file gives: documents, in groups that are held and shuffled as one."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from planish.errors import UsageError

Message = dict[str, Any]


class DataFile(Protocol):
    """One file, cut into units that can be read without what comes before them."""

    @property
    def path(self) -> Path:
        """Where the file is."""

    @property
    def name(self) -> str:
        """The file's name inside its source, the same wherever the source lies."""

    @property
    def size_bytes(self) -> int:
        """Size when the file was found."""

    @property
    def num_units(self) -> int:
        """Units in the file; known without reading the documents."""

    def groups(self, unit: int) -> Iterator[list["Document"]]:
        """Yield the documents of a unit, as many at a time as may be held."""

    def where(self, at: int) -> str:
        """Return the place of the document at `at` as a person looks it up; may read the file again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A text, a conversation, or token ids, and where it came from."""

    content: str | list[Message] | np.ndarray
    file: DataFile
    at: int

    @property
    def where(self) -> str:
        """The place of the document as a person looks it up."""
        return self.file.where(self.at)


@contextmanager
def opened(path: Path, size_bytes: int | None = None) -> Iterator[BinaryIO]:
    """Open `path` for reading; what the system refuses becomes one sentence.

    Raises:
        UsageError: The file is missing, cannot be read, or no longer has the `size_bytes` that it was found with.
    """
    try:
        with path.open("rb") as file:
            now_bytes = os.fstat(file.fileno()).st_size
            if size_bytes not in (None, now_bytes):
                raise UsageError(
                    f"{path} changed while it was in use: {size_bytes} bytes when it was found, {now_bytes} now; "
                    "start again with files that stay as they are."
                )
            yield file
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}.") from error
