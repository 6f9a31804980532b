"""What each rank does in the tests of experts over ranks; all draw the same problem and keep their part of it."""

import time

import torch
import torch.distributed as dist

from planish.memory.ledger import Ledger
from planish.peaks.dispatch.experts import Weights
from planish.peaks.dispatch.gates import Glu
from planish.peaks.dispatch.least_loaded import Balance, native_bounds
from planish.peaks.dispatch.pipelined import Options, sizes_of
from planish.peaks.dispatch.profiles import Profile
from planish.peaks.dispatch.spread import spread_experts
from planish.peaks.dispatch.trip import Ranks
from planish.price.dispatch_ranks import rank_bytes

GATE = Glu(activation="silu")


def draw(tokens, *, num_experts, top_k, routing, hidden_size=4, width=6, dtype=torch.float64, seed=0):
    """Return per-rank (hidden, ids, scores, upstream), and up and down of all experts."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        drawn = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return (drawn * shape[-1] ** -0.5).to(dtype)

    up, down = normal(num_experts, 2 * width, hidden_size), normal(num_experts, hidden_size, width)
    parts = []
    for count in tokens:
        if routing == "drawn":
            ids = torch.rand(count, num_experts, generator=generator).argsort(1)[:, :top_k]
        elif routing == "uneven":
            odds = torch.arange(1, num_experts + 1).double() ** -2
            ids = torch.multinomial(odds.expand(max(count, 1), -1), top_k, generator=generator)[:count]
        else:
            percent, hot = routing
            ids = Profile(percent=percent, hot=hot).ids(count, num_experts=num_experts, top_k=top_k)
        scores = torch.rand(count, top_k, generator=generator, dtype=torch.float64).to(dtype)
        parts.append((normal(count, hidden_size), ids, scores, normal(count, hidden_size)))
    return parts, up, down


def own_part(group, tokens, **problem):
    """Return all experts, this rank's leaves (hidden, scores, up, down), its ids and its upstream gradient."""
    parts, up, down = draw(tokens, **problem)
    hidden, ids, scores, upstream = parts[group.rank()]
    bounds = native_bounds(len(up), group.size())
    mine = slice(bounds[group.rank()], bounds[group.rank() + 1])
    return up, [each.clone().requires_grad_() for each in (hidden, scores, up[mine], down[mine])], ids, upstream


def layer(group, *, tokens, block_rows, balance, tile_rows=5, steps=1, max_tokens=None, **problem):
    """Return this rank's (result, gradients, loads), after `steps` alike."""
    up, leaves, ids, upstream = own_part(group, tokens, **problem)
    ranks = Ranks(
        group=group,
        num_experts=len(up),
        max_tokens=max_tokens or max(tokens),
        block_rows=block_rows,
        balance=Balance(**balance),
    )
    loads = []
    options = Options(gate=GATE, tile_rows=tile_rows, block_rows=block_rows, seen=loads.append)
    for _ in range(steps):
        weights = Weights(up=leaves[2], down=leaves[3])
        result = spread_experts(leaves[0], ids, leaves[1], weights, options, ranks)
        grads = torch.autograd.grad(result, leaves, upstream)
    result, *found = [each.detach().double().numpy() for each in (result, *grads)]
    return result, found, [(each.max_over_mean, each.spilled, each.blocks) for each in loads]


def settled(ledger, expected=0):
    """Return the bytes alive, once gloo's threads have let go of what they carried."""
    for _ in range(100):
        if ledger.live_bytes <= expected:
            break
        time.sleep(0.01)
    return ledger.live_bytes


def peaks(group, *, tokens, block_rows, balance, **problem):
    """Return this rank's bytes (forward, kept, backward), their price, and what is alive after step two and four."""
    up, leaves, ids, upstream = own_part(group, tokens, **problem)
    ranks = Ranks(
        group=group,
        num_experts=len(up),
        max_tokens=max(tokens),
        block_rows=block_rows,
        balance=Balance(**balance),
    )
    options = Options(gate=GATE, tile_rows=16, block_rows=block_rows)
    weights = Weights(up=leaves[2], down=leaves[3])
    sizes = sizes_of(leaves[0], ids, leaves[1], weights, GATE)
    priced = rank_bytes(sizes, ranks.launch, len(ids), tile_rows=16)
    live = []
    with Ledger() as ledger:
        for _ in range(4):
            with ledger.phase("forward"):
                result = spread_experts(leaves[0], ids, leaves[1], weights, options, ranks)
            kept = settled(ledger, result.nbytes + priced.kept) - result.nbytes
            with ledger.phase("backward"):
                grads = torch.autograd.grad(result, leaves, upstream)
            del result, grads
            live.append(settled(ledger))
            dist.barrier(group)
    found = ledger.peak_bytes["forward"], kept, ledger.peak_bytes["backward"] - kept - upstream.nbytes
    return found, (priced.forward, priced.kept, priced.backward), live[1], live[3]
