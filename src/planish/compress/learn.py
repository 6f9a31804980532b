"""The last stage: a child learns from its parent as a whole, a training run in a folder of its own that goes on."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from planish.compress.eta import Note
from planish.compress.teach import taught
from planish.errors import Interrupted
from planish.memory.meter import ProcessMeter
from planish.models.load import run_device
from planish.runfile import RunFile
from planish.train.checkpoint import newest
from planish.train.evaluate import EvalReport
from planish.train.job import Job
from planish.train.loop import StepReport
from planish.train.run_folder import open_run_folder
from planish.train.session import run_training


def tokens_of(run: RunFile) -> int:
    """Return the tokens that a run reads."""
    return run.train.steps * run.rows_per_microbatch * run.train.grad_accum * run.data.context


def learn(child: Path, text: Path, run: RunFile, folder: Path, note: Note, *, name: str = "distillation") -> Path:
    """Return the folder of `child` after all steps of `run`, which is begun in `folder` or gone on with.

    Memory:        as `planish train` with a teacher; `run.memory.budget` bounds it.
    Exactness:     bitwise the same however often it was stopped, by a signal or killed.

    Args:
        child: A transformers folder.
        text: What it reads, any source of text.
        run: How it learns, and from whom; its model, text and folder are those given here.
        folder: Of this run alone.
        note: Called with a sentence now and then.
        name: Of the stage, in those sentences.

    Raises:
        Interrupted: A stop was asked for; the step is saved.
        PlanishError: As `planish train`.
    """
    steps, resume = run.train.steps, (folder / "run.toml").is_file()
    done = newest(folder / "checkpoints", checksums=False) if resume else None
    if done is not None and done.step >= steps:
        return done.path
    run = replace(
        run,
        model=replace(run.model, from_=str(child)),
        data=replace(run.data, train=(str(text),)),
        save=replace(run.save, dir=folder),
    )
    try:
        with _in_one_order(), open_run_folder(folder, resume=resume, overwrite=False) as opened:
            run_training(run, opened, _View(name, steps, note), ProcessMeter(run_device()), shape=taught)
    except Interrupted as stop:
        said = str(stop).partition(";")[0]
        raise Interrupted(f"{name} {said}; it is saved, the same command goes on from there.") from None
    return folder / "checkpoints" / f"step-{steps:08d}"


@contextmanager
def _in_one_order() -> Iterator[None]:
    """Let torch sum in one order, as `planish train` does, so that a run that was stopped ends in the same bits."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode=before[0], warn_only=warned)
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


class _View:
    """Shows a run as the other stages are shown: how far it is and how long it will take."""

    def __init__(self, name: str, steps: int, note: Note) -> None:
        self._name, self._steps, self._note = name, steps, note
        self._begun, self._first, self._said = 0.0, 1, 0.0

    def begin(self, job: Job, first_step: int, baseline_bytes: int) -> None:
        """Remember where it begins."""
        del job, baseline_bytes
        self._begun, self._first = time.perf_counter(), first_step

    def step(self, report: StepReport) -> None:
        """Say how far it is, every five seconds at most."""
        now, last = time.perf_counter(), report.step == self._steps
        if now - self._said < 5 and not last:
            return
        self._said = now
        left = (now - self._begun) / (report.step - self._first + 1) * (self._steps - report.step)
        eta = "" if last else f", eta {left:.0f} s"
        self._note(f"{self._name}: {report.step} of {self._steps} steps, loss {report.loss:.4f}{eta}")

    def evaluated(self, step: int, report: EvalReport) -> None:
        """Say nothing: the child is judged when it has learned."""

    def note(self, sentence: str) -> None:
        """Pass on what the run says, but for each checkpoint."""
        if not sentence.startswith("saved "):
            self._note(f"{self._name}: {sentence}")
