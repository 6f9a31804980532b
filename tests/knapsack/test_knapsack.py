"""The best choice under budgets, against every choice there is."""

import ctypes
import itertools
import math
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planish import knapsack
from planish.knapsack import Infeasible, Limit, Near, Problem, Solution, explain, prices, silent, solve


def _total(table, chosen):
    return math.fsum(row[k] for row, k in zip(table, chosen, strict=True))


def _allowed(problem, chosen):
    same = [sum(a == b for a, b in zip(near.chosen, chosen, strict=True)) for near in problem.near]
    return (
        math.isfinite(_total(problem.objective, chosen))
        and all(_total(limit.weights, chosen) <= limit.at_most for limit in problem.limits)
        and all(near.at_most is None or s <= near.at_most for near, s in zip(problem.near, same, strict=True))
        and all(near.at_least is None or s >= near.at_least for near, s in zip(problem.near, same, strict=True))
        and not any(all(chosen[slot] == option for slot, option in pair) for pair in problem.excludes)
    )


def _every(problem):
    choices = itertools.product(*(range(len(row)) for row in problem.objective))
    return [chosen for chosen in choices if _allowed(problem, chosen)]


@st.composite
def _problems(draw):
    widths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    # Few distinct values make ties and limits that are met exactly; wide ones try the scaling.
    value = st.sampled_from([0.0, 0.1, 0.2, 0.3, 1.0, 2.5, 7.0]) | st.integers(-40_000, 40_000).map(float)
    table = st.tuples(*(st.lists(value, min_size=w, max_size=w) for w in widths))
    limits = []
    for index in range(draw(st.integers(0, 2))):
        weights = draw(table)
        picked = [draw(st.integers(0, w - 1)) for w in widths]
        limits.append(Limit(name=f"limit {index}", weights=weights, at_most=_total(weights, picked)))
    slots = st.tuples(*(st.integers(0, w - 1) for w in widths))
    near = [
        Near(chosen=draw(slots), at_most=draw(st.none() | st.integers(0, len(widths))))
        for _ in range(draw(st.integers(0, 2)))
    ]
    near += [Near(chosen=draw(slots), at_least=draw(st.integers(0, len(widths))))] * draw(st.integers(0, 1))
    return Problem(
        objective=draw(table),
        limits=limits,
        maximise=draw(st.booleans()),
        second=draw(st.none() | table),
        near=near,
    )


@settings(max_examples=150, deadline=None)
@given(_problems())
def test_the_choice_is_the_best_of_all(problem):
    every = _every(problem)
    found = solve(problem)
    if not every:
        assert isinstance(found, Infeasible)
        return
    assert isinstance(found, Solution)
    assert found.chosen in every
    best = (max if problem.maximise else min)(_total(problem.objective, chosen) for chosen in every)
    spread = max(max(row) - min(row) for row in problem.objective)
    assert abs(found.value - best) <= 1e-8 * spread + 1e-12 * abs(best)
    assert found.proven
    assert found.gap == 0
    assert found.used == {limit.name: _total(limit.weights, found.chosen) for limit in problem.limits}


whole = st.integers(0, 5).map(float)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.lists(st.tuples(whole, whole, whole), min_size=1, max_size=4), min_size=1, max_size=4),
    st.integers(0, 12),
)
def test_of_the_best_the_least_of_the_second(slots, budget):
    first, second, weights = ([[option[k] for option in slot] for slot in slots] for k in range(3))
    problem = Problem(
        objective=first, second=second, limits=[Limit(name="bytes", weights=weights, at_most=float(budget))]
    )
    every = _every(problem)
    found = solve(problem)
    if every:
        order = min((_total(first, chosen), _total(second, chosen)) for chosen in every)
        assert (found.value, found.second) == order


def test_slack_gives_up_so_much_of_the_objective_and_no_more():
    problem = Problem(objective=[[100.0, 101.0, 105.0]], second=[[9.0, 1.0, 0.0]], slack=0.02)
    assert solve(problem).chosen == (1,)


@settings(max_examples=60, deadline=None)
@given(_problems())
def test_what_cannot_be_met_says_how_far_each_limit_goes_down(problem):
    limits = [
        Limit(name=x.name, weights=x.weights, at_most=x.at_most - 1e-3 * (1 + abs(x.at_most))) for x in problem.limits
    ]
    bare = Problem(objective=problem.objective, limits=limits, maximise=problem.maximise)
    if _every(bare):
        return
    told = solve(bare)
    assert told.by_limits
    better = max if problem.maximise else min
    for limit, reach in zip(limits, told.reaches, strict=True):
        assert reach.alone == math.fsum(min(row) for row in limit.weights)
        others = _every(Problem(objective=bare.objective, limits=[x for x in limits if x is not limit]))
        assert (reach.beside is None) == (not others)
        if others:
            least = min(_total(limit.weights, chosen) for chosen in others)
            spread = max(max(row) - min(row) for row in limit.weights)
            assert reach.beside == pytest.approx(least, rel=1e-12, abs=1e-8 * spread)
            there = [chosen for chosen in others if _total(limit.weights, chosen) <= reach.beside]
            best = better(_total(bare.objective, chosen) for chosen in there)
            width = max(max(row) - min(row) for row in bare.objective)
            assert reach.value == pytest.approx(best, rel=1e-12, abs=1e-8 * width)


