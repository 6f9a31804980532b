"""The tiles of one pass over tokens and vocabulary, and what both strategies do with each of them."""

from dataclasses import dataclass
from types import ModuleType
from typing import Self

import torch
from torch import Tensor

from planish.kernels.vocab import head_kernels
from planish.peaks.vocab.filter import Kept, brought_together
from planish.peaks.vocab.task import Task
from planish.peaks.vocab.tile import (
    FLOOR,
    Slopes,
    Workspace,
    accumulate,
    combine,
    differentiate,
    fill,
    fold,
    narrowed,
    pick,
)
from planish.price.vocab import BLOCK, ROW_STEP, Pass, round_up


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """The operands of one pass and its working buffers; a tile is a group of valid tokens by a range of columns.

    `bias` is in the compute dtype; the weight is cast tile by tile where it is in another. `first` is the class of the
    weight's first row. An `adapter` [V, R] stands beside the weight tile by tile: hidden states are R columns wider
    than the weight, which is frozen.
    """

    task: Task
    work: Workspace
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    first: int = 0
    adapter: Tensor | None = None

    @classmethod
    def prepare(
        cls,
        which: Pass,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        task: Task,
        adapter: Tensor | None = None,
    ) -> Self:
        """Return the operands with the working buffers of pass `which`, the valid tokens looked up."""
        work = Workspace.allocate(task.tiling.buffers(task.head, which), hidden.device)
        return cls(
            task=task.indexed(target),
            work=work,
            hidden=hidden,
            weight=weight,
            bias=None if bias is None else bias.to(work.rows.dtype),
            target=target,
            adapter=adapter,
        )

    @property
    def trained(self) -> Tensor:
        """Return what the gradient of the weight is of."""
        return self.weight if self.adapter is None else self.adapter

    def load(self, group: slice) -> Tensor:
        """Return the hidden states of `group` in the compute dtype, followed by zeros up to a multiple of ROW_STEP."""
        work, index, count = self.work, self.task.index, group.stop - group.start
        rows = work.rows[: round_up(count, ROW_STEP)]
        rows[count:].zero_()
        if index is None:
            rows[:count].copy_(self.hidden[group])
        elif work.gather is None:
            torch.index_select(self.hidden, 0, index[group], out=rows[:count])
        else:
            rows[:count].copy_(torch.index_select(self.hidden, 0, index[group], out=work.gather[:count]))
        return rows

    def at(self, rows: Tensor, columns: slice) -> Tensor:
        """Return the place of the tile of `rows` and `columns`: its own where tiles are kept, else that of all."""
        width = columns.stop - columns.start
        start = len(rows) * columns.start if self.task.tiling.keeps_tiles else 0
        return self.work.tile.view(-1)[start : start + len(rows) * width].view(len(rows), width)

    def logits(self, rows: Tensor, columns: slice) -> Tensor:
        """Return a tile of logits."""
        tile, task = self.at(rows, columns), self.task
        bias = None if self.bias is None else self.bias[columns]
        weight = self._weight(columns)
        fill(tile, self.work.strip, rows, weight, bias, logit_scale=task.logit_scale, softcap=task.softcap)
        return tile

    @property
    def keeps_exponentials(self) -> bool:
        """Return whether tiles that were folded hold exponentials; see [Note: kept exponentials]."""
        task, work = self.task, self.work
        return task.tiling.keeps_tiles and task.softcap is None and work.tile.dtype == work.strip.dtype

    def scan(self, group: slice, rows: Tensor) -> dict[str, Tensor]:
        """Return nll and the wanted statistics of each token of `group`, from one tile of logits after the other."""
        count = group.stop - group.start
        target_logit = self.work.strip.new_zeros(count, *self.target.shape[1:])
        kernels = self.kernels if self.work.folds_plainly else None
        for block, columns in self.task.column_groups():
            if kernels is None:
                tile = self.logits(rows, columns)[:count]
                target_logit.add_(pick(tile, self.local_target(group, columns)))
                fold(self.work, tile, block, keep=self.keeps_exponentials)
            else:
                target_logit.add_(
                    kernels.fold(
                        *self._operands(rows[:count], columns),
                        self.local_target(group, columns),
                        self.work.block_max[:count, block:],
                        self.work.block_sum[:count, block:],
                        block=BLOCK,
                        floor=FLOOR,
                        logit_scale=self.task.logit_scale,
                        softcap=self.task.softcap,
                    )
                )
        found = combine(self.work, count, self.task.head.vocab_size)
        if self.target.dim() == 1:
            found["nll"] = found["lse"] - target_logit
        else:
            nothing = self.task.rows_of(self.target, group) < 0
            found["nll"] = target_logit.neg_().add_(found["lse"].unsqueeze(1)).masked_fill_(nothing, 0.0)
        return found

    @property
    def kernels(self) -> ModuleType | None:
        """Return the kernels that need no tile of logits; None where there are none, or they lack what is asked for."""
        plain = self.target.dim() == 1 and self.task.gradient_filter is None and self.task.head.wide_dtype == "float32"
        lies = self.weight.stride(1) == 1 or self.work.cast is not None
        return head_kernels(self.hidden.device) if plain and lies and not self.task.tiling.keeps_tiles else None

    def _operands(self, rows: Tensor, columns: slice) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return what logits are made of."""
        return rows, self._weight(columns), None if self.bias is None else self.bias[columns]

    def derive_again(
        self, rows: Tensor, group: slice, columns: slice, lse: Tensor, slopes: Slopes, d_bias: Tensor | None
    ) -> tuple[Tensor, tuple[Kept, ...] | None]:
        """Return a tile of derivatives from `rows` and each one's lse, and what the gradient filter lets pass."""
        count = group.stop - group.start
        kernels = self.kernels if slopes.entropy is None and d_bias is None else None
        if kernels is None:
            tile = self.logits(rows, columns)[:count]
            return tile, self.derive(tile, group, columns, lse, slopes, d_bias)
        tile = self.at(rows, columns)[:count]
        kernels.derive(
            *self._operands(rows[:count], columns),
            self.local_target(group, columns),
            lse,
            narrowed(self.work, tile),
            softmax=slopes.softmax,
            hit=slopes.target,
            uniform=slopes.uniform,
            logit_scale=self.task.logit_scale,
            softcap=self.task.softcap,
        )
        return tile, None

    def derive(
        self, tile: Tensor, group: slice, columns: slice, lse: Tensor, slopes: Slopes, d_bias: Tensor | None
    ) -> tuple[Kept, ...] | None:
        """Overwrite a tile of logits by the derivative of the loss, for the three below; add its sum to `d_bias`.

        Returns:
            What of it the gradient filter lets pass, or None without one.
        """
        differentiate(
            self.work,
            tile,
            None if self.keeps_exponentials else lse,
            self.local_target(group, columns),
            slopes,
            first_block=columns.start // BLOCK,
            softcap=self.task.softcap,
            bias_grad=None if d_bias is None else d_bias[columns],
        )
        found = self.task.gradient_filter
        return None if found is None else found.look(self.work, tile, slopes.softmax)

    def add_weight_grad(
        self, total: Tensor, tile: Tensor, rows: Tensor, *, fresh: bool, kept: tuple[Kept, ...] | None = None
    ) -> None:
        """Add the share of a tile of derivatives to its columns' gradient of the weight, or set it when `fresh`."""
        rows = rows[: len(tile)] if self.adapter is None else rows[: len(tile), self.weight.shape[1] :]
        tile = narrowed(self.work, tile).t()
        if not self._filters_weight(total, kept, fresh):
            accumulate(self.work, total, tile, rows, fresh=fresh)
            return
        for part in kept:
            for run in part.runs:
                accumulate(self.work, total[run], tile[run, part.rows], rows[part.rows], fresh=False)

    def add_turned_grad(
        self, total: Tensor, tile: Tensor, turned_rows: Tensor, *, fresh: bool, kept: tuple[Kept, ...] | None = None
    ) -> None:
        """As `add_weight_grad`, for a `total` of [width, columns] and the transposed rows."""
        rows, tile = turned_rows[:, : len(tile)], narrowed(self.work, tile)
        if not self._filters_weight(total, kept, fresh):
            accumulate(self.work, total, rows, tile, fresh=fresh)
            return
        for part in kept:
            for run in part.runs:
                accumulate(self.work, total[:, run], rows[:, part.rows], tile[part.rows, run], fresh=False)

    def _filters_weight(self, total: Tensor, kept: tuple[Kept, ...] | None, fresh: bool) -> bool:
        """Return whether the gradient of the weight is filtered too, with nothing in a `fresh` one."""
        if kept is None or not self.task.gradient_filter.weight:
            return False
        if fresh:
            total.zero_()
        return True

    def add_hidden_grad(
        self, total: Tensor, tile: Tensor, columns: slice, *, fresh: bool = True, kept: tuple[Kept, ...] | None = None
    ) -> None:
        """Add the share of a tile of derivatives to its rows' gradient of hidden, which a `fresh` first tile sets."""
        fresh = fresh and columns.start == 0
        weight, derivatives = self._weight(columns), narrowed(self.work, tile)
        if kept is None:
            accumulate(self.work, total, derivatives, weight, fresh=fresh)
            return
        if fresh:
            total.zero_()
        for part in kept:
            rows, out = derivatives[part.rows], total[part.rows]
            if part.index is None:
                for run in part.runs:
                    accumulate(self.work, out, rows[:, run], weight[run], fresh=False)
            elif len(part.index):
                accumulate(self.work, out, *brought_together(self.work, rows, weight, part.index), fresh=False)

    def _weight(self, columns: slice) -> Tensor:
        """Return rows of the weight in the compute dtype, the adapter's beside them."""
        weight = self.weight[columns]
        if self.work.cast is None:
            return weight
        cast, width = self.work.cast[: len(weight)], weight.shape[1]
        cast[:, :width].copy_(weight)
        if self.adapter is not None:
            cast[:, width:].copy_(self.adapter[columns])
        return cast

    def local_target(self, group: slice, columns: slice) -> Tensor:
        """Return the target of each token of `group` as a column of `columns`, negative where it lies outside."""
        local = self.task.rows_of(self.target, group) - (self.first + columns.start)
        return local.masked_fill_(local >= columns.stop - columns.start, -1)
