"""What a run's record says, in sentences and rows; every number is the record's or computed from it."""

from collections.abc import Iterable, Mapping, Sequence
from math import ceil
from statistics import median

from planish.report.record import Holder, LaneStep, PhasePeak, PipelineStep, RunRecord, Series, is_number
from planish.units import format_bytes

COMPUTE = "compute"
Span = tuple[float, float]

# Of the lanes' time, what may be waited for before it is worth a word; and the coarsest choice that is proposed.
_HIDDEN = 0.1
_MOST_EVERY = 8


def outcome(record: RunRecord) -> str:
    """Return how the run ended, as far as its folder knows."""
    done, planned = record.steps_done, record.steps_planned
    if record.exceeded is not None:
        return f"The budget stopped the run after {_of_steps(done, planned)}"
    if done == 0:
        return "No step was finished"
    if planned is None or done < planned:
        return f"{_of_steps(done, planned)} {'is' if done == 1 else 'are'} on record"
    said = "The one step is done" if done == 1 else f"All {done:,} steps are done"
    if record.peak and record.budget_bytes and record.peak.peak_bytes <= record.budget_bytes:
        return f"{said}, inside the budget of {format_bytes(record.budget_bytes)}"
    return said


def peak_finding(record: RunRecord, peak: PhasePeak) -> str:
    """Return where memory peaked, and how that compares with the budget."""
    said = f"Memory peaked at {format_bytes(peak.peak_bytes)} in {moment(peak)}"
    if record.exceeded is not None:
        return f"Before the stop, m{said[1:]}"
    if record.budget_bytes is None:
        return said
    if peak.peak_bytes > record.budget_bytes:
        return f"{said}, {format_bytes(peak.peak_bytes - record.budget_bytes)} over the budget"
    return f"{said}, {peak.peak_bytes / record.budget_bytes:.0%} of the budget"


def holder_finding(peak: PhasePeak) -> str:
    """Return what held most of a peak."""
    name, size = max(peak.categories.items(), key=lambda item: item[1], default=("other", 0))
    return f"{name.capitalize()} held {size / peak.peak_bytes:.0%} of the peak"


def prediction_finding(record: RunRecord) -> str:
    """Return how prediction and measurement compare over the phases that have both."""
    if record.predicted is None:
        return "Nothing was predicted: this folder holds no plan.json"
    both = [phase for phase in record.phases if phase in record.predicted and record.predicted[phase].peak_bytes > 0]
    if not both:
        return "No phase was both predicted and measured"
    over = {phase: record.phases[phase].peak_bytes - record.predicted[phase].peak_bytes for phase in both}
    if not any(over.values()):
        return f"Predicted and measured are equal to the byte in {f'all {len(both)} phases' if both[1:] else both[0]}"
    worst = max(over, key=lambda phase: over[phase])
    if over[worst] > 0:
        share = over[worst] / record.predicted[worst].peak_bytes
        return f"{worst.capitalize()} went {_difference(over[worst])} above its prediction ({share:.2%})"
    lowest = min(over, key=lambda phase: over[phase])
    return f"No phase went above its prediction; {lowest} stayed furthest below, by {_difference(-over[lowest])}"


def far_finding(record: RunRecord) -> str:
    """Return how much of the boundaries' time in far memory nobody waited for, and what would hide more; "": none."""
    found = _lanes(record, of_optimizer=False)
    busy_s, waited_s = (sum(each[name] for each in found.values()) for name in ("busy_s", "waited_s"))
    moved = format_bytes(int(sum(each["bytes"] for each in found.values()) / max(1, record.steps_done)))
    if not found:
        return ""
    said = f"Far memory carried {moved} a step"
    if not busy_s:
        return said
    said = f"{said}, {max(0.0, 1 - waited_s / busy_s):.0%} of its time behind the layers"
    more = max(ceil(each["busy_s"] / max(1e-9, each["busy_s"] - each["waited_s"])) for each in found.values())
    choice = record.plan.get("boundary")
    every = choice.get("every", 1) if isinstance(choice, Mapping) else 1
    if waited_s <= _HIDDEN * busy_s or not 1 < more <= _MOST_EVERY:
        return said
    return f"{said}; with `plan.boundary.every` = {every * more} the link would keep up"


