"""What a model's layers hold while they run, as lines in the batch's size: fitted once, kept as JSON, read by prices.

[Note: legs] A pass over the model is cut into legs: at each layer, at each change of phase, and where attention or the
head begins, whose own bytes are arithmetic and are put in there (`Leg.then`). Inside a leg the same operations run
whatever the batch, and each tensor has fixed bytes, or some for each row, each token, or each token and token of its
row (a mask). The bytes alive at a moment are such a sum too, and a leg's peak is the largest of a handful of moments.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, Self

from planish.decode import decode, encode
from planish.price.dispatch import Experts
from planish.price.dispatch_ranks import Launch
from planish.price.sharding import Gathered
from planish.shapes import AttentionShape, BatchShape, FeedForwardShape, HeadShape, TensorShape

Marker = Literal[
    "",
    "attention",
    "attention backward",
    "experts",
    "experts backward",
    "feed forward",
    "feed forward backward",
    "head",
    "head backward",
]


class Line(NamedTuple):
    """Bytes that grow with the batch."""

    fixed: int = 0
    per_token: int = 0
    per_square: int = 0
    per_row: int = 0

    def at(self, batch: BatchShape) -> int:
        """Return the bytes for one microbatch of `batch`."""
        per_row = self.per_row + (self.per_token + self.per_square * batch.context) * batch.context
        return self.fixed + per_row * batch.rows


class Holder(NamedTuple):
    """Who holds bytes: category and owner as the ledger names them, `*` for a layer's number."""

    category: str
    owner: str