def test_what_is_excluded_is_not_chosen_together():
    table = [[0.0, 3.0], [0.0, 1.0]]
    found = solve(Problem(objective=table, excludes=[((0, 0), (1, 0))]))
    assert found.chosen == (0, 1)


def test_an_infinite_weight_forbids_an_option():
    limit = Limit(name="bytes", weights=[[math.inf, 5.0]], at_most=9.0)
    assert solve(Problem(objective=[[0.0, 1.0]], limits=[limit])).chosen == (1,)
    assert explain(Problem(objective=[[0.0, 1.0]], limits=[limit])).by_limits is False


def test_cuts_that_forbid_everything_are_told_from_limits():
    told = solve(Problem(objective=[[0.0]], near=[Near(chosen=[0], at_most=0)]))
    assert told == Infeasible(reaches=(), by_limits=False)


def test_a_limit_met_by_a_hair_too_much_is_not_met():
    weights = [[1.0, 0.0], [1.0 + 1e-9, 0.0]]
    problem = Problem(objective=[[0.0, 1.0], [0.0, 2.0]], limits=[Limit(name="s", weights=weights, at_most=2.0)])
    assert solve(problem).chosen == (1, 0)


def test_more_hairs_than_there_are_retries_end_in_a_choice_that_is_allowed():
    weights = [[1.0 + 1e-9, 0.0]] * 12
    problem = Problem(objective=[[0.0, 1.0]] * 12, limits=[Limit(name="s", weights=weights, at_most=6.0)])
    found = solve(problem)
    assert (sum(k == 0 for k in found.chosen), found.value) == (5, 7.0)


@pytest.mark.parametrize("seed", range(2))
def test_eighty_layers_of_54_options_under_two_limits_are_proven(seed):
    random = np.random.default_rng(seed)
    cost, byte, time = random.random((3, 80, 54))
    limits = [
        Limit(name="bytes", weights=byte, at_most=0.5 * byte.max(1).sum()),
        Limit(name="s", weights=time, at_most=0.5 * time.max(1).sum()),
    ]
    assert solve(Problem(objective=cost * (2 - byte) * (2 - time), limits=limits)).proven


def test_the_price_of_a_limit_is_what_more_of_it_is_worth():
    limit = Limit(name="s", weights=[[2.0, 0.0], [1.0, 0.0]], at_most=2.0)
    problem = Problem(objective=[[0.0, 6.0], [0.0, 1.0]], limits=[limit])
    assert prices(problem) == {"s": pytest.approx(1.0)}


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (Problem(objective=[]), "at least one slot"),
        (Problem(objective=[[0.0]], limits=[Limit(name="s", weights=[[0.0, 1.0]], at_most=1.0)]), "`s` must have one"),
        (Problem(objective=[[math.nan]]), "`objective` holds"),
        (Problem(objective=[[math.inf]]), "slot 0 has no option"),
        (Problem(objective=[[0.0]], limits=[Limit(name="s", weights=[[0.0]], at_most=math.nan)]), "`s` holds"),
    ],
)
def test_bad_tables_are_named(problem, message):
    with pytest.raises(ValueError, match=message):
        solve(problem)


def test_what_a_solver_writes_past_python_is_not_seen(capfd):
    libc = ctypes.CDLL(None)
    print("before")
    with silent():
        libc.puts(b"from C")
        os.write(1, b"from the system")
    print("after")
    assert capfd.readouterr().out == "before\nafter\n"


def test_tables_may_be_arrays_and_ties_are_broken_in_them():
    table = np.zeros((3, 2))
    assert solve(Problem(objective=table, second=np.array([[1.0, 0.0]] * 3))).chosen == (1, 1, 1)


def test_choices_within_the_solvers_tolerance_only_share_the_time_limit(monkeypatch):
    """Seventy choices of four slots each miss the limit by a billionth: they are not searched one after the other."""
    now, calls, real = [0.0], [], knapsack.milp

    def slow(*given, **how):
        calls.append(how["options"]["time_limit"])
        now[0] += 60
        return real(*given, **how)

    monkeypatch.setattr(knapsack, "milp", slow)
    monkeypatch.setattr(knapsack.time, "monotonic", lambda: now[0])
    limit = Limit(name="room", weights=[[0.0, 1.0]] * 8, at_most=4 - 1e-9)
    found = solve(Problem(objective=[[0.0, 1.0]] * 8, limits=[limit], maximise=True))
    assert sum(found.chosen) == 3
    assert len(calls) == 2
