"""Which peaks must be bounded for a budget: none that need not be, those first whose bound costs the least time."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from planish.decode import method_name
from planish.methods import Plan
from planish.units import format_bytes

# Packed attention saves time, a bounded head multiplies as often as a plain one, checkpointing runs each layer twice.
_BY_TIME = ("attention", "vocab", "boundary")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A plan, its peak, and the reason for each method that was open."""

    plan: Plan
    peak_bytes: int
    reasons: tuple[str, ...]


def choose(price: Callable[[Plan], int], bounded: Plan, *, named: frozenset[str], budget_bytes: int) -> Choice:
    """Return the plan that bounds as little as the budget allows.

    The plain way is taken until it does not fit; then one peak after another is bounded, whichever costs the least
    time first. If nothing fits, everything open is bounded.

    Args:
        price: A plan's peak in bytes.
        bounded: The bounded method of each peak, and the methods that are not open.
        named: Peaks whose method is not open.
        budget_bytes: What may be held.
    """
    plain = Plan.plain()
    open_ = [peak for peak in _BY_TIME if peak not in named]
    plan = replace(bounded, **{peak: getattr(plain, peak) for peak in open_})
    peak_bytes = price(plan)
    reasons = []
    for peak in open_:
        if peak_bytes <= budget_bytes:
            reasons.append(f"{peak} = plain: {format_bytes(peak_bytes)} fit without bounding it")
            continue
        plan = replace(plan, **{peak: getattr(bounded, peak)})
        name, before, peak_bytes = method_name(type(getattr(plan, peak))), peak_bytes, price(plan)
        reasons.append(
            f"{peak} = {name}: plain needs {format_bytes(before)}, {format_bytes(before - budget_bytes)} too much; "
            f"now {format_bytes(peak_bytes)}"
        )
    return Choice(plan=plan, peak_bytes=peak_bytes, reasons=tuple(reasons))
