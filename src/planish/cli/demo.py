"""`planish demo`: a real pretrained model on real text, the plain way stopped at a budget that planish's way fits."""

import gc
import time
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from planish.cli import demo_activation, demo_dispatch, demo_puzzle
from planish.cli.options import parse_plain
from planish.cli.say import say
from planish.decode import method_name, nearest
from planish.errors import BudgetExceeded, UsageError, VerificationFailed
from planish.methods import AdamW, Apollo, Checkpoint, Offload, Plain, Plan, StreamAdamW, keeps_attention
from planish.price.processor import has_products
from planish.runfile import RunFile
from planish.sections import DataSection, MemorySection, ModelSection, SaveSection, TrainSection
from planish.units import format_bytes

_MODEL = "smollm2-135m"
_PROMPT = "The ladies of the house were"
_BUDGET_BYTES = 3 * 2**30
_STEPS = 2
# bf16 keeps 8 bits: two orders of summation of the same step differ by about 2^-9 of the loss at most.
_TOLERANCE = 2**-8


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train SmolLM2-135M on English text at 4,096 tokens, plain and bounded, and compare (minutes on two cores)."""

    peak: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="PEAK")] = None
    """Show one peak alone, in a minute: attention, vocab, dispatch, boundary, activation or optim; or a smaller child
    that was searched for: puzzle."""
    dir: Path = Path("runs/demo")
    """Run folder; what an earlier demo wrote there is replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What some steps of one plan gave."""

    losses: tuple[float, ...]
    peak_bytes: int
    peak_phase: str
    seconds: float
    boundary_bytes: int = 0
    layer_bytes: int = 0


def main(words: list[str]) -> int:
    """Run the verb."""
    options = parse_plain(Options, words, verb="demo")
    peaks = [field.name for field in fields(Plan) if getattr(Plan(), field.name) != Plain()]
    peaks += ["activation", "dispatch", "puzzle"]
    if options.peak is not None and options.peak not in peaks:
        raise UsageError(f"no peak {options.peak!r} to show; {nearest(options.peak, peaks)}")

    from planish.train.run_folder import open_run_folder

    with open_run_folder(options.dir, resume=False, overwrite=(options.dir / "run.toml").exists()):
        pass  # refused now, and not after minutes
    if options.peak is None:
        _whole(options.dir)
    elif options.peak == "optim":
        _optimizers()
    elif options.peak == "activation":
        demo_activation.show()
    elif options.peak == "puzzle":
        demo_puzzle.show()
    elif options.peak == "dispatch":
        demo_dispatch.show(measure)
    elif options.peak == "boundary":
        _boundaries()
    else:
        _alone(options.peak)
    return 0


def settings(folder: Path, *, context: int, plan: Plan, budget_bytes: int | None) -> RunFile:
    """Return the demo's run file."""
    return RunFile(
        model=ModelSection(from_=_MODEL, dtype=_dtype()),
        data=DataSection(train=("builtin:english",), context=context),
        train=TrainSection(steps=_STEPS, schedule="constant"),
        memory=MemorySection(budget=budget_bytes),
        plan=plan,
        save=SaveSection(dir=folder, keep=1),
    )


def _dtype() -> Literal["bf16", "fp32"]:
    """Return the precision that this machine trains in at speed."""
    return "bf16" if has_products("bfloat16") else "fp32"


def _precision() -> str:
    return "bf16" if _dtype() == "bf16" else "fp32 (this processor has no instructions for bf16)"


def measure(run: RunFile, steps: int) -> Outcome:
    """Run some steps of `run` without a run folder."""
    from planish.memory.ledger import Ledger
    from planish.train.job import build
    from planish.train.loop import train_step

    gc.collect()
    started = time.perf_counter()
    with ExitStack() as scope:
        ledger = scope.enter_context(Ledger(budget_bytes=run.memory.budget))
        job = build(run, ledger, scope)
        reports = [train_step(job, step) for step in range(1, steps + 1)]
    worst = max((report.memory for report in reports), key=lambda memory: memory.peak_bytes)
    return Outcome(
        losses=tuple(report.loss for report in reports),
        peak_bytes=worst.peak_bytes,
        peak_phase=worst.peak_phase,
        seconds=time.perf_counter() - started,
        boundary_bytes=max(
            peak.categories.get("boundaries", 0) for report in reports for peak in report.memory.phases.values()
        ),
        layer_bytes=max(report.memory.phases["forward"].categories.get("layer working set", 0) for report in reports),
    )


def _whole(folder: Path) -> None:
    plain = settings(folder, context=4096, plan=Plan.plain(), budget_bytes=_BUDGET_BYTES)
    bounded = replace(plain, plan=Plan(boundary=Checkpoint(keep_attention=True)))  # the budget has room for that
    say(f"SmolLM2-135M, {_precision()}, {plain.data.context:,} tokens of English a step.")
    say(f"The budget is {format_bytes(_BUDGET_BYTES)}.")
    say(f"\n1. {_MODEL} before training: {_PROMPT}{_continue(_MODEL)!r}")
    say("\n2. Plain PyTorch and transformers inside the budget:")
    try:
        measure(plain, steps=1)
    except BudgetExceeded as error:
        say(f"   stopped: {error}\n\n{_indent(error.table, lines=16)}")
    else:
        raise VerificationFailed("the plain way fits the demo's budget, so the demo shows nothing.")
    say("\n3. The same without a budget:")
    free = measure(replace(plain, memory=MemorySection()), _STEPS)
    _show(free)
    say("\n4. planish inside the budget, with this plan:\n")
    say(_indent(bounded.plan.to_toml()))
    held = _train(bounded)
    _compare(free, held)
    checkpoint = folder / "checkpoints" / f"step-{_STEPS:08d}"
    say(f"\n5. {checkpoint}, opened by transformers: {_PROMPT}{_continue(str(checkpoint))!r}")


