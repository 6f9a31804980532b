"""Claim: fed the published pass times of 8 GPUs, the simulator finds the published iteration times and gains.

    python benchmarks/pipeline_published.py --table exp_one_host.csv

The table is the one that the authors of Vocabulary Parallelism (arXiv 2411.05288v2) published with their code, as
`artifact/exp_one_host.csv` of sail-sg/VocabularyParallelism; it is read where the user has it and none of it is kept
here, only ratios. Megatron-LM does not overlap its sends, so a sender waits for the measured transfer; the baselines'
runs did not measure it, so theirs is Vocab-1's. S and T were measured together and are divided as their products are.
The optimizer's time is not modelled.

Beyond 8 GPUs no pass times were published: those gains take the 8-GPU times of a layer and of the head by FLOPs, on the
network of one host, and say what the schedules alone would give. The paper's gains are the quotients of its table 5.
"""

import argparse
import csv
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from planish.errors import UsageError
from planish.pipeline.actions import COLLECTIVES, Head, Kind
from planish.pipeline.costs import Costs
from planish.pipeline.interlaced import interlaced
from planish.pipeline.layers import redistribute
from planish.pipeline.memory import in_flight
from planish.pipeline.one_f_one_b import one_f_one_b
from planish.pipeline.schedule import Schedule
from planish.pipeline.simulate import simulate

MICROBATCHES = 128
SIZES = {8: (32, 3072), 16: (48, 4096), 32: (64, 5120)}  # ranks: layers, width (table 1)
VOCABULARIES = (32_000, 64_000, 128_000, 256_000)
CONTEXTS = (2048, 4096)
METHODS = {
    "base": ("1f1b", Head.LAST_STAGE),
    "redis": ("redistributed", Head.LAST_STAGE),
    "synctwice": ("vocab-1", Head.VOCAB_1),
    "vocab": ("vocab-2", Head.VOCAB_2),
    "interlaced": ("interlaced", Head.VOCAB_1),
}
HEADS = dict(METHODS.values())
# Vocab-1's and Vocab-2's MFU over Redis's, in per cent more, by ranks and context; one for each vocabulary (table 5).
PAPER_GAINS = {
    (8, 2048): {"vocab-1": (9.6, 8.4, 12.9, 28.8), "vocab-2": (9.2, 8.2, 12.7, 27.7)},
    (8, 4096): {"vocab-1": (8.6, 9.0, 7.1, 17.8), "vocab-2": (8.5, 8.5, 6.6, 17.2)},
    (16, 2048): {"vocab-1": (7.6, 18.2, 30.8, 37.0), "vocab-2": (7.3, 17.9, 30.6, 36.5)},
    (16, 4096): {"vocab-1": (7.4, 18.3, 17.5, 27.6), "vocab-2": (7.5, 17.9, 17.5, 26.8)},
    (32, 2048): {"vocab-1": (5.5, 23.1, 26.4, 58.1), "vocab-2": (4.7, 23.0, 26.3, 58.3)},
    (32, 4096): {"vocab-1": (5.5, 21.8, 23.3, 50.9), "vocab-2": (5.0, 21.6, 22.9, 51.0)},
}
# Columns of the table, which has no header.
CONTEXT, VOCABULARY, METHOD, ITERATION_MS = 2, 4, 13, 20
TIMES_US = {"forward": 25, "backward": 26, "head": 27, "embedding": 28, "embedding_backward": 29, "transfer": 30}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run; seconds, by rank."""

    method: str
    vocabulary: int
    context: int
    iteration: float
    forward: list[float]
    backward: list[float]
    head: list[float]
    embedding: list[float]
    embedding_backward: list[float]
    transfer: list[float]

    def costs(self) -> Costs:
        """Return the measured passes as costs; a collective takes as long as a send."""
        s, t = (2 / 3, 1 / 3) if HEADS[self.method] is Head.VOCAB_2 else (1 / 3, 2 / 3)
        return Costs(
            passes={
                Kind.F: self.forward,
                Kind.B: self.backward,
                Kind.S: [s * each for each in self.head],
                Kind.T: [t * each for each in self.head],
                Kind.IF: self.embedding,
                Kind.IB: self.embedding_backward,
            },
            send=self.transfer[0],
            collectives=dict.fromkeys(COLLECTIVES, self.transfer[0]),
        )


Runs = dict[tuple[str, int, int], Run]


def read_table(path: Path) -> Runs:
    """Return the runs of the published table by (method, vocabulary, context).

    Raises:
        UsageError: A file that is not that table.
    """
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    try:
        runs = {(run.method, run.vocabulary, run.context): run for run in map(_run, rows)}
    except (IndexError, KeyError, ValueError) as error:
        raise UsageError(f"{path} is not the published table: {error!r}; give exp_one_host.csv as it is.") from error
    wanted = {(method, v, s) for method in HEADS for v in VOCABULARIES for s in CONTEXTS}
    if missing := sorted(wanted - runs.keys()):
        raise UsageError(f"{path} has no run {missing[0]}, and {len(missing) - 1} more; give exp_one_host.csv whole.")
    measured = {key[1:]: run.transfer for key, run in runs.items() if key[0] == "vocab-1"}
    return {key: run if any(run.transfer) else replace(run, transfer=measured[key[1:]]) for key, run in runs.items()}


def _run(row: list[str]) -> Run:
    method, _ = METHODS[row[METHOD]]
    return Run(
        method=method,
        vocabulary=int(row[VOCABULARY]),
        context=int(row[CONTEXT]),
        iteration=float(row[ITERATION_MS]) / 1e3,
        **{name: [float(each) / 1e6 for each in row[column].split()] for name, column in TIMES_US.items()},
    )


def schedule_for(run: Run, costs: Costs) -> Schedule:
    """Return the schedule of `run`, one stage for each of its ranks."""
    sizes = {"num_ranks": len(run.forward), "num_microbatches": MICROBATCHES}
    if run.method == "interlaced":
        return interlaced(**sizes, costs=costs)
    return one_f_one_b(**sizes, head=HEADS[run.method], costs=costs)


def iteration(run: Run, *, overlap: bool = False) -> tuple[float, int]:
    """Return the simulated seconds of an iteration of `run`, and the microbatches in flight on its first rank."""
    costs = run.costs() if overlap else run.costs().with_waiting_senders(range(len(run.forward)))
    schedule = schedule_for(run, costs)
    return simulate(schedule, costs).makespan, max(in_flight(schedule))


def extrapolated(runs: Runs, method: str, ranks: int, vocabulary: int, context: int) -> Run:
    """Return `method` on more ranks: the 8-GPU times of a layer and of the head by FLOPs; ranks repeat per host."""
    measured = runs[method if HEADS[method].shared else "1f1b", vocabulary, context]
    (layers, width), (old_layers, old_width) = SIZES[ranks], SIZES[8]
    wider = width / old_width
    layer = wider * (24 * width + 4 * context) / (24 * old_width + 4 * context) / (old_layers / 8)
    hosts = [rank % 8 for rank in range(ranks)]
    if HEADS[method].shared:
        scale = layers / ranks * layer
        forward, backward = ([scale * row[rank] for rank in hosts] for row in (measured.forward, measured.backward))
    else:
        # The head in layers by FLOPs (table 4) at 4,096 tokens: the paper redistributes both contexts alike.
        head_layers = vocabulary / (12 * width + 2 * 4096) if method == "redistributed" else 0.0
        shares = redistribute(layers, ranks, head_layers)
        rows = measured.forward, measured.backward
        forward, backward = (_with_head(row, shares, layer, wider) for row in rows)
    return replace(
        measured,
        method=method,
        iteration=0.0,
        forward=forward,
        backward=backward,
        head=[wider * 8 / ranks * measured.head[rank] for rank in hosts],
        embedding=[wider * measured.embedding[rank] for rank in hosts],
        embedding_backward=[wider * measured.embedding_backward[rank] for rank in hosts],
        transfer=[wider * measured.transfer[rank] for rank in hosts],
    )


def _with_head(times: list[float], shares: tuple[int, ...], layer: float, wider: float) -> list[float]:
    """Return a baseline's times with `shares` layers: a stage's from the middle ranks, the ends' surplus as it is."""
    stage = fmean(times[1:-1])
    seconds = [stage * layer * share for share in shares]
    seconds[0] += wider * (times[0] - stage)
    seconds[-1] += wider * (times[-1] - stage)
    return seconds


