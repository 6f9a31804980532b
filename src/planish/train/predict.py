"""What a run will hold, before anything is loaded: priced with its model's table, or said by a dry run.

The table is shipped (built-in models), in the user's cache, or fitted now, which imports torch and takes seconds. Where
a model's layers cannot be a table, the run's own step on tensors without data answers for this run alone.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planish.errors import UsageError
from planish.methods import AdamW, Apollo, Checkpoint, Offload, Plan, updates_in_backward
from planish.models.builtin import cache_folder, model_folder
from planish.plan.estimate import Estimate, PhasePrice, estimate
from planish.price.config import read_config
from planish.price.store import TableFile, cached, preset, table_name
from planish.price.table import Holder, LayerTable
from planish.runfile import RunFile
from planish.sections import MeshSection, ModelSection
from planish.shapes import BatchShape
from planish.train.stage_plan import experts_per_token, has_price, is_even
from planish.train.stage_price import estimate_stages, of_ranks

if TYPE_CHECKING:
    from planish.memory.report import PhasePeak

Say = Callable[[str], None]

# What a config says about its own file, and not about the model.
_INERT = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version")


# A token more or less never makes 2 % of what a rank of a pipeline holds.
NEAR = 0.98
# Phases of the passes of a pipeline, and the room that a schedule made anew may need in them.
_PIPELINED = ("forward", "head", "backward")
_SPARE = Holder("spare", "another schedule")
_ROOM = Holder("staging", "checkpoint")


class NotPredictable(UsageError):
    """Neither a table nor a dry run says what the run will hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a run will hold.

    Attributes:
        estimate: Every phase's peak.
        table: What it was priced with; None where a dry run said it.
        plan: Under which plan.
    """

    estimate: Estimate
    table: LayerTable | None
    plan: Plan


def predict(run: RunFile, say: Say) -> Prediction:
    """Return what `run` will hold at most, on each rank where there are several, whatever the data.

    Memory:        none for tensors.
    Exactness:     never below the ledger of the run on a CPU; equal to it, but for a few scalars, on the batch that
                   holds most.

    Args:
        run: Every setting.
        say: Told when it takes time, and why.

    Raises:
        UsageError: A model that cannot be built.
        NotPredictable: A model whose step reads data, so that it cannot run on tensors without.
    """
    table = table_of(run, say)
    if table is not None:
        return Prediction(estimate=price(run, table), table=table, plan=run.plan)
    if run.mesh.pp > 1:
        staged = _by_stages(run, say)
        if staged is not None:
            return staged
        say(f"running a step of each of {run.mesh.pp} ranks of a pipeline on tensors without data ...")
    return Prediction(estimate=by_dry_run(run), table=None, plan=run.plan)


def price(run: RunFile, table: LayerTable) -> Estimate:
    """Return the estimate of `run` with its model's table."""
    found = estimate(table, batch_shape(run), run.plan, master=keeps_master(run))
    return found if run.save.host is None else found.beside(_ROOM, run.save.host)


def batch_shape(run: RunFile) -> BatchShape:
    """Return one step's input: any documents, any number of valid tokens."""
    return BatchShape(rows=run.rows_per_microbatch, context=run.data.context, microbatches=run.train.grad_accum)


def keeps_master(run: RunFile) -> bool:
    """Return whether the optimizer keeps fp32 masters of narrower parameters."""
    return run.model.dtype != "bf16-pure"


def read_table(run: RunFile) -> LayerTable | None:
    """Return the table that is at hand for `run`, without torch; None where there is none."""
    if not _is_tabled(run):
        return None
    tree = config_tree(run.model)
    files = [] if tree is None else [*_shipped(run), _kept(run, tree)]
    tables = (file.read(_name(run)) for file in files)
    return next((replace(table, buckets=_copied(run)) for table in tables if table is not None), None)


