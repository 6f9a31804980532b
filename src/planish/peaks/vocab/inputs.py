"""What a caller hands to the head, checked and laid out: one clear sentence for each mistake, then a `Task`."""

import warnings

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from planish.price.vocab import Head, Tiling, choose_tiling
from planish.units import format_bytes

DEFAULT_TILE_BYTES = 64 * 2**20


def check(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> None:
    """Refuse tensors that do not fit together.

    Raises:
        TypeError: Hidden states, weight or bias that are not floating point; a target that is not whole numbers; a
            sharded or quantised weight.
        ValueError: Shapes or devices that do not fit together.
    """
    tensors = {"hidden": hidden, "weight": weight} | ({} if bias is None else {"bias": bias})
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise TypeError(f"`{name}` must be floating point, got {tensor.dtype}.")
        if is_traceable_wrapper_subclass(tensor):
            raise TypeError(
                f"`{name}` must be a plain tensor, got {type(tensor).__name__}; gather it first (DTensor: "
                "`full_tensor()`), or call this inside the module that FSDP has gathered."
            )
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        raise TypeError(f"`target` must be whole numbers, one class a token, got {target.dtype}.")
    _check_shapes(hidden, weight, target, bias)
    for name, tensor in {**tensors, "target": target}.items():
        if tensor.device != weight.device:
            raise ValueError(
                f"`{name}` is on {tensor.device} and `weight` on {weight.device}; move them to one device."
            )


def _check_shapes(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> None:
    if weight.dim() != 2 or weight.numel() == 0:
        raise ValueError(
            f"`weight` must be [V, D] with V and D above 0, got {list(weight.shape)}; a weight that is sharded away "
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
            f"`hidden` must end in the weight's {hidden_size} columns, got shape {list(hidden.shape)}; {hint}"
        )
    if target.shape != hidden.shape[:-1]:
        raise ValueError(
            f"`target` must have the shape of `hidden` without its last dimension, {list(hidden.shape[:-1])}, got "
            f"{list(target.shape)}."
        )
    if bias is not None and bias.shape != (vocab_size,):
        raise ValueError(f"`bias` must have the weight's {vocab_size} rows, got shape {list(bias.shape)}.")


def check_settings(*, logit_scale: float, softcap: float | None, tile_bytes: int) -> None:
    """Refuse settings outside their range."""
    if not 0 < abs(logit_scale) < float("inf"):
        raise ValueError(f"`logit_scale` must be finite and not 0, got {logit_scale}.")
    if softcap is not None and not 0 < softcap < float("inf"):
        raise ValueError(f"`softcap` must be above 0, got {softcap}; leave it out for no cap.")
    if tile_bytes < 1:
        raise ValueError(f"`tile_bytes` must be above 0, got {tile_bytes}; the default is {DEFAULT_TILE_BYTES}.")


def find_valid(
    target: Tensor, *, ignore_index: int, vocab_size: int, num_valid: int | None
) -> tuple[Tensor | None, int]:
    """Return the positions in flat `target` that are not ignored (None: all of them) and their number.

    The number is read from the data once unless it is given. Fake tensors have no data: there, all are valid unless
    `num_valid` says otherwise. Where data is read, every class is checked.

    Raises:
        ValueError: A class outside [0, vocab_size), or a `num_valid` that is wrong.
    """
    fake = isinstance(target, FakeTensor)
    if fake or (num_valid is not None and target.device.type != "cpu"):
        known = len(target) if num_valid is None else num_valid
    else:
        known = _count_valid(target, ignore_index=ignore_index, vocab_size=vocab_size)
        if num_valid not in (None, known):
            raise ValueError(
                f"`num_valid` must be the number of targets that are not ignored, {known}, got {num_valid}."
            )
    if known == len(target):
        return None, known
    return torch.nonzero_static(target != ignore_index, size=known).squeeze(1), known


def _count_valid(target: Tensor, *, ignore_index: int, vocab_size: int) -> int:
    valid = target != ignore_index
    outside = valid & ((target < 0) | (target >= vocab_size))
    num_valid, num_outside = torch.stack([valid.sum(), outside.sum()]).tolist()
    if num_outside:
        token = int(outside.nonzero()[0])
        raise ValueError(
            f"`target` must be in [0, {vocab_size}) or `ignore_index` ({ignore_index}), got {int(target[token])} at "
            f"token {token} ({num_outside} such tokens)."
        )
    return num_valid


def compute_dtype(hidden: Tensor, weight: Tensor, *, logits_dtype: str) -> torch.dtype:
    """Return the dtype of the matrix products: autocast's where it is on, else the wider of both tensors'."""
    if logits_dtype == "float32" and hidden.dtype != torch.float64:
        return torch.float32
    promoted = torch.promote_types(hidden.dtype, weight.dtype)
    if promoted != torch.float64 and torch.is_autocast_enabled(hidden.device.type):
        return torch.get_autocast_dtype(hidden.device.type)
    return promoted


def plan_tiling(head: Head, *, tile_bytes: int, strategy: str) -> Tiling:
    """Return the tiling for `head`; warn where the smallest is larger than `tile_bytes`."""
    tiling = choose_tiling(head, tile_bytes=tile_bytes, strategy=strategy)
    needed = tiling.workspace_bytes(head)
    if needed > tile_bytes:
        warnings.warn(
            f"`tile_bytes` ({format_bytes(tile_bytes)}) is below the smallest tile; using {format_bytes(needed)}.",
            stacklevel=4,
        )
    return tiling
