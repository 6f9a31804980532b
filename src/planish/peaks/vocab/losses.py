"""Losses of a linear head that never form its logits: log-probabilities, cross-entropy, token accuracy."""

import functools
import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from planish.comm.ring import Circle
from planish.peaks.vocab import compiled
from planish.peaks.vocab.blocked import (
    STATISTICS,
    GradientsInForward,
    Objective,
    Recompute,
    statistics,
    weights_of,
)
from planish.peaks.vocab.filter import GradientFilter
from planish.peaks.vocab.inputs import Adapter, LogitsDtype, Options, Prepared, Strategy, prepare
from planish.peaks.vocab.reduction import (
    Reduction,
    check_reduction,
    check_weights,
    divisor_of,
    num_tokens,
    reduce,
)
from planish.peaks.vocab.ring_call import circle_of, local_rows
from planish.peaks.vocab.ring_logprob import OwnTokens, ring_logprobs

Statistic = Literal["nll", "lse", "entropy", "argmax"]


class LogProb(NamedTuple):
    """What a head says of each token, in the shape of the target: 0 (argmax: -1) where ignored, None if not wanted.

    Attributes:
        nll: Minus the log-probability of the target, or of each of several.
        lse: Logarithm of the sum of exponentials of the logits.
        entropy: Of the distribution over the vocabulary.
        argmax: The most likely class, the first of equals.
    """

    nll: Tensor | None
    lse: Tensor | None
    entropy: Tensor | None
    argmax: Tensor | None


def linear_logprob(  # noqa: PLR0913
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    adapter: Adapter | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    temperature: float = 1.0,
    want: tuple[Statistic, ...] = ("nll",),
    logits_dtype: LogitsDtype = "auto",
    tile_bytes: int | None = None,
    num_valid: int | None = None,
    group: dist.ProcessGroup | Circle | None = None,
) -> LogProb:
    """Return log-probability, lse, entropy and argmax of each token, differentiable under any upstream.

    y = softcap(logit_scale * (hidden @ weight^T + bias)) / temperature,  lse = log(sum(exp(y))),
    nll = lse - y[target],  entropy = lse - sum(exp(y - lse) * y).

    Memory: strategy "recompute" of `linear_cross_entropy`. Without gradients: one tile, 4 bytes a token for each
        statistic (argmax: 8), and 8 a valid token where some are ignored.
    Exactness: the lse does not depend on `tile_bytes`, bit for bit, on a CPU; otherwise equal to full logits up to
        the order of summation. nll is never below 0.

    Args:
        hidden: Hidden states, [..., D].
        weight: The head's weight, [V, D].
        target: Class of each token, [...], or several classes a token, [..., K], whose nll is then [..., K].
        bias: The head's bias, [V].
        adapter: See `linear_cross_entropy`.
        logit_scale: Multiplies the logits (Granite, Cohere).
        softcap: Bounds the scaled logits to softcap * tanh(y / softcap) (Gemma).
        ignore_index: Target of tokens that are left out; of several classes, one that is none.
        temperature: Divides the logits last, as sampling does; it scales every statistic but argmax.
        want: Which statistics to return.
        logits_dtype: See `linear_cross_entropy`.
        tile_bytes: Bytes of all working buffers together; None is 60 MiB.
        num_valid: Number of targets that are not ignored, where it is known; it is then not read from a GPU.
        group: Ranks that share the vocabulary, as in `linear_kl`: each has tokens of its own and its rows of weight and
            bias. There are nll and lse then, and no adapter.

    Returns:
        The statistics in float32 (float64 for float64).

    Raises:
        TypeError: Tensors of a wrong kind.
        ValueError: Tensors that do not fit together, a class out of range, an unknown statistic.

    Example:
        >>> import torch
        >>> hidden, weight = torch.randn(2, 5, 16), torch.randn(100, 16, requires_grad=True)
        >>> linear_logprob(hidden, weight, torch.zeros(2, 5, dtype=torch.long), want=("nll", "argmax")).argmax.shape
        torch.Size([2, 5])

        A policy's gradient, with an advantage and an entropy bonus for each token:

        >>> actions, advantage = torch.randint(100, (2, 5)), torch.randn(2, 5)
        >>> found = linear_logprob(hidden, weight, actions, temperature=0.7, want=("nll", "entropy"))
        >>> (advantage * found.nll - 0.01 * found.entropy).mean().backward()
        >>> weight.grad.shape
        torch.Size([100, 16])
    """
    unknown = sorted(set(want) - set(LogProb._fields))
    if unknown:
        raise ValueError(f"`want` must name any of {', '.join(LogProb._fields)}, got {', '.join(unknown)}.")
    if not 0 < temperature < math.inf:
        raise ValueError(f"`temperature` must be above 0, got {temperature}.")
    settings = {
        "ignore_index": ignore_index,
        "logit_scale": logit_scale / temperature,
        "softcap": None if softcap is None else softcap / temperature,
        "logits_dtype": logits_dtype,
        "tile_bytes": tile_bytes,
        "strategy": "recompute",
        "num_valid": num_valid,
    }
    circle = circle_of(group, hidden)
    if circle is not None and circle.size > 1:
        if set(want) - {"nll", "lse"} or adapter is not None:
            raise ValueError("with `group` there are nll and lse alone, and no `adapter`; leave the others out.")
        given = functools.partial(OwnTokens.read, hidden, weight, bias, target, settings, circle)
        found = ring_logprobs(circle, given, ignore_index=ignore_index)._asdict()
        return _shaped(found, want, hidden, target)
    if circle is not None:
        weight, bias = local_rows(weight, circle), None if bias is None else local_rows(bias, circle)
    options = Options(**settings)
    wanted, how = frozenset(want) - {"nll"}, {"several": True, "adapter": adapter}
    if torch.compiler.is_compiling():
        found = compiled.each_token(hidden, weight, target, bias, options, wanted=wanted, **how)
    else:
        found = _each_token(prepare(hidden, weight, target, bias, options, wanted=wanted, **how))
    return _shaped(found, want, hidden, target)


