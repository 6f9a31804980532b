"""Whose turn it is: the schedule of a pipeline where the run file leaves it open, and what measured times say of it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from planish.errors import UsageError
from planish.methods import Pipeline, Plain
from planish.pipeline.observed import times_of
from planish.pipeline.outline import outcome
from planish.pipeline.workload import Times, Workload, workload
from planish.price.config import read_config
from planish.runfile import RunFile
from planish.train.predict import Prediction, config_tree
from planish.train.timelines import read_passes
from planish.units import format_bytes

_USUAL, _HALF = Pipeline(method="1f1b"), Pipeline(method="v-half")
# Less than this is what the passes of one step differ from those of the next by.
_WORTH_SAYING = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """A run whose schedule is chosen.

    Attributes:
        run: Every setting, `plan.pipeline` among them where it was open.
        prediction: What it will hold.
        reasons: Why this schedule, where it was open.
    """

    run: RunFile
    prediction: Prediction
    reasons: tuple[str, ...] = ()


def take_turns(run: RunFile, predict: Callable[[RunFile], Prediction]) -> Turns:
    """Return `run` with the schedule that its budget asks for: 1F1B if that fits, else V-Half if that does.

    Whether V-Half's turns would be even, its three passes as long as each other, is told; by the times that the run
    folder holds, or by products.

    Args:
        run: Every setting.
        predict: What a run will hold.
    """
    prediction = predict(run)
    budget_bytes = run.memory.budget
    if run.mesh.pp == 1 or run.plan.pipeline is not None or budget_bytes is None:
        return Turns(run=run, prediction=prediction)
    usual_bytes = prediction.estimate.peak_bytes
    if usual_bytes <= budget_bytes:
        return Turns(run=run, prediction=prediction, reasons=(f"pipeline = 1f1b: {format_bytes(usual_bytes)} fit",))
    short = f"1f1b needs {format_bytes(usual_bytes)}, {format_bytes(usual_bytes - budget_bytes)} too much"
    if run.mesh.peers > 1:
        why = f"v-half takes stages of one rank each, and {run.mesh.peers} share each of these"
        return Turns(run=run, prediction=prediction, reasons=(f"pipeline = 1f1b: {short}; {why}",))
    half = replace(run, plan=replace(run.plan, pipeline=_HALF))
    work = workload_of(run, measured_times(run.save.dir, run))
    if work.layers < run.mesh.pp * _HALF.stages_per_rank:
        why = f"v-half takes two layers a rank, {2 * run.mesh.pp} in all, and the model has {work.layers}"
        return Turns(run=run, prediction=prediction, reasons=(f"pipeline = 1f1b: {short}; {why}",))
    other = predict(half)
    half_bytes = other.estimate.peak_bytes
    if half_bytes > budget_bytes:
        why = f"v-half needs {format_bytes(half_bytes)}"
        return Turns(run=run, prediction=prediction, reasons=(f"pipeline = 1f1b: {short}, and {why}",))
    reason = f"pipeline = v-half: {short}; now {format_bytes(half_bytes)}, and {_evenness(work, run.mesh.pp)}"
    return Turns(run=half, prediction=other, reasons=(reason,))


def workload_of(run: RunFile, times: Times | None = None) -> Workload:
    """Return what the parts of the run's model take, by products or as `times` say.

    Raises:
        UsageError: A model whose sizes only transformers can read.
    """
    tree = config_tree(run.model)
    if tree is None:
        raise UsageError("`model.gguf` does not say its sizes; name `model.from` or `model.config` for a pipeline.")
    return workload(
        read_config(tree),
        context=run.data.context,
        microbatches=run.train.grad_accum,
        recompute=not isinstance(run.plan.boundary, Plain),
        experts_per_token=1 if run.model.moe is None else run.model.moe.top_k,
        times=times,
    )


def measured_times(folder: Path, run: RunFile) -> Times | None:
    """Return what the parts of the model took in the run that `folder` holds; None where no stages ran."""
    passes = read_passes(folder)
    return None if passes is None else times_of(passes, num_layers=workload_of(run).layers)


def faster_turns(pipeline: Pipeline, work: Workload, num_ranks: int) -> str | None:
    """Return a sentence where measured passes say that the other of 1F1B and V-Half takes clearly less time, or None.

    Args:
        pipeline: What runs.
        work: As measured.
        num_ranks: Ranks of the pipeline.
    """
    other = replace(pipeline, method=_USUAL.method if pipeline.method == _HALF.method else _HALF.method)
    if work.layers < num_ranks * other.stages_per_rank:
        return None
    ratio = outcome(pipeline, work, num_ranks).timeline.makespan / outcome(other, work, num_ranks).timeline.makespan
    if ratio < 1 + _WORTH_SAYING:
        return None
    return (
        f'by the passes of this step `plan.pipeline.method` = "{other.method}" would take {1 - 1 / ratio:.0%} less '
        f"time ({_halves(work)}); a checkpoint goes on with it, and `planish plan` tells whether it fits."
    )


def _evenness(work: Workload, num_ranks: int) -> str:
    half, usual = (outcome(each, work, num_ranks).timeline.makespan for each in (_HALF, _USUAL))
    source = "by products" if work.unit != "seconds" else "as measured"
    return f"a step takes {half / usual:.2f} times as long as 1f1b's ({_halves(work)}, {source})"


def _halves(work: Workload) -> str:
    """Return how long V-Half's three passes are: even ones leave no bubbles but at both ends."""
    return f"forward : input half : weight half of a layer = 1 : {work.layer_backward / work.layer - 1:.1f} : 1"
