"""The choice of a pipeline: a schedule and the head's place, and one `match` from its name to the generator."""

from dataclasses import dataclass
from typing import Literal, assert_never

from planish.errors import UsageError
from planish.pipeline.actions import Head
from planish.pipeline.costs import Costs
from planish.pipeline.interlaced import interlaced
from planish.pipeline.interleaved import interleaved
from planish.pipeline.one_f_one_b import one_f_one_b
from planish.pipeline.schedule import Schedule
from planish.pipeline.v_blocks import v_half, v_min

_ONLY_HEAD = {"interleaved": Head.LAST_STAGE, "interlaced": Head.VOCAB_1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """The table `[plan.pipeline]` of a run file: how the stages of `[mesh] pp` ranks take turns.

    Attributes:
        method: Its schedule.
        head: Where the vocabulary layers live; default: shared by all ranks as in Vocab-2. "interleaved" knows it on
            the last stage only, "interlaced" shared as in Vocab-1 only.
        chunks: Stages of each rank, for "interleaved" alone; default: 2.
    """

    method: Literal["1f1b", "interleaved", "interlaced", "v-half", "v-min"] = "1f1b"
    head: Literal["last-stage", "naive", "vocab-1", "vocab-2"] | None = None
    chunks: int | None = None

    def __post_init__(self) -> None:
        only = _ONLY_HEAD.get(self.method)
        if only is not None and self.head not in (None, only):
            raise UsageError(
                f'`plan.pipeline.head` must be "{only}" where `plan.pipeline.method` is "{self.method}", '
                f"got {self.head!r}; leave it out."
            )
        if self.chunks is not None and self.method != "interleaved":
            raise UsageError(
                '`plan.pipeline.chunks` has no effect unless `plan.pipeline.method` is "interleaved"; leave it out.'
            )
        if self.chunks is not None and self.chunks < 1:
            raise UsageError(f"`plan.pipeline.chunks` must be 1 or more, got {self.chunks}.")

    @property
    def place(self) -> Head:
        """Where the vocabulary layers live."""
        return Head(self.head or _ONLY_HEAD.get(self.method, Head.VOCAB_2))

    @property
    def stages_per_rank(self) -> int:
        """Stages of each rank."""
        match self.method:
            case "1f1b" | "interlaced":
                return 1
            case "v-half" | "v-min":
                return 2
            case "interleaved":
                return self.chunks or 2
            case _:
                assert_never(self.method)

    def generate(self, *, num_ranks: int, num_microbatches: int, costs: Costs) -> Schedule:
        """Return the schedule with its communication, made for `costs`."""
        sizes = {"num_ranks": num_ranks, "num_microbatches": num_microbatches}
        match self.method:
            case "1f1b":
                return one_f_one_b(**sizes, head=self.place, costs=costs)
            case "v-half":
                return v_half(**sizes, head=self.place, costs=costs)
            case "v-min":
                return v_min(**sizes, head=self.place, costs=costs)
            case "interleaved":
                return interleaved(**sizes, num_chunks=self.stages_per_rank, costs=costs)
            case "interlaced":
                return interlaced(**sizes, costs=costs)
            case _:
                assert_never(self.method)
