"""Distillation over a whole vocabulary: two heads in, how far their distributions lie apart out; no logits."""

import math
from typing import Any, get_args

import torch
from torch import Tensor

from planish.peaks.vocab.blocked import refuse_second_derivatives
from planish.peaks.vocab.inputs import (
    DEFAULT_TILE_BYTES,
    LogitsDtype,
    Options,
    check,
    compute_dtype,
    count_valid,
    describe,
    needing,
    warn_if_above,
)
from planish.peaks.vocab.pair import Operands, PairSweep, PairTask, PairTiles
from planish.peaks.vocab.reduction import Reduction, check_reduction, reduce
from planish.peaks.vocab.task import Task
from planish.price.vocab_pair import Divergence, Pair, Side, choose_pair_tiling


def linear_kl(  # noqa: PLR0913
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    target: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    divergence: Divergence = "forward",
    beta: float | None = None,
    temperature: float = 1.0,
    ce_weight: float = 0.0,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    divisor: float | Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    teacher_logit_scale: float = 1.0,
    teacher_softcap: float | None = None,
    logits_dtype: LogitsDtype = "auto",
    tile_bytes: int | None = None,
    num_valid: int | None = None,
) -> Tensor:
    """Return how far a student's next-token distribution is from a teacher's, and forms neither's logits.

    y = softcap(logit_scale * (hidden @ weight^T + bias)),  p = softmax(y / temperature),  q the same of the teacher,
    m = beta q + (1 - beta) p; the loss of one token is ce_weight * (-log softmax(y)[target]) plus

        "forward":        KL(q || p) = sum(q (log q - log p))
        "reverse":        KL(p || q)
        "jensen-shannon": beta KL(q || m) + (1 - beta) KL(p || m)

    The temperature divides gradients by its square; multiply the divergence by that to keep their size.

    Memory: `planish.price.vocab_pair.kl_phases` gives it to the byte: both sides' working buffers together within
        `tile_bytes`, 4 bytes a token for each number that is kept of it, and in backward what "recompute" of
        `linear_cross_entropy` takes, for the teacher too where one of its tensors needs a gradient.
    Exactness: equal to full logits up to the order of summation; equal heads are exactly 0 apart, and nothing is below
        0. A class that the second of the compared excludes (-inf) and the first does not counts as the largest number.

    Args:
        hidden: The student's hidden states, [..., D].
        weight: Its head's weight, [V, D].
        teacher_hidden: The teacher's, [..., E]; of another width if one likes.
        teacher_weight: Its head's weight, [V, E].
        target: Class of each token, [...], or None where all tokens count and there is no cross-entropy.
        bias: The student's bias, [V].
        teacher_bias: The teacher's.
        divergence: Which of the three.
        beta: Share of the teacher in the mixture, in (0, 1); None is 0.5.
        temperature: Divides the logits of both in the divergence, not in the cross-entropy.
        ce_weight: Weight of the cross-entropy beside the divergence.
        ignore_index: Target of tokens that are left out; no row of theirs is multiplied.
        reduction: As in `linear_cross_entropy`.
        divisor: As in `linear_cross_entropy`.
        logit_scale: Multiplies the student's logits.
        softcap: Bounds them.
        teacher_logit_scale: Multiplies the teacher's.
        teacher_softcap: Bounds them.
        logits_dtype: See `linear_cross_entropy`.
        tile_bytes: Bytes of all working buffers together; None is 60 MiB.
        num_valid: Number of targets that are not ignored, where it is known; it is then not read from a GPU.

    Returns:
        The loss in float32 (float64 for float64).

    Raises:
        TypeError: Tensors of a wrong kind; one side in float64 alone.
        ValueError: Tensors that do not fit together, a class or a setting out of range, a setting without effect.

    Example:
        >>> import torch
        >>> student, teacher = torch.randn(2, 5, 16, requires_grad=True), torch.randn(2, 5, 64)
        >>> loss = linear_kl(student, torch.randn(100, 16), teacher, torch.randn(100, 64), divergence="reverse")
        >>> loss.backward()
        >>> student.grad.shape
        torch.Size([2, 5, 16])

    References:
        Hinton et al., Distilling the Knowledge in a Neural Network, arXiv 1503.02531, equation 2 (forward); Gu et al.,
        MiniLLM, arXiv 2306.08543, equation 1 (reverse); Agarwal et al., On-Policy Distillation of Language Models,
        arXiv 2306.13649, equation 1 (the mixture).
    """
    if torch.compiler.is_compiling():
        raise ValueError(
            "`linear_kl` cannot be traced by `torch.compile` yet; wrap it: `torch.compiler.disable(planish.linear_kl)`."
        )
    check_reduction(reduction, divisor)
    _check_settings(divergence, beta, temperature, ce_weight, target)
    options = Options(
        ignore_index=ignore_index,
        logit_scale=logit_scale,
        softcap=softcap,
        logits_dtype=logits_dtype,
        tile_bytes=tile_bytes,
        strategy="recompute",
        num_valid=num_valid,
    )
    teacher_options = Options(
        ignore_index=ignore_index, logit_scale=teacher_logit_scale, softcap=teacher_softcap, logits_dtype=logits_dtype
    )
    shape = hidden.shape[:-1]
    classes = torch.zeros(shape, dtype=torch.long, device=weight.device) if target is None else target
    check(hidden, weight, classes, bias)
    check(teacher_hidden, teacher_weight, classes, teacher_bias, name="teacher_weight", prefix="teacher_")
    student, teacher = (
        Operands(hidden=each.reshape(-1, each.shape[-1]), weight=head, bias=its_bias)
        for each, head, its_bias in ((hidden, weight, bias), (teacher_hidden, teacher_weight, teacher_bias))
    )
    flat = classes.reshape(-1).long()
    task = _plan(
        student,
        teacher,
        flat,
        (options, teacher_options),
        divergence=divergence,
        temperature=temperature,
        beta=0.5 if beta is None else beta,
        hard=ce_weight > 0,
    )
    with torch.autocast(hidden.device.type, enabled=False):
        kl, nll = _Divergence.apply(
            *(student.hidden, student.weight, student.bias), *(teacher.hidden, teacher.weight, teacher.bias), flat, task
        )
    losses = kl if nll is None else torch.add(kl, nll, alpha=ce_weight)
    if reduction == "none":
        return losses.reshape(shape)
    return reduce(losses.sum(), reduction, max(1, task.student.num_valid) if divisor is None else divisor)


