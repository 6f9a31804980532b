"""Two heads compared tile by tile: one comparison planned, its statistics, its gradients, and autograd's node."""

from typing import Any

import torch
from torch import Tensor

from planish.peaks.vocab.blocked import refuse_second_derivatives
from planish.peaks.vocab.inputs import DEFAULT_TILE_BYTES, Options, count_valid, describe, warn_if_above
from planish.peaks.vocab.pair import Operands, PairSweep, PairTask, PairTiles
from planish.peaks.vocab.task import Task
from planish.price.vocab_pair import Divergence, Pair, Side, choose_pair_tiling


def plan_pair(  # noqa: PLR0913
    student: Operands,
    teacher: Operands,
    target: Tensor,
    options: tuple[Options, Options],
    *,
    divergence: Divergence,
    temperature: float,
    beta: float,
    hard: bool,
    grads: tuple[frozenset[str], frozenset[str]],
    compute: tuple[torch.dtype, torch.dtype],
) -> PairTask:
    """Return one comparison with a tiling for the gradients that are wanted, of the student and of the teacher."""
    own, vocab_size = options[0], len(student.weight)
    if len(teacher.weight) != vocab_size:
        raise ValueError(
            f"`teacher_weight` must have the {vocab_size} rows of `weight`, one vocabulary, got {len(teacher.weight)}."
        )
    heads = [
        describe(
            side.hidden,
            side.weight,
            side.bias,
            how,
            compute=products,
            wanted=frozenset({"lse"}),
            grads=wanted,
        )
        for side, how, wanted, products in zip((student, teacher), options, grads, compute, strict=True)
    ]
    if heads[0].wide_dtype != heads[1].wide_dtype:
        raise TypeError(
            f"`hidden` and `teacher_hidden` must both be float64 or neither, got {heads[0].compute_dtype} and "
            f"{heads[1].compute_dtype}."
        )
    pair = Pair(student=heads[0], teacher=heads[1], divergence=divergence, hard=hard, apart=hard and temperature != 1.0)
    tile_bytes = DEFAULT_TILE_BYTES if own.tile_bytes is None else own.tile_bytes
    tiling = choose_pair_tiling(pair, tile_bytes=tile_bytes)
    warn_if_above(pair.workspace_bytes(tiling), tile_bytes, stacklevel=4)
    num_valid = count_valid(target, ignore_index=own.ignore_index, vocab_size=vocab_size, num_valid=own.num_valid)
    tasks = [
        Task(
            head=head,
            tiling=tiling,
            ignore_index=own.ignore_index,
            num_valid=num_valid,
            logit_scale=how.logit_scale,
            softcap=how.softcap,
        )
        for head, how in zip(heads, options, strict=True)
    ]
    return PairTask(pair=pair, student=tasks[0], teacher=tasks[1], temperature=temperature, beta=beta)


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
