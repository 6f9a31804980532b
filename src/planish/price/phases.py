"""What a loss weighs in forward, until backward, and in backward."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """Bytes alive beyond the arguments of the loss, and beyond gradients of earlier microbatches.

    Attributes:
        forward: At most while the loss is made.
        kept: From then until backward, the loss included.
        backward: At most while the gradients are made, they included.
    """

    forward: int
    kept: int
    backward: int
