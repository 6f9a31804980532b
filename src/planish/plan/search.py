"""Which mesh and which methods: the fastest that fits, the simplest of those, found as knapsacks and priced exactly."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import ceil, prod
from typing import Any

from planish.decode import method_name
from planish.errors import UsageError
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
)
from planish.plan.offers import activation_methods
from planish.plan.question import Candidate, Question
from planish.price.template import templated_activations
from planish.shapes import MeshShape

_ALL = 2**60
SLOTS = ("vocab", "dispatch", "boundary", "activation", "optim")
_TRIES = 24
_FEW = 80
_ROW_TOKENS = 32_768


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
    """

    question: Question
    replicate: int
    cp: int
    rows: int
    microbatches: int

    @property
    def dp(self) -> int:
        """Ranks that share the weights."""
        return self.question.devices // self.replicate

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
                if question.num_experts % ep == 0 and (ep >= question.ranks_per_node or "ep" in question.degrees)
            ]
        boundary = [
            Option(method=Plain()),
            Option(method=Checkpoint(keep_attention=True), simplicity=2),
            Option(method=Checkpoint(), simplicity=1),
            *self._offloads(),
        ]
        optim = [Option(method=AdamW()), *self._streams()]
        every = (vocab, dispatch, boundary, list(self._networks()), optim)
        return tuple(tuple(self._open(name, options)) for name, options in zip(SLOTS, every, strict=True))

    def _open(self, name: str, options: list[Option]) -> list[Option]:
        """Return the options that the user has left open."""
        fixed, degrees = self.question.fixed, self.question.degrees
        if name in fixed:
            sort = type(fixed[name])
            options = [replace(each, method=fixed[name]) for each in options if type(each.method) is sort] or [
                Option(method=fixed[name])
            ]
            options = options if name in ("vocab", "dispatch") else options[:1]
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
        mesh = MeshShape(dp=self.dp, replicate=self.replicate, cp=self.cp)
        all_go = Candidate(self.question, mesh, self.rows, self.microbatches, Plan(boundary=method)).time
        return min(ceil(all_go.offload / all_go.compute), len(self.question.shape.layers))

    def _streams(self) -> Iterator[Option]:
        question = self.question
        if question.hardware.kind == "cuda":
            yield Option(method=StreamAdamW(host=_ALL), simplicity=2)
        if question.disk is not None:
            yield Option(method=StreamAdamW(disk=_ALL), simplicity=3)

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
        )
        return Candidate(
            question=self.question,
            mesh=mesh,
            rows=self.rows,
            microbatches=self.microbatches,
            plan=Plan(attention=Packed(), **methods),
        )


