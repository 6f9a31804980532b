"""The longest context is the last that does, found in few tries."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planish.plan.longest import longest


@given(bound=st.integers(0, 5000), unit=st.integers(1, 40))
def test_it_is_the_last_multiple_that_does(bound, unit):
    assert longest(lambda context: context <= bound, unit=unit, most=2**20) == (bound // unit * unit or None)


@given(bound=st.integers(64, 10**6))
def test_near_enough_is_within_the_share_and_does(bound):
    found = longest(lambda context: context <= bound, most=2**30, share=64)
    assert bound * 63 / 64 - 1 <= found <= bound


def test_it_asks_few_times_and_not_beyond_the_most():
    asked = []
    longest(lambda context: asked.append(context) or context <= 10**6, most=2**30)
    assert len(asked) <= 2 * (10**6).bit_length() + 1
    asked.clear()
    assert longest(lambda context: asked.append(context) or True, most=1024) == 1023
    assert max(asked) < 1024


@pytest.mark.parametrize("unit", [1, 7])
def test_none_does(unit):
    assert longest(lambda _: False, unit=unit, most=2**10) is None
