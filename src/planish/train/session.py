"""One run in its folder: built, resumed, trained, evaluated, saved, and written down line by line."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Protocol

from planish.comm.world import ALONE, World
from planish.data.cursor import FeedPosition
from planish.errors import BudgetExceeded, Interrupted, NotFinite, PlanishError, UsageError
from planish.memory.book import Phase
from planish.memory.budget import counted, exceeding
from planish.memory.far import Traffic
from planish.memory.ledger import Ledger
from planish.memory.meter import ProcessMeter
from planish.models.load import run_device
from planish.peaks.activation.keep import summary
from planish.peaks.vocab.filter import skipped
from planish.price.processor import has_products
from planish.report.page import write_page
from planish.report.read import read_run
from planish.runfile import RunFile
from planish.train import checkpoint
from planish.train.blame import refuse_non_finite_weights
from planish.train.changes import setting_changes
from planish.train.evaluate import EvalReport, evaluate
from planish.train.exceed import planned, refit, would_have_fitted
from planish.train.fit import Verdict, check_fit, to_tree
from planish.train.job import Job, build
from planish.train.loop import Hooks, StepReport, train
from planish.train.run_folder import JsonLines, RunFolder, write_atomically
from planish.train.saver import Saver, optimizer_tensors
from planish.train.stop import StopSignal
from planish.train.timelines import write_timelines
from planish.train.watch import WATCHED, watched


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


Shape = Callable[[Job, ExitStack], Job]


def run_training(
    run: RunFile,
    folder: RunFolder,
    view: View,
    meter: ProcessMeter,
    world: World = ALONE,
    verdict: Verdict | None = None,
    shape: Shape = lambda job, _: job,
) -> None:
    """Train `run` in `folder`, from its newest intact checkpoint on where the folder is resumed.

    Args:
        run: Every setting.
        folder: Locked for this process; it is changed only once everything that can be refused has been.
        view: Shows the run.
        meter: Began before the first tensor.
        world: The ranks that train together; rank 0 writes and shows.
        verdict: Whether it fits, which rank 0 found out where there are several.
        shape: Changes the job before its first step; what it opens, it closes with the scope.

    Raises:
        PlanishError: Each of its kinds, as its exit code says; the last checkpoint is intact.
    """
    changes = setting_changes(run, folder.run_toml) if folder.resume else None
    if changes is not None:
        view.note(changes)
    for sentence in run.plan.approximations:
        view.note(sentence)
    if run_device().type == "cpu" and run.model.dtype != "fp32" and not has_products("bfloat16"):
        view.note(
            "this processor has no instructions for bf16, whose products then take five to eighty times as long; "
            '`model.dtype = "fp32"` is faster here.'
        )
    predicted = None
    if run.distil.from_ is not None:
        view.note("what a teacher holds is not told beforehand; the budget is kept while running all the same.")
    elif world.size == 1:
        predicted = check_fit(run, view.note)
    elif verdict is not None:
        predicted = verdict.tell(view.note)
    run = replace(run, plan=planned(run, predicted, world))
    strict = run.memory.on_exceed == "strict"
    ledger = Ledger(budget_bytes=run.memory.budget, on_exceed="strict" if strict else "warn")
    with would_have_fitted(run, folder), ExitStack() as scope:
        scope.enter_context(counted(ledger, run_device()))
        job, first_step = _prepare(folder, view, ledger, lambda: shape(build(run, ledger, scope, world), scope))
        stop = scope.enter_context(StopSignal())
        view.begin(job, first_step, meter.baseline_bytes)
        folder.begin(run_toml=run.to_toml(), plan_toml=run.plan.to_toml(), step=first_step - 1)
        if predicted is not None and folder.leads:
            tree = to_tree(predicted, run.memory.budget) | {"baseline_bytes": meter.baseline_bytes}
            write_atomically(folder.path / "plan.json", json.dumps(tree))
        records = scope.enter_context(_Records(folder, job, view, meter, saved_step=first_step - 1))
        records.memory_line(first_step - 1)
        with records.last_words():
            train(job, first_step=first_step, hooks=records.hooks(stop))
            records.finish()


def _prepare(folder: RunFolder, view: View, ledger: Ledger, make: Callable[[], Job]) -> tuple[Job, int]:
    """Return the job and its first step; the folder is as it was."""
    with exceeding(ledger):
        job = make()
        _check_eval(job)
        first_step = _resume(job, folder, view) if folder.resume else 1
        if job.run.memory.on_exceed == "adapt" and ledger.first_excess is not None:
            raise ledger.first_excess.error()
        return job, first_step


class _Records:
    """What a run writes into its folder.

    A checkpoint holds the feed's position as of its step: the feed itself may have failed on its way to the next.
    """

    def __init__(self, folder: RunFolder, job: Job, view: View, meter: ProcessMeter, *, saved_step: int) -> None:
        self._done_step, self._position = saved_step, job.feed.position
        self._watched_step = saved_step + WATCHED
        self._folder, self._job, self._view, self._meter = folder, job, view, meter
        self._saver = Saver(folder, job.engine.world, job.behind, saved_step=saved_step, note=view.note)
        self._world = job.engine.world
        nowhere = Path(os.devnull)
        self._metrics = JsonLines(folder.metrics if folder.leads else nowhere)
        self._memory = JsonLines(folder.memory if folder.leads else nowhere)
        self._largest_bytes: dict[Phase, int] = {}
        self._peaks: dict[Phase, int] = {}
        self._warned = False
        self._traffic: dict[str, Traffic] = {}

    def __enter__(self) -> "_Records":
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._metrics.close()
        self._memory.close()
        if self._folder.leads and (kind is None or issubclass(kind, PlanishError)):
            self._draw()

    def hooks(self, stop: StopSignal) -> Hooks:
        """Return what the loop calls."""
        return Hooks(
            on_step=self.step,
            evaluate=self.evaluate,
            save=self.save,
            stop_requested=lambda: stop.requested,
            keep_within=self.keep_within,
            watch=self.watch,
        )

    @contextmanager
    def last_words(self) -> Iterator[None]:
        """Save what can be saved when the run ends before its last step, and say what is kept."""
        try:
            with exceeding(self._job.engine.ledger):
                yield
        except BudgetExceeded as error:
            self.memory_line()
            table = self._write_table(str(error), error.table)
            said = f"{error} {self._kept()} The whole table is in {table}."
            raise BudgetExceeded(said, over_bytes=error.over_bytes) from None
        except NotFinite as error:
            raise NotFinite(f"{error} {self._kept()}") from None
        except Interrupted:
            self.finish()
            raise
        except UsageError as error:  # from data or its evaluation: the weights are those after the last step
            self._save_done()
            raise UsageError(f"{error} {self._kept()}") from error
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"stopped at once. {self._kept()}") from None

    def watch(self, step: int) -> AbstractContextManager[None]:
        """Note what each lane does in one step, after first ones that are like no others."""
        due = step == self._watched_step and self._folder.leads
        return watched(self._job, self._folder.path, step) if due else nullcontext()

    def _write_table(self, sentence: str, table: str) -> Path:
        """Write what was alive, by category and by module."""
        rank = "" if self._world.leads else f".rank-{self._world.rank}"
        path = self._folder.path / f"budget-exceeded{rank}.txt"
        write_atomically(path, f"{sentence}\n\n{table}\n")
        return path

    def keep_within(self, job: Job, step: int) -> Job:
        """Return the job that goes on after a step, tiles made finer where it went over the budget and may not.

        Raises:
            BudgetExceeded: Finer tiles do not help.
        """
        mode, excess = job.run.memory.on_exceed, job.engine.ledger.first_excess
        if mode == "adapt":
            peaks = self._world.gather([excess is not None, self._peaks])
            if step < job.run.train.steps and any(over for over, _ in peaks):
                self._job = job = refit(job, [each for _, each in peaks], self._view.note)
                self._peaks, self._traffic = {}, dict(job.traffic)
                self._folder.replan(run_toml=job.run.to_toml(), plan_toml=job.run.plan.to_toml())
        elif mode == "warn" and excess is not None and not self._warned:
            self._warned = True
            table = self._write_table(excess.sentence, excess.table)
            sys.stderr.write(f"planish: step {step}: {excess.sentence} The run goes on; the table is in {table}.\n")
        return job

    @contextmanager
    def _shown(self) -> Iterator[None]:
        """Save where nobody takes what is printed, since the run ends there."""
        try:
            yield
        except OSError:
            self._save_done()
            raise

    def _save_done(self) -> None:
        if self._done_step > self._saver.saved_step and self._world.size == 1:  # ranks may have ended apart
            self.save(self._done_step)
            self.finish()

    def _kept(self) -> str:
        if self._world.size == 1:  # ranks may have ended apart
            self.finish()
        if not self._saver.saved_step:
            return "No step had been saved."
        return f"Step {self._saver.saved_step} is saved in {self._folder.path}."

    def finish(self) -> None:
        """Wait for a checkpoint that is being written."""
        self._saver.finish()

    def _draw(self) -> None:
        """Draw the run as `planish report` would; without a report it is still a run."""
        try:
            write_page(read_run(self._folder.path), self._folder.report)
        except PlanishError as error:
            self._view.note(f"the report was not drawn: {error}")

    def step(self, report: StepReport) -> None:
        """Write and show one optimizer step."""
        self._saver.look()
        self._done_step, self._position = report.step, self._job.feed.position
        reading = self._meter.read()
        on_device = reading.device_peak_bytes
        peak_bytes = report.memory.peak_bytes if on_device is None else on_device
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
                "memory/peak_bytes": self._world.max(peak_bytes),
                "memory/vm_hwm_bytes": self._world.max(reading.resident_peak_bytes),
                **report.routing,
                **summary(self._job.engine.keepers),
                **skipped(self._job.engine.gradient_filter),
            }
            | self._far()
            | self._pipelined(report.step)
        )
        self.memory_line()
        with self._shown():
            self._view.step(report)

    def _pipelined(self, step: int) -> dict[str, float]:
        """Return the metrics of a pipeline's step; draw one of the first ones beside what was planned of it."""
        staged = self._job.engine.staged
        if staged is None:
            return {}
        if staged.shown:
            planned, seen = staged.timelines()
            if self._folder.leads:
                write_timelines(self._folder.path, step, planned, seen)
            remark = staged.remark()
            if remark is not None:
                self._view.note(remark)
        return {"pipeline/bubble": round(staged.bubble(), 4)}

    def _far(self) -> dict[str, float]:
        """Return what each lane of far memory did since the last step, as metrics."""
        found: dict[str, float] = {}
        for lane, now in self._job.traffic.items():
            before = self._traffic.get(lane, Traffic())
            found[f"far/{lane}/bytes"] = now.nbytes - before.nbytes
            found[f"far/{lane}/busy_s"] = round(now.busy_s - before.busy_s, 4)
            found[f"far/{lane}/waited_s"] = round(now.waited_s - before.waited_s, 4)
            self._traffic[lane] = now
        return found

    def evaluate(self, step: int) -> None:
        """Evaluate, if there is held-out data."""
        if not self._job.run.data.eval:
            return
        with self._recorded(step):
            report = evaluate(self._job.engine, self._job.eval_batches())
        self._metrics.write({"step": step, **{f"eval/{name}": value for name, value in asdict(report).items()}})
        with self._shown():
            self._view.evaluated(step, report)

    def save(self, step: int) -> None:
        """Write a checkpoint."""
        engine = self._job.engine
        refuse_non_finite_weights(engine, step)
        with self._recorded(step), engine.ledger.phase("save"):
            self._saver.save(self._job, step, {"feed": self._position.to_dict()})

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
            self._peaks[phase] = max(self._peaks.get(phase, 0), peak.peak_bytes)
        self._memory.write(record)

    @contextmanager
    def _recorded(self, step: int) -> Iterator[None]:
        self._job.engine.ledger.start_step(step)
        yield
        self.memory_line()


