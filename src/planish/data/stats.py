"""What a corpus is made of: documents, bytes, tokens, and how long documents are."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, islice

import numpy as np

from planish.data.corpus import Place
from planish.data.document import Document
from planish.data.encode import Encoder, Tokenizer
from planish.data.sources import open_corpora
from planish.errors import UsageError

QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """What was counted.

    Attributes:
        num_files: Files that are not empty.
        num_empty_files: Files that were left out because they are empty.
        files_bytes: Size of all files.
        complete: Whether every document was read; otherwise what follows is about a shuffled sample.
        num_documents: Documents with at least one token.
        num_empty_documents: Documents without any.
        documents_bytes: UTF-8 bytes of the texts and of the contents of messages; for token files, of the ids.
        num_tokens: Tokens, with each document's end.
        lengths: Tokens of a document at each of `QUANTILES`: as many documents are that long or shorter.
        context: The row length that the next two are about.
        num_windows: Packed rows, the last one filled or not.
        num_long_documents: Documents longer than a row.
    """

    num_files: int
    num_empty_files: int
    files_bytes: int
    complete: bool
    num_documents: int
    num_empty_documents: int
    documents_bytes: int
    num_tokens: int
    lengths: tuple[int, ...]
    context: int
    num_windows: int
    num_long_documents: int

    @property
    def bytes_per_token(self) -> float:
        """Bytes that one token stands for on average."""
        return self.documents_bytes / self.num_tokens


def describe(sources: Sequence[str], tokenizer: Tokenizer, *, context: int, max_documents: int | None = None) -> Stats:
    """Return the statistics of `sources`, of all documents or of the first `max_documents` in a shuffled order.

    Memory: one document, and one counter for each length that occurs.

    Raises:
        UsageError: A source or document that cannot be used, or no token in any document.
    """
    encode = Encoder(tokenizer)
    [corpus] = open_corpora(sources, encode)
    documents = corpus.epoch(None if max_documents is None else (0,), Place())
    lengths: Counter[int] = Counter()
    documents_bytes = 0
    for _, document in islice(documents, max_documents):
        lengths[len(encode(document))] += 1
        documents_bytes += _num_bytes(document)
    num_empty = lengths.pop(0, 0)
    if not lengths:
        raise UsageError(f"{corpus.name} holds no text: every document in it is empty.")
    num_tokens = sum(length * times for length, times in lengths.items())
    return Stats(
        num_files=len(corpus.files),
        num_empty_files=corpus.num_empty,
        files_bytes=sum(file.size_bytes for file in corpus.files),
        complete=next(documents, None) is None,
        num_documents=lengths.total(),
        num_empty_documents=num_empty,
        documents_bytes=documents_bytes,
        num_tokens=num_tokens,
        lengths=_quantiles(lengths),
        context=context,
        num_windows=-(-num_tokens // context),
        num_long_documents=sum(times for length, times in lengths.items() if length > context),
    )


def _num_bytes(document: Document) -> int:
    match document.content:
        case str(text):
            return len(text.encode())
        case list(messages):
            return sum(len(message["content"].encode()) for message in messages)
        case ids:
            return ids.nbytes


def _quantiles(lengths: Counter[int]) -> tuple[int, ...]:
    known = sorted(lengths)
    reached = list(accumulate(lengths[length] for length in known))
    wanted = [max(1, quantile * reached[-1]) for quantile in QUANTILES]
    return tuple(known[int(index)] for index in np.searchsorted(reached, wanted))
