"""Claim: over ranks, an MoE layer holds the same bytes whatever the router does, and skew no longer costs its time.

Four gloo processes. *plain*: expert parallelism as it is commonly written: each route a row, sent to its expert's owner
by counts, a loop over experts under autograd, rows back. *levelled*: the same with least-loaded experts (LLEP), whose
plan and borrowed weights are ours and whose rows all come at once. *planish*: `spread_experts`.

`memory`: bytes beside the operands by the ledger, forward and backward, the most of any rank, for the published
profiles; then the published shape of 65,536 tokens scaled down so that weights, resident rows and routed rows keep
their proportions (width, inner width and tokens over 32; 128 experts, 8 a token), operands included, with all experts
resident as in the paper's harness and with a rank's own; what is saved is of *levelled*, and of LLEP's published
peak over 1,024. That peak is the weights, 8.5 rows a token and what is in flight, in both passes: it has no room for
the weights' gradients. `without weights' gradients` is the same sum, experts frozen. `time`: wall seconds of both
passes, the slowest rank.
"""

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from harness import spread, write_result
from planish.memory.ledger import Ledger
from planish.peaks.dispatch.experts import Weights
from planish.peaks.dispatch.gates import Glu
from planish.peaks.dispatch.least_loaded import Balance, native_bounds
from planish.peaks.dispatch.pipelined import Options
from planish.peaks.dispatch.profiles import ONE_EXPERT, PUBLISHED, Profile
from planish.peaks.dispatch.spread import spread_experts
from planish.peaks.dispatch.trip import Ranks, Trip, plan_trip