Lines = dict[Holder, Line]
"""Bytes by holder, counted from the beginning of a leg."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """A part of a pass.

    Attributes:
        phase: The phase that it belongs to; "" between phases, where nothing is allocated.
        peaks: The moments of which one is the largest, whatever the batch.
        change: What the leg leaves behind.
        then: What follows it, whose own bytes are not in the table.
    """

    phase: str
    peaks: tuple[Lines, ...]
    change: Lines
    then: Marker = ""

    def to_row(self) -> list[Any]:
        """Return the leg as plain data that `from_row` reads back."""
        return [self.phase, self.then, _to_tree(self.change), *map(_to_tree, self.peaks)]

    @classmethod
    def from_row(cls, row: list[Any]) -> Self:
        """Return the leg that `to_row` wrote."""
        phase, then, change, *peaks = row
        return cls(phase=phase, then=then, change=_from_tree(change), peaks=tuple(map(_from_tree, peaks)))


Legs = tuple[Leg, ...]
Part = Literal["enter", "forward", "turn", "backward", "leave"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One microbatch: into the model, through its layers, turning at the head, back through its layers, and out.

    Attributes:
        enter: Before the first layer.
        forward: Through a layer, for each kind of layer.
        turn: From the last layer's output to that output's gradient.
        backward: Back through a layer, for each kind of layer.
        leave: From the gradient of the first layer's input to the end.
    """

    enter: Legs
    forward: tuple[Legs, ...]
    turn: Legs
    backward: tuple[Legs, ...]
    leave: Legs

    def walk(self, layers: Iterable[tuple[int, int]]) -> Iterator[tuple[Part, int | None, Leg]]:
        """Yield every leg through these layers (number, kind), in order, with its part and its layer's number."""
        layers = tuple(layers)
        yield from (("enter", None, leg) for leg in self.enter)
        for index, kind in layers:
            yield from (("forward", index, leg) for leg in self.forward[kind])
        yield from (("turn", None, leg) for leg in self.turn)
        for index, kind in reversed(layers):
            yield from (("backward", index, leg) for leg in self.backward[kind])
        yield from (("leave", None, leg) for leg in self.leave)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTable:
    """What one model holds with one choice of attention, dispatch, boundary and dtype.

    Attributes:
        tensors: Every parameter, shared ones once; of one that ranks share, the first rank's part.
        buffers_bytes: What is alive beside parameters and optimizer state before the first step.
        save_bytes: The most that a checkpoint adds for one layer's converted weights.
        head: The vocabulary projection.
        layers: The kind of each layer, in forward order; the first and the last are kinds of their own.
        attention: What attention is given in each kind; None where its bytes are in the legs.
        experts: What experts each kind has; None where it has none, or their bytes are in the legs.
        first: The first microbatch of a step, which makes the gradients.
        later: Each further one, which adds to them.
        evaluation: One without gradients.
        num_shards: Ranks that share each parameter.
        feed_forwards: What network each kind has whose method has prices; None where its bytes are in the legs.
        buckets: Whether gradients are, or go into, views of buckets that live from the start to the end.
        gathered: What this rank gathers where the legs do not say it.
        launch: What is fixed at launch where experts are spread over ranks.
        vocab_ranks: Ranks that share the vocabulary.
        on_host: Whether what is streamed lies on a host whose memory is not the device's.
    """

    tensors: tuple[TensorShape, ...]
    buffers_bytes: int
    save_bytes: int
    head: HeadShape
    layers: tuple[int, ...]
    attention: tuple[AttentionShape | None, ...]
    experts: tuple[Experts | None, ...]
    first: Pass
    later: Pass
    evaluation: Pass
    num_shards: int = 1
    feed_forwards: tuple[FeedForwardShape | None, ...] = ()
    buckets: bool = False
    gathered: Gathered | None = None
    launch: Launch | None = None
    vocab_ranks: int = 1
    on_host: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the table as plain data that `from_dict` reads back; legs that are alike are written once."""
        rows: list[list[Any]] = []

        def number(leg: Leg) -> int:
            row = leg.to_row()
            if row not in rows:
                rows.append(row)
            return rows.index(row)

        def place(legs: Iterable[Any]) -> list[Any]:
            return [number(each) if isinstance(each, Leg) else place(each) for each in legs]

        passes = {
            name: {each.name: place(getattr(getattr(self, name), each.name)) for each in fields(Pass)}
            for name in ("first", "later", "evaluation")
        }
        return {
            "tensors": [[each.name, list(each.shape), each.count, each.itemsize] for each in self.tensors],
            "buffers_bytes": self.buffers_bytes,
            "save_bytes": self.save_bytes,
            "head": encode(self.head),
            "layers": list(self.layers),
            "attention": [None if each is None else encode(each) for each in self.attention],
            **(
                {"experts": [None if each is None else encode(each) for each in self.experts]}
                if any(self.experts)
                else {}
            ),
            **(
                {"feed_forwards": [None if each is None else encode(each) for each in self.feed_forwards]}
                if any(self.feed_forwards)
                else {}
            ),
            **({"num_shards": self.num_shards} if self.num_shards > 1 else {}),
            "legs": rows,
            **passes,
        }

    @property
    def whole_feed_forwards(self) -> list[FeedForwardShape]:
        """The networks of all layers, forward order, where the plan's method has prices."""
        found = [self.feed_forwards[kind] for kind in self.layers] if self.feed_forwards else []
        return [each for each in found if each is not None]

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any]) -> Self:
        """Return the table that `to_dict` wrote."""
        legs = [Leg.from_row(row) for row in tree["legs"]]

        def place(numbers: list[Any]) -> tuple[Any, ...]:
            return tuple(place(each) if isinstance(each, list) else legs[each] for each in numbers)

        def read(name: str) -> Pass:
            return Pass(**{each.name: place(tree[name][each.name]) for each in fields(Pass)})

        return cls(
            tensors=tuple(
                TensorShape(name=name, shape=tuple(shape), count=count, itemsize=itemsize)
                for name, shape, count, itemsize in tree["tensors"]
            ),
            buffers_bytes=tree["buffers_bytes"],
            save_bytes=tree["save_bytes"],
            head=decode(HeadShape, tree["head"]),
            layers=tuple(tree["layers"]),
            attention=tuple(None if each is None else decode(AttentionShape, each) for each in tree["attention"]),
            experts=tuple(
                None if each is None else decode(Experts, each)
                for each in tree.get("experts", [None] * len(tree["attention"]))
            ),
            first=read("first"),
            later=read("later"),
            evaluation=read("evaluation"),
            num_shards=tree.get("num_shards", 1),
            feed_forwards=tuple(
                None if each is None else decode(FeedForwardShape, each) for each in tree.get("feed_forwards", ())
            ),
        )


def _to_tree(lines: Lines) -> dict[str, list[int]]:
    return {": ".join(holder): list(line) if any(line[2:]) else list(line[:2]) for holder, line in lines.items()}


def _from_tree(tree: Mapping[str, list[int]]) -> Lines:
    return {Holder(*name.split(": ", 1)): Line(*line) for name, line in tree.items()}
