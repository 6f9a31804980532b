"""One call of the head, checked: which tokens count, in which groups they are worked on, how logits are made."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from planish.peaks.vocab.filter import GradientFilter
from planish.peaks.vocab.tile import Workspace
from planish.price.vocab import Head, Tiling, block_ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One call.

    Attributes:
        head: Sizes and dtypes.
        tiling: Strategy and tile.
        ignore_index: Target of the tokens that are left out.
        num_valid: How many tokens are not.
        index: Their positions in order, [num_valid]; None means all tokens, or not looked up yet.
        logit_scale: Multiplies the logits.
        softcap: Caps them.
        gradient_filter: What leaves part of the gradients out; None is exact.
    """

    head: Head
    tiling: Tiling
    ignore_index: int
    num_valid: int
    index: Tensor | None = None
    logit_scale: float = 1.0
    softcap: float | None = None
    gradient_filter: GradientFilter | None = None

    def indexed(self, target: Tensor) -> Self:
        """Return the task with the positions of the valid tokens of `target` looked up."""
        if self.num_valid == len(target) or self.index is not None:
            return self
        valid = target != self.ignore_index
        index = torch.nonzero_static(valid if valid.dim() == 1 else valid.any(1), size=self.num_valid).squeeze(1)
        return dataclasses.replace(self, index=index)

    def row_groups(self) -> Iterator[slice]:
        """Yield ranges of valid tokens, equally large but for the last, each at most the tile's rows."""
        step = self.tiling.group_rows(self.num_valid)
        for start in range(0, self.num_valid, max(1, step)):
            yield slice(start, min(self.num_valid, start + step))

    def column_groups(self) -> Iterator[tuple[int, slice]]:
        """Yield ranges of the vocabulary as wide as the tile, each with its first canonical block."""
        for block, start, stop in block_ranges(self.head.vocab_size, self.tiling.blocks):
            yield block, slice(start, stop)

    def rows_of(self, source: Tensor, group: slice) -> Tensor:
        """Return the entries of per-token `source` that belong to `group`."""
        return source[group] if self.index is None else source.index_select(0, self.index[group])

    def scatter(self, work: Workspace, values: Tensor, out: Tensor, group: slice) -> None:
        """Write `values` of `group` to its tokens in `out`, rounded to its dtype; `work.rows` may be used up."""
        if self.index is None:
            out[group].copy_(values)
            return
        if out.dtype != values.dtype:
            scratch = work.rows if work.gather is None else work.gather
            values = scratch[: len(values)].copy_(values)
        out.index_copy_(0, self.index[group], values)
