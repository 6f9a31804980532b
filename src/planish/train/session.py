"""One run in its folder: built, resumed, trained, evaluated, saved, and written down line by line."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Protocol

import torch
from torch import Tensor

from planish.data.cursor import FeedPosition
from planish.errors import BudgetExceeded, UsageError
from planish.memory.book import Phase
from planish.memory.budget import as_exceeded, counted
from planish.memory.ledger import Ledger
from planish.memory.meter import ProcessMeter
from planish.models.load import run_device
from planish.runfile import RunFile
from planish.train import checkpoint
from planish.train.blame import refuse_non_finite_weights
from planish.train.evaluate import EvalReport, evaluate
from planish.train.fit import check_fit, to_tree
from planish.train.job import Job, build
from planish.train.loop import Hooks, StepReport, train
from planish.train.run_folder import JsonLines, RunFolder, write_atomically
from planish.train.stop import StopSignal


class View(Protocol):
    """Whoever shows a run."""

    def begin(self, job: Job, first_step: int, baseline_bytes: int) -> None:
        """The run is built; its first step is next."""
        ...

    def step(self, report: StepReport) -> None:
        """A step is done."""
        ...

    def evaluated(self, step: int, report: EvalReport) -> None:
        """A held-out evaluation is done."""
        ...

    def note(self, sentence: str) -> None:
        """Something worth saying."""
        ...


def run_training(run: RunFile, folder: RunFolder, view: View, meter: ProcessMeter) -> None:
    """Train `run` in `folder`, from its newest intact checkpoint on where the folder is resumed.

    Args:
        run: Every setting.
        folder: Locked for this process; it is changed only once everything that can be refused has been.
        view: Shows the run.
        meter: Began before the first tensor.

    Raises:
        PlanishError: Each of its kinds, as its exit code says; the last checkpoint is intact.
    """
    for sentence in run.plan.approximations:
        view.note(sentence)
    predicted = check_fit(run, view.note)
    ledger = Ledger(budget_bytes=run.memory.budget, on_exceed=run.memory.on_exceed)
    with ExitStack() as scope:
        stop = scope.enter_context(StopSignal())
        scope.enter_context(counted(ledger, run_device()))
        job = build(run, ledger, scope)
        _check_eval(job)
        first_step = _resume(job, folder, view) if folder.resume else 1
        folder.begin(run_toml=run.to_toml(), plan_toml=run.plan.to_toml(), step=first_step - 1)
        if predicted is not None:
            tree = to_tree(predicted, run.memory.budget) | {"baseline_bytes": meter.baseline_bytes}
            write_atomically(folder.path / "plan.json", json.dumps(tree))
        records = scope.enter_context(_Records(folder, job, view, meter))
        records.memory_line(first_step - 1)
        view.begin(job, first_step, meter.baseline_bytes)
        try:
            train(job, first_step=first_step, hooks=records.hooks(stop))
        except (BudgetExceeded, torch.OutOfMemoryError) as error:
            exceeded = as_exceeded(error, ledger)
            records.memory_line()
            write_atomically(folder.path / "budget-exceeded.txt", f"{exceeded}\n\n{exceeded.table}\n")
            raise exceeded from None


class _Records:
    """What a run writes into its folder."""

    def __init__(self, folder: RunFolder, job: Job, view: View, meter: ProcessMeter) -> None:
        self._folder, self._job, self._view, self._meter = folder, job, view, meter
        self._metrics, self._memory = JsonLines(folder.metrics), JsonLines(folder.memory)
        self._largest_bytes: dict[Phase, int] = {}

    def __enter__(self) -> "_Records":
        return self

    def __exit__(self, *exception: object) -> None:
        self._metrics.close()
        self._memory.close()

    def hooks(self, stop: StopSignal) -> Hooks:
        """Return what the loop calls."""
        return Hooks(on_step=self.step, evaluate=self.evaluate, save=self.save, stop_requested=lambda: stop.requested)

    def step(self, report: StepReport) -> None:
        """Write and show one optimizer step."""
        reading = self._meter.read()
        on_device = reading.device_peak_bytes
        self._metrics.write(
            {
                "step": report.step,
                "loss": report.loss,
                "grad_norm": report.grad_norm,
                "lr": report.lr,
                "tokens": report.num_tokens,
                "valid_tokens": report.num_valid,
                "step_s": round(report.step_s, 4),
                "tokens_per_s": round(report.num_tokens / report.step_s, 1),
                "memory/peak_bytes": report.memory.peak_bytes if on_device is None else on_device,
                "memory/vm_hwm_bytes": reading.resident_peak_bytes,
            }
        )
        self.memory_line()
        self._view.step(report)

    def evaluate(self, step: int) -> None:
        """Evaluate, if there is held-out data."""
        if not self._job.run.data.eval:
            return
        with self._recorded(step):
            report = evaluate(self._job.engine, self._job.eval_batches())
        self._metrics.write({"step": step, **{f"eval/{name}": value for name, value in asdict(report).items()}})
        self._view.evaluated(step, report)

    def save(self, step: int) -> None:
        """Write a checkpoint."""
        job = self._job
        refuse_non_finite_weights(job.engine, step)
        with self._recorded(step), job.engine.ledger.phase("save"):
            path = checkpoint.save(
                self._folder,
                step=step,
                model=job.engine.anatomy.model,
                tokenizer=job.tokenizer,
                tensors=optimizer_tensors(job),
                progress={"feed": job.feed.position.to_dict()},
                plan=job.run.plan,
                keep=job.run.save.keep,
            )
        self._view.note(f"saved {path}")

    def memory_line(self, step: int | None = None) -> None:
        """Write what the bytes were since the last line; owners and timeline only of peaks larger than all before."""
        memory = self._job.engine.ledger.end_step()
        record = memory.to_dict() | {"baseline_bytes": self._meter.baseline_bytes}
        if step is not None:
            record["step"] = step
        if memory.peak_bytes <= max(self._largest_bytes.values(), default=0):
            del record["timeline"]
        for phase, peak in memory.phases.items():
            if peak.peak_bytes <= self._largest_bytes.get(phase, 0):
                record["phases"][phase]["owners"] = []
            self._largest_bytes[phase] = max(self._largest_bytes.get(phase, 0), peak.peak_bytes)
        self._memory.write(record)

    @contextmanager
    def _recorded(self, step: int) -> Iterator[None]:
        self._job.engine.ledger.start_step(step)
        yield
        self.memory_line()


def optimizer_tensors(job: Job) -> dict[str, dict[str, dict[str, Tensor]]]:
    """Return the optimizer's state by parameter name."""
    named = job.engine.anatomy.model.named_parameters()
    return {"optimizer": {name: dict(job.optimizer.state[each]) for name, each in named if each in job.optimizer.state}}


def _resume(job: Job, folder: RunFolder, view: View) -> int:
    """Load the newest intact checkpoint and return the first step to do."""
    with job.engine.ledger.phase("resume"):
        found = checkpoint.latest(folder)
        if found is None:
            view.note(f"{folder.path} holds no checkpoint yet; starting from step 1.")
            return 1
        restored = checkpoint.load(
            found,
            model=job.engine.anatomy.model,
            tokenizer=job.tokenizer,
            tensors=optimizer_tensors(job),
            plan=job.run.plan,
        )
    for sentence in (*found.skipped, *restored.notes):
        view.note(sentence)
    job.feed.seek(FeedPosition.from_dict(restored.progress["feed"]))
    done = restored.step >= job.run.train.steps
    left = f"all {job.run.train.steps} steps of `train.steps` are done" if done else "resumed"
    view.note(f"{left}, from {found.path}")
    return restored.step + 1


def _check_eval(job: Job) -> None:
    """Read the first held-out batch now: what is wrong with it must not be found after hours."""
    if job.run.data.eval and next(iter(job.eval_batches()), None) is None:
        raise UsageError("`data.eval` holds no text; name a file with some, or leave it out.")
