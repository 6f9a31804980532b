"""What else one could do with the same library and the same limits; each returns a child, or None if it has none."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planish.compress.costs import Costs, choice_parameters
from planish.compress.search import Ceiling, as_problem, found_of, meets, restricted
from planish.compress.space import Architecture, Choice, NoAttention, NoFfn, Space, attends
from planish.knapsack import Infeasible, solve

Harm = Sequence[Sequence[float]]
_GONE = Choice(attention=NoAttention(), ffn=NoFfn())
_SEARCH_S = 10.0  # "most parameters" has countless children all but equal, which no solver tells apart in time


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What every baseline is given.

    Attributes:
        space: What layers may be.
        harm: Of each choice of each layer.
        ceilings: What the child may not exceed.
        costs: Of the choices.
        influence: How much each whole layer turns the hidden states, 1 - cos(before, after).
        seed: For what is drawn.
    """

    space: Space
    harm: Harm
    ceilings: Sequence[Ceiling]
    costs: Costs
    influence: Sequence[float]
    seed: int = 0


def greedy(task: Task) -> Architecture | None:
    """Return the paper's greedy child: layers in order of mean harm, each takes the best in its share of the rest.

    References:
        Bercovich et al., Puzzle (2025), section 5 (the ablation of the search).
    """
    problem = as_problem(task.space, task.harm, task.ceilings, task.costs)
    limits = [each for each in problem.limits if each.name != "attending layers"]
    rest = np.array([each.at_most for each in limits])
    order = sorted(range(len(task.harm)), key=lambda index: float(np.mean(task.harm[index])))
    chosen = [0] * len(order)
    for place, index in enumerate(order):
        share = rest / (len(order) - place)
        weights = np.array([each.weights[index] for each in limits])
        over = ((weights - share[:, None]) / np.maximum(np.abs(share[:, None]), 1e-12)).max(0)
        fits = over <= 0
        best = np.where(fits, task.harm[index], np.inf).argmin() if fits.any() else over.argmin()
        chosen[index] = int(best)
        rest = rest - weights[:, best]
    layers = (layer.choices[k] for layer, k in zip(task.space.layers, chosen, strict=True))
    return _if_allowed(task, Architecture(layers=tuple(layers)))


def drop_depth(task: Task) -> Architecture | None:
    """Return the parent without the layers that turn its hidden states least, as many as it takes.

    References:
        Men et al., ShortGPT (2024).
    """
    child = task.space.parent
    for index in np.argsort(task.influence, kind="stable")[:-1]:
        if meets(child, task.ceilings, task.costs):
            break
        child = child.with_layer(int(index), _GONE)
    return _if_allowed(task, child)


def uniform(task: Task) -> Architecture | None:
    """Return the least harmful child whose layers are all alike."""
    common = set.intersection(*(set(layer.choices) for layer in task.space.layers))
    alike = [Architecture(layers=(choice,) * len(task.space.layers)) for choice in common if attends(choice.attention)]
    allowed = [child for child in alike if meets(child, task.ceilings, task.costs)]
    return min(allowed, key=lambda child: harm_of(task, child), default=None)


def drawn(task: Task, number: int = 0) -> Architecture | None:
    """Return a child drawn from the library: random choices, then random other ones until it stands below the limits.

    Smaller ones while a limit is exceeded, then larger ones as long as none is, so that what was drawn costs as much as
    what was searched for. The draw goes by `task.seed` and `number`: with other costs it takes the same way as far.
    """
    random = np.random.default_rng((task.seed, number))
    for _ in range(20):
        layers = [layer.choices[random.integers(len(layer.choices))] for layer in task.space.layers]
        child = _filled(task, _reduced(task, Architecture(layers=tuple(layers)), random), random)
        if child is not None:
            return child
    return None


def _reduced(task: Task, child: Architecture, random: np.random.Generator) -> Architecture | None:
    for _ in range(50 * len(child.layers)):
        if meets(child, task.ceilings, task.costs):
            return _if_allowed(task, child)
        other, larger = _changed(task, child, random)
        child = child if larger else other
    return None


def _filled(task: Task, child: Architecture | None, random: np.random.Generator) -> Architecture | None:
    if child is None:
        return None
    for _ in range(20 * len(child.layers)):
        other, larger = _changed(task, child, random)
        if larger and meets(other, task.ceilings, task.costs):
            child = other
    return child


def _changed(task: Task, child: Architecture, random: np.random.Generator) -> tuple[Architecture, bool]:
    """Return `child` with a random layer made otherwise, and whether that has not fewer parameters."""
    index = int(random.integers(len(child.layers)))
    choices = task.space.layers[index].choices
    other = choices[random.integers(len(choices))]
    before, after = (choice_parameters(task.space, each, task.costs.sizes) for each in (child.layers[index], other))
    return child.with_layer(index, other), after >= before


def only_skips(task: Task) -> Architecture | None:
    """Return the best child whose sub-blocks are the parent's or nothing."""

    def allowed(index: int, choice: Choice) -> bool:
        own = task.space.layers[index].parent
        return choice.attention in (own.attention, NoAttention()) and choice.ffn in (own.ffn, NoFfn())

    return _solved(task, restricted(task.space, allowed, task.harm))


def most_parameters(task: Task) -> Architecture | None:
    """Return the child with most parameters within the limits, whatever it does."""
    sizes = [
        [-float(choice_parameters(task.space, choice, task.costs.sizes)) for choice in layer.choices]
        for layer in task.space.layers
    ]
    return _solved(task, sizes)


BASELINES: Mapping[str, Callable[[Task], Architecture | None]] = {
    "greedy": greedy,
    "depth drop": drop_depth,
    "uniform width": uniform,
    "no-op only": only_skips,
    "most parameters": most_parameters,
}


def harm_of(task: Task, child: Architecture) -> float:
    """Return the sum of a child's scores."""
    rows = zip(task.harm, task.space.layers, child.layers, strict=True)
    return math.fsum(row[layer.choices.index(choice)] for row, layer, choice in rows)


def _solved(task: Task, objective: Harm) -> Architecture | None:
    problem = replace(as_problem(task.space, objective, task.ceilings, task.costs), second=None)
    answer = solve(problem, time_limit_s=_SEARCH_S)
    if isinstance(answer, Infeasible):
        return None
    return found_of(task.space, answer, task.ceilings, task.costs).architecture


def _if_allowed(task: Task, child: Architecture) -> Architecture | None:
    attending = any(attends(choice.attention) for choice in child.layers)
    return child if attending and meets(child, task.ceilings, task.costs) else None