def _shaped(found: Mapping[str, Tensor], want: tuple[Statistic, ...], hidden: Tensor, target: Tensor) -> LogProb:
    """Return the statistics that are wanted in the shapes of what was given."""
    shapes = {"nll": target.shape}
    return LogProb(
        *(
            found[name].reshape(shapes.get(name, hidden.shape[:-1])) if name in want else None
            for name in LogProb._fields
        )
    )


def linear_cross_entropy(  # noqa: PLR0913
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    adapter: Adapter | None = None,
    target_probs: Tensor | None = None,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    divisor: float | Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    logits_dtype: LogitsDtype = "auto",
    tile_bytes: int | None = None,
    strategy: Strategy = "auto",
    num_valid: int | None = None,
    gradient_filter: GradientFilter | None = None,
) -> Tensor:
    """Return the cross-entropy of a linear head without its logits.

    y = softcap(logit_scale * (hidden @ weight^T + bias)),  lse = log(sum(exp(y))); the loss of one token is
    (1 - label_smoothing) (lse - y[target]) + label_smoothing (lse - mean(y)) + z_loss lse^2, times
    class_weight[target]; of several targets with probabilities q, sum(q (lse - y[target])) stands for lse - y[target].

    Memory: `planish.price.vocab.phases` gives it to the byte. "gradients-in-forward" holds the gradients from forward
        to backward, the weight's in float32 (V x D x 4 bytes besides a narrower gradient); "recompute" holds 4 bytes
        a token, and sums a narrower hidden's gradient in float32 (tokens x D x 4 bytes, or nothing at a fifth
        product where that is above `tile_bytes`). Besides these, the working buffers stay within `tile_bytes`.
        `class_weight` adds a few numbers a token, `target_probs` a few for each of its targets.
    Exactness: equal to full logits up to the order of summation; the same bits from run to run. A `gradient_filter`
        leaves the loss exact and approximates its gradients.

    Args:
        hidden: Hidden states, [..., D].
        weight: The head's weight, [V, D].
        target: Class of each token, [...], or [..., K] with `target_probs`.
        bias: The head's bias, [V].
        adapter: (low, second), [..., R] and [V, R]: adds low @ second^T to hidden @ weight^T before the bias, block by
            block, so that no matrix of the weight's size is formed; the weight must be frozen then. LoRA's low is
            hidden @ A^T times its scale, its second is B; either gets its gradient, and is multiplied as the rest is.
        target_probs: Probability of each of a token's targets, [..., K]; they need not sum to 1.
        class_weight: Multiplies the loss of tokens by their class, [V]; "mean" then divides by the sum of the weights,
            as torch does. It gets no gradient.
        ignore_index: Target of tokens that are left out; no row of theirs is multiplied.
        reduction: "mean" over the valid tokens (0 where there are none), "sum", or "none": [...], 0 where ignored.
        divisor: Divides the sum instead of the number of valid tokens, for "mean": tokens of all microbatches or ranks.
        label_smoothing: Share of the loss that is spread over the vocabulary.
        z_loss: Weight of lse^2.
        softcap: Bounds the scaled logits to softcap * tanh(y / softcap) (Gemma).
        logit_scale: Multiplies the logits (Granite, Cohere).
        logits_dtype: "auto" multiplies in the tensors' common dtype (autocast's where it is on), or in float32 on a CPU
            without instructions for it; a CPU with them rounds bf16 logits to bf16. "float32" multiplies in float32
            everywhere, which then takes about twice the time.
        tile_bytes: Bytes of all working buffers together; None is 60 MiB.
        strategy: "gradients-in-forward" multiplies three times and can go backward once, "recompute" four or five
            times; "auto" takes the first where its tile has enough rows and its float32 buffer is within `tile_bytes`.
        num_valid: Number of targets that are not ignored, where it is known; it is then not read from a GPU.
        gradient_filter: Skips products that add next to nothing to the gradients, and counts them: an approximation.

    Returns:
        The loss in float32 (float64 for float64).

    Raises:
        TypeError: Tensors of a wrong kind.
        ValueError: Tensors that do not fit together, a class or a setting out of range, a setting without effect.

    Example:
        >>> import torch
        >>> hidden, weight = torch.randn(2, 5, 16), torch.randn(100, 16, requires_grad=True)
        >>> linear_cross_entropy(hidden, weight, torch.zeros(2, 5, dtype=torch.long)).backward()
        >>> likely = torch.randint(100, (2, 5, 8))  # a teacher's eight best classes and what it gives them
        >>> linear_cross_entropy(hidden, weight, likely, target_probs=torch.rand(2, 5, 8)).backward()

    References:
        Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models, arXiv 2411.09009, section 4.
    """
    objective = objective_of(reduction, divisor, strategy, label_smoothing, z_loss)
    soft = target_probs is not None
    check_weights(weight, target, target_probs, class_weight, strategy)
    options = Options(
        ignore_index=ignore_index,
        logit_scale=logit_scale,
        softcap=softcap,
        logits_dtype=logits_dtype,
        tile_bytes=tile_bytes,
        strategy="recompute" if reduction == "none" or soft else strategy,
        num_valid=num_valid,
        gradient_filter=gradient_filter,
    )
    how = {"several": soft, "adapter": adapter}
    if torch.compiler.is_compiling():
        found = compiled.each_token(hidden, weight, target, bias, options, wanted=objective.needs, **how)
        num_valid = num_tokens(target != ignore_index, several=soft).clamp(min=1)
    else:
        prepared = prepare(hidden, weight, target, bias, options, wanted=objective.needs, **how)
        num_valid = max(1, prepared.task.num_valid)
        if prepared.task.tiling.keeps_tiles:
            with torch.autocast(hidden.device.type, enabled=False):
                total = GradientsInForward.apply(*prepared, objective, class_weight)
            return reduce(total, reduction, divisor_of(divisor, num_valid, target, ignore_index, class_weight))
        found = _each_token(prepared)
    nll = found["nll"] if target_probs is None else (found["nll"] * target_probs.view_as(found["nll"])).sum(1)
    losses = objective.loss(nll, found["lse"], found["mean"])
    if class_weight is not None:
        losses = losses * weights_of(class_weight, target.reshape(-1)).to(losses.dtype)
    if reduction == "none":
        return losses.reshape(hidden.shape[:-1])
    return reduce(losses.sum(), reduction, divisor_of(divisor, num_valid, target, ignore_index, class_weight))


