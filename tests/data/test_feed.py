"""What the feed promises: every token once an epoch, right targets, and a position that is exact to the token."""

import dataclasses
import gc
import json
import tempfile
import time
import tracemalloc
from collections import Counter
from itertools import islice, pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from planish.data.batch import IGNORED
from planish.data.cursor import FeedPosition
from planish.data.feed import eval_batches, open_feed
from planish.errors import UsageError

TEXTS = st.lists(st.text(min_size=1, max_size=60).filter(str.strip), min_size=1, max_size=12)
SHAPES = {"context": st.integers(1, 40), "rows": st.integers(1, 3), "seed": st.integers(0, 2**32)}


def in_files(texts, folder):
    """Write `texts` as JSON lines over two files, an odd one out in each third."""
    for name, part in (("a.jsonl", texts[::2]), ("b.jsonl", texts[1::2])):
        lines = [json.dumps({"text": text}) + "\n" for text in part]
        Path(folder, name).write_text("".join(lines), encoding="utf-8")
    return (str(folder),)


def pieces_of(batch):
    """Return (ids, targets, positions) of each piece of `batch`."""
    flat = [each.flatten().tolist() for each in (batch.input_ids, batch.target, batch.position_ids)]
    bounds = batch.cu_seq_lens
    return [tuple(each[a:b] for each in flat) for a, b in pairwise(bounds)]


def documents_of(batches):
    """Yield the documents that the pieces of `batches` make, and check targets and positions on the way."""
    document, awaited = [], None
    for batch in batches:
        assert batch.num_valid == int((batch.target != IGNORED).sum())
        for ids, target, positions in pieces_of(batch):
            assert positions == list(range(len(ids)))
            assert target[:-1] == ids[1:]
            assert awaited in (None, ids[0])
            document += ids
            awaited = None if target[-1] == IGNORED else target[-1]
            if awaited is None:
                yield tuple(document)
                document = []


def endless(feed):
    while True:
        yield feed.next()


def equal(one, other):
    tensors = ("input_ids", "target", "position_ids")
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in tensors) and (
        one.cu_seq_lens,
        one.num_valid,
    ) == (other.cu_seq_lens, other.num_valid)


def tokens_of(texts, tokenizer):
    eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return [tuple(tokenizer(text, add_special_tokens=False)["input_ids"] + eos) for text in texts]


@settings(deadline=None, max_examples=60)
@given(texts=TEXTS, **SHAPES)
def test_an_epoch_is_every_document_once_token_for_token(tokenizer, texts, context, rows, seed):
    with tempfile.TemporaryDirectory() as folder:
        feed = open_feed(in_files(texts, folder), tokenizer=tokenizer, context=context, rows=rows, seed=seed)
        documents = documents_of(endless(feed))
        for _epoch in range(2):
            assert Counter(islice(documents, len(texts))) == Counter(tokens_of(texts, tokenizer))


@settings(deadline=None, max_examples=40)
@given(texts=TEXTS, **SHAPES)
def test_packed_rows_are_full_and_their_bounds_cover_them(tokenizer, texts, context, rows, seed):
    with tempfile.TemporaryDirectory() as folder:
        feed = open_feed(in_files(texts, folder), tokenizer=tokenizer, context=context, rows=rows, seed=seed)
        for batch in islice(endless(feed), 5):
            assert batch.input_ids.shape == batch.target.shape == batch.position_ids.shape == (rows, context)
            assert (batch.cu_seq_lens[0], batch.cu_seq_lens[-1]) == (0, rows * context)
            assert list(batch.cu_seq_lens) == sorted(set(batch.cu_seq_lens))
            assert set(range(0, rows * context + 1, context)) <= set(batch.cu_seq_lens)


@settings(deadline=None, max_examples=40)
@given(texts=TEXTS, taken=st.integers(0, 25), pack=st.sampled_from(["documents", "none"]), **SHAPES)
def test_a_feed_found_again_goes_on_bit_for_bit(tokenizer, texts, taken, pack, context, rows, seed):
    shape = {"tokenizer": tokenizer, "context": context, "rows": rows, "seed": seed, "pack": pack}
    with tempfile.TemporaryDirectory() as folder:
        feed = open_feed(in_files(texts, folder), **shape)
        for _ in range(taken):
            feed.next()
        written = json.dumps(feed.position.to_dict())
        expected = [feed.next() for _ in range(8)]
        resumed = open_feed((folder,), **shape)
        resumed.next()
        resumed.seek(FeedPosition.from_dict(json.loads(written)))
        assert all(equal(resumed.next(), batch) for batch in expected)
        assert resumed.position == feed.position


def test_a_position_in_the_middle_of_a_long_document_is_found_again(tokenizer):
    feed = open_feed(("builtin:english",), tokenizer=tokenizer, context=1000, rows=1, seed=0)
    for _ in range(7):
        feed.next()
    assert feed.position.streams[0].token == 7000
    expected = feed.next()
    feed.seek(dataclasses.replace(feed.position, streams=(dataclasses.replace(feed.position.streams[0], token=7000),)))
    assert equal(feed.next(), expected)