def _train(run: RunFile) -> Outcome:
    """Train with a run folder and a checkpoint, and return what its files say."""
    import json

    from planish.cli.train import train

    gc.collect()
    started = time.perf_counter()
    train(run, resume=False, overwrite=(run.save.dir / "run.toml").exists())
    seconds = time.perf_counter() - started
    lines = [json.loads(line) for line in (run.save.dir / "metrics.jsonl").read_text().splitlines()]
    memory = [json.loads(line) for line in (run.save.dir / "memory.jsonl").read_text().splitlines()]
    worst = max(memory, key=lambda line: line["peak_bytes"])
    return Outcome(
        losses=tuple(line["loss"] for line in lines if "loss" in line),
        peak_bytes=worst["peak_bytes"],
        peak_phase=worst["peak_phase"],
        seconds=seconds,
    )


def _alone(peak: str) -> None:
    base = replace(Plan.plain(), boundary=Checkpoint())
    method = getattr(Plan(), peak)
    ways = f"`plan.{peak}` plain and {method_name(type(method))}"
    say(f"SmolLM2-135M, {_precision()}, 2,048 tokens: one step, with {ways}.")
    outcomes = []
    for plan in (base, replace(base, **{peak: method})):
        say(f"\nplan.{peak} = {method_name(type(getattr(plan, peak)))}")
        outcomes.append(measure(settings(Path(), context=2048, plan=plan, budget_bytes=None), steps=1))
        _show(outcomes[-1])
    _compare(*outcomes)


def _boundaries() -> None:
    """Train two steps by each method for boundaries; their losses must agree in every bit."""
    ways = (Plain(), Checkpoint(), Checkpoint(keep_attention=True), Offload(disk=2**30, keep_attention=True))
    say("SmolLM2-135M, fp32, 1,024 tokens: two steps by each method, everything else bounded.")
    outcomes = []
    for boundary in ways:
        kept = ", attention kept" if keeps_attention(boundary) else ""
        say(f"\nplan.boundary = {method_name(type(boundary))}{kept}")
        run = settings(Path(), context=1024, plan=Plan(boundary=boundary), budget_bytes=None)
        outcomes.append(measure(replace(run, model=replace(run.model, dtype="fp32")), steps=2))
        _show(outcomes[-1])
        if boundary != Plain():
            say(f"   {format_bytes(outcomes[-1].boundary_bytes)} held from forward to backward at a phase's peak")
    _compare(outcomes[0], outcomes[-1])
    if len({outcome.losses for outcome in outcomes}) > 1:
        raise VerificationFailed("losses differ; none of these methods may change a bit.")


def _optimizers() -> None:
    """Train two steps by each optimizer; streamed AdamW is AdamW bit for bit, APOLLO parts with the first update."""
    ways = {
        "adamw": AdamW(),
        "stream-adamw, its state on the disk": StreamAdamW(disk=2 * 2**30),
        "apollo (APOLLO-Mini)": Apollo(),
        "apollo, in backward, int8 weights": Apollo(in_backward=True, weights="int8"),
    }
    say("SmolLM2-135M, fp32, 256 tokens: two steps by each optimizer, everything else bounded.")
    outcomes = []
    for name, optim in ways.items():
        say(f"\nplan.optim = {name}")
        run = replace(
            settings(Path(), context=256, plan=Plan(), budget_bytes=None),
            model=ModelSection(from_=_MODEL, dtype="fp32"),
            train=TrainSection(steps=_STEPS, schedule="constant", clip=0.0),
            plan=Plan(optim=optim),
        )
        outcomes.append(measure(run, _STEPS))
        _show(outcomes[-1])
    adamw, streamed, apollo, _ = outcomes
    _compare(adamw, streamed)
    if adamw.losses != streamed.losses:
        raise VerificationFailed("losses differ; where AdamW's state lies may not change a bit.")
    say("\n   apollo is another optimizer: its losses begin as AdamW's and part with the first update.")
    if adamw.losses[0] != apollo.losses[0]:
        raise VerificationFailed(f"the first losses are {adamw.losses[0]} and {apollo.losses[0]}.")


def _show(outcome: Outcome) -> None:
    losses = ", ".join(f"{loss:.4f}" for loss in outcome.losses)
    peak = f"{format_bytes(outcome.peak_bytes)} ({outcome.peak_phase})"
    say(f"   losses {losses}; peak {peak}; {outcome.seconds:.0f} s with loading")


def _compare(plain: Outcome, bounded: Outcome) -> None:
    difference = max(abs(a - b) / abs(a) for a, b in zip(plain.losses, bounded.losses, strict=True))
    say(
        f"\n   peak {format_bytes(plain.peak_bytes)} -> {format_bytes(bounded.peak_bytes)} "
        f"({1 - bounded.peak_bytes / plain.peak_bytes:.0%} less); losses differ by {difference:.1e} of themselves"
    )
    if difference > _TOLERANCE:
        raise VerificationFailed(f"losses differ by {difference:.1e}, more than bf16's {_TOLERANCE:.1e}.")


def _continue(model: str) -> str:
    from planish.cli.generate import Options as GenerateOptions
    from planish.cli.generate import generate

    return generate(GenerateOptions(model=model, prompt=_PROMPT, max_tokens=24))


def _indent(text: str, lines: int | None = None) -> str:
    return "\n".join(f"   {line}" for line in text.strip().splitlines()[:lines])
