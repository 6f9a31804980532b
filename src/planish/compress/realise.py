"""A library and an architecture in, the child out: a module, or a transformers folder written tensor by tensor."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from planish.compress.blocks import config_of
from planish.compress.library import ENDS, Library
from planish.compress.space import Architecture
from planish.errors import WorldFailed
from planish.models.child import model_class
from planish.models.child_files import save_config
from planish.train.tensor_files import write_safetensors

_END_NAMES = {"embedding": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}
_WEIGHTS = "model.safetensors"


class Lazy:
    """A tensor that is made when it is written.

    Args:
        make: Returns it.
        like: A tensor of its shape and dtype, which may be on the meta device.
    """

    def __init__(self, make: Callable[[], Tensor], like: Tensor) -> None:
        self._make, self.shape, self.dtype = make, like.shape, like.dtype

    def stand_in(self) -> Tensor:
        """Return a tensor without bytes of its shape and dtype."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def pieces(self) -> Iterator[Tensor]:
        """Make and give it."""
        yield self._make()

    def fill(self, numbers: Tensor) -> None:
        """Refuse: nothing is read into it."""
        raise TypeError(f"a tensor of shape {list(numbers.shape)} cannot be read into one that is made to be written.")


def write_lazily(path: Path, tensors: Mapping[str, Lazy]) -> None:
    """Write `tensors` into one safetensors file.

    Memory:        one tensor.

    Raises:
        WorldFailed: The disk refuses.
    """
    try:
        stand_ins = {name: each.stand_in() for name, each in tensors.items()}
        write_safetensors(path, stand_ins, {"format": "pt"}, tensors)
    except OSError as error:
        raise WorldFailed(f"{path} cannot be written: {error.strerror or error}.") from error


def assemble(library: Library, architecture: Architecture, *, device: torch.device | None = None) -> PreTrainedModel:
    """Return the child in memory, in evaluation mode.

    Memory:        the child, and one block.

    Args:
        library: Of its blocks.
        architecture: One choice for each layer.
        device: Where it goes; default: the CPU.

    Raises:
        UsageError: An architecture that is not in the library's space.
        CheckpointCorrupt: A block that is not what was written.
    """
    library.space.check(architecture)
    config = config_of(library.config, architecture)
    device = device or torch.device("cpu")
    with torch.device("meta"):
        model: Any = model_class(config.parent_type)(config).to(library.dtype)
    model.model.rotary_emb = type(model.model.rotary_emb)(config=library.config).to(device)
    for index, choice in enumerate(architecture.layers):
        tensors = {name: each.to(device) for name, each in library.layer(index, choice).items()}
        model.model.layers[index].load_state_dict(tensors, assign=True)
    for name, tensor in library.read(ENDS).items():
        module, _, _ = _END_NAMES[name].rpartition(".")
        model.get_submodule(module).load_state_dict({"weight": tensor.to(device)}, assign=True)
    model.tie_weights()
    generation = library.generation_config()
    if generation is not None:
        model.generation_config = generation
    return model.eval().requires_grad_(requires_grad=True)


def write_child(library: Library, architecture: Architecture, folder: Path) -> None:
    """Write the child as a transformers folder, which opens with planish imported, and elsewhere by its `auto_map`.

    Memory:        one tensor.

    Raises:
        UsageError: An architecture that is not in the library's space.
        WorldFailed: The disk refuses.
    """
    library.space.check(architecture)
    tensors: dict[str, Lazy] = {}
    for name in library.shapes(ENDS):
        tensors[_END_NAMES[name]] = _from(library, ENDS, name)
    for index, choice in enumerate(architecture.layers):
        for block in library.blocks(index, choice):
            for name in library.shapes(block):
                tensors[f"model.layers.{index}.{name}"] = _from(library, block, name)
    config = config_of(library.config, architecture)
    config.dtype = library.dtype
    write_native(folder, config, library.generation_config(), tensors)


def write_native(folder: Path, config: Any, generation: Any, tensors: Mapping[str, Lazy]) -> None:
    """Write a child's folder: config, its model's source, weights.

    Raises:
        WorldFailed: The disk refuses.
    """
    config.architectures = [model_class(config.parent_type).__name__]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_config(config, folder)
        if generation is not None:
            generation.save_pretrained(folder)
    except OSError as error:
        raise WorldFailed(f"{folder} cannot be written: {error.strerror or error}.") from error
    write_lazily(folder / _WEIGHTS, tensors)


def _from(library: Library, block: str, name: str) -> Lazy:
    return Lazy(lambda: library.read_tensor(block, name), library.shapes(block)[name])
