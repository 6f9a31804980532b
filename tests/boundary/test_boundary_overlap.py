"""Copies hide behind layers exactly when the price says so: to the second in virtual time, and in real threads."""

import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planish.memory.far_host import HostSlab
from planish.memory.far_simulated import Clock, simulated_tier, throttled_tier
from planish.peaks.boundary.store import BoundaryStore
from planish.price.boundary import Boundaries, Depth, least_every, slot_bytes

NUM = 8
NBYTES = 3 * 5 * 16 * 4
FORWARD_S, BACKWARD_S = 1.0, 3.0


def virtual_step(model, copy_s, every):
    """Return the exposed seconds of one step whose layers take FORWARD_S and BACKWARD_S."""
    clock = Clock()
    tier = simulated_tier(HostSlab(NUM * slot_bytes(NBYTES), lock=False), clock, bytes_per_s=NBYTES / copy_s)
    for lane in tier.lanes.values():
        lane.seen = []
    plan = Boundaries(num_boundaries=NUM, num_slots=NUM, every=every)
    with BoundaryStore(plan, depth=Depth(num_boundaries=NUM, boundary_bytes=NBYTES), tiers=[tier]) as store:

        def timed(run):
            def call(layer, hidden, mask):
                seconds = iter((FORWARD_S, BACKWARD_S))

                def body(*args):
                    clock.compute(next(seconds))
                    return layer(*args)

                return run(body, hidden, mask)

            return call

        model(model.tokens(), [timed(store.checkpoint(index)) for index in range(NUM)]).backward()
    return clock.now_s - NUM * (FORWARD_S + BACKWARD_S), tier


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.floats(0.05, 6.0), st.integers(1, 4))
def test_copies_are_hidden_whenever_the_price_says_so(stack, copy_s, every):
    exposed_s, tier = virtual_step(stack(NUM), copy_s, every)
    if least_every(write_s=copy_s, read_s=copy_s, forward_s=FORWARD_S, backward_s=BACKWARD_S) <= every:
        assert exposed_s == pytest.approx(0, abs=1e-9)
        assert tier.hidden_fraction == pytest.approx(1)
    assert exposed_s == pytest.approx(tier.outward.waited_s + tier.inward.waited_s, abs=1e-9)


def test_a_link_half_as_fast_as_a_layer_shows_half_of_its_time_in_forward(stack):
    exposed_s, _ = virtual_step(stack(NUM), 2.0, 1)
    assert exposed_s == pytest.approx(7 * 1.0)  # seven copies of two seconds behind layers of one
    exposed_s, _ = virtual_step(stack(NUM), 4.0, 1)
    assert exposed_s == pytest.approx(7 * 3.0 + 7 * 1.0)


def test_each_copy_is_under_way_beside_the_layer_after_it(stack):
    _, tier = virtual_step(stack(NUM), 0.5, 1)
    forward, turn = range(NUM - 1), NUM * FORWARD_S
    assert tier.lanes["simulated-out"].seen == [(layer * FORWARD_S, layer * FORWARD_S + 0.5) for layer in forward]
    back = [turn + layer * BACKWARD_S for layer in forward]  # the one before, while a layer is computed again
    assert tier.lanes["simulated-in"].seen == [(start, start + 0.5) for start in back]


def test_in_real_threads_at_least_nine_tenths_are_hidden_where_the_price_says_so(stack):
    model = stack(NUM)
    latency_s, layer_s = 0.02, 0.03
    assert least_every(write_s=latency_s, read_s=latency_s, forward_s=layer_s, backward_s=layer_s) == 1
    slow = throttled_tier(HostSlab(NUM * slot_bytes(NBYTES), lock=False), bytes_per_s=1e12, latency_s=latency_s)
    plan = Boundaries(num_boundaries=NUM, num_slots=NUM)
    with BoundaryStore(plan, depth=Depth(num_boundaries=NUM, boundary_bytes=NBYTES), tiers=[slow]) as store:

        def busy(run):
            def call(layer, hidden, mask):
                def body(*args):
                    time.sleep(layer_s)
                    return layer(*args)

                return run(body, hidden, mask)

            return call

        for _ in range(2):
            model(model.tokens(), [busy(store.checkpoint(index)) for index in range(NUM)]).backward()
        assert slow.hidden_fraction >= 0.9
        assert slow.outward.busy_s + slow.inward.busy_s >= 2 * 14 * latency_s
