"""Claim: a vocabulary over ranks saves more of the dense head's peak than published, and costs little more than one.

The paper's shape scaled down by 16 in tokens, width and classes (fp32): each of P ranks has N tokens of 448 numbers and
12,500 / P rows. Bytes by the ledger on live ranks, operands included; the dense head is one rank's own tokens by the
whole weight: logits, log-softmax, the target's log-probability, backward. Then: what is left beside operands and
gradients as N doubles; bytes given to torch.distributed in each mode beside their formula; CPU seconds of four ranks
together, taking turns with the same ranks each on its own tokens by the whole weight, which is the same work without a
hop, and with one process on the tokens of all four, all by tiles of as many bytes. The paper's own size is priced; on
these ranks the price is what the ledger measures.
"""

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from typing import Any, Self
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from harness import Times, write_result
from planish.memory.ledger import Ledger
from planish.peaks.vocab.losses import linear_cross_entropy
from planish.peaks.vocab.ring import ring_linear_cross_entropy
from planish.peaks.vocab.shard import shard_ranges
from planish.price.vocab import Head, choose_tiling, cross_entropy_phases
from planish.price.vocab_ring import Party, fewest_bytes, ring_phases, sent_bytes

SEED, SCALE = 0, 16
WIDTH, VOCAB = 7168 // SCALE, 200_000 // SCALE
TILE_BYTES = 8 * 2**20
PUBLISHED = {(4, 16_384): 0.729, (8, 16_384): 0.828, (8, 32_768): 0.866}
"""Share of the dense peak that is saved, by ranks and tokens of each (tables 2 and 10)."""
FULL_TILE_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Bytes of one rank at its worst moment.

    Attributes:
        peak_bytes: Operands, gradients and all.
        operand_bytes: Hidden states, rows of the weight, targets.
        gradient_bytes: Of hidden states and rows.
        above_bytes: The rest.
        priced_bytes: `peak_bytes` by arithmetic.
    """

    peak_bytes: int
    operand_bytes: int
    gradient_bytes: int
    priced_bytes: int

    @property
    def above_bytes(self) -> int:
        """Return what is neither operand nor gradient."""
        return self.peak_bytes - self.operand_bytes - self.gradient_bytes


def draw(tokens: int, rows: slice, *, seed: int = SEED) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, some rows of the weight, and targets."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows.stop - rows.start, WIDTH, generator=generator).mul_(WIDTH**-0.5).requires_grad_()
    hidden = torch.randn(tokens, WIDTH, generator=generator).requires_grad_()
    return hidden, weight, torch.randint(VOCAB, (tokens,), generator=generator)


def peak_of(operands: tuple[Tensor, Tensor, Tensor], step: Callable[[], Tensor], *, priced_bytes: int = 0) -> Peak:
    """Return the peak of one forward and backward, by the ledger."""
    held = sum(each.nbytes for each in operands)
    with Ledger() as ledger:
        step().backward()
    return Peak(
        peak_bytes=held + max(ledger.peak_bytes.values()),
        operand_bytes=held,
        gradient_bytes=sum(each.grad.nbytes for each in operands[:2]),
        priced_bytes=held + priced_bytes,
    )


def dense(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Return minus the summed log-probability of the targets, from logits and their log-softmax."""
    return -torch.log_softmax(hidden @ weight.t(), -1).gather(1, target.unsqueeze(1)).sum()


def party(rank: int, size: int, tokens: int, *, width: int = WIDTH, vocab: int = VOCAB) -> Party:
    """Return ranks that all have as many tokens."""
    rows = tuple(each.stop - each.start for each in shard_ranges(vocab, size))
    head = Head(tokens=tokens, hidden_size=width, vocab_size=rows[rank], wanted=frozenset({"lse"}))
    return Party(head=head, rank=rank, rows=rows, valid=(tokens,) * size)


