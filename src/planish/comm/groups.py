"""The groups of a run as views of one set of ranks: which there are, made in one order, each met once at the start.

[Note: views] Degrees are choices of their own: each view lays all ranks out anew, and a degree need only divide the
ranks, not what another degree leaves. So dense weights are sharded over all ranks while the same ranks share rows by
twos, experts by eights and the vocabulary by fours. Only stages of a pipeline come first: ranks that hold the same
layers, which lie beside one another, are all that the other degrees divide.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from planish.sections import MeshSection


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """All ranks, laid out by axes, of which the last one changes first.

    Attributes:
        name: What it is for.
        axes: Names and sizes.
        together: Axes that are also one group.
    """

    name: str
    axes: Mapping[str, int]
    together: tuple[str, ...] = ()


def views(mesh: MeshSection) -> tuple[View, ...]:
    """Return the views of a run, in the order in which every rank makes them.

    Example:
        >>> [dict(each.axes) for each in views(MeshSection(dp=4, cp=2, vp=4))]
        [{'replicate': 1, 'dp': 4}, {'copies': 1, 'vp': 4}, {'copies': 2, 'cp': 2}]
    """
    num_shards, stages = mesh.dp or 1, {"pp": mesh.pp} if mesh.pp > 1 else {}
    found = [View(name="weights", axes={**stages, "replicate": mesh.replicate, "dp": num_shards})]
    if mesh.pp > 1 and mesh.peers > 1:
        found.append(View(name="peers", axes={**stages, "peers": mesh.peers}))
    if mesh.ep > 1:
        axes = {**stages, "replicate": mesh.replicate, "copies": num_shards // mesh.ep, "ep": mesh.ep}
        found.append(View(name="experts", axes=axes, together=("copies", "ep")))  # a norm is summed over both at once
    for name, axis, degree in (("vocab", "vp", mesh.vp), ("sequence", "cp", mesh.cp)):
        if degree > 1:
            found.append(View(name=name, axes={**stages, "copies": mesh.peers // degree, axis: degree}))
    return tuple(found)


def make(mesh: MeshSection, device_type: str, *, assumed: bool = False) -> dict[str, DeviceMesh]:
    """Return the meshes of a run by the names of its views; every rank calls it with the same mesh.

    Of a pipeline each is that of the ranks which hold the same layers as this one, and "pipeline" is of those that
    hold the others.

    Every group bears the run's time-out, which torch gives to the first one alone, and has met once: connections that
    are first made in the middle of a step, where ranks come in several orders, are a known way to hang.

    Communication: one all-reduce of a number in every group.

    Args:
        mesh: The degrees.
        device_type: Where tensors lie.
        assumed: No other rank is there.

    Raises:
        RuntimeError: A rank is missing from a group, or late by `mesh.timeout_s`.
    """
    made = {}
    for view in views(mesh):
        found = init_device_mesh(device_type, tuple(view.axes.values()), mesh_dim_names=tuple(view.axes))
        groups = [found.get_group(axis) for axis in view.axes]
        if view.together:
            groups.append(found[view.together]._flatten().get_group())
        if not assumed:
            for group in groups:
                _meet(group, device_type, timedelta(seconds=mesh.timeout_s))
        if "pp" in view.axes:
            made.setdefault("pipeline", found["pp"])
            found = found[tuple(axis for axis in view.axes if axis != "pp")]
        made[view.name] = found
    return made


def _meet(group: dist.ProcessGroup, device_type: str, timeout: timedelta) -> None:
    """Let the ranks of `group` add up their numbers."""
    dist.distributed_c10d._set_pg_timeout(timeout, group)
    total = torch.tensor(dist.get_rank(), device=device_type)
    dist.all_reduce(total, group=group)
    ranks = dist.get_process_group_ranks(group)
    if int(total) != sum(ranks):
        raise RuntimeError(f"a gloo or NCCL group of ranks {ranks} added up to {int(total)}, not {sum(ranks)}.")
