"""80 layers of 54 options under two budgets: seconds to a proven optimum.

Drawn, not measured, costs: `drawn` are independent, the hardest kind; `sloped` get better with size, as blocks do.
"""

import numpy as np

from harness import interleave, write_result
from planish.knapsack import Limit, Problem, solve

LAYERS, OPTIONS, SEEDS = 80, 54, range(2)


def main() -> None:
    """Solve each drawn problem three times and write the seconds."""
    figures = {}
    for kind in ("drawn", "sloped"):
        for seed in SEEDS:
            problem = _draw(kind, seed)
            times = interleave({"solve": lambda problem=problem: solve(problem)}, rounds=3)
            found = solve(problem)
            figures[f"{kind} {seed}"] = {"seconds": times["solve"], "proven": found.proven, "value": found.value}
    print(write_result("knapsack", figures, seed=0))


def _draw(kind: str, seed: int) -> Problem:
    cost, size, time = np.random.default_rng(seed).random((3, LAYERS, OPTIONS))
    share = 0.2 if kind == "drawn" else 0.5
    limits = [
        Limit(name="bytes", weights=size, at_most=share * LAYERS),
        Limit(name="s", weights=time, at_most=share * LAYERS),
    ]
    return Problem(objective=cost if kind == "drawn" else cost * (2 - size) * (2 - time), limits=limits)


if __name__ == "__main__":
    main()
