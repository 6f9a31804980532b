"""Batches for training, endless and with an exact position, and batches for evaluation, once and in fixed order."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Literal

from planish.data.batch import Batch, Piece, assemble
from planish.data.corpus import Place
from planish.data.cursor import Cursor, FeedPosition
from planish.data.encode import Encoder, LossOn, Tokenizer
from planish.data.sources import open_corpora
from planish.errors import UsageError

Pack = Literal["documents", "none"]
LongDocuments = Literal["split", "refuse"]


class Feed:
    """Batches of `rows` rows, endlessly; `position` and `seek` leave it and find it again to the token.

    Packed rows are `context` tokens each, so the first batch is as long as any. Unpacked rows are as long as the
    batch's longest document, and the very first batch is filled up to `context`: what does not fit fails at once.

    Memory: one document and one batch, and path and size of each file.
    Exactness: after `seek(position)` every batch is bitwise what it would have been.
    """

    def __init__(self, cursor: Cursor, *, context: int, rows: int, pack: Pack, pad_id: int, least: int = 1) -> None:
        """Lay the cursor's documents into batches; see `open_feed`."""
        self._cursor = cursor
        self._context = context
        self._rows = rows
        self._pack = pack
        self._pad_id = pad_id
        self._least = least

    @property
    def position(self) -> FeedPosition:
        """Where the next batch begins."""
        return self._cursor.position

    def seek(self, position: FeedPosition) -> None:
        """Go on as after the batch that left the feed at `position`.

        Raises:
            UsageError: The position was taken in other data.
        """
        self._cursor.seek(position)

    def next(self, *, start: int = 0, stop: int | None = None) -> Batch:
        """Return the next batch, or its rows from `start` up to `stop`, as wide as the whole.

        Raises:
            UsageError: A file or document that cannot be used; it is named with its line or byte.
        """
        full = self._pack == "documents" or self._cursor.at_start
        rows = [self._row() for _ in range(self._rows)]
        width = self._context if full else max(self._least, *(sum(map(len, row)) for row in rows))
        return assemble(rows[start:stop], width=width, pad_id=self._pad_id)

    def _row(self) -> list[Piece]:
        if self._pack == "none":
            return [self._cursor.take(self._context)]
        row, room = [], self._context
        while room:
            row.append(self._cursor.take(room))
            room -= len(row[-1])
        return row


def open_feed(  # noqa: PLR0913 - keyword-only options of a public function
    sources: Sequence[str],
    *,
    tokenizer: Tokenizer,
    context: int,
    rows: int,
    seed: int,
    pack: Pack = "documents",
    loss_on: LossOn = "all",
    long_documents: LongDocuments = "split",
    weights: Sequence[float] = (),
    least: int = 1,
) -> Feed:
    """Return the feed over `sources`, standing before its first document.

    Nothing is read but folders, footers and the beginning of the first file of each source, which is checked.

    Args:
        sources: Files, folders or built-in corpora.
        tokenizer: A transformers tokenizer.
        context: Longest row.
        rows: Rows of a batch.
        seed: Order of the documents; each epoch has its own.
        pack: "documents" fills each row with documents one after the other and cuts the one that crosses the row's
            end; "none" gives each document its own row, or several rows where it is longer than `context`.
        loss_on: Count every token, or only what the assistant says in chat `messages`.
        long_documents: Cut documents longer than `context`, or refuse them.
        weights: Share of the tokens of each source; none: all documents are shuffled together.
        least: Shortest row; shorter ones are filled up.

    Raises:
        UsageError: A source that cannot be used.
    """
    if len(weights) not in (0, len(sources)):
        raise UsageError(f"`data.weights` must have one number for each of {len(sources)} sources, got {len(weights)}.")
    encode = Encoder(tokenizer, loss_on=loss_on)
    cursor = Cursor(
        open_corpora(sources, encode, apart=bool(weights)),
        weights=weights or (1.0,),
        encode=encode,
        seed=seed,
        longest=context if long_documents == "refuse" else None,
    )
    return Feed(cursor, context=context, rows=rows, pack=pack, pad_id=encode.pad_id, least=least)


def check_readable(
    sources: Sequence[str], *, tokenizer: Tokenizer, loss_on: LossOn = "all", longest: int | None = None
) -> None:
    """Read every document of `sources` once, so that one that cannot be used is found now and not when its turn comes.

    Conversations are written out by the chat template. Where `longest` is given, documents that may have more tokens
    are tokenised, which are those of more bytes.

    Memory: one group of documents.

    Raises:
        UsageError: A file or document that cannot be used; it is named with its line or byte.
    """
    encode = Encoder(tokenizer, loss_on=loss_on)
    for corpus in open_corpora(tuple(dict.fromkeys(sources)), encode):
        for _, document in corpus.epoch(None, Place()):
            encode.examine(document, longest=longest)


def eval_batches(
    sources: Sequence[str],
    *,
    tokenizer: Tokenizer,
    context: int,
    rows: int,
    max_tokens: int,
    loss_on: LossOn = "all",
) -> Iterator[Batch]:
    """Return the first `max_tokens` tokens of `sources` in packed batches, in the order of the files, once.

    Each batch's `num_bytes` is the exact number of bytes of text behind its counted targets (None for token files),
    so bits per byte is the summed loss over ln 2 x the summed bytes. The last batch has the rows that it needs.

    Raises:
        UsageError: A source that cannot be used.
    """
    encode = Encoder(tokenizer, loss_on=loss_on, count_bytes=True)
    [corpus] = open_corpora(sources, encode)
    pieces = _first((encode(document) for _, document in corpus.epoch(None, Place())), max_tokens)
    filled = _rows(pieces, context)
    batches = iter(lambda: list(islice(filled, rows)), [])
    return (assemble(batch, width=context, pad_id=encode.pad_id) for batch in batches)


def deal(batches: Iterable[Batch], *, rank: int, num_ranks: int) -> Iterator[Batch]:
    """Yield every `num_ranks`-th batch from `rank` on; all ranks get as many, the last ones maybe uncounted copies."""
    batches = iter(batches)
    while round_ := list(islice(batches, num_ranks)):
        yield round_[rank] if rank < len(round_) else round_[0].uncounted()


def _first(pieces: Iterable[Piece], max_tokens: int) -> Iterator[Piece]:
    for piece in pieces:
        yield piece.cut(0, max_tokens)
        max_tokens -= len(piece)
        if max_tokens <= 0:
            return


def _rows(pieces: Iterable[Piece], context: int) -> Iterator[list[Piece]]:
    """Yield rows of `context` tokens; the last one may be shorter."""
    row, room = [], context
    for whole in pieces:
        rest = whole
        while len(rest):
            row.append(rest.cut(0, room))
            rest, room = rest.cut(room, len(rest)), room - len(row[-1])
            if not room:
                yield row
                row, room = [], context
    if row:
        yield row
