"""Token files: documents by EOS, units that meet, and ids of the wrong dtype found out."""

from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planish.data import tokens
from planish.data.feed import eval_batches, open_feed
from planish.data.tokens import TokenFile
from planish.errors import UsageError

EOS = 0


def token_file(path, ids, dtype="<u2", *, vocab_size=600, eos_id=EOS):
    np.array(ids, dtype=dtype).tofile(path)
    return TokenFile.open(path, path.name, path.stat().st_size, vocab_size=vocab_size, eos_id=eos_id)


def contents(file):
    return [each.content.tolist() for unit in range(file.num_units) for group in file.groups(unit) for each in group]


@settings(deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(1, 599), max_size=12).map(lambda ids: [*ids, EOS]), min_size=1),
    unit_tokens=st.integers(13, 40),
    open_end=st.lists(st.integers(1, 599), max_size=5),
)
def test_documents_end_at_eos_whatever_the_units(documents, unit_tokens, open_end):
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens, "UNIT_TOKENS", unit_tokens)
        file = token_file(Path(folder, "a.bin"), [*chain(*documents), *open_end])
        assert contents(file) == documents + ([open_end] if open_end else [])


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 599), min_size=1), unit_tokens=st.integers(1, 20), eos_id=st.none() | st.just(EOS))
def test_no_id_is_lost_or_told_twice(ids, unit_tokens, eos_id):
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens, "UNIT_TOKENS", unit_tokens)
        found = contents(token_file(Path(folder, "a.bin"), ids, eos_id=eos_id))
        assert list(chain(*found)) == ids
        assert all(len(document) <= 2 * unit_tokens for document in found)


def test_the_dtype_follows_the_vocabulary_or_the_sidecar(tmp_path):
    ids = list(range(1, 40))
    assert contents(token_file(tmp_path / "small.bin", ids)) == [ids]
    assert contents(token_file(tmp_path / "large.bin", ids, "<u4", vocab_size=100_000)) == [ids]
    (tmp_path / "said.bin.json").write_text('{"dtype": "uint32"}')
    assert contents(token_file(tmp_path / "said.bin", ids, "<u4")) == [ids]


def test_uint32_read_as_uint16_is_found_out(tmp_path):
    with pytest.raises(
        UsageError, match=r"a\.bin holds uint32 ids, read as uint16: from byte 2 on every other id is 0"
    ):
        token_file(tmp_path / "a.bin", range(1, 40), "<u4")


def test_a_broken_id_is_named_with_its_byte(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"\1\0\2\0\3")
    with pytest.raises(UsageError, match=r"a\.bin has 5 bytes, no whole number of uint16 ids: byte 4 begins"):
        TokenFile.open(tmp_path / "a.bin", "a.bin", 5, vocab_size=600, eos_id=EOS)


@pytest.mark.parametrize(
    ("sidecar", "message"),
    [
        ("{", r"a\.bin\.json is not JSON"),
        ("[]", r"a\.bin\.json: `dtype` must be one of uint16, uint32, got None"),
        ('{"dtype": "int64"}', r"a\.bin\.json: `dtype` must be one of uint16, uint32, got 'int64'"),
    ],
)
def test_a_sidecar_that_cannot_be_used_is_named(tmp_path, sidecar, message):
    (tmp_path / "a.bin.json").write_text(sidecar)
    with pytest.raises(UsageError, match=message):
        token_file(tmp_path / "a.bin", range(1, 40))


def test_an_id_that_the_tokenizer_does_not_know_is_named_with_its_byte(tokenizer, tmp_path):
    np.array([1, 2, EOS, 5, 600, 6], dtype="<u2").tofile(tmp_path / "a.bin")
    with pytest.raises(
        UsageError, match=r"a\.bin at byte 8 has id 600, the tokenizer knows ids below 600; .*a\.bin\.json"
    ):
        open_feed((str(tmp_path / "a.bin"),), tokenizer=tokenizer, context=4, rows=1, seed=0)


def test_ids_reach_the_batch_as_they_are(tokenizer, tmp_path):
    np.array([1, 2, EOS, 5, 6, EOS], dtype="<u2").tofile(tmp_path / "a.bin")
    source = (str(tmp_path / "a.bin"),)
    [batch] = eval_batches(source, tokenizer=tokenizer, context=6, rows=1, max_tokens=100)
    assert batch.input_ids.tolist() == [[1, 2, EOS, 5, 6, EOS]]
    assert batch.target.tolist() == [[2, EOS, -100, 6, EOS, -100]]
    assert batch.num_bytes is None
