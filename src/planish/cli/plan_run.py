"""What `planish plan run.toml` says of a run as it is: phases, the least bounded plan that fits, what would."""

import sys
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from planish.cli.prove import disproof
from planish.cli.train import read_run
from planish.decode import encode
from planish.errors import PlanishError, UsageError
from planish.methods import Activation, Plan, keeps_attention
from planish.plan.choose import Choice, advise, choose
from planish.plan.estimate import Estimate
from planish.plan.offers import activation_methods
from planish.price.config import read_config
from planish.runfile import RunFile
from planish.train.fit import adapted, context_that_fits, misfit, smallest_budget
from planish.train.predict import Prediction, Say, by_dry_run, config_tree, max_positions, predict
from planish.train.turns import take_turns
from planish.units import format_bytes

_WIDTH = 110


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What there is to say about a run.

    Attributes:
        run: Every setting.
        prediction: What it will hold.
        plain: What it would hold if nothing were bounded; None where nobody has asked.
        choice: The least bounded plan that fits, where there is a budget to fit.
        longest: The longest context that fits the budget.
        proof: What the dry run says.
        notes: What was assumed.
    """

    run: RunFile
    prediction: Prediction
    plain: Estimate | None
    choice: Choice | None
    longest: int | None
    proof: Estimate | None
    notes: tuple[str, ...]

    @property
    def differences(self) -> dict[str, float]:
        """By how much of itself each phase of the dry run differs from its price."""
        proof = {} if self.proof is None else self.proof.phases
        priced = self.prediction.estimate.phases
        return {phase: priced[phase].peak_bytes / each.peak_bytes - 1 for phase, each in proof.items()}


def answer_of(path: Path | None, settings: list[tuple[str, Any]], say: Say, *, proven: bool) -> Answer:
    """Return what there is to say about a run file and its flags.

    Args:
        path: The run file or a run folder; None: flags alone.
        settings: The run file's settings among the flags.
        say: Takes a sentence where the answer takes time.
        proven: Whether the very step is run on tensors without data too.
    """
    if path is None and not any(name == "data.train" for name, _ in settings):
        settings = [("data.train", "builtin:english"), *settings]  # what is trained on weighs nothing
    run, notes = _assume(_over_ranks(read_run(path, settings)))
    budget_bytes = run.memory.budget
    if run.mesh.pp > 1:  # each price of another plan would take a dry run of every rank
        turns = take_turns(run, lambda each: predict(each, say))
        found, notes = turns.prediction, (*notes, *turns.reasons)
        proof = by_dry_run(turns.run) if proven else None
        return Answer(run=turns.run, prediction=found, plain=None, choice=None, longest=None, proof=proof, notes=notes)
    prediction = adapted(run, predict(run, say), say)
    run = replace(run, plan=prediction.plan)
    plans = {run.plan: prediction.estimate}

    def peak(plan: Plan) -> Estimate:
        if plan not in plans:
            plans[plan] = predict(replace(run, plan=plan), say).estimate
        return plans[plan]

    def peak_bytes(plan: Plan) -> int:
        return peak(plan).peak_bytes

    named = _named(path, settings, run)
    choice = None
    if budget_bytes is not None:
        offered = _offered(run)
        choice = choose(peak_bytes, run.plan, named=named, budget_bytes=budget_bytes, activation=offered)
    chosen = run.plan if choice is None else choice.plan
    return Answer(
        run=run,
        prediction=prediction,
        plain=peak(_plain(run)),
        choice=choice,
        longest=None if budget_bytes is None else context_that_fits(run, prediction, budget_bytes),
        proof=by_dry_run(run) if proven else None,
        notes=(
            *notes,
            *_places(prediction.estimate),
            *dict.fromkeys((*run.plan.assumptions, *chosen.assumptions)),
            *advise(peak_bytes, run.plan, budget_bytes=budget_bytes),
        ),
    )


def _over_ranks(run: RunFile) -> RunFile:
    """Return `run`, whose mesh says how many ranks there are: none were started to be counted."""
    degree = max(("ep", "vp", "cp"), key=lambda name: getattr(run.mesh, name))
    if run.mesh.dp is None and getattr(run.mesh, degree) > 1:
        raise UsageError(
            f"`mesh.{degree}` ({getattr(run.mesh, degree)}) is a part of the ranks that hold shards, and none were "
            f"started to be counted; set `mesh.dp`, such as `mesh.dp = {getattr(run.mesh, degree)}`."
        )
    return run


def _plain(run: RunFile) -> Plan:
    """Return the plan that bounds nothing but what the mesh cannot do without."""
    kept = {"dispatch": True, "attention": run.mesh.cp > 1, "vocab": run.mesh.vp > 1}
    return replace(Plan.plain(), **{peak: getattr(run.plan, peak) for peak, needed in kept.items() if needed})


def _offered(run: RunFile) -> tuple[Activation, ...]:
    """Return the ways to bound what the model's feed-forward networks hold."""
    tree = config_tree(run.model)
    return () if tree is None else activation_methods(read_config(tree))


def _places(found: Estimate) -> tuple[str, ...]:
    """Return where streamed optimizer state lies."""
    if not found.far:
        return ()
    host, disk = (format_bytes(found.far[f"optim {place}"]) for place in ("host", "disk"))
    return (f"optim = stream-adamw keeps {disk} on the disk and {host} in host memory, each array on whole pages",)


