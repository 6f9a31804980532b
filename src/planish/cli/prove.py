"""`planish plan --model NAME ... --prove`: the planned step on tensors without data, beside its prices."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from planish.decode import decode, encode
from planish.errors import PlanishError, UsageError, VerificationFailed
from planish.methods import AdamW, Offload, StreamAdamW
from planish.plan.answer import plan_tables
from planish.plan.estimate import of_moments
from planish.plan.question import Candidate
from planish.price.hardware import KNOWN
from planish.price.head import HeadBytes
from planish.price.step import moments
from planish.price.template import kind_of
from planish.runfile import RunFile
from planish.units import format_bytes

_TOLERANCE = 0.005
_PHASES = ("forward", "backward", "optimizer", "save")
_ALL = 2**50


def disproof(differences: Mapping[str, float]) -> VerificationFailed | None:
    """Return which phase is priced too far away from its dry run, None where none is."""
    off = {phase: share for phase, share in differences.items() if abs(share) > _TOLERANCE}
    if not off:
        return None
    phase = max(off, key=lambda each: abs(off[each]))
    return VerificationFailed(f"{phase} is priced {off[phase]:+.2%} away from the dry run, more than 0.5 %.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What a folded dry run says of a plan, its head apart.

    Attributes:
        depths: Layers of the models that ran.
        ran: Bytes of each phase, as the dry runs say for all layers.
        priced: The same as prices say.
        notes: What was put in the place of what.
    """

    depths: tuple[int, int]
    ran: dict[str, int]
    priced: dict[str, int]
    notes: tuple[str, ...]

    @property
    def differences(self) -> dict[str, float]:
        """By how much of itself each phase differs from its price."""
        return {phase: self.priced[phase] / nbytes - 1 for phase, nbytes in self.ran.items()}

    def error(self) -> PlanishError | None:
        """Return which phase is priced too far away, None where none is."""
        return disproof(self.differences)

    def table(self) -> Table:
        """Return prices and dry run side by side."""
        table = Table(box=None, pad_edge=False)
        table.add_column("without the head")
        for phase in self.ran:
            table.add_column(phase, justify="right")
        table.add_row("priced", *(format_bytes(self.priced[phase]) for phase in self.ran))
        table.add_row("dry run", *(format_bytes(nbytes) for nbytes in self.ran.values()))
        table.add_row("difference", *(f"{share:+.3%}" for share in self.differences.values()))
        return table

    def to_dict(self) -> dict[str, Any]:
        """Return the proof as plain data."""
        return {
            "depths": list(self.depths),
            "dry_run_bytes": self.ran,
            "priced_bytes": self.priced,
            "differences": self.differences,
            "notes": list(self.notes),
        }


def prove(best: Candidate, config: Mapping[str, Any]) -> Proof:
    """Return what the planned step holds when it runs on tensors without data over all ranks, layers folded.

    Raises:
        UsageError: `planish train` refuses the plan, or its step reads data.
    """
    from planish.train.proof import run_folded

    if best.mesh.pp > 1:
        raise UsageError("`--prove` folds layers, which stages divide; paste the plan into a run file and prove that.")
    cpu, notes = _on_cpu(best)
    with tempfile.TemporaryDirectory() as folder:
        folded = run_folded(_run_file(cpu), config, Path(folder), depth=_depth(cpu))
    none = HeadBytes(forward=0, kept=0, backward=0, evaluation=0)
    found = of_moments(moments(cpu.table, cpu.batch, none, cpu.plan, master=cpu.question.master), far={})
    ran = folded.at(len(best.question.shape.layers))
    phases = [phase for phase in _PHASES if phase in ran]
    return Proof(
        depths=folded.depths,
        ran={phase: ran[phase] for phase in phases},
        priced={phase: found.phases[phase].peak_bytes for phase in phases},
        notes=notes,
    )


def _on_cpu(best: Candidate) -> tuple[Candidate, tuple[str, ...]]:
    """Return the candidate as it runs where no other device is: what waits on a host waits on a disk."""
    plan, notes = best.plan, ["the head stands in for itself; what rank 0 loads before it deals out is left aside"]
    if isinstance(plan.boundary, Offload):
        plan = replace(plan, boundary=replace(plan.boundary, host=None, disk=_ALL))
        notes.append("inputs of layers wait on a disk")
    if isinstance(plan.optim, StreamAdamW):
        plan = replace(plan, optim=AdamW())
        notes.append("AdamW's state is on the device in both, since its place would be made on this machine's disk")
    question = replace(best.question, hardware=replace(KNOWN["cpu"], memory=best.question.hardware.memory))
    return replace(best, question=question, plan=plan), tuple(notes)


def _run_file(cpu: Candidate) -> RunFile:
    tree = plan_tables(cpu) | {"plan": encode(cpu.plan)}
    del tree["memory"]
    tree["data"] = tree["data"] | {"train": "builtin:english"}
    tree["model"] = {"config": "config.json", "dtype": cpu.question.dtype, "extend_positions": True}
    try:
        return decode(RunFile, tree)
    except PlanishError as error:
        raise UsageError(f"what `planish train` refuses cannot be proven: {error}") from error


def _depth(cpu: Candidate) -> int:
    """Return how many of the first layers hold every kind of inner layer, and one that can be the last."""
    kinds = [kind_of(layer) for layer in cpu.question.shape.layers]
    inner = set(kinds[1:-1])
    for depth in range(3, len(kinds) - 1):
        if set(kinds[1:depth]) >= inner:
            return depth
    raise UsageError(f"`--prove` folds layers, and {len(kinds)} of them are too few; use a run file and its `--prove`.")
