"""Which mesh and which methods: the fastest that fits, the simplest of those, found as knapsacks and priced exactly.

[Note: stages] Layers are divided among 2, 4 or 8 ranks, or as many as are asked for, where stages have a price. That
takes a tenth of a second each, time next to nothing: stages are priced where they would be faster than the best so far.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from planish.errors import UsageError
from planish.methods import AdamW, Offload, Plain, StreamAdamW
from planish.plan.frames import Frame, divisors, frames, legal_stages
from planish.plan.pick import Budget, pick
from planish.plan.question import Candidate, Question

_TRIES = 24
_FEW = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The answer.

    Attributes:
        best: The fastest candidate that fits, or that which holds least where none does.
        fits: Whether it does.
        least: The candidate that holds least on a device.
        frames: All ways to deal out rows and layers, few ranks to a row first, with the prices that were asked for.
    """

    best: Candidate
    fits: bool
    least: Candidate
    frames: tuple[Frame, ...]


def search(question: Question) -> Found:
    """Return the fastest mesh and plan that fit, the simplest among equals.

    For each way to deal out rows the methods are a knapsack: a slot for each peak, budgets for the kinds of moments,
    the least time. What it chooses is priced exactly, and ruled out where the sum of parts was too hopeful.
    """
    every = tuple(frames(question))
    best, least = None, _least(each for frame in every if frame.pp == 1 for each in _bounded(frame))
    for frame in _in_turn(every):
        if frame.pp > 1:
            if (best is not None and _rank(frame.plain) >= _rank(best)) or (least is not None and _hopeless(frame)):
                continue
            least = _least((least, *_bounded(frame)))
        if best is not None and _rank(frame.plain)[0] >= _rank(best)[0]:
            continue
        if all(each.over() for each in _bounded(frame)):
            continue
        few = prod(map(len, frame.slots)) <= _FEW
        found = exhaust(frame) if few else choose(frame)
        found = found or min((each for each in _bounded(frame) if each.over() is None), key=_rank)
        if best is None or _rank(found) < _rank(best):
            best = found
    if least is None:
        raise UsageError(_no_mesh(question))
    return Found(best=best or least, fits=best is not None, least=least, frames=every)


def _in_turn(every: Sequence[Frame]) -> list[Frame]:
    """Return all frames, those of stages last and the fastest of them first."""
    return [each for each in every if each.pp == 1] + sorted(
        (each for each in every if each.pp > 1), key=lambda each: _rank(each.plain)
    )


def _least(candidates: Iterable[Candidate | None]) -> Candidate | None:
    """Return that which holds least on a device, of equals the first; None where there is none.

    It is looked for from the end, where more ranks share a row: what holds more is then soon seen to.
    """
    least: Candidate | None = None
    for each in reversed(tuple(candidates)):
        if each is not None and (least is None or not each.exceeds(least.peak_bytes)):
            least = each
    return least


def _hopeless(frame: Frame) -> bool:
    """Return whether weights, gradients, state and boundaries of the first stage alone are more than there is."""
    question, candidate = frame.question, frame.plain
    number = 2 * question.itemsize + (12 if question.master and question.itemsize < 4 else 2 * question.itemsize)
    state = question.shape.num_parameters // question.devices * number
    tokens = candidate.batch.tokens * min(frame.pp, frame.microbatches)
    layers = len(question.shape.layers) // frame.pp
    return state + tokens * layers * question.shape.hidden_size * question.itemsize > question.hardware.memory


def _bounded(frame: Frame) -> Iterator[Candidate]:
    """Yield the plans of which one holds least: with few and with many ranks to the vocabulary and to experts."""
    vocab, dispatch, boundary, activation, optim = frame.slots
    for head in {1: vocab[min(1, len(vocab) - 1)], 2: vocab[-1]}.values():
        for experts in {id(each): each for each in (dispatch[0], dispatch[-1])}.values():
            yield frame.candidate((head, experts, boundary[-1], activation[-1], optim[-1]))


def _no_mesh(question: Question) -> str:
    """Return why no ranks can read what is asked for."""
    rows = question.rows
    if not legal_stages(question):
        return (
            f"`mesh.pp` ({question.degrees['pp']}) has a price here for layers that are alike, with `plan.vocab` = "
            "blocked, `plan.boundary` = checkpoint, `plan.optim` = adamw and neither `mesh.vp` nor `mesh.replicate`; "
            "`planish plan run.toml` tells what any other pipeline holds."
        )
    asked = ", ".join(f"`mesh.{name}` ({degree})" for name, degree in question.degrees.items()) or "the degrees"
    if rows is None:
        left = question.devices // question.degrees.get("pp", 1) // question.degrees.get("replicate", 1)
        legal = ", ".join(str(cp) for cp in divisors(left) if cp <= question.context)
        return f"{asked} do not go together on {question.devices} devices; `mesh.cp` may be one of {legal}."
    legal = [cp for cp in divisors(question.devices) if rows % (question.devices // cp) == 0]
    near = sorted({max(1, round(rows / each)) * each for each in divisors(question.devices)})
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
    budgets = [
        Budget(
            weights=[[each.get(kind, 0) - base_sizes.get(kind, 0) for each in row] for row in sizes],
            at_most=question.hardware.memory - base_sizes.get(kind, 0),
        )
        for kind in {kind for row in sizes for each in row for kind in each}
    ]
    if question.host is not None:
        budgets.append(Budget(weights=host, at_most=question.host - base.node_bytes("host")))
    budgets.append(Budget(weights=disk, at_most=(question.disk or 0) - base.node_bytes("disk")))
    second = [[float(option.simplicity) for option in options] for options in slots]
    ruled_out: frozenset[tuple[int, ...]] = frozenset()
    for _ in range(_TRIES):
        chosen = pick(seconds, budgets, second=second, slack=1e-3, but=ruled_out)
        if chosen is None:
            break
        candidate = frame.candidate(tuple(options[i] for options, i in zip(slots, chosen, strict=True)))
        if candidate.over() is None:
            return improve(frame, chosen)
        ruled_out |= {chosen}
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