class Traffic(AbstractContextManager):
    """Counts the bytes that this rank gives to torch.distributed for others.

    A collective counts as a ring of hops carries it; the whole numbers that ranks agree on before it do not count.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.sent_bytes, self._rank, self._size = 0, rank, size
        counters = {
            "batch_isend_irecv": self._hop_bytes,
            "all_to_all_single": self._swap_bytes,
            "all_gather_single": self._gather_bytes,
            "reduce_scatter_single": self._scatter_bytes,
            "all_reduce": self._sum_bytes,
        }
        self._patches = [
            patch.object(dist, name, self._counted(getattr(dist, name), count)) for name, count in counters.items()
        ]

    def __enter__(self) -> Self:
        for each in self._patches:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._patches:
            each.stop()

    def _counted(self, call: Callable[..., Any], count: Callable[..., int]) -> Callable[..., Any]:
        def counted(*given: Any, **how: Any) -> Any:
            self.sent_bytes += count(*given)
            return call(*given, **how)

        return counted

    def _hop_bytes(self, hops: list[dist.P2POp]) -> int:
        return sum(each.tensor.nbytes for each in hops if each.op is dist.isend)

    def _swap_bytes(self, _: Tensor, out: Tensor, __: list[int], sent: list[int]) -> int:
        return (sum(sent) - sent[self._rank]) * out.itemsize

    def _gather_bytes(self, _: Tensor, own: Tensor) -> int:
        return (self._size - 1) * own.nbytes if own.is_floating_point() else 0

    def _scatter_bytes(self, own: Tensor, _: Tensor) -> int:
        return (self._size - 1) * own.nbytes

    def _sum_bytes(self, total: Tensor) -> int:
        return 2 * (self._size - 1) * total.nbytes // self._size if total.dim() else 0


def measure_peak(group: dist.ProcessGroup, *, tokens: int) -> Peak:
    """Return this rank's peak."""
    operands = draw(tokens, shard_ranges(VOCAB, group.size())[group.rank()])
    phases = ring_phases(party(group.rank(), group.size(), tokens), "auto", tile_bytes=TILE_BYTES)
    return peak_of(operands, _ring(group, operands), priced_bytes=max(phases.forward, phases.backward))


def measure_traffic(group: dist.ProcessGroup, *, tokens: int, mode: str) -> tuple[int, int]:
    """Return the bytes that this rank sends in forward and backward, and their formula."""
    operands = draw(tokens, shard_ranges(VOCAB, group.size())[group.rank()])
    with Traffic(group.rank(), group.size()) as traffic:
        _ring(group, operands, mode=mode)().backward()
    ranks = party(group.rank(), group.size(), tokens)
    return traffic.sent_bytes, sum(sent_bytes(ranks, mode, which) for which in ("statistics", "gradients"))


def measure_times(group: dist.ProcessGroup, *, tokens: int, tile_bytes: int, rounds: int) -> dict[str, list[Any]]:
    """Return (wall, CPU) seconds of each round on this rank, by variant; that of one process on rank 0 alone."""
    torch.set_num_threads(1)
    rank, size = group.rank(), group.size()
    operands, whole = draw(tokens, shard_ranges(VOCAB, size)[rank]), draw(tokens, slice(0, VOCAB))
    variants = {"ring": _ring(group, operands, tile_bytes=tile_bytes)}
    for strategy in ("auto", "recompute"):
        variants[f"each rank by itself, {strategy}"] = _local(whole, tile_bytes, strategy)
    if rank == 0:
        everything = draw(tokens * size, slice(0, VOCAB))
        for strategy in ("auto", "recompute"):
            variants[f"one process, {strategy}"] = _local(everything, tile_bytes, strategy)
    taken: dict[str, list[Any]] = {name: [] for name in variants}
    for number in range(rounds + 1):
        for name, step in variants.items():
            if not name.startswith("one process"):
                dist.barrier(group)
            wall, cpu = time.perf_counter(), time.process_time()
            step().backward()
            if number:
                taken[name].append((time.perf_counter() - wall, time.process_time() - cpu))
            for each in (*operands[:2], *whole[:2], *(everything[:2] if rank == 0 else ())):
                each.grad = None
    return taken


def _local(operands: tuple[Tensor, Tensor, Tensor], tile_bytes: int, strategy: Any) -> Callable[[], Tensor]:
    return lambda: linear_cross_entropy(*operands, reduction="sum", tile_bytes=tile_bytes, strategy=strategy)


def _ring(
    group: dist.ProcessGroup,
    operands: tuple[Tensor, Tensor, Tensor],
    *,
    mode: Any = "auto",
    tile_bytes: int = TILE_BYTES,
) -> Callable[[], Tensor]:
    return lambda: ring_linear_cross_entropy(
        *operands, group=group, mode=mode, vocab_size=VOCAB, reduction="sum", tile_bytes=tile_bytes
    )


