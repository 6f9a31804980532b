"""The timeline keeps its size, its order and its maximum, whatever it is given."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planish.memory.timeline import Timeline


@settings(deadline=None)
@given(values=st.lists(st.integers(0, 1000), max_size=300), max_points=st.integers(1, 9))
def test_the_maximum_stays_among_at_most_max_points_in_order(values, max_points):
    timeline = Timeline(max_points)
    given_points = [(float(seconds), live_bytes, "forward") for seconds, live_bytes in enumerate(values)]
    for count, point in enumerate(given_points, start=1):
        timeline.add(*point)
        kept = timeline.points()
        assert len(kept) == min(count, max_points) or (len(kept) < max_points and count > max_points)
        assert len(kept) >= min(count, max_points) / 2
        assert list(kept) == sorted(set(kept), key=lambda point: point[0])
        assert set(kept) <= set(given_points)
        assert max(kept, key=lambda point: point[1])[1] == max(values[:count])


@pytest.mark.parametrize("where", [0, 1, 777, 49_999, 99_998, 99_999])
def test_a_spike_among_many_points_survives_and_the_rest_is_spread_evenly(where):
    timeline = Timeline()
    for index in range(100_000):
        timeline.add(index * 1e-3, 10**9 if index == where else index % 7, "backward")
    points = timeline.points()
    assert (where * 1e-3, 10**9, "backward") in points
    assert 1000 <= len(points) <= 2000
    seconds = [point[0] for point in points]
    assert max(later - earlier for earlier, later in itertools.pairwise(seconds)) < 0.3


def test_clear_forgets():
    timeline = Timeline()
    timeline.add(0.0, 1, "init")
    timeline.clear()
    assert timeline.points() == ()