SEED = 0
GATE = Glu(activation="silu")
PROFILES = (*PUBLISHED, ONE_EXPERT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One layer over ranks: tokens are of each rank, `block_rows` and `tile_rows` are planish's."""

    num_ranks: int
    tokens: int
    num_experts: int
    top_k: int
    hidden_size: int
    width: int
    block_rows: int
    tile_rows: int
    min_routes: int = 64
    dtype: torch.dtype = torch.float32


STRESS = Shape(
    num_ranks=4, tokens=1024, num_experts=32, top_k=4, hidden_size=128, width=128, block_rows=1024, tile_rows=128
)
SCALED = Shape(
    num_ranks=4, tokens=2048, num_experts=128, top_k=8, hidden_size=224, width=64, block_rows=820, tile_rows=64,
    dtype=torch.bfloat16,
)  # fmt: skip
PUBLISHED_BYTES = int(52.660 * 2**20)  # LLEP's peak in the paper (table 6), GiB there
TIMED = Shape(
    num_ranks=4, tokens=2048, num_experts=32, top_k=4, hidden_size=512, width=1024, block_rows=4096, tile_rows=512
)
SMALL = Shape(
    num_ranks=4, tokens=128, num_experts=32, top_k=4, hidden_size=512, width=1024, block_rows=512, tile_rows=512
)


class _Swap(torch.autograd.Function):
    """An all-to-all of rows whose gradient is the one back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, received: list[int], sent: list[int]) -> Tensor:
        ctx.sizes = sent, received
        out = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), received, sent)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        received, sent = ctx.sizes
        return _Swap.apply(grad, received, sent), None, None


def by_counts(
    hidden: Tensor, ids: Tensor, scores: Tensor, up: list[Tensor], down: list[Tensor], holder: Tensor, here: list[int]
) -> Tensor:
    """Return the layer with each route sent as one row to its `holder`, where `here` are the experts of this rank."""
    size, top_k = dist.get_world_size(), ids.shape[1]
    flat, ranks = ids.flatten(), holder.flatten()
    order = (ranks * (flat.max() + 1) + flat).argsort(stable=True)
    counts = torch.bincount(ranks, minlength=size)
    coming = torch.empty_like(counts)
    dist.all_to_all_single(coming, counts)
    sent, received = counts.tolist(), coming.tolist()
    rows = _Swap.apply(hidden[order // top_k], received, sent)
    expert = torch.empty(sum(received), dtype=torch.int64)
    dist.all_to_all_single(expert, flat[order].contiguous(), received, sent)
    place = expert.argsort(stable=True)
    ends = torch.searchsorted(expert[place], torch.tensor(here), right=True).tolist()
    begins = torch.searchsorted(expert[place], torch.tensor(here)).tolist()
    parts = []
    for index in sorted(range(len(here)), key=here.__getitem__):
        left, right = F.linear(rows[place[begins[index] : ends[index]]], up[index]).chunk(2, -1)
        parts.append(F.linear(F.silu(left) * right, down[index]))
    made = torch.cat(parts)[place.argsort()]
    back = _Swap.apply(made, sent, received)
    weighted = back[order.argsort()].view(*ids.shape, -1) * scores.unsqueeze(-1)
    return weighted.sum(1)


def borrow(trip: Trip, weight: Tensor, ranks: Ranks) -> Tensor:
    """Return a rank's own experts and those that it borrows, under autograd."""
    size, me, bounds = ranks.size, ranks.rank, ranks.bounds
    wanted = [
        [expert for expert in trip.foreign[helper] if bounds[me] <= expert < bounds[me + 1]] for helper in range(size)
    ]
    lent = [expert - bounds[me] for experts in wanted for expert in experts]
    received = [
        sum(bounds[owner] <= expert < bounds[owner + 1] for expert in trip.foreign[me]) for owner in range(size)
    ]
    copies = weight[torch.tensor(lent, dtype=torch.int64)]
    return torch.cat([weight, _Swap.apply(copies, received, [len(each) for each in wanted])])


def draw(shape: Shape, profile: Profile, rank: int) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return this rank's leaves (hidden, scores, up, down), its ids and its upstream gradient."""
    generator = torch.Generator().manual_seed(SEED + rank)
    bounds = native_bounds(shape.num_experts, shape.num_ranks)
    mine = bounds[rank + 1] - bounds[rank]
    top_k = 1 if profile is ONE_EXPERT else shape.top_k
    ids = profile.ids(shape.tokens, num_experts=shape.num_experts, top_k=top_k)
    D, W = shape.hidden_size, shape.width
    shapes = [(shape.tokens, D), (shape.tokens, top_k), (mine, 2 * W, D), (mine, D, W)]
    leaves = [(torch.randn(each, generator=generator) * each[-1] ** -0.5).to(shape.dtype) for each in shapes]
    upstream = torch.randn(shape.tokens, D, generator=generator).to(shape.dtype)
    return [each.requires_grad_() for each in leaves], ids, upstream


def ways(shape: Shape, ids: Tensor) -> dict[str, Callable[..., Tensor]]:
    """Return the three ways, as functions of the leaves."""
    group, rank = dist.group.WORLD, dist.get_rank()
    loads: list[int] = []
    options = Options(
        gate=GATE, tile_rows=shape.tile_rows, block_rows=shape.block_rows, seen=lambda load: loads.append(load.blocks)
    )

    def ranks(block_rows: int) -> Ranks:
        return Ranks(
            group=group,
            num_experts=shape.num_experts,
            max_tokens=shape.tokens,
            block_rows=block_rows,
            balance=Balance(min_routes=shape.min_routes),
        )

    bounds = ranks(shape.block_rows).bounds
    native = list(range(bounds[rank], bounds[rank + 1]))

    def plain(hidden: Tensor, scores: Tensor, up: Tensor, down: Tensor) -> Tensor:
        owner = torch.searchsorted(torch.tensor(bounds), ids, right=True) - 1
        return by_counts(hidden, ids, scores, up.unbind(0), down.unbind(0), owner, native)

    def levelled(hidden: Tensor, scores: Tensor, up: Tensor, down: Tensor) -> Tensor:
        whole = ranks(shape.num_ranks * shape.tokens)
        trip, _ = plan_trip(ids, whole)
        holder = (trip.codes // shape.num_experts).long()
        here = [*native, *trip.foreign[rank]]
        up, down = (borrow(trip, each, whole) for each in (up, down))
        return by_counts(hidden, ids, scores, up.unbind(0), down.unbind(0), holder, here)

    def planish(hidden: Tensor, scores: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return spread_experts(hidden, ids, scores, Weights(up=up, down=down), options, ranks(shape.block_rows))

    planish.blocks = loads
    return {"plain": plain, "levelled": levelled, "planish": planish}


def memory(rank: int, shape: Shape, profile: Profile, frozen: bool = False) -> dict[str, dict[str, int]]:
    """Return each way's forward and backward peaks beside the operands, and the bytes of those."""
    leaves, ids, upstream = draw(shape, profile, rank)
    for weight in leaves[2:]:
        weight.requires_grad_(not frozen)
    wanted = [each for each in leaves if each.requires_grad]
    found = {}
    for name, run in ways(shape, ids).items():
        with Ledger() as ledger:
            with ledger.phase("forward"):
                result = run(*leaves)
            _settle()
            with ledger.phase("backward"):
                grads = torch.autograd.grad(result, wanted, upstream)
            del result, grads
        peaks = {phase: ledger.peak_bytes[phase] for phase in ("forward", "backward")}
        found[name] = peaks | {
            "rows": leaves[0].nbytes + leaves[1].nbytes + ids.nbytes,
            "weights": leaves[2].nbytes + leaves[3].nbytes,
        }
        _settle()
    return found


def _settle() -> None:
    """Give gloo's threads, which let go late of what they have sent, the time for it."""
    time.sleep(0.2)
    dist.barrier()


def seconds(rank: int, shape: Shape, profile: Profile, rounds: int) -> dict[str, Any]:
    """Return each way's wall seconds of forward and backward, a number a round, from a barrier on."""
    leaves, ids, upstream = draw(shape, profile, rank)
    every = ways(shape, ids)
    taken: dict[str, list[float]] = {name: [] for name in every}
    for number in range(rounds + 1):
        names = list(every)
        for name in reversed(names) if number % 2 else names:
            dist.barrier()
            begun = time.perf_counter()
            torch.autograd.grad(every[name](*leaves), leaves, upstream)
            if number:
                taken[name].append(time.perf_counter() - begun)
    return taken | {"blocks": every["planish"].blocks[0]}


def _serve(rank: int, size: int, meeting: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=size, timeout=timedelta(seconds=300)
    )
    while (asked := pipe.recv()) is not None:
        work, *arguments = asked
        pipe.send(work(rank, *arguments))


class Processes:
    """Ranks that live as long as this."""

    def __init__(self, size: int, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        ends = [context.Pipe() for _ in range(size)]
        self._pipes = [mine for mine, _ in ends]
        self._processes = [
            context.Process(target=_serve, args=(rank, size, str(folder / f"meeting-{size}"), theirs), daemon=True)
            for rank, (_, theirs) in enumerate(ends)
        ]
        for each in self._processes:
            each.start()

    def ask(self, work: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return what `work(rank, *arguments)` returns on each rank."""
        for pipe in self._pipes:
            pipe.send((work, *arguments))
        return [pipe.recv() for pipe in self._pipes]

    def close(self) -> None:
        """End them."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.send(None)
            process.join(10)
            process.kill()


def worst(answers: list[dict[str, dict[str, int]]]) -> dict[str, dict[str, int]]:
    """Return the most of any rank."""
    return {way: {what: max(each[way][what] for each in answers) for what in answers[0][way]} for way in answers[0]}


def measure_memory(processes: Processes) -> dict[str, Any]:
    """Return the peaks of every profile, and those of the scaled shape with what is saved of the levelled way's."""
    figures: dict[str, Any] = {"profiles": {}, "scaled": {}}
    for profile in PROFILES:
        found = figures["profiles"][profile.name] = worst(processes.ask(memory, STRESS, profile))
        print(f"{profile.name:9s}", *(f"{way} {_mib(peaks)}" for way, peaks in found.items()))
    same_top_k = [each for each in PROFILES if each is not ONE_EXPERT]
    for phase in ("forward", "backward"):
        for way in ("plain", "levelled", "planish"):
            sizes = [figures["profiles"][each.name][way][phase] for each in same_top_k]
            print(f"{phase:9s} {way:9s} most / least of the published profiles {max(sizes) / min(sizes):.4f}")
    for profile in (Profile(), Profile(percent=80, hot=16), Profile(percent=95, hot=16), Profile(percent=50, hot=4)):
        found = worst(processes.ask(memory, SCALED, profile))
        frozen = worst(processes.ask(memory, SCALED, profile, True))
        saved = {}
        for resident, copies in (("all experts", SCALED.num_ranks), ("own experts", 1)):
            for passes, phases, bytes_of in (
                ("forward", ["forward"], found),
                ("both passes", ["forward", "backward"], found),
                ("both passes without weights' gradients", ["forward", "backward"], frozen),
            ):
                peaks = {
                    way: max(each[phase] for phase in phases) + each["rows"] + copies * each["weights"]
                    for way, each in bytes_of.items()
                }
                saved[f"{resident}, {passes}"] = 1 - peaks["planish"] / peaks["levelled"]
                if copies > 1:
                    saved[f"{resident}, {passes}, of the published"] = 1 - peaks["planish"] / PUBLISHED_BYTES
        figures["scaled"][profile.name] = {"bytes": found, "bytes, frozen": frozen, "saved": saved}
        print(f"{profile.name:9s}", *(f"{way} {_mib(peaks)}" for way, peaks in found.items()))
        print(f"{'saved':>9s}", *(f"{name}: {share:.1%};" for name, share in saved.items()))
    return figures


def _mib(peaks: dict[str, int]) -> str:
    return f"{peaks['forward'] / 2**20:.2f} + {peaks['backward'] / 2**20:.2f} MiB"


def measure_time(processes: Processes, rounds: int) -> dict[str, Any]:
    """Return the seconds of every way and profile, the slowest rank of each round."""
    figures: dict[str, Any] = {}
    cases = [("2048", TIMED, each) for each in PROFILES] + [("128", SMALL, PROFILES[0])]
    for tokens, shape, profile in cases:
        answers = processes.ask(seconds, shape, profile, rounds)
        case = figures[f"{tokens} {profile.name}"] = {
            way: spread(tuple(max(times) for times in zip(*(each[way] for each in answers), strict=True)))
            for way in ("plain", "levelled", "planish")
        }
        case["blocks"] = answers[0]["blocks"]
        shown = " ".join(f"{way} {case[way]['median']:.3f} s" for way in ("plain", "levelled", "planish"))
        gain = case["plain"]["median"] / case["planish"]["median"]
        print(f"{tokens:>5s} {profile.name:9s} {shown}, {case['blocks']} blocks, {gain:.2f} x plain")
    return figures


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", nargs="*", choices=["memory", "time"], default=["memory", "time"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dry", action="store_true", help="write no result")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        processes = Processes(4, Path(folder))
        for part in options.part:
            figures = measure_memory(processes) if part == "memory" else measure_time(processes, options.rounds)
            if not options.dry:
                print(write_result(f"dispatch_ranks_{part}", figures, seed=SEED))
        processes.close()


if __name__ == "__main__":
    main()
