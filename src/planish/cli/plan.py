"""`planish plan run.toml`: will it fit, before anything is loaded."""

import contextlib
import io
import json
import sys
import tomllib
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from planish.cli import pipeline
from planish.cli.ask import ask
from planish.cli.options import parse
from planish.cli.prove import disproof, prove
from planish.cli.say import write_file
from planish.cli.told import misfit as misfit_of
from planish.cli.told import show, show_proof, to_tree
from planish.cli.train import read_run
from planish.decode import encode
from planish.errors import PlanishError, UsageError
from planish.methods import Activation, Plan, keeps_attention
from planish.plan.answer import answer as find
from planish.plan.choose import Choice, advise, choose
from planish.plan.draw import to_svg
from planish.plan.estimate import Estimate
from planish.plan.offers import activation_methods
from planish.price.config import read_config
from planish.runfile import RunFile
from planish.train.fit import adapted, context_that_fits, misfit, smallest_budget
from planish.train.predict import Prediction, Say, by_dry_run, config_tree, max_positions, predict
from planish.train.turns import take_turns
from planish.units import format_bytes

_WIDTH = 110


@dataclass(frozen=True, kw_only=True)
class Options:
    """Show what a run will hold in each phase, priced without loading anything; exit 3: it does not fit."""

    run: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")] = None
    """Run file (TOML), or a run folder."""
    json: bool = False
    """Print one JSON object and nothing else, on either stream."""
    prove: bool = False
    """Run the very step on tensors without data too, and compare: exit 6 where a phase differs by more than 0.5 %."""
    pipeline: bool = False
    """Show the schedule of a pipeline instead (`mesh.pp` ranks, `plan.pipeline.method` and `.head`, `train.grad_accum`
    microbatches): its time, its bubble, what each rank holds."""
    svg: Path | None = None
    """Draw what is held over one step into this file; with --pipeline: the schedule."""
    model: str | None = None
    """A transformers folder, a config.json, or the name of a public architecture ("llama-3.1-8b"): the mesh and methods
    are chosen for it, without torch."""
    context: str | None = None
    """With --model: tokens of a row, such as 4096 or 1M; default: 4096."""
    batch_tokens: str | None = None
    """With --model: tokens of an optimizer step over all devices; default: a row for each group that reads one."""
    devices: str | None = None
    """With --model: how many there are; default: 1."""
    hardware: str | None = None
    """With --model: h200, h100, a100, rtx4090, cpu, or a TOML file that describes another."""
    host_memory: str | None = None
    """With --model: bytes of each node's host memory, such as 2TiB; default: what it takes, told."""
    disk: str | None = None
    """With --model: bytes of each node's disk; default: none."""
    from_: Annotated[Path | None, tyro.conf.arg(name="from", metavar="FILE")] = None
    """A run of axolotl or LLaMA-Factory (YAML) or transformers' TrainingArguments (JSON): as it stands, and as planish
    would run it."""
    actions: Path | None = None
    """With --pipeline: write the schedule into this file, as text that `plan.pipeline.file` reads back."""

    @property
    def asks(self) -> bool:
        """Whether mesh and methods are to be chosen."""
        sizes = (self.context, self.batch_tokens, self.devices, self.host_memory, self.disk)
        return any((self.model, self.from_, self.hardware, *sizes))


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


def main(words: list[str]) -> int:
    """Run the verb."""
    if "--json" not in words:
        options, settings = _parse(words)
        if options.pipeline:
            return pipeline.show(pipeline.answer(options.run, settings), svg=options.svg, actions=options.actions)
        if options.asks:
            return _show_question(options, settings)
        return _show(_answer(options, settings, say=lambda sentence: sys.stderr.write(f"planish: {sentence}\n")))
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()) as stdout:
        try:
            tree = _to_json(words)
        except SystemExit:
            tree = {"help": stdout.getvalue(), "exit_code": 0}
    sys.stdout.write(json.dumps(tree) + "\n")
    return tree["exit_code"]


