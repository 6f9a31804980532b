"""What each rank does in the tests of distillation over ranks; all draw the same problem and keep their part of it."""

from unittest.mock import patch

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from planish import linear_kl, linear_logprob, linear_topk_kl
from planish.comm.ring import Circle
from planish.memory.ledger import Ledger
from planish.peaks.vocab.shard import shard_ranges

WIDTHS = {"": 6, "teacher_": 9}


def draw(tokens, *, vocab, bias=False, ignored=0.3, dtype=torch.float64, scale=1.0, seed=0):
    """Return each rank's hidden states by side and targets, and the heads of the whole vocabulary by name."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype)

    heads = {f"{side}weight": normal(vocab, width) for side, width in WIDTHS.items()}
    if bias:
        heads |= {f"{side}bias": normal(vocab) for side in WIDTHS}
    batches = []
    for count in tokens:
        target = torch.randint(0, vocab, (count,), generator=generator)
        target[torch.rand(count, generator=generator) < ignored] = -100
        batches.append(({f"{side}hidden": normal(count, width) for side, width in WIDTHS.items()}, target))
    return batches, heads


def own_part(group, tokens, *, frozen=(), **problem):
    """Return this rank's leaves by name, and its targets."""
    batches, heads = draw(tokens, **problem)
    mine = shard_ranges(problem["vocab"], group.size())[group.rank()]
    hidden, target = batches[group.rank()]
    leaves = hidden | {name: each[mine] for name, each in heads.items()}
    return {name: each.clone().requires_grad_(name not in frozen) for name, each in leaves.items()}, target


def run(group, leaves, target, **settings):
    return linear_kl(
        leaves["hidden"], leaves["weight"], leaves["teacher_hidden"], leaves["teacher_weight"], target,
        bias=leaves.get("bias"), teacher_bias=leaves.get("teacher_bias"), group=group, **settings,
    )  # fmt: skip


def plain(tensor):
    """Return what a pipe takes without sharing memory."""
    return (tensor.detach().float() if tensor.dtype == torch.bfloat16 else tensor.detach()).numpy()


def loss(group, *, tokens, settings, **problem):
    """Return this rank's loss and gradients by name."""
    leaves, target = own_part(group, tokens, **problem)
    found = run(group, leaves, target, **settings)
    wanted = [name for name, each in leaves.items() if each.requires_grad]
    total = found if found.dim() == 0 else (found * torch.arange(1, 1 + len(found))).sum()
    grads = torch.autograd.grad(total, [leaves[name] for name in wanted]) if wanted else ()
    return plain(found), {name: plain(each) for name, each in zip(wanted, grads, strict=True)}


def equal_heads(group, *, tokens, divergence, dtype):
    """Return each token's divergence of a head from itself."""
    leaves, target = own_part(group, tokens, vocab=3000, bias=True, dtype=dtype)
    same = leaves | {f"teacher_{name}": leaves[name] for name in ("hidden", "weight", "bias")}
    return plain(run(group, same, target, divergence=divergence, reduction="none", tile_bytes=2**18))


def mistake(group, *, change):
    """Return what this rank raises where rank 1 makes a mistake."""
    leaves, target = own_part(group, [5] * group.size(), vocab=50, ignored=0.0)
    settings = {"divergence": "forward"}
    if group.rank() == 1:
        settings |= change.get("settings", {})
        if "rows" in change:
            leaves["teacher_weight"] = leaves["teacher_weight"].detach()[: change["rows"]].requires_grad_()
        if "frozen" in change:
            leaves[change["frozen"]].requires_grad_(requires_grad=False)
        if "target" in change:
            target[2] = change["target"]
    try:
        run(group, leaves, target, **settings)
    except (TypeError, ValueError) as error:
        return type(error).__name__, str(error)


def sharded_parameter(group, *, tokens, **problem):
    """Return the whole gradients of two parameters that a mesh shards by rows."""
    leaves, target = own_part(group, tokens, **problem)
    mesh, (_, heads) = DeviceMesh.from_group(group, "cpu"), draw(tokens, **problem)
    for name in ("weight", "teacher_weight"):
        leaves[name] = torch.nn.Parameter(distribute_tensor(heads[name], mesh, [Shard(0)]))
    run(group, leaves, target, reduction="sum").backward()
    grads = {name: leaves[name].grad for name in ("weight", "teacher_weight")}
    assert all(isinstance(each, DTensor) and each.placements == (Shard(0),) for each in grads.values())
    return {name: plain(each.full_tensor()) for name, each in grads.items()}


def weigh(group, *, tokens, settings, **problem):
    """Return the bytes that forward and backward add at most, and what every rank sends in hops."""
    leaves, target = own_part(group, tokens, **problem)
    sent, hop = [], Circle.hop

    def count(circle, out, into):
        sent.append(sum(each.nbytes for each in out))
        return hop(circle, out, into)

    with patch.object(Circle, "hop", count), Ledger() as ledger:
        ledger.adopt([*leaves.values(), target], "other")
        before = ledger.live_bytes
        with ledger.phase("head"):
            found = run(group, leaves, target, reduction="sum", **settings)
        forward = sum(sent)
        with ledger.phase("backward"):
            found.backward()
    peaks = (ledger.peak_bytes["head"] - before, ledger.peak_bytes["backward"] - before)
    return peaks, (forward, sum(sent) - forward)


def best(leaves, target, count):
    """Return a drawn teacher's best classes and their log-probabilities, [T, K]; none of tokens that are ignored."""
    generator = torch.Generator().manual_seed(len(target))
    logits = torch.randn(len(target), leaves["vocab"], generator=generator, dtype=torch.float64)
    found = logits.log_softmax(-1).topk(count)
    classes = found.indices.masked_fill((target == -100).unsqueeze(1), -100)
    if len(classes) > 1:
        classes[1, 1:] = -100
    return classes, found.values


def topk(group, *, tokens, count, settings, **problem):
    """Return this rank's loss from a teacher's best classes, and gradients by name."""
    leaves, target = own_part(group, tokens, **problem)
    classes, logprobs = best(problem, target, count)
    found = linear_topk_kl(
        leaves["hidden"], leaves["weight"], classes, logprobs, bias=leaves.get("bias"), group=group, **settings
    )
    wanted = [name for name in ("hidden", "weight", "bias") if name in leaves]
    grads = torch.autograd.grad(found, [leaves[name] for name in wanted])
    return plain(found), {name: plain(each) for name, each in zip(wanted, grads, strict=True)}


def logprob(group, *, tokens, settings, **problem):
    """Return this rank's nll and lse, and the gradients of a sum of both."""
    leaves, target = own_part(group, tokens, **problem)
    found = linear_logprob(leaves["hidden"], leaves["weight"], target, group=group, want=("nll", "lse"), **settings)
    total = (found.nll * torch.arange(1, 1 + len(target)) + 0.5 * found.lse.square()).sum()
    grads = torch.autograd.grad(total, [leaves["hidden"], leaves["weight"]])
    return plain(found.nll), plain(found.lse), *map(plain, grads)
