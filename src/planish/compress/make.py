"""The first stage as one call: a parent and its text in, the finished library out, held to a memory budget."""

import hashlib
import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from planish.compress.calibrate import Calibration, calibrate
from planish.compress.calibration_price import Pass, batch_that_fits, calibration_bytes
from planish.compress.library import Library
from planish.compress.parent import Parent
from planish.compress.space import Menu, Space
from planish.decode import encode
from planish.memory.budget import counted, exceeding
from planish.memory.ledger import Ledger


def make_library(
    parent: Parent,
    rows: Tensor,
    folder: Path,
    *,
    menu: Menu | None = None,
    settings: Calibration | None = None,
    budget_bytes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Library:
    """Return the library of `parent` in `folder`, made or gone on with.

    Memory:        `library_bytes`; with a budget, as many rows at once as it holds.

    Args:
        parent: The model.
        rows: Token ids [N, S] that blocks are fitted to and judged by.
        folder: Its place.
        menu: Which options it holds.
        settings: How they are made.
        budget_bytes: What tensors may hold.
        progress: Called with the layers done and their number.

    Raises:
        DoesNotFit: Not even one row at a time fits; nothing was started.
        BudgetExceeded: The price was wrong; blocks that were written stay.
        UsageError, WorldFailed: As `Library.create` and `calibrate`.
    """
    menu, settings = menu or Menu(), settings or Calibration()
    space = parent.space(menu)
    if budget_bytes is not None:
        sizes = batch_that_fits(space, _sizes(parent, rows, settings), budget_bytes)
        settings = replace(settings, batch_rows=sizes.batch_rows)
    library = Library.create(
        folder,
        config=parent.config,
        space=space,
        made_from=_made_from(parent, rows, settings, space),
        generation=parent.generation,
    )
    ledger = Ledger(budget_bytes=budget_bytes)
    with ExitStack() as scope:
        if budget_bytes is not None:
            scope.enter_context(counted(ledger, parent.device))
            ledger.adopt([rows, *parent.resident()], "other")
        with exceeding(ledger):
            calibrate(parent, rows, library, settings, progress=progress)
    return library


def library_bytes(
    parent: Parent, rows: Tensor, *, menu: Menu | None = None, settings: Calibration | None = None
) -> int:
    """Return the bytes that tensors hold at most while the library is made."""
    return calibration_bytes(parent.space(menu or Menu()), _sizes(parent, rows, settings or Calibration()))


def _sizes(parent: Parent, rows: Tensor, settings: Calibration) -> Pass:
    choose, held = settings.borders(len(rows))
    return Pass(
        rows=rows.shape[0],
        judging_rows=len(rows) - choose,
        context=rows.shape[1],
        batch_rows=min(settings.batch_rows, max(choose, held - choose, len(rows) - held)),
        itemsize=parent.dtype.itemsize,
        largest_layer_bytes=parent.largest_layer_bytes,
        resident_bytes=sum(each.nbytes for each in parent.resident()),
        ends_bytes=parent.ends_bytes,
    )


def _made_from(parent: Parent, rows: Tensor, settings: Calibration, space: Space) -> str:
    """Return a hash of all that blocks depend on; how many rows run at once only rounds otherwise."""
    digest = hashlib.sha256(parent.fingerprint().encode())
    digest.update(rows.cpu().contiguous().numpy().tobytes())
    tree = encode(replace(settings, batch_rows=1)) | {"space": encode(space), "dtype": str(parent.dtype)}
    digest.update(json.dumps(tree, sort_keys=True).encode())
    return digest.hexdigest()
