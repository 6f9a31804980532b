"""Fits a model's table of bytes: some of its layers run on fake tensors at a few lengths; every tensor is a line."""

import copy
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from planish.methods import Bitmap, Plain, Plan
from planish.models.anatomy import Anatomy, find
from planish.models.load import draw_model, text_config
from planish.price.table import Holder, LayerTable, Leg, Legs, Line, Lines, Pass
from planish.sections import MeshSection, ModelSection
from planish.shapes import BatchShape, HeadShape, TensorShape, shard_of
from planish.train.closed_form import check_closed_form
from planish.train.layer_trace import Note, Place, Trace, trace

# (rows, context) that fix a line's coefficients, and one far out that checks them.
_FIT, _CHECK = ((1, 40), (1, 56), (1, 72), (2, 40)), (3, 1032)

KindsOf = Callable[[Sequence[Any]], tuple[Any, ...]]
"""Layers' signatures in, what tells their legs apart out."""


class NotLinear(ValueError):
    """The model's tensors are no lines in the batch's size, or other operations run at other sizes."""


Spell = Callable[[Line], Line]
"""The line of one tensor in, the same as symbols out: each symbol's factor in digits of its own, 2^40 apart."""

SPELLED_BASE = 2**40


def fit_table(
    config: PretrainedConfig,
    section: ModelSection,
    plan: Plan,
    *,
    rows: int,
    mesh: MeshSection | None = None,
    spell: Spell | None = None,
) -> LayerTable:
    """Return the table of the model that `config` describes, in the run's dtype, under `plan`; of a rank's part of it.

    With `spell` the table is one of symbols, for a template, and only the tokens are taken to matter.

    With plain attention it holds for batches of `rows` rows alone: several rows take other operations than one.

    Memory:        none for tensors.
    Exactness:     to the byte where the check passes: every tensor of another, larger batch is on its line.

    Raises:
        NotLinear: The check does not pass.
        NotPriced: Feed-forward networks whose method has no price for them.
        UsageError: A model that cannot be built or cannot take the plan.
    """
    fit, check = _FIT, _CHECK
    if isinstance(plan.attention, Plain):
        fit, check = tuple((rows, context) for each, context in _FIT if each == 1), (rows, _CHECK[1])
    if spell is not None:
        fit, check = _FIT[:2], _FIT[2]
    batches = [BatchShape(rows=each, context=context) for each, context in (*fit, check)]
    with torch.device("meta"):
        whole = draw_model(config, section)
    mesh = MeshSection() if mesh is None else mesh
    signatures = _signatures(whole)
    kinds_of = _with_neighbours if mesh.sharded else tuple
    num_traced = _shortest_prefix(signatures, kinds_of)
    short = _shorten(config, len(signatures), num_traced)
    if spell is None and not isinstance(plan.activation, Plain):
        check_closed_form(short, section, plan.activation)
    if isinstance(plan.activation, Bitmap):
        plan = replace(plan, activation=replace(plan.activation, arena_bytes=0))  # which is no line in the batch's size
    traces = [trace(short, section, plan, batch, mesh) for batch in batches]
    lines = _fit_lines(traces, batches, len(fit))
    if spell is not None:
        lines = [spell(line) for line in lines]
    first, later, evaluation = (
        _cut(traces[0], lines, phase, number, num_traced)
        for phase, number in (("forward", 0), ("forward", traces[0].microbatches - 1), ("eval", 0))
    )
    return LayerTable(
        tensors=_merge(whole.named_parameters(), num_shards=mesh.dp or 1),
        buffers_bytes=sum(each.nbytes for each in whole.buffers()),
        save_bytes=traces[0].save_bytes,
        head=_head_shape(find(whole)),
        layers=_kinds(signatures, num_traced, kinds_of),
        attention=tuple(traces[0].attention.get(index) for index in range(num_traced)),
        experts=tuple(traces[0].experts.get(index) for index in range(num_traced)),
        first=first,
        later=later,
        evaluation=evaluation,
        num_shards=mesh.dp or 1,
        feed_forwards=tuple(map(traces[0].feed_forwards.get, range(num_traced))) if traces[0].feed_forwards else (),
    )


