"""Peaks that others published come out of our prices, in their order."""

import sys
from itertools import pairwise
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def published(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.delitem(sys.modules, "published_peaks", raising=False)
    import published_peaks

    return published_peaks


def test_every_published_peak_is_within_15_per_cent(published):
    for name, case in {**published.LADDER, **published.OTHERS}.items():
        row = published.compare(case)
        assert abs(row["difference"]) < 0.15, name


def test_the_ladder_is_in_its_order(published):
    predicted = [each.predicted() for each in list(published.LADDER.values())[1:]]
    assert all(before > after for before, after in pairwise(predicted))
    assert predicted[3] < 80 * 10**9 < 2 * predicted[0]
