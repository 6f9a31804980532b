"""The state of streamed parameters as torch's state dict has it: out of far memory and into it, piece by piece."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from planish.peaks.optim.apollo_shard import to_local
from planish.peaks.optim.stream_layout import Arrays, Chunk, Flat, Piece
from planish.peaks.optim.stream_slots import Slots

Places = Sequence[tuple[Chunk, Piece]]
SHARED = frozenset({"params", "foreach", "fused", "capturable", "differentiable", "master", "math"})
"""Options of a group that say how an optimizer works; a saved state does not change them."""


class FarTensor:
    """One tensor of a parameter's state, wherever it lies: it has a shape, and is read and filled piece by piece.

    Attributes:
        shape: The parameter's.
        dtype: Of the state.
    """

    def __init__(self, name: str, flat: Flat, places: Places, dtype: torch.dtype, slots: Callable[[], Slots]) -> None:
        self.shape = flat.param.shape
        self.dtype = dtype
        self._name, self._flat, self._places, self._slots = name, flat, places, slots

    def stand_in(self) -> Tensor:
        """Return one number, repeated without a copy, of the state's shape and sharded as it is."""
        number = torch.frombuffer(bytearray(self.dtype.itemsize), dtype=self.dtype)[0]
        return _distributed(number.expand(to_local(self._flat.param).shape), self._flat.param)

    def pieces(self) -> Iterator[Tensor]:
        """Yield the numbers that are here, in order; each piece is good until the next.

        Memory: none where the parameter is contiguous; otherwise one tensor.
        """
        if self._flat.order != tuple(range(len(self._flat.order))):
            yield self._local().reshape(-1)
            return
        slots = self._slots()
        for chunk, piece in self._places:
            yield slots.read(chunk, self._name, piece)

    def read(self) -> Tensor:
        """Return all of it, on the CPU. Memory: this tensor."""
        return _distributed(self._local(), self._flat.param)

    def fill(self, numbers: Tensor) -> None:
        """Take over the numbers that are here, shaped as they are."""
        slots, numbers = self._slots(), self._flat.like(numbers)
        for chunk, piece in self._places:
            if chunk.fresh:
                slots.walk([chunk], _leave)
            slots.write(chunk, self._name, piece, numbers[piece.outside])

    def _local(self) -> Tensor:
        slots = self._slots()
        numbers = torch.empty(self._flat.numel, dtype=self.dtype, device="cpu")
        for chunk, piece in self._places:
            numbers[piece.outside].copy_(slots.read(chunk, self._name, piece))
        return self._flat.unflatten(numbers)


def check_saved(
    state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], state: Mapping[Tensor, Any]
) -> None:
    """Refuse a saved state that is not of these parameters, or not AdamW's.

    Raises:
        ValueError: The message says what differs.
    """
    saved_groups = state_dict["param_groups"]
    if [len(group["params"]) for group in saved_groups] != [len(group["params"]) for group in groups]:
        raise ValueError("the saved optimizer state has other parameter groups than this optimizer.")
    for index, (group, saved) in enumerate(zip(groups, saved_groups, strict=True)):
        if not saved.get("decoupled_weight_decay", True):
            raise ValueError(f"group {index} of the saved state is Adam's, whose weight decay is in its moments.")
        if saved.get("amsgrad", False) != group["amsgrad"]:
            raise ValueError(
                f"`amsgrad` of group {index} is {group['amsgrad']} here and {saved.get('amsgrad', False)} in the saved "
                "state; make the optimizer as it was."
            )
    for param, index in _pairs(groups, saved_groups):
        saved = state_dict["state"].get(index)
        if saved:
            _check_one(index, param, saved, state.get(param))


def _check_one(index: int, param: Tensor, saved: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
    if own is None:
        raise ValueError(f"the saved state has moments of parameter {index}, which is frozen here; let it train.")
    names = set(own) - {"master"}
    if names - set(saved) or set(saved) - names - {"master"}:
        raise ValueError(
            f"the saved state of parameter {index} has {sorted(saved)}, this optimizer keeps {sorted(own)}; it is "
            "another optimizer's."
        )
    for name in set(saved) - {"step"}:
        if tuple(saved[name].shape) != tuple(param.shape) or isinstance(saved[name], DTensor) != isinstance(
            param, DTensor
        ):
            raise ValueError(
                f"the saved state of parameter {index} has `{name}` {list(saved[name].shape)} and the parameter is "
                f"{list(param.shape)}, or sharded otherwise; it is of another model."
            )


def load(
    state_dict: Mapping[str, Any],
    groups: Sequence[dict[str, Any]],
    state: Mapping[Tensor, dict[str, Any]],
    chunks: Iterable[Chunk],
    slots: Slots,
) -> None:
    """Fill chunks with what was saved, one after another, whatever became of what they held.

    Parameters without saved state begin anew, and masters that were not saved are taken from the parameters.

    Memory: none beside the slots.
    """
    by_param: dict[Tensor, Mapping[str, Any]] = {}
    for param, index in _pairs(groups, state_dict["param_groups"]):
        by_param[param] = state_dict["state"].get(index) or {}

    def fill(chunk: Chunk, arrays: Arrays) -> None:
        for piece in chunk.pieces:
            saved = by_param[piece.flat.param]
            for name in saved.keys() & arrays.keys():
                arrays[name][piece.inside].copy_(piece.flat.like(saved[name])[piece.outside])

    chunks = list(chunks)
    for chunk in chunks:  # nothing is under way
        chunk.fresh = True
        for region in chunk.regions:
            region.last_read = region.last_write = None
    slots.walk(chunks, fill)
    for param, saved in by_param.items():
        if param in state:
            state[param]["step"].fill_(float(saved.get("step", 0.0)))
    for group, saved in zip(groups, state_dict["param_groups"], strict=True):
        group.update({name: value for name, value in saved.items() if name not in SHARED})


def _pairs(groups: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Tensor, Any]]:
    for group, other in zip(groups, saved, strict=True):
        yield from zip(group["params"], other["params"], strict=True)


def _distributed(local: Tensor, param: Tensor) -> Tensor:
    if not isinstance(param, DTensor):
        return local
    return DTensor.from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def _leave(chunk: Chunk, arrays: Arrays) -> None:
    """Change nothing."""
