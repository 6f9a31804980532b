"""What a layer keeps besides its input is not computed again, and changes no bit."""

import pytest
import torch
from torch import nn

from planish.memory.far_disk import disk_tier
from planish.memory.far_simulated import dry_tier
from planish.memory.recall import current
from planish.peaks.boundary.store import BoundaryStore
from planish.price.boundary import Boundaries, Depth, slot_bytes

ROWS, LENGTH, WIDTH, NUM = 3, 5, 16, 6
OUT_BYTES, SUM_BYTES = ROWS * LENGTH * WIDTH * 4, ROWS * LENGTH * 4


class Dear(torch.autograd.Function):
    """Softmax of two, with its normaliser kept for backward: attention's shape of the problem in small."""

    computed = 0

    @staticmethod
    def forward(ctx, value):
        recall = current()
        kept = recall.again() if recall else None
        if kept is None:
            Dear.computed += 1
            lse = value.logsumexp(-1)
            out = (value - lse.unsqueeze(-1)).exp()
            if recall:
                recall.keep(out, lse)
        else:
            out, lse = kept
        ctx.save_for_backward(value, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad):
        value, out, lse = ctx.saved_tensors
        assert torch.equal(out, (value - lse.unsqueeze(-1)).exp())
        return out * (grad - (grad * out).sum(-1, keepdim=True))


class DearLayer(nn.Module):
    def __init__(self, times):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.times = times

    def forward(self, hidden, mask):
        for _ in range(self.times):
            hidden = hidden + torch.nn.functional.dropout(Dear.apply(self.up(hidden)), 0.2) * mask
        return hidden


@pytest.fixture
def layers(stack):
    def make(times=1):
        model = stack(NUM)
        model.layers = nn.ModuleList(DearLayer(times) for _ in range(NUM))
        return model

    return make


@pytest.fixture
def keeping(tmp_path):
    stores = []

    def make(kept_bytes=(OUT_BYTES, SUM_BYTES), num_slots=NUM):
        capacity = num_slots * (slot_bytes(OUT_BYTES) + sum(map(slot_bytes, kept_bytes)))
        plan = Boundaries(num_boundaries=NUM, num_slots=num_slots)
        tier = disk_tier(tmp_path, capacity)
        depth = Depth(num_boundaries=NUM, boundary_bytes=OUT_BYTES, kept_bytes=kept_bytes)
        stores.append(BoundaryStore(plan, depth=depth, tiers=[tier]))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


def step(model, checkpoints, *, backwards=1):
    torch.manual_seed(3)
    Dear.computed = 0
    model.zero_grad(set_to_none=True)
    loss = model(model.tokens(), checkpoints)
    for left in reversed(range(backwards)):
        loss.backward(retain_graph=left > 0)
    return [loss.detach(), *(each.grad.clone() for each in model.parameters())], Dear.computed


def equal(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("backwards", [1, 2])
def test_each_layer_that_goes_computes_once(layers, keeping, kind, backwards):
    model, store = layers(), keeping()
    expected, computed = step(model, [kind] * NUM, backwards=backwards)
    assert computed == NUM * (1 + backwards)
    for _ in range(2):
        ours, computed = step(model, [store.checkpoint(index, kind) for index in range(NUM)], backwards=backwards)
        assert equal(ours, expected)
        assert computed == NUM + backwards  # the last layer stays, and computes again
        assert store.slots_in_use == 0
    assert store.tiers[0].written_bytes == 2 * (NUM - 1) * (2 * OUT_BYTES + SUM_BYTES)


def test_what_has_no_slot_is_computed_again(layers, keeping, kind):
    model = layers(times=2)
    expected, _ = step(model, [kind] * NUM)
    for kept_bytes, saved in (((), 0), ((OUT_BYTES, SUM_BYTES), 1), ((OUT_BYTES - 4, SUM_BYTES), 0)):
        store = keeping(kept_bytes)
        ours, computed = step(model, [store.checkpoint(index, kind) for index in range(NUM)])
        assert equal(ours, expected)
        assert computed == 2 * 2 * NUM - saved * (NUM - 1)


def test_two_computations_with_slots_for_both(layers, keeping, kind):
    model, store = layers(times=2), keeping((OUT_BYTES, SUM_BYTES) * 2, num_slots=3)
    expected, _ = step(model, [kind] * NUM)
    ours, computed = step(model, [store.checkpoint(index, kind) for index in range(NUM)])
    assert equal(ours, expected)
    assert computed == 2 * 2 * NUM - 2 * 3


def test_outside_of_layers_nothing_is_remembered(layers, keeping):
    store = keeping()
    assert current() is None
    seen = []
    hidden = torch.ones(ROWS, LENGTH, WIDTH, requires_grad=True)
    out = store.checkpoint(0)(lambda x: seen.append(current()) or x.exp(), hidden)
    store.checkpoint(NUM - 1)(lambda x: seen.append(current()) or x.exp(), hidden)
    assert [each is not None for each in seen] == [True, False]
    assert current() is None
    out.sum().backward()
    assert type(seen[0]) is not type(seen[2])
    assert current() is None


def test_slots_hold_a_boundary_with_all_that_travels_with_it():
    depth = Depth(num_boundaries=9, boundary_bytes=100, kept_bytes=(5000,))
    assert depth.slot_bytes == 3 * 4096
    tier = dry_tier("disk", 10 * 4096)
    store = BoundaryStore(Boundaries(num_boundaries=9, num_slots=3), depth=depth, tiers=[tier])
    assert [pool.num_slots for pool in store._racks[0].pools] == [3, 3]
    assert tier.slab.used_bytes == 3 * 3 * 4096
