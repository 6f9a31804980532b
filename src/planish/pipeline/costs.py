"""What passes and transfers take, by stage or by rank."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Self

from planish.errors import UsageError
from planish.pipeline.actions import STAGE_PASSES, Action, Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds, or any other unit of time.

    Attributes:
        passes: One number per stage for F, B, I and W; one per rank for the vocabulary passes.
        send: A hidden state, or its gradient, from one rank to the next; it runs beside the passes.
        collectives: Each kind, on a channel of its own beside the passes; free where missing.
    """

    passes: Mapping[Kind, Sequence[float]]
    send: float = 0.0
    collectives: Mapping[Kind, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        named = [*((f"passes[{kind}]", each) for kind, row in self.passes.items() for each in row), ("send", self.send)]
        named += [(f"collectives[{kind}]", each) for kind, each in self.collectives.items()]
        for name, value in named:
            if not 0 <= value < math.inf:
                raise UsageError(f"`costs.{name}` must be 0 or more, got {value}.")

    @classmethod
    def uniform(
        cls,
        *,
        num_ranks: int,
        num_stages: int,
        passes: Mapping[Kind, float],
        send: float = 0.0,
        collectives: Mapping[Kind, float] | None = None,
    ) -> Self:
        """Return costs that are the same on all stages and ranks."""
        sizes = {kind: num_stages if kind in STAGE_PASSES else num_ranks for kind in passes}
        return cls(
            passes={kind: (value,) * sizes[kind] for kind, value in passes.items()},
            send=send,
            collectives=collectives or {},
        )

    def row(self, kind: Kind) -> Sequence[float]:
        """Return what the passes of `kind` take, by stage or by rank.

        Raises:
            UsageError: There is nothing for `kind`.
        """
        if kind not in self.passes:
            raise UsageError(f"`costs.passes` has nothing for {kind}; give what it takes on each stage or rank.")
        return self.passes[kind]

    def of(self, action: Action) -> float:
        """Return what the pass `action` takes.

        Raises:
            UsageError: There is nothing for its kind or its stage.
        """
        row = self.row(action.kind)
        if action.stage >= len(row):
            raise UsageError(f"`costs.passes` has {len(row)} numbers for {action.kind}, but the schedule has {action}.")
        return row[action.stage]

    def collective(self, kind: Kind) -> float:
        """Return what the collective `kind` takes."""
        return self.collectives.get(kind, 0.0)

    def with_waiting_senders(self, stage_ranks: Sequence[int]) -> Self:
        """Return the costs of a runtime whose sender waits for its transfer: the pass is longer by `send`.

        So does Megatron-LM's 1F1B, which does not overlap sends.
        """
        apart = [one != other for one, other in pairwise(stage_ranks)]
        sends = {Kind.F: [*apart, False], Kind.B: [False, *apart], Kind.I: [False, *apart]}
        passes = dict(self.passes)
        for kind in sends.keys() & passes.keys():
            pairs = zip(passes[kind], sends[kind], strict=True)
            passes[kind] = tuple(value + self.send * sent for value, sent in pairs)
        return replace(self, passes=passes, send=0.0)
