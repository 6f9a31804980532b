"""Where a transformers model turns queries and keys by their positions, and how that runs in tiles.

[Note: the name] An attention calls `apply_rotary_pos_emb` of its own file, for which there is no seam. Its forward is
copied for the module as a Python object in which that one name means ours; the file and all other models stay as they
are.
"""

import inspect
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import PreTrainedModel

from planish.models.norms import MOST_TILE_BYTES
from planish.models.part import Part, of_forwards
from planish.peaks.activation.rotary import rotated

_NAME = "apply_rotary_pos_emb"

Rotate = Callable[..., tuple[Tensor, Tensor]]


def tile_rotations(model: PreTrainedModel, tile_bytes: int) -> Part | None:
    """Turn queries and keys in tiles wherever the formula is known; None where it is nowhere.

    It is known by what it computes, gradients included, bit for bit, in float32 and in bfloat16.
    """
    known: dict[Rotate, bool] = {}
    done: list[nn.Module] = []
    for module in model.modules():
        forward = inspect.unwrap(type(module).forward)
        if "forward" in vars(module) or _NAME not in getattr(getattr(forward, "__code__", None), "co_names", ()):
            continue
        theirs = forward.__globals__[_NAME]
        if theirs not in known:
            known[theirs] = _is_ours(theirs)
        if known[theirs]:
            ours = partial(_rotate, theirs, min(tile_bytes, MOST_TILE_BYTES))
            module.forward = types.MethodType(_with(forward, ours), module)
            done.append(module)
    return of_forwards(done, f"{len(done)} rotations of queries and keys: in tiles")


def _with(forward: Any, rotate: Rotate) -> Any:
    """Return a copy of `forward` that calls `rotate`. See [Note: the name]."""
    names = {**forward.__globals__, _NAME: rotate}
    copied = types.FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    copied.__kwdefaults__ = forward.__kwdefaults__
    return copied


def _rotate(
    theirs: Rotate, tile_bytes: int, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    if rest or options or cos.dtype != query.dtype or cos.shape[-1] != query.shape[-1] or cos.dim() != 3:
        return theirs(query, key, cos, sin, *rest, **options)
    return tuple(rotated(each, cos, sin, tile_bytes=tile_bytes) for each in (query, key))


def _is_ours(theirs: Rotate) -> bool:
    """Return whether `theirs` gives what `rotated` gives."""
    with unset_fake_temporarily(), torch.enable_grad(), torch.device("cpu"):
        generator = torch.Generator().manual_seed(0)
        drawn = [torch.randn(2, *size, generator=generator) for size in ((3, 5, 8), (1, 5, 8), (5, 8), (5, 8))]
        return all(
            all(
                torch.equal(a, b)
                for a, b in zip(_probe(theirs, drawn, each), _probe(_by_tiles, drawn, each), strict=True)
            )
            for each in (torch.float32, torch.bfloat16)
        )


def _probe(rotate: Rotate, drawn: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    query, key, cos, sin = (each.to(dtype) for each in drawn)
    leaves = [each.clone().requires_grad_() for each in (query, key)]
    found = rotate(*leaves, cos, sin)
    return [*found, *torch.autograd.grad([each.square().sum() for each in found], leaves)]


def _by_tiles(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return tuple(rotated(each, cos, sin, tile_bytes=1) for each in (query, key))
