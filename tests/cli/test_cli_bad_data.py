"""Every bad input of a feed, as a user meets it: one sentence that names file and line, exit code 2, nothing begun."""

import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from planish.cli.main import main

GOOD = '{"text": "The ladies of the house were at home."}\n'
CHAT = json.dumps({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}) + "\n"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
BAD = {
    "broken JSON": ("a.jsonl", GOOD + '{"text": "The lad\n', "a.jsonl:2 is not JSON"),
    "missing field": ("a.jsonl", GOOD + '{"body": "x"}\n', "a.jsonl:2 has neither `text` nor `messages`"),
    "mixed schemas": ("a.jsonl", GOOD + CHAT, "a.jsonl:2 has `messages` where earlier lines have `text`"),
    "null content": ("a.jsonl", GOOD + '{"text": null}\n', "a.jsonl:2: `text` must be a string, got null"),
    "wrong column": ("a.parquet", {"text": [1, 2]}, "column `text` must hold strings, it holds int64"),
    "wrong dtype": ("a.bin", np.array([5, 6] * 50, dtype="<u4"), "holds uint32 ids, read as uint16"),
    "broken id": ("a.bin", b"\1\0\2", "no whole number of uint16 ids"),
    "an id too large": ("a.bin", np.array([5, 60000], dtype="<u2"), "the tokenizer knows ids below"),
    "no chat template": ("a.jsonl", CHAT, "needs a chat template"),
    "too long": ("a.jsonl", GOOD + '{"text": "' + "word " * 400 + '"}\n', "a.jsonl:2 has "),
}


def write(path, content):
    match content:
        case str():
            path.write_text(content, encoding="utf-8")
        case bytes():
            path.write_bytes(content)
        case dict():
            pyarrow.parquet.write_table(pyarrow.table(content), path)
        case _:
            content.tofile(path)


@pytest.fixture
def train(model_folder, tmp_path, capsys):
    """Return (data, *words) -> (exit code, stderr, run folder)."""
    words = ["train", "--model.from", str(model_folder()), "--model.dtype", "fp32", "--data.context", "64"]

    def run(data, *more):
        save = ["--save.dir", str(tmp_path / "run"), "--train.steps", "1"]
        code = main([*words, "--data.train", str(data), *save, *more])
        return code, capsys.readouterr().err, tmp_path / "run"

    return run


@pytest.mark.parametrize("case", BAD)
def test_bad_data_is_named_with_exit_2(train, tmp_path, case):
    name, content, said = BAD[case]
    write(tmp_path / name, content)
    more = ["--data.long_documents", "refuse"] if case == "too long" else []
    code, err, _ = train(tmp_path / name, *more)
    assert code == 2
    assert said in err
    assert err.startswith("planish: ")
    assert err.count("\n") == 1


def test_a_chat_template_without_generation_marks_is_refused(train, model_folder, tmp_path):
    (model_folder() / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    write(tmp_path / "a.jsonl", CHAT)
    code, err, _ = train(tmp_path / "a.jsonl", "--data.loss_on", "assistant")
    assert code == 2
    assert "needs a chat template that marks what the assistant says" in err


def test_what_a_chat_template_refuses_is_found_at_launch(train, model_folder, tmp_path):
    refusing = "{{ raise_exception('roles must alternate') if messages[0]['role'] == messages[1]['role'] }}" + TEMPLATE
    (model_folder() / "chat_template.jinja").write_text(refusing, encoding="utf-8")
    write(tmp_path / "a.jsonl", 40 * CHAT + CHAT.replace("assistant", "user"))
    code, err, run = train(tmp_path / "a.jsonl")
    assert code == 2
    assert "a.jsonl:41: the chat template refuses these messages: roles must alternate" in err
    assert not run.exists()


@pytest.mark.parametrize("case", ["BOM and CRLF", "empty file among good ones", "split long document"])
def test_what_is_only_odd_trains(train, tmp_path, case):
    (tmp_path / "data").mkdir()
    text = GOOD if case != "split long document" else '{"text": "' + "word " * 400 + '"}\n'
    raw = b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode() if case == "BOM and CRLF" else text.encode()
    (tmp_path / "data" / "a.jsonl").write_bytes(raw)
    if case == "empty file among good ones":
        (tmp_path / "data" / "b.jsonl").touch()
    assert train(tmp_path / "data")[0] == 0


def test_a_step_without_a_valid_token_has_loss_0_and_says_so(train, tmp_path):
    (tmp_path / "a.bin").write_bytes(b"\0\0" * 256)  # documents of one token each
    code, err, run = train(tmp_path / "a.bin")
    assert code == 0, err
    line = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    assert (line["loss"], line["valid_tokens"], line["tokens"]) == (0.0, 0, 64)
