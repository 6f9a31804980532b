"""The least harmful child within its limits, by the knapsack: layers are slots; latency, memory and size are rows."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from planish.compress.costs import Costs, Scenario, choice_parameters, ends_parameters, model_parameters
from planish.compress.serving import choice_bytes, model_bytes, workspace_bytes
from planish.compress.space import Architecture, Choice, NoAttention, NoFfn, Space, Width, attends
from planish.errors import DoesNotFit
from planish.knapsack import Infeasible, Limit, Near, Problem, Reach, Solution, Table, solve
from planish.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceiling:
    """One thing that a child may not exceed.

    Attributes:
        kind: "latency" in seconds, "memory" in bytes, "parameters" in numbers.
        at_most: How much.
        scenario: The label of the scenario, where `kind` depends on one.
    """

    kind: str
    at_most: float
    scenario: str = ""

    @property
    def name(self) -> str:
        """Such as "latency decode 1x1024"."""
        return f"{self.kind} {self.scenario}".strip()

    def told(self, value: float) -> str:
        """Return a value of this kind as people read it."""
        match self.kind:
            case "latency":
                return f"{value * 1e3:.3f} ms"
            case "memory":
                return format_bytes(int(value))
        return f"{value:,.0f}"


def throughput(scenario: Scenario, tokens_per_s: float) -> Ceiling:
    """Return the latency at which `scenario` runs `tokens_per_s`, all rows together; both are one bound."""
    return Ceiling(kind="latency", at_most=scenario.tokens / tokens_per_s, scenario=scenario.label)


def value_of(ceiling: Ceiling, architecture: Architecture, costs: Costs) -> float:
    """Return what a child has of what `ceiling` limits, as predicted."""
    match ceiling.kind:
        case "latency":
            return costs.model_seconds(architecture, ceiling.scenario)
        case "memory":
            return model_bytes(costs.space, architecture, costs.scenarios[ceiling.scenario], costs.numbers, costs.sizes)
        case "parameters":
            return float(model_parameters(costs.space, architecture, costs.sizes))
    raise ValueError(f"`kind` must be latency, memory or parameters, got {ceiling.kind!r}.")


def share_of_parent(ceiling: Ceiling, share: float, costs: Costs) -> Ceiling:
    """Return `ceiling` at `share` of what the parent has."""
    return replace(ceiling, at_most=share * value_of(ceiling, costs.space.parent, costs))


def meets(architecture: Architecture, ceilings: Iterable[Ceiling], costs: Costs) -> bool:
    """Return whether a child is predicted to keep within every ceiling."""
    return all(value_of(each, architecture, costs) <= each.at_most for each in ceilings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A child and the proof behind it.

    Attributes:
        architecture: The child.
        harm: The sum of its layers' scores.
        solution: The knapsack's answer.
        predicted: What it has of each ceiling, by name.
    """

    architecture: Architecture
    harm: float
    solution: Solution
    predicted: Mapping[str, float]


def as_problem(
    space: Space,
    harm: Sequence[Sequence[float]],
    ceilings: Sequence[Ceiling],
    costs: Costs,
    *,
    near: Sequence[Near] = (),
) -> Problem:
    """Return the knapsack of one choice per layer, least harm, then fewest parameters; some layer attends.

    Temporaries count as the largest of any choice: a child's are at most that.
    """
    limits = [_limit(space, ceiling, costs) for ceiling in ceilings]
    attending = [[-float(attends(choice.attention)) for choice in layer.choices] for layer in space.layers]
    limits.append(Limit(name="attending layers", weights=attending, at_most=-1.0))
    sizes = [
        [float(choice_parameters(space, choice, costs.sizes)) for choice in layer.choices] for layer in space.layers
    ]
    return Problem(objective=harm, limits=limits, second=sizes, near=near)


def _limit(space: Space, ceiling: Ceiling, costs: Costs) -> Limit:
    match ceiling.kind:
        case "latency":
            factor = costs.factors.get(ceiling.scenario, 1.0)
            rest = costs.ends_s[ceiling.scenario]
            weights = [[costs.seconds(choice, ceiling.scenario) for choice in layer.choices] for layer in space.layers]
            return Limit(name=ceiling.name, weights=weights, at_most=ceiling.at_most / factor - rest)
        case "memory":
            scenario, numbers = costs.scenarios[ceiling.scenario], costs.numbers
            largest = [choice for layer in space.layers for choice in layer.choices]
            rest = ends_parameters(space) * numbers.weight_bytes + workspace_bytes(space, largest, scenario, numbers)
            weights = [
                [choice_bytes(space, choice, scenario, numbers, costs.sizes) for choice in layer.choices]
                for layer in space.layers
            ]
            return Limit(name=ceiling.name, weights=weights, at_most=ceiling.at_most - rest)
    weights = [
        [float(choice_parameters(space, choice, costs.sizes)) for choice in layer.choices] for layer in space.layers
    ]
    return Limit(name=ceiling.name, weights=weights, at_most=ceiling.at_most - ends_parameters(space))


