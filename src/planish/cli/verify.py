"""`planish verify run.toml`: plain and planned step side by side on the user's own batch."""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro

from planish.cli.options import parse
from planish.cli.train import read_run
from planish.errors import VerificationFailed


@dataclass(frozen=True, kw_only=True)
class Options:
    """Check that the plan computes what plain PyTorch computes: loss and every gradient, on the run's first batch.

    What a method learns otherwise on purpose, such as another optimizer's steps, is said and not compared.
    """

    run: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")] = None
    """Run file (TOML), or a run folder."""
    json: bool = False
    """Print one JSON object and nothing else."""


def main(words: list[str]) -> int:
    """Run the verb."""
    options, settings = parse(Options, words, verb="verify")
    run = read_run(options.run, settings)

    from planish.train.verify import Difference, verify

    differences = verify(run)
    failed = [each for each in differences if not each.holds]
    if options.json:
        tree = {"holds": not failed, "differences": [asdict(each) | {"holds": each.holds} for each in differences]}
        tree["approximations"] = list(run.plan.approximations)
        sys.stdout.write(json.dumps(tree) + "\n")
        return VerificationFailed.exit_code if failed else 0

    width = max(len(each.name) for each in differences)

    def row(each: Difference) -> str:
        mark = "" if each.holds else "  more than allowed"
        return (
            f"{each.name:<{width}}  {each.plain:.2e}  {each.planned:.2e}  {each.between:.2e}  {each.allowed:.2e}{mark}"
        )

    sys.stdout.write(f"relative error against the plain step in higher precision\n{'':<{width}}  plain     planned   ")
    sys.stdout.write("between   allowed\n" + "".join(f"{row(each)}\n" for each in differences))
    sys.stdout.write("".join(f"not compared: {sentence}\n" for sentence in run.plan.approximations))
    if failed:
        raise VerificationFailed(
            f"{len(failed)} of {len(differences)} quantities differ by more than twice the plain way's own error, "
            f"the first is {failed[0].name}."
        )
    return 0
