"""The slab manager: slots never overlap, never grow, and the pages of a slab are handed out once."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planish.memory.slab import ALIGNMENT, Slab, padded_bytes


def test_pools_of_one_slab_share_no_byte():
    slab = Slab(100 * ALIGNMENT)
    pools = [slab.cut(5000, 7), slab.cut(ALIGNMENT, 3), slab.cut(1, 2)]
    regions = [pool.acquire() for pool in pools for _ in range(pool.num_slots)]
    ranges = sorted((region.offset, region.offset + region.nbytes) for region in regions)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(ranges))
    assert ranges[-1][1] == slab.used_bytes == (7 * 2 + 3 + 2) * ALIGNMENT
    assert all(start % ALIGNMENT == 0 for start, _ in ranges)


def test_more_than_is_left_is_refused_with_its_numbers():
    slab = Slab(10 * ALIGNMENT)
    slab.cut(ALIGNMENT, 9)
    with pytest.raises(ValueError, match=r"2 slots of 4.0 KiB must fit in what is left of the slab, 4.0 KiB"):
        slab.cut(ALIGNMENT, 2)
    assert slab.cut(ALIGNMENT, 1).num_slots == 1


@settings(deadline=None)
@given(st.lists(st.booleans(), max_size=60), st.integers(0, 5))
def test_a_slot_in_use_is_never_handed_out_again(takes, num_slots):
    pool = Slab(num_slots * ALIGNMENT).cut(100, num_slots)
    held = []
    for take in takes:
        if take:
            region = pool.acquire()
            assert (region is None) == (len(held) == num_slots)
            if region is not None:
                assert region not in held
                held.append(region)
        elif held:
            pool.release(held.pop(0))
        assert pool.in_use == len(held)
        assert pool.most_in_use <= num_slots


def test_padding_is_to_whole_pages():
    assert [padded_bytes(size) for size in (0, 1, 4096, 4097)] == [0, 4096, 4096, 8192]