def _named(path: Path | None, settings: list[tuple[str, Any]], run: RunFile) -> frozenset[str]:
    """Return the peaks whose method the user has named, or whose other methods would not go with those."""
    file = None if path is None else path / "run.toml" if path.is_dir() else path
    tree = {} if file is None else tomllib.loads(file.read_text(encoding="utf-8")).get("plan", {})
    named = frozenset(tree) | {name.split(".")[1] for name, _ in settings if name.startswith("plan.")}
    return named | {"attention"} if keeps_attention(run.plan.boundary) or run.mesh.cp > 1 else named


def _assume(run: RunFile) -> tuple[RunFile, tuple[str, ...]]:
    """Return `run` as it could begin, and what was assumed for that."""
    positions = max_positions(run.model)
    if positions is None or run.data.context <= positions or run.model.rope or run.model.extend_positions:
        return run, ()
    note = f"the model has {positions:,} positions: taken as if `model.extend_positions` were set."
    return replace(run, model=replace(run.model, extend_positions=True)), (note,)


def _ranks(run: RunFile, found: Estimate) -> tuple[str, ...]:
    """Return what the figures are of, where there are several ranks."""
    mesh = run.mesh
    if found.ranks:
        each = ", ".join(f"rank {rank} {format_bytes(peak)}" for rank, peak in enumerate(found.ranks))
        return (f"each phase is that of the stage that holds most, and `memory.budget` is each rank's: {each}",)
    if mesh.size == 1:
        return ()
    shares = f"replicate {mesh.replicate} x dp {mesh.dp or 1}"
    return (f"each of {mesh.size} ranks ({shares}) holds this, and `memory.budget` is each rank's",)


def error_of(answer: Answer) -> PlanishError | None:
    """Return why the exit code is not 0."""
    off = answer.differences
    if answer.run.mesh.sharded and off.get("init", -1) > 0:  # what rank 0 holds while it deals out is bounded alone
        del off["init"]
    return disproof(off) or misfit(answer.run, answer.prediction)


def to_tree(answer: Answer) -> dict[str, Any]:
    """Return the answer as plain data."""
    run, found = answer.run, answer.prediction.estimate
    budget_bytes = run.memory.budget
    tree = found.to_dict() | {
        "ranks": run.mesh.size,
        "budget_bytes": budget_bytes,
        "fits": budget_bytes is None or found.peak_bytes <= budget_bytes,
        "smallest_budget": smallest_budget(found),
        "longest_context": answer.longest,
        "source": "table" if answer.prediction.table is not None else "dry run",
        "plan": encode(run.plan),
        "assumed": list(answer.notes),
        "approximations": list(run.plan.approximations),
        "plain": answer.plain and {"peak_bytes": answer.plain.peak_bytes, "peak_phase": answer.plain.peak_phase},
    }
    if answer.choice is not None:
        choice = answer.choice
        tree["choice"] = {
            "plan": encode(choice.plan),
            "peak_bytes": choice.peak_bytes,
            "reasons": list(choice.reasons),
        }
    if answer.proof is not None:
        tree["proof"] = answer.proof.to_dict() | {"differences": answer.differences}
    return tree


def show(answer: Answer) -> int:
    """Print the answer for people; what does not fit, or is not proven, is an error."""
    run, found = answer.run, answer.prediction.estimate
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else _WIDTH, highlight=False)
    console.print(_table(answer))
    console.print(
        f"peak {format_bytes(found.peak_bytes)} in {found.peak_phase}, {found.phases[found.peak_phase].where}"
    )
    console.print(f"held by {found.owners}")
    for sentence in (*_ranks(run, found), *answer.notes, *run.plan.approximations, *_verdict(answer)):
        console.print(sentence)
    plan = run.plan if answer.choice is None else answer.choice.plan
    heading = "# the plan" if answer.choice is None else "# the least bounded plan, to paste into a run file"
    console.print(f"\n{heading}\n{plan.to_toml()}", markup=False, end="")
    error = error_of(answer)
    if error is not None:
        raise error
    return 0


def _verdict(answer: Answer) -> list[str]:
    run, found, plain = answer.run, answer.prediction.estimate, answer.plain
    said = []
    if plain is not None:
        said.append(f"with nothing bounded it would be {format_bytes(plain.peak_bytes)} in {plain.peak_phase}")
    if run.memory.budget is None:
        return [*said, f'smallest budget that would do: memory.budget = "{smallest_budget(found)}"']
    if found.peak_bytes <= run.memory.budget:
        left = format_bytes(run.memory.budget - found.peak_bytes)
        said.append(f"fits {format_bytes(run.memory.budget)} with {left} to spare")
        if answer.longest is not None:
            positions = max_positions(run.model)
            beyond = positions is not None and answer.longest > positions
            limit = f", beyond the model's {positions:,} positions" if beyond else ""
            said.append(f"the longest context that would fit: {answer.longest:,} tokens{limit}")
    return [*said, *(answer.choice.reasons if answer.choice else ())]


def _table(answer: Answer) -> Table:
    """Return phases x categories, and the dry run beside the prices."""
    phases = answer.prediction.estimate.phases
    categories = dict.fromkeys(name for each in phases.values() for name in each.categories)
    table = Table(box=None, pad_edge=False)
    table.add_column("GiB")
    for phase in phases:
        table.add_column(phase, justify="right")
    for name in categories:
        table.add_row(name, *(_gib(each.categories.get(name, 0)) for each in phases.values()))
    table.add_row("peak", *(_gib(each.peak_bytes) for each in phases.values()))
    if answer.proof is not None:
        proof = answer.proof.phases
        table.add_row("dry run", *(_gib(proof[phase].peak_bytes) if phase in proof else "-" for phase in phases))
        shares = answer.differences
        table.add_row("difference", *(f"{shares[phase]:+.3%}" if phase in shares else "-" for phase in phases))
    return table


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.3f}" if nbytes else "-"
