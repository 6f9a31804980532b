"""The head as operators that `torch.compile` takes whole; always by recomputation, which keeps nothing but the lse."""

from typing import Any

import torch
from torch import Tensor

from planish.peaks.vocab.blocked import STATISTICS, Sweep, Upstream, statistics, upstream_of
from planish.peaks.vocab.inputs import Adapter, Options, Prepared, check, compute_dtype, join, lay_out
from planish.peaks.vocab.tiles import Tiles


def each_token(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    options: Options,
    *,
    wanted: frozenset[str],
    several: bool = False,
    adapter: Adapter | None = None,
) -> dict[str, Tensor | None]:
    """Return the statistics of each token by name, [T], None where not wanted, from one operator of the graph."""
    if options.strategy == "gradients-in-forward":
        raise ValueError(
            '`strategy` "gradients-in-forward" cannot be traced by `torch.compile`; use "recompute" or "auto".'
        )
    if options.gradient_filter is not None:
        raise ValueError("`gradient_filter` decides by data, which `torch.compile` cannot trace; leave it out.")
    check(hidden, weight, target, bias, several=several)
    hidden, second = (hidden, None) if adapter is None else join(hidden, weight, adapter)
    compute = compute_dtype(hidden, weight, logits_dtype=options.logits_dtype)
    names = " ".join(sorted(wanted | {"lse"}))
    how = (compute, options.ignore_index, options.logit_scale, options.softcap, options.tile_bytes, names)
    found = head_statistics(hidden, weight, bias, target, second, *how)
    return {name: each if name in {"nll", *wanted} else None for name, each in zip(STATISTICS, found, strict=True)}


@torch.library.custom_op("planish::head_statistics", mutates_args=())
def head_statistics(  # noqa: PLR0913
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    adapter: Tensor | None,
    compute: torch.dtype,
    ignore_index: int,
    logit_scale: float,
    softcap: float | None,
    tile_bytes: int | None,
    names: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return nll, lse, entropy, mean logit and argmax, [T] each (nll [T, K]); empty where not among `names`."""
    how = (compute, ignore_index, logit_scale, softcap, tile_bytes, names)
    found = statistics(*_prepared(hidden, weight, bias, target, adapter, how, grads=frozenset()))
    return tuple(found[name] if name in found else _empty(hidden, compute, name, 0) for name in STATISTICS)


@head_statistics.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *how: Any) -> tuple[Tensor, ...]:  # noqa: ARG001
    names, tokens = set(how[-1].split()), hidden.numel() // hidden.shape[-1]
    nll = _empty(hidden, how[0], "nll", tokens)
    if target.dim() == hidden.dim():
        nll = nll.new_empty(tokens, target.shape[-1])
    return nll, *(_empty(hidden, how[0], name, tokens if name in names else 0) for name in STATISTICS[1:])


def _empty(hidden: Tensor, compute: torch.dtype, name: str, count: int) -> Tensor:
    """Return room for a statistic of `count` tokens."""
    wide = torch.float64 if compute == torch.float64 else torch.float32
    return hidden.new_empty(count, dtype=torch.int64 if name == "argmax" else wide)


@torch.library.custom_op("planish::head_gradients", mutates_args=())
def head_gradients(  # noqa: PLR0913
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    adapter: Tensor | None,
    lse: Tensor,
    entropy: Tensor | None,
    upstream: list[Tensor | None],
    compute: torch.dtype,
    ignore_index: int,
    logit_scale: float,
    softcap: float | None,
    tile_bytes: int | None,
    names: str,
    wanted: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of hidden, weight and bias under per-token upstreams; empty where not `wanted`.

    Beside an adapter, that of the weight is the adapter's.
    """
    how = (compute, ignore_index, logit_scale, softcap, tile_bytes, names)
    prepared = _prepared(hidden, weight, bias, target, adapter, how, grads=frozenset(wanted.split()))
    tiles = Tiles.prepare("gradients", *prepared)
    given = Upstream(upstream_of(upstream[0], prepared.target), *upstream[1:])
    grads = Sweep(tiles=tiles, lse=lse, entropy=entropy, upstream=given).run()
    d_hidden = None if grads.hidden is None else grads.hidden.reshape(hidden.shape)
    d_bias = None if grads.bias is None else grads.bias.to(bias.dtype)
    return tuple(hidden.new_empty(0) if each is None else each for each in (d_hidden, grads.weight, d_bias))


@head_gradients.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    wanted, adapter = rest[-1].split(), rest[1]
    given = {"hidden": hidden, "weight": weight if adapter is None else adapter, "bias": bias}
    return tuple(torch.empty_like(each) if name in wanted else hidden.new_empty(0) for name, each in given.items())


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Keep what the gradients are made of."""
    hidden, weight, bias, target, adapter, *ctx.how = inputs
    _, lse, entropy, _, argmax = output
    ctx.has_entropy = "entropy" in ctx.how[-1].split()
    ctx.mark_non_differentiable(argmax)
    ctx.save_for_backward(hidden, weight, bias, target, adapter, lse, entropy)


def _derive(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients of the operands of `head_statistics`."""
    hidden, weight, bias, target, adapter, lse, entropy = ctx.saved_tensors
    names = {"nll", *ctx.how[-1].split()}
    given = [each if name in names else None for name, each in zip(STATISTICS[:4], upstream, strict=False)]
    at = {"hidden": 0, "weight": 1 if adapter is None else 4, "bias": 2}
    wanted = [name for name, place in at.items() if ctx.needs_input_grad[place]]
    kept = (lse, entropy if ctx.has_entropy else None)
    grads = head_gradients(hidden, weight, bias, target, adapter, *kept, given, *ctx.how, " ".join(wanted))
    ready: list[Tensor | None] = [None] * (5 + len(ctx.how))
    for (name, place), grad in zip(at.items(), grads, strict=True):
        ready[place] = grad if name in wanted else None
    return tuple(ready)


head_statistics.register_autograd(_derive, setup_context=_keep)


def _prepared(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    adapter: Tensor | None,
    how: tuple[Any, ...],
    *,
    grads: frozenset[str],
) -> Prepared:
    compute, ignore_index, logit_scale, softcap, tile_bytes, names = how
    options = Options(
        ignore_index=ignore_index,
        logit_scale=logit_scale,
        softcap=softcap,
        tile_bytes=tile_bytes,
        strategy="recompute",
    )
    wanted = frozenset(names.split())
    return lay_out(hidden, weight, target, bias, options, compute=compute, wanted=wanted, grads=grads, adapter=adapter)
