"""The choice of a pipeline: how a model goes over ranks, and one `match` from its name to the generator."""

from dataclasses import dataclass
from typing import Literal, assert_never, get_args

from planish.errors import UsageError
from planish.pipeline.actions import Head
from planish.pipeline.costs import Costs
from planish.pipeline.interlaced import interlaced
from planish.pipeline.interleaved import interleaved
from planish.pipeline.one_f_one_b import one_f_one_b
from planish.pipeline.schedule import Schedule
from planish.pipeline.v_blocks import v_half, v_min

Name = Literal["1f1b", "interleaved", "interlaced", "v-half", "v-min"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """How a model goes over ranks.

    Attributes:
        ranks: Ranks of the pipeline.
        microbatches: Microbatches of a step.
        schedule: "interleaved" knows the head on the last stage only, "interlaced" the shared one of Vocab-1 only.
        head: Where the vocabulary layers live.
        chunks: Stages of each rank, for "interleaved".
    """

    ranks: int
    microbatches: int
    schedule: Name = "1f1b"
    head: Literal["last-stage", "naive", "vocab-1", "vocab-2"] = "vocab-2"
    chunks: int = 2

    def __post_init__(self) -> None:
        for name in ("ranks", "microbatches", "chunks"):
            if getattr(self, name) < 1:
                raise UsageError(f"`pipeline.{name}` must be 1 or more, got {getattr(self, name)}.")
        if self.schedule not in get_args(Name):
            raise UsageError(f"`pipeline.schedule` must be one of {', '.join(get_args(Name))}, got {self.schedule!r}.")
        if self.head not in set(Head):
            raise UsageError(f"`pipeline.head` must be one of {', '.join(Head)}, got {self.head!r}.")
        only = {"interleaved": Head.LAST_STAGE, "interlaced": Head.VOCAB_1}.get(self.schedule)
        if only is not None and self.head != only:
            raise UsageError(
                f'`pipeline.head` must be "{only}" where `pipeline.schedule` is "{self.schedule}", got {self.head!r}.'
            )

    @property
    def num_stages(self) -> int:
        """Stages over all ranks."""
        match self.schedule:
            case "1f1b" | "interlaced":
                return self.ranks
            case "v-half" | "v-min":
                return 2 * self.ranks
            case "interleaved":
                return self.chunks * self.ranks
            case _:
                assert_never(self.schedule)

    def rows_per_microbatch(self, rows: int) -> int:
        """Return the rows of a microbatch where a step has `rows` of them.

        Raises:
            UsageError: The microbatches do not divide the batch.
        """
        if rows % self.microbatches:
            fits = next(m for m in range(self.microbatches, 0, -1) if rows % m == 0)
            raise UsageError(
                f"`pipeline.microbatches` ({self.microbatches}) must divide the rows of a batch ({rows}); try {fits}."
            )
        return rows // self.microbatches

    def generate(self, costs: Costs) -> Schedule:
        """Return the schedule with its communication, made for `costs`."""
        sizes = {"num_ranks": self.ranks, "num_microbatches": self.microbatches}
        match self.schedule:
            case "1f1b":
                return one_f_one_b(**sizes, head=Head(self.head), costs=costs)
            case "v-half":
                return v_half(**sizes, head=Head(self.head), costs=costs)
            case "v-min":
                return v_min(**sizes, head=Head(self.head), costs=costs)
            case "interleaved":
                return interleaved(**sizes, num_chunks=self.chunks, costs=costs)
            case "interlaced":
                return interlaced(**sizes, costs=costs)
            case _:
                assert_never(self.schedule)
