"""What each rank does in the tests of the ring; all draw the same problem and keep their part of it."""

from datetime import timedelta
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from planish.comm.ring import Circle
from planish.memory.ledger import Ledger
from planish.peaks.vocab import ring_modes
from planish.peaks.vocab.lookup import shared_embedding
from planish.peaks.vocab.plain import plain_cross_entropy
from planish.peaks.vocab.ring import ring_linear_cross_entropy
from planish.peaks.vocab.shard import shard_ranges


def draw(tokens, *, vocab, width, bias=False, ignored="some", dtype=torch.float64, scale=1.0, seed=0, replicated=False):
    """Return each rank's (hidden, target), and weight and bias of the whole vocabulary."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype)

    weight, biases = normal(vocab, width), normal(vocab) if bias else None
    batches = []
    for rank, count in enumerate(tokens):
        target = torch.randint(0, vocab, (count,), generator=generator)
        if ignored == "some":
            target[torch.rand(count, generator=generator) < 0.3] = -100
        elif ignored == "all" or ignored == rank:
            target[:] = -100
        batches.append((normal(count, width), target))
    return [batches[0]] * len(tokens) if replicated else batches, weight, biases


def own_part(group, tokens, *, frozen=(), **problem):
    """Return this rank's leaves by name, and its targets."""
    batches, weight, bias = draw(tokens, **problem)
    mine = shard_ranges(len(weight), group.size())[group.rank()]
    hidden, target = batches[group.rank()]
    leaves = {"hidden": hidden, "weight": weight[mine]} | ({} if bias is None else {"bias": bias[mine]})
    return {name: each.clone().requires_grad_(name not in frozen) for name, each in leaves.items()}, target


def loss(group, *, tokens, mode="auto", upstream=1.0, settings=None, **problem):
    """Return this rank's loss and gradients, None where a leaf is frozen."""
    leaves, target = own_part(group, tokens, **problem)
    found = ring_linear_cross_entropy(
        leaves["hidden"],
        leaves["weight"],
        target,
        bias=leaves.get("bias"),
        group=group,
        mode=mode,
        vocab_size=problem["vocab"],
        **(settings or {}),
    )
    wanted = [name for name, each in leaves.items() if each.requires_grad]
    total = found if found.dim() == 0 else (found * torch.arange(1, 1 + len(found))).sum()
    grads = torch.autograd.grad(upstream * total, [leaves[name] for name in wanted]) if wanted else ()
    return _plain(found), {name: _plain(each) for name, each in zip(wanted, grads, strict=True)}


def _plain(tensor):
    """Return what a pipe takes without sharing memory."""
    return (tensor.detach().float() if tensor.dtype == torch.bfloat16 else tensor.detach()).numpy()


def lse(group, *, tokens, mode, tile_bytes, **problem):
    """Return the lse of this rank's tokens: the slope of a loss that is nothing but z-loss."""
    leaves, target = own_part(group, tokens, frozen=("hidden", "weight"), **problem)
    plain, more = (
        ring_linear_cross_entropy(
            leaves["hidden"], leaves["weight"], target, group=group, mode=mode, tile_bytes=tile_bytes,
            reduction="none", label_smoothing=1.0, z_loss=each,
        )
        for each in (0.0, 1.0)
    )  # fmt: skip
    return _plain(torch.stack([plain, more]))


def mistake(group, *, change, mode="weights", vocab_size=50):
    """Return what this rank raises where rank 1 makes a mistake."""
    change = dict(change) if group.rank() == 1 else {}
    leaves, target = own_part(
        group, [5, 5, 5][: group.size()], vocab=50, width=change.get("width", 6), frozen=change.get("frozen", ()),
        ignored="none",
    )  # fmt: skip
    weight = leaves["weight"]
    if "rows" in change:
        weight = weight.detach().new_zeros(change["rows"], 6).requires_grad_()
    if "shape" in change:
        weight = weight.detach().new_zeros(change["shape"])
    if "target" in change:
        target[2] = change["target"]
    settings = change.get("settings", {}) | {name: change[name] for name in ("num_valid",) if name in change}
    hidden = leaves["hidden"].detach().to(change["dtype"]) if "dtype" in change else leaves["hidden"]
    try:
        ring_linear_cross_entropy(
            hidden, weight, target, group=group, mode=change.get("mode", mode), vocab_size=vocab_size, **settings
        )
    except (TypeError, ValueError) as error:
        return type(error).__name__, str(error)


def raise_inside(group, *, mode, phase, leaves):
    """Return what ends this rank's pass when rank 1 runs out of memory in it, and `leaves` the group, or stays."""
    brief = dist.new_group(dist.get_process_group_ranks(group), timeout=timedelta(seconds=10))
    operands, target = own_part(group, [9, 9, 9, 9], vocab=50, width=6)
    broken = ring_modes.scan if phase == "forward" else ring_modes.derive

    def fail(*_, **__):
        raise MemoryError("no room")

    def run(where):
        with patch.object(ring_modes, broken.__name__, fail if group.rank() == 1 and phase == where else broken):
            if where == "forward":
                return ring_linear_cross_entropy(operands["hidden"], operands["weight"], target, group=brief, mode=mode)
            return loss.backward()

    try:
        loss = run("forward")
        run("backward")
    except (RuntimeError, MemoryError) as error:
        if leaves:
            dist.destroy_process_group(brief)
        return f"{type(error).__name__}: {error}"


