"""`planish report RUN`: a run folder in, one page of figures and a table in the terminal out."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from planish.cli.options import parse_plain


@dataclass(frozen=True, kw_only=True)
class Options:
    """Show a run: what it peaked at and who held it, loss and speed; written to report.html in its folder."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The folder of a run."""
    out: Path | None = None
    """Write the page to this file instead of report.html in the run folder."""
    json: bool = False
    """Print one JSON object and nothing else."""
    tensorboard: bool = False
    """Also write the metrics as TensorBoard events to tb/ in the run folder."""


def main(words: list[str]) -> int:
    """Run the verb."""
    options = parse_plain(Options, words, verb="report")

    from planish.report.events import write_events
    from planish.report.page import write_page
    from planish.report.read import read_run
    from planish.report.summary import summarize
    from planish.report.terminal import print_report

    record = read_run(options.run)
    page = options.out or options.run / "report.html"
    write_page(record, page)
    events = write_events(record, options.run / "tb") if options.tensorboard else None
    if options.json:
        sys.stdout.write(json.dumps(summarize(record, page=page, events=events), default=str) + "\n")
        return 0
    print_report(record)
    for path in (page, events):
        if path is not None:
            sys.stdout.write(f"{path}\n")
    return 0
