"""Claims of the APOLLO paper about memory, asked of our own prices and dry runs: nothing is trained, nothing allocated.

1. LLaMA-7B trains on one device under 12 GB with int8 weights, updated in the backward pass.
2. LLaMA-13B trains under plain data parallelism inside 80 GiB with APOLLO-Mini.
3. LLaMA-7B on 8 x 80 GB: micro-batches of 4 rows with AdamW, of 16 with APOLLO.

As in the paper: rows of 256 tokens, bf16 weights and gradients without master; in (3) no checkpointing, whole logits.
Plain DistributedDataParallel holds the gradients twice (its buckets). Layers' matrices are projected; embedding, head
and norms take AdamW, whose moments are bf16 like the weights. Not as in the paper: our projected moments are fp32.
In (1) the wide weights are loaded into host memory, so the device's phases begin with the first step; embedding and
head stay wide, and their moments are counted. Its dry runs are of 2, 3 and 4 layers: each further layer adds the same
bytes, which is checked, and 32 layers follow (a dry run of all of them, tile by tile, takes half an hour).

[Note: throughput] A step of 512 rows on 8 devices takes 512 / 8 / rows microbatches. Each computes 6 flop a parameter
and token at `_FLOPS * _EFFICIENCY`, reads weights twice and reads and writes gradients at `_BANDWIDTH`, and reduces
its gradients over the link after the computation, as loops without `no_sync` do. Nothing overlaps: the ratio is an
upper bound of what these terms explain.
"""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from harness import write_result
from planish.methods import AdamW, Apollo, Checkpoint, Optim, Plain, Plan
from planish.plan.estimate import estimate
from planish.price.apollo import MatrixShape
from planish.price.state import optimizer_bytes, parameter_bytes, split
from planish.price.table import LayerTable
from planish.runfile import RunFile
from planish.sections import DataSection, ModelSection, TrainSection
from planish.shapes import BatchShape
from planish.train.dry_run import dry_run
from planish.train.layer_table import fit_table

CONTEXT = 256
GB, GIB = 10**9, 2**30
SIZES = {
    "7B": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
    "13B": {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40},
}
MINI = Apollo()
RANK_256 = Apollo(proj_rank=256, granularity="channel", alpha=1.0)
KEPT = Plan(vocab=Plain(), boundary=Plain())
"""As the paper trains: flash attention, everything else plain."""
BOUNDED = Plan(boundary=Checkpoint())

_FLOPS, _EFFICIENCY, _BANDWIDTH, _LINK = 312e12, 0.5, 2.0e12, 240e9
_ROWS_OF_A_STEP, _DEVICES = 512, 8


def run_of(
    folder: Path, size: str, plan: Plan, rows: int, dtype: str = "bf16-pure", num_layers: int | None = None
) -> RunFile:
    """Return the run file of a LLaMA, of its first layers alone where `num_layers` says so."""
    path, sizes = folder / f"{size}-{num_layers}" / "config.json", dict(SIZES[size])
    sizes["num_hidden_layers"] = num_layers or sizes["num_hidden_layers"]
    LlamaConfig(vocab_size=32000, max_position_embeddings=2048, **sizes).save_pretrained(path.parent)
    return RunFile(
        model=ModelSection(config=path, dtype=dtype),
        data=DataSection(train=("none",), context=CONTEXT),
        train=TrainSection(clip=0.0, global_tokens=rows * CONTEXT),
        plan=plan,
    )


def one_device(folder: Path) -> dict[str, Any]:
    """Return the peaks of LLaMA-7B in int8, updated in backward, one row a step."""
    figures = {}
    num_layers = SIZES["7B"]["num_hidden_layers"]
    for dtype in ("bf16-pure", "bf16"):
        plan = replace(BOUNDED, optim=replace(MINI, in_backward=True, weights="int8"))
        two, three, four = (dry_run(run_of(folder, "7B", plan, 1, dtype, each)).phases for each in (2, 3, 4))
        phases = {}
        for phase in set(two) - {"init"}:
            step = three[phase].peak_bytes - two[phase].peak_bytes
            if four[phase].peak_bytes - three[phase].peak_bytes != step:
                raise AssertionError(f"{phase}: the fourth layer adds other bytes than the third")
            phases[phase] = two[phase].peak_bytes + (num_layers - 2) * step
        peak = max(phases.values())
        figures[dtype] = {"peak_bytes": peak, "under_12_GB": peak < 12 * GB, "phases": phases}
    return figures


def table_of(folder: Path, size: str, plan: Plan) -> LayerTable:
    """Return the table of a LLaMA."""
    section = run_of(folder, size, plan, 1).model
    return fit_table(LlamaConfig.from_json_file(section.config), section, plan, rows=1)


