"""`planish plan run.toml`: will it fit, before anything is loaded."""

import contextlib
import io
import json
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from planish.cli.options import parse
from planish.errors import PlanishError, UsageError


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


def main(words: list[str]) -> int:
    """Run the verb."""
    if "--json" not in words:
        return _show(*_parse(words))
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


# Each answer is a module of its own, imported where it is asked for: a question takes as long as its imports do.


def _tree(options: Options, settings: list[tuple[str, Any]]) -> tuple[dict[str, Any], PlanishError | None]:
    """Return the answer as plain data, and why the exit code is not 0."""
    if options.pipeline:
        from planish.cli import pipeline

        scheduled = pipeline.answer(options.run, settings)
        return pipeline.to_tree(scheduled, svg=options.svg, actions=options.actions), None
    if options.asks:
        from planish.cli import question

        return question.to_tree(options, settings)
    from planish.cli import plan_run

    answer = plan_run.answer_of(options.run, settings, lambda _: None, proven=options.prove)
    return plan_run.to_tree(answer), plan_run.error_of(answer)


def _show(options: Options, settings: list[tuple[str, Any]]) -> int:
    """Print the answer for people."""
    if options.pipeline:
        from planish.cli import pipeline

        return pipeline.show(pipeline.answer(options.run, settings), svg=options.svg, actions=options.actions)
    if options.asks:
        from planish.cli import question

        return question.show(options, settings)
    from planish.cli import plan_run

    def say(sentence: str) -> None:
        sys.stderr.write(f"planish: {sentence}\n")

    return plan_run.show(plan_run.answer_of(options.run, settings, say, proven=options.prove))
