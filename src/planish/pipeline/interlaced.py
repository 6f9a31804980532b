"""Interlaced: the baseline in which all ranks stop for the shared head, as in tensor parallelism.

[Note: interlacing] In an interval every rank runs one forward and one backward, even ranks the forward first, odd ranks
the backward first, and then all of them S and T of one microbatch, with the barriers in line. A microbatch thus moves
forward two ranks an interval and backward one, and about 3p/2 of them are in flight instead of p.
"""

from planish.pipeline.actions import Head, Kind
from planish.pipeline.costs import Costs
from planish.pipeline.periodic import Repeated, repeat
from planish.pipeline.schedule import Schedule, check_sizes
from planish.pipeline.simulate import simulate


def interlaced(*, num_ranks: int, num_microbatches: int, costs: Costs) -> Schedule:
    """Return the interlaced schedule with its communication; its head computes as Vocab-1 does.

    Memory: p + (p - 1) // 2 + 1 microbatches in flight on rank 0.

    References: Vocabulary Parallelism, arXiv 2411.05288, section 6.2 and appendix B.2; nnScaler.
    """
    check_sizes(num_ranks=num_ranks, num_microbatches=num_microbatches)
    p = num_ranks
    half = (p - 1) // 2
    first, second, third = 0.0, 1 / 3, 2 / 3
    cycles = []
    for rank in range(p):
        forward = rank // 2 + (second if rank % 2 else first)
        backward = half + p - rank + (first if rank % 2 else second)
        head = half + third
        starts = {
            Kind.S: head,
            Kind.T: head,
            Kind.IF: third - 1,
            Kind.IB: head + p + 1,
            Kind.F: forward,
            Kind.B: backward,
        }
        cycles.append([Repeated(start, rank, kind) for kind, start in starts.items()])
    order = Schedule(
        name="interlaced",
        head=Head.VOCAB_1,
        num_microbatches=num_microbatches,
        stage_ranks=tuple(range(p)),
        ranks=repeat(cycles, 1, num_microbatches),
    )
    return simulate(order, costs).lower()