class LinearCrossEntropy(torch.nn.Module):
    """`linear_cross_entropy` with its settings kept, as `torch.nn.CrossEntropyLoss` keeps those of its function.

    Example:
        >>> loss = LinearCrossEntropy(softcap=30.0, reduction="sum")
        >>> loss(torch.randn(4, 16), torch.randn(100, 16), torch.tensor([1, 2, -100, 3])).shape
        torch.Size([])
    """

    def __init__(  # noqa: PLR0913
        self,
        *,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        logits_dtype: LogitsDtype = "auto",
        tile_bytes: int | None = None,
        strategy: Strategy = "auto",
        class_weight: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.register_buffer("class_weight", class_weight)
        self.loss = functools.partial(
            linear_cross_entropy,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            softcap=softcap,
            logit_scale=logit_scale,
            logits_dtype=logits_dtype,
            tile_bytes=tile_bytes,
            strategy=strategy,
        )

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        *,
        bias: Tensor | None = None,
        target_probs: Tensor | None = None,
        divisor: float | Tensor | None = None,
        num_valid: int | None = None,
    ) -> Tensor:
        """Return the loss of `target` under hidden @ weight^T + bias."""
        given = {"bias": bias, "target_probs": target_probs, "class_weight": self.class_weight}
        return self.loss(hidden, weight, target, divisor=divisor, num_valid=num_valid, **given)

    def extra_repr(self) -> str:
        """Return the settings as they were given."""
        return ", ".join(f"{name}={value!r}" for name, value in self.loss.keywords.items())


