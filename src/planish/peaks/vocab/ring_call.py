"""A call that all ranks of a circle make together: what each gives, looked at by all before the first hop.

A mistake of one rank is refused by every rank, in the same words: the others would wait for its pieces.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor, Shard

from planish.comm.ring import Circle
from planish.peaks.vocab.shard import shard_ranges

_ERRORS = {"TypeError": TypeError, "ValueError": ValueError}


@dataclass(frozen=True, slots=True, kw_only=True)
class Brought:
    """What one rank brings.

    Attributes:
        tokens: Tokens, the ignored ones included.
        valid: Those that are not ignored.
        rows: Rows of the vocabulary.
        lowest: The smallest class of a valid token; 0 where there is none.
        highest: The largest.
        same: What must be the same on all ranks, in words, by the argument's name.
    """

    tokens: int
    valid: int
    rows: int
    lowest: int
    highest: int
    same: Mapping[str, str]

    @property
    def numbers(self) -> list[int]:
        """Return it as numbers; equal last ones mean equal `same`."""
        digest = hashlib.sha256(json.dumps(dict(self.same)).encode()).digest()
        return [self.tokens, self.valid, self.rows, self.lowest, self.highest, int.from_bytes(digest[:7])]


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """What all ranks know: tokens that count, rows of the vocabulary, by rank."""

    valid: tuple[int, ...]
    rows: tuple[int, ...]


def agree(circle: Circle, look: Callable[[], Brought], *, vocab_size: int | None, ignore_index: int) -> Agreed:
    """Return what all ranks bring; without a group the others are taken to be like this one.

    Communication: one all-gather of 56 bytes a rank; where they cannot go on, one of sentences too.

    Args:
        circle: The ranks.
        look: Checks this rank's arguments.
        vocab_size: Rows of all shards, where it is known.
        ignore_index: Target of tokens that are left out.

    Raises:
        TypeError: A rank's arguments, on every rank.
        ValueError: The same; ranks whose settings, rows or classes do not fit together.
    """
    failure: Exception | None = None
    brought = Brought(tokens=0, valid=0, rows=0, lowest=0, highest=0, same={})
    try:
        brought = look()
    except (TypeError, ValueError) as error:
        failure = error
    if circle.group is None:
        if failure is not None:
            raise failure
        rows = (brought.rows,) * circle.size
        if vocab_size is not None:
            rows = tuple(each.stop - each.start for each in shard_ranges(vocab_size, circle.size))
        return Agreed(valid=(brought.valid,) * circle.size, rows=rows)
    everyone = _gather_numbers(circle, [int(failure is not None), *brought.numbers])
    if any(each[0] for each in everyone):
        _raise_first(circle, failure)
    if len({each[-1] for each in everyone}) > 1:
        _raise_difference(circle, brought)
    rows = tuple(each[3] for each in everyone)
    _check_rows(rows, vocab_size)
    for rank, (*_, lowest, highest, _) in enumerate(everyone):
        for found in (lowest, highest):
            if not 0 <= found < sum(rows):
                raise ValueError(
                    f"`target` must be in [0, {sum(rows)}) or `ignore_index` ({ignore_index}), got {found} on rank "
                    f"{rank}."
                )
    return Agreed(valid=tuple(each[2] for each in everyone), rows=rows)


def read_classes(classes: Tensor, *, ignore_index: int, num_valid: int | None) -> tuple[int, int, int]:
    """Return how many entries of flat `classes` are not ignored, and the smallest and the largest of them.

    They are read once; of fake tensors all are valid unless `num_valid` says otherwise, and where it does they are
    not read from a device other than the CPU.

    Raises:
        ValueError: A `num_valid` that is wrong.
    """
    if isinstance(classes, FakeTensor):
        return len(classes) if num_valid is None else num_valid, 0, 0
    if num_valid is not None and classes.device.type != "cpu":
        return num_valid, 0, 0
    valid, found = classes != ignore_index, [0, 0, 0]
    if len(classes):
        found = torch.stack([valid.sum(), *torch.aminmax(classes.where(valid, 0))]).tolist()
    if num_valid not in (None, found[0]):
        raise ValueError(
            f"`num_valid` must be the number of targets that are not ignored, {found[0]}, got {num_valid}."
        )
    return found[0], found[1], found[2]


def circle_of(group: dist.ProcessGroup | Circle | None, beside: Tensor) -> Circle | None:
    """Return the ranks of `group` that take part in what is done with `beside`, None for one rank alone."""
    if group is None:
        return None
    return (group if isinstance(group, Circle) else Circle.of(group)).beside(beside)


def local_rows(tensor: Tensor, circle: Circle, name: str = "weight_shard") -> Tensor:
    """Return this rank's rows of a distributed tensor, and any other as it is.

    Raises:
        ValueError: It is not the ranks of `group` that share its rows.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    mesh, placements = tensor.device_mesh, tensor.placements
    shared = [axis for axis, placement in enumerate(placements) if not placement.is_replicate()]
    by_rows = all(placements[axis] == Shard(0) for axis in shared)
    if not by_rows or len(shared) > 1 or (shared and not _is_of(mesh.get_group(shared[0]), circle)):
        raise ValueError(
            f"`{name}` is a DTensor with placements {placements} on a mesh of {list(mesh.shape)}; its rows must "
            f"be cut (`Shard(0)`) over the {circle.size} ranks of `group` and over no others: redistribute it first."
        )
    if not shared and circle.size > 1:
        raise ValueError(f"`{name}` is a DTensor that every rank holds whole; give each rank its own rows.")
    return tensor.to_local()


