"""What the ledger says: who held the bytes at a peak, as data for `memory.jsonl` and as a text table."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from planish.memory.book import CATEGORIES, PHASES, Category, Phase, Record
from planish.memory.timeline import Point
from planish.units import format_bytes

MAX_OWNERS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Tensors alike (owner, category, shape, dtype) that were alive at one moment.

    Attributes:
        owner: Module path or parameter name; `*` stands for the layer's number where several layers hold one each.
        category: What the bytes are for.
        shape: Shape of each when its storage was born.
        dtype: Its dtype, such as "bfloat16".
        count: How many of them.
        total_bytes: Their bytes together.
    """

    owner: str
    category: Category
    shape: tuple[int, ...]
    dtype: str
    count: int
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePeak:
    """The worst moment of one phase.

    Attributes:
        peak_bytes: Bytes alive then.
        at_s: Seconds since the step began.
        categories: Those bytes by category; they add up to `peak_bytes`.
        owners: The largest holders, at most `MAX_OWNERS`.
    """

    peak_bytes: int
    at_s: float
    categories: dict[Category, int]
    owners: tuple[Held, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """One step's memory: a line of `memory.jsonl`.

    Attributes:
        step: Number of the step; None for what came before the first (init, resume).
        phases: The peak of each phase that took part.
        timeline: (seconds since the step began, live bytes, phase), at most 2,000 points.
    """

    step: int | None
    phases: dict[Phase, PhasePeak]
    timeline: tuple[Point, ...]

    @property
    def peak_phase(self) -> Phase:
        """The phase of the step's peak."""
        return max(self.phases, key=lambda phase: self.phases[phase].peak_bytes, default="init")

    @property
    def peak_bytes(self) -> int:
        """The largest number of bytes alive in the step."""
        return max((peak.peak_bytes for peak in self.phases.values()), default=0)

    def to_dict(self) -> dict[str, Any]:
        """Return the step as plain data for JSON; an owner is (owner, category, shape, dtype, count, total bytes)."""
        return {
            "step": self.step,
            "peak_bytes": self.peak_bytes,
            "peak_phase": self.peak_phase,
            "phases": {
                phase: {
                    "peak_bytes": peak.peak_bytes,
                    "at_s": round(peak.at_s, 6),
                    "categories": peak.categories,
                    "owners": [
                        [held.owner, held.category, list(held.shape), held.dtype, held.count, held.total_bytes]
                        for held in peak.owners
                    ],
                }
                for phase, peak in self.phases.items()
            },
            "timeline": [[round(seconds, 6), live_bytes, phase] for seconds, live_bytes, phase in self.timeline],
        }


def sum_by_category(records: Iterable[Record]) -> dict[Category, int]:
    """Return the bytes of `records` by category, in the order of `CATEGORIES`; empty categories are left out."""
    sums: dict[Category, int] = dict.fromkeys(CATEGORIES, 0)
    for record in records:
        sums[record.category] += record.nbytes
    return {category: nbytes for category, nbytes in sums.items() if nbytes}


def largest_holders(records: Iterable[Record], limit: int = MAX_OWNERS) -> tuple[Held, ...]:
    """Return the `limit` largest groups of tensors alike, layers that differ in their number alone taken together."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        if record.nbytes:
            key = (re.sub(r"\b\d+\b", "*", record.owner), record.category, record.shape, record.dtype)
            groups.setdefault(key, []).append(record)
    held = [
        Held(
            owner=key[0] if len({record.owner for record in group}) > 1 else group[0].owner,
            category=key[1],
            shape=tuple(key[2]),
            dtype=str(key[3]).removeprefix("torch."),
            count=len(group),
            total_bytes=sum(record.nbytes for record in group),
        )
        for key, group in groups.items()
    ]
    held.sort(key=lambda each: (-each.total_bytes, each.owner))
    return tuple(held[:limit])


def format_table(categories: dict[Category, int], owners: tuple[Held, ...]) -> str:
    """Return live bytes by category and by holder as text."""
    total = sum(categories.values())
    rows = [("bytes alive", format_bytes(total), "")]
    rows += [(f"  {name}", format_bytes(nbytes), "") for name, nbytes in sorted(categories.items(), key=_by_bytes)]
    rows.append(("held by", "", ""))
    for held in owners:
        times = f"{held.count} x " if held.count > 1 else ""
        what = f"{times}{held.shape} {held.dtype}, {held.category}"
        rows.append((f"  {held.owner or '(unnamed)'}", format_bytes(held.total_bytes), what))
    rest = total - sum(held.total_bytes for held in owners)
    if rest:
        rows.append(("  all others", format_bytes(rest), ""))
    width = max(len(name) for name, _, _ in rows)
    return "\n".join(f"{name:<{width}}  {size:>11}  {what}".rstrip() for name, size, what in rows)


def in_phase_order(phases: Iterable[Phase]) -> list[Phase]:
    """Return `phases` in the order in which a run goes through them."""
    return sorted(phases, key=PHASES.index)


def _by_bytes(item: tuple[str, int]) -> int:
    return -item[1]
