"""A parameter that may be split over ranks, as APOLLO sees it: the matrices that are here, and sums over all ranks."""

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from planish.peaks.optim.int8_weight import Int8Weight
from planish.price.apollo import MatrixShape


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalMatrix(MatrixShape):
    """What is here of the matrices of a parameter: all of them, some experts, or some rows of each.

    Attributes:
        whole_dim: The projected dimension, those rows included that are elsewhere.
        start: The first row that is here.
        group: The ranks that hold the other rows; None where matrices are whole.
    """

    whole_dim: int
    start: int = 0
    group: dist.ProcessGroup | None = None

    @property
    def dim(self) -> int:
        """The projected dimension of the whole."""
        return self.whole_dim

    def columns_of(self, projection: Tensor) -> Tensor:
        """Return the part of P [R, dim] that multiplies what is here."""
        return projection[:, self.start : self.start + self.rows] if self.left else projection

    def sum_rows(self, tensor: Tensor) -> None:
        """Add up over the ranks what was summed over rows, where rows are projected."""
        if self.group is not None and self.left:
            dist.all_reduce(tensor, group=self.group)

    def sum_channels(self, tensor: Tensor) -> None:
        """Add up over the ranks what was summed over channels, where rows are the channels."""
        if self.group is not None and not self.left:
            dist.all_reduce(tensor, group=self.group)


def local_matrix(param: Tensor, matrix: MatrixShape) -> tuple[Tensor, LocalMatrix]:
    """Return what is here of `param`, and its shape as part of `matrix`; FSDP2's parameters are split along rows.

    Raises:
        ValueError: A parameter that is split along columns, or over several dimensions of its mesh.
    """
    if not _is_split(param):
        return param, _part(param, matrix)
    split = [(mesh_dim, each.dim) for mesh_dim, each in enumerate(param.placements) if each.is_shard()]
    partial = any(each.is_partial() for each in param.placements)
    if partial or len(split) > 1 or any(axis == param.ndim - 1 for _, axis in split):
        raise ValueError(
            f"APOLLO takes parameters that are whole or split along rows or experts, got {list(param.shape)} as "
            f"{param.placements}; shard another dimension, or put it in a group with `proj_rank` = None (AdamW)."
        )
    local = param.to_local()
    if not split or split[0][1] < param.ndim - 2:
        return local, _part(local, matrix)
    (mesh_dim, axis), mesh = split[0], param.device_mesh
    chunk = -(-param.shape[axis] // mesh.size(mesh_dim))
    start = min(param.shape[axis], chunk * mesh.get_local_rank(mesh_dim))
    return local, _part(local, matrix, start=start, group=mesh.get_group(mesh_dim))


def to_local(tensor: Tensor) -> Tensor:
    """Return what is here of `tensor`."""
    return tensor.to_local() if _is_split(tensor) else tensor


def _is_split(tensor: Tensor) -> bool:
    return type(tensor) not in (Tensor, Parameter) and (
        is_traceable_wrapper_subclass(tensor) and not isinstance(tensor, Int8Weight)
    )


def _part(local: Tensor, matrix: MatrixShape, *, start: int = 0, group: dist.ProcessGroup | None = None) -> LocalMatrix:
    rows, cols = local.shape[-2:]
    experts = local.shape[0] if local.ndim == 3 else 1
    return LocalMatrix(
        experts=experts, rows=rows, cols=cols, left=matrix.left, whole_dim=matrix.dim, start=start, group=group
    )
