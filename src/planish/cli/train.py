"""`planish train run.toml`: trains a model inside a memory budget."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from planish.cli.options import parse
from planish.errors import UsageError
from planish.methods import Pipeline
from planish.runfile import RunFile, load

if TYPE_CHECKING:
    from planish.comm.world import World
    from planish.train.fit import Verdict
    from planish.train.session import Shape


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train a model inside a memory budget. Every setting of the run file is also a flag, `--section.key value`."""

    run: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")] = None
    """Run file (TOML), or the folder of a run to resume."""
    resume: bool = False
    """Go on from the run folder's newest intact checkpoint."""
    overwrite: bool = False
    """Lose the run that the folder holds."""


def main(words: list[str]) -> int:
    """Run the verb."""
    options, settings = parse(Options, words, verb="train")
    train(read_run(options.run, settings), resume=options.resume, overwrite=options.overwrite)
    return 0


def read_run(path: Path | None, settings: list[tuple[str, Any]]) -> RunFile:
    """Return the run file; a run folder stands for its own run file, in place."""
    if path is None or not path.is_dir():
        return load(path, settings)
    if not (path / "run.toml").is_file():
        raise UsageError(f"folder {path} holds no run.toml; name a run file or a run folder.")
    run = load(path / "run.toml", settings)
    return dataclasses.replace(run, save=dataclasses.replace(run.save, dir=path))


def train(run: RunFile, *, resume: bool, overwrite: bool) -> None:
    """Train `run` in its folder, in one order of summation; under a budget freed memory goes back to the system."""
    from planish.memory.allocator import ask_for_large_pages, fix_malloc_thresholds

    ask_for_large_pages()
    import torch

    from planish.cli.progress import RunView
    from planish.comm import world as worlds
    from planish.memory.meter import ProcessMeter
    from planish.models.load import run_device
    from planish.train.fit import judge
    from planish.train.preflight import common_facts
    from planish.train.run_folder import follow_run_folder, open_run_folder
    from planish.train.session import run_training

    if run.memory.budget is not None:
        fix_malloc_thresholds()
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    meter = ProcessMeter(run_device())
    run = _over_ranks(run, worlds.launched_size())
    again = worlds.restarts() > 0 and (run.save.dir / "run.toml").is_file()
    resume, overwrite = resume or again, overwrite and not again
    verdict = judge(run) if run.mesh.size > 1 and worlds.launched_rank() == 0 else None
    with worlds.join(run.mesh, device_type=run_device().type) as world, world.guarded():
        world.require_same(common_facts(run))
        run = _with_turns(run, verdict, world)
        if world.leads:
            opened = open_run_folder(run.save.dir, resume=resume, overwrite=overwrite)
        else:
            opened = follow_run_folder(run.save.dir, resume=resume)
        with opened as folder, RunView(quiet=not world.leads) as view:
            run_training(run, folder, view, meter, world, verdict, _shape(run))
            view.note(f"drawn in {folder.report}")


def _shape(run: RunFile) -> "Shape":
    """Return what gives the job a teacher, where the run has one."""
    if run.distil.from_ is None:
        return lambda job, _: job
    from planish.compress.teach import taught

    return taught


def _with_turns(run: RunFile, verdict: "Verdict | None", world: "World") -> RunFile:
    """Return `run` with the schedule that rank 0 has chosen where it was open."""
    chosen = None if verdict is None else verdict.run.plan.pipeline
    method = world.gather(chosen and chosen.method)[0]
    if run.plan.pipeline is not None or method is None:
        return run
    return dataclasses.replace(run, plan=dataclasses.replace(run.plan, pipeline=Pipeline(method=method)))


def _over_ranks(run: RunFile, size: int) -> RunFile:
    """Return `run` with its mesh over the ranks that were started."""
    try:
        return dataclasses.replace(run, mesh=run.mesh.over(size))
    except ValueError as error:
        raise UsageError(str(error)) from error