def search(
    space: Space,
    harm: Sequence[Sequence[float]],
    ceilings: Sequence[Ceiling],
    costs: Costs,
    *,
    near: Sequence[Near] = (),
    time_limit_s: float = 60.0,
) -> Found:
    """Return the child with the least harm.

    Args:
        space: What layers may be.
        harm: Of each choice of each layer, as `Scores.table` gives it.
        ceilings: What it may not exceed, all at once.
        costs: Of the choices.
        near: Agreement with other children that is wanted or not.
        time_limit_s: For the search.

    Raises:
        DoesNotFit: No child keeps within every ceiling; each one's least is named, and what it costs.
    """
    problem = as_problem(space, harm, ceilings, costs, near=near)
    if costs.joined_s and not near:
        answer = solve(with_joined(problem, space, ceilings, costs), time_limit_s=time_limit_s)
        if isinstance(answer, Solution):
            return found_of(space, replace(answer, chosen=_as_they_were(space, answer.chosen)), ceilings, costs)
    answer = solve(problem, time_limit_s=time_limit_s)
    if isinstance(answer, Infeasible):
        raise DoesNotFit(_out_of_reach(answer, ceilings, costs))
    return found_of(space, answer, ceilings, costs)


def with_joined(problem: Problem, space: Space, ceilings: Sequence[Ceiling], costs: Costs) -> Problem:
    """Return `problem` in which layers without attention may also join the network before them, for less time.

    Choices that do stand behind a layer's others, in their order. One needs a layer before it that has a network or
    has joined as well, and one after it that does without attention, since the last network of a run stays by itself.
    """
    joined = [_joining(layer.choices) if 0 < i < len(space.layers) - 1 else [] for i, layer in enumerate(space.layers)]

    def longer(table: Table, less_s: float = 0.0) -> list[list[float]]:
        less = [
            [less_s * isinstance(layer.choices[k].ffn, Width) for k in own]
            for layer, own in zip(space.layers, joined, strict=True)
        ]
        return [
            [*row, *(row[k] - each for k, each in zip(own, mine, strict=True))]
            for row, own, mine in zip(table, joined, less, strict=True)
        ]

    saved = {each.name: costs.joined_s[each.scenario] for each in ceilings if each.kind == "latency"}
    limits = [replace(each, weights=longer(each.weights, saved.get(each.name, 0.0))) for each in problem.limits]
    widths = [len(layer.choices) + len(own) for layer, own in zip(space.layers, joined, strict=True)]
    for index, own in enumerate(joined):
        for beside in (index - 1, index + 1) if own else ():
            weights = [[0.0] * width for width in widths]
            weights[index][len(space.layers[index].choices) :] = [1.0] * len(own)
            choices = space.layers[beside].choices
            able = [
                isinstance(each.ffn, Width) and (beside < index or each.attention == NoAttention()) for each in choices
            ]
            weights[beside] = [-float(each) for each in able] + [-1.0] * len(joined[beside])
            limits.append(Limit(name=f"joined {index} {beside}", weights=weights, at_most=0.0))
    second = None if problem.second is None else longer(problem.second)
    return replace(problem, objective=longer(problem.objective), limits=limits, second=second)


def _joining(choices: Sequence[Choice]) -> list[int]:
    """Return the choices that can stand in the middle of a run: networks alone, and nothing."""
    return [
        k for k, each in enumerate(choices) if each.attention == NoAttention() and isinstance(each.ffn, Width | NoFfn)
    ]


def _as_they_were(space: Space, chosen: Sequence[int]) -> tuple[int, ...]:
    """Return the choices without their word on joining."""
    pairs = zip(space.layers, chosen, strict=True)
    return tuple(k if k < len(layer.choices) else _joining(layer.choices)[k - len(layer.choices)] for layer, k in pairs)


def found_of(space: Space, answer: Solution, ceilings: Sequence[Ceiling], costs: Costs) -> Found:
    """Return the child that a solution means."""
    child = architecture_at(space, answer.chosen)
    predicted = {each.name: value_of(each, child, costs) for each in ceilings}
    return Found(architecture=child, harm=answer.value, solution=answer, predicted=predicted)


def architecture_at(space: Space, chosen: Sequence[int]) -> Architecture:
    """Return the child whose layers are the choices of these numbers."""
    return Architecture(layers=tuple(layer.choices[k] for layer, k in zip(space.layers, chosen, strict=True)))


