"""Epochs over many files: each document once, any place reached again, and memory that the size does not touch."""

import json
import tracemalloc
from itertools import islice

import pytest

from planish.data import text
from planish.data.corpus import Corpus, Place
from planish.data.text import JsonlFile, TextFile


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "JSONL_UNIT_BYTES", 100)
    files = []
    for index in range(5):
        path = tmp_path / f"{index}.jsonl"
        lines = [json.dumps({"text": f"{index}.{number}"}) + "\n" for number in range(7 * index + 1)]
        path.write_text("".join(lines))
        files.append(JsonlFile(path=path, name=path.name, size_bytes=path.stat().st_size))
    lone = tmp_path / "lone.txt"
    lone.write_text("lone")
    return Corpus(name="all", files=(*files, TextFile(path=lone, name="lone.txt", size_bytes=4)))


def test_without_a_key_documents_come_as_they_lie(corpus):
    found = [document.content for _, document in corpus.epoch(None, Place())]
    assert found == [f"{index}.{number}" for index in range(5) for number in range(7 * index + 1)] + ["lone"]


def test_a_key_shuffles_units_and_the_documents_inside(corpus):
    plain = [document.content for _, document in corpus.epoch(None, Place())]
    orders = [[document.content for _, document in corpus.epoch((seed, 0), Place())] for seed in range(8)]
    assert all(sorted(order) == sorted(plain) for order in orders)
    assert len({tuple(order) for order in [plain, *orders]}) == 9
    # Documents of one unit stay together, but not always in the order of the file.
    unit = {f"4.{number}" for number in range(7)}
    assert all(set(order[min(map(order.index, unit)) :][:7]) == unit for order in orders)
    assert len({tuple(name for name in order if name in unit) for order in orders}) == 8


def test_an_epoch_can_be_entered_at_any_document(corpus):
    whole = list(corpus.epoch((3, 1), Place()))
    for index, (place, _) in enumerate(whole):
        assert list(corpus.epoch((3, 1), place)) == whole[index:]


def test_memory_does_not_grow_with_the_corpus(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "JSONL_UNIT_BYTES", 2**14)

    def peak_bytes(num_lines):
        path = tmp_path / f"{num_lines}.jsonl"
        path.write_text((json.dumps({"text": "words " * 40}) + "\n") * num_lines)
        tracemalloc.start()
        file = JsonlFile(path=path, name=path.name, size_bytes=path.stat().st_size)
        documents = Corpus(name="large", files=(file,)).epoch((0,), Place())
        assert sum(1 for _ in documents) == num_lines
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return peak

    small, large = peak_bytes(500), peak_bytes(4_000)
    assert large < 1.1 * small
    assert large < 8 * 2**14


def test_only_the_asked_for_documents_are_read(corpus):
    (corpus.files[4].path).unlink()
    assert len(list(islice(corpus.epoch(None, Place()), 20))) == 20
