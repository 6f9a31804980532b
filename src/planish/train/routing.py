"""What the routers of a step did, as a run's metrics."""

from planish.peaks.dispatch.pipelined import Load


class Routing:
    """Collects the loads of the layers that run forward."""

    def __init__(self) -> None:
        self._loads: list[Load] = []

    def see(self, load: Load) -> None:
        """Take note of one layer's load."""
        self._loads.append(load)

    def take(self) -> dict[str, float]:
        """Return the worst of each number since the last call, of one layer in one microbatch; none without loads."""
        loads, self._loads = self._loads, []
        if not loads:
            return {}
        return {
            "moe/max_over_mean": round(max(each.max_over_mean for each in loads), 4),
            "moe/spilled_rows": max(each.spilled for each in loads),
            "moe/blocks": max(each.blocks for each in loads),
        }


def worst(ranks: list[dict[str, float]]) -> dict[str, float]:
    """Return the worst of each number of what the ranks took."""
    return {name: max(each[name] for each in ranks) for name in ranks[0]}
