"""The libraries of one order: blocks as they are initialised, trained one by one, and trained in pairs."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import cached_property
from typing import Any

from torch import Tensor

from planish.compress.distil import Pairs, distil
from planish.compress.eta import Note, progress_of
from planish.compress.journal import key_of
from planish.compress.library import Library, pair_name
from planish.compress.make import make_library
from planish.compress.order import Order
from planish.compress.parent import Parent
from planish.compress.pupil import Distillation, Trained


class Stock:
    """Makes libraries, or goes on with them.

    Args:
        order: The settings.
        parent: The model.
        rows: Text that blocks are fitted to, trained on and judged by [N, S].
        settings: How blocks are trained.
        bounded: Holds a stage to the budget.
        note: Called with a sentence now and then.
    """

    def __init__(
        self,
        order: Order,
        parent: Parent,
        rows: Tensor,
        settings: Distillation,
        *,
        bounded: Callable[[], AbstractContextManager[Any]],
        note: Note,
    ) -> None:
        self._order, self._parent, self._rows, self._settings = order, parent, rows, settings
        self._bounded, self._note = bounded, note

    @cached_property
    def initial(self) -> Library:
        """Every block as its initialisation leaves it."""
        return make_library(
            self._parent,
            self._rows,
            self._order.out / "library",
            menu=self._order.menu,
            settings=self._order.calibration,
            budget_bytes=self._order.budget_bytes,
            progress=progress_of(self._note, "library"),
        )

    def trained(self, chosen: frozenset[str] | None) -> Library:
        """Return the library whose `chosen` blocks, by name, have been trained; None for all that gain from it."""
        told = None if chosen is None else sorted(chosen)
        found = self._begun("library-distilled", self.initial, key_of(asdict(self._settings), told))
        self._distil(self.initial, found, "distillation of blocks", lambda name: chosen is None or name in chosen, {})
        return found

    def in_pairs(self, singles: Library, pairs: Pairs) -> Library:
        """Return `singles` with `pairs` of attention and network that were trained together besides."""
        names = [pair_name(index, choice) for index, choices in pairs.items() for choice in choices]
        found = self._begun("library-coupled", singles, key_of(asdict(self._settings), names))
        self._distil(singles, found, "distillation of pairs", lambda _: False, pairs)
        return found

    def _begun(self, name: str, of: Library, how: str) -> Library:
        return Library.create(
            self._order.out / name,
            config=of.config,
            space=of.space,
            made_from=key_of(of.made_from, how),
            generation=of.generation_config(),
        )

    def _distil(
        self, library: Library, trained: Library, stage: str, chosen: Callable[[str], bool], pairs: Pairs
    ) -> None:
        with self._bounded():
            results: list[Trained] = distil(
                self._parent,
                self._rows,
                library,
                trained,
                self._settings,
                chosen=chosen,
                pairs=pairs,
                progress=progress_of(self._note, stage),
            )
        if results:
            better = sum(each.after < each.before for each in results)
            self._note(f"{stage}: {better} of {len(results)} are nearer to their parent's")
