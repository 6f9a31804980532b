"""What `planish data stats` counts."""

import numpy as np
import pytest

from planish.data.stats import QUANTILES, describe
from planish.errors import UsageError


def test_everything_is_counted(tokenizer, write_jsonl, tmp_path):
    texts = ["é" * length for length in range(1, 101)]
    write_jsonl(*({"text": text} for text in ["", *texts]))
    (tmp_path / "empty.txt").touch()
    stats = describe([str(tmp_path)], tokenizer, context=50)
    lengths = [len(tokenizer(text)["input_ids"]) + 1 for text in texts]
    assert (stats.num_files, stats.num_empty_files, stats.complete) == (1, 1, True)
    assert (stats.num_documents, stats.num_empty_documents) == (100, 1)
    assert stats.files_bytes == (tmp_path / "documents.jsonl").stat().st_size
    assert stats.documents_bytes == 2 * sum(range(101))
    assert stats.num_tokens == sum(lengths)
    assert stats.bytes_per_token == stats.documents_bytes / sum(lengths)
    assert stats.lengths == tuple(np.quantile(lengths, QUANTILES, method="inverted_cdf").tolist())
    assert stats.num_windows == -(-sum(lengths) // 50)
    assert stats.num_long_documents == sum(length > 50 for length in lengths)


def test_a_sample_says_that_it_is_one(tokenizer, write_jsonl):
    source = write_jsonl(*({"text": f"number {number}"} for number in range(20)))
    sample = describe([source], tokenizer, context=50, max_documents=7)
    assert (sample.num_documents, sample.complete) == (7, False)
    assert describe([source], tokenizer, context=50, max_documents=20).complete


def test_conversations_count_their_contents_and_token_files_their_ids(chat_tokenizer, write_jsonl, tmp_path):
    chat = [{"role": "user", "content": "Naïve?"}, {"role": "assistant", "content": "No."}]
    assert describe([write_jsonl({"messages": chat})], chat_tokenizer, context=50).documents_bytes == 10
    np.arange(1, 40, dtype="<u2").tofile(tmp_path / "a.bin")
    assert describe([str(tmp_path / "a.bin")], chat_tokenizer, context=50).documents_bytes == 78


def test_nothing_to_count_is_refused(tokenizer, write_jsonl):
    with pytest.raises(UsageError, match="holds no text: every document in it is empty"):
        describe([write_jsonl({"text": ""})], tokenizer, context=50)
