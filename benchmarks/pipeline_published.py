"""Claim: fed the published pass times of 8 GPUs, the simulator finds the published iterations, gains and peaks.

Sources: Vocabulary Parallelism (arXiv 2411.05288v2), tables 5 and 6 (`pipeline_published_tables.csv`), and the pass
times of the 8-GPU runs behind table 5 that its authors published with their code (sail-sg/VocabularyParallelism,
`artifact/exp_one_host.csv`; the columns used are in `pipeline_published_times.csv`). Megatron-LM's 1F1B does not
overlap its sends, so a sender waits for the measured transfer; the baselines' runs did not measure it, so theirs is
Vocab-1's. S and T were measured together and are split as their products are. The optimizer's time is not modelled.

Beyond 8 GPUs neither pass times nor the redistributed layers were published: those gains are extrapolated from the
8-GPU times by FLOPs, on the network of one host, and say what the schedules alone would give.
"""

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean

from planish.pipeline.actions import COLLECTIVES, Head, Kind
from planish.pipeline.costs import Costs
from planish.pipeline.interlaced import interlaced
from planish.pipeline.layers import redistribute
from planish.pipeline.memory import Footprint, in_flight, peak_bytes
from planish.pipeline.one_f_one_b import one_f_one_b
from planish.pipeline.schedule import Schedule
from planish.pipeline.simulate import simulate
from planish.pipeline.v_blocks import v_half