def numbers_of(space: Space, architecture: Architecture) -> tuple[int, ...]:
    """Return the number of each layer's choice in its `LayerSpace.choices`."""
    return tuple(layer.choices.index(choice) for layer, choice in zip(space.layers, architecture.layers, strict=True))


def diverse(
    space: Space,
    harm: Sequence[Sequence[float]],
    ceilings: Sequence[Ceiling],
    costs: Costs,
    *,
    count: int,
    agree: float = 0.8,
    time_limit_s: float = 10.0,
) -> list[Found]:
    """Return up to `count` children, each the best of those that share at most `agree` of their layers with one before.

    Raises:
        DoesNotFit: Not even the first is within the ceilings.
    """
    found = [search(space, harm, ceilings, costs, time_limit_s=time_limit_s)]
    while len(found) < count:
        most = math.floor(agree * len(space.layers))
        near = [Near(chosen=each.solution.chosen, at_most=most) for each in found]
        try:
            answer = solve(as_problem(space, harm, ceilings, costs, near=near), time_limit_s=time_limit_s)
        except TimeoutError:
            break
        if isinstance(answer, Infeasible):
            break
        found.append(found_of(space, answer, ceilings, costs))
    return found


def best_batch(
    problem: Callable[[int], tuple[Sequence[Ceiling], Costs]],
    space: Space,
    harm: Sequence[Sequence[float]],
    batches: Sequence[int],
) -> tuple[int, Found]:
    """Return the batch that lets the least harm through, the smallest of equals, and its child.

    Args:
        problem: The ceilings and costs at a batch: larger ones share weights among more tokens and hold more keys.
        space: What layers may be.
        harm: Of each choice of each layer.
        batches: To be tried.

    Raises:
        DoesNotFit: None is within its ceilings; the reason is that of the first.
    """
    best: tuple[int, Found] | None = None
    refused: DoesNotFit | None = None
    for batch in batches:
        ceilings, costs = problem(batch)
        try:
            found = search(space, harm, ceilings, costs)
        except DoesNotFit as error:
            refused = refused or error
            continue
        if best is None or found.harm < best[1].harm:
            best = batch, found
    if best is None:
        raise refused or DoesNotFit("`batch` names none to try; give at least one.")
    return best


def pareto(
    space: Space,
    harm: Sequence[Sequence[float]],
    ceilings: Sequence[Ceiling],
    costs: Costs,
    shares: Sequence[float],
) -> list[tuple[float, Found]]:
    """Return the best child at each share of the parent, all ceilings moved together, where one is in reach."""
    curve = []
    for share in shares:
        moved = [share_of_parent(ceiling, share, costs) for ceiling in ceilings]
        try:
            curve.append((share, search(space, harm, moved, costs, time_limit_s=10.0)))
        except (DoesNotFit, TimeoutError):
            continue
    return curve


def _out_of_reach(answer: Infeasible, ceilings: Sequence[Ceiling], costs: Costs) -> str:
    """Return the sentence that says how far each ceiling goes down and what that costs."""
    if not answer.by_limits:
        return "no other child differs enough from the earlier ones within these limits; allow more agreement."
    by_name = {ceiling.name: ceiling for ceiling in ceilings}
    parts = [_reach(by_name[reach.name], reach, costs) for reach in answer.reaches if reach.name in by_name]
    return "no child of this library keeps within every limit: " + "; ".join(parts) + "."


def _reach(ceiling: Ceiling, reach: Reach, costs: Costs) -> str:
    parent = value_of(ceiling, costs.space.parent, costs)
    least = _whole(ceiling, reach.alone, costs)
    text = f"{ceiling.name} <= {ceiling.told(ceiling.at_most)} was asked for, the least is {ceiling.told(least)} alone"
    if reach.beside is None:
        return f"{text} and the others cannot be met together in any case"
    beside = _whole(ceiling, reach.beside, costs)
    return (
        f"{text}, {ceiling.told(beside)} with the others kept ({beside / parent:.0%} of the parent), at a harm of "
        f"{reach.value:.4g}"
    )


def _whole(ceiling: Ceiling, layers: float, costs: Costs) -> float:
    """Return the model's value where its layers sum to `layers`."""
    limit = _limit(costs.space, ceiling, costs)
    scale = costs.factors.get(ceiling.scenario, 1.0) if ceiling.kind == "latency" else 1.0
    return ceiling.at_most + (layers - limit.at_most) * scale


def restricted(
    space: Space, allowed: Callable[[int, Choice], bool], harm: Sequence[Sequence[float]]
) -> list[list[float]]:
    """Return `harm` with every choice that is not allowed made impossible."""
    return [
        [value if allowed(index, choice) else math.inf for value, choice in zip(row, layer.choices, strict=True)]
        for index, (row, layer) in enumerate(zip(harm, space.layers, strict=True))
    ]
