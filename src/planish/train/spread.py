"""One model over many ranks, by torch's DDP and FSDP2: each rank its rows in, gradients summed over all rows out."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import DataParallelMeshDims, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from planish.comm.world import World
from planish.data.batch import Batch
from planish.errors import UsageError
from planish.models.anatomy import Anatomy
from planish.models.experts import find_experts
from planish.shapes import shard_axis

LocalLoss = Callable[[Batch], Tensor]


class StepModule(nn.Module):
    """A batch in, its summed loss out: every weight is used inside, so this is where ranks gather and reduce them.

    Attributes:
        loss: What computes it; set once it is built.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.loss: LocalLoss | None = None

    def forward(self, batch: Batch) -> Tensor:
        """Return the loss, summed over the counted tokens of this rank's rows."""
        assert self.loss is not None
        return self.loss(batch)


class Spread:
    """One rank's part of a model that several ranks train.

    DDP where every rank holds everything, FSDP2 where axis "dp" shards, both where both axes are longer than one.
    Gradients are summed, never averaged: the loss is divided by the counted tokens of all ranks already. Experts over
    ranks are whole there, and sharded by FSDP2 only over the ranks that hold the same ones ("copies", "replicate").
    So are rows of a shared vocabulary, which are never gathered; ranks that hold the same ones add up their gradients.

    Memory:        DDP: a second buffer of the gradients' bytes, which then are views of it. FSDP2: 1/dp of weights and
                   gradients, whole only the weights of two layers and of what lies beside the layers (embedding, head,
                   last norm).
    Communication: DDP: one all-reduce of the gradients, after the last microbatch. FSDP2: each microbatch one
                   all-gather of the weights forward and one backward, one reduce-scatter of the gradients, in fp32
                   where weights are narrower; with "replicate" an all-reduce of the shards as well.

    Args:
        anatomy: The model; under FSDP2 its weights are replaced by shards. Only rank 0 needs to hold real ones.
        world: More than one rank.

    Attributes:
        buckets: Whether gradients are views of buckets that live from the start to the end (DDP).

    Raises:
        UsageError: Experts over ranks in a model that has none, or that their copies cannot be split over.
    """

    def __init__(self, anatomy: Anatomy, world: World) -> None:
        assert world.mesh is not None
        if world.experts is not None:
            require_experts(anatomy)
        self._step, self._last = StepModule(anatomy.model), True
        self.buckets = world.mesh["dp"].size() == 1
        if not self.buckets:
            full = dict(anatomy.model.named_parameters()) if world.leads else {}
            whole = {name: param.detach() for name, param in full.items()}
            shard([self._step], anatomy, world)
            _deal(anatomy.model, whole, world)
            if world.vocab is not None and world.vocab["copies"].size() > 1:
                for each in _of_the_vocabulary(anatomy):
                    each.register_post_accumulate_grad_hook(self._add_up)
            self._module: nn.Module = self._step
        else:
            self._module = DistributedDataParallel(
                self._step, gradient_as_bucket_view=True, init_sync=not world.assumed
            )
            self._module.register_comm_hook(None, _sum_bucket)

    def _add_up(self, param: Tensor) -> None:
        """Add up the gradient of rows of the vocabulary over the ranks that hold the same ones, once it is complete."""
        if self._last:
            add_up(param.grad.to_local(), param.device_mesh.get_group("copies"))

    def bind(self, loss: LocalLoss) -> None:
        """Compute the loss by `loss` from now on."""
        self._step.loss = loss

    def gather(self) -> None:
        """Bring together the weights that lie beside the layers, which the whole pass needs."""
        if isinstance(self._module, FSDPModule):
            self._module.unshard()

    def __call__(self, batch: Batch, *, last: bool) -> Tensor:
        """Return this rank's summed loss; gradients are exchanged by the backward pass of the `last` microbatch."""
        self._last = last
        if self.buckets:
            self._module.require_backward_grad_sync = last
        return self._module(batch)


