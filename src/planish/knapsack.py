"""One option per slot under linear budgets, proven the best: a plan's methods, a smaller model's blocks."""

import ctypes
import itertools
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import csr_array, vstack

Table = Sequence[Sequence[float]]  # one value per option of each slot

_SCALE = 1e4  # HiGHS stops within 1e-6 of the optimum: 1e-10 of the widest slot after scaling
_RETRIES = 24  # choices taken back because a limit holds only within the solver's tolerance
_TOLERANCE = 2e-6  # twice the solver's, then a limit is met for certain
_ROUNDING = 1e-12
# HiGHS's presolve lost the optimum where a limit's weights span six decades; it pays in large problems only.
_FEW_OPTIONS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The chosen options' weights sum to at most `at_most`.

    Attributes:
        name: What is limited, with its unit where it has one.
        weights: One weight per option of each slot; `inf` forbids the option.
        at_most: The budget that is left for the slots.
    """

    name: str
    weights: Table
    at_most: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Near:
    """Bounds how many slots choose the same as `chosen` does: distance from an earlier solution, or a trust region."""

    chosen: Sequence[int]
    at_most: int | None = None
    at_least: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What is chosen, and what for.

    Attributes:
        objective: One value per option of each slot, summed over the chosen ones; infinite ones are forbidden.
        limits: Budgets that all hold.
        maximise: Whether more is better.
        second: Among the best, the least sum of these is taken.
        slack: How much of the objective's best value may be given up for `second`, as a share of that value.
        near: Bounds on agreement with earlier solutions.
        excludes: Pairs ((slot, option), (slot, option)) that must not be chosen together.
    """

    objective: Table
    limits: Sequence[Limit] = ()
    maximise: bool = False
    second: Table | None = None
    slack: float = 0.0
    near: Sequence[Near] = ()
    excludes: Sequence[tuple[tuple[int, int], tuple[int, int]]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The best choice that was found.

    Attributes:
        chosen: The option of each slot.
        value: The objective.
        bound: No choice is better than this.
        gap: |value - bound| / |value|; zero when proven.
        proven: Whether the search ended with a proof.
        used: What each limit holds.
        second: The second objective, when there is one.
    """

    chosen: tuple[int, ...]
    value: float
    bound: float
    gap: float
    proven: bool
    used: dict[str, float]
    second: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """How far one limit can go down.

    Attributes:
        name: The limit.
        at_most: What was asked for.
        alone: The least sum when the other limits are ignored.
        beside: The least sum when the others hold; None when they cannot hold together either.
        value: The best objective with this limit raised to `beside`; None with it.
        used: What every limit holds there.
    """

    name: str
    at_most: float
    alone: float
    beside: float | None
    value: float | None
    used: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Infeasible:
    """No choice meets every limit.

    Attributes:
        reaches: One per limit, in their order.
        by_limits: False when the limits could be met but for `near` and `excludes`.
    """

    reaches: tuple[Reach, ...]
    by_limits: bool


def solve(problem: Problem, *, time_limit_s: float = 60.0) -> Solution | Infeasible:
    """Return the choice with the best objective, one option per slot, or what stands in its way.

    min (or max) sum_i objective[i][j_i]  subject to  sum_i weights[i][j_i] <= at_most for each limit.
    The limits hold exactly as summed in float64, not only within the solver's tolerance. A proof reaches as far as that
    tolerance: differences inside a table that are below a millionth of its widest slot may be taken for none.

    Args:
        problem: What is chosen.
        time_limit_s: For each search, twice that where its result holds within the solver's tolerance only; the best
            choice until then is returned with its gap.

    Raises:
        ValueError: The tables do not have one value per option, a value is not a number, or a slot has no option left.
        TimeoutError: Nothing feasible was found in time, and nothing was proven.
    """
    widths = _widths(problem)
    signed = -1.0 if problem.maximise else 1.0
    found = _search(problem, _flat(problem.objective) * signed, widths, time_limit_s)
    if found is None:
        return explain(problem, time_limit_s=time_limit_s)
    chosen, least = found
    value = _sum(problem.objective, chosen)
    bound = signed * min(least, signed * value)
    # Rounding inside the solver is of the size of what one slot can change, not of a slot's own value.
    exact = bool(abs(value - bound) <= 1e-8 * _spread(problem.objective) + _ROUNDING * abs(value))
    if exact:
        bound = value
    if problem.second is not None:
        chosen = _break_ties(problem, problem.second, chosen, value, time_limit_s)
    return Solution(
        chosen=chosen,
        value=_sum(problem.objective, chosen),
        bound=bound,
        gap=0.0 if exact else abs(value - bound) / max(abs(value), 1e-300),
        proven=exact,
        used={limit.name: _sum(limit.weights, chosen) for limit in problem.limits},
        second=None if problem.second is None else _sum(problem.second, chosen),
    )


def explain(problem: Problem, *, time_limit_s: float = 60.0) -> Infeasible:
    """Return how far each limit can go down, alone and beside the others, and what is the best objective there.

    Args:
        problem: Usually one that `solve` could not meet.
        time_limit_s: For each search.
    """
    bare = replace(problem, near=(), excludes=(), second=None)
    nothing = np.where(np.isfinite(_flat(problem.objective)), 0.0, np.inf)
    if _search(bare, nothing, _widths(problem), time_limit_s) is not None:
        return Infeasible(reaches=(), by_limits=False)
    return Infeasible(reaches=tuple(_reach(bare, limit, time_limit_s) for limit in problem.limits), by_limits=True)


def prices(problem: Problem) -> dict[str, float]:
    """Return what one more unit of each limit is worth in the objective, from the relaxation; empty if it has none.

    Positive: the objective gets better by so much.
    """
    widths, cost = _widths(problem), _flat(problem.objective) * (-1.0 if problem.maximise else 1.0)
    usable = _usable(problem)
    rows = np.stack([_flat(limit.weights)[usable] for limit in problem.limits]) if problem.limits else None
    solved = linprog(
        cost[usable],
        A_ub=rows,
        b_ub=[limit.at_most for limit in problem.limits] or None,
        A_eq=_one_each(widths)[:, usable],
        b_eq=np.ones(len(widths)),
        bounds=(0, 1),
    )
    if solved.status != 0:
        return {}
    return {limit.name: -float(dual) for limit, dual in zip(problem.limits, solved.ineqlin.marginals, strict=True)}


def _reach(problem: Problem, limit: Limit, time_limit_s: float) -> Reach:
    slots = np.split(np.where(_usable(problem), _flat(limit.weights), np.inf), np.cumsum(_widths(problem))[:-1])
    alone = math.fsum(float(slot.min()) for slot in slots)
    others = [other for other in problem.limits if other is not limit]
    least = _least(replace(problem, limits=others), limit.weights, time_limit_s)
    if least is None:
        return Reach(name=limit.name, at_most=limit.at_most, alone=alone, beside=None, value=None, used={})
    beside = _sum(limit.weights, least)
    raised = replace(problem, limits=[*others, replace(limit, at_most=beside)])
    best = solve(raised, time_limit_s=time_limit_s)
    chosen = best.chosen if isinstance(best, Solution) else least
    return Reach(
        name=limit.name,
        at_most=limit.at_most,
        alone=alone,
        beside=beside,
        value=_sum(problem.objective, chosen),
        used={each.name: _sum(each.weights, chosen) for each in problem.limits},
    )


def _least(problem: Problem, weights: Table, time_limit_s: float) -> tuple[int, ...] | None:
    """Return the choice with the least sum of `weights` under the problem's limits, or None."""
    cost = np.where(np.isfinite(_flat(problem.objective)), _flat(weights), np.inf)
    found = _search(problem, cost, _widths(problem), time_limit_s)
    return None if found is None else found[0]


def _break_ties(
    problem: Problem, second: Table, chosen: tuple[int, ...], value: float, time_limit_s: float
) -> tuple[int, ...]:
    signed = -1.0 if problem.maximise else 1.0
    allowed = signed * value + abs(value) * (problem.slack + _ROUNDING)
    costs = [[signed * cost for cost in row] for row in problem.objective]
    fixed = Limit(name="objective", weights=costs, at_most=allowed)
    narrowed = replace(problem, limits=[*problem.limits, fixed], second=None)
    try:
        found = _least(narrowed, second, time_limit_s)
    except TimeoutError:  # the best is known, among its equals none was found in time
        return chosen
    return chosen if found is None or _sum(second, found) >= _sum(second, chosen) else found


def _search(
    problem: Problem, cost: np.ndarray, widths: list[int], time_limit_s: float
) -> tuple[tuple[int, ...], float] | None:
    """Return the choice of least `cost` and a lower bound of it; None: there is no choice."""
    starts = np.cumsum([0, *widths])
    kept = _usable(problem) & np.isfinite(cost)
    if not (problem.near or problem.excludes):
        kept &= ~_dominated(problem, np.where(kept, cost, np.inf), starts)
    if not all(kept[a:b].any() for a, b in itertools.pairwise(starts)):
        return None
    floor = np.concatenate([np.full(b - a, cost[a:b][kept[a:b]].min()) for a, b in itertools.pairwise(starts)])
    lifted = np.where(kept, cost - floor, 0.0)
    scale = _SCALE / (lifted.max() or 1.0)
    base = math.fsum(floor[starts[:-1]])
    rows, tops = _rows(problem, kept, starts)
    bounds, equal = Bounds(0, kept.astype(float)), LinearConstraint(_one_each(widths), 1, 1)
    bound, end = -np.inf, time.monotonic() + time_limit_s
    for trial in range(_RETRIES + 1):
        margin = 0.0 if trial < _RETRIES and (trial == 0 or time.monotonic() < end) else _TOLERANCE
        limits = [LinearConstraint(vstack(rows).tocsr(), -np.inf, np.array(tops) - margin)] if rows else []
        with silent():
            solved = milp(
                lifted * scale,
                integrality=np.ones(len(cost)),
                bounds=bounds,
                constraints=[equal, *limits],
                options={"time_limit": time_limit_s, "mip_rel_gap": 0.0, "presolve": bool(kept.sum() > _FEW_OPTIONS)},
            )
        if solved.x is None and solved.status == 1:
            raise TimeoutError(f"no choice was found in {time_limit_s:g} s; `time_limit_s` was too short.")
        if solved.x is None:
            return None
        if not margin:
            bound = float(base + solved.mip_dual_bound / scale)
        picked = np.array([a + int(np.argmax(solved.x[a:b])) for a, b in itertools.pairwise(starts)])
        chosen = tuple(int(k) for k in picked - starts[:-1])
        if all(_sum(limit.weights, chosen) <= limit.at_most for limit in problem.limits):
            return chosen, bound
        # Met within the solver's tolerance only: exactly this choice is taken back, nothing else.
        if margin:
            break
        rows.append(csr_array((np.ones(len(picked)), (np.zeros(len(picked), int), picked)), shape=(1, len(cost))))
        tops.append(len(picked) - 1)
    return None


@contextmanager
def silent() -> Iterator[None]:
    """Keep off the process's standard output what C code writes there: HiGHS says some things past every setting."""
    sys.stdout.flush()
    flush = ctypes.CDLL(None).fflush
    try:
        kept = os.dup(1)
    except OSError:  # closed: nothing can be written there
        yield
        return
    flush(None)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    try:
        yield
    finally:
        flush(None)
        os.dup2(kept, 1)
        os.close(kept)


def _rows(problem: Problem, kept: np.ndarray, starts: np.ndarray) -> tuple[list[csr_array], list[float]]:
    """Return the rows and upper ends of all limits, each lifted by its slots' least and scaled to one."""
    rows, tops = [], []
    for limit in problem.limits:
        weights = np.where(kept, _flat(limit.weights), 0.0)
        least = np.array([weights[a:b][kept[a:b]].min() for a, b in itertools.pairwise(starts)])
        lifted = np.where(kept, weights - np.repeat(least, np.diff(starts)), 0.0)
        scale = lifted.max() or 1.0
        rows.append(csr_array(lifted[None] / scale))
        tops.append((limit.at_most - math.fsum(least)) / scale)
    for near in problem.near:
        same = np.zeros(len(kept))
        same[starts[:-1] + np.asarray(near.chosen)] = 1.0
        for side, end in ((1.0, near.at_most), (-1.0, None if near.at_least is None else -near.at_least)):
            if end is not None:
                rows.append(csr_array(side * same[None]))
                tops.append(float(end))
    for pair in problem.excludes:
        both = np.zeros(len(kept))
        for slot, option in pair:
            both[starts[slot] + option] = 1.0
        rows.append(csr_array(both[None]))
        tops.append(1.0)
    return rows, tops


def _dominated(problem: Problem, cost: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return the options that another of their slot is as good as in everything (the first of equals stays).

    Forbidden options cost infinitely much, and so dominate nothing that is open.
    """
    columns = np.stack([cost, *(_flat(limit.weights) for limit in problem.limits)])
    out = np.zeros(len(cost), dtype=bool)
    for a, b in itertools.pairwise(starts):
        slot = columns[:, a:b]
        no_worse = (slot[:, :, None] <= slot[:, None, :]).all(0)  # [k, j]: k is as good as j
        before = np.triu(np.ones((b - a, b - a), dtype=bool), 1)
        out[a:b] = (no_worse & (~no_worse.T | before)).any(0)
    return out


def _usable(problem: Problem) -> np.ndarray:
    tables = [problem.objective, *(limit.weights for limit in problem.limits)]
    return np.isfinite(np.stack([_flat(table) for table in tables])).all(0)


def _one_each(widths: list[int]) -> csr_array:
    slots = np.repeat(np.arange(len(widths)), widths)
    return csr_array((np.ones(len(slots)), (slots, np.arange(len(slots)))), shape=(len(widths), len(slots)))


def _widths(problem: Problem) -> list[int]:
    widths = [len(row) for row in problem.objective]
    if not widths or 0 in widths:
        raise ValueError("`objective` needs at least one slot, and every slot an option.")
    tables = {"second": problem.second} if problem.second is not None else {}
    for name, table in {**tables, **{limit.name: limit.weights for limit in problem.limits}}.items():
        if [len(row) for row in table] != widths:
            raise ValueError(f"`{name}` must have one value per option of `objective`; the sizes differ.")
    for name, table in {"objective": problem.objective, **tables}.items():
        if np.isnan(_flat(table)).any():
            raise ValueError(f"`{name}` holds a value that is not a number.")
    for limit in problem.limits:
        if np.isnan(_flat(limit.weights)).any() or math.isnan(limit.at_most):
            raise ValueError(f"`{limit.name}` holds a value that is not a number.")
    usable = np.split(_usable(problem), np.cumsum(widths)[:-1])
    for slot, options in enumerate(usable):
        if not options.any():
            raise ValueError(f"slot {slot} has no option with finite values in every table.")
    return widths


def _flat(table: Table) -> np.ndarray:
    return np.concatenate([np.asarray(row, dtype=np.float64) for row in table])


def _sum(table: Table, chosen: Sequence[int]) -> float:
    return math.fsum(float(row[k]) for row, k in zip(table, chosen, strict=True))


def _spread(table: Table) -> float:
    rows = [[value for value in row if math.isfinite(value)] for row in table]
    return max(max(row) - min(row) for row in rows)
