"""Children that deserve a lesson before one is chosen: what other scores, other layers and plain depth drop find."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from planish.compress.baselines import Task, drop_depth
from planish.compress.costs import Costs
from planish.compress.scores import Metric, Scores
from planish.compress.search import Ceiling, numbers_of, search
from planish.compress.settle import Make, MeasureChild, Settled, settle
from planish.compress.space import Architecture
from planish.errors import DoesNotFit
from planish.knapsack import Near

_AGREE = 0.8
_SLACK = 1.03


def candidates(
    first: Mapping[str, Settled],
    scores: Scores,
    task: Task,
    measure_child: MeasureChild,
    *,
    metric: Metric,
) -> dict[str, Settled]:
    """Return `first` and what else keeps to the limits: by other scores, in other layers, and depth drop; none twice.

    Two candidates in other layers share at most four fifths of their layers with the first and with one another.

    Args:
        first: By name, what the search and its rounds found.
        scores: Of the options.
        task: Limits, costs and what depth drop goes by.
        measure_child: Seconds of an assembled child by scenario's label.
        metric: That the first were found by.
    """
    found: dict[str, Settled] = {}
    for name, settled in first.items():
        if settled.architecture not in {each.architecture for each in found.values()}:
            found[name] = settled
    for name, make in _makes(found, scores, task, metric):
        settled = settle(make, task.ceilings, task.costs, measure_child)
        known = {each.architecture for each in found.values()}
        if settled is not None and settled.architecture not in known and _keeps(settled, task.ceilings):
            found[name] = settled
    return found


def _makes(found: Mapping[str, Settled], scores: Scores, task: Task, metric: Metric) -> Iterator[tuple[str, Make]]:
    others: tuple[Metric, ...] = ("kl", "local", "loss")
    for other in others:
        if other != metric:
            yield f"by {other}", _searching(task, scores.table(task.space, other), [])
    most = math.floor(_AGREE * len(task.space.layers))
    unlike = [next(iter(found.values()))]
    for name in ("other layers", "yet other layers"):
        near = [Near(chosen=numbers_of(task.space, each.architecture), at_most=most) for each in unlike]
        yield name, _searching(task, task.harm, near)
        unlike += [found[name]] if name in found else []
    yield "depth drop", lambda costs: drop_depth(replace(task, costs=costs))


def _searching(
    task: Task, harm: Sequence[Sequence[float]], near: Sequence[Near]
) -> Callable[[Costs], Architecture | None]:
    def make(costs: Costs) -> Architecture | None:
        try:
            return search(task.space, harm, task.ceilings, costs, near=near, time_limit_s=10.0).architecture
        except (DoesNotFit, TimeoutError):
            return None

    return make


def _keeps(child: Settled, ceilings: Sequence[Ceiling]) -> bool:
    """Return whether a child is no slower than was asked; a slower one would win for that."""
    return all(child.measured[each.scenario] <= each.at_most * _SLACK for each in ceilings if each.kind == "latency")
