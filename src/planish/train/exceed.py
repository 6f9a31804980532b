"""What a run does about a budget that it would break or has broken: finer tiles, and what would have fitted."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from planish.comm.world import World
from planish.errors import BudgetExceeded, UsageError
from planish.methods import Plan
from planish.plan.choose import advise, choose
from planish.plan.finer import fit_by_tiles, told
from planish.plan.offers import activation_methods
from planish.price.config import read_config
from planish.runfile import RunFile
from planish.train.fit import context_that_fits
from planish.train.job import Job
from planish.train.predict import Prediction, Say, config_tree, predict, read_table
from planish.train.run_folder import RunFolder, disk_errors, write_atomically
from planish.units import format_bytes


def planned(run: RunFile, predicted: Prediction | None, world: World) -> Plan:
    """Return the plan to begin with, which rank 0 alone may have made finer."""
    if run.memory.on_exceed != "adapt":
        return run.plan
    plan = run.plan if predicted is None else predicted.plan
    return Plan.from_toml(world.gather(plan.to_toml())[0])


def refit(job: Job, peaks: list[Mapping[str, int]], say: Say) -> Job:
    """Return the job with tiles so fine that what was measured would have been within the budget.

    What was measured is put right by the difference of both prices. See [Note: adapt] in `planish.plan.finer`.

    Args:
        job: Between two steps.
        peaks: What each rank has held, by phase.
        say: Told what has changed.

    Raises:
        BudgetExceeded: No tiles are fine enough, or the model's step has no price.
    """
    engine, run = job.engine, job.run
    text = None
    if engine.world.leads:
        most = {phase: max(each.get(phase, 0) for each in peaks) for phase in peaks[0]}
        plan = _finer(run, most)
        text = None if plan is None else plan.to_toml()
    text = engine.world.gather(text)[0]
    excess, engine.ledger.first_excess = engine.ledger.first_excess, None
    if text is None:
        sentence = "another rank went over its budget" if excess is None else excess.sentence.removesuffix(".")
        table = "" if excess is None else excess.table
        raise BudgetExceeded(f"{sentence}; no finer tiles that have a price would bound it.", table=table)
    plan = Plan.from_toml(text)
    say(f"the budget was exceeded; from here on {told(run.plan, plan)}.")
    return replace(job, run=replace(run, plan=plan), engine=engine.refitted(plan))


def _finer(run: RunFile, peaks: Mapping[str, int]) -> Plan | None:
    found = _predict(run)
    if found is None:
        return None
    now = found.estimate.phases

    def put_right(plan: Plan) -> int:
        found = predict(replace(run, plan=plan), _silent).estimate.phases
        return max(nbytes + found[phase].peak_bytes - now[phase].peak_bytes for phase, nbytes in peaks.items())

    return fit_by_tiles(
        put_right, run.plan, budget_bytes=run.memory.budget or 0, tokens=run.tokens_per_microbatch, running=True
    )


@contextmanager
def would_have_fitted(run: RunFile, folder: RunFolder) -> Iterator[None]:
    """Add what would have fitted to the table of a run that ends by its budget, once its memory is free again."""
    try:
        yield
    except BudgetExceeded as error:
        table = folder.path / "budget-exceeded.txt"
        if folder.leads and table.is_file():
            with disk_errors(f"writing {table}"):
                write_atomically(table, f"{table.read_text(encoding='utf-8')}\n{_remedies(run, error.over_bytes)}\n")
        raise


def _remedies(run: RunFile, over_bytes: int) -> str:
    """Return what would have fitted, as lines of text; `over_bytes` too many were alive when the run ended."""
    found = _predict(run)
    if found is None:
        return "what would have fitted is not known: the step of this run has no price"
    peak_bytes, budget_bytes = found.estimate.peak_bytes, run.memory.budget
    said = [f"this plan is priced at {format_bytes(peak_bytes)}, in {found.estimate.peak_phase}"]
    if budget_bytes is not None:
        # Where the price was too low, what fits is what is priced lower by as much as was too much.
        target_bytes = min(budget_bytes, peak_bytes - over_bytes)
        said.append(f'memory.budget = "{-(-(peak_bytes + budget_bytes - target_bytes) // 2**10)}KiB"')
        said += _that_fit(run, found, target_bytes)
    return "\n  ".join(("what would have fitted", *said))


def _that_fit(run: RunFile, found: Prediction, target_bytes: int) -> Iterator[str]:
    """Yield each change of the run that is priced at `target_bytes` or less."""

    def price(plan: Plan) -> int:
        return predict(replace(run, plan=plan), _silent).estimate.peak_bytes

    if found.table is not None:
        context = context_that_fits(run, found, target_bytes)
        yield "no context" if context is None else f"data.context = {context}"
    finer = fit_by_tiles(price, run.plan, budget_bytes=target_bytes, tokens=run.tokens_per_microbatch)
    if finer is not None:
        yield f'finer tiles, as memory.on_exceed = "adapt" takes them: {told(run.plan, finer)}'
    if run.mesh.size > 1:
        return
    tree = config_tree(run.model)
    bounded = replace(Plan(), dispatch=run.plan.dispatch, optim=run.plan.optim)
    offered = () if tree is None else activation_methods(read_config(tree))
    choice = choose(price, bounded, named=frozenset(), budget_bytes=target_bytes, activation=offered)
    if choice.peak_bytes <= target_bytes:
        yield f"a plan of {format_bytes(choice.peak_bytes)}: {told(run.plan, choice.plan) or 'this one'}"
    else:
        yield from advise(price, choice.plan, budget_bytes=target_bytes)


def _predict(run: RunFile) -> Prediction | None:
    """Return what `run` is priced at; None where it has no price, or over ranks no table that is at hand."""
    if run.mesh.size > 1 and read_table(run) is None:  # a dry run over ranks is for a process alone
        return None
    try:
        return predict(run, _silent)
    except UsageError:
        return None


def _silent(_sentence: str) -> None:
    """Say nothing."""
