"""The run in a terminal: the same findings as the page, as aligned text."""

import sys

from rich.console import Console
from rich.table import Table
from rich.text import Text

from planish.report import findings
from planish.report.record import PhasePeak, RunRecord, used_categories
from planish.units import format_bytes

_PLAIN_WIDTH = 200


def print_report(record: RunRecord) -> None:
    """Print the run: how it ended, memory by phase and category, who held the peak, loss and speed."""
    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else _PLAIN_WIDTH)
    console.print(Text(findings.outcome(record), style="bold"))
    if record.exceeded is not None:
        console.print(Text(record.exceeded))
    if record.peak is not None:
        _section(console, findings.peak_finding(record, record.peak), _holders(record.peak))
        _section(console, findings.prediction_finding(record), _phases(record))
    console.print()
    speed = record.series("tokens_per_s")
    speed_said = findings.speed_finding(speed) if speed else ""
    far = (findings.far_finding(record), findings.optim_finding(record))
    for sentence in (findings.loss_finding(record), speed_said, *far):
        if sentence:
            console.print(Text(sentence))
    for note in record.notes:
        console.print(Text(note, style="dim"))


def _section(console: Console, title: str, table: Table) -> None:
    console.print()
    console.print(Text(title, style="bold"))
    console.print(table)


def _holders(peak: PhasePeak) -> Table:
    table = _table(["owner", "category", "tensors"], ["bytes", "share"])
    for holder in peak.holders:
        share = f"{holder.total_bytes / peak.peak_bytes:.1%}"
        owner = Text(holder.owner or "(no module)")
        table.add_row(
            owner, holder.category, Text(findings.describe_tensors(holder)), format_bytes(holder.total_bytes), share
        )
    rest = peak.peak_bytes - sum(holder.total_bytes for holder in peak.holders)
    if rest > 0:
        table.add_row("all others", "", "", format_bytes(rest), f"{rest / peak.peak_bytes:.1%}")
    return table


def _phases(record: RunRecord) -> Table:
    """Return the bytes of each phase's worst moment by category, in GiB."""
    phases = list(record.phases.values())
    table = _table(["GiB"], [each.phase for each in phases])
    for name in used_categories(phases):
        table.add_row(name, *(_gib(each.categories.get(name, 0)) for each in phases))
    table.add_row("measured", *(_gib(each.peak_bytes) for each in phases), style="bold")
    if record.predicted is not None:
        expected = [record.predicted.get(each.phase) for each in phases]
        table.add_row("predicted", *(_gib(each.peak_bytes) if each else "-" for each in expected))
    table.add_row("in step", *(f"{each.step:,}" for each in phases), style="dim")
    return table


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.3f}" if size_bytes else "-"


def _table(texts: list[str], numbers: list[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for text in texts:
        table.add_column(text, overflow="fold")
    for number in numbers:
        table.add_column(number, justify="right", no_wrap=True)
    return table
