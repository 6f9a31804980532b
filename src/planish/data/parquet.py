"""Parquet files: a column `text`, streamed; the only module that knows pyarrow."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from planish.data.document import Document, opened
from planish.errors import UsageError

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile as Table

COLUMN = "text"
GROUP_ROWS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetFile:
    """A parquet file with one document in each row of its column `text`.

    A unit is a row group; it is decoded in order, so documents are shuffled among `GROUP_ROWS` neighbours.

    Memory: `GROUP_ROWS` documents and the pages that they lie in.
    """

    path: Path
    name: str
    size_bytes: int
    first_rows: tuple[int, ...]

    @classmethod
    def open(cls, path: Path, name: str, size_bytes: int) -> Self:
        """Return the file, after a look at its footer.

        Raises:
            UsageError: pyarrow is not installed, or the file is not parquet or has no text column `text`.
        """
        with _table(path, size_bytes) as table:
            field = next((each for each in table.schema_arrow if each.name == COLUMN), None)
            if field is None:
                columns = ", ".join(f"`{each}`" for each in table.schema_arrow.names)
                raise UsageError(f"{path} has no column `{COLUMN}`, only {columns}; rename the one to train on.")
            if str(field.type) not in ("string", "large_string", "string_view"):
                raise UsageError(f"{path}: column `{COLUMN}` must hold strings, it holds {field.type}.")
            sizes = [table.metadata.row_group(group).num_rows for group in range(table.num_row_groups)]
        firsts = tuple(sum(sizes[:group]) for group in range(len(sizes)))
        return cls(path=path, name=name, size_bytes=size_bytes, first_rows=firsts)

    @property
    def num_units(self) -> int:
        """Row groups in the file."""
        return len(self.first_rows)

    def groups(self, unit: int) -> Iterator[list[Document]]:
        """Yield the documents of a row group, `GROUP_ROWS` at a time.

        Raises:
            UsageError: The file cannot be read, or a text is null.
        """
        row = self.first_rows[unit]
        with _table(self.path, self.size_bytes) as table:
            for batch in table.iter_batches(batch_size=GROUP_ROWS, row_groups=[unit], columns=[COLUMN]):
                texts = batch.column(0).to_pylist()
                if None in texts:
                    raise UsageError(f"{self.where(row + texts.index(None))}: `{COLUMN}` must be a string, got null.")
                yield [Document(content=text, file=self, at=row + index) for index, text in enumerate(texts)]
                row += len(texts)

    def where(self, at: int) -> str:
        """Return the file and the row, counted from 0."""
        return f"{self.path} row {at}"


@contextmanager
def _table(path: Path, size_bytes: int) -> Iterator["Table"]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UsageError(
            f"{path} needs pyarrow to be read; install it with `pip install 'planish[parquet]'`."
        ) from error
    with opened(path, size_bytes) as file:
        try:
            yield pyarrow.parquet.ParquetFile(file, buffer_size=2**20, pre_buffer=False)
        except pyarrow.ArrowException as error:
            raise UsageError(f"{path} cannot be read as parquet: {error}") from error
