"""Distillation over a whole vocabulary: two heads in, how far their distributions lie apart out; no logits."""

import math
from collections.abc import Callable
from typing import get_args

import torch
import torch.distributed as dist
from torch import Tensor

from planish.comm.ring import Circle
from planish.peaks.vocab import compiled_kl
from planish.peaks.vocab.divergence import Comparison, PairDivergence, plan_pair
from planish.peaks.vocab.inputs import LogitsDtype, Options, check, compute_dtype
from planish.peaks.vocab.pair import Operands
from planish.peaks.vocab.reduction import Reduction, check_reduction, reduce
from planish.peaks.vocab.ring_call import circle_of, local_rows
from planish.peaks.vocab.ring_kl import ring_divergences
from planish.price.vocab_pair import Divergence


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
    group: dist.ProcessGroup | Circle | None = None,
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
        With `group` pieces of both weights and tiles stay within `tile_bytes` together, and a narrower hidden state's
        gradient grows in float32.
    Communication: none; with `group` `planish.price.vocab_ring_rows.sent_bytes`: the rows of others forward (twice for
        the mixture), and in backward, for each side that needs gradients, those and the gradients of its rows.
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
        group: Ranks that share the vocabulary as in `ring_linear_cross_entropy`, each with tokens of its own: weights
            and biases are then this rank's rows, cut as `torch.chunk` does, or DTensors that `group` shards so. Every
            rank calls it and goes backward, or none does.

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
    check_reduction(reduction, divisor)
    _check_settings(divergence, beta, temperature, ce_weight, target)
    circle = circle_of(group, hidden)

    def read() -> Comparison:
        rows = [
            each if each is None or circle is None else local_rows(each, circle, name)
            for name, each in (
                ("weight", weight),
                ("bias", bias),
                ("teacher_weight", teacher_weight),
                ("teacher_bias", teacher_bias),
            )
        ]
        options = (
            Options(
                ignore_index=ignore_index, logit_scale=logit_scale, softcap=softcap, logits_dtype=logits_dtype,
                tile_bytes=tile_bytes, strategy="recompute", num_valid=num_valid,
            ),
            Options(
                ignore_index=ignore_index, logit_scale=teacher_logit_scale, softcap=teacher_softcap,
                logits_dtype=logits_dtype,
            ),
        )  # fmt: skip
        classes = hidden.new_zeros(hidden.shape[:-1], dtype=torch.long) if target is None else target
        shard = circle is not None and circle.size > 1
        check(hidden, rows[0], classes, rows[1], shard=shard)
        check(teacher_hidden, rows[2], classes, rows[3], name="teacher_weight", prefix="teacher_", shard=shard)
        sides = (
            Operands(hidden=hidden.reshape(-1, hidden.shape[-1]), weight=rows[0], bias=rows[1]),
            Operands(hidden=teacher_hidden.reshape(-1, teacher_hidden.shape[-1]), weight=rows[2], bias=rows[3]),
        )
        student, teacher = (compute_dtype(each.hidden, each.weight, logits_dtype=logits_dtype) for each in sides)
        return Comparison(
            sides=sides, target=classes.reshape(-1).long(), options=options, compute=(student, teacher),
            divergence=divergence, temperature=temperature, beta=0.5 if beta is None else beta, hard=ce_weight > 0,
        )  # fmt: skip

    kl, nll, valid = _each_token(read, circle, ignore_index=ignore_index)
    losses = kl if nll is None else torch.add(kl, nll, alpha=ce_weight)
    if reduction == "none":
        return losses.reshape(hidden.shape[:-1])
    return reduce(losses.sum(), reduction, valid if divisor is None else divisor)


def _each_token(
    read: Callable[[], Comparison], circle: Circle | None, *, ignore_index: int
) -> tuple[Tensor, Tensor | None, int | Tensor]:
    """Return divergence and, where it is wanted, cross-entropy of each token, [T], and how many are not ignored."""
    if circle is not None and circle.size > 1:
        kl, nll, num_valid = ring_divergences(circle, read, ignore_index=ignore_index)
        return kl, nll, max(1, num_valid)
    given = read()
    if torch.compiler.is_compiling():
        kl, nll = compiled_kl.each_token(given)
        return kl, nll, (given.target != ignore_index).sum().clamp(min=1)
    task = plan_pair(given, given.grads)
    with torch.autocast(given.target.device.type, enabled=False):
        kl, nll = PairDivergence.apply(*given.operands, task)
    return kl, nll, max(1, task.student.num_valid)


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
