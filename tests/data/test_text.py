"""Text files and JSON lines: units meet without gap or overlap, and each bad input is named with its line or byte."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planish.data import text
from planish.data.text import JsonlFile, TextFile
from planish.errors import UsageError


def text_file(path, raw):
    path.write_bytes(raw)
    return TextFile(path=path, name=path.name, size_bytes=len(raw))


def jsonl_file(path, raw):
    path.write_bytes(raw)
    return JsonlFile(path=path, name=path.name, size_bytes=len(raw))


def contents(file):
    return [each.content for unit in range(file.num_units) for group in file.groups(unit) for each in group]


@settings(deadline=None)
@given(lines=st.lists(st.text(st.characters(exclude_characters="\0\n\r\ufeff", codec="utf-8"), max_size=30)))
@pytest.mark.parametrize("unit_bytes", [1, 7, 64])
def test_the_units_of_a_text_are_its_lines_and_nothing_else(unit_bytes, lines):
    whole = "\n".join(lines)
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "TEXT_UNIT_BYTES", unit_bytes)
        file = text_file(Path(folder, "a.txt"), whole.encode())
        parts = contents(file)
        assert "".join(parts) == whole
        longest = max((len(f"{line}\n".encode()) for line in lines), default=0)
        assert all(part.endswith("\n") for part in parts[:-1]) or longest > unit_bytes
        assert all(len(part.encode()) <= 2 * unit_bytes + 3 for part in parts)


def test_a_line_longer_than_a_unit_is_cut_between_two_characters(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "TEXT_UNIT_BYTES", 2**21 + 1)
    whole = "日" * 2**21
    parts = contents(text_file(tmp_path / "one_line.txt", whole.encode()))
    assert "".join(parts) == whole
    assert [len(part) for part in parts] == [699051, 1398101]


@settings(deadline=None)
@given(texts=st.lists(st.text(st.characters(codec="utf-8"), max_size=30), min_size=1))
@pytest.mark.parametrize("unit_bytes", [1, 50, 2**20])
def test_the_units_of_json_lines_are_its_documents_in_order(unit_bytes, texts):
    raw = "\n\n".join(json.dumps({"text": each}, ensure_ascii=False) for each in texts).encode()
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "JSONL_UNIT_BYTES", unit_bytes)
        assert contents(jsonl_file(Path(folder, "a.jsonl"), raw)) == texts


def test_a_text_is_the_same_whichever_editor_wrote_it(tmp_path):
    plain = contents(text_file(tmp_path / "plain.txt", b"one\ntwo\n"))
    assert contents(text_file(tmp_path / "windows.txt", b"\xef\xbb\xbfone\r\ntwo\r\n")) == plain == ["one\ntwo\n"]


def test_json_lines_with_a_byte_order_mark_and_crlf_are_accepted(tmp_path):
    file = jsonl_file(tmp_path / "windows.jsonl", b'\xef\xbb\xbf{"text": "one"}\r\n\r\n{"text": "two\\r\\n"}\r\n')
    assert contents(file) == ["one", "two\r\n"]


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"caf\xe9 au lait\n", "bad.txt is not UTF-8 at byte 3; convert it, for example with `iconv -t UTF-8`."),
        (b"\xef\xbb\xbfcaf\xe9\n", "bad.txt is not UTF-8 at byte 6; convert it, for example with `iconv -t UTF-8`."),
        (b"\x7fELF\x02\0\xff", "bad.txt is binary, not text: byte 5 is NUL; give UTF-8 text."),
        ("mixed".encode("utf-16"), "bad.txt is binary, not text: byte 3 is NUL; give UTF-8 text."),
    ],
)
def test_what_is_no_text_is_named_with_its_byte(tmp_path, raw, message):
    file = text_file(tmp_path / "bad.txt", raw)
    with pytest.raises(UsageError) as refused:
        contents(file)
    assert str(refused.value) == f"{tmp_path}/{message}"


def test_the_byte_counts_from_the_beginning_of_the_file_in_later_units_too(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "TEXT_UNIT_BYTES", 8)
    file = text_file(tmp_path / "bad.txt", b"good line\nanother\nb\xffd\n")
    with pytest.raises(UsageError, match=r"bad\.txt is not UTF-8 at byte 19;"):
        contents(file)


GOOD = '{"text": "good"}'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "open', ":2 is not JSON: Unterminated string starting at at column 10."),
        ('["text"]', ':2 must be a JSON object, got ["text"].'),
        (
            '{"body": "x", "id": 1}',
            ":2 has neither `text` nor `messages`, only `body`, `id`; rename the field to `text`.",
        ),
        ("{}", ":2 has neither `text` nor `messages`, only no field; rename the field to `text`."),
        ('{"text": "a", "messages": []}', ":2 has both `text` and `messages`; keep the one to train on."),
        ('{"messages": []}', ":2 has `messages` where earlier lines have `text`; split the file in two."),
        ('{"text": null}', ":2: `text` must be a string, got null."),
        ('{"text": 5}', ":2: `text` must be a string, got 5."),
        (
            '{"text": "half \\ud83d"}',
            ":2: `text` has half of a surrogate pair at character 5; write the whole character.",
        ),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    file = jsonl_file(tmp_path / "bad.jsonl", f"{GOOD}\n{line}\n{GOOD}\n".encode())
    with pytest.raises(UsageError) as refused:
        contents(file)
    assert str(refused.value) == f"{tmp_path}/bad.jsonl{message}"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("null", "`messages` must be a list with at least one message, got null."),
        ("[]", "`messages` must be a list with at least one message, got []."),
        ('["hi"]', '`messages[0]` must be an object with `role` and `content`, got "hi".'),
        ('[{"role": "user"}]', "`messages[0]` has no `content`."),
        ('[{"content": "hi"}]', "`messages[0]` has no `role`."),
        ('[{"role": "user", "content": null}]', "`messages[0].content` must be a string, got null."),
        ('[{"role": 1, "content": "hi"}]', "`messages[0].role` must be a string, got 1."),
    ],
)
def test_a_bad_conversation_is_named(tmp_path, messages, message):
    file = jsonl_file(tmp_path / "bad.jsonl", f'{{"messages": {messages}}}\n'.encode())
    with pytest.raises(UsageError) as refused:
        contents(file)
    assert str(refused.value) == f"{tmp_path}/bad.jsonl:1: {message}"


def test_the_line_is_counted_in_the_file_and_the_schema_holds_across_units(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "JSONL_UNIT_BYTES", 16)
    file = jsonl_file(tmp_path / "a.jsonl", b"\n" + b'{"text": "good"}\n' * 5 + b'{"messages": [1]}\n')
    with pytest.raises(UsageError, match=r"a\.jsonl:7 has `messages` where earlier lines have `text`"):
        contents(file)


def test_a_file_that_changed_or_went_is_named(tmp_path):
    file = text_file(tmp_path / "a.txt", b"as it was found")
    (tmp_path / "a.txt").write_bytes(b"longer than it was found")
    with pytest.raises(UsageError, match="changed while it was in use: 15 bytes when it was found, 24 now"):
        contents(file)
    (tmp_path / "a.txt").unlink()
    with pytest.raises(UsageError, match=r"a\.txt cannot be read: No such file or directory\."):
        contents(file)
