"""FSDP2 and DTensor: rows or experts split over ranks, projected on either side, end as in one process."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from planish.optim import Apollo

PROGRAM = Path(__file__).with_name("process_sharded.py")


def differences(world_size):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [
        subprocess.Popen([sys.executable, PROGRAM, *map(str, (rank, world_size, port))], stdout=subprocess.PIPE)
        for rank in range(world_size)
    ]
    said, *_ = [each.communicate(timeout=250)[0] for each in ranks]
    assert [each.returncode for each in ranks] == [0] * world_size
    return json.loads(said)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_end_as_one_process(world_size):
    """Up to the order of summation, in float64; with one rank, bit for bit."""
    for name, difference in differences(world_size).items():
        allowed = 1e-7 if name == "fsdp" else 1e-12  # torch's fused AdamW, which has the biases, is no more exact
        assert difference <= (0 if world_size == 1 else allowed), name


@pytest.fixture
def mesh():
    torch.distributed.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    torch.distributed.destroy_process_group()


def test_state_is_of_what_is_here(mesh):
    """Where rows are the channels, moments are split with them; where rows are projected, every rank has them all."""
    tall, wide = (distribute_tensor(torch.ones(shape), mesh, [Shard(0)]).requires_grad_() for shape in ((9, 4), (4, 9)))
    optimizer = Apollo([tall, wide], proj_rank=2)
    assert optimizer.state[tall]["exp_avg"].shape == (1, 4, 2)
    assert optimizer.state[wide]["exp_avg"].shape == (1, 2, 9)
    assert all(type(each) is torch.Tensor for state in optimizer.state.values() for each in state.values())


def test_columns_are_refused_by_name(mesh):
    param = distribute_tensor(torch.ones(4, 6), mesh, [Shard(1)]).requires_grad_()
    with pytest.raises(ValueError, match="split along rows or experts, got"):
        Apollo([param], proj_rank=2)
