"""Will it fit: what a run will hold, held to its budget before anything is loaded."""

import math
from dataclasses import dataclass, replace
from typing import Any

from planish.errors import DoesNotFit
from planish.methods import Plan
from planish.plan.estimate import Estimate, longest_context
from planish.plan.finer import fit_by_tiles, told
from planish.runfile import RunFile
from planish.train.predict import (
    NotPredictable,
    Prediction,
    Say,
    batch_shape,
    by_dry_run,
    keeps_master,
    predict,
    read_table,
)
from planish.train.turns import take_turns
from planish.units import format_bytes

_STEP_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What `check_fit` found before the ranks met, since a dry run over ranks is for a process alone.

    Attributes:
        run: Every setting, the schedule of its pipeline chosen.
        prediction: What it returned.
        refused: What it raised.
        said: What it had to say.
    """

    run: RunFile
    prediction: Prediction | None = None
    refused: Exception | None = None
    said: tuple[str, ...]

    def tell(self, say: Say) -> Prediction | None:
        """Do what `check_fit` did."""
        for sentence in self.said:
            say(sentence)
        if self.refused is not None:
            raise self.refused
        return self.prediction


def judge(run: RunFile) -> Verdict:
    """Return the verdict of `check_fit`, on the run with the schedule that its budget asks for."""
    said: list[str] = []
    try:
        known = None
        if run.mesh.pp > 1 and run.plan.pipeline is None and run.memory.budget is not None:
            turns = take_turns(run, lambda each: predict(each, said.append))
            said += turns.reasons
            run, known = turns.run, turns.prediction
        return Verdict(run=run, prediction=check_fit(run, said.append, known), said=tuple(said))
    except Exception as error:  # of any kind: it is for all ranks
        return Verdict(run=run, refused=error, said=tuple(said))


def check_fit(run: RunFile, say: Say, known: Prediction | None = None) -> Prediction | None:
    """Return what `run` will hold, on each rank where there are several, which fits its budget, and under which plan.

    None without a budget where it would take time to find out, and where it cannot be found out.

    Raises:
        DoesNotFit: The peak is above the budget; phase, largest holders, and the budget and the context that would do.
    """
    if run.memory.budget is None and read_table(run) is None:
        return None
    try:
        prediction = adapted(run, predict(run, say) if known is None else known, say)
    except NotPredictable as error:
        say(f"{error} The budget is kept while running all the same.")
        return None
    error = misfit(replace(run, plan=prediction.plan), prediction)
    if error is not None and run.memory.on_exceed != "warn":
        raise error
    if error is not None:
        say(f"{error}")
    return prediction


def adapted(run: RunFile, prediction: Prediction, say: Say) -> Prediction:
    """Return `prediction`, or where it does not fit and `memory.on_exceed` allows it, that of finer tiles that do."""
    budget_bytes = run.memory.budget
    if budget_bytes is None or run.memory.on_exceed != "adapt" or prediction.estimate.peak_bytes <= budget_bytes:
        return prediction
    known = {run.plan: prediction}

    def peak(plan: Plan) -> int:
        if plan not in known:
            known[plan] = predict(replace(run, plan=plan), say)
        return known[plan].estimate.peak_bytes

    finer = fit_by_tiles(peak, run.plan, budget_bytes=budget_bytes, tokens=run.tokens_per_microbatch)
    if finer is None:
        return prediction
    needed = format_bytes(prediction.estimate.peak_bytes)
    say(f"finer tiles fit what would need {needed}: {told(run.plan, finer)}.")
    return known[finer]


def misfit(run: RunFile, prediction: Prediction) -> DoesNotFit | None:
    """Return why `run` does not fit its budget, or None where it does."""
    found, budget_bytes = prediction.estimate, run.memory.budget
    if budget_bytes is None or found.peak_bytes <= budget_bytes:
        return None
    context = ""
    if run.mesh.pp == 1:
        longest = context_that_fits(run, prediction, budget_bytes)
        context = ", no context fits it" if longest is None else f", {_shortened(run, longest)} fits it"
    return DoesNotFit(
        f"{found.peak_phase} needs {format_bytes(found.peak_bytes)}, `memory.budget` is {format_bytes(budget_bytes)} "
        f'({found.owners}); the smallest budget that would do is "{smallest_budget(found)}"{context}.'
    )


def smallest_budget(found: Estimate) -> str:
    """Return the smallest budget that would do, in whole KiB."""
    return f"{math.ceil(found.peak_bytes / 2**10)}KiB"


def context_that_fits(run: RunFile, prediction: Prediction, budget_bytes: int) -> int | None:
    """Return the longest context that fits, with as many rows and microbatches; None where none does.

    With a table it is exact. Otherwise it is a multiple of 64 tokens: peaks are linear in the context from some length
    on, so the line through two dry runs says where to look, and a dry run there has the last word.
    """
    if prediction.table is not None:
        shape, master = batch_shape(run), keeps_master(run)
        left_bytes = budget_bytes - (run.save.host or 0)
        return longest_context(prediction.table, shape, run.plan, master=master, budget_bytes=left_bytes)
    context, peak_bytes = run.data.context, prediction.estimate.peak_bytes
    shorter = max(_STEP_TOKENS, context // 2)
    if shorter >= context:
        return None
    slope = max(1.0, (peak_bytes - _peak_at(run, shorter)) / (context - shorter))
    guess = int(context - (peak_bytes - budget_bytes) / slope)
    while guess >= _STEP_TOKENS:
        guess -= guess % _STEP_TOKENS
        if _peak_at(run, guess) <= budget_bytes:
            return guess
        guess = int(guess * 0.95)
    return None


def to_tree(prediction: Prediction, budget_bytes: int | None) -> dict[str, Any]:
    """Return the prediction as plain data: `plan.json` of a run folder."""
    return prediction.estimate.to_dict() | {"budget_bytes": budget_bytes}


def _shortened(run: RunFile, context: int) -> str:
    """Return the settings that give `run` rows of `context` tokens, as many as before."""
    tokens = "" if run.train.global_tokens is None else f" with `train.global_tokens = {_global_tokens(run, context)}`"
    return f"`data.context = {context}`{tokens}"


def _global_tokens(run: RunFile, context: int) -> int:
    return run.rows_per_microbatch * context * run.train.grad_accum * run.mesh.readers


def _peak_at(run: RunFile, context: int) -> int:
    """Return the peak of `run` with rows of `context` tokens, as many rows as before."""
    train = replace(run.train, global_tokens=_global_tokens(run, context))
    return by_dry_run(replace(run, data=replace(run.data, context=context), train=train)).peak_bytes
