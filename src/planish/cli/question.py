"""What `planish plan --model NAME` says: the question read, answered, and told, with its picture and its proof."""

import sys
from pathlib import Path
from typing import Any

from planish.cli import told
from planish.cli.ask import ask
from planish.cli.say import write_file
from planish.errors import PlanishError
from planish.plan.answer import Answer, answer


def to_tree(options: Any, settings: list[tuple[str, Any]]) -> tuple[dict[str, Any], PlanishError | None]:
    """Return the answer as plain data, and why the exit code is not 0."""
    asked = ask(options, settings)
    found = answer(asked.question)
    _draw(options.svg, found)
    tree, error = told.to_tree(asked, found), told.misfit(found)
    if options.prove:
        from planish.cli.prove import prove

        proof = prove(found.best, asked.config)
        tree, error = tree | {"proof": proof.to_dict()}, error or proof.error()
    return tree, error


def show(options: Any, settings: list[tuple[str, Any]]) -> int:
    """Print the answer for people; what does not fit, or is not proven, is an error."""
    asked = ask(options, settings)
    found = answer(asked.question)
    told.show(asked, found)
    _draw(options.svg, found)
    error = told.misfit(found)
    if options.prove and error is None:
        from planish.cli.prove import prove

        sys.stderr.write("planish: running the planned step on tensors without data (a minute or so) ...\n")
        proof = prove(found.best, asked.config)
        told.show_proof(proof)
        error = proof.error()
    if error is not None:
        raise error
    return 0


def _draw(path: Path | None, found: Answer) -> None:
    if path is not None:
        from planish.plan.draw import to_svg

        write_file(path, to_svg(found.best))
