"""Documents in, tokens out: parts join exactly, bytes are counted exactly, and unfit tokenizers are named."""

import copy
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from planish.data import encode
from planish.data.batch import IGNORED
from planish.data.document import Document
from planish.data.encode import Encoder
from planish.data.text import TextFile
from planish.errors import UsageError

FILE = TextFile(path=Path("a.txt"), name="a.txt", size_bytes=1)
CHAT = [{"role": "user", "content": "Naïve?"}, {"role": "assistant", "content": "Oui ✓"}]


def document(content):
    return Document(content=content, file=FILE, at=0)


@settings(deadline=None, max_examples=200)
@given(text=st.text(st.sampled_from("ab1é日_.}\n\r\t  "), max_size=80))
def test_a_text_in_parts_gives_the_tokens_of_the_whole(tokenizer, text):
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encode, "PART_CHARACTERS", 1)
        found = Encoder(tokenizer)(document(text)).ids.tolist()
    assert found == [*whole, tokenizer.eos_token_id] if text else found == []


@settings(deadline=None, max_examples=200)
@given(text=st.text(st.characters(codec="utf-8"), max_size=60))
def test_no_text_has_more_tokens_than_its_bytes_allow(tokenizer, text):
    encoder = Encoder(tokenizer)
    assert len(encoder(document(text))) <= encoder._most_tokens(text)


def test_what_cannot_be_too_long_is_not_tokenised(tokenizer, monkeypatch):
    encoder = Encoder(tokenizer)
    monkeypatch.setattr(Encoder, "__call__", lambda *_: pytest.fail("tokenised"))
    encoder.examine(document("x" * 62), longest=64)
    encoder.examine(document("x" * 1000))


def test_a_normalizer_may_make_more_tokens_than_bytes(tokenizer):
    longer = copy.deepcopy(tokenizer)
    longer.backend_tokenizer.normalizer = normalizers.Replace("x", "x " * 40)
    encoder = Encoder(longer)
    encoder.examine(document("x"), longest=1000)
    with pytest.raises(UsageError, match=r"tokens, more than `data.context` \(30\)"):
        encoder.examine(document("x"), longest=30)


def test_a_long_text_is_tokenised_in_parts(tokenizer):
    text = "It was a truth\n" * 10_000
    parts = list(Encoder(tokenizer)._parts(text))
    assert len(parts) == 5
    assert "".join(parts) == text


def test_a_tokenizer_that_joins_words_gets_each_text_whole():
    vocab = {"▁": 0, "▁a": 1, "\n": 2, "\nb": 3, "a": 4, "b": 5, "x": 6}
    joined = Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "a"), ("\n", "b")], fuse_unk=False))
    joined.pre_tokenizer = pre_tokenizers.Metaspace()
    encoder = Encoder(PreTrainedTokenizerFast(tokenizer_object=joined))
    assert list(encoder._parts("a\n" * 40_000)) == ["a\n" * 40_000]


@settings(deadline=None, max_examples=200)
@given(text=st.text(st.characters(codec="utf-8"), min_size=1, max_size=60))
def test_every_byte_is_told_by_one_token(tokenizer, text):
    piece = Encoder(tokenizer, count_bytes=True)(document(text))
    first = tokenizer(text, return_offsets_mapping=True)["offset_mapping"][0][1]
    assert piece.target_bytes.sum() == len(text.encode()) - len(text[:first].encode())
    assert (piece.target_bytes >= 0).all()
    assert piece.target_bytes[-1] == 0


def test_the_bytes_of_ascii_tokens_are_their_lengths(tokenizer):
    piece = Encoder(tokenizer, count_bytes=True)(document("The whole of it, word by word."))
    expected = [len(tokenizer.decode([token])) for token in piece.target[:-2]]
    assert piece.target_bytes.tolist() == [*expected, 0, 0]


def test_bytes_of_a_text_in_parts_go_on_from_part_to_part(tokenizer, monkeypatch):
    text = "Zwölf\nBoxkämpfer\njagen\nViktor\n" * 3
    whole = Encoder(tokenizer, count_bytes=True)(document(text))
    monkeypatch.setattr(encode, "PART_CHARACTERS", 1)
    parts = Encoder(tokenizer, count_bytes=True)(document(text))
    assert parts.ids.tolist() == whole.ids.tolist()
    assert parts.target_bytes.tolist() == whole.target_bytes.tolist()