def _is_of(group: dist.ProcessGroup, circle: Circle) -> bool:
    ranks = dist.get_process_group_ranks
    return circle.group is None or ranks(group) == ranks(circle.group)


def _gather_numbers(circle: Circle, own: list[int]) -> list[list[int]]:
    device = "cuda" if dist.get_backend(circle.group) == "nccl" else "cpu"
    numbers = torch.tensor(own, dtype=torch.int64, device=device)
    everyone = numbers.new_empty(circle.size, len(own))
    circle.gather(everyone, numbers)
    return everyone.tolist()


def _gather_objects(circle: Circle, own: Any) -> list[Any]:
    texts: list[str] = [""] * circle.size
    dist.all_gather_object(texts, json.dumps(own), group=circle.group)
    return [json.loads(text) for text in texts]


def _raise_first(circle: Circle, failure: Exception | None) -> None:
    """Raise what the first rank that refused its arguments says."""
    own = None if failure is None else [type(failure).__name__, str(failure)]
    rank, (kind, sentence) = next((rank, said) for rank, said in enumerate(_gather_objects(circle, own)) if said)
    raise _ERRORS.get(kind, ValueError)(f"rank {rank}: {sentence}")


def _raise_difference(circle: Circle, brought: Brought) -> None:
    """Raise in what a rank differs from rank 0."""
    everyone = _gather_objects(circle, dict(brought.same))
    first = everyone[0]
    for rank, each in enumerate(everyone):
        for name, value in each.items():
            if value != first[name]:
                raise ValueError(
                    f"{name} must be the same on all ranks of `group`, got {first[name]} on rank 0 and {value} on "
                    f"rank {rank}."
                )


def _check_rows(rows: tuple[int, ...], vocab_size: int | None) -> None:
    total, size = sum(rows), len(rows)
    if vocab_size not in (None, total):
        raise ValueError(
            f"the shards of all ranks must have `vocab_size` ({vocab_size}) rows together, got {total}; give each rank "
            "its own rows and no others."
        )
    if not total:
        raise ValueError(
            "`weight_shard` has no rows on any rank; a weight that is sharded away outside its module's forward must "
            "be gathered first."
        )
    expected = [each.stop - each.start for each in shard_ranges(total, size)]
    for rank, (found, should) in enumerate(zip(rows, expected, strict=True)):
        if found != should:
            raise ValueError(
                f"`weight_shard` must be cut as `torch.chunk` cuts {total} rows for {size} ranks: rank {rank} has "
                f"{found} of them and should have {should}; a shard that is away outside its module's forward must be "
                "gathered first."
            )
