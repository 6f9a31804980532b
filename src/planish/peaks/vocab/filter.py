"""What of a head's gradients is left out of their products: an approximation, off unless it is asked for.

Most classes have next to no probability, and so has the derivative by their logits. A product of a tile of such
derivatives adds less than rounding to a narrow gradient, and skipping it saves its time (CCE, arXiv 2411.09009, section
4.3). It is not exact: what is left out is lost, tile by tile, and of a class that is never likely a whole row of the
weight's gradient; so that gradient is filtered only on demand.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from planish.peaks.vocab.tile import Workspace
from planish.price.vocab import FILTER_BLOCK, round_up


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What of some rows of a tile is multiplied.

    Attributes:
        rows: These rows, FILTER_BLOCK of them.
        runs: Whole stretches of FILTER_BLOCK columns in which a derivative passes.
        index: The columns in which one does, where these are brought together; else None.
    """

    rows: slice
    runs: tuple[slice, ...]
    index: Tensor | None


@dataclass(slots=True, kw_only=True)
class GradientFilter:
    """Which derivatives are worth multiplying, and a count of those that were not.

    A block of 128 tokens and 128 classes is skipped where no derivative by a logit is above `threshold` times the
    largest upstream of these tokens: the derivatives as they are multiplied, z-loss, class weights and the upstream of
    each token included, so that a loss that is scaled skips the same.

    Attributes:
        threshold: Part of the upstream that is nothing; a bf16 product rounds at 2^-9 and CCE takes 2^-12.
        ordered: Bring the classes that pass together before they are multiplied, instead of skipping whole blocks: CCE
            orders the vocabulary by its mean logit for that, this takes the own order of every 128 tokens. It skips far
            more, and small derivatives that are many are then lost: set a lower threshold.
        weight: Filter the gradient of the weight too, in whole blocks; classes that are never likely then learn
            nothing.
        seen: Derivatives that were looked at.
        skipped: Of them, how many the gradient of hidden went without.
    """

    threshold: float = 2.0**-12
    ordered: bool = False
    weight: bool = False
    seen: int = 0
    skipped: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.threshold < math.inf:
            raise ValueError(f"`threshold` must be above 0, got {self.threshold}; without a filter nothing is skipped.")

    @property
    def skipped_fraction(self) -> float:
        """Return the skipped part of what was looked at; 0 before anything was."""
        return self.skipped / max(1, self.seen)

    def look(self, work: Workspace, tile: Tensor, slope: Tensor | None) -> tuple[Kept, ...]:
        """Return what of a tile of derivatives passes, and count it; `slope` is the upstream of each row, None is 1.

        What is not a number passes. Fake tensors pass whole.
        """
        found = []
        for start in range(0, len(tile), FILTER_BLOCK):
            rows = slice(start, min(len(tile), start + FILTER_BLOCK))
            found.append(self._look(work, rows, tile[rows], None if slope is None else slope[rows]))
        return tuple(found)

    def _look(self, work: Workspace, at: slice, tile: Tensor, slope: Tensor | None) -> Kept:
        rows, columns = tile.shape
        low, high = work.column_tops[:, :columns]
        torch.aminmax(tile, dim=0, out=(low, high))
        torch.maximum(high, low.neg_(), out=high)
        floor = self.threshold if slope is None else self.threshold * slope.abs().amax()
        index = None
        if self.ordered:
            index = _indices((high <= floor).logical_not_())
        runs = self._runs(work, columns, floor)
        kept = sum(run.stop - run.start for run in runs) if index is None else len(index)
        self.seen += rows * columns
        self.skipped += rows * (columns - kept)
        return Kept(rows=at, runs=runs, index=index)

    def _runs(self, work: Workspace, columns: int, floor: float | Tensor) -> tuple[slice, ...]:
        """Return the stretches that pass, neighbours as one."""
        tops = work.column_tops[1, : round_up(columns, FILTER_BLOCK)]
        tops[columns:].zero_()
        passing = _indices((tops.view(-1, FILTER_BLOCK).amax(1) <= floor).logical_not_())
        runs: list[slice] = []
        for block in _places(passing):
            start, stop = block * FILTER_BLOCK, min(columns, (block + 1) * FILTER_BLOCK)
            if runs and runs[-1].stop == start:
                runs[-1] = slice(runs[-1].start, stop)
            else:
                runs.append(slice(start, stop))
        return tuple(runs)


def brought_together(work: Workspace, derivatives: Tensor, weight: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Return columns `index` of a tile of derivatives and the same rows of its weight."""
    rows, count, width = len(derivatives), len(index), weight.shape[1]
    together = work.kept.view(-1)[: rows * count].view(rows, count)
    classes = work.kept_weight.view(-1)[: count * width].view(count, width)
    torch.index_select(derivatives, 1, index, out=together)
    return together, torch.index_select(weight, 0, index, out=classes)


def skipped(found: GradientFilter | None) -> dict[str, float]:
    """Return which part was skipped since the last call, for a run's record; nothing where nothing is filtered."""
    if found is None:
        return {}
    part, found.seen, found.skipped = found.skipped_fraction, 0, 0
    return {"head/skipped": round(part, 6)}


def _indices(passing: Tensor) -> Tensor:
    """Return where `passing` is true; of fake tensors everywhere, the most there can be."""
    everywhere = isinstance(passing, FakeTensor)
    return torch.arange(len(passing), device=passing.device) if everywhere else passing.nonzero()[:, 0]


def _places(indices: Tensor) -> list[int]:
    """Return the indices as numbers."""
    return list(range(len(indices))) if isinstance(indices, FakeTensor) else indices.tolist()