def iterations_table(runs: Runs) -> list[dict[str, object]]:
    """Return, for each published run, the simulated iteration over the measured one."""
    table = []
    for run in runs.values():
        seconds, flying = iteration(run)
        overlapped, _ = iteration(run, overlap=True)
        table.append(
            {
                "method": run.method,
                "vocabulary": run.vocabulary,
                "context": run.context,
                "simulated_over_measured": round(seconds / run.iteration, 4),
                "if_sends_overlapped": round(overlapped / run.iteration, 4),
                "in_flight": flying,
            }
        )
    return table


def gains_table(runs: Runs) -> list[dict[str, object]]:
    """Return, for each size, how many per cent more throughput than layer redistribution: in the paper, simulated.

    On 8 GPUs the pass times are those measured, beyond them extrapolated.
    """
    table = []
    for ranks, context in PAPER_GAINS:
        for place, vocabulary in enumerate(VOCABULARIES):
            known = ranks == 8
            own = {
                method: runs[method, vocabulary, context]
                if known
                else extrapolated(runs, method, ranks, vocabulary, context)
                for method in ("redistributed", "vocab-1", "vocab-2")
            }
            seconds = {method: iteration(run)[0] for method, run in own.items()}
            row: dict[str, object] = {"ranks": ranks, "context": context, "vocabulary": vocabulary}
            row["pass_times"] = "measured" if known else "extrapolated"
            for method in ("vocab-1", "vocab-2"):
                row[f"{method} paper"] = PAPER_GAINS[ranks, context][method][place]
                row[f"{method} simulated"] = round(100 * (seconds["redistributed"] / seconds[method] - 1), 1)
            table.append(row)
    return table


def main() -> None:
    """Write both tables to `results/pipeline_published.json` and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, required=True, help="your copy of exp_one_host.csv")
    runs = read_table(parser.parse_args().table)
    tables = {"iterations": iterations_table(runs), "gains_over_redistribution_percent": gains_table(runs)}
    from harness import write_result  # brings torch, which importing this file for its figures should not

    write_result("pipeline_published", tables, seed=0)
    for rows in tables.values():
        print("\n" + " ".join(rows[0]))
        for row in rows:
            print(" ".join(map(str, row.values())))


if __name__ == "__main__":
    main()
