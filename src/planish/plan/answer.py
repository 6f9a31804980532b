"""What there is to say about a question: what fits, why not otherwise, and what would do where nothing does."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from planish.decode import encode, method_name
from planish.methods import AdamW, Apollo, Offload, Pipelined, Plan, StreamAdamW, keeps_attention
from planish.plan.frames import SLOTS, Frame, Option, frames
from planish.plan.longest import longest
from planish.plan.question import Candidate, Question
from planish.plan.search import search
from planish.units import format_bytes

_MOST_DEVICES, _LONGEST = 2**16, 2**27


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer.

    Attributes:
        best: The chosen candidate, or that which holds least where none fits.
        fits: Whether it fits.
        rejected: Why each simpler way was not taken, and what bounding more would cost.
        smallest: The least memory of a device that would do.
        longest: The longest context that would fit on these devices; None: none does.
        fewest: The fewest devices that would do, doubling; None: not even 65,536.
    """

    best: Candidate
    fits: bool
    rejected: tuple[str, ...]
    smallest: int
    longest: int | None
    fewest: int | None


def answer(question: Question) -> Answer:
    """Return the answer."""
    found = search(question)
    best = found.best
    return Answer(
        best=best,
        fits=found.fits,
        rejected=(*(_rejected(best, found.frames) if found.fits else ()), *_approximate(best)),
        smallest=found.least.peak_bytes,
        longest=longest_context(question, best if found.fits else found.least),
        fewest=None if found.fits else fewest_devices(question),
    )


def _rejected(best: Candidate, every: Sequence[Frame]) -> list[str]:
    """Return a sentence for each other option of each peak."""
    frame = next(each for each in every if each.deals(best))
    chosen = [_chosen(best, slot, options) for slot, options in enumerate(frame.slots)]
    said = []
    for index, options in enumerate(frame.slots):
        for option in options:
            if option is chosen[index]:
                continue
            other = frame.candidate((*chosen[:index], option, *chosen[index + 1 :]))
            said.append(f"{_word(index, option)}: {_reason(other, best)}")
    for each in every:
        if each.pp == frame.pp and (each.cp, each.replicate) != (frame.cp, frame.replicate) and each.rows == frame.rows:
            options = tuple(_same(slot, option) for slot, option in zip(each.slots, chosen, strict=True))
            said.append(
                f"mesh.cp = {each.cp}, mesh.replicate = {each.replicate}: {_reason(each.candidate(options), best)}"
            )
    return [*said, *_stages(best, frame, every)]


def _stages(best: Candidate, frame: Frame, every: Sequence[Frame]) -> Iterator[str]:
    """Yield a sentence for each other number of stages: in time, and only one that takes less of it is priced."""
    question = best.question
    if question.stages is None:
        yield "mesh.pp: stages of this model have no price here; `planish plan run.toml` runs them without data"
        return
    fastest: dict[int, Candidate] = {}
    for each in every:
        if each.pp != frame.pp and each.cp == frame.cp and each.replicate in (1, frame.replicate):
            before = fastest.get(each.pp, each.plain)
            fastest[each.pp] = min(before, each.plain, key=lambda found: found.time.total_s / found.tokens_per_step)
    for pp, other in fastest.items():
        slower = _slower(other, best)
        if pp > 1 and slower > 5e-4:
            idle = f"each rank waits {pp - 1} of {other.microbatches + pp - 1} turns"
            yield f"mesh.pp = {pp}: {slower:.1%} slower, {idle}"
        else:
            yield f"mesh.pp = {pp}: {_reason(other, best)}"


def _slower(other: Candidate, best: Candidate) -> float:
    return other.time.total_s / other.tokens_per_step / (best.time.total_s / best.tokens_per_step) - 1


def _approximate(best: Candidate) -> Iterator[str]:
    """Yield a sentence for a method that is no exact one, and so is taken only where it is named."""
    mesh, optim = best.mesh, best.plan.optim
    if "optim" in best.question.fixed or 1 < mesh.ep < mesh.size or mesh.pp > 1:  # `planish train` refuses it there
        return
    other = replace(best, plan=replace(best.plan, optim=Apollo()))
    if isinstance(optim, AdamW) or other.over() is None:
        held, less = other.peak_bytes, best.peak_bytes - other.peak_bytes
        fits = "fits" if other.over() is None else "is still too much"
        than = f"{format_bytes(abs(less))} {'less' if less > 0 else 'more'} in all"
        yield f"optim = apollo approximates AdamW, so it is taken only if named: {format_bytes(held)}, {than}, {fits}"


