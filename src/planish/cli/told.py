"""How `planish plan` tells an answer: tables for people, one object for programs."""

import sys
from typing import TYPE_CHECKING, Any

import tomli_w
from rich.console import Console
from rich.table import Table

from planish.cli.ask import Asked, hardware_line
from planish.decode import decode
from planish.errors import DoesNotFit, PlanishError
from planish.methods import Bitmap
from planish.plan.answer import Answer, plan_tables
from planish.plan.question import IMPORTED_BYTES, Candidate
from planish.price.activation import DENSITY_PERCENT
from planish.price.hardware import SOURCES
from planish.runfile import RunFile
from planish.units import format_bytes

if TYPE_CHECKING:
    from planish.cli.prove import Proof

_WIDTH = 110


def refusal(found: Answer) -> str | None:
    """Return why `planish train` would not take the plan as it is today; None where it would."""
    best = found.best
    tree = plan_tables(best) | {"model": {"config": "config.json", "dtype": best.question.dtype}}
    tree["data"] = tree["data"] | {"train": "builtin:english"}
    try:
        decode(RunFile, tree)
    except PlanishError as error:
        return str(error)
    if best.loading_bytes > best.question.hardware.memory:
        return (
            f"rank 0 loads the whole model before it deals out the shards, {format_bytes(best.loading_bytes)} on one "
            "device."
        )
    return None


def misfit(found: Answer) -> DoesNotFit | None:
    """Return why nothing fits, with what would do."""
    if found.fits:
        return None
    best = found.best
    question = best.question
    longest = "no context fits" if found.longest is None else f"the longest context {found.longest:,} tokens"
    fewest = "no number of devices that was tried" if found.fewest is None else f"{found.fewest} devices"
    over = best.over()
    limit = question.hardware.memory if over == "memory" else question.host if over == "host memory" else question.disk
    needs = best.estimate.peak_bytes if over == "memory" else best.node_bytes((over or "host").split()[0])
    stages = (
        " Stages have no price for what waits in far memory, so none is offered: leave `mesh.pp` out, and boundaries "
        "and optimizer state may go to the host or a disk."
    )
    return DoesNotFit(
        f"with everything bounded {best.estimate.peak_phase} needs {format_bytes(needs)} of {over}, there are "
        f"{format_bytes(limit or 0)}; the smallest memory that would do is {format_bytes(found.smallest)} a device, "
        f"{longest}, the fewest devices: {fewest}.{stages * (best.mesh.pp > 1)}"
    )


def show(asked: Asked, found: Answer) -> None:
    """Print the answer for people."""
    best = found.best
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else _WIDTH, highlight=False)
    console.print(_headline(asked, best))
    for sentence in _stands(asked, best):
        console.print(f"{sentence}\n", markup=False)
    console.print(_device_table(best))
    console.print(_host_table(best))
    for sentence in _sentences(asked, found):
        console.print(sentence, markup=False)
    if found.rejected:
        console.print("\nother ways")
        for sentence in found.rejected:
            console.print(f"  {sentence}", markup=False)
    heading = "the plan, to paste into a run file" if found.fits else "the most bounded plan, which does not fit"
    console.print(f"\n# {heading}\n{tomli_w.dumps(plan_tables(best))}", markup=False, end="")


def show_proof(proof: "Proof") -> None:
    """Print prices and dry run side by side."""
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else _WIDTH, highlight=False)
    console.print(f"\nproof: layers folded to {proof.depths[0]} and {proof.depths[1]}, every rank of the mesh")
    console.print(proof.table())
    for sentence in proof.notes:
        console.print(f"  {sentence}", markup=False)


