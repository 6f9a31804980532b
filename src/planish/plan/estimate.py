"""What a run will hold: the peak of every phase with those who hold it, and the longest context that would fit."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from planish.methods import Plan, StreamAdamW
from planish.plan.longest import longest
from planish.price.head import head_bytes
from planish.price.moment import Alive, Moment
from planish.price.state import placement
from planish.price.step import moments
from planish.price.table import Holder, LayerTable
from planish.shapes import BatchShape
from planish.units import format_bytes

_PHASES = ("init", "forward", "head", "backward", "optimizer", "eval", "save", "resume")
_SHOWN, _KEPT = 4, 20
_LONGEST = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePrice:
    """The worst moment of one phase.

    Attributes:
        peak_bytes: Bytes alive then.
        categories: Those bytes by category.
        owners: The largest holders, largest first, at most 20.
        where: What is at work then, in words.
    """

    peak_bytes: int
    categories: dict[str, int]
    owners: tuple[tuple[Holder, int], ...]
    where: str

    @property
    def alive(self) -> Alive:
        """What is alive then, by category."""
        return Alive.of({Holder(name, ""): size for name, size in self.categories.items()})

    def beside(self, holder: Holder, nbytes: int) -> "PhasePrice":
        """Return the moment with `nbytes` more."""
        owners = sorted((*self.owners, (holder, nbytes)), key=lambda item: -item[1])
        return replace(
            self,
            peak_bytes=self.peak_bytes + nbytes,
            categories=self.categories | {holder.category: self.categories.get(holder.category, 0) + nbytes},
            owners=tuple(owners[:_KEPT]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a run will hold, phase by phase.

    Attributes:
        phases: What tensors hold on the device.
        far: Optimizer state in far memory, by place; empty where all of it is the device's.
        ranks: The peak of each rank of a pipeline, of which `phases` are the largest; empty where all hold alike.
    """

    phases: dict[str, PhasePrice]
    far: dict[str, int] = field(default_factory=dict)
    ranks: tuple[int, ...] = ()

    @property
    def peak_phase(self) -> str:
        """The phase of the run's peak."""
        return max(self.phases, key=lambda phase: self.phases[phase].peak_bytes)

    @property
    def peak_bytes(self) -> int:
        """The run's peak."""
        return self.phases[self.peak_phase].peak_bytes

    @property
    def owners(self) -> str:
        """Who holds the peak: the largest holders with their bytes."""
        largest = self.phases[self.peak_phase].owners[:_SHOWN]
        return ", ".join(f"{holder.category} of {holder.owner} {format_bytes(size)}" for holder, size in largest)

    def beside(self, holder: Holder, nbytes: int) -> "Estimate":
        """Return the estimate with `nbytes` more in every phase."""
        return replace(self, phases={phase: price.beside(holder, nbytes) for phase, price in self.phases.items()})

    def to_dict(self) -> dict[str, Any]:
        """Return the estimate as plain data."""
        return {
            "peak_bytes": self.peak_bytes,
            "peak_phase": self.peak_phase,
            "far": self.far,
            **({"peak_bytes_by_rank": list(self.ranks)} if self.ranks else {}),
            "phases": {
                phase: {
                    "peak_bytes": price.peak_bytes,
                    "categories": price.categories,
                    "owners": [[holder.owner, holder.category, size] for holder, size in price.owners],
                    "where": price.where,
                }
                for phase, price in self.phases.items()
            },
        }


def estimate(table: LayerTable, batch: BatchShape, plan: Plan, *, master: bool) -> Estimate:
    """Return the peaks of a run on `batch`.

    Exactness: equal to the ledger, to the byte but for a few scalars, where the model's table is the plan's; where
        `batch` leaves documents and valid tokens open, for those that hold most, so never below a real batch.

    Args:
        table: The model's layers under the plan's attention, dispatch and boundary, in the run's dtype.
        batch: One step's input.
        plan: Names the methods of head, boundaries and optimizer.
        master: Whether the optimizer keeps fp32 masters of narrower parameters.
    """
    return of_moments(walk(table, batch, plan, master=master), far=_far(table, plan, master=master))


def walk(table: LayerTable, batch: BatchShape, plan: Plan, *, master: bool) -> Iterator[Moment]:
    """Yield the moments of a step on `batch`."""
    head = head_bytes(table.head, batch, plan.vocab, table.vocab_ranks)
    return moments(table, batch, head, plan, master=master)


def of_moments(found: Iterable[Moment], *, far: dict[str, int]) -> Estimate:
    """Return the worst of the moments of a step, phase by phase."""
    worst: dict[str, Moment] = {}
    for moment in found:
        if moment.phase not in worst or moment.total_bytes > worst[moment.phase].total_bytes:
            worst[moment.phase] = moment
    return Estimate(phases={phase: _price(worst[phase]) for phase in _PHASES}, far=far)


def _far(table: LayerTable, plan: Plan, *, master: bool) -> dict[str, int]:
    if not isinstance(plan.optim, StreamAdamW):
        return {}
    placed = placement(table.tensors, plan.optim, master=master, on_host=table.on_host)
    return {"optim host": placed.host_bytes, "optim disk": placed.disk_bytes}


def _price(moment: Moment) -> PhasePrice:
    categories: dict[str, int] = {}
    for holder, size in moment.sizes.items():
        categories[holder.category] = categories.get(holder.category, 0) + size
    return PhasePrice(
        peak_bytes=moment.total_bytes,
        categories={name: size for name, size in categories.items() if size},
        owners=tuple(sorted(moment.sizes.items(), key=lambda item: -item[1])[:_KEPT]),
        where=moment.doing if moment.layer is None else f"{moment.doing} of layer {moment.layer}",
    )


def longest_context(table: LayerTable, batch: BatchShape, plan: Plan, *, master: bool, budget_bytes: int) -> int | None:
    """Return the longest context whose peak is within the budget, rows and microbatches as they are; None: not one."""

    def fits(context: int) -> bool:
        longer = BatchShape(
            rows=batch.rows,
            context=context,
            microbatches=batch.microbatches,
            num_valid=None,
            split=batch.split,
        )
        return estimate(table, longer, plan, master=master).peak_bytes <= budget_bytes

    return longest(fits, most=_LONGEST)
