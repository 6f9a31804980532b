"""Finer tiles: the same mathematics in less memory, what `memory.on_exceed = "adapt"` does to a plan that is too much.

[Note: adapt] A tile's size changes the order of summation and nothing else, so a run may go on with finer ones from any
step on. Those are taken that are no finer than they must be: small tiles cost time.
"""

import json
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from planish.decode import encode
from planish.methods import Bitmap, Blocked, Pipelined, Plan, Ring, StreamAdamW, Tiled

_LEAST_BYTES, _LEAST_ROWS = 2**16, 2**8


class Tile(NamedTuple):
    """A size that a plan says and that can be halved.

    Attributes:
        peak: Of the method.
        name: Of its setting.
        size: As it is now.
        least: It is not halved to less.
    """

    peak: str
    name: str
    size: int
    least: int

    @property
    def most(self) -> int:
        """How many times it can be halved."""
        return max(0, (self.size // self.least).bit_length() - 1)


def tiles_of(plan: Plan, *, tokens: int, running: bool = False) -> tuple[Tile, ...]:
    """Return what can be halved.

    Args:
        plan: One method per peak.
        tokens: Of the largest microbatch.
        running: Steps have been done, so that the optimizer's state lies where it lies.
    """
    found = [
        Tile(peak, "tile_bytes", method.tile_bytes, _LEAST_BYTES)
        for peak, method in (("vocab", plan.vocab), ("dispatch", plan.dispatch), ("activation", plan.activation))
        if isinstance(method, Blocked | Ring | Pipelined | Tiled | Bitmap)
    ]
    if isinstance(plan.dispatch, Pipelined):
        found.append(Tile("dispatch", "block_rows", plan.dispatch.block_rows or tokens, _LEAST_ROWS))
    if isinstance(plan.optim, StreamAdamW) and not running:
        found.append(Tile("optim", "chunk_bytes", plan.optim.chunk_bytes, _LEAST_BYTES))
    return tuple(each for each in found if each.most)


def fit_by_tiles(
    price: Callable[[Plan], int], plan: Plan, *, budget_bytes: int, tokens: int, running: bool = False
) -> Plan | None:
    """Return `plan` with tiles as fine as they must be to fit; None where even the finest do not.

    All are halved together until the plan fits, and then each is made as coarse again as it may be.

    Exactness:     another order of summation, nothing else.

    Args:
        price: A plan's peak in bytes.
        plan: What does not fit.
        budget_bytes: What may be held.
        tokens: Of the largest microbatch.
        running: As `tiles_of` takes it.
    """
    tiles = tiles_of(plan, tokens=tokens, running=running)

    def fits(halvings: list[int]) -> bool:
        return price(_halved(plan, tiles, halvings)) <= budget_bytes

    def together(times: int) -> list[int]:
        return [min(times, each.most) for each in tiles]

    most = max((each.most for each in tiles), default=0)
    if not most or not fits(together(most)):
        return None
    halvings = together(_least(lambda times: fits(together(times)), most))
    for number in range(len(tiles)):

        def alone(times: int, number: int = number) -> bool:
            return fits([*halvings[:number], times, *halvings[number + 1 :]])

        halvings[number] = _least(alone, halvings[number])
    return _halved(plan, tiles, halvings)


def told(before: Plan, after: Plan) -> str:
    """Return the sizes that `after` has others of, as settings of a run file."""
    old, new = encode(before), encode(after)
    changed = [
        f"`plan.{peak}.{name} = {json.dumps(value)}`"
        for peak, method in new.items()
        for name, value in method.items()
        if old[peak].get(name) != value
    ]
    return ", ".join(changed)


def _halved(plan: Plan, tiles: tuple[Tile, ...], halvings: list[int]) -> Plan:
    for tile, times in zip(tiles, halvings, strict=True):
        if times:
            method = replace(getattr(plan, tile.peak), **{tile.name: tile.size >> times})
            plan = replace(plan, **{tile.peak: method})
    return plan


def _least(does: Callable[[int], bool], most: int) -> int:
    """Return the least number for which `does`, as it does for `most`."""
    return bisect_left(range(most), True, key=does)
