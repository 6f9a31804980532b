"""Two heads compared tile by tile: one comparison planned, its statistics, its gradients, and autograd's node."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from planish.peaks.vocab.blocked import refuse_second_derivatives
from planish.peaks.vocab.inputs import DEFAULT_TILE_BYTES, Options, count_valid, describe, needing, warn_if_above
from planish.peaks.vocab.pair import Operands, PairSweep, PairTask, PairTiles
from planish.peaks.vocab.task import Task
from planish.price.vocab_pair import SIDES, Divergence, Pair, Side, choose_pair_tiling


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What is compared, checked.

    Attributes:
        sides: The student's tensors and the teacher's.
        target: Class of each token, [T] of int64.
        options: How the student's logits are made, and the teacher's.
        compute: Dtypes of both sides' products.
        divergence: Which.
        temperature: Divides both sides' logits.
        beta: Share of the teacher in the mixture.
        hard: Whether the cross-entropy is wanted too.
    """

    sides: tuple[Operands, Operands]
    target: Tensor
    options: tuple[Options, Options]
    compute: tuple[torch.dtype, torch.dtype]
    divergence: Divergence
    temperature: float
    beta: float
    hard: bool

    @property
    def operands(self) -> tuple[Tensor | None, ...]:
        """Both sides' tensors and the target."""
        return *self.sides[0].tensors, *self.sides[1].tensors, self.target

    @property
    def grads(self) -> tuple[frozenset[str], frozenset[str]]:
        """What needs gradients now, of the student and of the teacher."""
        student, teacher = (needing(hidden=each.hidden, weight=each.weight, bias=each.bias) for each in self.sides)
        return student, teacher

    def pair(self, grads: tuple[frozenset[str], frozenset[str]]) -> Pair:
        """Return sizes and dtypes, with these gradients.

        Raises:
            TypeError: One side in float64 alone.
        """
        student, teacher = (
            describe(*side.tensors, how, compute=compute, wanted=frozenset({"lse"}), grads=wanted)
            for side, how, compute, wanted in zip(self.sides, self.options, self.compute, grads, strict=True)
        )
        if student.wide_dtype != teacher.wide_dtype:
            raise TypeError(
                f"`hidden` and `teacher_hidden` must both be float64 or neither, got {student.compute_dtype} and "
                f"{teacher.compute_dtype}."
            )
        apart = self.hard and self.temperature != 1.0
        return Pair(student=student, teacher=teacher, divergence=self.divergence, hard=self.hard, apart=apart)


def plan_pair(given: Comparison, grads: tuple[frozenset[str], frozenset[str]]) -> PairTask:
    """Return one comparison with a tiling for the gradients that are wanted, of the student and of the teacher."""
    (student, teacher), own = given.sides, given.options[0]
    vocab_size = len(student.weight)
    if len(teacher.weight) != vocab_size:
        raise ValueError(
            f"`teacher_weight` must have the {vocab_size} rows of `weight`, one vocabulary, got {len(teacher.weight)}."
        )
    pair = given.pair(grads)
    tile_bytes = DEFAULT_TILE_BYTES if own.tile_bytes is None else own.tile_bytes
    tiling = choose_pair_tiling(pair, tile_bytes=tile_bytes)
    warn_if_above(pair.workspace_bytes(tiling), tile_bytes, stacklevel=5)
    num_valid = count_valid(given.target, ignore_index=own.ignore_index, vocab_size=vocab_size, num_valid=own.num_valid)
    tasks = [
        Task(
            head=pair.head(side),
            tiling=tiling,
            ignore_index=own.ignore_index,
            num_valid=num_valid,
            logit_scale=how.logit_scale,
            softcap=how.softcap,
        )
        for side, how in zip(SIDES, given.options, strict=True)
    ]
    return PairTask(pair=pair, student=tasks[0], teacher=tasks[1], temperature=given.temperature, beta=given.beta)


class PairDivergence(torch.autograd.Function):
    """Divergence and cross-entropy of each token, whose gradients are made in backward from tiles computed again."""

    @staticmethod
    def forward(ctx: Any, *operands: Any) -> tuple[Tensor, Tensor | None]:
        """Return the divergence and, where it is wanted, the cross-entropy, [T] each; 0 where ignored."""
        *tensors, target, task = operands
        found = pair_statistics(tensors, target, task)
        ctx.task = task
        ctx.save_for_backward(*tensors, target, *(found[name] for name in task.pair.kept))
        return found["kl"], found.get("nll")

    @staticmethod
    def backward(ctx: Any, by_kl: Tensor, by_nll: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients under per-token upstreams."""
        refuse_second_derivatives()
        saved = ctx.saved_tensors  # a checkpoint lets it be read once
        *tensors, target = saved[:7]
        rows = dict(zip(ctx.task.pair.kept, saved[7:], strict=True))
        student = pair_gradients("student", tensors, target, ctx.task, rows, by_kl, by_nll)
        return *student, *pair_gradients("teacher", tensors, target, ctx.task, rows, by_kl, None), None, None


def pair_statistics(tensors: list[Tensor | None], target: Tensor, task: PairTask) -> dict[str, Tensor]:
    """Return every statistic of each token by name, [T] each; 0 where ignored."""
    tiles = PairTiles.prepare("statistics", Operands.of(tensors[:3]), Operands.of(tensors[3:]), target, task)
    found = {name: tiles.shared.spare.new_zeros(len(target)) for name in task.pair.statistics}
    for group in task.student.row_groups():
        _scan_into(tiles, group, found)
    return found


def _scan_into(tiles: PairTiles, group: slice, found: dict[str, Tensor]) -> None:
    """Write the statistics of `group` to its tokens."""
    row = tiles.scan(group)
    for name, values in found.items():
        tiles.student.task.scatter(tiles.student.work, row[name], values, group)


def pair_gradients(
    side: Side,
    tensors: list[Tensor | None],
    target: Tensor,
    task: PairTask,
    rows: dict[str, Tensor],
    by_kl: Tensor,
    by_nll: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of hidden, weight and bias of one side."""
    if not task.pair.head(side).grads:
        return None, None, None
    tiles = PairTiles.prepare(side, Operands.of(tensors[:3]), Operands.of(tensors[3:]), target, task)
    own, bias = (tiles.student, tensors[2]) if side == "student" else (tiles.teacher, tensors[5])
    grads = PairSweep(tiles=own, pair=tiles, side=side, rows=rows, by_kl=by_kl, by_nll=by_nll).run()
    return grads.hidden, grads.weight, None if grads.bias is None else grads.bias.to(bias.dtype)
