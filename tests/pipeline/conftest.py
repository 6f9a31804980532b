"""Costs in units of a forward: backward two (its halves one each), the vocabulary's split as the products are."""

import pytest

from planish.pipeline.actions import COLLECTIVES, Head, Kind
from planish.pipeline.costs import Costs

SHARES = {Head.VOCAB_2: (2 / 3, 0, 1 / 3), Head.VOCAB_1: (1 / 3, 0, 2 / 3), Head.NAIVE: (0.3, 0.05, 0.65)}


def unit_costs(num_ranks, num_stages, head, ratio=1.0, *, transfer=0.03, embedding=0.0):
    """Costs in which S, E and T together take `ratio` forwards on each rank."""
    s, e, t = (ratio * share for share in SHARES.get(head, (0, 0, 0)))
    stage = {Kind.F: 1.0, Kind.B: 2.0, Kind.I: 1.0, Kind.W: 1.0}
    vocabulary = {Kind.S: s, Kind.E: e, Kind.T: t, Kind.IF: embedding, Kind.IB: embedding}
    return Costs.uniform(
        num_ranks=num_ranks,
        num_stages=num_stages,
        passes=stage | vocabulary,
        send=transfer,
        collectives=dict.fromkeys(COLLECTIVES, transfer),
    )


@pytest.fixture(scope="session", name="unit_costs")
def _unit_costs():
    return unit_costs