def on_ranks(size: int, work: Callable[..., Any], **arguments: Any) -> list[Any]:
    """Return what `work(group, **arguments)` returns on each of `size` fresh processes."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ends = [context.Pipe() for _ in range(size)]
        children = [
            context.Process(target=_take_part, args=(theirs, rank, size, f"{folder}/meeting", work, arguments))
            for rank, (_, theirs) in enumerate(ends)
        ]
        for child in children:
            child.start()
        answers = [mine.recv() for mine, _ in ends]
        for child in children:
            child.join()
    return answers


def _take_part(
    pipe: Any, rank: int, size: int, meeting: str, work: Callable[..., Any], arguments: dict[str, Any]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    pipe.send(work(dist.group.WORLD, **arguments))
    dist.barrier()
    dist.destroy_process_group()


def memory() -> dict[str, Any]:
    """Return the share that is saved in each published setting, scaled down and, priced, at its own size."""
    found = {}
    for (size, full_tokens), published in PUBLISHED.items():
        tokens = full_tokens // SCALE
        whole = peak_of(operands := draw(tokens, slice(0, VOCAB)), lambda operands=operands: dense(*operands))
        ranks = on_ranks(size, measure_peak, tokens=tokens)
        worst = max(ranks, key=lambda each: each.peak_bytes)
        found[f"P={size}, N={tokens}"] = {
            "dense_bytes": whole.peak_bytes,
            "ring": asdict(worst) | {"above_bytes": worst.above_bytes},
            "mode": [fewest_bytes(party(0, size, tokens), which) for which in ("statistics", "gradients")],
            "saved": 1 - worst.peak_bytes / whole.peak_bytes,
            "published": published,
            "full_size": _full_size(size, full_tokens),
        }
    return found


def _full_size(size: int, tokens: int) -> dict[str, Any]:
    """Return the priced peak at the paper's own size, beside its dense one: operands, gradients and 3 x N x V."""
    width, vocab = WIDTH * SCALE, VOCAB * SCALE
    ranks = party(0, size, tokens, width=width, vocab=vocab)
    phases = ring_phases(ranks, "auto", tile_bytes=FULL_TILE_BYTES)
    operands = 4 * width * (tokens + ranks.rows[0]) + 8 * tokens
    peak, logits = operands + max(phases.forward, phases.backward), 4 * tokens * vocab
    plain = 4 * width * (tokens + vocab) + 3 * logits
    return {"ring_bytes": peak, "dense_bytes": plain, "saved": 1 - peak / plain, "tile_bytes": FULL_TILE_BYTES}


def growth() -> dict[str, Any]:
    """Return what is neither operand nor gradient, as the tokens of a rank double."""
    sizes = {tokens: max(on_ranks(4, measure_peak, tokens=tokens), key=lambda each: each.peak_bytes)
             for tokens in (1024, 2048, 4096)}  # fmt: skip
    return {f"N={tokens}": each.above_bytes for tokens, each in sizes.items()}


def traffic() -> dict[str, Any]:
    """Return the bytes that each rank sends, measured and by formula."""
    return {
        f"{mode}, P={size}": [
            {"sent_bytes": sent, "formula_bytes": formula}
            for sent, formula in on_ranks(size, measure_traffic, tokens=1024, mode=mode)
        ]
        for size in (2, 4)
        for mode in ("weights", "hidden", "gather", "replicated")
    }


def times(rounds: int) -> dict[str, Any]:
    """Return CPU seconds of four ranks together and of one process on the same tokens."""
    found: dict[str, Any] = {}
    for tile_bytes in (TILE_BYTES, 64 * 2**20):
        ranks = on_ranks(4, measure_times, tokens=1024, tile_bytes=tile_bytes, rounds=rounds)
        rows = {
            name: [[rank[name][number] for rank in ranks if name in rank] for number in range(rounds)]
            for name in ranks[0]
        }
        cases = {
            name: Times(
                wall_s=tuple(max(wall for wall, _ in each) for each in turns),
                cpu_s=tuple(sum(cpu for _, cpu in each) for each in turns),
            )
            for name, turns in rows.items()
        }
        medians = {name: each.summary()["cpu_s"]["median"] for name, each in cases.items()}
        head = replace(party(0, 1, 4096).head, wanted=frozenset())
        chosen = choose_tiling(head, tile_bytes=tile_bytes)
        found[f"tile_bytes={tile_bytes}"] = {
            **cases,
            "ring_over": {name: medians["ring"] / each for name, each in medians.items() if name != "ring"},
            "auto": chosen.strategy,
            "one_process_bytes": cross_entropy_phases(head, chosen).backward,
        }
    return found


def main() -> None:
    """Measure, print and write a result for each part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--part", choices=("memory", "growth", "traffic", "times"), nargs="*", help="default: all four")
    args = parser.parse_args()
    parts = {"memory": memory, "growth": growth, "traffic": traffic, "times": lambda: times(args.rounds)}
    for name, run in parts.items():
        if args.part is None or name in args.part:
            found = run()
            for case, each in found.items():
                print(name, case, each)
            print(write_result(f"ring_{name}", found, seed=SEED))


if __name__ == "__main__":
    main()