def _is_tabled(run: RunFile) -> bool:
    """Return whether a table may answer for `run`: no frozen weights, no layers of different makes."""
    if run.model.adapter is not None or run.model.freeze or not _is_tabled_mesh(run) or not is_tabled(run.plan):
        return False
    return "per_layer_config" not in (config_tree(run.model) or {})


def _is_tabled_mesh(run: RunFile) -> bool:
    """Return whether tables say what one of the run's ranks holds: of shards and copies, and of nothing beside them."""
    mesh = run.mesh
    return mesh.size == 1 or (mesh.ep == mesh.vp == mesh.cp == mesh.pp == 1 and isinstance(run.plan.optim, AdamW))


def _copied(run: RunFile) -> bool:
    """Return whether ranks hold copies of everything, and exchange gradients in buckets."""
    return run.mesh.size > 1 and not run.mesh.sharded


def _traced_mesh(run: RunFile) -> MeshSection:
    """Return the mesh that the run's table is of.

    Copies are those of one rank, and buckets: in several microbatches gradients wait beside them, in a single one each
    goes into its bucket as it comes.
    """
    return MeshSection() if _copied(run) and run.train.grad_accum > 1 else run.mesh


def is_tabled(plan: Plan) -> bool:
    """Return whether tables say what a plan's layers hold; not where weights are updated in their backward pass."""
    return not (updates_in_backward(plan.optim) or (isinstance(plan.optim, Apollo) and plan.optim.weights == "int8"))


def table_of(run: RunFile, say: Say) -> LayerTable | None:
    """Return the table for `run`, fitted and kept where it is not at hand; None where its layers cannot be one."""
    table = read_table(run)
    if table is not None or not _is_tabled(run):
        return table
    say("fitting this model's table of bytes (seconds, once) ...")

    from planish.models.load import load_config
    from planish.train.layer_table import fit_table

    config = load_config(run.model, context=run.data.context)
    offloads = isinstance(run.plan.boundary, Offload)
    plan = replace(run.plan, optim=AdamW(), boundary=Checkpoint() if offloads else run.plan.boundary)
    try:
        table = fit_table(config, run.model, plan, rows=run.rows_per_microbatch, mesh=_traced_mesh(run))
    except UsageError:
        raise
    except (ValueError, RuntimeError) as error:
        say(f"its layers are no table ({_first_line(error)}); a dry run answers instead.")
        return None
    try:
        _kept(run, config_tree(run.model) or config.to_dict()).write({_name(run): table})
    except OSError as error:
        say(f"the table could not be kept in {cache_folder()}: {error.strerror}.")
    return replace(table, buckets=_copied(run))


def config_tree(section: ModelSection) -> Mapping[str, Any] | None:
    """Return the model's config.json as a tree; None where only transformers can make it.

    Raises:
        UsageError: No such file, or not JSON.
    """
    shipped = preset(section.from_) if section.from_ else None
    if shipped is not None:
        return shipped.config
    if section.gguf is not None:
        return None
    path = section.config or model_folder(section.from_ or "") / "config.json"
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(f"`model.config` file {path} does not exist.") from error
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is not a config that can be read: {error}") from error


def max_positions(section: ModelSection) -> int | None:
    """Return the longest context that the model was made for; None where its config does not say."""
    tree = config_tree(section)
    return None if tree is None else read_config(tree).max_positions


def _by_stages(run: RunFile, say: Say) -> Prediction | None:
    """Return what the ranks of a pipeline will hold by the table of their model; None where there is no price."""
    tree = config_tree(run.model)
    if run.mesh.size > run.mesh.pp or run.model.moe is not None or not has_price(run.plan, tree, run.model.dtype):
        return None
    table = table_of(replace(run, mesh=MeshSection(), plan=replace(run.plan, pipeline=None)), say)
    if table is None or not is_even(table.tensors, len(table.layers)):
        return None
    found = estimate_stages(
        table,
        batch_shape(run),
        run.plan,
        num_ranks=run.mesh.pp,
        top_k=experts_per_token(tree),
        master=keeps_master(run),
    )
    return Prediction(estimate=found, table=table, plan=run.plan)


