"""A stack of layers with dropout, its loss and gradients under plain checkpointing and through a store."""

import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from planish.memory.far_disk import disk_tier
from planish.memory.far_host import HostSlab, identity_tier
from planish.memory.far_simulated import throttled_tier
from planish.peaks.boundary.store import BoundaryStore
from planish.price.boundary import Boundaries, Depth, slot_bytes

WIDTH = 16


class Layer(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=dtype)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, dtype=dtype)
        self.down = nn.Linear(2 * WIDTH, WIDTH, dtype=dtype)
        self.dropout = nn.Dropout(0.3)

    def forward(self, hidden, mask):
        return hidden + self.dropout(self.down(torch.tanh(self.up(self.norm(hidden))))) * mask


class Stack(nn.Module):
    """Layers, each called through what `checkpoints` makes for it; notes what lives when."""

    def __init__(self, num_layers=6, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(32, WIDTH, dtype=dtype)
        self.layers = nn.ModuleList(Layer(dtype) for _ in range(num_layers))
        self.mask = torch.ones((), dtype=dtype)
        self.inputs = []

    def forward(self, ids, checkpoints):
        hidden = self.embed(ids)
        for layer, run in zip(self.layers, checkpoints, strict=True):
            self.inputs.append(weakref.ref(hidden.untyped_storage()))
            hidden = run(layer, hidden, self.mask)
        return hidden.float().square().mean()

    def tokens(self, rows=3, length=5, seed=1):
        return torch.randint(0, 32, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def stack():
    return Stack


def kind_of(reentrant):
    def run(function, *args):
        return checkpoint(function, *args, use_reentrant=reentrant)

    return run


@pytest.fixture(params=[False, True], ids=["non-reentrant", "reentrant"])
def kind(request):
    """Return each kind of torch's checkpoint as run(function, *args)."""
    return kind_of(request.param)


@pytest.fixture
def make_store(tmp_path):
    """Return a maker of stores over a tier of the kind asked for; all are closed at the end."""
    stores = []

    def make(num_layers=6, *, rows=3, length=5, itemsize=4, slots=None, tier="identity", every=1, keep_last=1, **label):
        nbytes = rows * length * WIDTH * itemsize
        slots = num_layers if slots is None else slots
        capacity = slots * slot_bytes(nbytes)
        kinds = {
            "identity": lambda: identity_tier(capacity),
            "disk": lambda: disk_tier(tmp_path, capacity),
            "throttled": lambda: throttled_tier(HostSlab(capacity, lock=False), bytes_per_s=1e9, latency_s=1e-3),
        }
        plan = Boundaries(num_boundaries=num_layers, num_slots=slots, every=every, keep_last=keep_last)
        tiers = [tier if not isinstance(tier, str) else kinds[tier]()] if slots else []
        depth = Depth(num_boundaries=num_layers, boundary_bytes=nbytes)
        stores.append(BoundaryStore(plan, depth=depth, tiers=tiers, **label))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


@pytest.fixture
def grads_of():
    """Return what one run leaves behind: its losses and the model's gradients."""

    def grads(model, run):
        model.zero_grad(set_to_none=True)
        torch.manual_seed(7)
        loss = run()
        return [loss.detach().clone(), *(each.grad.clone() for each in model.parameters() if each.grad is not None)]

    return grads
