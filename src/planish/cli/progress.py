"""A run as it happens: a live line on a terminal, plain lines elsewhere."""

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from planish.memory.ledger import Ledger
from planish.train.evaluate import EvalReport
from planish.train.job import Job
from planish.train.loop import StepReport
from planish.units import format_bytes

_BAR_WIDTH = 20


class MemoryColumn(ProgressColumn):
    """The bytes alive now, the peak so far and the budget, as a bar."""

    def __init__(self, ledger: Ledger, budget_bytes: int | None) -> None:
        super().__init__()
        self._ledger, self._budget_bytes = ledger, budget_bytes

    def render(self, task: Task) -> Text:
        """Return the bar as of now."""
        now, peak = self._ledger.live_bytes, int(task.fields["peak_bytes"])
        full = self._budget_bytes or max(peak, now, 1)
        filled = min(_BAR_WIDTH, round(_BAR_WIDTH * now / full))
        mark = min(_BAR_WIDTH - 1, round(_BAR_WIDTH * peak / full))
        bar = Text("█" * filled + "·" * (_BAR_WIDTH - filled), style="cyan")
        bar.stylize("bold red", mark, mark + 1)
        limit = f" of {format_bytes(self._budget_bytes)}" if self._budget_bytes else ""
        return Text.assemble(bar, f" {format_bytes(now)} now, {format_bytes(peak)} peak{limit}")


class RunView:
    """Shows the steps of one run, unless `quiet` (another rank does); use as a context manager."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._console = Console(highlight=False, quiet=quiet)
        self._progress: Progress | None = None
        self._peak_bytes, self._train_s, self._first_step = 0, 0.0, 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._progress is not None:
            self._progress.stop()

    def begin(self, job: Job, first_step: int, baseline_bytes: int) -> None:
        """Show what is about to run."""
        run, ledger = job.run, job.engine.ledger
        self._steps, self._first_step, self._budget_bytes = run.train.steps, first_step, run.memory.budget
        count = sum(param.numel() for param in job.engine.anatomy.model.parameters())
        mesh, rows = run.mesh, run.rows_per_microbatch * run.train.grad_accum * run.mesh.readers
        ranks = "" if mesh.size == 1 else f" over {mesh.replicate} x {mesh.dp} ranks (replicate x dp)"
        if mesh.pp > 1:
            ranks = f" on the first of {mesh.pp} ranks of a pipeline" + ("" if mesh.peers == 1 else ranks)
        self.note(
            f"{count:,} parameters in {run.model.dtype}{ranks}, {rows} rows of "
            f"{run.data.context:,} tokens a step; {format_bytes(ledger.live_bytes)} of tensors before the first step, "
            f"{format_bytes(baseline_bytes)} of process before the first tensor"
        )
        if self._console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(bar_width=12),
                MemoryColumn(ledger, run.memory.budget),
                TimeRemainingColumn(),
            )
            self._progress = Progress(*columns, console=self._console)
            self._task = self._progress.add_task(
                "first step", total=self._steps, completed=first_step - 1, peak_bytes=0
            )
            self._progress.start()

    def note(self, sentence: str) -> None:
        """Say one sentence."""
        if self._progress is not None:
            self._progress.console.print(sentence)
        elif not self._console.quiet:
            sys.stdout.write(f"{sentence}\n")
            sys.stdout.flush()

    def step(self, report: StepReport) -> None:
        """Show one optimizer step."""
        self._peak_bytes = max(self._peak_bytes, report.memory.peak_bytes)
        self._train_s += report.step_s
        rate = report.num_tokens / report.step_s
        summary = f"step {report.step}/{self._steps}  loss {report.loss:.4f}  {rate:,.0f} tok/s"
        if self._progress is not None:
            self._progress.update(self._task, completed=report.step, description=summary, peak_bytes=self._peak_bytes)
            return
        limit = f" of {format_bytes(self._budget_bytes)}" if self._budget_bytes else ""
        left = (self._steps - report.step) * self._train_s / (report.step - self._first_step + 1)
        self.note(
            f"{summary}  lr {report.lr:.2e}  grad {report.grad_norm:.3f}  "
            f"memory {format_bytes(report.memory.peak_bytes)} ({report.memory.peak_phase}){limit}  eta {left:.0f} s"
        )

    def evaluated(self, step: int, report: EvalReport) -> None:
        """Show a held-out evaluation."""
        per_byte = "" if report.bits_per_byte is None else f"  {report.bits_per_byte:.4f} bits per byte"
        self.note(f"eval at step {step}  loss {report.loss:.4f}{per_byte}")
