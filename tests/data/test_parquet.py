"""Parquet: streamed by row group, and each unfit column named."""

import subprocess
import sys
from itertools import chain

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from planish.data import parquet
from planish.data.feed import open_feed
from planish.data.parquet import ParquetFile
from planish.errors import UsageError


def parquet_file(path, columns, **options):
    pq.write_table(pa.table(columns), path, **options)
    return ParquetFile.open(path, path.name, path.stat().st_size)


def groups(file):
    return [[each.content for each in group] for unit in range(file.num_units) for group in file.groups(unit)]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_rows_come_in_groups_of_the_file_and_of_bounded_size(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(parquet, "GROUP_ROWS", 4)
    texts = [f"row {number}" for number in range(23)]
    columns = {"id": list(range(23)), "text": pa.array(texts, type=kind)}
    found = groups(parquet_file(tmp_path / "a.parquet", columns, row_group_size=10))
    assert list(chain(*found)) == texts
    assert [len(group) for group in found] == [4, 4, 2, 4, 4, 2, 3]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"text": [1, 2]}, "column `text` must hold strings, it holds int64"),
        ({"text": [b"raw"]}, "column `text` must hold strings, it holds binary"),
        ({"text": [["a", "b"]]}, r"column `text` must hold strings, it holds list<\w+: string>"),
        ({"body": ["a"], "id": [1]}, "has no column `text`, only `body`, `id`; rename the one to train on"),
    ],
)
def test_an_unfit_column_is_named_when_the_file_is_opened(tmp_path, columns, message):
    with pytest.raises(UsageError, match=rf"a\.parquet:? {message}"):
        parquet_file(tmp_path / "a.parquet", columns)


def test_a_null_text_is_named_with_its_row(tmp_path):
    file = parquet_file(tmp_path / "a.parquet", {"text": ["a", "b", "c", None]}, row_group_size=2)
    with pytest.raises(UsageError, match=r"a\.parquet row 3: `text` must be a string, got null\."):
        groups(file)


def test_what_is_no_parquet_is_refused(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 but not for long")
    with pytest.raises(UsageError, match=r"a\.parquet cannot be read as parquet:"):
        ParquetFile.open(tmp_path / "a.parquet", "a.parquet", 21)


def test_a_feed_found_again_inside_a_row_group_goes_on_alike(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "GROUP_ROWS", 4)
    parquet_file(tmp_path / "a.parquet", {"text": [f"row {number}" for number in range(23)]}, row_group_size=10)
    shape = {"tokenizer": tokenizer, "context": 16, "rows": 1, "seed": 5}
    feed = open_feed((str(tmp_path),), **shape)
    for _ in range(3):
        feed.next()
    resumed = open_feed((str(tmp_path),), **shape)
    resumed.seek(feed.position)
    for _ in range(20):
        assert resumed.next().input_ids.tolist() == feed.next().input_ids.tolist()


def test_without_pyarrow_the_extra_is_named(tmp_path):
    code = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from pathlib import Path\n"
        "from planish.data.parquet import ParquetFile\n"
        "try:\n    ParquetFile.open(Path('a.parquet'), 'a.parquet', 0)\n"
        "except ValueError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "a.parquet needs pyarrow to be read; install it with `pip install 'planish[parquet]'`.\n"
