"""What replacing one part of a model leaves behind."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from planish.memory.far import FarTier


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part that was replaced, and the way back."""

    sentence: str
    restore: Callable[[], None]
    tiers: tuple[FarTier, ...] = ()
    end_tape: Callable[[], None] | None = None


def of_forwards(modules: Sequence[nn.Module], sentence: str) -> Part | None:
    """Return the part that modules are whose `forward` was set on the module itself; None where there are none."""

    def restore() -> None:
        for module in modules:
            del module.forward

    return Part(sentence=sentence, restore=restore) if modules else None
