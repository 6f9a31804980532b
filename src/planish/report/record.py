"""A run as data: what its folder says about settings, metrics and memory."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# As `planish.memory.book` names and orders them; that module needs torch.
PHASES = ("init", "forward", "head", "backward", "optimizer", "eval", "save", "resume")
CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer state",
    "boundaries",
    "layer working set",
    "head tiles",
    "dispatch blocks",
    "staging",
    "other",
)

_INFINITE = 1e300  # arithmetic with anything larger may overflow; NaN is not below it either

Point = tuple[float, int, str]
Series = list[tuple[int, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Tensors alike that were alive at a peak, as `planish.memory.report.Held` has them."""

    owner: str
    category: str
    shape: tuple[int, ...]
    dtype: str
    count: int
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePeak:
    """The worst moment of one phase.

    Attributes:
        phase: Which phase.
        step: The step in or after which it was; 0 before the first.
        peak_bytes: Bytes alive then.
        at_s: Seconds since the recording of that line began; of the worst, since its first event.
        categories: Those bytes by category.
        holders: The largest holders.
    """

    phase: str
    step: int
    peak_bytes: int
    at_s: float
    categories: dict[str, int]
    holders: tuple[Holder, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """What the plan said a phase would peak at; `categories` may be empty."""

    peak_bytes: int
    categories: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStep:
    """One step of a pipeline, as it was planned and as it ran.

    Attributes:
        step: Which one.
        planned_bubble: Share of the ranks' time without a pass, as planned.
        measured_bubble: As it ran.
        planned: The picture, SVG.
        measured: The picture of what ran.
    """

    step: int
    planned_bubble: float
    measured_bubble: float
    planned: str
    measured: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneStep:
    """One step of the first rank, lane by lane.

    Attributes:
        step: Which one.
        lanes: When each was at work, in seconds since the step began, without overlaps; "compute" is what the others
            may hide behind.
    """

    step: int
    lanes: Mapping[str, tuple[tuple[float, float], ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """What a run folder says.

    Attributes:
        path: The folder.
        settings: The tree of `run.toml`.
        budget_bytes: Bytes that tensors were allowed; None for no limit.
        plan: For each peak its method and the method's settings.
        metrics: The lines of `metrics.jsonl` in order.
        phases: The worst moment of each phase over all lines of `memory.jsonl`, in the order of a run.
        peak: The worst of all moments; None where no memory was recorded.
        timeline: (seconds since its first, live bytes, phase) over the recording that `peak` belongs to.
        predicted: What `plan.json` expected of each phase; None where there is no such file.
        exceeded: The text of `budget-exceeded.txt`; None where there is no such file.
        notes: What could not be read, a sentence each.
        pipeline: A step whose passes were measured; None where no stages ran.
        lanes: A step whose lanes were measured; None where nothing ran beside the computation.
    """

    path: Path
    settings: Mapping[str, Any]
    budget_bytes: int | None
    plan: Mapping[str, Any]
    metrics: tuple[Mapping[str, Any], ...]
    phases: dict[str, PhasePeak]
    peak: PhasePeak | None
    timeline: tuple[Point, ...]
    predicted: dict[str, Predicted] | None
    exceeded: str | None
    notes: tuple[str, ...]
    pipeline: PipelineStep | None = None
    lanes: LaneStep | None = None

    def setting(self, section: str, key: str) -> Any:
        """Return a setting of the run file; None where it is not given."""
        table = self.settings.get(section)
        return table.get(key) if isinstance(table, Mapping) else None

    def series(self, key: str) -> Series:
        """Return (step, value) of each line of metrics that has a finite number under `key`."""
        return [(line["step"], line[key]) for line in self.metrics if is_number(line.get(key))]

    @property
    def steps_done(self) -> int:
        """The last step that metrics hold; 0 where no step was finished."""
        return max((step for step, _ in self.series("loss")), default=0)

    @property
    def steps_planned(self) -> int | None:
        """The steps that were asked for."""
        steps = self.setting("train", "steps")
        return steps if isinstance(steps, int) else None


def used_categories(moments: Iterable[PhasePeak | Predicted]) -> list[str]:
    """Return the categories with bytes at any of `moments`, in the order in which everything lists and stacks them."""
    used = {name for each in moments for name, size in each.categories.items() if size > 0}
    return [*(name for name in CATEGORIES if name in used), *sorted(used.difference(CATEGORIES))]


def is_number(value: Any) -> bool:
    """Return whether `value` is a finite number that can be drawn."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _INFINITE