@torch.no_grad()
def linear_token_accuracy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    tile_bytes: int | None = None,
) -> Tensor:
    """Return the fraction of valid tokens whose most likely class is the target; 0 where there are none.

    A logit scale above 0 and a soft cap do not change which class that is.

    Memory: one tile, 12 bytes a token, and 8 a valid token where some are ignored.
    """
    options = Options(ignore_index=ignore_index, tile_bytes=tile_bytes, strategy="recompute")
    prepared = prepare(hidden, weight, target, bias, options, wanted=frozenset({"argmax"}))
    hits = _each_token(prepared)["argmax"] == prepared.target
    return hits.sum() / max(1, prepared.task.num_valid)


def objective_of(
    reduction: str, divisor: float | Tensor | None, strategy: str, label_smoothing: float, z_loss: float
) -> Objective:
    """Return the loss of a token, after refusing settings that are out of range or would have no effect."""
    check_reduction(reduction, divisor)
    if reduction == "none" and strategy == "gradients-in-forward":
        raise ValueError(
            '`strategy` "gradients-in-forward" needs one loss for all tokens, and reduction="none" has one for each; '
            'use strategy="recompute".'
        )
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"`label_smoothing` must be in [0, 1], got {label_smoothing}.")
    if not 0 <= z_loss < math.inf:
        raise ValueError(f"`z_loss` must be at least 0, got {z_loss}.")
    return Objective(label_smoothing=label_smoothing, z_loss=z_loss)


def _each_token(prepared: Prepared) -> dict[str, Tensor | None]:
    """Return the statistics of each token by name, None where not wanted; differentiable if a gradient is."""
    with torch.autocast(prepared.hidden.device.type, enabled=False):
        if prepared.task.head.grads:
            return dict(zip(STATISTICS, Recompute.apply(*prepared), strict=True))
        return dict.fromkeys(STATISTICS) | statistics(*prepared)
