"""Many files as one shuffled sequence of documents, of which only the paths are held."""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate

from planish.data.document import DataFile, Document
from planish.data.order import shuffled


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a document stands in an epoch: the unit's place in the order, and the document's place in the unit."""

    unit: int = 0
    document: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """The files that documents are drawn from; an epoch is each document once.

    Units are shuffled over all files and documents inside their unit.

    Memory: path and size of each file; the documents of one group while it is read.

    Attributes:
        name: The sources as the user wrote them.
        files: Files that are not empty.
        num_empty: Files that were left out because they are empty.
    """

    name: str
    files: tuple[DataFile, ...]
    num_empty: int = 0
    _ends: list[int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ends", list(accumulate(file.num_units for file in self.files)))

    @property
    def num_units(self) -> int:
        """Units in all files."""
        return self._ends[-1] if self._ends else 0

    def epoch(self, key: tuple[int, ...] | None, start: Place) -> Iterator[tuple[Place, Document]]:
        """Yield the documents of one epoch from `start` on, in the order of `key`, or as they lie in the files."""
        first = start.document
        for turn in range(start.unit, self.num_units):
            unit = _at(turn, self.num_units, key)
            for number, document in enumerate(self._unit(unit, key)):
                if number >= first:
                    yield Place(unit=turn, document=number), document
            first = 0

    def _unit(self, unit: int, key: tuple[int, ...] | None) -> Iterator[Document]:
        index = bisect_right(self._ends, unit)
        file = self.files[index]
        for turn, group in enumerate(file.groups(unit - self._ends[index] + file.num_units)):
            group_key = None if key is None else (*key, unit, turn)
            for place in range(len(group)):
                yield group[_at(place, len(group), group_key)]


def _at(place: int, size: int, key: tuple[int, ...] | None) -> int:
    return place if key is None else shuffled(place, size, key)
