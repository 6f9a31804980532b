"""The divergence of two heads as operators that `torch.compile` takes whole."""

from typing import Any

import torch
from torch import Tensor

from planish.peaks.vocab.divergence import Comparison, pair_gradients, pair_statistics, plan_pair
from planish.peaks.vocab.inputs import Options
from planish.peaks.vocab.pair import Operands, PairTask

_FOUND = ("kl", "nll", "lse", "teacher_lse", "hard_lse", "own", "teacher_own")
_OPERANDS = ("hidden", "weight", "bias", "teacher_hidden", "teacher_weight", "teacher_bias")


def each_token(given: Comparison) -> tuple[Tensor, Tensor | None]:
    """Return divergence and, where it is wanted, cross-entropy of each token, [T], from one operator of the graph."""
    student, teacher = given.options
    how = (
        *(*given.compute, given.divergence, given.temperature, given.beta, given.hard),
        *(student.ignore_index, student.tile_bytes),
        *(student.logit_scale, student.softcap, teacher.logit_scale, teacher.softcap),
    )
    kl, nll, *_ = divergence_statistics(*given.operands, *how)
    return kl, nll if given.hard else None


@torch.library.custom_op("planish::divergence_statistics", mutates_args=())
def divergence_statistics(  # noqa: PLR0913
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    teacher_bias: Tensor | None,
    target: Tensor,
    compute: torch.dtype,
    teacher_compute: torch.dtype,
    divergence: str,
    temperature: float,
    beta: float,
    hard: bool,
    ignore_index: int,
    tile_bytes: int | None,
    logit_scale: float,
    softcap: float | None,
    teacher_logit_scale: float,
    teacher_softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return divergence, cross-entropy and what gradients are made of, [T] each; empty where there is none."""
    tensors = [hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias]
    how = (
        *(compute, teacher_compute, divergence, temperature, beta, hard, ignore_index, tile_bytes),
        *(logit_scale, softcap, teacher_logit_scale, teacher_softcap),
    )
    found = pair_statistics(tensors, target, _task(tensors, target, how, wanted=""))
    nothing = found["kl"].new_empty(0)
    return tuple(found[name] if name in found else nothing.clone() for name in _FOUND)


@divergence_statistics.register_fake
def _(*inputs: Any) -> tuple[Tensor, ...]:
    hidden, how = inputs[0], inputs[7:]
    wide = torch.float64 if how[0] == torch.float64 else torch.float32
    task_names = _names(how)
    return tuple(hidden.new_empty(len(hidden) if name in task_names else 0, dtype=wide) for name in _FOUND)


@torch.library.custom_op("planish::divergence_gradients", mutates_args=())
def divergence_gradients(  # noqa: PLR0913
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    teacher_bias: Tensor | None,
    target: Tensor,
    found: list[Tensor],
    by_kl: Tensor,
    by_nll: Tensor | None,
    wanted: str,
    compute: torch.dtype,
    teacher_compute: torch.dtype,
    divergence: str,
    temperature: float,
    beta: float,
    hard: bool,
    ignore_index: int,
    tile_bytes: int | None,
    logit_scale: float,
    softcap: float | None,
    teacher_logit_scale: float,
    teacher_softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of both sides' tensors under per-token upstreams; empty where not `wanted`."""
    tensors = [hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias]
    how = (
        *(compute, teacher_compute, divergence, temperature, beta, hard, ignore_index, tile_bytes),
        *(logit_scale, softcap, teacher_logit_scale, teacher_softcap),
    )
    task = _task(tensors, target, how, wanted=wanted)
    rows = {name: each for name, each in zip(_FOUND, found, strict=True) if name in task.pair.kept}
    upstream = {"student": by_nll if hard else None, "teacher": None}
    grads = [
        each for side, nll in upstream.items() for each in pair_gradients(side, tensors, target, task, rows, by_kl, nll)
    ]
    return tuple(hidden.new_empty(0) if each is None else each for each in grads)


@divergence_gradients.register_fake
def _(*inputs: Any) -> tuple[Tensor, ...]:
    wanted = inputs[10].split()
    return tuple(
        torch.empty_like(each) if name in wanted else inputs[0].new_empty(0)
        for name, each in zip(_OPERANDS, inputs, strict=False)
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Keep what the gradients are made of."""
    ctx.how = inputs[7:]
    ctx.mark_non_differentiable(*output[2:])
    ctx.save_for_backward(*inputs[:7], *output)


def _derive(ctx: Any, by_kl: Tensor | None, by_nll: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients of the operands of `divergence_statistics`."""
    inputs, found = ctx.saved_tensors[:7], list(ctx.saved_tensors[7:])
    wanted = [name for name, needs in zip(_OPERANDS, ctx.needs_input_grad, strict=False) if needs]
    by_kl = torch.zeros_like(found[0]) if by_kl is None else by_kl
    hard = "nll" in _names(ctx.how)
    by_nll = torch.zeros_like(found[0]) if hard and by_nll is None else by_nll if hard else None
    grads = divergence_gradients(*inputs, found, by_kl, by_nll, " ".join(wanted), *ctx.how)
    ready = [grad if name in wanted else None for name, grad in zip(_OPERANDS, grads, strict=True)]
    return *ready, None, *[None] * len(ctx.how)


divergence_statistics.register_autograd(_derive, setup_context=_keep)


def _names(how: tuple[Any, ...]) -> set[str]:
    """Return what statistics there are of settings as the operators take them."""
    _, _, divergence, temperature, _, hard, *_ = how
    names = {"nll": hard, "hard_lse": hard and temperature != 1.0}
    names |= dict.fromkeys(("own", "teacher_own"), divergence == "jensen-shannon")
    return {"kl", "lse", "teacher_lse", *(name for name, there in names.items() if there)}


def _task(tensors: list[Tensor | None], target: Tensor, how: tuple[Any, ...], *, wanted: str) -> PairTask:
    compute, teacher_compute, divergence, temperature, beta, hard, ignore_index, tile_bytes, *logits = how
    logit_scale, softcap, teacher_logit_scale, teacher_softcap = logits
    options = Options(ignore_index=ignore_index, logit_scale=logit_scale, softcap=softcap, tile_bytes=tile_bytes)
    his = Options(ignore_index=ignore_index, logit_scale=teacher_logit_scale, softcap=teacher_softcap)
    names = wanted.split()
    own = frozenset(name for name in names if not name.startswith("teacher_"))
    given = Comparison(
        sides=(Operands.of(tensors[:3]), Operands.of(tensors[3:])),
        target=target,
        options=(options, his),
        compute=(compute, teacher_compute),
        divergence=divergence,
        temperature=temperature,
        beta=beta,
        hard=hard,
    )
    return plan_pair(
        given, (own, frozenset(name.removeprefix("teacher_") for name in names if name.startswith("teacher_")))
    )
