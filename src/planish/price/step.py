"""A training step as a walk through its moments: what is alive at each and who holds it, for any batch."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce

from planish.methods import (
    Activation,
    Bitmap,
    Boundary,
    Dispatch,
    Offload,
    Pipelined,
    Plain,
    Plan,
    StreamAdamW,
    keeps_attention,
)
from planish.price import attention, state
from planish.price.activation import feed_forward_bytes, whole_arena_bytes
from planish.price.attention_ranks import sequence_bytes
from planish.price.boundary import Boundaries, Depth, kept_bytes
from planish.price.dispatch import experts_bytes, tile_rows
from planish.price.dispatch_ranks import rank_bytes
from planish.price.head import HeadBytes
from planish.price.moment import Alive, Moment, Sizes, joined
from planish.price.rows import stands_for
from planish.price.table import Holder, LayerTable, Leg, Lines, Part, Pass
from planish.shapes import BatchShape

_ATTENTION = Holder("layer working set", "attention")
_EXPERTS = Holder("layer working set", "experts")
_FEED_FORWARD = Holder("layer working set", "feed-forward")
_HEAD = Holder("head tiles", "the head")
_NOTHING = Alive(0, ())
_LAG = 2
_GATHERED = Holder("gathered weights", "layers and head")
_BUCKETS = Holder("gradients", "buckets")

# What a disk keeps in memory: two slots to copy through, and room to align them.
_RING_BYTES = 2 * 2**20 + 4096


def moments(table: LayerTable, batch: BatchShape, head: HeadBytes, plan: Plan, *, master: bool) -> Iterator[Moment]:
    """Yield moments of one optimizer step, one evaluation and one checkpoint; the peak of every phase is among them.

    Args:
        table: The model's layers under the plan's attention, dispatch and boundary (checkpointed where they offload).
        batch: The step's input.
        head: The head by the plan's method, for one microbatch.
        plan: Names the methods for boundaries and optimizer.
        master: Whether the optimizer keeps fp32 masters of narrower parameters.
    """
    tensors = table.tensors
    base: Sizes = {
        Holder("optimizer state", type(plan.optim).__name__): state.optimizer_bytes(
            tensors, plan.optim, master=master, on_host=table.on_host
        ),
        Holder("other", "buffers"): table.buffers_bytes,
    }
    base = reduce(joined, ({Holder("parameters", each.name): state.parameter_bytes([each])} for each in tensors), base)
    depth = _Depth.of(plan.boundary, table, batch)
    if depth.boundaries is not None:
        base[Holder("staging", "far memory")] = _RING_BYTES
    if isinstance(plan.optim, StreamAdamW):
        placed = state.placement(tensors, plan.optim, master=master, on_host=table.on_host)
        ring = _RING_BYTES if placed.disk_bytes else 0
        base[Holder("staging", "streamed state")] = placed.staging_bytes + ring
    if isinstance(plan.activation, Bitmap):
        arena = whole_arena_bytes(
            table.whole_feed_forwards, plan.activation, batch.tokens, waiting=isinstance(plan.boundary, Plain)
        )
        base[Holder("staging", "activations")] = arena
    if table.buckets:
        base[_BUCKETS] = state.parameter_bytes(tensors)
    before = Alive.of(base)
    walk = _Walk(
        table=table,
        batch=batch,
        head=head,
        depth=depth,
        dispatch=plan.dispatch,
        activation=plan.activation,
        checkpointed=not isinstance(plan.boundary, Plain),
        boundary=_boundary(table),
        times=depth.times(table.layers),
        sized={},
        live=before,
    )
    if table.num_shards > 1:
        yield _dealing(table, base)
    walk.add(Alive.one(Holder("other", "batch"), batch.microbatches * state.batch_bytes(batch.tokens)))
    yield walk.moment("init", None, "taking the batch")
    yield from walk.through(table.first)
    if batch.microbatches > 1:
        walk.skip(table.later, batch.microbatches - 2)
        yield from walk.through(table.later)
    update = state.update_bytes(
        tensors, plan.optim, master=master, microbatches=batch.microbatches, num_shards=table.num_shards
    )
    if table.buckets:  # gradients are views of them by now
        held = walk.live.sizes.items()
        walk.live = Alive.of({each: size for each, size in held if each.category != "gradients" or each == _BUCKETS})
    yield walk.moment("optimizer", None, "updating the parameters", Alive.one(Holder("staging", "gradients"), update))
    walk.live = before
    yield from walk.through(table.evaluation)
    walk.live = before
    converted = Alive.one(Holder("staging", "converted weights"), table.save_bytes)
    yield walk.moment("save", None, "writing weights", converted)
    read = state.resume_bytes(tensors, master=master)
    yield walk.moment("resume", None, "reading tensors", Alive.one(Holder("staging", "checkpoint"), read))


def stretch(
    table: LayerTable,
    batch: BatchShape,
    plan: Plan,
    legs: Iterable[tuple[Part | None, int | None, Leg]],
    live: Sizes,
) -> tuple[Moment, Sizes]:
    """Return the worst moment of some legs in a row, and what is alive after them.

    Args:
        table: As for `moments`.
        batch: The step's input.
        plan: Names the methods; boundaries stay on the device.
        legs: Part (None in an evaluation), layer's number and leg, in order; none of them is followed by the head.
        live: What is alive before them, beside what they do not touch.
    """
    walk = _Walk(
        table=table,
        batch=batch,
        head=HeadBytes(forward=0, kept=0, backward=0, evaluation=0),
        depth=_Depth.of(plan.boundary, table, batch),
        dispatch=plan.dispatch,
        activation=plan.activation,
        checkpointed=not isinstance(plan.boundary, Plain),
        boundary=_boundary(table),
        times=(),
        sized={},
        live=Alive.of(live),
    )
    found: list[Moment] = []
    gathered = table.gathered
    for part, layer, leg in legs:
        if gathered is not None:
            held = gathered.at(leg.phase, in_layer=True, behind_experts=True)
            walk.beside = Alive.one(_GATHERED, held)
        found += walk._leg(leg, layer, part)
    return max(found, key=lambda each: each.total_bytes), walk.live.sizes


def _dealing(table: LayerTable, base: Sizes) -> Moment:
    """Return the first rank's moment of dealing out the weights, which it alone has loaded."""
    shards = {holder: size for holder, size in base.items() if holder.category == "parameters"}
    loaded = {Holder("other", "the whole model"): state.deal_bytes(table.tensors, table.num_shards)}
    return Moment(phase="init", layer=None, doing="dealing out the weights", alive=Alive.of(shards | loaded))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Depth:
    """What layers leave from forward to backward, and which of it waits in far memory.

    Attributes:
        boundaries: None where all of it stays on the device.
        boundary_bytes: Each layer's input.
        kept: What each layer keeps of its attention.
    """

    boundaries: Boundaries | None
    boundary_bytes: int
    kept: tuple[int, ...]

    @classmethod
    def of(cls, method: Boundary, table: LayerTable, batch: BatchShape) -> "_Depth":
        """Return what `method` lets the layers leave."""
        itemsize = table.head.itemsize
        shapes = [table.attention[kind] if keeps_attention(method) else None for kind in table.layers]
        depth = Depth.of(
            num_boundaries=len(table.layers),
            tokens=batch.tokens,
            width=table.head.hidden_size,
            itemsize=itemsize,
            kept=[each for each in shapes if each is not None],
        )
        boundaries = None
        if isinstance(method, Offload):
            slots = ((method.disk or 0) + (method.host or 0)) // depth.slot_bytes
            boundaries = Boundaries(num_boundaries=len(table.layers), num_slots=slots, every=method.every)
        kept = [0 if each is None else sum(kept_bytes(each, batch.tokens, itemsize)) for each in shapes]
        if boundaries is not None:
            kept = [nbytes * boundaries.goes(index) for index, nbytes in enumerate(kept)]
        return cls(boundaries=boundaries, boundary_bytes=depth.boundary_bytes, kept=tuple(kept))

    def away(self, part: Part, layer: int | None, phase: str) -> int:
        """Return the bytes that are not on the device while a layer, or what follows the last one, is at work.

        The first boundary is the embedding's output, which transformers holds for as long as its layers run forward.
        """
        if self.boundaries is None or part in ("enter", "leave"):
            return 0
        layer = self.boundaries.num_boundaries - 1 if layer is None else layer
        backward = part == "backward"
        away = self.boundaries.away_in_backward(layer) if backward else self.boundaries.away_in_forward(layer)
        embedded = phase == "forward" and 0 in away
        return (len(away) - embedded) * self.boundary_bytes + sum([self.kept[each] for each in away])

    def times(self, layers: tuple[int, ...]) -> list[int]:
        """Return for how many layers each stands, those alike of which the same goes."""
        far = self.boundaries
        goes = [far is not None and far.goes(index) for index in range(len(layers))]
        return stands_for(tuple(zip(layers, goes, strict=True)), lag=_LAG * (0 if far is None else far.every))


