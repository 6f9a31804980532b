"""Text files and JSON lines: cut at line ends, read and checked one unit at a time."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from planish.data.document import Document, Message, opened
from planish.errors import UsageError

TEXT_UNIT_BYTES = 4 * 2**20
JSONL_UNIT_BYTES = 2**20
_BOM = b"\xef\xbb\xbf"
_KINDS = ("text", "messages")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFile:
    """A text file: one document, or beyond `TEXT_UNIT_BYTES` one document for each stretch of lines of that size.

    A byte-order mark is stripped and CRLF becomes LF, so a text gives the same tokens whichever editor wrote it.

    Memory: two units at most; a line longer than a unit is cut between two characters.
    """

    path: Path
    name: str
    size_bytes: int

    @property
    def num_units(self) -> int:
        """Units in the file."""
        return -(-self.size_bytes // TEXT_UNIT_BYTES)

    def groups(self, unit: int) -> Iterator[list[Document]]:
        """Yield the one document of a unit.

        Raises:
            UsageError: The file cannot be read, is binary or not UTF-8; the byte is named.
        """
        with opened(self.path, self.size_bytes) as file:
            start = _line_start(file, unit * TEXT_UNIT_BYTES, limit=TEXT_UNIT_BYTES)
            stop = _line_start(file, (unit + 1) * TEXT_UNIT_BYTES, limit=TEXT_UNIT_BYTES)
            raw = _read(file, start, stop)
        if raw:
            text = _decoded(raw, self.path, start).replace("\r\n", "\n")
            yield [Document(content=text, file=self, at=start)]

    def where(self, at: int) -> str:
        """Return the file, and the byte in it where the document begins if it is not the first."""
        return f"{self.path} from byte {at}" if at else str(self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonlFile:
    """JSON lines, all with a `text` or all with chat `messages`; blank lines are passed over.

    Memory: the documents that begin in one unit of `JSONL_UNIT_BYTES`.
    """

    path: Path
    name: str
    size_bytes: int

    @property
    def num_units(self) -> int:
        """Units in the file."""
        return -(-self.size_bytes // JSONL_UNIT_BYTES)

    def groups(self, unit: int) -> Iterator[list[Document]]:
        """Yield the documents of a unit, as one group.

        Raises:
            UsageError: A line is not UTF-8, not JSON, or not a document; file and line are named.
        """
        with opened(self.path, self.size_bytes) as file:
            kind = self._first_kind(file)
            start = _line_start(file, unit * JSONL_UNIT_BYTES)
            raw = _read(file, start, _line_start(file, (unit + 1) * JSONL_UNIT_BYTES))
        documents = []
        for line in raw.split(b"\n"):
            if not _is_blank(line):
                record = self._record(line, start)
                documents.append(Document(content=self._content(record, kind, start), file=self, at=start))
            start += len(line) + 1
        if documents:
            yield documents

    def where(self, at: int) -> str:
        """Return file:line of the line that begins at byte `at`."""
        with opened(self.path, self.size_bytes) as file:
            line = 1
            while file.tell() < at and file.readline():
                line += 1
        return f"{self.path}:{line}"

    def _first_kind(self, file: BinaryIO) -> str:
        """Return which field the file's first document has: all others must have the same one."""
        file.seek(0)
        at = 0
        for line in file:
            if not _is_blank(line):
                return self._kind(self._record(line, at), at)
            at += len(line)
        return _KINDS[0]

    def _record(self, line: bytes, at: int) -> dict[str, Any]:
        text = _decoded(line, self.path, at)
        try:
            record = json.loads(text)
        except json.JSONDecodeError as error:
            raise UsageError(f"{self.where(at)} is not JSON: {error.msg} at column {error.colno}.") from error
        if not isinstance(record, dict):
            raise UsageError(f"{self.where(at)} must be a JSON object, got {_shown(record)}.")
        return record

    def _kind(self, record: dict[str, Any], at: int) -> str:
        kinds = [kind for kind in _KINDS if kind in record]
        if len(kinds) == 1:
            return kinds[0]
        if kinds:
            raise UsageError(f"{self.where(at)} has both `text` and `messages`; keep the one to train on.")
        found = ", ".join(f"`{key}`" for key in record) or "no field"
        raise UsageError(
            f"{self.where(at)} has neither `text` nor `messages`, only {found}; rename the field to `text`."
        )

    def _content(self, record: dict[str, Any], kind: str, at: int) -> str | list[Message]:
        found = self._kind(record, at)
        if found != kind:
            raise UsageError(
                f"{self.where(at)} has `{found}` where earlier lines have `{kind}`; split the file in two."
            )
        content = record[kind]
        problem = _text_problem(content, "text") if kind == "text" else _chat_problem(content)
        if problem:
            raise UsageError(f"{self.where(at)}: {problem}")
        return content


def _text_problem(content: Any, name: str) -> str | None:
    if not isinstance(content, str):
        return f"`{name}` must be a string, got {_shown(content)}."
    try:
        content.encode()
    except UnicodeEncodeError as error:
        return f"`{name}` has half of a surrogate pair at character {error.start}; write the whole character."
    return None


def _chat_problem(messages: Any) -> str | None:
    if not isinstance(messages, list) or not messages:
        return f"`messages` must be a list with at least one message, got {_shown(messages)}."
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            return f"`messages[{index}]` must be an object with `role` and `content`, got {_shown(message)}."
        for field in ("role", "content"):
            if field not in message:
                return f"`messages[{index}]` has no `{field}`."
            if problem := _text_problem(message[field], f"messages[{index}].{field}"):
                return problem
    return None


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _is_blank(line: bytes) -> bool:
    return not line.removeprefix(_BOM).strip()


def _line_start(file: BinaryIO, at: int, limit: int = -1) -> int:
    """Return where the first line that begins at byte `at` or later begins.

    With `limit`, a line that goes on for that many bytes is cut: the first character at `at` or later is returned.
    """
    if at == 0:
        return 0
    file.seek(at - 1)
    line = file.readline(limit)
    return _character_start(file, at) if len(line) == limit and not line.endswith(b"\n") else file.tell()


def _character_start(file: BinaryIO, at: int) -> int:
    file.seek(at)
    ahead = file.read(4)
    return at + next((index for index, byte in enumerate(ahead) if byte & 0xC0 != 0x80), len(ahead))


def _read(file: BinaryIO, start: int, stop: int) -> bytes:
    file.seek(start)
    return file.read(stop - start)


def _decoded(raw: bytes, path: Path, at: int) -> str:
    """Return `raw`, which lies at byte `at` of `path`, as text without a byte-order mark."""
    nul = raw.find(b"\0")
    if nul >= 0:
        raise UsageError(f"{path} is binary, not text: byte {at + nul} is NUL; give UTF-8 text.")
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path} is not UTF-8 at byte {at + error.start}; convert it, for example with `iconv -t UTF-8`."
        ) from error
    return text.removeprefix("\ufeff") if at == 0 else text
