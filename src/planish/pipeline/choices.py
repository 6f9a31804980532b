"""The choice of a pipeline: one `match` from a schedule's name to what makes it."""

from typing import assert_never

from planish.errors import UsageError
from planish.methods import Pipeline
from planish.pipeline.actions import Head
from planish.pipeline.costs import Costs
from planish.pipeline.interlaced import interlaced
from planish.pipeline.interleaved import interleaved
from planish.pipeline.one_f_one_b import one_f_one_b
from planish.pipeline.schedule import Schedule
from planish.pipeline.v_blocks import v_half, v_min


def check_layers(pipeline: Pipeline, *, num_ranks: int, num_layers: int) -> None:
    """Refuse a model of fewer layers than a pipeline has stages.

    Raises:
        UsageError: How many ranks would do.
    """
    each = pipeline.stages_per_rank
    if num_layers < num_ranks * each:
        most = num_layers // each
        set_to = f"set `mesh.pp` to {most} or less" if most > 1 else "leave `mesh.pp` out"
        raise UsageError(
            f"`mesh.pp` ({num_ranks}) takes {num_ranks * each} layers, {each} a rank by {pipeline.method}, and the "
            f"model has {num_layers}; {set_to}."
        )


def generate(pipeline: Pipeline, *, num_ranks: int, num_microbatches: int, costs: Costs) -> Schedule:
    """Return the schedule of `pipeline` with its communication, made for `costs`."""
    sizes = {"num_ranks": num_ranks, "num_microbatches": num_microbatches}
    head = Head(pipeline.place)
    match pipeline.method:
        case "1f1b":
            return one_f_one_b(**sizes, head=head, costs=costs)
        case "v-half":
            return v_half(**sizes, head=head, costs=costs)
        case "v-min":
            return v_min(**sizes, head=head, costs=costs)
        case "interleaved":
            return interleaved(**sizes, num_chunks=pipeline.stages_per_rank, costs=costs)
        case "interlaced":
            return interlaced(**sizes, costs=costs)
        case _:
            assert_never(pipeline.method)
