"""The choice bounds as little as the budget allows, and says why."""

from planish.methods import Blocked, Checkpoint, Packed, Plain, Plan
from planish.plan.choose import choose

GIB = 2**30


def price(plan):
    """Return 100 GiB, and what each plain peak adds."""
    added = {"attention": 40, "vocab": 30, "boundary": 20}
    return GIB * (100 + sum(size for peak, size in added.items() if isinstance(getattr(plan, peak), Plain)))


def chosen(budget, named=()):
    return choose(price, Plan(), named=frozenset(named), budget_bytes=budget * GIB)


def test_the_plain_way_wins_where_it_fits():
    choice = chosen(190)
    assert choice.plan == Plan.plain()
    assert choice.peak_bytes == 190 * GIB
    assert all("= plain" in reason for reason in choice.reasons)


def test_peaks_are_bounded_until_it_fits_and_no_further():
    assert chosen(189).plan == Plan(vocab=Plain(), boundary=Plain())
    assert chosen(149).plan == Plan(boundary=Plain())
    assert chosen(119).plan == Plan()
    assert isinstance(chosen(119).plan.boundary, Checkpoint)


def test_reasons_name_what_plain_would_need():
    first, second, _ = chosen(149).reasons
    assert first == "attention = packed: plain needs 190.00 GiB, 41.00 GiB too much; now 150.00 GiB"
    assert second == "vocab = blocked: plain needs 150.00 GiB, 1.00 GiB too much; now 120.00 GiB"


def test_what_is_named_is_kept():
    choice = choose(price, Plan(vocab=Plain()), named=frozenset({"vocab"}), budget_bytes=100 * GIB)
    assert choice.plan == Plan(attention=Packed(), vocab=Plain())
    assert choice.peak_bytes == 130 * GIB
    assert len(choice.reasons) == 2
    assert isinstance(chosen(100).plan.vocab, Blocked)
