"""Which peaks must be bounded for a budget: none that need not be, those first whose bound costs the least time."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from planish.decode import method_name
from planish.methods import (
    Activation,
    AdamW,
    Checkpoint,
    Offload,
    Packed,
    Plain,
    Plan,
    StreamAdamW,
    keeps_attention,
)
from planish.units import format_bytes

# Packed attention saves time, a bounded head multiplies as often as a plain one, checkpointing runs each layer twice,
# and networks in tiles then run a third time.
_BY_TIME = ("attention", "vocab", "boundary", "activation")
_ANY_DISK = 2**60


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A plan, its peak, and the reason for each method that was open."""

    plan: Plan
    peak_bytes: int
    reasons: tuple[str, ...]


def choose(
    price: Callable[[Plan], int],
    bounded: Plan,
    *,
    named: frozenset[str],
    budget_bytes: int,
    activation: tuple[Activation, ...] = (),
) -> Choice:
    """Return the plan that bounds as little as the budget allows.

    The plain way is taken until it does not fit; then one peak after another is bounded, whichever costs the least
    time first. If nothing fits, everything open is bounded.

    Args:
        price: A plan's peak in bytes.
        bounded: The bounded method of each peak, and the methods that are not open.
        named: Peaks whose method is not open.
        budget_bytes: What may be held.
        activation: What the model's feed-forward networks may be offered, the least time first; each is taken where it
            lowers the peak.
    """
    plain = Plan.plain()
    open_ = [peak for peak in _BY_TIME if peak not in named and (peak != "activation" or activation)]
    plan = replace(bounded, **{peak: getattr(plain, peak) for peak in open_})
    peak_bytes = price(plan)
    reasons = []
    for peak in open_:
        if peak_bytes <= budget_bytes:
            reasons.append(f"{peak} = plain: {format_bytes(peak_bytes)} fit without bounding it")
            continue
        before = peak_bytes
        for method in activation if peak == "activation" else _methods(peak, bounded):
            tried = replace(plan, **{peak: method})
            tried_bytes = price(tried)
            if peak == "activation" and tried_bytes >= peak_bytes:
                continue
            plan, peak_bytes = tried, tried_bytes
            if peak_bytes <= budget_bytes:
                break
        if isinstance(getattr(plan, peak), Plain):
            reasons.append(f"{peak} = plain: no other way lowers the peak")
            continue
        kept = ", attention kept" if peak == "boundary" and keeps_attention(plan.boundary) else ""
        reasons.append(
            f"{peak} = {method_name(type(getattr(plan, peak)))}{kept}: plain needs {format_bytes(before)}, "
            f"{format_bytes(before - budget_bytes)} too much; now {format_bytes(peak_bytes)}"
        )
    return Choice(plan=plan, peak_bytes=peak_bytes, reasons=tuple(reasons))


def advise(price: Callable[[Plan], int], plan: Plan, *, budget_bytes: int | None) -> tuple[str, ...]:
    """Return what there is to say about far memory: that it is of no use to `plan`, that it would be, or nothing.

    Args:
        price: A plan's peak in bytes.
        plan: What is going to run.
        budget_bytes: What may be held; None: no limit.
    """
    peak_bytes = price(plan)
    said = _advise_boundary(price, plan, peak_bytes, budget_bytes)
    if isinstance(plan.optim, AdamW) and budget_bytes is not None and peak_bytes > budget_bytes:
        far_bytes = price(replace(plan, optim=StreamAdamW(disk=_ANY_DISK)))
        said += _would_need("optim = stream-adamw", far_bytes, peak_bytes, budget_bytes)
    return said


def _advise_boundary(
    price: Callable[[Plan], int], plan: Plan, peak_bytes: int, budget_bytes: int | None
) -> tuple[str, ...]:
    match plan.boundary:
        case Offload():
            here_bytes = price(replace(plan, boundary=Checkpoint()))
            if peak_bytes >= here_bytes:
                return (
                    f"boundary = offload lowers no peak here: {format_bytes(peak_bytes)} with it, "
                    f"{format_bytes(here_bytes)} with checkpoint, since the peak lies elsewhere; choose checkpoint",
                )
        case Checkpoint() if budget_bytes is not None and peak_bytes > budget_bytes:
            far_bytes = price(replace(plan, boundary=Offload(disk=_ANY_DISK)))
            return _would_need("boundary = offload", far_bytes, peak_bytes, budget_bytes)
    return ()


def _would_need(method: str, far_bytes: int, peak_bytes: int, budget_bytes: int) -> tuple[str, ...]:
    if far_bytes >= peak_bytes:
        return ()
    fits = "which fits" if far_bytes <= budget_bytes else "still too much"
    return (f"{method} with `disk` would need {format_bytes(far_bytes)}, {fits}",)


def _methods(peak: str, bounded: Plan) -> tuple[Any, ...]:
    """Return the ways to bound a peak, those first that cost less time."""
    method = getattr(bounded, peak)
    if method == Checkpoint() and isinstance(bounded.attention, Packed):
        return replace(method, keep_attention=True), method
    return (method,)