def _head_shape(anatomy: Anatomy) -> HeadShape:
    vocab_size, hidden_size = anatomy.weight.shape
    return HeadShape(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        itemsize=anatomy.weight.element_size(),
        biased=anatomy.head.bias is not None,
        softcapped=anatomy.softcap is not None,
        scaled=anatomy.logit_scale != 1.0,
    )


def _merge(named: Iterable[tuple[str, Tensor]], *, num_shards: int) -> tuple[TensorShape, ...]:
    """Return (the first shards of) parameters as shapes, those that differ in their layer's number counted together."""
    counts: dict[TensorShape, int] = {}
    for name, tensor in named:
        sizes = shard_of(tuple(tensor.shape), num_shards)
        shape = TensorShape(name=_any_layer(name), shape=sizes, count=0, itemsize=tensor.element_size())
        counts[shape] = counts.get(shape, 0) + 1
    return tuple(replace(shape, count=count) for shape, count in counts.items())


def _any_layer(name: str) -> str:
    return re.sub(r"\b\d+\b", "*", name)


def _signatures(model: PreTrainedModel) -> list[Any]:
    """Return what tells the layers apart: their tensors, and what the config calls them."""
    types = text_config(model.config).to_dict().get("layer_types")
    found = []
    for index, layer in enumerate(find(model).layers.values()):
        tensors = [(name, tuple(each.shape)) for name, each in [*layer.named_parameters(), *layer.named_buffers()]]
        found.append((tuple(tensors), types[index] if types else None))
    return found


def _with_neighbours(signatures: Sequence[Any]) -> tuple[Any, ...]:
    """Return each layer's kind where its bytes are not its own alone.

    Weights are gathered for the next layer while one is at work, and in backward the gradients of the last two layers
    are still being exchanged.
    """
    around = [None, *signatures, None, None]
    return tuple(zip(around, around[1:], around[2:], around[3:], strict=False))


def _shortest_prefix(signatures: Sequence[Any], kinds_of: KindsOf) -> int:
    """Return how many of the first layers hold every kind of inner layer, and begin and end like all of them do."""
    whole = kinds_of(signatures)
    for length in range(min(3, len(signatures)), len(signatures)):
        first, *inner, last = kinds_of(signatures[:length])
        if first == whole[0] and last == whole[-1] and set(inner) == set(whole[1:-1]):
            return length
    return len(signatures)


def _kinds(signatures: Sequence[Any], num_traced: int, kinds_of: KindsOf) -> tuple[int, ...]:
    """Return for each layer the traced layer that stands for it."""
    if num_traced == len(signatures):
        return tuple(range(num_traced))
    traced, whole = kinds_of(signatures[:num_traced]), kinds_of(signatures)
    inner = [traced.index(each, 1) for each in whole[1:-1]]
    return (0, *inner, num_traced - 1)


def _shorten(config: PretrainedConfig, num_layers: int, num_traced: int) -> PretrainedConfig:
    """Return a copy of `config` with its first layers only."""
    short = copy.deepcopy(config)
    text = text_config(short)
    text.num_hidden_layers = num_traced
    for name, value in text.to_dict().items():
        if isinstance(value, list) and len(value) == num_layers:
            setattr(text, name, value[:num_traced])
    return short


def _fit_lines(traces: Sequence[Trace], batches: Sequence[BatchShape], num_fit: int) -> list[Line]:
    """Return the line of every record; the first `num_fit` traces fit as many coefficients, all of them are checked."""
    sequences = [[event[1:] for event in each.events] for each in traces]
    if any(each != sequences[0] for each in sequences):
        raise NotLinear("other tensors are made, or in another order, at other lengths.")
    units = [Line(*(int(i == j) for j in range(num_fit))) for i in range(num_fit)]
    rows = [[unit.at(batch) for unit in units] for batch in batches[:num_fit]]
    lines: dict[tuple[int, ...], Line] = {}
    found = []
    for records in zip(*(each.records for each in traces), strict=True):
        sizes = tuple(record.nbytes for record in records)
        if sizes not in lines:
            line = Line(*map(int, _solve(rows, sizes[:num_fit])))
            if tuple(line.at(batch) for batch in batches) != sizes:
                raise NotLinear(f"a {tuple(records[0].shape)} tensor of `{records[0].owner}` has {sizes} bytes.")
            lines[sizes] = line
        found.append(lines[sizes])
    return found