def test_epochs_differ_in_order_and_the_seed_repeats_them(tokenizer, write_jsonl):
    texts = [f"document number {number}" for number in range(30)]
    source = (write_jsonl(*({"text": text} for text in texts)),)

    def epochs(seed):
        feed = open_feed(source, tokenizer=tokenizer, context=16, rows=2, seed=seed)
        documents = documents_of(endless(feed))
        return [list(islice(documents, len(texts))) for _ in range(3)]

    first = epochs(seed=1)
    assert sorted(first[0]) == sorted(first[1]) == sorted(first[2])
    assert len({tuple(order) for order in [*first, *epochs(seed=2)]}) == 6
    assert epochs(seed=1) == first


@settings(deadline=None, max_examples=25)
@given(share=st.floats(0.05, 0.95), longest=st.integers(1, 50))
def test_weights_are_shares_of_tokens_met_to_within_a_document(bare_tokenizer, share, longest):
    with tempfile.TemporaryDirectory() as folder:
        for name, letter in (("a.jsonl", "a"), ("b.jsonl", "b")):
            lines = [json.dumps({"text": letter * (1 + number % longest)}) + "\n" for number in range(longest)]
            Path(folder, name).write_text("".join(lines), encoding="utf-8")
        sources = (f"{folder}/a.jsonl", f"{folder}/b.jsonl")
        shape = {"tokenizer": bare_tokenizer, "context": 64, "rows": 1, "seed": 3, "weights": (share, 1 - share)}
        feed = open_feed(sources, **shape)
        for _ in range(20):
            feed.next()
            first, second = (stream.served for stream in feed.position.streams)
            assert abs(first - share * (first + second)) <= longest
        position, expected = feed.position, [feed.next() for _ in range(5)]
        resumed = open_feed(sources, **shape)
        resumed.seek(position)
        assert all(equal(resumed.next(), batch) for batch in expected)


def test_without_weights_all_sources_are_one_epoch(tokenizer, write_jsonl):
    short = write_jsonl({"text": "alone"}, name="short.jsonl")
    long = write_jsonl(*({"text": f"text {number}"} for number in range(9)), name="long.jsonl")
    feed = open_feed((short, long), tokenizer=tokenizer, context=8, rows=1, seed=0)
    expected = tokens_of(["alone", *(f"text {number}" for number in range(9))], tokenizer)
    assert Counter(islice(documents_of(endless(feed)), 10)) == Counter(expected)


def first_pieces(batch):
    """Return the ids of the first piece of each row; what follows in an unpacked row is padding."""
    width, bounds = batch.input_ids.shape[1], batch.cu_seq_lens
    return [tuple(ids) for start, (ids, *_) in zip(bounds, pieces_of(batch), strict=False) if start % width == 0]


def test_unpacked_rows_hold_one_document_and_the_first_batch_is_as_long_as_any(tokenizer, write_jsonl):
    texts = ["one", "two words", "and three words", "four words all told"]
    source = write_jsonl(*({"text": text} for text in texts))
    feed = open_feed((source,), tokenizer=tokenizer, context=64, rows=2, seed=0, pack="none")
    batches = [feed.next() for _ in range(4)]
    for epoch in (batches[:2], batches[2:]):
        assert Counter(ids for batch in epoch for ids in first_pieces(batch)) == Counter(tokens_of(texts, tokenizer))
    assert batches[0].input_ids.shape == (2, 64)
    for batch in batches[1:]:
        assert batch.input_ids.shape == (2, max(map(len, first_pieces(batch))))
    assert all(batch.num_valid == sum(len(ids) - 1 for ids in first_pieces(batch)) for batch in batches)


def test_an_unpacked_document_longer_than_the_context_takes_several_rows(tokenizer, write_jsonl):
    text = "rather more than eight tokens, as anyone may count"
    feed = open_feed((write_jsonl({"text": text}),), tokenizer=tokenizer, context=8, rows=1, seed=0, pack="none")
    assert next(documents_of(endless(feed))) == tokens_of([text], tokenizer)[0]


def test_documents_longer_than_the_context_are_refused_by_name(tokenizer, write_jsonl):
    source = write_jsonl({"text": "short"}, {"text": "quite long " * 20})
    [_, long] = tokens_of(["short", "quite long " * 20], tokenizer)
    feed = open_feed((source,), tokenizer=tokenizer, context=32, rows=1, seed=0, long_documents="refuse")
    message = rf"documents\.jsonl:2 has {len(long)} tokens, more than `data\.context` \(32\)"
    with pytest.raises(UsageError, match=message):
        [feed.next() for _ in range(3)]


