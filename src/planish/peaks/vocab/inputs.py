"""What a caller hands to the head, checked and laid out: one clear sentence for each mistake, then a `Task`."""

import math
import warnings
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from planish.peaks.vocab.filter import GradientFilter
from planish.peaks.vocab.task import Task
from planish.price.processor import product_dtype
from planish.price.vocab import Head, choose_tiling
from planish.units import format_bytes

DEFAULT_TILE_BYTES = 60 * 2**20


LogitsDtype = Literal["auto", "float32"]
Strategy = Literal["auto", "gradients-in-forward", "recompute"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How logits are made and in how many bytes; `tile_bytes` None is the default."""

    ignore_index: int
    logit_scale: float = 1.0
    softcap: float | None = None
    logits_dtype: LogitsDtype = "auto"
    tile_bytes: int | None = None
    strategy: Strategy = "auto"
    num_valid: int | None = None
    gradient_filter: GradientFilter | None = None

    def __post_init__(self) -> None:
        if not 0 < abs(self.logit_scale) < math.inf:
            raise ValueError(f"`logit_scale` must be finite and not 0, got {self.logit_scale}.")
        if self.softcap is not None and not 0 < self.softcap < math.inf:
            raise ValueError(f"`softcap` must be above 0, got {self.softcap}; leave it out for no cap.")
        if self.tile_bytes is not None and self.tile_bytes < 1:
            raise ValueError(f"`tile_bytes` must be above 0, got {self.tile_bytes}; leave it out for 60 MiB.")
        if self.logits_dtype not in get_args(LogitsDtype):
            raise ValueError(f'`logits_dtype` must be "auto" or "float32", got {self.logits_dtype!r}.')
        if self.strategy not in get_args(Strategy):
            raise ValueError(f"`strategy` must be one of {', '.join(get_args(Strategy))}, got {self.strategy!r}.")


class Prepared(NamedTuple):
    """The checked arguments of both autograd functions: hidden [T, D], target [T] or [T, K] of int64.

    With an adapter [V, R] hidden is [T, D + R].
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    task: Task
    adapter: Tensor | None = None


Adapter = tuple[Tensor, Tensor]
"""What is added to logits: hidden states behind the first thin matrix, times its scale, [..., R], and the second."""


def check(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    *,
    name: str = "weight",
    prefix: str = "",
    shard: bool = False,
    several: bool = False,
) -> None:
    """Refuse tensors that do not fit together.

    `name` is the weight's argument, `prefix` begins those of hidden states and bias, a `shard` may have no rows, and
    with `several` a token may have more than one target, [..., K].

    Raises:
        TypeError: Hidden states, weight or bias that are not floating point; a target that is not whole numbers; a
            sharded or quantised weight.
        ValueError: Shapes or devices that do not fit together.
    """
    tensors = {f"{prefix}hidden": hidden, name: weight} | ({} if bias is None else {f"{prefix}bias": bias})
    for each, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise TypeError(f"`{each}` must be floating point, got {tensor.dtype}.")
        if is_traceable_wrapper_subclass(tensor):
            raise TypeError(
                f"`{each}` must be a plain tensor, got {type(tensor).__name__}; gather it first (DTensor: "
                "`full_tensor()`), or call this inside the module that FSDP has gathered."
            )
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        raise TypeError(f"`target` must be whole numbers, one class a token, got {target.dtype}.")
    one = target[..., 0] if several and target.dim() == hidden.dim() and target.shape[-1] else target
    _check_shapes(hidden, weight, one, bias, name=name, prefix=prefix, shard=shard)
    for each, tensor in {**tensors, "target": target}.items():
        if tensor.device != weight.device:
            raise ValueError(
                f"`{each}` is on {tensor.device} and `{name}` on {weight.device}; move them to one device."
            )


def _check_shapes(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, *, name: str, prefix: str, shard: bool
) -> None:
    if weight.dim() != 2 or (weight.shape[1] if shard else weight.numel()) == 0:
        raise ValueError(
            f"`{name}` must be [V, D] with V and D above 0, got {list(weight.shape)}; a weight that is sharded away "
            "outside its module's forward must be gathered first."
        )
    vocab_size, hidden_size = weight.shape
    if hidden.dim() == 0 or hidden.shape[-1] != hidden_size:
        hint = (
            "these look like logits; pass the hidden states before the head."
            if hidden.shape[-1:] == (vocab_size,)
            else ("pass hidden states of the head's width.")
        )
        raise ValueError(
            f"`{prefix}hidden` must end in the weight's {hidden_size} columns, got shape {list(hidden.shape)}; {hint}"
        )
    if target.shape != hidden.shape[:-1]:
        raise ValueError(
            f"`target` must have the shape of `{prefix}hidden` without its last dimension, {list(hidden.shape[:-1])}, "
            f"got {list(target.shape)}."
        )
    if bias is not None and bias.shape != (vocab_size,):
        raise ValueError(f"`{prefix}bias` must have the weight's {vocab_size} rows, got shape {list(bias.shape)}.")


def count_valid(target: Tensor, *, ignore_index: int, vocab_size: int, num_valid: int | None) -> int:
    """Return how many tokens of `target`, [T] or [T, K], are not ignored.

    It is read from the data once, and every class is checked. Fake tensors have no data: all are valid unless
    `num_valid` says otherwise; neither is it read from a device other than the CPU where `num_valid` is given.

    Raises:
        ValueError: A class outside [0, vocab_size), or a `num_valid` that is wrong.
    """
    if isinstance(target, FakeTensor):
        return len(target) if num_valid is None else num_valid
    if num_valid is not None and target.device.type != "cpu":
        return num_valid
    found = _read_valid(target, ignore_index=ignore_index, vocab_size=vocab_size)
    if num_valid not in (None, found):
        raise ValueError(f"`num_valid` must be the number of targets that are not ignored, {found}, got {num_valid}.")
    return found


def any_of(valid: Tensor) -> Tensor:
    """Return which tokens have a valid target, [T], from that of each of their targets, [T] or [T, K]."""
    return valid if valid.dim() == 1 else valid.any(1)


def _read_valid(target: Tensor, *, ignore_index: int, vocab_size: int) -> int:
    valid = target != ignore_index
    outside = valid & ((target < 0) | (target >= vocab_size))
    num_valid, num_outside = torch.stack([any_of(valid).sum(), outside.sum()]).tolist()
    if num_outside:
        token, *_ = place = outside.nonzero()[0].tolist()
        raise ValueError(
            f"`target` must be in [0, {vocab_size}) or `ignore_index` ({ignore_index}), got {int(target[*place])} at "
            f"token {token} ({num_outside} such tokens)."
        )
    return num_valid


def compute_dtype(hidden: Tensor, weight: Tensor, *, logits_dtype: str) -> torch.dtype:
    """Return the dtype of the matrix products: autocast's where it is on, else the wider of both tensors'.

    On a CPU without instructions for it that is float32.
    """
    promoted, device = torch.promote_types(hidden.dtype, weight.dtype), hidden.device.type
    if promoted == torch.float64:
        return promoted
    if logits_dtype == "float32":
        return torch.float32
    if torch.is_autocast_enabled(device):
        promoted = torch.get_autocast_dtype(device)
    return promoted if device == "cuda" else getattr(torch, product_dtype(_name(promoted)))


def prepare(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    options: Options,
    *,
    wanted: frozenset[str],
    several: bool = False,
    adapter: Adapter | None = None,
) -> Prepared:
    """Return the arguments of one call, checked and planned; warn where `tile_bytes` is below the smallest tile.

    Raises:
        TypeError: See `check`.
        ValueError: See `check` and `count_valid`.
    """
    check(hidden, weight, target, bias, several=several)
    hidden, second = (hidden, None) if adapter is None else join(hidden, weight, adapter)
    grads = needing(hidden=hidden, weight=weight if second is None else second, bias=bias)
    return lay_out(
        hidden,
        weight,
        target,
        bias,
        options,
        compute=compute_dtype(hidden, weight, logits_dtype=options.logits_dtype),
        wanted=wanted | ({"lse"} if grads else set()),
        grads=grads,
        adapter=second,
    )


def join(hidden: Tensor, weight: Tensor, adapter: Adapter) -> Adapter:
    """Return hidden states beside the adapter's, [..., D + R], and its second matrix.

    Raises:
        ValueError: An adapter that does not fit, or a weight that is trained beside it.
    """
    low, second = adapter
    if low.shape[:-1] != hidden.shape[:-1] or second.shape != (len(weight), *low.shape[-1:]) or not low.shape[-1]:
        raise ValueError(
            f"`adapter` must be ([..., R], [V, R]) beside `hidden` {list(hidden.shape)} and `weight` "
            f"{list(weight.shape)}, got {list(low.shape)} and {list(second.shape)}."
        )
    if weight.requires_grad:
        raise ValueError("`weight` must be frozen beside an `adapter`; train one of them, or `weight` + their product.")
    return torch.cat([hidden, low.to(hidden.dtype)], -1), second


def lay_out(  # noqa: PLR0913
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    options: Options,
    *,
    compute: torch.dtype,
    wanted: frozenset[str],
    grads: frozenset[str],
    adapter: Tensor | None = None,
) -> Prepared:
    """Return the arguments of one call, flat, with a tiling for these statistics and gradients."""
    flat, ignore_index = hidden.reshape(-1, hidden.shape[-1]), options.ignore_index
    several = target.dim() == hidden.dim()
    classes = target.reshape((len(flat), target.shape[-1]) if several else (-1,)).long()
    head = describe(flat, weight, bias, options, compute=compute, wanted=wanted, grads=grads, adapter=adapter)
    tile_bytes = DEFAULT_TILE_BYTES if options.tile_bytes is None else options.tile_bytes
    tiling = choose_tiling(head, tile_bytes=tile_bytes, strategy=options.strategy)
    warn_if_above(tiling.workspace_bytes(head), tile_bytes, stacklevel=5)
    num_valid = count_valid(classes, ignore_index=ignore_index, vocab_size=len(weight), num_valid=options.num_valid)
    if several:
        classes, ignore_index = classes.masked_fill(classes == ignore_index, -1), -1
    task = Task(
        head=head,
        tiling=tiling,
        ignore_index=ignore_index,
        num_valid=num_valid,
        logit_scale=options.logit_scale,
        softcap=options.softcap,
        gradient_filter=options.gradient_filter,
    )
    return Prepared(flat, weight, bias, classes, task, adapter)


def describe(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    options: Options,
    *,
    compute: torch.dtype,
    wanted: frozenset[str],
    grads: frozenset[str],
    adapter: Tensor | None = None,
) -> Head:
    """Return sizes and dtypes of a head over flat `hidden`."""
    return Head(
        tokens=len(hidden),
        hidden_size=hidden.shape[1],
        vocab_size=len(weight),
        hidden_dtype=_name(hidden.dtype),
        weight_dtype=_name(weight.dtype),
        compute_dtype=_name(compute),
        bias_dtype=None if bias is None else _name(bias.dtype),
        capped=options.softcap is not None,
        wanted=wanted,
        grads=grads,
        adapter=0 if adapter is None else adapter.shape[1],
        adapter_dtype=None if adapter is None else _name(adapter.dtype),
        filtered=options.gradient_filter is not None,
        ordered=options.gradient_filter is not None and options.gradient_filter.ordered,
        device=weight.device.type,
    )


def needing(**tensors: Tensor | None) -> frozenset[str]:
    """Return which of `tensors` need a gradient now."""
    tracked = torch.is_grad_enabled()
    return frozenset(name for name, each in tensors.items() if tracked and each is not None and each.requires_grad)


def warn_if_above(found: int, tile_bytes: int, *, stacklevel: int) -> None:
    """Say that the smallest tile is larger than was allowed."""
    if found > tile_bytes:
        warnings.warn(
            f"`tile_bytes` ({format_bytes(tile_bytes)}) is below the smallest tile for this head; "
            f"it takes {format_bytes(found)}.",
            stacklevel=stacklevel,
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
