"""Saved-tensor hooks that pack whatever autograd keeps that is mostly zeros, in any model, unchanged."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from planish.kernels.bitmap import codec, num_bits_bytes, num_blocks
from planish.price.activation import marks_bytes

MIN_BYTES = 64 * 2**10
_FORGET_ABOVE = 256


@dataclass(slots=True, kw_only=True)
class Saved:
    """What autograd was asked to keep inside `sparse_saved_tensors`, and what it keeps of that.

    Attributes:
        dense_bytes: Of the tensors that were packed, each storage once.
        packed_bytes: Of what stands in their place.
        num_packed: How many there are.
    """

    dense_bytes: int = 0
    packed_bytes: int = 0
    num_packed: int = 0


class _Packed:
    """One tensor's memory, packed."""

    __slots__ = ("__weakref__", "base", "bits", "device", "dtype", "numel", "values")

    def __init__(self, flat: Tensor, count: int) -> None:
        self.numel, self.dtype, self.device = flat.numel(), flat.dtype, flat.device
        self.bits = torch.empty(num_bits_bytes(self.numel), dtype=torch.uint8, device=flat.device)
        self.base = torch.empty(num_blocks(self.numel), dtype=torch.int64, device=flat.device)
        self.values = torch.empty(count, dtype=flat.dtype, device=flat.device)
        codec(flat.device).pack(flat, self.bits, self.base, self.values)

    @property
    def nbytes(self) -> int:
        return self.bits.nbytes + self.base.nbytes + self.values.nbytes

    def unpack(self) -> Tensor:
        flat = torch.empty(self.numel, dtype=self.dtype, device=self.device)
        codec(self.device).unpack(self.values, self.bits, self.base, flat)
        return flat


@dataclass(frozen=True, slots=True)
class _View:
    """A packed tensor as it was: its memory, and how it lay in it."""

    packed: _Packed
    shape: torch.Size
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Seen:
    """A storage that was packed: while it lives and is unchanged, what is saved of it again is the same."""

    storage: StorageWeakRef
    version: int
    packed: "weakref.ref[_Packed]"


@dataclass(slots=True, kw_only=True)
class _Hooks:
    min_bytes: int
    saved: Saved = field(default_factory=Saved)
    seen: dict[tuple[int, int, int, torch.dtype], _Seen] = field(default_factory=dict)
    forget_above: int = _FORGET_ABOVE

    def pack(self, tensor: Tensor) -> Tensor | _View:
        if not self._is_candidate(tensor):
            return tensor
        storage = tensor.untyped_storage()
        key = (storage._cdata, tensor.storage_offset(), tensor.numel(), tensor.dtype)
        packed = self._again(key, tensor._version)
        if packed is None:
            flat = tensor.detach().as_strided((tensor.numel(),), (1,))
            count = codec(flat.device).count(flat)
            if count * flat.element_size() + marks_bytes(flat.numel()) >= flat.nbytes:
                return tensor
            packed = _Packed(flat, count)
            if len(self.seen) >= self.forget_above:
                self.seen = {name: each for name, each in self.seen.items() if each.packed() is not None}
                self.forget_above = max(_FORGET_ABOVE, 2 * len(self.seen))
            self.seen[key] = _Seen(StorageWeakRef(storage), tensor._version, weakref.ref(packed))
            self.saved.dense_bytes += flat.nbytes
            self.saved.packed_bytes += packed.nbytes
            self.saved.num_packed += 1
        return _View(packed, tensor.shape, tensor.stride())

    def unpack(self, kept: Tensor | _View) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        return kept.packed.unpack().as_strided(kept.shape, kept.stride)

    def _is_candidate(self, tensor: Tensor) -> bool:
        root = tensor if tensor._base is None else tensor._base
        return (
            tensor.nbytes >= self.min_bytes
            and tensor.is_floating_point()
            and tensor.element_size() in (2, 4, 8)
            and tensor.device.type in ("cpu", "cuda")
            and type(tensor) in (Tensor, nn.Parameter)
            and not isinstance(root, nn.Parameter)
            and not (root.is_leaf and root.requires_grad)
            and _is_dense(tensor)
        )

    def _again(self, key: tuple[int, int, int, torch.dtype], version: int) -> _Packed | None:
        seen = self.seen.get(key)
        if seen is None or seen.storage.expired() or seen.version != version:
            return None
        return seen.packed()


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill a stretch of memory, in whatever order of dimensions."""
    step = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


@contextmanager
def sparse_saved_tensors(*, min_bytes: int = MIN_BYTES) -> Iterator[Saved]:
    """Inside, whatever autograd keeps for backward that is mostly zeros is kept packed; any model, any operation.

    A network with `plan.activation` = bitmap keeps half as much of a ReLU^2, since it need not keep the square; this
    serves models that cannot be changed.

    Memory:        of a tensor with n numbers density * n * itemsize + n / 8 + n / 512 bytes, where that is less than
                   n * itemsize; dense again for as long as its node's backward runs.
    Exactness:     bitwise: the same tensors come back, NaN, infinities and -0.0 included.

    Args:
        min_bytes: Smaller tensors are left alone, and so are parameters.

    Example:
        >>> x = torch.randn(64, 512, requires_grad=True)
        >>> with sparse_saved_tensors() as saved:
        ...     y = torch.relu(x).square().sum()
        >>> y.backward()
        >>> saved.num_packed, saved.packed_bytes < saved.dense_bytes
        (1, True)
    """
    if min_bytes < 0:
        raise ValueError(f"`min_bytes` must be 0 or more, got {min_bytes}.")
    hooks = _Hooks(min_bytes=min_bytes)
    with torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
        yield hooks.saved
