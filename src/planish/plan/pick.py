"""One option per slot within budgets, found by branch and bound: what `planish.knapsack` finds, where options are few.

[Note: why not HiGHS] A plan has five slots and a few thousand ways to fill them. Those are searched in less time than
it takes to load a solver, and exactly: no tolerance of a solver has to be taken back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum
from operator import sub

Table = Sequence[Sequence[float]]  # one value per option of each slot

_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The chosen options' weights sum to at most `at_most`.

    Attributes:
        weights: One weight per option of each slot.
        at_most: What is left for the slots.
    """

    weights: Table
    at_most: float


def pick(
    seconds: Table,
    budgets: Sequence[Budget],
    *,
    second: Table,
    slack: float,
    but: frozenset[tuple[int, ...]] = frozenset(),
) -> tuple[int, ...] | None:
    """Return the option of each slot; None where nothing is within all budgets.

    min sum_i seconds[i][j_i]  subject to  sum_i weights[i][j_i] <= at_most for each budget; then, of all that take at
    most `slack` more than that, min sum_i second[i][j_i].

    Exactness:     proven the best, sums in float64; of equals the first one.

    Args:
        seconds: One value per option of each slot.
        budgets: All of them hold.
        second: As `seconds`, what breaks ties.
        slack: How much of the least sum may be given up for `second`, as a share of it.
        but: What is not to be found again.

    Example:
        >>> pick([[3.0, 1.0], [2.0, 1.0]], [Budget(weights=[[0, 5], [0, 5]], at_most=5)], second=[[0, 1]] * 2, slack=0)
        (1, 0)
    """
    chosen = _least(seconds, budgets, but)
    if chosen is None:
        return None
    value = _sum(seconds, chosen)
    most = value + abs(value) * (slack + _ROUNDING)
    simpler = _least(second, budgets, but, within=(seconds, most))
    return chosen if simpler is None or _sum(second, simpler) >= _sum(second, chosen) else simpler


def _least(
    cost: Table, budgets: Sequence[Budget], but: frozenset[tuple[int, ...]], within: tuple[Table, float] | None = None
) -> tuple[int, ...] | None:
    """Return the choice of least `cost` within the budgets, and of which another sum is at most so much."""
    rows = [(each.weights, each.at_most) for each in budgets] + ([] if within is None else [within])
    room = [at_most - sum(map(min, weights)) + _ROUNDING * abs(at_most) for weights, at_most in rows]
    over, dear = [_lifted(weights) for weights, _ in rows], _lifted(cost)
    more = [[[each[slot][option] for each in over] for option in range(len(row))] for slot, row in enumerate(dear)]
    order = [sorted(range(len(row)), key=row.__getitem__) for row in dear]
    best: tuple[float, tuple[int, ...]] | None = None

    def holds(chosen: tuple[int, ...]) -> bool:
        return all(_sum(weights, chosen) <= at_most for weights, at_most in rows)

    def fill(chosen: tuple[int, ...], spent: float, left: list[float]) -> None:
        nonlocal best
        slot = len(chosen)
        if slot < len(dear):
            for option in order[slot]:
                sum_ = spent + dear[slot][option]
                if best is not None and sum_ > best[0]:
                    break
                after = list(map(sub, left, more[slot][option]))
                if min(after, default=0) >= 0:
                    fill((*chosen, option), sum_, after)
        elif chosen not in but and (best is None or spent < best[0]) and holds(chosen):
            best = spent, chosen

    if min(room, default=0) >= 0:
        fill((), 0.0, room)
    return None if best is None else best[1]


def _lifted(table: Table) -> list[list[float]]:
    """Return what each option takes more than the least of its slot."""
    return [[each - min(row) for each in row] for row in table]


def _sum(table: Table, chosen: tuple[int, ...]) -> float:
    return fsum(row[option] for row, option in zip(table, chosen, strict=True))
