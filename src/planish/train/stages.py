"""A loaded model cut for one rank of a pipeline: its layers, its rows of the vocabulary, everything else gone.

Where several ranks hold the same layers, FSDP2 shards these among them. Rows of the vocabulary are whole there: each
pipeline has all of them on its ranks, and ranks that hold the same ones add up their gradients once a step.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from planish.comm.world import World
from planish.models.anatomy import Anatomy, find
from planish.models.split import Decoder, keep_layers, keep_rows, modules_of, open_decoder
from planish.peaks.vocab.shard import shard_ranges
from planish.pipeline.run.flow import StageForward
from planish.train.spread import deal, local, require_experts, shard
from planish.train.tensor_files import FarTensor


class StageModule(nn.Module):
    """One stage's layers: where ranks that hold the same ones gather their weights and sum their gradients.

    Attributes:
        run: The layers' forward; set once their methods are in place.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)
        self.run: StageForward | None = None

    def forward(self, hidden: Tensor, batch: object) -> Tensor:
        """Return hidden states [B, S, D] behind the layers."""
        assert self.run is not None
        return self.run(hidden, batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """One rank's part of a model.

    Attributes:
        anatomy: What is left of the model.
        decoder: Where its parts are.
        layers: Those of each stage here, first ones first.
        stages: The stages' layers as modules.
        rows: Those of the vocabulary that are here.
        vocab_size: All of them.
        mesh: The ranks that share it.
    """

    anatomy: Anatomy
    decoder: Decoder
    layers: tuple[range, ...]
    stages: tuple[StageModule, ...]
    rows: slice
    vocab_size: int
    mesh: DeviceMesh

    def sharded(self, tensor: Tensor) -> Tensor:
        """Return this rank's rows, of a weight or of what the optimizer keeps of it, as a part of the whole's rows."""
        shape = torch.Size((self.vocab_size, *tensor.shape[1:]))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(tensor, self.mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)

    @property
    def shared(self) -> dict[str, nn.Parameter]:
        """The parameters of which every rank has rows, by name."""
        owners = {id(each) for module in (self.decoder.embedding, self.anatomy.head) for each in module.parameters()}
        return {name: each for name, each in self.anatomy.model.named_parameters() if id(each) in owners}


class FarRows:
    """This rank's rows of a tensor that lies elsewhere, as a part of all ranks' rows; see `FarTensor`."""

    def __init__(self, rows: FarTensor, part: Cut) -> None:
        self.shape = torch.Size((part.vocab_size, *rows.shape[1:]))
        self.dtype = rows.dtype
        self._rows, self._part = rows, part

    def stand_in(self) -> Tensor:
        """Return a tensor without bytes that is shaped and sharded as this one."""
        return self._part.sharded(self._rows.stand_in())

    def pieces(self) -> Iterator[Tensor]:
        """Yield the numbers that are here, in order."""
        return self._rows.pieces()

    def fill(self, numbers: Tensor) -> None:
        """Take over the numbers that are here."""
        self._rows.fill(numbers)


def cut(anatomy: Anatomy, counts: tuple[int, ...], stage_ranks: tuple[int, ...], world: World) -> Cut:
    """Return this rank's part of a model that rank 0 holds whole, and the others without weights.

    Memory:        rank 0 the whole model until each weight is where it belongs; the others their part, and the first of
                   those that share layers one whole weight.
    Communication: each weight goes once from rank 0 to the first rank that has a part of it, and on from there; rows of
                   a shared one to all.

    Args:
        anatomy: Of the whole model; what another rank has is gone afterwards.
        counts: Layers of each stage.
        stage_ranks: The rank of each stage.
        world: The ranks of the pipeline.

    Raises:
        UsageError: A model that stages cannot divide, or without experts where these are spread.
    """
    assert world.pipeline is not None
    if world.experts is not None:
        require_experts(anatomy)
    decoder, model, last = open_decoder(anatomy), anatomy.model, stage_ranks[-1]
    seat, seats = world.seat
    ranges = [range(*each) for each in pairwise(accumulate(counts, initial=0))]
    mine = [each for each, owner in zip(ranges, stage_ranks, strict=True) if owner == seat]
    owner_of_layer = {
        name: stage_ranks[next(stage for stage, each in enumerate(ranges) if i in each)]
        for i, name in enumerate(anatomy.layers)
    }
    vocab_size = len(anatomy.weight)
    rows = shard_ranges(vocab_size, seats)
    device = torch.device(world.pipeline.device_type)
    whole = {name: each.detach() for name, each in model.named_parameters()}
    buffers = dict(model.named_buffers())
    shared = {id(each) for module in (decoder.embedding, anatomy.head) for each in module.parameters()}
    owners = {
        name: None if id(param) in shared else _owner(name, owner_of_layer, last)
        for name, param in model.named_parameters()
    }
    keep_rows(anatomy, decoder.embedding, rows[seat], whole=device)
    keep_layers(decoder, [i for each in mine for i in each], norm=seat == last)
    anatomy = find(model)
    stages = tuple(StageModule(modules_of(decoder, each)) for each in mine)
    if world.counts:
        shard(stages, anatomy, world)
    if not world.leads:
        _make_room(model, device)
    _deal(model, whole, buffers, owners, rows, world)
    found = Cut(
        anatomy=anatomy,
        decoder=decoder,
        layers=tuple(mine),
        stages=stages,
        rows=rows[seat],
        vocab_size=vocab_size,
        mesh=world.pipeline,
    )
    for module in (decoder.embedding, anatomy.head):
        module.register_state_dict_post_hook(_as_shards(found))
    return found


def _make_room(model: nn.Module, device: torch.device) -> None:
    """Give every weight and buffer that is on the meta device memory; what shares rows of the vocabulary has its own.

    As `Module.to_empty` does, which cannot replace fake tensors.
    """
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            if param.device.type == "meta":
                data = torch.empty_like(local(param.detach()), device=device)
                if isinstance(param, DTensor):
                    where, sizes = (param.device_mesh, param.placements), (param.shape, param.stride())
                    data = DTensor.from_local(data, *where, run_check=False, shape=sizes[0], stride=sizes[1])
                setattr(module, name, nn.Parameter(data, requires_grad=param.requires_grad))
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.device.type == "meta":
                module._buffers[name] = torch.empty_like(buffer, device=device)


def _owner(name: str, owner_of_layer: dict[str, int], last: int) -> int:
    return next((rank for layer, rank in owner_of_layer.items() if name.startswith(f"{layer}.")), last)


@torch.no_grad()
def _deal(
    model: nn.Module,
    whole: dict[str, Tensor],
    buffers: dict[str, Tensor],
    owners: dict[str, int | None],
    rows: tuple[slice, ...],
    world: World,
) -> None:
    """Bring each weight from rank 0 to its owner, the rows of a shared one to all, and every buffer to all."""
    here = dict(model.named_parameters())
    for name, owner in owners.items():
        tensor = whole.pop(name)
        for seat in range(len(rows)) if owner is None else (owner,):
            part = tensor[rows[seat]] if owner is None else tensor
            if part.numel():
                _bring(part, seat, here[name] if seat == world.seat[0] else None, world)
    kept = dict(model.named_buffers())
    for name, buffer in buffers.items():
        data = torch.empty_like(buffer, device=world.mesh.device_type) if buffer.is_meta else buffer
        dist.broadcast(data, 0)
        if name in kept:
            kept[name].copy_(data)


def _bring(tensor: Tensor, seat: int, param: nn.Parameter | None, world: World) -> None:
    """Bring what rank 0 has as `tensor` to the ranks of a seat, of whom each has its place as `param`."""
    first = seat * len(world.peers)
    if world.leads and first != 0:
        dist.send(tensor.contiguous(), first)
    if param is None:
        return
    if isinstance(param, DTensor):
        data = tensor if world.leads else torch.empty(tensor.shape, dtype=tensor.dtype, device=world.mesh.device_type)
        if world.rank == first != 0:
            dist.recv(data, 0)
        deal(param, data)
        return
    if world.rank == first != 0:
        dist.recv(param, 0)
    if world.counts:
        dist.broadcast(param, first, group=world.together)


def _as_shards(part: Cut):  # noqa: ANN202 - torch's hook
    """Return the hook that shows this rank's rows in a state dict as what they are: rows of the whole."""

    def hook(module: nn.Module, state: dict[str, Tensor], prefix: str, _: object) -> None:
        for name, param in module.named_parameters(recurse=False):
            if f"{prefix}{name}" in state:
                state[f"{prefix}{name}"] = part.sharded(param.detach())

    return hook
