import math
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from planish.report.axis import Axis, columns
from planish.report.svg import spread

finite = st.floats(-1e12, 1e12)


@pytest.mark.parametrize(
    ("high_bytes", "unit", "texts"),
    [
        (3 * 2**30, "GiB", ["0", "1", "2", "3"]),
        (1.7 * 2**30, "GiB", ["0", "0.5", "1", "1.5"]),
        (600 * 2**20, "MiB", ["0", "128", "256", "384", "512"]),
        (70 * 2**30, "GiB", ["0", "16", "32", "48", "64"]),
        (0, "KiB", ["0", "0.25", "0.5", "0.75", "1"]),
    ],
)
def test_byte_ticks_are_multiples_of_powers_of_two(high_bytes, unit, texts):
    axis = Axis.of_bytes(high_bytes, 0.0, 100.0)
    assert (axis.unit, [text for _, text in axis.ticks]) == (unit, texts)


def test_step_ticks_are_whole_numbers():
    assert [text for _, text in Axis.of_steps(1, 4, 0.0, 800.0).ticks] == ["1", "2", "3", "4"]
    assert [text for _, text in Axis.of_steps(7, 7, 0.0, 800.0).ticks] == ["7"]
    assert [text for _, text in Axis.of_steps(1, 100_000, 0.0, 400.0).ticks] == ["50,000", "100,000"]


@given(low=finite, high=finite)
@example(low=0.0, high=0.0)
@example(low=3.0, high=3.0000000000000004)
def test_a_number_axis_holds_its_values_and_a_readable_number_of_ticks(low, high):
    low, high = min(low, high), max(low, high)
    axis = Axis.of_numbers(low, high, 200.0, 0.0, unit="nats")
    assert -1e-6 <= axis.at(high) <= axis.at(low) <= 200 + 1e-6
    assert 1 <= len(axis.ticks) <= 8
    assert all(-1e-6 <= axis.at(value) <= 200 + 1e-6 for value, _ in axis.ticks)


@given(st.floats(0, 1e7))
def test_a_time_axis_begins_at_zero_and_ends_at_the_end(seconds):
    axis = Axis.of_seconds(seconds, 50.0, 600.0)
    assert axis.at(0.0) == 50.0
    assert seconds < 1e-6 or math.isclose(axis.at(seconds), 600.0)
    assert axis.ticks[0][0] == 0.0


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=3000))
def test_columns_keep_every_extreme_on_a_pixel_grid(values):
    series = list(enumerate(values, start=1))
    axis = Axis.of_steps(1, len(values), 50.0, 450.0)
    found = columns(series, axis)
    assert len(found) <= 401
    assert [column.x for column in found] == sorted({float(round(axis.at(step))) for step, _ in series})
    assert min(column.low for column in found) == min(values)
    assert max(column.high for column in found) == max(values)
    slack = 1e-9 * max(1.0, *map(abs, values))
    assert all(column.low - slack <= column.mean <= column.high + slack for column in found)


@given(st.lists(st.floats(0, 300), max_size=12))
def test_labels_stay_apart_and_inside(centres):
    placed = spread(sorted(centres), 17.0, 10.0, 290.0)
    assert len(placed) == len(centres)
    assert all(after - before >= 17.0 - 1e-9 for before, after in pairwise(placed))
    assert all(10.0 - 1e-9 <= place <= 290.0 + 1e-9 for place in placed)


def test_labels_that_are_apart_already_stay_where_they_are():
    assert spread([20.0, 60.0, 100.0], 17.0, 10.0, 290.0) == [20.0, 60.0, 100.0]
