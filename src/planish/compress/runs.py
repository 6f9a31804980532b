"""Runs of feed-forward networks without attention between them, which may become one network each; pure data."""

from collections.abc import Sequence
from dataclasses import dataclass

from planish.compress.space import Architecture, Choice, NoAttention, NoFfn, Width, attends


@dataclass(frozen=True, slots=True, kw_only=True)
class Fusion:
    """Networks that become one.

    Attributes:
        layers: Whose, first to last; the first layer holds the network, the others become nothing.
        width: Channels together.
    """

    layers: tuple[int, ...]
    width: int


def find_fusions(architecture: Architecture) -> list[Fusion]:
    """Return the runs of networks without attention between them, the last network of each left as it is.

    References:
        Bercovich et al., FFN Fusion (2025), section 3: the last of a run is the one that suffers most.
    """
    runs: list[list[int]] = []
    for index, choice in enumerate(architecture.layers):
        if attends(choice.attention) or not isinstance(choice.attention, NoAttention) or not runs:
            runs.append([])
        if isinstance(choice.ffn, Width):
            runs[-1].append(index)
        elif not isinstance(choice.ffn, NoFfn):
            runs.append([])
    found = []
    for run in runs:
        fused = tuple(run[:-1])
        if len(fused) > 1:
            found.append(Fusion(layers=fused, width=sum(_width(architecture, index) for index in fused)))
    return found


def _width(architecture: Architecture, index: int) -> int:
    ffn = architecture.layers[index].ffn
    return ffn.width if isinstance(ffn, Width) else 0


def fused(architecture: Architecture, fusions: Sequence[Fusion]) -> Architecture:
    """Return the architecture after `fusions`."""
    for fusion in fusions:
        first, *others = fusion.layers
        kept = Choice(attention=architecture.layers[first].attention, ffn=Width(width=fusion.width))
        architecture = architecture.with_layer(first, kept)
        for index in others:
            architecture = architecture.with_layer(index, Choice(attention=NoAttention(), ffn=NoFfn()))
    return architecture


def joins(architecture: Architecture) -> int:
    """Return how many networks fewer there are once runs have become one network each."""
    return sum(len(each.layers) - 1 for each in find_fusions(architecture))
