"""Feed-forward networks that follow one another without attention between them, as one network (FFN Fusion).

x + F_1(x) + F_2(x + F_1(x)) + ... is read as x + F_1(x) + F_2(x) + ..., an approximation: one gated network with
all channels side by side. The networks' norms differ in their weights alone, so that those go into the matrices.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from planish.compress.blocks import config_of
from planish.compress.export import ChildFolder, copy_beside
from planish.compress.library import Library
from planish.compress.realise import Lazy, assemble, write_native
from planish.compress.runs import Fusion, find_fusions, fused
from planish.compress.space import Architecture
from planish.errors import UsageError
from planish.models.child import model_class, parent_config

_MATRICES = ("gate_proj", "up_proj", "down_proj")


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
        found[name] = Lazy(lambda matrix=matrix: _joined(source.read, fusion.layers, matrix), like)
    return found


def _joined(read: Callable[[str], Tensor], layers: Sequence[int], matrix: str) -> Tensor:
    parts = [read(f"model.layers.{index}.mlp.{matrix}.weight") for index in layers]
    if matrix == "down_proj":
        return torch.cat(parts, 1)
    norms = [read(f"model.layers.{index}.post_attention_layernorm.weight").double() for index in layers]
    scaled = [part.double() * (norm / norms[0]) for part, norm in zip(parts, norms, strict=True)]
    return torch.cat([scaled_.to(part.dtype) for scaled_, part in zip(scaled, parts, strict=True)])


def assemble_fused(library: Library, architecture: Architecture) -> PreTrainedModel:
    """Return the child in memory with its runs of networks fused, in evaluation mode.

    Memory:        the child before and after.

    Raises:
        UsageError, CheckpointCorrupt: As `assemble`.
    """
    child, fusions = assemble(library, architecture), find_fusions(architecture)
    if not fusions:
        return child
    config = config_of(library.config, fused(architecture, fusions))
    with torch.device("meta"):
        made = model_class(config.parent_type)(config).to(library.dtype)
    made.model.rotary_emb = child.model.rotary_emb
    tensors = {name: each.detach() for name, each in child.state_dict().items()}
    for fusion in fusions:
        for matrix in _MATRICES:
            name = f"model.layers.{fusion.layers[0]}.mlp.{matrix}.weight"
            tensors[name] = _joined(tensors.__getitem__, fusion.layers, matrix)
    made.load_state_dict({name: tensors[name] for name in made.state_dict()}, assign=True)
    made.tie_weights()
    made.generation_config = child.generation_config
    return made.eval()