def peak_bytes(table: LayerTable, plan: Plan, optim: Optim, rows: int) -> int:
    """Return the peak of a step on one of several devices under plain data parallelism."""
    batch = BatchShape(rows=rows, context=CONTEXT, num_valid=rows * CONTEXT, split=False)
    buckets = parameter_bytes(table.tensors)
    return estimate(table, batch, replace(plan, optim=optim), master=False).peak_bytes + buckets


def proven(folder: Path, size: str, plan: Plan, table: LayerTable, rows: int) -> dict[str, int]:
    """Return price and dry run of one step without buckets."""
    dry = dry_run(run_of(folder, size, plan, rows)).peak_bytes
    price = peak_bytes(table, plan, plan.optim, rows) - parameter_bytes(table.tensors)
    return {"price_bytes": price, "dry_run_bytes": dry}


def data_parallel(folder: Path, *, proof: bool) -> dict[str, Any]:
    """Return the peak of LLaMA-13B with Mini, one row a device."""
    figures = {}
    for name, plan in (("kept, whole logits", KEPT), ("bounded", BOUNDED)):
        table = table_of(folder, "13B", plan)
        peaks = {each: peak_bytes(table, plan, optim, 1) for each, optim in (("mini", MINI), ("adamw", AdamW()))}
        figures[name] = {each: {"peak_bytes": peak, "inside_80_GiB": peak <= 80 * GIB} for each, peak in peaks.items()}
    if proof:
        figures["proof, mini, bounded"] = proven(folder, "13B", replace(BOUNDED, optim=MINI), table, 1)
    return figures


def microbatches(folder: Path, *, proof: bool) -> dict[str, Any]:
    """Return, for each optimizer, the most rows that fit 80 GB, and the modelled throughput."""
    table = table_of(folder, "7B", KEPT)
    projected, _ = split(table.tensors, RANK_256)
    moments = sum(each.count * 2 * 256 * MatrixShape.of(each.shape).channels for each in projected)
    figures: dict[str, Any] = {"rank 256, projected moments (paper: 809.5M)": moments}
    seconds = {}
    for name, optim in (("adamw", AdamW()), ("apollo, rank 256", RANK_256), ("mini", MINI)):
        peaks = {rows: peak_bytes(table, KEPT, optim, rows) for rows in range(1, 65)}
        rows = max((each for each, peak in peaks.items() if peak <= 80 * GB), default=0)
        figures[name] = {
            "state_bytes": optimizer_bytes(table.tensors, optim, master=False),
            "largest_microbatch": rows,
            "peak_bytes": {each: peaks[each] for each in sorted({4, 8, 16, rows})},
        }
        power = 2 ** (rows.bit_length() - 1)
        seconds[name] = step_seconds(table, power)
        figures[name] |= {"microbatch": power, "modelled_step_s": seconds[name]}
    figures["modelled throughput, apollo : adamw, at the largest microbatch of each"] = (
        seconds["adamw"] / seconds["apollo, rank 256"]
    )
    figures["modelled throughput, 16 rows : 4 rows (paper: up to 3)"] = step_seconds(table, 4) / step_seconds(table, 16)
    if proof:
        figures["proof, adamw, 4 rows"] = proven(folder, "7B", KEPT, table, 4)
        figures["proof, mini, 16 rows"] = proven(folder, "7B", replace(KEPT, optim=MINI), table, 16)
    return figures


def step_seconds(table: LayerTable, rows: int) -> float:
    """Return the modelled time of forward and backward of one global batch [Note: throughput]."""
    nbytes = parameter_bytes(table.tensors)
    compute_s = 6 * (nbytes / 2) * rows * CONTEXT / (_FLOPS * _EFFICIENCY)
    traffic_s = (2 + 2) * nbytes / _BANDWIDTH
    reduce_s = 2 * nbytes * (_DEVICES - 1) / _DEVICES / _LINK
    return _ROWS_OF_A_STEP / _DEVICES / rows * (compute_s + traffic_s + reduce_s)


def main() -> None:
    """Ask all three, print the answers and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="prices of (2) and (3) alone; no result is written")
    quick = parser.parse_args().quick
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        figures = {
            "7B on 8 x 80 GB": microbatches(folder, proof=not quick),
            "13B, plain data parallelism": data_parallel(folder, proof=not quick),
        }
        if not quick:
            figures["7B on one device, int8, in backward"] = one_device(folder)
    for claim, found in figures.items():
        print(claim)
        for case, each in found.items():
            print(f"  {case}: {each}")
    if not quick:
        print(write_result("apollo_claims", figures, seed=0))


if __name__ == "__main__":
    main()
