"""A place in the data: documents one after the other, mixed by weights, to be left and found again to the token."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count
from typing import Any, Self

from planish.data.batch import Piece
from planish.data.corpus import Corpus, Place
from planish.data.encode import Encoder, refuse_longer
from planish.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPosition:
    """Where one corpus stands: the next token, and what has been taken in all.

    Attributes:
        epoch: Epoch, from 0.
        unit: Place of the unit in the epoch's order.
        document: Place of the document in the unit's order.
        token: Tokens of that document already taken.
        served: Tokens taken from the corpus since the beginning.
    """

    epoch: int = 0
    unit: int = 0
    document: int = 0
    token: int = 0
    served: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedPosition:
    """Where a feed stands; plain numbers and one string that stands for the files and their order.

    Attributes:
        corpus: Digest of files, sizes, seed, weights and vocabulary size: a position means nothing in other data.
        streams: One for each weighted source, or a single one for all.
    """

    corpus: str
    streams: tuple[StreamPosition, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the position as plain lists, dicts, ints and strings, fit for JSON."""
        return {"corpus": self.corpus, "streams": [dataclasses.asdict(stream) for stream in self.streams]}

    @classmethod
    def from_dict(cls, tree: dict[str, Any]) -> Self:
        """Return the position that `to_dict` wrote.

        Raises:
            UsageError: The tree is of another shape.
        """
        try:
            return cls(corpus=tree["corpus"], streams=tuple(StreamPosition(**stream) for stream in tree["streams"]))
        except (KeyError, TypeError) as error:
            raise UsageError(f"the position of the feed cannot be read: {tree!r}.") from error


class Cursor:
    """Gives the tokens of documents from one or more corpora, endlessly.

    With several corpora, each document comes from the one whose tokens taken are furthest below its weight, so that
    shares are met to within one document, always in the same order.

    Memory: one document's tokens, and one group of documents for each corpus.
    """

    def __init__(
        self,
        corpora: Sequence[Corpus],
        *,
        weights: Sequence[float],
        encode: Encoder,
        seed: int,
        longest: int | None,
    ) -> None:
        """Stand before the first document.

        Args:
            corpora: What to draw from.
            weights: Share of the tokens of each corpus; they need not sum to 1.
            encode: Makes tokens of documents.
            seed: Order of the documents.
            longest: Refuse documents of more tokens; None takes all.
        """
        self._corpora = tuple(corpora)
        self._weights = tuple(weights)
        self._encode = encode
        self._seed = seed
        self._longest = longest
        self._digest = _digest(self._corpora, seed, self._weights, encode.vocab_size)
        self.seek(FeedPosition(corpus=self._digest, streams=tuple(StreamPosition() for _ in corpora)))

    @property
    def position(self) -> FeedPosition:
        """Where the next token stands."""
        return FeedPosition(corpus=self._digest, streams=tuple(self._streams))

    @property
    def at_start(self) -> bool:
        """Whether nothing has been taken yet."""
        return not any(stream.served for stream in self._streams)

    def seek(self, position: FeedPosition) -> None:
        """Stand at `position`.

        Raises:
            UsageError: The position was taken in other data.
        """
        if position.corpus != self._digest:
            raise UsageError(
                "the data is not what it was when the position was taken: files, their sizes, `data.weights`, "
                "`data.seed` or the tokenizer differ; put them back, or start a new run from the checkpoint."
            )
        self._streams = list(position.streams)
        self._readers: list[Iterator[tuple[int, Place, Piece]] | None] = [None] * len(self._streams)
        self._document: Piece | None = None
        self._current = next((index for index, stream in enumerate(self._streams) if stream.token), None)

    def take(self, room: int) -> Piece:
        """Return the next tokens of the current document: `room` of them, or what is left of it."""
        index, document = self._at_document()
        stream = self._streams[index]
        piece = document.cut(stream.token, stream.token + room)
        token, served = stream.token + len(piece), stream.served + len(piece)
        if token < len(document):
            self._streams[index] = dataclasses.replace(stream, token=token, served=served)
        else:
            self._streams[index] = dataclasses.replace(stream, token=0, document=stream.document + 1, served=served)
            self._document = self._current = None
        return piece

    def _at_document(self) -> tuple[int, Piece]:
        """Return the current document and the index of its corpus; begin the next one where none is."""
        if self._current is None:
            self._current = min(range(len(self._streams)), key=self._share)
        if self._document is None:
            reader = self._readers[self._current] or self._read(self._current)
            self._readers[self._current] = reader
            epoch, place, self._document = next(reader)
            self._streams[self._current] = dataclasses.replace(
                self._streams[self._current], epoch=epoch, unit=place.unit, document=place.document
            )
        return self._current, self._document

    def _share(self, index: int) -> float:
        return self._streams[index].served / self._weights[index]

    def _read(self, index: int) -> Iterator[tuple[int, Place, Piece]]:
        """Yield the documents of a corpus from its position on, epoch after epoch.

        Raises:
            UsageError: A document that cannot be used, or a whole epoch without a token.
        """
        corpus, stream = self._corpora[index], self._streams[index]
        start = Place(unit=stream.unit, document=stream.document)
        for epoch in count(stream.epoch):
            found = start != Place()
            for place, document in corpus.epoch((self._seed, epoch, index), start):
                piece = self._encode(document)
                if self._longest is not None:
                    refuse_longer(document, len(piece), self._longest)
                if len(piece):
                    found = True
                    yield epoch, place, piece
            if not found:
                raise UsageError(f"{corpus.name} holds no text: every document in it is empty.")
            start = Place()


def _digest(corpora: Sequence[Corpus], seed: int, weights: Sequence[float], vocab_size: int) -> str:
    digest = blake2b(repr((seed, list(weights), vocab_size)).encode(), digest_size=16)
    for corpus in corpora:
        digest.update(repr([(file.name, file.size_bytes) for file in corpus.files]).encode())
    return digest.hexdigest()