def to_tree(asked: Asked, found: Answer) -> dict[str, Any]:
    """Return the answer as plain data."""
    best = found.best
    question, time = best.question, best.time
    places = {place: best.node_bytes(place) for place in ("host", "disk")}
    return {
        "model": asked.name,
        "parameters": question.shape.num_parameters,
        "active_parameters": question.shape.num_active_parameters,
        "fits": found.fits,
        "devices": question.devices,
        "hardware": question.hardware.name,
        "memory_bytes": question.hardware.memory,
        **best.estimate.to_dict(),
        "node": {f"{place}_bytes": nbytes for place, nbytes in places.items()}
        | {"ranks": question.ranks_per_node, "loading_bytes": best.loading_bytes},
        "context": question.context,
        "tokens_per_step": best.tokens_per_step,
        "rows_per_microbatch": best.rows,
        "microbatches": best.microbatches,
        "step_s": {
            "total": time.total_s,
            "compute": time.compute,
            "communication": time.communication,
            "hidden_communication": time.hidden_communication,
            "offload": time.offload,
            "hidden_offload": time.hidden_offload,
            "optimizer": time.optimizer,
            "turns": time.turns,
        },
        "tokens_per_s": best.tokens_per_s,
        "mfu": time.mfu(question.hardware, question.dtype),
        "plan": plan_tables(best),
        "rejected": list(found.rejected),
        "assumed": list(_assumed(asked, best)),
        "refused_by_train": refusal(found),
        "smallest_memory_bytes": found.smallest,
        "longest_context": found.longest,
        "fewest_devices": found.fewest,
        "source": "arithmetic",
    } | _stands_tree(asked, best)


def _stands_tree(asked: Asked, best: Candidate) -> dict[str, Any]:
    if asked.theirs is None:
        return {}
    found = asked.theirs.as_it_stands(best.question)
    stands = found.estimate.to_dict() | {"fits": found.over() is None, "step_s": found.time.total_s}
    return {"as_it_stands": stands | {"framework": asked.theirs.framework}}


def _stands(asked: Asked, best: Candidate) -> tuple[str, ...]:
    """Return what the run of another framework would hold as it stands."""
    if asked.theirs is None:
        return ()
    found = asked.theirs.as_it_stands(best.question)
    peak, limit = found.estimate.peak_bytes, best.question.hardware.memory
    verdict = "fits" if found.over() is None else f"does not fit {format_bytes(limit)}"
    return (
        f"as it stands ({asked.theirs.framework}): {format_bytes(peak)} in {found.estimate.peak_phase}, {verdict}, "
        f"{found.time.total_s:,.3g} s a step; as planish would run it: {format_bytes(best.estimate.peak_bytes)}, "
        f"{best.time.total_s:,.3g} s",
    )


def _headline(asked: Asked, best: Candidate) -> str:
    question, mesh = best.question, best.mesh
    shape = question.shape
    active = "" if not question.mixed else f", {_large(shape.num_active_parameters)} active"
    degrees = " ".join(
        f"{name} {degree}"
        for name in ("dp", "replicate", "cp", "ep", "vp", "pp")
        if (degree := getattr(mesh, name)) > 1
    )
    rows = best.rows * best.microbatches * mesh.readers
    return (
        f"{asked.name}: {_large(shape.num_parameters)} parameters{active}, {question.dtype}, on "
        f"{question.devices} x {question.hardware.name} ({format_bytes(question.hardware.memory)} each"
        f"{'; ' + degrees if degrees else ''})\n"
        f"a step: {rows} row{'s' * (rows > 1)} of {question.context:,} tokens, {best.microbatches} "
        f"microbatch{'es' * (best.microbatches > 1)} of {best.batch.tokens:,} tokens a device; worst case: whole rows "
        "in one document, every token counted, any routing\n"
    )


def _large(number: int) -> str:
    scale, word = (1e9, "billion") if number >= 1e9 else (1e6, "million") if number >= 1e6 else (1e3, "thousand")
    return f"{number / scale:,.4g} {word}"


def unit_of(nbytes: int) -> tuple[str, int]:
    """Return the unit in which a table with this largest entry is read without zeros."""
    return ("GiB", 2**30) if nbytes >= 2**30 else ("MiB", 2**20) if nbytes >= 2**20 else ("KiB", 2**10)


def _device_table(best: Candidate) -> Table:
    phases = best.estimate.phases
    unit, scale = unit_of(best.estimate.peak_bytes)
    table = Table(box=None, pad_edge=False)
    table.add_column(f"device, {unit}")
    for phase in phases:
        table.add_column(phase, justify="right")
    for name in dict.fromkeys(name for each in phases.values() for name in each.categories):
        table.add_row(name, *(_cell(each.categories.get(name, 0), scale) for each in phases.values()))
    table.add_row("peak", *(_cell(each.peak_bytes, scale) for each in phases.values()))
    return table