def _to_json(words: list[str]) -> dict[str, Any]:
    """Return the one object that is said: the answer, why it is no good, or what was wrong."""
    try:
        tree, error = _tree(*_parse(words))
    except PlanishError as refused:
        return {"error": str(refused), "exit_code": refused.exit_code}
    except Exception:
        said = "this is a fault of planish, please report it with the traceback."
        return {"error": said, "traceback": traceback.format_exc(), "exit_code": 1}
    return tree | ({"exit_code": 0} if error is None else {"error": str(error), "exit_code": error.exit_code})


def _parse(words: list[str]) -> tuple[Options, list[tuple[str, Any]]]:
    options, settings = parse(Options, words, verb="plan")
    if options.pipeline and options.prove:
        raise UsageError("`--prove` runs the step of one process; leave it or `--pipeline` out.")
    if options.asks and options.pipeline:
        raise UsageError(
            "`--pipeline` is of a run file and its flags; leave it or `--model` and what goes with it out."
        )
    if not options.pipeline and options.actions:
        raise UsageError("`--actions` are of a schedule; add `--pipeline`.")
    if not options.pipeline and not options.asks and options.svg:
        raise UsageError("`--svg` draws a schedule or the answer to a question; add `--pipeline` or `--model`.")
    return options, settings


def _tree(options: Options, settings: list[tuple[str, Any]]) -> tuple[dict[str, Any], PlanishError | None]:
    """Return the answer as plain data, and why the exit code is not 0."""
    if options.pipeline:
        found = pipeline.answer(options.run, settings)
        return pipeline.to_tree(found, svg=options.svg, actions=options.actions), None
    if options.asks:
        asked = ask(options, settings)
        told = find(asked.question)
        _draw(options.svg, told)
        proof = prove(told.best, asked.config) if options.prove else None
        tree = to_tree(asked, told) | ({} if proof is None else {"proof": proof.to_dict()})
        return tree, misfit_of(told) or (proof and proof.error())
    answer = _answer(options, settings, say=lambda _: None)
    return _to_tree(answer), _error(answer)


def _show_question(options: Options, settings: list[tuple[str, Any]]) -> int:
    asked = ask(options, settings)
    told = find(asked.question)
    show(asked, told)
    _draw(options.svg, told)
    error = misfit_of(told)
    if options.prove and error is None:
        sys.stderr.write("planish: running the planned step on tensors without data (a minute or so) ...\n")
        proof = prove(told.best, asked.config)
        show_proof(proof)
        error = proof.error()
    if error is not None:
        raise error
    return 0


def _draw(path: Path | None, told: Any) -> None:
    if path is not None:
        write_file(path, to_svg(told.best))


def _answer(options: Options, settings: list[tuple[str, Any]], say: Say) -> Answer:
    if options.run is None and not any(name == "data.train" for name, _ in settings):
        settings = [("data.train", "builtin:english"), *settings]  # what is trained on weighs nothing
    run, notes = _assume(_over_ranks(read_run(options.run, settings)))
    budget_bytes = run.memory.budget
    if run.mesh.pp > 1:  # each price of another plan would take a dry run of every rank
        turns = take_turns(run, lambda each: predict(each, say))
        found, notes = turns.prediction, (*notes, *turns.reasons)
        proof = by_dry_run(turns.run) if options.prove else None
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

    named = _named(options.run, settings, run)
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
        proof=by_dry_run(run) if options.prove else None,
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


def _error(answer: Answer) -> PlanishError | None:
    """Return why the exit code is not 0."""
    off = answer.differences
    if answer.run.mesh.sharded and off.get("init", -1) > 0:  # what rank 0 holds while it deals out is bounded alone
        del off["init"]
    return disproof(off) or misfit(answer.run, answer.prediction)


def _to_tree(answer: Answer) -> dict[str, Any]:
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


def _show(answer: Answer) -> int:
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
    error = _error(answer)
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
