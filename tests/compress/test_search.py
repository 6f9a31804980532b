"""The child that is found is the best of all, within its limits; what is out of reach is told."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from planish.compress.baselines import (
    BASELINES,
    Task,
    drawn,
    drop_depth,
    greedy,
    harm_of,
    most_parameters,
    only_skips,
    uniform,
)
from planish.compress.costs import (
    Costs,
    Numbers,
    Price,
    Scenario,
    choice_parameters,
    model_parameters,
    options_of,
    parameters,
)
from planish.compress.search import (
    Ceiling,
    best_batch,
    diverse,
    meets,
    numbers_of,
    pareto,
    search,
    share_of_parent,
    throughput,
    value_of,
)
from planish.compress.serving import model_bytes
from planish.compress.space import (
    Architecture,
    KeepHeads,
    LayerSpace,
    Menu,
    NoAttention,
    NoFfn,
    Space,
    Width,
    attends,
    attention_options,
    ffn_options,
)
from planish.errors import DoesNotFit

DECODE, PREFILL = Scenario(phase="decode", context=64), Scenario(phase="prefill", context=32)
MENU = Menu(kv_heads=(1,), widths=(0.5,), width_multiple=8)


def _space(layers=3, menu=MENU):
    layer = LayerSpace(attention=attention_options(KeepHeads(kv_heads=2), menu), ffn=ffn_options(Width(width=64), menu))
    return Space(layers=(layer,) * layers, hidden_size=32, num_heads=4, head_dim=8, vocab_size=100, tied=True)


def _costs(space, **changes):
    prices = {
        scenario.label: {
            name: Price(seconds=factor * parameters(space, option), source="measured")
            for name, option in options_of(space).items()
        }
        for scenario, factor in ((DECODE, 1e-9), (PREFILL, 3e-9))
    }
    settings = {
        "space": space,
        "numbers": Numbers(),
        "machine": "drawn",
        "prices": prices,
        "ends_s": {DECODE.label: 2e-6, PREFILL.label: 1e-6},
        "scenarios": {each.label: each for each in (DECODE, PREFILL)},
        "factors": {DECODE.label: 1.1},
    }
    return Costs(**settings | changes)


def _harm(space, seed=0):
    """Return harm that grows with what is taken away, unevenly over layers."""
    random = np.random.default_rng(seed)
    largest = choice_parameters(space, space.layers[0].parent)
    return [
        [
            0.0 if k == 0 else weight * (1 - choice_parameters(space, choice) / largest) * random.uniform(0.5, 1.5)
            for k, choice in enumerate(layer.choices)
        ]
        for layer, weight in zip(space.layers, random.uniform(0.1, 1, len(space.layers)), strict=True)
    ]


def _every(space):
    return [Architecture(layers=layers) for layers in itertools.product(*(layer.choices for layer in space.layers))]


def _latency(share, costs, scenario=DECODE):
    return share_of_parent(Ceiling(kind="latency", at_most=0, scenario=scenario.label), share, costs)


@pytest.fixture
def task():
    space = _space()
    costs = _costs(space)
    return Task(
        space=space,
        harm=_harm(space),
        ceilings=[_latency(0.6, costs), _latency(0.7, costs, PREFILL)],
        costs=costs,
        influence=[0.3, 0.1, 0.2],
    )


def test_the_child_is_the_least_harmful_of_all(task):
    found = search(task.space, task.harm, task.ceilings, task.costs)
    allowed = [
        child
        for child in _every(task.space)
        if meets(child, task.ceilings, task.costs) and any(attends(each.attention) for each in child.layers)
    ]
    assert found.architecture in allowed
    assert found.harm == pytest.approx(min(harm_of(task, child) for child in allowed), rel=1e-9)
    assert found.solution.proven
    for ceiling in task.ceilings:
        assert found.predicted[ceiling.name] == value_of(ceiling, found.architecture, task.costs)
        assert found.predicted[ceiling.name] <= ceiling.at_most


def test_some_layer_attends_whatever_the_scores_say():
    space = _space(2)
    costs = _costs(space)
    harm = [[float(attends(choice.attention)) for choice in layer.choices] for layer in space.layers]
    child = search(space, harm, [], costs).architecture
    assert sum(attends(choice.attention) for choice in child.layers) == 1


@pytest.mark.parametrize("kind", ["memory", "parameters"])
def test_memory_and_size_are_rows_too(task, kind):
    scenario = DECODE.label if kind == "memory" else ""
    ceiling = share_of_parent(Ceiling(kind=kind, at_most=0, scenario=scenario), 0.7, task.costs)
    child = search(task.space, task.harm, [ceiling], task.costs).architecture
    value = (
        model_bytes(task.space, child, DECODE, Numbers()) if kind == "memory" else model_parameters(task.space, child)
    )
    assert 0.3 * ceiling.at_most < value <= ceiling.at_most


def test_of_equally_harmful_children_the_smallest_is_taken(task):
    harm = [[0.0] * len(row) for row in task.harm]
    child = search(task.space, harm, [], task.costs).architecture
    assert model_parameters(task.space, child) == min(
        model_parameters(task.space, each)
        for each in _every(task.space)
        if any(attends(c.attention) for c in each.layers)
    )


def test_what_is_out_of_reach_is_told_for_each_limit(task):
    ceilings = [_latency(0.01, task.costs), Ceiling(kind="parameters", at_most=1e9)]
    with pytest.raises(DoesNotFit) as told:
        search(task.space, task.harm, ceilings, task.costs)
    least = min(
        value_of(ceilings[0], child, task.costs)
        for child in _every(task.space)
        if any(attends(choice.attention) for choice in child.layers)
    )
    text = str(told.value)
    assert "latency decode 1x64" in text
    assert f"{least * 1e3:.3f} ms with the others kept" in text
    assert "parameters <= 1,000,000,000" in text


def test_the_same_is_told_of_memory(task):
    ceiling = share_of_parent(Ceiling(kind="memory", at_most=0, scenario=DECODE.label), 0.05, task.costs)
    with pytest.raises(DoesNotFit, match=r"memory decode 1x64 <= .* KiB was asked for, the least is"):
        search(task.space, task.harm, [ceiling], task.costs)


def test_diverse_children_differ_in_a_fifth_of_their_layers():
    space = _space(5)
    costs = _costs(space)
    found = diverse(space, _harm(space), [_latency(0.6, costs)], costs, count=4)
    assert len(found) == 4
    for one, other in itertools.combinations([numbers_of(space, each.architecture) for each in found], 2):
        assert sum(a == b for a, b in zip(one, other, strict=True)) <= 4
    assert [each.harm for each in found] == sorted(each.harm for each in found)


def test_the_curve_only_falls_as_more_is_allowed(task):
    curve = pareto(task.space, task.harm, task.ceilings, task.costs, [0.001, 0.5, 0.7, 0.9, 1.0])
    assert [share for share, _ in curve] == [0.5, 0.7, 0.9, 1.0]
    harms = [found.harm for _, found in curve]
    assert harms == sorted(harms, reverse=True)
    assert harms[-1] == 0


def test_the_batch_is_chosen_by_what_it_lets_through(task):
    """Latency falls by the batch until memory ends it."""
    scenarios = {batch: Scenario(phase="decode", context=64, batch=batch) for batch in (1, 4, 64)}

    def problem(batch):
        scenario = scenarios[batch]
        prices = {
            scenario.label: {
                name: Price(seconds=p.seconds * batch**0.5, source="fitted")
                for name, p in task.costs.prices[DECODE.label].items()
            }
        }
        costs = _costs(
            task.space, prices=prices, ends_s={scenario.label: 2e-6}, scenarios={scenario.label: scenario}, factors={}
        )
        wanted = throughput(scenario, 6e4)
        return [wanted, Ceiling(kind="memory", at_most=300_000, scenario=scenario.label)], costs

    batch, found = best_batch(problem, task.space, task.harm, [1, 4, 64])
    assert batch == 4
    assert found.harm < search(task.space, task.harm, *problem(1)).harm
    with pytest.raises(DoesNotFit, match="memory decode 64x64"):
        best_batch(problem, task.space, task.harm, [64])


def test_no_baseline_is_better_and_all_keep_to_the_limits(task):
    best = search(task.space, task.harm, task.ceilings, task.costs)
    found = {name: make(task) for name, make in BASELINES.items()}
    draws = [drawn(task, number) for number in range(10)]
    for child in [*filter(None, found.values()), *draws]:
        assert meets(child, task.ceilings, task.costs)
        assert any(attends(choice.attention) for choice in child.layers)
        assert harm_of(task, child) >= best.harm - 1e-12
    assert all(child is not None for child in found.values())
    assert len(set(draws)) > 5
    assert draws == [drawn(task, number) for number in range(10)]


def test_what_is_drawn_costs_nearly_as_much_as_is_allowed():
    """Below the limit, and no layer can be larger: else a draw would lose for being smaller."""
    space = _space(8, Menu(width_multiple=8))
    costs = _costs(space)
    ceiling = _latency(0.65, costs)
    task = Task(space=space, harm=_harm(space), ceilings=[ceiling], costs=costs, influence=[0.1] * 8)
    for number in range(5):
        child = drawn(task, number)
        assert 0.95 * ceiling.at_most < value_of(ceiling, child, costs) <= ceiling.at_most
    dearer = _costs(space, factors={DECODE.label: 1.3})
    child = drawn(replace(task, costs=dearer), 0)
    assert 0.95 * ceiling.at_most < value_of(ceiling, child, dearer) <= ceiling.at_most


def test_depth_drop_takes_the_layers_that_turn_least(task):
    child = drop_depth(task)
    gone = [index for index, choice in enumerate(child.layers) if choice.ffn == NoFfn()]
    assert gone == [1, 2][: len(gone)]
    assert gone


def test_uniform_children_are_alike_in_every_layer(task):
    assert len(set(uniform(task).layers)) == 1


def test_only_skips_skips(task):
    own = task.space.layers[0].parent
    for choice in only_skips(task).layers:
        assert choice.attention in (own.attention, NoAttention())
        assert choice.ffn in (own.ffn, NoFfn())


def test_most_parameters_has_most(task):
    most = max(
        model_parameters(task.space, child) for child in _every(task.space) if meets(child, task.ceilings, task.costs)
    )
    assert model_parameters(task.space, most_parameters(task)) == most


def test_greedy_leaves_nothing_over_the_limits_and_takes_the_parent_where_it_fits(task):
    free = replace(task, ceilings=[_latency(1.0, task.costs)])
    assert greedy(free) == task.space.parent
    assert math.isfinite(harm_of(task, greedy(task)))


def test_out_of_reach_no_baseline_answers(task):
    hopeless = replace(task, ceilings=[_latency(0.01, task.costs)])
    assert [make(hopeless) for make in BASELINES.values()] == [None] * len(BASELINES)
    assert drawn(hopeless) is None