def _host_table(best: Candidate) -> Table:
    """Return what a node's host holds: its ranks' libraries, what waits there, and what is read or written."""
    question, ranks = best.question, best.question.ranks_per_node
    far = best.far_bytes
    phases = ("loading", "steps", "save", "resume")
    weights = sum(each.numel * each.count for each in question.shape.tensors) * question.itemsize
    largest = max(each.numel for each in question.shape.tensors) * 4
    rows = {
        "libraries": [ranks * IMPORTED_BYTES] * 4,
        "boundaries": [0, ranks * far["host boundaries"], 0, 0],
        "optimizer state": [ranks * far["host optimizer state"]] * 4,
        "weights, read": [weights, 0, 0, 0],
        "one tensor at a time": [0, 0, largest, ranks * largest],
    }
    unit, scale = unit_of(max(map(max, rows.values())))
    table = Table(box=None, pad_edge=False)
    table.add_column(f"host, {unit}")
    for phase in phases:
        table.add_column(phase, justify="right")
    for name, cells in rows.items():
        if any(cells):
            table.add_row(name, *(_cell(each, scale) for each in cells))
    table.add_row("sum", *(_cell(sum(each), scale) for each in zip(*rows.values(), strict=True)))
    return table


def _cell(nbytes: int, scale: int) -> str:
    if not nbytes:
        return "-"
    shown = f"{nbytes / scale:.2f}"
    return shown if shown != "0.00" else "<0.01"


def _sentences(asked: Asked, found: Answer) -> list[str]:
    best = found.best
    question, time = best.question, best.time
    peak = best.estimate.phases[best.estimate.peak_phase]
    said = ["", f"peak {format_bytes(peak.peak_bytes)} in {best.estimate.peak_phase}, {peak.where}"]
    said.append(f"held by {best.estimate.owners}")
    disk = best.node_bytes("disk")
    said += [f"the disk of each node holds {format_bytes(disk)}"] * (disk > 0)
    said.append(
        f"a step takes {time.total_s:,.3g} s: compute {time.compute:,.3g}, communication {time.communication:,.3g} "
        f"({time.hidden_communication:,.3g} hidden), offload {time.offload:,.3g} ({time.hidden_offload:,.3g} hidden), "
        f"optimizer {time.optimizer:,.2g}{_turns(best)}; {best.tokens_per_s:,.0f} tokens/s, MFU "
        f"{time.mfu(question.hardware, question.dtype):.0%}"
    )
    if found.fits:
        left = question.hardware.memory - peak.peak_bytes
        longest = "" if found.longest is None else f"; the longest context that would: {found.longest:,} tokens"
        said.append(f"fits {format_bytes(question.hardware.memory)} with {format_bytes(left)} to spare{longest}")
    refused = refusal(found)
    if refused is not None:
        said.append(f"planned at scale: `planish train` refuses this today: {refused}")
    return [*said, *(f"assumed: {each}" for each in _assumed(asked, best))]


def _turns(best: Candidate) -> str:
    """Return what stages wait for their turns, where there are any."""
    pp, microbatches = best.mesh.pp, best.microbatches
    if pp == 1:
        return ""
    return f", waiting for turns {best.time.turns:,.3g} ({pp - 1} of {microbatches + pp - 1}: 1F1B, {pp} stages)"


def _assumed(asked: Asked, best: Candidate) -> tuple[str, ...]:
    hardware = best.question.hardware
    own = [f"{hardware_line(hardware)} ({SOURCES})."]
    if best.question.host is None and best.node_bytes("host") and hardware.kind == "cuda":
        own.append(
            f"no `--host-memory` was given: {format_bytes(best.node_bytes('host'))} a node are taken to be there."
        )
    if isinstance(best.plan.activation, Bitmap):
        own.append(f"at most {DENSITY_PERCENT} % of activations are not zero; layers with more compute theirs again.")
    return (*asked.notes, *own)
