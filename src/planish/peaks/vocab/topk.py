"""Distillation from a teacher of whom only the best classes are known: their log-probabilities, and one rest."""

from typing import get_args

import torch
import torch.distributed as dist
from torch import Tensor

from planish.comm.ring import Circle
from planish.peaks.vocab.inputs import LogitsDtype
from planish.peaks.vocab.losses import linear_logprob
from planish.peaks.vocab.reduction import Reduction, check_reduction, reduce
from planish.peaks.vocab.ring_call import circle_of, local_rows
from planish.price.vocab_pair import Divergence


def linear_topk_kl(  # noqa: PLR0913
    hidden: Tensor,
    weight: Tensor,
    teacher_classes: Tensor,
    teacher_logprobs: Tensor,
    *,
    bias: Tensor | None = None,
    divergence: Divergence = "forward",
    temperature: float = 1.0,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    divisor: float | Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    logits_dtype: LogitsDtype = "auto",
    tile_bytes: int | None = None,
    group: dist.ProcessGroup | Circle | None = None,
) -> Tensor:
    """Return how far a student's next-token distribution is from the best classes of a teacher, without logits.

    Both are distributions over the K known classes and one rest, of probability 1 - sum(exp(teacher_logprobs)) and
    1 minus what the student gives the K; where K is the whole vocabulary there is no rest. The divergence of these is
    at most that of the whole distributions, which `linear_kl` computes, and equal to it where the rest is alike.

    Memory: strategy "recompute" of `linear_cross_entropy`, and a dozen numbers for each token and class.
    Exactness: of what it computes, equal to full logits up to the order of summation. A rest lighter than the dtype's
        epsilon counts as that, without gradient.

    Args:
        hidden: The student's hidden states, [..., D].
        weight: Its head's weight, [V, D].
        teacher_classes: The teacher's best classes, [..., K], none of them twice; `ignore_index` where there are fewer.
        teacher_logprobs: Their log-probabilities at this temperature, [..., K].
        bias: The student's bias, [V].
        divergence: As in `linear_kl`, the mixture in equal parts.
        temperature: Divides the student's logits.
        ignore_index: Class that is none; a token without classes counts for nothing.
        reduction: As in `linear_cross_entropy`.
        divisor: As in `linear_cross_entropy`.
        logit_scale: Multiplies the logits.
        softcap: Bounds them.
        logits_dtype: See `linear_cross_entropy`.
        tile_bytes: Bytes of all working buffers together; None is 60 MiB.
        group: Ranks that share the vocabulary, as in `linear_kl`: each has tokens of its own, their teacher's classes
            among the whole vocabulary, and its rows of weight and bias.

    Returns:
        The loss in float32 (float64 for float64).

    Raises:
        TypeError: Tensors of a wrong kind.
        ValueError: Tensors that do not fit together, a class or a setting out of range, a setting without effect.

    Example:
        >>> import torch
        >>> best = torch.randn(2, 5, 100).log_softmax(-1).topk(8)
        >>> student, weight = torch.randn(2, 5, 16, requires_grad=True), torch.randn(100, 16)
        >>> linear_topk_kl(student, weight, best.indices, best.values).backward()
        >>> student.grad.shape
        torch.Size([2, 5, 16])
    """
    check_reduction(reduction, divisor)
    if divergence not in get_args(Divergence):
        raise ValueError(f"`divergence` must be one of {', '.join(get_args(Divergence))}, got {divergence!r}.")
    if teacher_logprobs.shape != teacher_classes.shape or teacher_classes.dim() != hidden.dim():
        raise ValueError(
            "`teacher_classes` and `teacher_logprobs` must both be [..., K] beside `hidden` [..., D], got "
            f"{list(teacher_classes.shape)} and {list(teacher_logprobs.shape)} beside {list(hidden.shape)}."
        )
    nll = linear_logprob(
        hidden, weight, teacher_classes, bias=bias, logit_scale=logit_scale, softcap=softcap, temperature=temperature,
        ignore_index=ignore_index, logits_dtype=logits_dtype, tile_bytes=tile_bytes, group=group,
    ).nll  # fmt: skip
    there = teacher_classes != ignore_index
    valid, num_classes = there.any(-1), len(weight)
    num_valid, circle = valid.sum(), circle_of(group, hidden)
    if circle is not None and circle.size > 1:
        rows = len(local_rows(weight, circle))
        num_classes, num_valid = circle.add(torch.stack([torch.full_like(num_valid, rows), num_valid])).unbind()
    whole = teacher_classes.shape[-1] == num_classes
    student, teacher = (_with_rest(each, there, whole=whole) for each in (-nll, teacher_logprobs.to(nll.dtype)))
    losses = _divergence(student, teacher, divergence).where(valid, 0.0)
    if reduction == "none":
        return losses
    return reduce(losses.sum(), reduction, num_valid.clamp(min=1) if divisor is None else divisor)


def _with_rest(logprobs: Tensor, there: Tensor, *, whole: bool) -> Tensor:
    """Return `logprobs` with that of the rest after them; those of classes that are none are very low."""
    info = torch.finfo(logprobs.dtype)
    known = logprobs.masked_fill(~there, info.min)
    if whole:
        return known
    rest = 1.0 - known.exp().sum(-1, keepdim=True)
    return torch.cat([known, rest.clamp(min=info.eps).log()], -1)


def _divergence(student: Tensor, teacher: Tensor, kind: Divergence) -> Tensor:
    """Return the divergence of two distributions over the last dimension."""
    if kind == "jensen-shannon":
        mixture = torch.logaddexp(student, teacher) - torch.log(student.new_tensor(2.0))
        return 0.5 * (_kl(teacher, mixture) + _kl(student, mixture))
    return _kl(teacher, student) if kind == "forward" else _kl(student, teacher)


def _kl(first: Tensor, second: Tensor) -> Tensor:
    return (first.exp() * (first - second)).sum(-1)
