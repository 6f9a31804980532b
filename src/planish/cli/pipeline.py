"""`planish plan --pipeline`: what a schedule does with a run's step, in time and memory, before there is any rank."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planish.cli.say import write_file
from planish.decode import Count, decode
from planish.errors import UsageError
from planish.methods import Pipeline
from planish.pipeline.draw import to_svg
from planish.pipeline.outline import Outcome, outcome, outcome_of, outline, rivals
from planish.pipeline.schedule import Schedule
from planish.pipeline.validate import validate
from planish.pipeline.workload import Times, Workload
from planish.runfile import RunFile, load_tree
from planish.train.turns import measured_times, workload_of


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mesh:
    """What a pipeline adds to the table `[mesh]`: its ranks."""

    pp: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class _ByHand:
    """The table `[plan.pipeline]` of a schedule that is read rather than made."""

    file: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The schedule asked for and the others that do the same work."""

    chosen: Outcome
    others: list[Outcome]
    work: Workload


def answer(path: Path | None, settings: list[tuple[str, Any]]) -> Answer:
    """Return what there is to say about the pipeline of a run file and its flags.

    Times are those of the flags, else those that a run folder's passes took, else products.

    Raises:
        UsageError: Settings that name no pipeline, or a schedule written by hand that does not run.
    """
    file = path / "run.toml" if path is not None and path.is_dir() else path
    tree = load_tree(file, [("data.train", "builtin:english"), *settings] if file is None else settings)
    pp = _take(tree.get("mesh"), "pp", None)
    mesh = decode(_Mesh, {} if pp is None else {"pp": pp}, "mesh")
    table = _take(tree.get("plan"), "pipeline", {})
    table = {"method": table} if isinstance(table, str) else table
    times = _take(table, "times", None)
    run = decode(RunFile, tree)
    if times is not None:
        measured = decode(Times, times, "plan.pipeline.times")
    else:
        measured = measured_times(path, run) if path is not None and path.is_dir() else None
    work = workload_of(run, measured)
    if isinstance(table, dict) and "file" in table:
        by_hand = decode(_ByHand, table, "plan.pipeline")
        chosen = outcome_of(_read(by_hand.file, mesh.pp, work.microbatches), work)
    else:
        chosen = outcome(decode(Pipeline, table, "plan.pipeline"), work, mesh.pp)
    return Answer(chosen=chosen, others=rivals(chosen, work), work=work)


def show(found: Answer, *, svg: Path | None, actions: Path | None) -> int:
    """Print the answer for people, with the picture as text, and write what was asked for."""
    _write(found, svg, actions)
    sys.stdout.write(outline(found.chosen, found.others, found.work))
    return 0


def to_tree(found: Answer, *, svg: Path | None, actions: Path | None) -> dict[str, Any]:
    """Return the answer as plain data, and write what was asked for."""
    _write(found, svg, actions)
    return found.chosen.to_dict() | {
        "unit": found.work.unit,
        "microbatches": found.work.microbatches,
        "actions": found.chosen.schedule.to_text(),
        "others": [each.to_dict() for each in found.others],
    }


def _take(tree: Any, key: str, default: Any) -> Any:
    """Return the entry `key`, taken out of `tree` if that is a table; what is none is refused where it is decoded."""
    return tree.pop(key, default) if isinstance(tree, dict) else default


def _read(path: Path, num_ranks: int, num_microbatches: int) -> Schedule:
    """Return the schedule in the file at `path`, which is that of a run of such sizes and runs to its end."""
    try:
        schedule = Schedule.from_text(path.read_text(encoding="utf-8"))
        for name, given, found in (
            ("mesh.pp", num_ranks, schedule.num_ranks),
            ("train.grad_accum", num_microbatches, schedule.num_microbatches),
        ):
            if given != found:
                raise UsageError(f"`{name}` ({given}) must be the {found} of the schedule.")
        validate(schedule)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"`plan.pipeline.file` {path} cannot be read: {error}") from error
    return schedule


def _write(found: Answer, svg: Path | None, actions: Path | None) -> None:
    texts = ((svg, to_svg(found.chosen.timeline, unit=found.work.unit)), (actions, found.chosen.schedule.to_text()))
    for path, text in texts:
        if path is not None:
            write_file(path, text)
