"""From prediction to measurement: children are assembled and measured, costs corrected and the search run again."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from planish.compress.costs import Costs
from planish.compress.judge import Judge, Reader
from planish.compress.library import Library
from planish.compress.measure import calibrated
from planish.compress.scores import Scores, Scoring, score
from planish.compress.search import Ceiling, numbers_of, search
from planish.compress.space import Architecture
from planish.compress.stack import Stack
from planish.knapsack import Near

Make = Callable[[Costs], Architecture | None]
MeasureChild = Callable[[Architecture], Mapping[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """A child whose measured latency is what was predicted.

    Attributes:
        architecture: The child.
        measured: Seconds by scenario's label.
        predicted: What the costs said of it before it was measured.
        costs: Corrected by it.
        tried: Children that were assembled.
        agrees: Whether prediction and measurement are within the tolerance.
    """

    architecture: Architecture
    measured: Mapping[str, float]
    predicted: Mapping[str, float]
    costs: Costs
    tried: int
    agrees: bool


def settle(
    make: Make,
    ceilings: Sequence[Ceiling],
    costs: Costs,
    measure_child: MeasureChild,
    *,
    tolerance: float = 0.02,
    rounds: int = 5,
) -> Settled | None:
    """Return the child that `make` finds with costs that hold for it, or None where it finds none.

    Each round assembles and measures a child and corrects the costs; it ends when prediction and measurement agree and
    every latency is within its ceiling, or at a child that was measured before. Of children within the ceilings one
    that is as predicted is returned, else the nearest to them, since what is left unused was taken from its text.

    Args:
        make: A search or a baseline.
        ceilings: What it keeps to; those on latency are compared.
        costs: To begin with.
        measure_child: Seconds of an assembled child by scenario's label.
        tolerance: Of agreement, and above a ceiling.
        rounds: At most.
    """
    limits = {each.scenario: each.at_most for each in ceilings if each.kind == "latency"}
    seen: dict[Architecture, Mapping[str, float]] = {}
    best, reached = None, (False, False, 0.0)
    for tried in range(1, rounds + 1):
        child = make(costs)
        if child is None:
            return best
        known = child in seen
        predicted = {label: costs.model_seconds(child, label) for label in costs.scenarios}
        if not known:
            seen[child] = measure_child(child)
        measured = seen[child]
        agrees = all(abs(measured[label] / predicted[label] - 1) <= tolerance for label in measured)
        costs = calibrated(costs, measured, child)
        within = all(measured[label] <= limit * (1 + tolerance) for label, limit in limits.items())
        nearest = max((measured[label] / limit for label, limit in limits.items()), default=0.0)
        worth = (within, within and agrees, nearest if within else -nearest)
        if best is None or worth >= reached:
            reached = worth
            best = Settled(
                architecture=child, measured=measured, predicted=predicted, costs=costs, tried=tried, agrees=agrees
            )
        if known or (agrees and within):
            break
    return best


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """How a child's text compares with its parent's, with standard errors over rows.

    Attributes:
        loss: Next-token loss in nats.
        kl: KL(parent || child).
        agreement: Share of tokens of which both find the same most likely.
        loss_error: Standard error of the loss's difference to the parent.
        kl_error: Standard error of `kl`.
    """

    loss: float
    kl: float
    agreement: float
    loss_error: float
    kl_error: float


@torch.no_grad()
def quality(child: Reader, judge: Judge, *, batch_rows: int = 4) -> Quality:
    """Return how a child does on the judge's rows.

    Memory:        the child, and of `batch_rows` rows a layer's activations and head tiles.
    """
    kl, more, same, loss = [], [], [], []
    for start in range(0, len(judge.rows), batch_rows):
        found = judge.judge(child.read(judge.rows[start : start + batch_rows]), child.head, start)
        kl.append(found.kl.mean(1))
        loss.append(found.nll.mean(1))
        more.append(found.nll.mean(1) - judge.nll[start : start + batch_rows].mean(1))
        same.append(found.same.double().mean(1))
    rows = len(judge.rows)
    kl_rows, more_rows = torch.cat(kl), torch.cat(more)
    return Quality(
        loss=float(torch.cat(loss).mean()),
        kl=float(kl_rows.mean()),
        agreement=float(torch.cat(same).mean()),
        loss_error=float(more_rows.std() / rows**0.5) if rows > 1 else float("nan"),
        kl_error=float(kl_rows.std() / rows**0.5) if rows > 1 else float("nan"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One round around a child: how many layers changed, and the divergence before and after."""

    changed: int
    kl_before: float
    kl_after: float
    accepted: bool


def improve(  # noqa: PLR0913
    library: Library,
    child: Architecture,
    judge: Judge,
    ceilings: Sequence[Ceiling],
    costs: Costs,
    settings: Scoring,
    *,
    radius: int,
    rounds: int,
    dtype: torch.dtype | None = None,
    rescore: Callable[[Stack], Scores] | None = None,
) -> tuple[Architecture, list[Round]]:
    """Return a child that is better where layers are judged beside the others that were chosen, and its rounds.

    Scores that are measured in the parent miss what replaced layers do to one another. Each round measures them around
    the child, searches again with at most `radius` layers changed, and keeps the new child if its divergence is less;
    else the radius is halved.

    Memory:        as `score`.

    Args:
        library: Of blocks.
        child: To begin with.
        judge: The parent's text.
        ceilings: What children keep to.
        costs: Of the choices.
        settings: Of scoring.
        radius: Layers that may change in a round.
        rounds: At most.
        dtype: Of layers and hidden states while scoring.
        rescore: In the place of `score`, such as one that keeps a journal.
    """
    told: list[Round] = []
    stack = Stack(library, child, dtype=dtype)
    own = quality(stack, judge, batch_rows=settings.batch_rows).kl
    scores: Scores | None = None
    while len(told) < rounds and radius >= 1:
        if scores is None:
            scores = rescore(stack) if rescore is not None else score(stack, judge, settings)
        near = Near(chosen=numbers_of(library.space, child), at_least=len(child.layers) - radius)
        found = search(library.space, scores.table(library.space), ceilings, costs, near=[near]).architecture
        changed = sum(a != b for a, b in zip(found.layers, child.layers, strict=True))
        if not changed:
            break
        other = Stack(library, found, dtype=dtype)
        kl = quality(other, judge, batch_rows=settings.batch_rows).kl
        told.append(Round(changed=changed, kl_before=own, kl_after=kl, accepted=kl < own))
        if kl < own:
            child, stack, own, scores = found, other, kl, None
        else:
            radius //= 2
    return child, told