HERE = Path(__file__).parent
MICROBATCHES = 128
VOCABULARIES = (32_000, 64_000, 128_000, 256_000)
MODELS_1F1B = {8: (32, 3072), 16: (48, 4096), 32: (64, 5120)}  # ranks: layers, width (table 1)
MODELS_V_HALF = {16: (32, 4096), 24: (48, 5120), 32: (64, 6144)}  # (table 2)
HEADS = {
    "1f1b": Head.LAST_STAGE,
    "redistributed": Head.LAST_STAGE,
    "last-stage": Head.LAST_STAGE,
    "vocab-1": Head.VOCAB_1,
    "vocab-2": Head.VOCAB_2,
    "interlaced": Head.VOCAB_1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One published run on 8 GPUs; seconds per rank."""

    method: str
    vocabulary: int
    tokens: int
    iteration: float
    transfer: float
    forward: list[float]
    backward: list[float]
    head: list[float]
    embedding: list[float]
    embedding_backward: list[float]

    def costs(self) -> Costs:
        """Return the measured passes as costs; all collectives take as long as a send."""
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
            send=self.transfer,
            collectives=dict.fromkeys(COLLECTIVES, self.transfer),
        )


def read_runs() -> dict[tuple[str, int, int], Run]:
    """Return the published runs by (method, vocabulary, tokens); the baselines' transfers are Vocab-1's."""
    with (HERE / "pipeline_published_times.csv").open() as file:
        rows = list(csv.DictReader(file))
    transfers = {(row["vocabulary"], row["tokens"]): row["transfer_us"] for row in rows if row["method"] == "vocab-1"}
    runs = {}
    for row in rows:
        transfer = float(row["transfer_us"]) or float(transfers[row["vocabulary"], row["tokens"]])
        run = Run(
            method=row["method"],
            vocabulary=int(row["vocabulary"]),
            tokens=int(row["tokens"]),
            iteration=float(row["iteration_ms"]) / 1e3,
            transfer=transfer / 1e6,
            forward=_seconds(row["forward_us"]),
            backward=_seconds(row["backward_us"]),
            head=_seconds(row["head_us"]),
            embedding=_seconds(row["embedding_us"]),
            embedding_backward=_seconds(row["embedding_backward_us"]),
        )
        runs[run.method, run.vocabulary, run.tokens] = run
    return runs


def read_tables() -> dict[tuple[str, int, int, str, int], tuple[float | None, float | None]]:
    """Return (MFU %, peak GiB) by (schedule, ranks, tokens, method, vocabulary); None where memory ran out."""
    cells = {}
    with (HERE / "pipeline_published_tables.csv").open() as file:
        for row in csv.DictReader(file):
            for vocabulary in VOCABULARIES:
                name = f"{vocabulary // 1000}k"
                values = [None if row[key] == "OOM" else float(row[key]) for key in (f"mfu_{name}", f"gib_{name}")]
                key = row["schedule"], int(row["ranks"]), int(row["tokens"]), row["method"], vocabulary
                cells[key] = values[0], values[1]
    return cells


def schedule_for(method: str, costs: Costs) -> Schedule:
    """Return the schedule of `method` for as many ranks as `costs` has forwards."""
    ranks = len(costs.passes[Kind.F])
    if method == "interlaced":
        return interlaced(num_ranks=ranks, num_microbatches=MICROBATCHES, costs=costs)
    return one_f_one_b(num_ranks=ranks, num_microbatches=MICROBATCHES, head=HEADS[method], costs=costs)


def iteration(run: Run, *, overlap: bool = False) -> tuple[float, tuple[int, ...]]:
    """Return the simulated seconds of an iteration of `run`, and the microbatches in flight by rank."""
    costs = run.costs() if overlap else run.costs().with_waiting_senders(range(len(run.forward)))
    schedule = schedule_for(run.method, costs)
    return simulate(schedule, costs).makespan, in_flight(schedule)


def extrapolated(runs: dict[tuple[str, int, int], Run], method: str, ranks: int, vocabulary: int, tokens: int) -> Run:
    """Return `method` on other ranks: the 8-GPU times of a layer and of the head, by FLOPs; ranks repeat per host."""
    measured = runs[method if HEADS[method].shared else "1f1b", vocabulary, tokens]
    layers, width = MODELS_1F1B[ranks]
    old_layers, old_width = MODELS_1F1B[8]
    wider = width / old_width
    layer = wider * (24 * width + 4 * tokens) / (24 * old_width + 4 * tokens)
    per_stage = old_layers / 8
    hosts = range(ranks)
    if HEADS[method].shared:
        stages = [layers / ranks / per_stage * layer] * ranks
        forward = [scale * measured.forward[rank % 8] for scale, rank in zip(stages, hosts, strict=True)]
        backward = [scale * measured.backward[rank % 8] for scale, rank in zip(stages, hosts, strict=True)]
    else:
        head_layers = _head_layers(vocabulary, width) if method == "redistributed" else 0.0
        shares = redistribute(layers, ranks, head_layers)
        forward, backward = (
            _with_head(times, shares, layer / per_stage, wider) for times in (measured.forward, measured.backward)
        )
    return Run(
        method=method,
        vocabulary=vocabulary,
        tokens=tokens,
        iteration=0.0,
        transfer=wider * measured.transfer,
        forward=forward,
        backward=backward,
        head=[wider * 8 / ranks * measured.head[rank % 8] for rank in hosts],
        embedding=[wider * measured.embedding[rank % 8] for rank in hosts],
        embedding_backward=[wider * measured.embedding_backward[rank % 8] for rank in hosts],
    )


def counted_peaks(schedule: str, ranks: int, tokens: int, method: str, vocabulary: int) -> tuple[float, float]:
    """Return the largest and the smallest rank's GiB by counting.

    18 bytes a parameter (bf16 weights; gradients, master weights and moments in fp32), 34 bytes a token and channel
    of a layer's activations (Korthikanti et al. 2022, without the attention matrix), a shard's softmax in fp32.
    """
    made = counted_schedule(schedule, ranks, method)
    layers, width = (MODELS_1F1B if schedule == "1f1b" else MODELS_V_HALF)[ranks]
    head_layers = _head_layers(vocabulary, width) if method == "redistributed" else 0.0
    on_stage = redistribute(layers, made.num_stages, head_layers)
    parameters = [share * vocabulary * width for share in _table_shares(made)]
    for stage, rank in enumerate(made.stage_ranks):
        parameters[rank] += 12 * width**2 * on_stage[stage]
    footprint = Footprint(
        static=[round(18 * each) for each in parameters],
        activation=[34 * tokens * width * each for each in on_stage],
        hidden=2 * tokens * width,
        softmax=4 * tokens * -(-vocabulary // ranks) if made.head.shared else 0,
    )
    peaks = peak_bytes(made, footprint)
    return max(peaks) / 2**30, min(peaks) / 2**30


@cache
def counted_schedule(schedule: str, ranks: int, method: str) -> Schedule:
    """Return the schedule whose buffers are counted; what its passes take does not matter for that."""
    num_stages = ranks if schedule == "1f1b" else 2 * ranks
    passes = {Kind.F: 1, Kind.B: 2, Kind.I: 1, Kind.W: 1, Kind.S: 0.5, Kind.T: 0.5, Kind.IF: 0.02, Kind.IB: 0.02}
    unit = Costs.uniform(num_ranks=ranks, num_stages=num_stages, passes=passes)
    if schedule == "1f1b":
        return schedule_for(method, unit)
    return v_half(num_ranks=ranks, num_microbatches=MICROBATCHES, head=HEADS[method], costs=unit)


def _head_layers(vocabulary: int, width: int) -> float:
    """Return the head in layers by FLOPs (table 4) at 4,096 tokens: the published layers of both lengths."""
    return vocabulary / (12 * width + 2 * 4096)


def _table_shares(schedule: Schedule) -> list[float]:
    """Return how many vocabulary tables each rank holds, of embedding and head together."""
    if schedule.head.shared:
        return [2 / schedule.num_ranks] * schedule.num_ranks
    shares = [0.0] * schedule.num_ranks
    shares[schedule.stage_ranks[0]] += 1
    shares[schedule.stage_ranks[-1]] += 1
    return shares


def _with_head(times: list[float], shares: tuple[int, ...], layer: float, wider: float) -> list[float]:
    """Return a baseline's times with `shares` layers: a stage's from the middle ranks, the head's from the last one."""
    stage = fmean(times[1:-1])
    seconds = [stage * layer * share for share in shares]
    seconds[0] += wider * (times[0] - stage)
    seconds[-1] += wider * (times[-1] - stage)
    return seconds


def _seconds(microseconds: str) -> list[float]:
    return [float(each) / 1e6 for each in microseconds.split()]


def iterations_table() -> list[dict[str, object]]:
    """Return, for each published run, measured and simulated iteration and their ratio."""
    table = []
    for run in read_runs().values():
        seconds, flying = iteration(run)
        overlapped, _ = iteration(run, overlap=True)
        table.append(
            {
                "method": run.method,
                "vocabulary": run.vocabulary,
                "tokens": run.tokens,
                "measured_s": round(run.iteration, 4),
                "simulated_s": round(seconds, 4),
                "ratio": round(seconds / run.iteration, 4),
                "ratio_if_sends_overlapped": round(overlapped / run.iteration, 4),
                "in_flight": max(flying),
            }
        )
    return table


def gains_table() -> list[dict[str, object]]:
    """Return, for each size, the gain in throughput over layer redistribution, published and simulated."""
    runs, printed = read_runs(), read_tables()
    table = []
    for ranks in MODELS_1F1B:
        for tokens in (2048, 4096):
            for vocabulary in VOCABULARIES:
                seconds = {}
                for method in ("redistributed", "vocab-1", "vocab-2"):
                    run = (
                        runs[method, vocabulary, tokens]
                        if ranks == 8
                        else extrapolated(runs, method, ranks, vocabulary, tokens)
                    )
                    seconds[method], _ = iteration(run)
                row: dict[str, object] = {"ranks": ranks, "tokens": tokens, "vocabulary": vocabulary}
                row["from"] = "measured pass times" if ranks == 8 else "extrapolated pass times"
                for method in ("vocab-1", "vocab-2"):
                    base = printed["1f1b", ranks, tokens, "redistributed", vocabulary][0]
                    mfu = printed["1f1b", ranks, tokens, method, vocabulary][0]
                    row[f"{method} published"] = round(mfu / base - 1, 4)
                    row[f"{method} simulated"] = round(seconds["redistributed"] / seconds[method] - 1, 4)
                table.append(row)
    return table


def peaks_table() -> list[dict[str, object]]:
    """Return, for each published peak, what counting finds, and the spread over ranks."""
    table = []
    for key, (_, gib) in read_tables().items():
        most, least = counted_peaks(*key)
        names = ("schedule", "ranks", "tokens", "method", "vocabulary")
        row: dict[str, object] = dict(zip(names, key, strict=True))
        row |= {"published_gib": gib, "counted_gib": round(most, 2), "most_over_least": round(most / least, 3)}
        table.append(row)
    return table


def main() -> None:
    """Write the three tables to `results/pipeline_published.json` and print them."""
    from harness import write_result  # brings torch, which importing this file for its figures should not

    tables = {"iterations": iterations_table(), "gains": gains_table(), "peaks": peaks_table()}
    write_result("pipeline_published", tables, seed=0)
    for rows in tables.values():
        print("\n" + " ".join(rows[0]))
        for row in rows:
            print(" ".join(map(str, row.values())))


if __name__ == "__main__":
    main()