def frames(question: Question) -> Iterator[Frame]:
    """Yield who may read which rows: few ranks to a row first, many rows at once first."""
    if question.degrees.get("pp", 1) > 1:
        return
    for cp in divisors(question.devices):
        if question.degrees.get("cp", cp) != cp:
            continue
        readers = question.devices // cp
        rows = question.rows or readers
        if rows % readers or question.context < cp:
            continue
        each = rows // readers
        most = max(1, _ROW_TOKENS // (question.context // cp))
        for at_once in sorted({max(size for size in divisors(each) if size <= most), 1}, reverse=True):
            for replicate in _replicas(question, cp):
                yield Frame(question, replicate, cp, at_once, each // at_once)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The answer.

    Attributes:
        best: The fastest candidate that fits, or that which holds least where none does.
        fits: Whether it does.
        least: The candidate that holds least on a device.
    """

    best: Candidate
    fits: bool
    least: Candidate


def search(question: Question) -> Found:
    """Return the fastest mesh and plan that fit, the simplest among equals.

    For each way to deal out rows the methods are a knapsack: a slot for each peak, budgets for the kinds of moments,
    the least time. What it chooses is priced exactly, and ruled out where the sum of parts was too hopeful.
    """
    best: Candidate | None = None
    least: Candidate | None = None
    for frame in frames(question):
        bounded = list(_bounded(frame))
        least = min((each for each in (least, *bounded) if each is not None), key=lambda each: each.estimate.peak_bytes)
        able = [each for each in bounded if each.over() is None]
        plain = frame.candidate(tuple(options[0] for options in frame.slots))
        if not able or (best is not None and _rank(plain)[0] >= _rank(best)[0]):
            continue
        few = prod(map(len, frame.slots)) <= _FEW
        found = (exhaust(frame) if few else choose(frame)) or min(able, key=_rank)
        if best is None or _rank(found) < _rank(best):
            best = found
    if least is None:
        raise UsageError(_no_mesh(question))
    return Found(best=best or least, fits=best is not None, least=least)


def _bounded(frame: Frame) -> Iterator[Candidate]:
    """Yield the plans of which one holds least: with few and with many ranks to the vocabulary and to experts."""
    vocab, dispatch, boundary, activation, optim = frame.slots
    for head in {1: vocab[min(1, len(vocab) - 1)], 2: vocab[-1]}.values():
        for experts in {id(each): each for each in (dispatch[0], dispatch[-1])}.values():
            yield frame.candidate((head, experts, boundary[-1], activation[-1], optim[-1]))


def _no_mesh(question: Question) -> str:
    """Return why no ranks can read what is asked for."""
    rows = question.rows
    if question.degrees.get("pp", 1) > 1:
        return "`mesh.pp` is planned by `planish plan --pipeline`; leave it out here."
    legal = [cp for cp in divisors(question.devices) if rows is None or rows % (question.devices // cp) == 0]
    asked = ", ".join(f"`mesh.{name}` ({degree})" for name, degree in question.degrees.items()) or "the degrees"
    near = sorted({max(1, round((rows or 1) / each)) * each for each in divisors(question.devices)})
    return (
        f"{asked} do not deal {rows} rows out to {question.devices} devices; `mesh.cp` may be one of "
        f"{', '.join(map(str, legal)) or 'none'}, or take a number of rows such as {near[0]} or {near[-1]}."
    )


def _rank(candidate: Candidate) -> tuple[float, int]:
    return (round(candidate.time.total_s / candidate.tokens_per_step * 1e12, 1), _plainness(candidate))


def _plainness(candidate: Candidate) -> int:
    plan, mesh = candidate.plan, candidate.mesh
    methods = (plan.vocab, plan.boundary, plan.activation, plan.optim)
    far = sum(isinstance(each, Offload | StreamAdamW) for each in methods)
    bounded = sum(not isinstance(each, Plain | AdamW) for each in methods)
    return bounded + 2 * far + sum(degree > 1 for degree in (mesh.cp, mesh.ep, mesh.vp, mesh.pp))


def choose(frame: Frame) -> Candidate | None:
    """Return the fastest plan of a frame that fits; None where none does."""
    from planish.knapsack import Infeasible, Limit, Near, Problem, solve

    question, slots = frame.question, frame.slots
    reference = tuple(options[-1] for options in slots)
    base, base_sizes = frame.candidate(reference), kinds_of_moments(frame.candidate(reference))
    sizes, seconds, host, disk = [], [], [], []
    for index, options in enumerate(slots):
        parts = [frame.candidate((*reference[:index], option, *reference[index + 1 :])) for option in options]
        sizes.append([kinds_of_moments(each) for each in parts])
        seconds.append([each.time.total_s - base.time.total_s for each in parts])
        host.append([each.node_bytes("host") - base.node_bytes("host") for each in parts])
        disk.append([each.node_bytes("disk") - base.node_bytes("disk") for each in parts])
    limits = [
        Limit(
            name=f"{kind} bytes",
            weights=[[each.get(kind, 0) - base_sizes.get(kind, 0) for each in row] for row in sizes],
            at_most=question.hardware.memory - base_sizes.get(kind, 0),
        )
        for kind in {kind for row in sizes for each in row for kind in each}
    ]
    if question.host is not None:
        limits.append(Limit(name="host bytes", weights=host, at_most=question.host - base.node_bytes("host")))
    limits.append(Limit(name="disk bytes", weights=disk, at_most=(question.disk or 0) - base.node_bytes("disk")))
    second = [[float(option.simplicity) for option in options] for options in slots]
    ruled_out: list[tuple[int, ...]] = []
    for _ in range(_TRIES):
        near = [Near(chosen=each, at_most=len(slots) - 1) for each in ruled_out]
        found = solve(Problem(objective=seconds, limits=limits, second=second, slack=1e-3, near=near))
        if isinstance(found, Infeasible):
            break
        candidate = frame.candidate(tuple(options[i] for options, i in zip(slots, found.chosen, strict=True)))
        if candidate.over() is None:
            return improve(frame, found.chosen)
        ruled_out.append(found.chosen)
    return None


def improve(frame: Frame, chosen: tuple[int, ...]) -> Candidate:
    """Return the best plan that changing one method after the other leads to, each step priced exactly.

    What hides behind what, and the moments inside one kind, are no sums of parts: the knapsack does not see them.
    """

    def at(numbers: tuple[int, ...]) -> Candidate:
        return frame.candidate(tuple(options[i] for options, i in zip(frame.slots, numbers, strict=True)))

    best, numbers = at(chosen), chosen
    while True:
        others = [
            (*numbers[:slot], number, *numbers[slot + 1 :])
            for slot, options in enumerate(frame.slots)
            for number in range(len(options))
        ]
        for other in sorted(others, key=lambda each: _rank(at(each))):
            candidate = at(other)
            if _rank(candidate) >= _rank(best):
                return best
            if candidate.over() is None:
                best, numbers = candidate, other
                break


def exhaust(frame: Frame) -> Candidate | None:
    """Return the fastest plan of a frame that fits, by pricing them one after the other."""
    every = [frame.candidate(chosen) for chosen in product(*frame.slots)]
    for candidate in sorted(every, key=_rank):
        if candidate.over() is None:
            return candidate
    return None


def kinds_of_moments(candidate: Candidate) -> dict[str, int]:
    """Return the most bytes of each kind of moment: phases, and the first and last layer or none at work."""
    last = len(candidate.table.layers) - 1
    found: dict[str, int] = {}
    for moment in candidate.moments:
        where = {None: "around", 0: "first", last: "last"}.get(moment.layer, "inside")
        kind = f"{moment.phase} {where} {moment.doing}"
        found[kind] = max(found.get(kind, 0), moment.total_bytes)
    return found
