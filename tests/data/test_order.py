"""The order is one to one, differs between keys, and favours no place."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from planish.data.order import shuffled


@given(size=st.integers(1, 300), key=st.tuples(st.integers(0, 2**64), st.integers(0, 9)))
def test_every_thing_comes_exactly_once(size, key):
    assert sorted(shuffled(place, size, key) for place in range(size)) == list(range(size))


def test_the_order_depends_on_every_part_of_the_key():
    orders = {
        tuple(shuffled(place, 50, (seed, epoch, stream)) for place in range(50))
        for seed in range(4)
        for epoch in range(4)
        for stream in range(4)
    }
    assert len(orders) == 64


def test_a_position_stays_the_same_in_every_version():
    assert [shuffled(place, 10, (0, 0)) for place in range(10)] == [1, 9, 7, 8, 5, 4, 3, 0, 2, 6]


def test_any_of_a_few_things_may_come_first():
    firsts = Counter(shuffled(0, 5, (seed, 0)) for seed in range(5000))
    # Five standard deviations of a fair draw: sqrt(5000 x 0.2 x 0.8) = 28.3.
    assert all(abs(firsts[thing] - 1000) < 142 for thing in range(5))


def test_a_place_among_very_many_is_reached_at_once():
    size = 10**15
    assert len({shuffled(place, size, (1,)) for place in range(100)}) == 100
    assert all(shuffled(place, size, (1,)) < size for place in range(100))
