"""One step in the run folder: its lanes in `lanes.json`; of a pipeline numbers in `pipeline.json`, and two pictures."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planish.pipeline.draw import to_svg
from planish.pipeline.observed import Pass
from planish.pipeline.simulate import Timeline
from planish.train.run_folder import write_atomically

if TYPE_CHECKING:
    from planish.memory.lanes import Span

WRITTEN = ("pipeline.json", "pipeline-planned.svg", "pipeline-measured.svg")


def write_timelines(folder: Path, step: int, planned: Timeline, seen: Timeline) -> None:
    """Write what was planned of a step and what was seen of it.

    Raises:
        OSError: The disk refuses.
    """
    tree = {
        "step": step,
        "planned": _numbers(planned),
        "measured": _numbers(seen),
        "passes": [[str(span.actions[0]), round(span.start, 6), round(span.end, 6)] for span in seen.spans],
    }
    for name, text in zip(WRITTEN, (json.dumps(tree), *_pictures(planned, seen)), strict=True):
        write_atomically(folder / name, text)


def write_lanes(folder: Path, step: int, lanes: "Mapping[str, Sequence[Span]]") -> None:
    """Write when each lane was at work in a step.

    Raises:
        OSError: The disk refuses.
    """
    spans = {name: [[round(each, 6) for each in span] for span in lane] for name, lane in lanes.items()}
    write_atomically(folder / "lanes.json", json.dumps({"step": step, "lanes": spans}))


def read_passes(folder: Path) -> list[Pass] | None:
    """Return the passes that `write_timelines` wrote; None where there are none that can be read."""
    try:
        tree = json.loads((folder / WRITTEN[0]).read_text(encoding="utf-8"))
        return [(str(word), float(start), float(end)) for word, start, end in tree["passes"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _pictures(planned: Timeline, seen: Timeline) -> tuple[str, str]:
    return to_svg(planned, unit="seconds"), to_svg(seen, unit="seconds")


def _numbers(timeline: Timeline) -> dict[str, Any]:
    return {
        "step_s": round(timeline.makespan, 6),
        "bubble": round(timeline.bubble, 4),
        "busy": [round(busy / timeline.makespan, 4) for busy in timeline.busy],
    }