@dataclass(slots=True, kw_only=True)
class _Walk:
    """Goes through passes and knows what is alive: with `beside`, what is there for as long as a leg is at work."""

    table: LayerTable
    batch: BatchShape
    head: HeadBytes
    depth: _Depth
    dispatch: Dispatch
    activation: Activation
    checkpointed: bool
    boundary: Holder
    times: Sequence[int]
    sized: dict[int, Alive]
    live: Alive
    beside: Alive = _NOTHING
    far: dict[tuple[Part, int | None, str], int] = field(default_factory=dict)

    def add(self, change: Alive) -> None:
        self.live = self.live.plus(change)

    def moment(self, phase: str, layer: int | None, doing: str, more: Alive = _NOTHING) -> Moment:
        return Moment(phase, layer, doing, self.live.plus(more).plus(self.beside))

    def through(self, which: Pass) -> Iterator[Moment]:
        """Yield the moments of one pass."""
        trained, gathered = bool(which.leave), self.table.gathered
        behind: int | None = None
        walked = [(index, kind) for index, kind in enumerate(self.table.layers) if self.times[index]]
        for part, layer, leg in which.walk(walked):
            times = 1 if layer is None else self.times[layer]
            if times != 1:
                self._pass_by(leg, layer, part if trained else None, times=times)
                continue
            self.beside = Alive.one(self.boundary, -self._away(part, layer, leg.phase)) if trained else _NOTHING
            if gathered is not None:
                late = layer is not None and layer == behind
                held = gathered.at(leg.phase, in_layer=layer is not None, behind_experts=late)
                self.beside = self.beside.plus(Alive.one(_GATHERED, held))
                behind = layer if leg.then == "experts backward" else behind
            yield from self._leg(leg, layer, part if trained else None)
        self.beside = _NOTHING

    def _away(self, part: Part, layer: int | None, phase: str) -> int:
        """Return `_Depth.away`, which all legs of a layer ask for."""
        if (part, layer, phase) not in self.far:
            self.far[part, layer, phase] = self.depth.away(part, layer, phase)
        return self.far[part, layer, phase]

    def _pass_by(self, leg: Leg, layer: int | None, part: Part | None, times: int) -> None:
        """Leave behind what a leg does, for layers of a row whose moments lie between those of others."""
        before = self.live
        self.add(self._at(leg.change))
        for _ in self._then(leg, layer, part):
            pass
        self._again(before, times)

    def skip(self, which: Pass, times: int) -> None:
        """Leave behind what a pass does, several times."""
        before = self.live
        for _ in self.through(which):
            pass
        self._again(before, times)

    def _again(self, before: Alive, times: int) -> None:
        """Have what has been added since `before` so many times."""
        change = self.live.since(before).items()
        self.live = before.plus(Alive.of({holder: size * times for holder, size in change if size}))

    def _leg(self, leg: Leg, layer: int | None, part: Part | None) -> Iterator[Moment]:
        doing = "the head" if leg.phase == "head" else "around the layers" if layer is None else "inside"
        if leg.phase:
            yield self.moment(leg.phase, layer, doing, self._most(leg))
        self.add(self._at(leg.change))
        yield from self._then(leg, layer, part)

    def _then(self, leg: Leg, layer: int | None, part: Part | None) -> Iterator[Moment]:
        """Yield the moment of what follows a leg, and leave behind what stays of it; no `part` in an evaluation."""
        head, trained = self.head, part is not None
        match leg.then:
            case "attention" | "attention backward":
                yield from self._attention(leg, layer or 0, part)
            case "experts" | "experts backward":
                yield self._experts(leg, layer or 0)
            case "feed forward" | "feed forward backward":
                yield from self._feed_forward(leg, layer or 0, part)
            case "head":
                added = head.forward if trained else head.evaluation
                yield self.moment(leg.phase, None, "the head", Alive.one(_HEAD, added))
                self.add(Alive.one(_HEAD, head.kept * trained))
            case "head backward":
                yield self.moment(leg.phase, None, "the head's gradients", Alive.one(_HEAD, head.backward))
                self.add(Alive.one(_HEAD, -head.kept))

    def _attention(self, leg: Leg, layer: int, part: Part | None) -> Iterator[Moment]:
        """Yield the moment of a layer's attention; what it keeps is there from its forward until it is found again."""
        shape = self.table.attention[self.table.layers[layer]]
        kept = self.depth.kept[layer]
        found = leg.then == "attention" and part == "backward" and kept
        forward = leg.then == "attention"
        if self.batch.sharers > 1:
            yield self._shared_attention(leg, layer, part)
        else:
            price = attention.forward_bytes if forward else attention.backward_bytes
            added = 0 if found else price(shape, self.batch, self.table.head.itemsize)
            yield self.moment(leg.phase, layer, leg.then, Alive.one(_ATTENTION, added))
        if forward and part is not None:
            self.add(Alive.one(self.boundary, -kept if part == "backward" else kept))

    def _shared_attention(self, leg: Leg, layer: int, part: Part | None) -> Moment:
        """Return the moment of attention over ranks; it keeps what came, and not what was sent."""
        shape = self.table.attention[self.table.layers[layer]]
        assert shape is not None
        added = sequence_bytes(shape, self.batch, self.table.head.itemsize)
        forward = leg.then == "attention"
        moment = self.moment(
            leg.phase, layer, leg.then, Alive.one(_ATTENTION, added.forward if forward else added.backward)
        )
        if part is not None and not (forward and part == "forward" and self.checkpointed):
            self.add(Alive.one(_ATTENTION, added.more if forward else -added.more))
        return moment

    def _experts(self, leg: Leg, layer: int) -> Moment:
        experts, method = self.table.experts[self.table.layers[layer]], self.dispatch
        assert isinstance(method, Pipelined)
        assert experts is not None
        if self.table.launch is not None:
            spread = rank_bytes(experts, self.table.launch, self.batch.tokens, tile_rows(experts, method.tile_bytes))
            nbytes = spread.forward if leg.then == "experts" else spread.kept + spread.backward
            return self.moment(leg.phase, layer, leg.then, Alive.one(_EXPERTS, nbytes))
        tokens = self.batch.tokens
        rows = tile_rows(experts, method.tile_bytes)
        added = experts_bytes(experts, tokens, tile_rows=rows, block_rows=method.block_rows or tokens)
        nbytes = added.forward if leg.then == "experts" else added.backward
        return self.moment(leg.phase, layer, leg.then, Alive.one(_EXPERTS, nbytes))

    def _feed_forward(self, leg: Leg, layer: int, part: Part | None) -> Iterator[Moment]:
        """Yield the moment of a layer's network; what it keeps is there from the forward that backward follows."""
        shape, method = self.table.feed_forwards[self.table.layers[layer]], self.activation
        assert shape is not None
        assert not isinstance(method, Plain)
        added = feed_forward_bytes(shape, method, self.batch.tokens, trained=part is not None)
        forward = leg.then == "feed forward"
        yield self.moment(
            leg.phase, layer, leg.then, Alive.one(_FEED_FORWARD, added.forward if forward else added.backward)
        )
        if part is not None and not (forward and part == "forward" and self.checkpointed):
            self.add(Alive.one(_FEED_FORWARD, added.kept if forward else -added.kept))

    def _most(self, leg: Leg) -> Alive:
        """Return what is alive at the worst of a leg's moments."""
        if id(leg) not in self.sized:
            self.sized[id(leg)] = max((_NOTHING, *map(self._at, leg.peaks)), key=lambda each: each.total_bytes)
        return self.sized[id(leg)]

    def _at(self, lines: Lines) -> Alive:
        if id(lines) not in self.sized:
            self.sized[id(lines)] = Alive.of({holder: line.at(self.batch) for holder, line in lines.items()})
        return self.sized[id(lines)]


def _boundary(table: LayerTable) -> Holder:
    """Return who holds the boundaries."""
    found = (holder for legs in table.first.forward for leg in legs for holder in leg.change)
    return next((each for each in found if each.category == "boundaries"), Holder("boundaries", "layers"))