def sharded_parameter(group, *, tokens, mode, **problem):
    """Return loss and whole gradient of a parameter that a mesh shards by rows, and the gradient of hidden."""
    leaves, target = own_part(group, tokens, **problem)
    mesh = DeviceMesh.from_group(group, "cpu")
    whole = draw(tokens, **problem)[1]
    weight = torch.nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
    loss = ring_linear_cross_entropy(leaves["hidden"], weight, target, group=group, mode=mode)
    loss.backward()
    assert isinstance(weight.grad, DTensor)
    assert weight.grad.placements == (Shard(0),)
    return _plain(loss), _plain(weight.grad.full_tensor()), _plain(leaves["hidden"].grad)


def other_placement(group, *, placement):
    """Return why a weight that is not cut by rows is refused."""
    mesh = DeviceMesh.from_group(group, "cpu")
    weight = distribute_tensor(torch.zeros(8, 6), mesh, [Shard(1) if placement == "columns" else Replicate()])
    try:
        ring_linear_cross_entropy(torch.zeros(2, 6), weight, torch.zeros(2, dtype=torch.int64), group=group)
    except ValueError as error:
        return str(error)


def under_autocast(group):
    """Return the loss under bf16 autocast, the exact one, and whether it has a graph."""
    problem = {"vocab": 50, "width": 8, "dtype": torch.float32}
    leaves, target = own_part(group, [20, 30], **problem)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        loss = ring_linear_cross_entropy(leaves["hidden"], leaves["weight"], target, group=group)
    batches, weight, _ = draw([20, 30], **problem)
    num_valid = sum(int((each != -100).sum()) for _, each in batches)
    exact = plain_cross_entropy(leaves["hidden"], weight, target, reduction="sum") / num_valid
    return loss.item(), exact.item(), loss.requires_grad


class Traffic:
    """Counts what this rank gives to torch.distributed for others, by pass."""

    def __init__(self, rank):
        self.rank, self.sent_bytes = rank, 0
        self._hop, self._swap = dist.batch_isend_irecv, dist.all_to_all_single

    def __enter__(self):
        self._patches = [
            patch.object(dist, "batch_isend_irecv", self._count_hop),
            patch.object(dist, "all_to_all_single", self._count_swap),
        ]
        for each in self._patches:
            each.start()
        return self

    def __exit__(self, *_):
        for each in self._patches:
            each.stop()

    def take(self):
        sent, self.sent_bytes = self.sent_bytes, 0
        return sent

    def _count_hop(self, hops):
        self.sent_bytes += sum(each.tensor.nbytes for each in hops if each.op is dist.isend)
        return self._hop(hops)

    def _count_swap(self, into, out, received, sent, **how):
        self.sent_bytes += (sum(sent) - sent[self.rank]) * out.itemsize
        return self._swap(into, out, received, sent, **how)


def bytes_of(group, *, tokens, mode, tile_bytes, **problem):
    """Return this rank's peaks (forward, backward), and the bytes that it sent in each pass."""
    leaves, target = own_part(group, tokens, **problem)
    with Traffic(group.rank()) as traffic, Ledger() as ledger:
        with ledger.phase("forward"):
            loss = ring_linear_cross_entropy(
                leaves["hidden"], leaves["weight"], target, bias=leaves.get("bias"), group=group, mode=mode,
                reduction="sum", tile_bytes=tile_bytes,
            )  # fmt: skip
        forward = traffic.take()
        with ledger.phase("backward"):
            loss.backward()
    return ledger.peak_bytes["forward"], ledger.peak_bytes["backward"], forward, traffic.take()


def draw_ids(tokens, vocab):
    """Return each rank's ids, the weight, and upstream gradients."""
    generator = torch.Generator().manual_seed(0)
    odds = torch.arange(1, 1 + vocab).double() ** -1.0
    ids = [torch.multinomial(odds.expand(1, -1), count, replacement=True, generator=generator)[0] if count else
           torch.zeros(0, dtype=torch.int64) for count in tokens]  # fmt: skip
    weight, *upstream = (torch.randn(count, 6, generator=generator, dtype=torch.float64) for count in (vocab, *tokens))
    return ids, weight, upstream


def look_up(group, *, tokens, vocab, padding_idx, block, wrong=None):
    """Return the rows of this rank's ids and the gradient of its shard, or what is refused."""
    ids, weight, upstream = draw_ids(tokens, vocab)
    own = ids[group.rank()]
    if wrong is not None and group.rank() == 1:
        own[2] = wrong
    shard = weight[shard_ranges(vocab, group.size())[group.rank()]].clone().requires_grad_()
    tile_bytes = 2**20 if block is None else block * (group.size() + 1) * 6 * 16
    try:
        rows = shared_embedding(
            own, shard, circle=Circle.of(group), vocab_size=vocab, padding_idx=padding_idx, tile_bytes=tile_bytes
        )
    except ValueError as error:
        return str(error)
    (grad,) = torch.autograd.grad(rows, shard, upstream[group.rank()])
    return _plain(rows), _plain(grad)