def _solve(rows: list[list[int]], values: Sequence[int]) -> list[Fraction]:
    """Return the solution of a small linear system, exactly."""
    matrix = [[*map(Fraction, row), Fraction(value)] for row, value in zip(rows, values, strict=True)]
    for pivot in range(len(matrix)):
        matrix[pivot] = [each / matrix[pivot][pivot] for each in matrix[pivot]]
        for other in range(len(matrix)):
            if other != pivot:
                factor = matrix[other][pivot]
                matrix[other] = [a - factor * b for a, b in zip(matrix[other], matrix[pivot], strict=True)]
    return [row[-1] for row in matrix]


def _cut(found: Trace, lines: Sequence[Line], phase: str, number: int, num_layers: int) -> Pass:
    """Return the pass that begins when `phase` does for the `number`-th time, and ends before the next one."""
    phases = [(index, note.what) for index, note in enumerate(found.notes) if note.begins == "phase" and note.what]
    begins = [
        index
        for (_, before), (index, what) in pairwise([(0, ""), *phases])
        if what in ("forward", "optimizer", "eval", "save") and what != before
    ]
    start = [index for index in begins if found.notes[index].what == phase][number]
    stop = min(index for index in begins if index > start)
    legs: dict[Place, list[Leg]] = {}
    place: Place = ("enter", 0)
    at_work = phase
    for note, after in pairwise(found.notes[start : stop + 1]):
        if note.begins == "place":
            place = note.what
        elif note.begins == "phase":
            at_work = note.what
        legs.setdefault(place, []).append(_leg(found, lines, at_work, note, after))

    def through(name: str) -> tuple[Legs, ...]:
        return tuple(tuple(legs.get((name, index), ())) for index in range(num_layers))

    return Pass(
        enter=through("enter")[0],
        forward=through("forward"),
        turn=through("turn")[0],
        backward=through("backward"),
        leave=through("leave")[0],
    )


def _leg(found: Trace, lines: Sequence[Line], phase: str, note: Note, after: Note) -> Leg:
    """Return what is born and dies between two notes."""
    live: Lines = {}
    moments: list[Lines] = []
    for clock, born, index in found.events:
        if note.clock < clock <= after.clock:
            record, sign = found.records[index], 1 if born else -1
            holder = Holder(record.category, _any_layer(record.owner))
            before = live.get(holder, Line())
            live[holder] = Line(*(a + sign * b for a, b in zip(before, lines[index], strict=True)))
            if born:
                moments.append(dict(live))
    then = after.what if after.begins == "marker" else ""
    return Leg(phase=phase, peaks=_largest(moments), change=_clean(live), then=then)


def _clean(lines: Lines) -> Lines:
    return {holder: line for holder, line in lines.items() if any(line)}


def _largest(moments: Sequence[Lines]) -> tuple[Lines, ...]:
    """Return the moments of which none is at most another one for every batch."""
    kept: dict[Line, Lines] = {}
    for moment in moments:
        total = Line(*map(sum, zip(*moment.values(), strict=True)))
        if not any(_at_most(total, other) for other in kept):
            kept = {other: lines for other, lines in kept.items() if not _at_most(other, total)}
            kept[total] = _clean(moment)
    return tuple(kept.values())


def _at_most(line: Line, other: Line) -> bool:
    return all(_not_above_zero(a - b) for a, b in zip(line, other, strict=True))


def _not_above_zero(difference: int) -> bool:
    return difference <= 0 if abs(difference) < SPELLED_BASE // 2 else max(spelled(difference)) <= 0


def spelled(number: int) -> list[int]:
    """Return the factors that `spell` has put into a number, first symbol first."""
    digits = []
    while number:
        digit = (number + SPELLED_BASE // 2) % SPELLED_BASE - SPELLED_BASE // 2
        digits.append(digit)
        number = (number - digit) // SPELLED_BASE
    return digits
