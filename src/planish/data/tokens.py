"""Token files: ids that were tokenised before, as one flat array of uint16 or uint32."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Self

import numpy as np

from planish.data.document import Document, opened
from planish.errors import UsageError

UNIT_TOKENS = 2**20
_DTYPES = ("uint16", "uint32")
_PROBED_TOKENS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFile:
    """A `.bin` of little-endian ids, a document up to and including each `eos_id`.

    The dtype is what the sidecar `NAME.bin.json` says (`{"dtype": "uint32"}`); without one it is uint16 when the
    tokenizer knows at most 65,536 ids, else uint32.

    Memory: nothing but the pages that are read. A document longer than `UNIT_TOKENS` may be cut there, as is a file
    without any `eos_id`.
    """

    path: Path
    name: str
    size_bytes: int
    dtype: np.dtype
    eos_id: int | None

    @classmethod
    def open(cls, path: Path, name: str, size_bytes: int, *, vocab_size: int, eos_id: int | None) -> Self:
        """Return the file, after a look at its size and its first ids.

        Raises:
            UsageError: The sidecar cannot be used, or the ids are not of the dtype.
        """
        dtype = _sidecar_dtype(path) or np.dtype("<u2" if vocab_size <= 2**16 else "<u4")
        found = cls(path=path, name=name, size_bytes=size_bytes, dtype=dtype, eos_id=eos_id)
        remedy = f'write `{{"dtype": ...}}` with one of {", ".join(_DTYPES)} to {_sidecar(path).name} beside it.'
        if size_bytes % dtype.itemsize:
            raise UsageError(
                f"{path} has {size_bytes} bytes, no whole number of {dtype.name} ids: byte "
                f"{size_bytes - size_bytes % dtype.itemsize} begins a broken one; {remedy}"
            )
        ids = found._ids()[:_PROBED_TOKENS]
        if dtype.itemsize == 2 and len(ids) >= 16 and ids[::2].any() and not ids[1::2].any():
            raise UsageError(f"{path} holds uint32 ids, read as uint16: from byte 2 on every other id is 0; {remedy}")
        return found

    @property
    def num_units(self) -> int:
        """Units in the file."""
        return -(-self.size_bytes // (UNIT_TOKENS * self.dtype.itemsize))

    def groups(self, unit: int) -> Iterator[list[Document]]:
        """Yield the documents of a unit, as views into the file.

        Raises:
            UsageError: The file cannot be read.
        """
        ids = self._ids()
        start, stop = self._boundary(ids, unit), self._boundary(ids, unit + 1)
        ends = [start + int(end) + 1 for end in np.flatnonzero(ids[start:stop] == self.eos_id)]
        bounds = [start, *ends, stop]
        yield [Document(content=ids[a:b], file=self, at=a) for a, b in pairwise(bounds) if a < b]

    def where(self, at: int) -> str:
        """Return the file and the byte where token `at` begins."""
        return f"{self.path} at byte {at * self.dtype.itemsize}"

    def _ids(self) -> np.ndarray:
        with opened(self.path, self.size_bytes) as file:
            return np.memmap(file, dtype=self.dtype, mode="r", shape=(self.size_bytes // self.dtype.itemsize,))

    def _boundary(self, ids: np.ndarray, unit: int) -> int:
        """Return where a unit begins: where the first document at its nominal start or later does, if that is near."""
        at = unit * UNIT_TOKENS
        if at == 0:
            return 0
        ahead = ids[at - 1 : at - 1 + UNIT_TOKENS]
        ends = np.flatnonzero(ahead == self.eos_id)
        if len(ends):
            return at + int(ends[0])
        return at if len(ahead) == UNIT_TOKENS else len(ids)


def _sidecar(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def _sidecar_dtype(path: Path) -> np.dtype | None:
    sidecar = _sidecar(path)
    if not sidecar.exists():
        return None
    with opened(sidecar) as file:
        try:
            tree = json.loads(file.read())
        except ValueError as error:
            raise UsageError(f"{sidecar} is not JSON: {error}.") from error
    dtype = tree.get("dtype") if isinstance(tree, dict) else None
    if dtype not in _DTYPES:
        raise UsageError(f"{sidecar}: `dtype` must be one of {', '.join(_DTYPES)}, got {dtype!r}.")
    return np.dtype(dtype).newbyteorder("<")
