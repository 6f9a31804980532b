"""Named tensors in safetensors files, through torch.distributed.checkpoint: one tensor at a time, nothing pickled."""

import json
import struct
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import (
    CheckpointException,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from planish.train.behind import Files, Sink, at_once
from planish.train.spread import local, reduced

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class FarTensor(Protocol):
    """A tensor whose numbers are not in memory, or not in one piece; distributed ones stand for what is here of them.

    Attributes:
        shape: Of the whole.
        dtype: Of its numbers.
    """

    shape: torch.Size
    dtype: torch.dtype

    def stand_in(self) -> Tensor:
        """Return a tensor without bytes that is shaped and sharded as this one."""
        ...

    def pieces(self) -> Iterator[Tensor]:
        """Yield the numbers in order; each piece is good until the next."""
        ...

    def fill(self, numbers: Tensor) -> None:
        """Take over all numbers that are here."""
        ...


def write_safetensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    far: Mapping[str, FarTensor] = MappingProxyType({}),
    files: Files = at_once,
) -> None:
    """Write `tensors` into one safetensors file, durable as `files` says; those of `far` are stand-ins.

    Memory: one tensor, and only where it has to be copied (it lies on a device, is not contiguous, or is sharded:
        then the other ranks bring their shards in the same order).

    Raises:
        OSError: The disk refuses. (safetensors' own writer hides its reason, and holds a file's copies all at once.)
    """
    names = in_file_order(tensors)
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name in names:
        start, end = end, end + tensors[name].nbytes
        shape = list(tensors[name].shape)
        header[name] = {"dtype": _DTYPES[tensors[name].dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with files(path) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in names:
            _write(file, far[name].pieces() if name in far else [reduced(tensors[name].detach())])


def _write(file: Sink, pieces: Iterable[Tensor]) -> None:
    for piece in pieces:
        flat = (piece if piece.is_contiguous() else piece.cpu().contiguous()).reshape(-1).view(torch.uint8)
        file.write(flat.numpy() if flat.device.type == "cpu" else flat)


def in_file_order(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return names, widest items first as in safetensors itself: each tensor begins at a multiple of its item size."""
    return sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))


def save_tensors(folder: Path, tensors: Mapping[str, Tensor | FarTensor], files: Files = at_once) -> None:
    """Write `tensors` into `folder`, each rank its own shards.

    Memory: one tensor, where it has to be copied; none of those that come in pieces.

    Raises:
        OSError: The disk refuses.
    """
    with _plain_errors():
        dcp.save(_stand_ins(tensors), storage_writer=_Writer(folder, _far(tensors), files))


def load_tensors(folder: Path, tensors: Mapping[str, Tensor | FarTensor], *, alone: bool = False) -> None:
    """Read what `folder` holds under the names of `tensors` into their own memory; see `difference` beforehand.

    Memory: the pages of one saved tensor, and one tensor of those that are not in memory.

    Args:
        folder: Of safetensors files.
        tensors: Allocated; of a sharded one this rank's part is read.
        alone: Other ranks read other names, or none.

    Raises:
        OSError, RuntimeError, ValueError: Files that cannot be read, a name that is not there, another shape.
    """
    with _plain_errors():
        dcp.load(_stand_ins(tensors), storage_reader=_Reader(folder, _far(tensors)), no_dist=alone)


def describe(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Return the names, shapes and dtypes that the safetensors files of `folder` hold; no data is read."""
    return _Reader(folder, {}).read_metadata().state_dict_metadata


def difference(tensors: Mapping[str, Tensor | FarTensor], saved: Mapping[str, TensorStorageMetadata]) -> str | None:
    """Return how `saved` differs from `tensors` in names, shapes and dtypes, or None where it does not."""
    there = {name: f"{list(each.size)} {each.properties.dtype}" for name, each in saved.items()}
    here = {name: f"{list(each.shape)} {each.dtype}" for name, each in tensors.items()}
    names = [name for name in sorted(there | here) if there.get(name) != here.get(name)]
    if not names:
        return None
    name, *others = names
    more = f" (and {len(others)} more)" if others else ""
    return f"`{name}` is {there.get(name, 'absent')} in the checkpoint and {here.get(name, 'absent')} here{more}"


class _Writer(HuggingFaceStorageWriter):
    """Writes a rank's shards as one safetensors file; torch's own holds that file twice in memory."""

    def __init__(self, folder: Path, far: Mapping[str, FarTensor], files: Files) -> None:
        super().__init__(str(folder), save_distributed=True)
        self._far, self._files = far, files

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        tensors = {item.index.fqn: planner.resolve_data(item) for item in plan.items}
        offsets = {item.index.fqn: {"saved_offsets": list(item.tensor_data.chunk.offsets)} for item in plan.items}
        path = Path(self.path) / f"shard-{plan.storage_data['shard_index']:05d}.safetensors"
        metadata = {"format": "pt", "DCP_SHARDING_INFO": json.dumps(offsets)}
        write_safetensors(path, tensors, metadata, self._far, self._files)
        return _done([WriteResult(item.index, tensors[item.index.fqn].nbytes, None) for item in plan.items])


class _Reader(HuggingFaceStorageReader):
    """Reads by mapping one tensor's bytes at a time; torch's own keeps each file mapped, and counted, as a whole."""

    def __init__(self, folder: Path, far: Mapping[str, FarTensor]) -> None:
        super().__init__(str(folder))
        self._far = far

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        starts: dict[str, dict[str, int]] = {}
        parts: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            name = item.dest_index.fqn
            if name in self._far:
                parts.setdefault(name, []).append(item)
                continue
            target = planner.resolve_tensor(item).detach()
            self._read(item, target, starts)
            planner.commit_tensor(item, target)
        for name, items in parts.items():
            whole = torch.empty(_local_shape(self._far[name]), dtype=self._far[name].dtype)
            for item in items:
                self._read(item, whole[_ranges(item.dest_offsets, item.lengths)], starts)
            self._far[name].fill(whole)
            del whole
        return _done(None)

    def _read(self, item: ReadItem, target: Tensor, starts: dict[str, dict[str, int]]) -> None:
        """Fill `target` with a saved tensor, or its part that the item names."""
        if target.numel():
            name, info = item.storage_index.fqn, self.storage_data[item.storage_index]
            path = info.relative_path
            starts[path] = starts.get(path) or _tensor_starts(Path(path))
            saved = _map_tensor(path, starts[path][name], info.dtype, info.shape)
            target.copy_(saved[_ranges(item.storage_offsets, item.lengths)])


def _far(tensors: Mapping[str, Tensor | FarTensor]) -> dict[str, FarTensor]:
    return {name: each for name, each in tensors.items() if not isinstance(each, Tensor)}


def _stand_ins(tensors: Mapping[str, Tensor | FarTensor]) -> dict[str, Tensor]:
    return {name: each if isinstance(each, Tensor) else each.stand_in() for name, each in tensors.items()}


def _local_shape(far: FarTensor) -> torch.Size:
    return local(far.stand_in()).shape


def _ranges(offsets: torch.Size, lengths: torch.Size) -> tuple[slice, ...]:
    return tuple(slice(start, start + length) for start, length in zip(offsets, lengths, strict=True))


def _tensor_starts(path: Path) -> dict[str, int]:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    return {name: 8 + length + each["data_offsets"][0] for name, each in header.items() if name != "__metadata__"}


def _map_tensor(path: str, start: int, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    # Copy-on-write ("c") only because torch warns of arrays that are read-only; nothing is written.
    data = np.memmap(path, dtype=np.uint8, mode="c", offset=start, shape=(shape.numel() * dtype.itemsize,))
    return torch.from_numpy(data).view(dtype).view(shape)


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise what went wrong rather than torch's wrapper, which no `except Exception` would catch."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        try:
            yield
        except CheckpointException as wrapper:
            raise next(iter(wrapper.failures.values()))[0] from None