def test_a_conversation_is_what_the_template_makes_of_it(chat_tokenizer):
    piece = Encoder(chat_tokenizer)(document(CHAT))
    assert chat_tokenizer.decode(piece.ids) == "<|user|>Naïve?\n<|assistant|>Oui ✓<|end|>\n"
    assert piece.target.tolist() == [*piece.ids[1:].tolist(), IGNORED]


@pytest.mark.parametrize("loss_on", ["all", "assistant"])
def test_the_line_of_a_good_conversation_is_never_looked_up(chat_tokenizer, loss_on, monkeypatch):
    monkeypatch.setattr(TextFile, "where", lambda self, at: pytest.fail("counting lines reads the file once more"))
    Encoder(chat_tokenizer, loss_on=loss_on)(document(CHAT))


def test_only_marked_tokens_count_and_bring_their_bytes(chat_tokenizer):
    piece = Encoder(chat_tokenizer, loss_on="assistant", count_bytes=True)(document(CHAT))
    counted = piece.target != IGNORED
    assert chat_tokenizer.decode(piece.target[counted]) == "Oui ✓<|end|>"
    assert piece.target_bytes.sum() == len("Oui ✓<|end|>".encode())
    assert not piece.target_bytes[~counted].any()


def test_messages_that_the_template_refuses_are_named(chat_tokenizer):
    with pytest.raises(UsageError, match=r"^a\.txt: the chat template refuses these messages: no such role\.$"):
        Encoder(chat_tokenizer)(document([{"role": "oracle", "content": "x"}]))


def test_conversations_need_a_chat_template(tokenizer):
    message = r"a\.txt needs a chat template and the tokenizer has no default one; add chat_template\.jinja"
    with pytest.raises(UsageError, match=message):
        Encoder(tokenizer)(document(CHAT))
    with pytest.raises(UsageError, match=r'^`data\.loss_on = "assistant"` needs a chat template and'):
        Encoder(tokenizer, loss_on="assistant")


def test_a_template_without_generation_marks_cannot_tell_the_assistant(chat_tokenizer, monkeypatch):
    monkeypatch.setattr(chat_tokenizer, "chat_template", "{{ messages }}")
    with pytest.raises(UsageError, match=r"needs a chat template that marks .* \{% generation %\} .*; add the marks"):
        Encoder(chat_tokenizer, loss_on="assistant")


def test_a_text_has_no_assistant(chat_tokenizer):
    message = r'a\.txt is no conversation; `data\.loss_on = "assistant"` needs \.jsonl with `messages`'
    with pytest.raises(UsageError, match=message):
        Encoder(chat_tokenizer, loss_on="assistant")(document("prose"))


@pytest.mark.parametrize("options", [{"count_bytes": True}, {"loss_on": "assistant"}])
def test_a_tokenizer_without_offsets_is_refused_where_they_are_needed(options):
    class Slow(PreTrainedTokenizerFast):
        is_fast = False

    slow = Slow(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    Encoder(slow)
    with pytest.raises(UsageError, match=r"needs a fast tokenizer \(one with a tokenizer\.json\)"):
        Encoder(slow, **options)


def test_ids_stay_as_they_are(tokenizer):
    piece = Encoder(tokenizer)(document(np.array([5, 9, 7], dtype="<u2")))
    assert (piece.ids.tolist(), piece.target.tolist()) == ([5, 9, 7], [9, 7, IGNORED])
    assert piece.ids.dtype == piece.target.dtype == np.int32


def test_a_text_begins_with_bos_where_the_tokenizer_would_put_one(tokenizer):
    opened = copy.deepcopy(tokenizer)
    opened.add_special_tokens({"bos_token": "<bos>"})
    bos, text = opened.bos_token_id, "One day, two days."
    assert Encoder(opened)(document(text)).ids.tolist() == Encoder(tokenizer)(document(text)).ids.tolist()
    opened.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", bos)])
    found, plain = (Encoder(each, count_bytes=True)(document(text)) for each in (opened, tokenizer))
    assert found.ids.tolist() == [bos, *plain.ids.tolist()]
    assert found.target[0] == plain.ids[0]
    assert found.target_bytes.sum() == len(text)
    assert len(Encoder(opened)(document(""))) == 0