def reduced(tensor: Tensor) -> Tensor:
    """Return a distributed tensor whole, and any other as it is. Communication: one collective where it is one."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a distributed tensor, and any other as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the norm of all `tensors` together, whole. Communication: one collective for each of their meshes."""
    norms = [reduced(torch.nn.utils.get_total_norm(each)) for each in _by_mesh(tensors)]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def clip(params: Sequence[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scale the gradients of `params`, whose total norm is `norm`, to at most `max_norm`."""
    for each in _by_mesh(params):
        torch.nn.utils.clip_grads_with_norm_(each, max_norm, norm)


def _by_mesh(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return tensors that one operation may take together: those that are spread over the same ranks."""
    found: dict[DeviceMesh | None, list[Tensor]] = {}
    for each in tensors:
        found.setdefault(each.device_mesh if isinstance(each, DTensor) else None, []).append(each)
    return list(found.values()) or [[]]


def add_up(grad: Tensor, group: dist.ProcessGroup | None) -> None:
    """Sum `grad` over the ranks of `group` in place, in fp32 where it is narrower."""
    wide = grad if grad.itemsize >= 4 else grad.float()
    dist.all_reduce(wide, group=group)
    grad.copy_(wide)


def shard(roots: Sequence[nn.Module], anatomy: Anatomy, world: World) -> None:
    """Let FSDP2 shard the layers of a model, and what else is in `roots`, over the ranks that hold the same layers.

    The shards are not filled yet, where this rank has no weights.

    Args:
        roots: What runs layers: FSDP2 exchanges at their beginning and end.
        anatomy: The model; experts over ranks and rows of a shared vocabulary in it are replaced by this rank's.
        world: More than one rank with the same layers.

    Raises:
        UsageError: Copies of experts that cannot be split over their ranks.
    """
    assert world.mesh is not None
    dp = world.mesh["dp"].size()
    mesh = world.mesh if world.mesh["replicate"].size() > 1 else world.mesh["dp"]

    def placement(param: nn.Parameter) -> Shard:
        return Shard(shard_axis(tuple(param.shape), dp))

    narrow = next(anatomy.model.parameters()).itemsize < 4
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32 if narrow else None, cast_forward_inputs=False)
    whole_here = set() if world.experts is None else _spread_experts(anatomy, world.experts, policy)
    if world.vocab is not None:
        whole_here |= _share_vocabulary(anatomy, world.vocab)
    for module in (*_of_another_dtype(anatomy.model), *anatomy.layers.values(), *roots):
        fully_shard(module, mesh=mesh, mp_policy=policy, shard_placement_fn=placement, ignored_params=whole_here)
    for module in (each for root in roots for each in root.modules()):
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(enable=True)


def _of_another_dtype(model: PreTrainedModel) -> list[nn.Module]:
    """Return the modules, such as routers kept in float32, that FSDP2 does not take together with the others."""
    leaves = [each for each in model.modules() if not list(each.children())]
    return [each for each in leaves if any(param.dtype != model.dtype for param in each.parameters())]


def _spread_experts(anatomy: Anatomy, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> set[nn.Parameter]:
    """Leave on each rank its experts, sharded over those that hold the same ones; return what is not sharded."""
    modules = find_experts(anatomy.model, anatomy.layers).modules.values()
    for module in modules:
        for name, param in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(_own_part(param, mesh), requires_grad=param.requires_grad))
    if mesh["ep"].size() == mesh.size():
        return {param for module in modules for param in module.parameters(recurse=False)}
    axes = DataParallelMeshDims(shard="copies", replicate="replicate" if mesh["replicate"].size() > 1 else None)
    num_copies = mesh["copies"].size()

    def placement(param: nn.Parameter) -> Shard:
        """Return the first axis within an expert that its copies divide."""
        found = [axis for axis, size in enumerate(param.shape) if axis and size % num_copies == 0]
        if not found:
            raise UsageError(
                f"the {num_copies} ranks that hold the same experts cannot split {list(param.shape[1:])} evenly; "
                f"set `mesh.ep = {mesh['ep'].size() * num_copies}`."
            )
        return Shard(found[0])

    for module in modules:
        mesh = next(module.parameters()).device_mesh  # FSDP2 wants the very object; DTensor may know an equal one
        fully_shard(module, mesh=mesh, mp_policy=policy, shard_placement_fn=placement, dp_mesh_dims=axes)
    return set()


def require_experts(anatomy: Anatomy) -> None:
    """Refuse a model without experts.

    Raises:
        UsageError: It has none.
    """
    if not find_experts(anatomy.model, anatomy.layers).modules:
        raise UsageError(
            f"`mesh.ep` spreads experts, and {type(anatomy.model).__name__} has none that transformers' experts "
            "interface runs; leave `mesh.ep` out."
        )


def _of_the_vocabulary(anatomy: Anatomy) -> list[nn.Parameter]:
    """Return the parameters that have a row for each class: those of head and embedding, once where they are one."""
    parts = (anatomy.head.weight, anatomy.head.bias, anatomy.model.get_input_embeddings().weight)
    return list({id(each): each for each in parts if each is not None}.values())


def _share_vocabulary(anatomy: Anatomy, mesh: DeviceMesh) -> set[nn.Parameter]:
    """Leave on each rank its rows of head and embedding; return them, which are not sharded further."""
    shared = {
        id(each): nn.Parameter(_own_part(each, mesh), requires_grad=each.requires_grad)
        for each in _of_the_vocabulary(anatomy)
    }
    for module in anatomy.model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            if id(param) in shared:
                setattr(module, name, shared[id(param)])
    return set(shared.values())


def _own_part(param: nn.Parameter, mesh: DeviceMesh) -> DTensor:
    """Return an empty part of `param` for this rank's experts or rows, as `torch.chunk` cuts them for the last axis."""
    assert mesh.mesh_dim_names is not None
    ranks = mesh[mesh.mesh_dim_names[-1]]
    num_rows, each = param.shape[0], -(-param.shape[0] // ranks.size())
    first, end = (min(num_rows, each * rank) for rank in (ranks.get_local_rank(), ranks.get_local_rank() + 1))
    part = torch.empty((end - first, *param.shape[1:]), dtype=param.dtype, device=param.device)
    placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=param.shape, stride=param.stride())


def _deal(model: nn.Module, whole: dict[str, Tensor], world: World) -> None:
    """Give every rank its shards of the weights that rank 0 holds whole, and its buffers, one tensor at a time."""
    assert world.mesh is not None
    device = world.mesh.device_type
    if not world.leads:
        model.to_empty(device=device)
    with torch.no_grad():
        for name, param in model.named_parameters():
            assert isinstance(param, DTensor)
            tensor = whole.pop(name) if world.leads else torch.empty(param.shape, dtype=param.dtype, device=device)
            deal(param, tensor)
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)


def deal(param: DTensor, whole: Tensor) -> None:
    """Fill a rank's part of `param` from `whole`, which the first of the ranks that share it knows."""
    param.to_local().copy_(distribute_tensor(whole, param.device_mesh, param.placements).to_local())


def _sum_bucket(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    buffer = bucket.buffer()
    return dist.all_reduce(buffer, async_op=True).get_future().then(lambda _: buffer)
