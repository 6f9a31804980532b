"""From what the user wrote to files: folders, built-ins, and everything that is not there."""

import hashlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import planish
from planish.data.encode import Encoder
from planish.data.sources import open_corpora
from planish.errors import UsageError


@pytest.fixture
def encode(tokenizer):
    return Encoder(tokenizer)


def names(corpora):
    return [[file.name for file in corpus.files] for corpus in corpora]


def test_a_folder_is_searched_through_in_sorted_order(tmp_path, encode):
    for name in ("b/z.txt", "b/a.TXT", "a/deep/er.jsonl", "c.txt", "notes.md", "b/image.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('{"text": "x"}\n')
    assert names(open_corpora([str(tmp_path)], encode)) == [["c.txt", "a/deep/er.jsonl", "b/a.TXT", "b/z.txt"]]


def test_an_empty_file_among_good_ones_is_left_out_and_counted(tmp_path, encode):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "good.txt").write_text("good")
    [corpus] = open_corpora([str(tmp_path)], encode)
    assert (names([corpus]), corpus.num_empty) == ([["good.txt"]], 1)


@pytest.mark.parametrize("apart", [False, True])
def test_an_empty_file_that_is_named_is_refused(tmp_path, encode, apart):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "good.txt").write_text("good")
    with pytest.raises(UsageError, match=r"empty\.txt is empty; there is no text to read, leave it out\."):
        open_corpora([str(tmp_path / "good.txt"), str(tmp_path / "empty.txt")], encode, apart=apart)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("missing.txt", 'missing.txt does not exist; name a file, a folder, or a built-in such as "builtin:english".'),
        ("notes.md", "notes.md is of no known kind; files end in .txt, .jsonl, .parquet, .bin."),
        ("folder", "folder holds no text: no file in it ends in .txt, .jsonl, .parquet, .bin."),
        ("builtin:pyton", "builtin:pyton is no built-in corpus; did you mean `python`?"),
    ],
)
def test_what_cannot_be_a_source_is_refused(tmp_path, monkeypatch, encode, source, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.md").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError) as refused:
        open_corpora([source], encode)
    assert str(refused.value) == message


def test_a_link_that_leads_nowhere_is_named(tmp_path, encode):
    (tmp_path / "link.txt").symlink_to(tmp_path / "gone.txt")
    with pytest.raises(UsageError, match=r"link\.txt cannot be read: No such file or directory\."):
        open_corpora([str(tmp_path)], encode)


def test_the_first_file_of_each_source_is_checked_at_once_and_the_others_when_they_are_read(tmp_path, encode):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text("good")
    (tmp_path / "one" / "b.txt").write_bytes(b"\xff")
    sources = [str(tmp_path / "one"), str(tmp_path / "two")]
    open_corpora(sources, encode)
    (tmp_path / "two" / "a.txt").write_bytes(b"bad \xff")
    with pytest.raises(UsageError, match=r"two/a\.txt is not UTF-8 at byte 4"):
        open_corpora(sources, encode)


def test_the_english_corpus_is_the_text_that_its_note_tells_of(encode):
    [corpus] = open_corpora(["builtin:english"], encode)
    [file] = corpus.files
    raw = file.path.read_bytes()
    assert file.size_bytes == len(raw) == 432_978
    raw.decode("ascii")
    note = Path(planish.__file__).parent.joinpath("data", "english.md").read_text(encoding="utf-8")
    assert hashlib.sha256(raw).hexdigest() in re.findall(r"`(\w{64})`", note)


def test_the_python_corpus_is_the_installed_sources_without_their_tests(encode):
    [corpus] = open_corpora(["builtin:python"], encode)
    found = {file.name for file in corpus.files}
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    assert {f"{version}/dataclasses.py", "torch/nn/modules/module.py"} <= found
    assert not [name for name in found if {"test", "tests", "site-packages"} & set(Path(name).parts)]
    assert 30e6 < sum(file.size_bytes for file in corpus.files) < 120e6
    assert corpus.num_empty > 0


def test_the_python_corpus_is_found_without_importing_torch_submodules():
    code = (
        "import sys\n"
        "from planish.data.sources import _python\n"
        "before = {name for name in sys.modules if name.startswith('torch')}\n"
        "assert any(True for _ in _python())\n"
        "print({name for name in sys.modules if name.startswith('torch')} - before)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