def _resume(job: Job, folder: RunFolder, view: View) -> int:
    """Load the newest intact checkpoint and return the first step to do."""
    with job.engine.ledger.phase("resume"):
        found = _latest(folder, job.engine.world)
        if found is None:
            view.note(f"{folder.path} holds no checkpoint yet; starting from step 1.")
            return 1
        restored = checkpoint.load(
            found,
            model=job.engine.anatomy.model,
            tokenizer=job.tokenizer,
            tensors=optimizer_tensors(job),
            plan=job.run.plan,
            world=job.engine.world,
        )
    for sentence in (*found.skipped, *restored.notes):
        view.note(sentence)
    job.feed.seek(FeedPosition.from_dict(restored.progress["feed"]))
    done = restored.step >= job.run.train.steps
    left = f"all {job.run.train.steps} steps of `train.steps` are done" if done else "resumed"
    view.note(f"{left}, from {found.path}")
    return restored.step + 1


def _latest(folder: RunFolder, world: World) -> checkpoint.CheckpointRef | None:
    """Return the newest intact checkpoint, which rank 0 looks for."""
    found = checkpoint.latest(folder) if world.leads else None
    name, skipped = world.gather([found and found.path.name, found and found.skipped])[0]
    if name is None or found is not None:
        return found
    path = folder.checkpoints / name
    return checkpoint.CheckpointRef(path=path, step=int(name.removeprefix("step-")), skipped=tuple(skipped))


def _check_eval(job: Job) -> None:
    """Read the first held-out batch now: what is wrong with it must not be found after hours."""
    if job.run.data.eval and next(iter(job.eval_batches()), None) is None:
        raise UsageError("`data.eval` holds no text; name a file with some, or leave it out.")
