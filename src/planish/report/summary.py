"""The run as one JSON object."""

from pathlib import Path
from typing import Any

from planish.report import findings
from planish.report.record import PhasePeak, RunRecord, Series


def summarize(record: RunRecord, *, page: Path, events: Path | None) -> dict[str, Any]:
    """Return what the report says as plain data; what was not recorded is None, what was never there is empty.

    Args:
        record: The run.
        page: Where the page of figures is.
        events: Where the TensorBoard events are; None if they were not asked for.
    """
    speed, hwm = record.series("tokens_per_s"), record.series("memory/vm_hwm_bytes")
    return {
        "run": str(record.path),
        "report": str(page),
        "tensorboard": None if events is None else str(events),
        "outcome": findings.outcome(record),
        "stopped_by_budget": record.exceeded,
        "steps": {"done": record.steps_done, "planned": record.steps_planned},
        "settings": record.settings,
        "plan": record.plan,
        "budget_bytes": record.budget_bytes,
        "peak": None if record.peak is None else {"phase": record.peak.phase, **_phase(record.peak)},
        "phases": {phase: _phase(peak) for phase, peak in record.phases.items()},
        "predicted": None
        if record.predicted is None
        else {
            phase: {"peak_bytes": each.peak_bytes, "categories": each.categories}
            for phase, each in record.predicted.items()
        },
        "loss": _ends(record.series("loss")),
        "eval_loss": _ends(record.series("eval/loss")),
        "eval_bits_per_byte": _ends(record.series("eval/bits_per_byte")),
        "median_tokens_per_s": findings.middle(speed) if speed else None,
        "far": findings.lanes(record),
        "vm_hwm_bytes": max((value for _, value in hwm), default=None),
        "notes": list(record.notes),
    }


def _phase(peak: PhasePeak) -> dict[str, Any]:
    return {
        "step": peak.step,
        "peak_bytes": peak.peak_bytes,
        "categories": peak.categories,
        "owners": [
            {
                "owner": holder.owner,
                "category": holder.category,
                "shape": list(holder.shape),
                "dtype": holder.dtype,
                "count": holder.count,
                "total_bytes": holder.total_bytes,
            }
            for holder in peak.holders
        ],
    }


def _ends(series: Series) -> dict[str, Any] | None:
    """Return the first and the last point of a series; None if it is empty."""
    if not series:
        return None
    (first_step, first), (last_step, last) = series[0], series[-1]
    return {"first": first, "first_step": first_step, "last": last, "last_step": last_step}
