"""A training step as a walk through its moments: what is alive at each, by category, for any batch."""

from collections.abc import Iterator
from dataclasses import dataclass

from planish.price import attention, state
from planish.price.head import HeadBytes
from planish.price.table import LayerTable, Leg, Lines, Pass
from planish.shapes import BatchShape

Sizes = dict[str, int]
"""Bytes by category, named as the ledger names them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A moment that may be the peak of its phase.

    Attributes:
        phase: Named as the ledger names it.
        layer: Number of the layer at work; None outside of the layers.
        doing: What has just been allocated for, in words.
        sizes: Bytes alive.
    """

    phase: str
    layer: int | None
    doing: str
    sizes: Sizes

    @property
    def total_bytes(self) -> int:
        """Bytes alive together."""
        return sum(self.sizes.values())


def moments(table: LayerTable, batch: BatchShape, head: HeadBytes, *, master: bool) -> Iterator[Moment]:
    """Yield moments of one optimizer step, one evaluation and one checkpoint; the peak of every phase is among them.

    Args:
        table: The model's layers under the plan's attention, dispatch and boundary.
        batch: The step's input.
        head: The head by the plan's method, for one microbatch.
        master: Whether the optimizer keeps fp32 masters of narrower parameters.
    """
    tensors = table.tensors
    base = {
        "parameters": state.parameter_bytes(tensors),
        "optimizer state": state.adamw_bytes(tensors, master=master),
        "other": table.buffers_bytes,
    }
    walk = _Walk(table=table, batch=batch, head=head, live=base)
    walk.add({"other": batch.microbatches * state.batch_bytes(batch.tokens)})
    yield walk.moment("init", None, "taking the batch")
    yield from walk.through(table.first)
    if batch.microbatches > 1:
        walk.skip(table.later, batch.microbatches - 2)
        yield from walk.through(table.later)
    update = state.update_bytes(tensors, master=master, microbatches=batch.microbatches)
    yield walk.moment("optimizer", None, "updating the parameters", {"staging": update})
    walk.live = base
    yield from walk.through(table.evaluation)
    walk.live = base
    yield walk.moment("save", None, "writing weights", {"staging": table.save_bytes})
    yield walk.moment("resume", None, "reading tensors", {"staging": state.resume_bytes(tensors, master=master)})


@dataclass(slots=True, kw_only=True)
class _Walk:
    """Goes through passes and knows what is alive."""

    table: LayerTable
    batch: BatchShape
    head: HeadBytes
    live: Sizes

    def add(self, sizes: Sizes) -> None:
        self.live = _sum(self.live, sizes)

    def moment(self, phase: str, layer: int | None, doing: str, sizes: Sizes | None = None) -> Moment:
        return Moment(phase=phase, layer=layer, doing=doing, sizes=_sum(self.live, sizes or {}))

    def through(self, which: Pass) -> Iterator[Moment]:
        """Yield the moments of one pass."""
        for layer, leg in which.walk(self.table.layers):
            doing = "the head" if leg.phase == "head" else "around the layers" if layer is None else "inside"
            for peak in ({}, *leg.peaks) if leg.phase else ():
                yield self.moment(leg.phase, layer, doing, self._at(peak))
            self.add(self._at(leg.change))
            yield from self._then(leg, layer, trained=bool(which.leave))

    def skip(self, which: Pass, times: int) -> None:
        """Leave behind what a pass does, several times."""
        before = self.live
        for _ in self.through(which):
            pass
        change = _sum(self.live, {name: -size for name, size in before.items()})
        self.live = _sum(before, {name: size * times for name, size in change.items()})

    def _then(self, leg: Leg, layer: int | None, *, trained: bool) -> Iterator[Moment]:
        """Yield the moment of what follows a leg, and leave behind what stays of it."""
        head = self.head
        match leg.then:
            case "attention" | "attention backward":
                shape = self.table.attention[self.table.layers[layer or 0]]
                price = attention.forward_bytes if leg.then == "attention" else attention.backward_bytes
                added = price(shape, self.batch, self.table.head.itemsize)
                yield self.moment(leg.phase, layer, leg.then, {"layer working set": added})
            case "head":
                added = head.forward if trained else head.evaluation
                yield self.moment(leg.phase, None, "the head", {"head tiles": added})
                self.add({"head tiles": head.kept * trained})
            case "head backward":
                yield self.moment(leg.phase, None, "the head's gradients", {"head tiles": head.backward})
                self.add({"head tiles": -head.kept})

    def _at(self, lines: Lines) -> Sizes:
        return {name: line.at(self.batch) for name, line in lines.items()}


def _sum(left: Sizes, right: Sizes) -> Sizes:
    return left | {name: left.get(name, 0) + size for name, size in right.items()}
