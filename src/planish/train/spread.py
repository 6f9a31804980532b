"""One model over many ranks, by torch's DDP and FSDP2: each rank its rows in, gradients summed over all rows out."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from planish.comm.world import World
from planish.data.batch import Batch
from planish.models.anatomy import Anatomy

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
    Gradients are summed, never averaged: the loss is divided by the counted tokens of all ranks already.

    Memory:        DDP: a second buffer of the gradients' bytes, which then are views of it. FSDP2: 1/dp of weights and
                   gradients, whole only the weights of two layers and of what lies beside the layers (embedding, head,
                   last norm).
    Communication: DDP: one all-reduce of the gradients, after the last microbatch. FSDP2: each microbatch one
                   all-gather of the weights forward and one backward, one reduce-scatter of the gradients, in fp32
                   where weights are narrower; with "replicate" an all-reduce of the shards as well.

    Args:
        anatomy: The model; under FSDP2 its weights are replaced by shards. Only rank 0 needs to hold real ones.
        world: More than one rank.
    """

    def __init__(self, anatomy: Anatomy, world: World) -> None:
        assert world.mesh is not None
        self._step = StepModule(anatomy.model)
        self._sharded = world.mesh["dp"].size() > 1
        if self._sharded:
            _shard(self._step, anatomy, world)
            self._module: nn.Module = self._step
        else:
            self._module = DistributedDataParallel(self._step, gradient_as_bucket_view=True)
            self._module.register_comm_hook(None, _sum_bucket)

    def bind(self, loss: LocalLoss) -> None:
        """Compute the loss by `loss` from now on."""
        self._step.loss = loss

    def __call__(self, batch: Batch, *, last: bool) -> Tensor:
        """Return this rank's summed loss; gradients are exchanged by the backward pass of the `last` microbatch."""
        if not self._sharded:
            self._module.require_backward_grad_sync = last
        return self._module(batch)


def reduced(tensor: Tensor) -> Tensor:
    """Return a distributed tensor whole, and any other as it is. Communication: one collective where it is one."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a distributed tensor, and any other as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _shard(step: StepModule, anatomy: Anatomy, world: World) -> None:
    assert world.mesh is not None
    dp = world.mesh["dp"].size()
    mesh = world.mesh if world.mesh["replicate"].size() > 1 else world.mesh["dp"]

    def placement(param: nn.Parameter) -> Shard:
        """Return the first axis that the ranks divide: few experts on many ranks would be padded."""
        return Shard(next((dim for dim, size in enumerate(param.shape) if size % dp == 0), 0))

    full = dict(anatomy.model.named_parameters()) if world.leads else {}
    whole = {name: param.detach() for name, param in full.items()}
    narrow = next(anatomy.model.parameters()).itemsize < 4
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32 if narrow else None, cast_forward_inputs=False)
    for module in (*anatomy.layers.values(), step):
        fully_shard(module, mesh=mesh, mp_policy=policy, shard_placement_fn=placement)
    for module in step.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(enable=True)
    _deal(anatomy.model, whole, world)


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
            dealt = distribute_tensor(tensor, param.device_mesh, param.placements)
            param.to_local().copy_(dealt.to_local())
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)


def _sum_bucket(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])
