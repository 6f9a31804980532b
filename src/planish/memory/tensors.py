"""Which tensors a value holds, and which storages those stand on."""

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# `torch.tensor(...)` makes its storage unseen and shows it as the input of this operation.
_LIFT_FRESH = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
# These give their first argument another storage.
_SET = tuple(getattr(torch.ops.aten.set_, name) for name in torch.ops.aten.set_.overloads())

# The key of an operation that others are put together to.
_MADE_OF = torch._C.DispatchKey.CompositeImplicitAutograd


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in `value`, a tensor or any nesting of tuples, lists and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from tensors_in(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors_in(each)


def plain_tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in `value` that hold bytes: a wrapper such as DTensor gives way to what it wraps."""
    for tensor in tensors_in(value):
        if is_traceable_wrapper_subclass(tensor):
            yield from plain_tensors_in([getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]])
        else:
            yield tensor


@functools.cache
def makes_views(func: Any) -> bool:
    """Return whether all that `func` returns are views of what it is given, which it leaves as it was.

    Operations that do so only at times, such as `reshape`, and `lift_fresh`, whose argument nobody has seen, are none.
    """
    if func in _LIFT_FRESH or not isinstance(func, torch._ops.OpOverload) or func.has_kernel_for_dispatch_key(_MADE_OF):
        return False
    returned = [each.alias_info for each in func._schema.returns]
    return bool(returned) and all(each is not None and not each.is_write for each in returned)


def storages_given(func: Any, args: Any, kwargs: Any) -> set[int]:
    """Return the keys of the storages that `func` was given; an output on one of them is not new."""
    if func in _LIFT_FRESH:
        return set()
    given = (args[1:] if func in _SET else args, kwargs)
    return {tensor.untyped_storage()._cdata for tensor in tensors_in(given)}