def _check_settings(
    divergence: str, beta: float | None, temperature: float, ce_weight: float, target: Tensor | None
) -> None:
    """Refuse settings that are out of range or would have no effect."""
    if divergence not in get_args(Divergence):
        raise ValueError(f"`divergence` must be one of {', '.join(get_args(Divergence))}, got {divergence!r}.")
    if beta is not None and divergence != "jensen-shannon":
        raise ValueError(f'`beta` has no effect on the {divergence} divergence; use divergence="jensen-shannon".')
    if beta is not None and not 0 < beta < 1:
        raise ValueError(
            f"`beta` must be in (0, 1), got {beta}; its ends are the forward (0) and the reverse (1) divergence, "
            "each over beta or 1 - beta."
        )
    if not 0 < temperature < math.inf:
        raise ValueError(f"`temperature` must be above 0, got {temperature}.")
    if not 0 <= ce_weight < math.inf:
        raise ValueError(f"`ce_weight` must be at least 0, got {ce_weight}.")
    if ce_weight > 0 and target is None:
        raise ValueError("`ce_weight` needs `target`, the class of each token; give it, or leave `ce_weight` out.")


def _plan(
    student: Operands,
    teacher: Operands,
    target: Tensor,
    options: tuple[Options, Options],
    *,
    divergence: Divergence,
    temperature: float,
    beta: float,
    hard: bool,
) -> PairTask:
    """Return one comparison with a tiling for the gradients that are wanted."""
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
            compute=compute_dtype(side.hidden, side.weight, logits_dtype=how.logits_dtype),
            wanted=frozenset({"lse"}),
            grads=needing(hidden=side.hidden, weight=side.weight, bias=side.bias),
        )
        for side, how in zip((student, teacher), options, strict=True)
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


class _Divergence(torch.autograd.Function):
    """Divergence and cross-entropy of each token, whose gradients are made in backward from tiles computed again."""

    @staticmethod
    def forward(ctx: Any, *operands: Any) -> tuple[Tensor, Tensor | None]:
        """Return the divergence and, where it is wanted, the cross-entropy, [T] each; 0 where ignored."""
        *tensors, target, task = operands
        found = _statistics(tensors, target, task)
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
        student = _gradients("student", tensors, target, ctx.task, rows, by_kl, by_nll)
        return *student, *_gradients("teacher", tensors, target, ctx.task, rows, by_kl, None), None, None


def _statistics(tensors: list[Tensor | None], target: Tensor, task: PairTask) -> dict[str, Tensor]:
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


def _gradients(
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