def by_dry_run(run: RunFile) -> Estimate:
    """Return each phase's peak over dry runs: whole rows, and rows cut into documents so as to hold most.

    Of a pipeline, it is the peak of the rank that holds most in that phase. Only ranks that come `NEAR` to the most are
    asked about both kinds of rows.

    Raises:
        NotPredictable: The step reads data.
    """
    shape = batch_shape(run)
    cut = {"first_document": 1, "num_valid": shape.tokens - 1} if shape.context > 1 else {}
    firsts = range(0, run.mesh.size, run.mesh.size // run.mesh.pp)  # of the ranks that hold the same layers
    ranks = [_dry_run(run, rank, cut) for rank in firsts]
    most = {phase: max(each[phase].peak_bytes for each in ranks) for phase in ranks[0]}
    for seat, found in enumerate(ranks if cut else ()):
        if any(price.peak_bytes >= NEAR * most[phase] for phase, price in found.items()):
            whole = _dry_run(run, firsts[seat], {})
            ranks[seat] = {phase: max(found[phase], whole[phase], key=_by_peak) for phase in found}
    if run.mesh.pp == 1:
        return Estimate(phases=ranks[0])
    return of_ranks(dict(zip(firsts, ranks, strict=True)))


def _by_peak(price: PhasePrice) -> int:
    return price.peak_bytes


def _dry_run(run: RunFile, rank: int, layout: Mapping[str, int]) -> dict[str, PhasePrice]:
    """Return each phase's peak on one rank, for full rows that are cut as `layout` says."""
    from planish.train.dry_run import dry_run
    from planish.train.job import span_of
    from planish.train.layer_trace import full_batch

    place = run.mesh.cp - 1, run.mesh.cp
    batches = [span_of(full_batch(batch_shape(run), **layout), place) for _ in range(run.train.grad_accum + 1)]
    try:
        dry = dry_run(run, batches=batches, rank=rank)
    except UsageError:
        raise
    except (ValueError, RuntimeError) as error:
        reason = _first_line(error)
        raise NotPredictable(f"the step of this run cannot run on tensors without data ({reason}).") from error
    return {phase: _priced(peak, dry.spare_bytes if phase in _PIPELINED else 0) for phase, peak in dry.phases.items()}


def _priced(peak: "PhasePeak", spare_bytes: int) -> PhasePrice:
    """Return a peak with what may come on top of it."""
    spare = {_SPARE: spare_bytes} if spare_bytes else {}
    owners: dict[Holder, int] = {}
    for each in peak.owners:
        holder = Holder(each.category, each.owner)
        owners[holder] = owners.get(holder, 0) + each.total_bytes
    return PhasePrice(
        peak_bytes=peak.peak_bytes + spare_bytes,
        categories=dict(peak.categories) | {holder.category: size for holder, size in spare.items()},
        owners=tuple(sorted((owners | spare).items(), key=lambda item: -item[1])),
        where=peak.owners[0].owner if peak.owners else "",
    )


def _name(run: RunFile) -> str:
    mesh = _traced_mesh(run)
    return table_name(
        run.plan,
        dtype=run.model.dtype,
        rows=run.rows_per_microbatch,
        num_shards=mesh.dp or 1,
        copied=mesh.replicate > 1,
    )


def _shipped(run: RunFile) -> list[TableFile]:
    """Return the file of the package that holds tables of the run's very model, if there is one."""
    section = run.model
    shipped = preset(section.from_) if section.from_ else None
    return [] if shipped is None or section.moe is not None or section.rope is not None else [shipped]


def _kept(run: RunFile, tree: Mapping[str, Any]) -> TableFile:
    """Return the file of the user's cache for tables of the run's model."""
    section = run.model
    facts = {
        "config": {name: value for name, value in tree.items() if name not in _INERT},
        "rope": section.rope,
        "moe": section.moe,
        "positions": run.data.context if section.extend_positions or section.rope else None,
    }
    return cached(cache_folder(), facts)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
