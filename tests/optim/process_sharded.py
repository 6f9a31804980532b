"""What each rank of a gloo world does; imports neither pytest nor hypothesis."""

import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from planish.optim import Apollo

SHAPES = [(7, 24), (24, 7), (3, 5, 9), (1, 6)]
METHODS = {
    "mini": {"proj_rank": 1, "granularity": "tensor"},
    "channel": {"proj_rank": 3, "granularity": "channel", "refresh": "reset"},
    "left": {"proj_rank": 1, "side": "left"},
    "right": {"proj_rank": 1, "side": "right"},
}


def drawn(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def train(method, mesh=None, axis=0):
    """Return the weights, whole, after some steps in which one gradient is zero and one is infinite."""
    shapes = [shape for shape in SHAPES if shape != (1, 6) or METHODS[method]["proj_rank"] == 1]
    params = [drawn(shape, seed) for seed, shape in enumerate(shapes)]
    if mesh is not None:
        params = [distribute_tensor(each, mesh, [Shard(axis if each.ndim == 3 else 0)]) for each in params]
    params = [each.requires_grad_() for each in params]
    optimizer = Apollo(params, lr=1e-1, weight_decay=0.1, update_gap=3, **METHODS[method])
    for number in range(1, 8):
        for index, param in enumerate(params):
            grad = drawn(param.shape, 100 * number + index)
            if number in (4, 5) and index == 1:
                grad[0] = float("inf") if number == 4 else 0.0
            if mesh is not None:
                grad = DTensor.from_local(distribute_tensor(grad, mesh, param.placements).to_local(), mesh,
                                          param.placements, shape=grad.shape, stride=grad.stride())  # fmt: skip
            param.grad = grad
        optimizer.step()
    return [each.full_tensor() if isinstance(each, DTensor) else each for each in params]


def compare(rank, world_size, port):
    """Print the largest difference from one process, relative, for each method and split dimension."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world_size, init_method=f"tcp://127.0.0.1:{port}")
    mesh = init_device_mesh("cpu", (world_size,))
    found = {}
    for method in METHODS:
        alone = train(method)
        for axis in (0, 1):
            pairs = zip(alone, train(method, mesh, axis), strict=True)
            found[f"{method}, {axis}"] = max(((one - other).norm() / one.norm()).item() for one, other in pairs)
    found["fsdp"] = fsdp(mesh)
    if rank == 0:
        sys.stdout.write(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def fsdp(mesh):
    """Return the same for a model under FSDP2, updated in its backward pass, against one process and `step`."""
    ones, others = (nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 6)).double() for _ in range(2))
    for index, (one, other) in enumerate(zip(ones.parameters(), others.parameters(), strict=True)):
        one.data, other.data = drawn(one.shape, index), drawn(one.shape, index)
    fully_shard(others, mesh=mesh)
    optimizers = [Apollo(each.parameters(), lr=1e-2, proj_rank=1, granularity="tensor") for each in (ones, others)]
    for number in range(4):
        x = drawn((8, 6), number)
        ones(x).square().mean().backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        with optimizers[1].update_in_backward():
            others(x).square().mean().backward()
        assert all(each.grad is None for each in others.parameters())
    pairs = zip(ones.parameters(), others.parameters(), strict=True)
    return max(((one - other.full_tensor()).norm() / one.norm()).item() for one, other in pairs)


if __name__ == "__main__":
    compare(*map(int, sys.argv[1:]))
