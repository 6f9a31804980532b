"""Will it fit: the dry run held to the budget before anything is loaded."""

import math
from dataclasses import replace
from typing import Any

from planish.errors import DoesNotFit
from planish.runfile import RunFile
from planish.train.dry_run import DryRun, dry_run
from planish.units import format_bytes

_STEP_TOKENS = 64
_SHOWN = 3


def check_fit(run: RunFile) -> DryRun:
    """Return the dry run of `run`, which fits its budget.

    Memory:        none for tensors.
    Exactness:     to the byte for full rows that are all counted, the most that a run can meet.

    Raises:
        DoesNotFit: The peak is above the budget; phase, largest tensors, and the budget and the context that would do.
    """
    dry = dry_run(run)
    error = misfit(run, dry)
    if error is not None and run.memory.on_exceed == "strict":
        raise error
    return dry


def misfit(run: RunFile, dry: DryRun) -> DoesNotFit | None:
    """Return why `run` does not fit its budget, or None where it does."""
    budget_bytes = run.memory.budget
    if budget_bytes is None or dry.peak_bytes <= budget_bytes:
        return None
    held = dry.phases[dry.peak_phase].owners[:_SHOWN]
    largest = ", ".join(f"{each.owner} {format_bytes(each.total_bytes)}" for each in held)
    longest = longest_context(run, dry, budget_bytes)
    context = "no context fits it" if longest is None else f"`data.context = {longest}` fits it"
    return DoesNotFit(
        f"{dry.peak_phase} needs {format_bytes(dry.peak_bytes)}, `memory.budget` is {format_bytes(budget_bytes)} "
        f'(largest there: {largest}); the smallest budget that would do is "{smallest_budget(dry)}", {context}.'
    )


def smallest_budget(dry: DryRun) -> str:
    """Return the smallest budget that would do, in whole KiB."""
    return f"{math.ceil(dry.peak_bytes / 2**10)}KiB"


def longest_context(run: RunFile, dry: DryRun, budget_bytes: int) -> int | None:
    """Return the longest context found to fit, a multiple of 64 tokens; None where not even 64 do.

    Peaks are linear in the context from some length on, so the line through two dry runs says where to look, and a
    dry run there has the last word.
    """
    context = run.data.context
    shorter = max(_STEP_TOKENS, context // 2)
    if shorter >= context:
        return None
    slope = max(1.0, (dry.peak_bytes - _peak_at(run, shorter)) / (context - shorter))
    guess = int(context - (dry.peak_bytes - budget_bytes) / slope)
    while guess >= _STEP_TOKENS:
        guess -= guess % _STEP_TOKENS
        if _peak_at(run, guess) <= budget_bytes:
            return guess
        guess = int(guess * 0.95)
    return None


def to_tree(dry: DryRun, budget_bytes: int | None) -> dict[str, Any]:
    """Return the prediction as plain data: `plan.json` of a run folder."""
    return {
        "peak_bytes": dry.peak_bytes,
        "peak_phase": dry.peak_phase,
        "budget_bytes": budget_bytes,
        "phases": {
            phase: {"peak_bytes": peak.peak_bytes, "categories": peak.categories} for phase, peak in dry.phases.items()
        },
    }


def _peak_at(run: RunFile, context: int) -> int:
    """Return the peak of `run` with rows of `context` tokens, as many rows as before."""
    train = replace(run.train, global_tokens=run.rows_per_microbatch * context * run.train.grad_accum)
    return dry_run(replace(run, data=replace(run.data, context=context), train=train)).peak_bytes
