"""One option per slot within budgets: what the solver finds, exactly."""

from hypothesis import given, settings
from hypothesis import strategies as st

from planish.knapsack import Infeasible, Limit, Near, Problem, solve
from planish.plan.pick import Budget, pick

_WIDTHS = st.lists(st.integers(1, 4), min_size=1, max_size=5)


@st.composite
def _problems(draw):
    widths = draw(_WIDTHS)

    def table(numbers):
        return [[draw(numbers) for _ in range(width)] for width in widths]

    seconds = [[each / 4 for each in row] for row in table(st.integers(-40, 40))]
    budgets = [
        Budget(weights=table(st.integers(-20, 20)), at_most=draw(st.integers(-30, 60)))
        for _ in range(draw(st.integers(0, 3)))
    ]
    return seconds, budgets, table(st.integers(0, 3)), draw(st.sampled_from([0.0, 0.3]))


def _solved(seconds, budgets, second, slack, ruled_out=()):
    limits = [Limit(name=str(n), weights=each.weights, at_most=each.at_most) for n, each in enumerate(budgets)]
    near = [Near(chosen=each, at_most=len(seconds) - 1) for each in ruled_out]
    found = solve(Problem(objective=seconds, limits=limits, second=second, slack=slack, near=near))
    return None if isinstance(found, Infeasible) else found.chosen


def _sum(table, chosen):
    return sum(row[option] for row, option in zip(table, chosen, strict=True))


@settings(deadline=None, max_examples=60)
@given(_problems())
def test_it_is_as_good_as_what_the_solver_proves(problem):
    seconds, budgets, second, slack = problem
    mine, theirs = (
        pick(seconds, budgets, second=second, slack=slack),
        _solved(seconds, budgets, second, slack),
    )
    assert (mine is None) == (theirs is None)
    if mine is not None:
        assert all(_sum(each.weights, mine) <= each.at_most for each in budgets)
        assert _sum(second, mine) == _sum(second, theirs)
        assert slack or _sum(seconds, mine) == _sum(seconds, theirs)


@settings(deadline=None, max_examples=30)
@given(_problems())
def test_what_is_ruled_out_is_not_found_again(problem):
    seconds, budgets, second, _ = problem
    ruled_out = frozenset()
    before = float("-inf")
    while (chosen := pick(seconds, budgets, second=second, slack=0.0, but=ruled_out)) is not None:
        assert chosen not in ruled_out
        assert _sum(seconds, chosen) >= before
        before = _sum(seconds, chosen)
        ruled_out |= {chosen}
    assert len(ruled_out) == sum(
        all(_sum(each.weights, chosen) <= each.at_most for each in budgets) for chosen in _every(seconds)
    )


def _every(seconds):
    found = [()]
    for row in seconds:
        found = [(*each, option) for each in found for option in range(len(row))]
    return found
