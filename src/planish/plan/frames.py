"""What is settled before methods are chosen, and what is open then: who reads which rows, who has which layers."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import Any

from planish.decode import method_name
from planish.methods import (
    AdamW,
    Blocked,
    Checkpoint,
    Offload,
    Packed,
    Pipelined,
    Plain,
    Plan,
    Ring,
    StreamAdamW,
    Tiled,
)
from planish.plan.offers import activation_methods
from planish.plan.question import Candidate, Question
from planish.price.template import templated_activations
from planish.shapes import MeshShape

_ALL = 2**60
# Into how many blocks a microbatch's rows are dealt for experts, and how many rows a block is worth its trips with.
_BLOCKS, _LEAST_BLOCK = 4, 8192
SLOTS = ("vocab", "dispatch", "boundary", "activation", "optim")
_ROW_TOKENS = 32_768
_STAGES = (2, 4, 8)
# Microbatches a stage where the batch is open: ranks then wait for a fifth of a step at most.
_TURNS = 4
_STAGED = {"vocab": (Blocked,), "boundary": (Plain, Checkpoint), "activation": (Plain, Tiled), "optim": (AdamW,)}
"""The methods that have a price on stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to bound a peak, with the degree that goes with it.

    Attributes:
        method: The plan's dataclass.
        vp: Ranks that share the vocabulary.
        ep: Ranks over which experts are spread.
        simplicity: The larger, the less plain; ties go to the smaller.
    """

    method: Any
    vp: int = 1
    ep: int = 1
    simplicity: int = 0


def divisors(number: int) -> list[int]:
    """Return every divisor, smallest first."""
    return [each for each in range(1, number + 1) if number % each == 0]


@dataclass(frozen=True)
class Frame:
    """What is settled before methods are chosen: who reads which rows.

    Attributes:
        question: What is asked.
        replicate: Groups of ranks that hold the same shards.
        cp: Ranks that share rows.
        rows: Rows of one microbatch.
        microbatches: Of a step.
        pp: Ranks over which layers are divided.
    """

    question: Question
    replicate: int
    cp: int
    rows: int
    microbatches: int
    pp: int = 1

    def deals(self, candidate: Candidate) -> bool:
        """Return whether `candidate` is one of this frame's."""
        mesh = candidate.mesh
        theirs = (mesh.replicate, mesh.cp, candidate.rows, candidate.microbatches, mesh.pp)
        return theirs == (self.replicate, self.cp, self.rows, self.microbatches, self.pp)

    @property
    def dp(self) -> int:
        """Ranks that share the weights."""
        return self.question.devices // self.replicate // self.pp

    @cached_property
    def slots(self) -> tuple[tuple[Option, ...], ...]:
        """The ways to bound each peak, plain first, the most bounded one last."""
        question, dp = self.question, self.dp
        vocab = [Option(method=Plain()), Option(method=Blocked(), simplicity=1)]
        vocab += [
            Option(method=Ring(), vp=vp, simplicity=2)
            for vp in (2, 4, 8)
            if dp % vp == 0 and question.shape.vocab_size % vp == 0
        ]
        dispatch = [Option(method=Pipelined() if question.mixed else Plain())]
        if question.mixed:
            dispatch += [
                Option(method=Pipelined(), ep=ep, simplicity=1)
                for ep in divisors(dp)[1:]
                if question.num_experts % ep == 0
                and ("ep" in question.degrees or (self.pp == 1 and ep >= question.ranks_per_node))
            ]
            dispatch += self._blocks(dispatch[-1])
        boundary = [
            Option(method=Plain()),
            Option(method=Checkpoint(keep_attention=True), simplicity=2),
            Option(method=Checkpoint(), simplicity=1),
            *self._offloads(),
        ]
        optim = [Option(method=AdamW()), *self._streams()]
        every = (vocab, dispatch, boundary, list(self._networks()), optim)
        return tuple(tuple(self._open(*each)) for each in zip(SLOTS, map(self._staged, SLOTS, every), strict=True))

    def _blocks(self, whole: Option) -> Iterator[Option]:
        """Yield experts that take a quarter of a microbatch's rows at a time, where that is many still."""
        rows = self.rows * -(-self.question.context // self.cp) // _BLOCKS
        if rows >= max(_LEAST_BLOCK, whole.ep):
            yield replace(whole, method=Pipelined(block_rows=rows), simplicity=whole.simplicity + 1)

    def _staged(self, name: str, options: list[Option]) -> list[Option]:
        """Return the options that have a price on stages, where there are any."""
        if self.pp == 1 or name not in _STAGED:
            return options
        sorts = _STAGED[name] if name != "boundary" or self.question.dtype == "fp32" else (Checkpoint,)
        return [each for each in options if isinstance(each.method, sorts)]

    def _open(self, name: str, options: list[Option]) -> list[Option]:
        """Return the options that the user has left open."""
        fixed, degrees = self.question.fixed, self.question.degrees
        if name in fixed:
            sort = type(fixed[name])
            options = [replace(each, method=fixed[name]) for each in options if type(each.method) is sort] or [
                Option(method=fixed[name])
            ]
            options = list({(each.vp, each.ep): each for each in reversed(options)}.values())[::-1]
        degree = {"vocab": "vp", "dispatch": "ep"}.get(name)
        if degree in degrees:
            options = [each for each in options if getattr(each, degree) == degrees[degree]]
        return options

    def _networks(self) -> Iterator[Option]:
        yield Option(method=Plain())
        known = templated_activations(self.question.shape)
        for number, method in enumerate(activation_methods(self.question.shape), 1):
            if method_name(type(method)) in known:
                yield Option(method=method, simplicity=number)

    def _offloads(self) -> Iterator[Option]:
        question = self.question
        places = ["host"] * (question.hardware.kind == "cuda") + ["disk"] * (question.disk is not None)
        for place in places:
            for method, simplicity in (
                (Offload(**{place: _ALL}, keep_attention=True), 4),
                (Offload(**{place: _ALL}), 3),
            ):
                every = self._least_every(method)
                if every > 1:
                    yield Option(method=replace(method, every=every), simplicity=simplicity + 2)
                yield Option(method=method, simplicity=simplicity)

    def _least_every(self, method: Offload) -> int:
        """Return every how many-th boundary may go for what travels to hide behind the layers."""
        mesh = MeshShape(dp=self.dp, replicate=self.replicate, cp=self.cp, pp=self.pp)
        all_go = Candidate(self.question, mesh, self.rows, self.microbatches, Plan(boundary=method)).time
        return min(ceil(all_go.offload / all_go.compute), len(self.question.shape.layers))

    def _streams(self) -> Iterator[Option]:
        question = self.question
        if question.hardware.kind == "cuda":
            yield Option(method=StreamAdamW(host=_ALL), simplicity=2)
        if question.disk is not None:
            yield Option(method=StreamAdamW(disk=_ALL), simplicity=3)

    @property
    def plain(self) -> Candidate:
        """The plan that bounds nothing but what the user has named."""
        return self.candidate(tuple(options[0] for options in self.slots))

    @cached_property
    def _known(self) -> dict[tuple[Option, ...], Candidate]:
        return {}

    def candidate(self, chosen: tuple[Option, ...]) -> Candidate:
        """Return the plan of one option for each slot, the same one each time, which knows its prices by then."""
        if chosen not in self._known:
            self._known[chosen] = self._candidate(chosen)
        return self._known[chosen]

    def _candidate(self, chosen: tuple[Option, ...]) -> Candidate:
        methods = {name: option.method for name, option in zip(SLOTS, chosen, strict=True)}
        mesh = MeshShape(
            dp=self.dp,
            replicate=self.replicate,
            cp=self.cp,
            ep=max(each.ep for each in chosen),
            vp=max(each.vp for each in chosen),
            pp=self.pp,
        )
        return Candidate(
            question=self.question,
            mesh=mesh,
            rows=self.rows,
            microbatches=self.microbatches,
            plan=Plan(attention=Packed(), **methods),
        )


def frames(question: Question) -> Iterator[Frame]:
    """Yield who may read which rows: few ranks to a row first, many rows at once first, stages last."""
    for pp in legal_stages(question):
        if "pp" not in question.degrees and pp not in (1, *_STAGES):
            continue
        for cp in divisors(question.devices // pp):
            if question.degrees.get("cp", cp if pp == 1 else 1) == cp:
                yield from _dealt(question, cp, pp)


def legal_stages(question: Question) -> list[int]:
    """Return over how many ranks the layers may be divided, as far as `mesh.pp` and the methods leave it open."""
    asked, found = question.degrees.get("pp"), divisors(question.devices)
    priced = question.stages is not None and question.degrees.get("vp", 1) == question.degrees.get("replicate", 1) == 1
    priced = priced and all(isinstance(question.fixed.get(name, sorts[0]()), sorts) for name, sorts in _STAGED.items())
    if question.dtype != "fp32" and isinstance(question.fixed.get("boundary"), Plain):
        priced = False
    return [pp for pp in found if asked in (None, pp) and (pp == 1 or (priced and pp <= len(question.shape.layers)))]


def _dealt(question: Question, cp: int, pp: int) -> Iterator[Frame]:
    readers = question.devices // cp // pp
    rows = question.rows or readers * (1 if pp == 1 else _TURNS * pp)
    if rows % readers or question.context < cp:
        return
    each = rows // readers
    most = max(1, _ROW_TOKENS // (question.context // cp))
    for at_once in sorted({max(size for size in divisors(each) if size <= most), 1}, reverse=True):
        for replicate in _replicas(question, cp) if pp == 1 else [1]:
            yield Frame(question, replicate, cp, at_once, each // at_once, pp)


def _replicas(question: Question, cp: int) -> list[int]:
    """Return in how many groups the shards may be held: one, or one a node, or whole everywhere."""
    devices, node = question.devices, question.ranks_per_node
    asked = question.degrees.get("replicate")
    if asked is None and "dp" in question.degrees:
        asked = devices // question.degrees["dp"]
    if asked is not None:
        return [asked] if devices // asked % cp == 0 else []
    found = [1] + [devices // node] * (devices > node) + [devices] * (cp == 1 < devices)
    return [each for each in found if devices % each == 0 and devices // each % cp == 0]
