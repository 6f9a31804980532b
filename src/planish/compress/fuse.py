"""Feed-forward networks that follow one another without attention between them, as one network (FFN Fusion).

x + F_1(x) + F_2(x + F_1(x)) + ... is read as x + F_1(x) + F_2(x) + ..., an approximation: one gated network with
all channels side by side. The networks' norms differ in their weights alone, so that those go into the matrices.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from planish.compress.blocks import config_of
from planish.compress.export import ChildFolder, copy_beside
from planish.compress.realise import Lazy, write_native
from planish.compress.space import Architecture, Choice, NoAttention, NoFfn, Width, attends
from planish.errors import UsageError
from planish.models.child import parent_config

_MATRICES = ("gate_proj", "up_proj", "down_proj")


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


def fuse_child(child: Path, folder: Path) -> list[Fusion]:
    """Write a child with its runs of networks fused; it computes something else, to be measured and trained anew.

    Memory:        one fused matrix.

    Args:
        child: A child's folder.
        folder: Where to.

    Returns:
        What became one.

    Raises:
        UsageError: No run to fuse, or networks with biases, which the first layer's class may not have room for.
        WorldFailed: The disk refuses.
    """
    source = ChildFolder(child)
    fusions = find_fusions(source.architecture)
    if not fusions:
        raise UsageError(
            f"{child} has no three networks in a row without attention between them; there is none to fuse."
        )
    if any(name.endswith("_proj.bias") and ".mlp." in name for name in source.names()):
        raise UsageError(f"the networks of {child} have biases, which do not stand side by side; they cannot be fused.")
    gone = {index for fusion in fusions for index in fusion.layers[1:]}
    tensors = {
        name: source.lazy(name)
        for name in source.names()
        if not any(name.startswith(f"model.layers.{index}.") for index in gone)
    }
    for fusion in fusions:
        tensors |= _side_by_side(source, fusion)
    config = config_of(parent_config(source.config), fused(source.architecture, fusions))
    config.dtype = source.config.dtype
    write_native(folder, config, None, tensors)
    copy_beside(source.folder, folder)
    return fusions


def _side_by_side(source: ChildFolder, fusion: Fusion) -> dict[str, Lazy]:
    """Return the matrices of a fused network, which stand behind the first layer's norm."""
    found = {}
    for matrix in _MATRICES:
        name = f"model.layers.{fusion.layers[0]}.mlp.{matrix}.weight"
        rows, columns = source.shape(name).shape
        shape = (rows, fusion.width) if matrix == "down_proj" else (fusion.width, columns)
        like = torch.empty(shape, dtype=source.shape(name).dtype, device="meta")
        found[name] = Lazy(lambda matrix=matrix: _joined(source, fusion.layers, matrix), like)
    return found


def _joined(source: ChildFolder, layers: Sequence[int], matrix: str) -> Tensor:
    parts = [source.read(f"model.layers.{index}.mlp.{matrix}.weight") for index in layers]
    if matrix == "down_proj":
        return torch.cat(parts, 1)
    norms = [source.read(f"model.layers.{index}.post_attention_layernorm.weight").double() for index in layers]
    scaled = [part.double() * (norm / norms[0]) for part, norm in zip(parts, norms, strict=True)]
    return torch.cat([scaled_.to(part.dtype) for scaled_, part in zip(scaled, parts, strict=True)])
