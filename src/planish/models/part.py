"""What replacing one part of a model leaves behind."""

from collections.abc import Callable
from dataclasses import dataclass

from planish.memory.far import FarTier


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part that was replaced, and the way back."""

    sentence: str
    restore: Callable[[], None]
    tiers: tuple[FarTier, ...] = ()
    end_tape: Callable[[], None] | None = None
