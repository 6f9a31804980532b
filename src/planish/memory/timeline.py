"""Live bytes over one step, in a fixed number of points that always include the largest."""

from planish.memory.book import Phase

Point = tuple[float, int, Phase]


class Timeline:
    """Keeps at most `max_points` of the points it is given; of neighbours that must merge, the larger stays.

    Memory: `2 * max_points` points while recording.
    Exactness: the maximum is never lost, wherever it comes; other points are those of their neighbourhood's maximum.
    """

    def __init__(self, max_points: int = 2000) -> None:
        self._max_points = max_points
        self.clear()

    def clear(self) -> None:
        """Forget all points."""
        self._points: list[Point] = []
        self._stride = 1
        self._held: Point | None = None
        self._num_held = 0

    def add(self, seconds: float, live_bytes: int, phase: Phase) -> None:
        """Add a point, later than all before."""
        held = self._held
        if held is None or live_bytes >= held[1]:
            self._held = (seconds, live_bytes, phase)
        self._num_held += 1
        if self._num_held >= self._stride:
            self._flush()

    def points(self) -> tuple[Point, ...]:
        """Return the points in order of time."""
        points = self._points if self._held is None else [*self._points, self._held]
        while len(points) > self._max_points:
            points = _halve(points)
        return tuple(points)

    def _flush(self) -> None:
        assert self._held is not None
        self._points.append(self._held)
        self._held = None
        self._num_held = 0
        if len(self._points) >= 2 * self._max_points:
            self._points = _halve(self._points)
            self._stride *= 2


def _halve(points: list[Point]) -> list[Point]:
    """Return the larger of each two neighbours."""
    return [max(points[start : start + 2], key=lambda point: point[1]) for start in range(0, len(points), 2)]