def _same(options: tuple[Option, ...], wanted: Option) -> Option:
    return next((each for each in options if each == wanted), options[-1])


def _chosen(best: Candidate, slot: int, options: tuple[Option, ...]) -> Option:
    method = getattr(best.plan, SLOTS[slot])
    degrees = {0: ("vp", best.mesh.vp), 1: ("ep", best.mesh.ep)}
    for each in options:
        name, degree = degrees.get(slot, ("vp", each.vp))
        if each.method == method and getattr(each, name) == degree:
            return each
    return options[0]


def _word(index: int, option: Option) -> str:
    peak = SLOTS[index]
    kept = ", attention kept" if keeps_attention(option.method) else ""
    place = ""
    if isinstance(option.method, Offload | StreamAdamW):
        place = " on the host" if option.method.host else " on the disk"
    if isinstance(option.method, Offload) and option.method.every > 1:
        place += f", one in {option.method.every}"
    if isinstance(option.method, Pipelined) and option.method.block_rows is not None:
        place = f", blocks of {option.method.block_rows:,} rows"
    degree = f", mesh.vp = {option.vp}" if option.vp > 1 else f", mesh.ep = {option.ep}" if peak == "dispatch" else ""
    return f"{peak} = {method_name(type(option.method))}{place}{kept}{degree}"


def _reason(other: Candidate, best: Candidate) -> str:
    question = best.question
    over, peak = other.over(), other.peak_bytes
    if over == "memory":
        more = format_bytes(peak - question.hardware.memory)
        return f"needs {format_bytes(peak)} in {other.estimate.peak_phase}, {more} too much"
    if over is not None:
        place = "host" if over == "host memory" else "disk"
        return f"needs {format_bytes(other.node_bytes(place))} of {over} a node"
    slower = _slower(other, best)
    held = f"fits with {format_bytes(peak)}"
    if slower > 5e-4:
        return f"{held}, {slower:.1%} slower"
    return f"{held}, no faster" if slower > -5e-4 else f"{held}, {-slower:.1%} faster by this estimate but less simple"


def longest_context(question: Question, like: Candidate) -> int | None:
    """Return the longest context that fits with the methods of `like` or the most bounded ones, a row at a time."""

    def fits(context: int) -> bool:
        asked = replace(question, context=context, rows=max(1, question.devices // like.mesh.cp))
        others = [
            replace(like, question=asked, rows=1, microbatches=1),
            *(
                frame.candidate(tuple(options[-1] for options in frame.slots))
                for frame in frames(replace(asked, rows=1))
                if frame.cp == question.devices
            ),
        ]
        return any(each.over() is None for each in others)

    return longest(fits, unit=question.devices, most=_LONGEST, share=64, near=question.context)


def fewest_devices(question: Question) -> int | None:
    """Return the fewest devices, doubled from those there are, on which the most bounded plan fits."""
    devices = question.devices
    while devices < _MOST_DEVICES:
        devices *= 2
        more = replace(question, devices=devices, degrees={}, rows=question.rows)
        for frame in (each for each in frames(more) if each.pp == 1):
            for options in ((-1, -1), (1, -1)):
                vocab, dispatch, *others = frame.slots
                head = vocab[options[0] if len(vocab) > 1 else 0]
                parts = (head, dispatch[options[1]], *(each[-1] for each in others))
                if frame.candidate(parts).over() is None:
                    return devices
    return None


def plan_tables(best: Candidate) -> dict[str, Any]:
    """Return the tables of a run file that say the plan: `[mesh]`, `[plan]`, sizes as they are used."""
    mesh = best.mesh
    degrees = {name: getattr(mesh, name) for name in ("dp", "replicate", "cp", "ep", "vp", "pp")}
    return {
        "data": {"context": best.question.context},
        "train": {"global_tokens": best.tokens_per_step, "grad_accum": best.microbatches},
        "memory": {"budget": f"{best.question.hardware.memory // 2**20}MiB"},
        "mesh": {name: degree for name, degree in degrees.items() if degree > 1} or {"dp": 1},
        "plan": encode(_sized(best)),
    }


def _sized(best: Candidate) -> Plan:
    """Return the plan with far memory of the size that is used, rounded up to whole MiB."""
    far, plan = best.far_bytes, best.plan
    for name, method, what in (("boundary", plan.boundary, "boundaries"), ("optim", plan.optim, "optimizer state")):
        if isinstance(method, Offload | StreamAdamW):
            place = "host" if method.host else "disk"
            nbytes = -(-far[f"{place} {what}"] // 2**20) * 2**20
            plan = replace(plan, **{name: replace(method, **{place: max(2**20, nbytes)})})
    return plan