def test_only_the_assistants_words_count(chat_tokenizer, write_jsonl):
    chat = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "Three of them."}]
    source = write_jsonl({"messages": chat})
    feed = open_feed((source,), tokenizer=chat_tokenizer, context=200, rows=1, seed=0, loss_on="assistant", pack="none")
    batch = feed.next()
    counted = batch.target[batch.target != IGNORED].tolist()
    assert chat_tokenizer.decode(counted) == "Three of them.<|end|>"
    assert batch.num_valid == len(counted)
    assert (batch.input_ids.flatten()[1:][batch.target.flatten()[:-1] != IGNORED]).tolist() == counted


def test_a_batch_with_no_valid_target_is_legal(chat_tokenizer, write_jsonl):
    source = write_jsonl({"messages": [{"role": "user", "content": "Nobody answers."}]})
    feed = open_feed((source,), tokenizer=chat_tokenizer, context=16, rows=2, seed=0, loss_on="assistant")
    assert feed.next().num_valid == 0


def test_a_position_taken_in_other_data_is_refused(tokenizer, write_jsonl):
    source = write_jsonl({"text": "some words"})
    shape = {"tokenizer": tokenizer, "context": 8, "rows": 1}
    position = open_feed((source,), seed=0, **shape).position
    with pytest.raises(UsageError, match="not what it was when the position was taken"):
        open_feed((source,), seed=1, **shape).seek(position)
    write_jsonl({"text": "some words"}, {"text": "and more"})
    with pytest.raises(UsageError, match="not what it was when the position was taken"):
        open_feed((source,), seed=0, **shape).seek(position)


@pytest.mark.parametrize("tree", [{}, {"corpus": "x"}, {"corpus": "x", "streams": [{"place": 3}]}])
def test_a_position_of_another_shape_is_refused(tree):
    with pytest.raises(UsageError, match="the position of the feed cannot be read"):
        FeedPosition.from_dict(tree)


def test_sources_without_a_token_do_not_turn_for_ever(tokenizer, write_jsonl):
    feed = open_feed((write_jsonl({"text": ""}, {"text": ""}),), tokenizer=tokenizer, context=8, rows=1, seed=0)
    with pytest.raises(UsageError, match="holds no text: every document in it is empty"):
        feed.next()


def test_weights_must_match_the_sources(tokenizer, write_jsonl):
    source = write_jsonl({"text": "words"})
    with pytest.raises(UsageError, match=r"`data\.weights` must have one number for each of 1 sources, got 2"):
        open_feed((source,), tokenizer=tokenizer, context=8, rows=1, seed=0, weights=(0.5, 0.5))


@settings(deadline=None, max_examples=60)
@given(texts=TEXTS, context=st.integers(1, 40), rows=st.integers(1, 3))
def test_evaluation_reads_once_in_order_and_knows_every_byte(tokenizer, texts, context, rows):
    with tempfile.TemporaryDirectory() as folder:
        sources = in_files(texts, folder)
        batches = list(eval_batches(sources, tokenizer=tokenizer, context=context, rows=rows, max_tokens=10**6))
    in_order = [*texts[::2], *texts[1::2]]
    expected = tokens_of(in_order, tokenizer)
    assert list(islice(documents_of(batches), len(texts))) == expected
    assert sum(batch.num_valid for batch in batches) == sum(len(tokens) - 1 for tokens in expected)
    firsts = [tokenizer(text, return_offsets_mapping=True)["offset_mapping"][0][1] for text in in_order]
    behind = [len(text.encode()) - len(text[:first].encode()) for text, first in zip(in_order, firsts, strict=True)]
    assert sum(batch.num_bytes for batch in batches) == sum(behind)


@pytest.mark.parametrize("max_tokens", [1, 99, 100, 101, 250, 1000])
def test_evaluation_stops_after_so_many_tokens(tokenizer, max_tokens):
    shape = {"tokenizer": tokenizer, "context": 100, "rows": 2}
    batches = list(eval_batches(("builtin:english",), max_tokens=max_tokens, **shape))
    assert sum(batch.num_valid for batch in batches) == max_tokens
    whole = list(eval_batches(("builtin:english",), max_tokens=1000, **shape))
    told = torch.cat([batch.target.flatten() for batch in whole])
    found = torch.cat([batch.target.flatten() for batch in batches])
    assert torch.equal(found[:max_tokens], told[:max_tokens])
    assert (found[max_tokens:] == IGNORED).all()


def test_opening_the_python_corpus_is_quick_and_small(tokenizer):
    gc.collect()
    tracemalloc.start()
    feed = open_feed(("builtin:python",), tokenizer=tokenizer, context=64, rows=1, seed=0)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 2**23
    start_s = time.process_time()
    feed = open_feed(("builtin:python",), tokenizer=tokenizer, context=64, rows=1, seed=0)
    assert time.process_time() - start_s < 1
    assert feed.next().input_ids.shape == (1, 64)