def optim_finding(record: RunRecord) -> str:
    """Return what streaming the optimizer's state took, and how much of it nobody waited for; "" where none streams."""
    found = _lanes(record, of_optimizer=True)
    moving = [each for each in found.values() if each["bytes"]]
    if not moving:
        return ""
    steps = max(1, record.steps_done)
    busy_s, waited_s = (sum(each[name] for each in moving) for name in ("busy_s", "waited_s"))
    said = f"Streamed optimizer state: {format_bytes(int(sum(each['bytes'] for each in moving) / steps))} a step"
    if not busy_s:
        return said
    together_s = sum(each["busy_s"] for each in found.values())
    longest = max(found, key=lambda name: found[name]["busy_s"])
    return (
        f"{said}, {max(0.0, 1 - waited_s / busy_s):.0%} of its time behind other work; "
        f"`{_lane_name(longest)}` is the longest lane, {found[longest]['busy_s'] / together_s:.0%} of all"
    )


def lane_rows(record: RunRecord, *, of_optimizer: bool = False) -> list[tuple[str, str]]:
    """Return (lane, what it did) for each lane of far memory: the boundaries', or the optimizer's."""
    return [(_lane_name(name), _lane(each)) for name, each in _lanes(record, of_optimizer=of_optimizer).items()]


def _lane(each: Mapping[str, float]) -> str:
    moved = f"{format_bytes(int(each['bytes']))} in " if each["bytes"] else ""
    waited = f", waited for {each['waited_s']:.1f} s" if each["bytes"] else ""
    return f"{moved}{each['busy_s']:.1f} s{waited}"


def _lane_name(name: str) -> str:
    return name.removeprefix("optim-").replace("-", " ")


def _lanes(record: RunRecord, *, of_optimizer: bool) -> dict[str, dict[str, float]]:
    return {name: each for name, each in lanes(record).items() if name.startswith("optim-") == of_optimizer}


def lanes(record: RunRecord) -> dict[str, dict[str, float]]:
    """Return what each lane of far memory did in all steps: bytes, seconds busy, seconds waited for."""
    found: dict[str, dict[str, float]] = {}
    for line in record.metrics:
        for key, value in line.items():
            parts = key.split("/")
            if parts[0] == "far" and len(parts) == 3 and is_number(value):
                lane = found.setdefault(parts[1], {"bytes": 0.0, "busy_s": 0.0, "waited_s": 0.0})
                lane[parts[2]] = lane.get(parts[2], 0.0) + value
    return found


def lanes_finding(step: LaneStep) -> str:
    """Return how much of the collectives' and copies' time was behind computation."""
    beside = [span for name, spans in step.lanes.items() if name != COMPUTE for span in spans]
    busy_s, hidden_s = behind(beside, step.lanes.get(COMPUTE, ()))
    if not busy_s:
        return f"Nothing ran beside the computation in step {step.step}"
    return f"{hidden_s / busy_s:.0%} of the time of collectives and copies was behind computation in step {step.step}"


def behind(spans: Iterable[Span], compute: Sequence[Span]) -> tuple[float, float]:
    """Return the seconds of `spans`, those at once counted once, and how many of them `compute` covers."""
    busy_s = hidden_s = 0.0
    ended, index = 0.0, 0
    for begins, end in sorted(spans):
        start = max(begins, ended)
        if end <= start:
            continue
        ended, busy_s = end, busy_s + end - start
        while index < len(compute) and compute[index][1] <= start:
            index += 1
        hidden_s += sum(max(0.0, min(end, last) - max(start, first)) for first, last in compute[index:])
    return busy_s, hidden_s


def pipeline_finding(pipeline: PipelineStep) -> str:
    """Return how much of the ranks' time had no pass, beside the plan."""
    return (
        f"Ranks were without a pass for {pipeline.measured_bubble:.0%} of step {pipeline.step}, "
        f"planned {pipeline.planned_bubble:.0%}"
    )


def loss_finding(record: RunRecord) -> str:
    """Return where loss began and ended, in training and held out."""
    loss, held_out, bits = (record.series(key) for key in ("loss", "eval/loss", "eval/bits_per_byte"))
    parts = []
    if len(loss) > 1:
        parts.append(f"Loss went from {loss[0][1]:.3f} to {loss[-1][1]:.3f} in {loss[-1][0] - loss[0][0] + 1:,} steps")
    elif loss:
        parts.append(f"Loss was {loss[0][1]:.3f} in step {loss[0][0]:,}")
    if held_out:
        per_byte = f" ({bits[-1][1]:.3f} bits per byte)" if bits else ""
        parts.append(f"{'held out it is' if loss else 'Held-out loss is'} {held_out[-1][1]:.3f}{per_byte}")
    return "; ".join(parts)


def speed_finding(speed: Series) -> str:
    """Return the typical speed."""
    if len(speed) == 1:
        return f"Step {speed[0][0]:,} ran at {speed[0][1]:,.0f} tokens/s"
    return f"Half of the steps ran at {middle(speed):,.0f} tokens/s or more"


