"""What a search is likely to choose, so that training goes where it matters: the best children near the targets."""

from collections.abc import Sequence
from dataclasses import replace

from planish.compress.costs import Costs
from planish.compress.distil import Pairs, worth_training
from planish.compress.library import block_name
from planish.compress.search import Ceiling, diverse
from planish.compress.space import Choice, Space
from planish.errors import DoesNotFit

_SHARES = (0.8, 0.9, 1.0, 1.1, 1.2)


def likely(
    space: Space, harm: Sequence[Sequence[float]], ceilings: Sequence[Ceiling], costs: Costs, *, count: int = 3
) -> list[list[Choice]]:
    """Return, for each layer, the choices of the best children at and around the targets.

    Args:
        space: What layers may be.
        harm: Of each choice of each layer.
        ceilings: The targets; all are moved together, down and up by a fifth.
        costs: Of the choices.
        count: Children at each of five places, each unlike the others in a fifth of its layers.
    """
    found: list[dict[Choice, None]] = [{} for _ in space.layers]
    for share in _SHARES:
        moved = [replace(each, at_most=share * each.at_most) for each in ceilings]
        try:
            children = diverse(space, harm, moved, costs, count=count)
        except (DoesNotFit, TimeoutError):
            continue
        for child in children:
            for choices, choice in zip(found, child.architecture.layers, strict=True):
                choices[choice] = None
    return [list(choices) for choices in found]


def block_names(space: Space, choices: Sequence[Sequence[Choice]]) -> frozenset[str]:
    """Return the names of the blocks that `choices` of each layer are made of, where training moves them."""
    return frozenset(
        block_name(index, kind, option)
        for index, (layer, here) in enumerate(zip(space.layers, choices, strict=True))
        for choice in here
        for kind, option, own in (
            ("attention", choice.attention, layer.attention[0]),
            ("ffn", choice.ffn, layer.ffn[0]),
        )
        if worth_training(option, own)
    )


def pairs_of(space: Space, choices: Sequence[Sequence[Choice]]) -> Pairs:
    """Return, by layer, those of `choices` in which both sub-blocks are new and training moves at least one."""
    found = {}
    for index, (layer, here) in enumerate(zip(space.layers, choices, strict=True)):
        own = layer.parent
        both = [each for each in here if each.attention != own.attention and each.ffn != own.ffn]
        both = [
            each for each in both if worth_training(each.attention, own.attention) or worth_training(each.ffn, own.ffn)
        ]
        if both:
            found[index] = both
    return found
