"""`planish plan run.toml`: will it fit, before anything is loaded."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from planish.cli.options import parse
from planish.cli.train import read_run
from planish.errors import DoesNotFit, PlanishError
from planish.runfile import RunFile
from planish.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class Options:
    """Show what a run will hold in each phase, from its very step on tensors without data; exit 3: does not fit."""

    run: Annotated[Path | None, tyro.conf.Positional] = None
    """Run file (TOML), or a run folder."""
    json: bool = False
    """Print one JSON object and nothing else."""


def main(words: list[str]) -> int:
    """Run the verb."""
    options, settings = parse(Options, words, verb="plan")
    if not options.json:
        return _show(read_run(options.run, settings))
    try:
        tree = _answer(read_run(options.run, settings))
        code = 0 if tree["fits"] else DoesNotFit.exit_code
    except PlanishError as error:
        tree, code = {"error": str(error)}, error.exit_code
    sys.stdout.write(json.dumps(tree) + "\n")
    return code


def _answer(run: RunFile) -> dict[str, Any]:
    """Return the answer as plain data."""
    from planish.train.dry_run import dry_run
    from planish.train.fit import to_tree

    tree = to_tree(dry_run(run), run.memory.budget)
    return tree | {"fits": run.memory.budget is None or tree["peak_bytes"] <= run.memory.budget}


def _show(run: RunFile) -> int:
    from planish.memory.book import CATEGORIES
    from planish.train.dry_run import dry_run
    from planish.train.fit import misfit, smallest_budget

    dry = dry_run(run)
    used = [name for name in CATEGORIES if any(peak.categories.get(name) for peak in dry.phases.values())]
    peaks = dry.phases.values()
    rows: list[tuple[str, list[str]]] = [
        ("GiB", list(dry.phases)),
        *((name, [_gib(peak.categories.get(name, 0)) for peak in peaks]) for name in used),
        ("peak", [_gib(peak.peak_bytes) for peak in peaks]),
    ]
    out = "".join(f"{name:<19}" + "".join(f"{cell:>11}" for cell in cells) + "\n" for name, cells in rows)
    out += f"\npeak {format_bytes(dry.peak_bytes)} in {dry.peak_phase}, held by\n"
    for held in dry.phases[dry.peak_phase].owners[:8]:
        out += f"  {held.owner:<40} {format_bytes(held.total_bytes):>10}  {held.count} x {held.shape} {held.dtype}\n"
    out += f'\nsmallest budget that would do: memory.budget = "{smallest_budget(dry)}"\n\n{run.plan.to_toml()}'
    sys.stdout.write(out)
    sys.stdout.flush()
    error = misfit(run, dry)
    if error is not None:
        raise error
    return 0


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.3f}" if nbytes else "-"