def middle(series: Series) -> float:
    """Return the median of a series that is not empty."""
    return median(value for _, value in series)


def step_peaks_finding(peaks: Series) -> str:
    """Return how the peaks of the steps compare with one another."""
    step, high_bytes = max(peaks, key=lambda point: point[1])
    spread_bytes = high_bytes - min(value for _, value in peaks)
    high = format_bytes(int(high_bytes))
    if len(peaks) == 1:
        return f"Step {step:,} peaked at {high}"
    if spread_bytes == 0:
        return f"Every step peaked at the same {high}"
    return f"Peaks of steps differ by {format_bytes(int(spread_bytes))}; step {step:,} has the highest, {high}"


def moment(peak: PhasePeak) -> str:
    """Return when a peak was: eval and save come after their step, what step 0 records before the first."""
    if peak.step == 0:
        return f"{peak.phase} before the first step"
    return f"{peak.phase} {'after' if peak.phase in ('eval', 'save', 'resume') else 'of'} step {peak.step:,}"


def describe_tensors(holder: Holder) -> str:
    """Return how many tensors of which shape and dtype a holder has."""
    times = f"{holder.count:,} × " if holder.count > 1 else ""
    shape = " × ".join(f"{size:,}" for size in holder.shape)
    return f"{times}[{shape}] {holder.dtype}"


def main_numbers(record: RunRecord) -> list[tuple[str, str, str]]:
    """Return (name, number, remark) of what a reader looks for first; what was not recorded is left out."""
    planned = record.steps_planned
    rows = [("steps", f"{record.steps_done:,}", "" if planned is None else f"of {planned:,}")]
    if record.peak is not None:
        limit = "no budget" if record.budget_bytes is None else f"of {format_bytes(record.budget_bytes)}"
        remark = limit if record.exceeded is None else "before the stop"
        rows.append(("peak of tensors", format_bytes(record.peak.peak_bytes), remark))
    loss, held_out, bits = (record.series(key) for key in ("loss", "eval/loss", "eval/bits_per_byte"))
    if loss:
        rows.append(("loss", f"{loss[-1][1]:.3f}", f"from {loss[0][1]:.3f}" if len(loss) > 1 else ""))
    if held_out:
        rows.append(("held out", f"{held_out[-1][1]:.3f}", f"{bits[-1][1]:.3f} bits per byte" if bits else ""))
    density, saved = record.series("activation/density"), record.series("activation/saved_bytes")
    if density and saved:
        remark = f"from {density[0][1]:.1%}; packing them saves {format_bytes(int(saved[-1][1]))}"
        rows.append(("activations not zero", f"{density[-1][1]:.1%}", remark))
    speed = record.series("tokens_per_s")
    if speed:
        rows.append(("tokens/s", f"{middle(speed):,.0f}", "median of all steps" if len(speed) > 1 else ""))
    return rows


def main_settings(record: RunRecord) -> list[tuple[str, str]]:
    """Return (name, value) of the settings that a reader looks for first; those not given are left out."""
    tokens, budget = record.series("tokens"), record.budget_bytes
    rows = [
        *(("model", record.setting("model", key)) for key in ("from", "gguf", "config")),
        ("dtype", record.setting("model", "dtype")),
        ("context", _tokens(record.setting("data", "context"))),
        ("tokens a step", f"{tokens[-1][1]:,}" if tokens else None),
        ("learning rate", record.setting("train", "lr")),
        ("schedule", record.setting("train", "schedule")),
        ("text", _list(record.setting("data", "train"))),
        ("held out", _list(record.setting("data", "eval"))),
        ("budget", "none" if budget is None else format_bytes(budget)),
    ]
    return [(name, str(value)) for name, value in rows if value]


def plan_rows(record: RunRecord) -> list[tuple[str, str]]:
    """Return (peak, method and its settings) of the plan."""
    return [(str(peak), _method(choice)) for peak, choice in record.plan.items()]


def _method(choice: object) -> str:
    if not isinstance(choice, Mapping):
        return str(choice)
    details = [f"{key} {value}" for key, value in choice.items() if key != "method"]
    return ", ".join([str(choice.get("method", "?")), *details])


def _tokens(value: object) -> str | None:
    return f"{value:,} tokens" if isinstance(value, int) else None


def _list(value: object) -> str | None:
    return ", ".join(map(str, value)) if isinstance(value, list) else None


def _of_steps(done: int, planned: int | None) -> str:
    return f"{done:,} step{'s' * (done != 1)}" if planned is None else f"{done:,} of {planned:,} steps"


def _difference(size_bytes: int) -> str:
    return format_bytes(size_bytes) if size_bytes >= 2**10 else f"{size_bytes:,} bytes"
