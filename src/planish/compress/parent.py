"""A trained model, one layer at a time: in memory, or read from its folder as layers are asked for."""

import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from planish.compress.blocks import Blocks
from planish.compress.parts import Parts, discover, find_parts
from planish.compress.space import Choice, Menu, Space
from planish.errors import UsageError
from planish.models.child import ChildLayer
from planish.train.tensor_files import describe, difference, load_tensors


class Parent(Protocol):
    """What compression asks of a trained model.

    Attributes:
        config: Its transformers config.
        blocks: Makes and runs layers.
        device: Where layers are when they are given.
        dtype: Of weights and hidden states.
        generation: How it generates, where that is known.
        largest_layer_bytes: Weights of its largest layer.
        ends_bytes: Weights outside of layers.
    """

    config: Any
    generation: GenerationConfig | None
    blocks: Blocks
    device: torch.device
    dtype: torch.dtype
    largest_layer_bytes: int
    ends_bytes: int

    def resident(self) -> list[Tensor]:
        """Return the weights that are in memory all the time."""
        ...

    def attend_by(self, name: str) -> None:
        """Let layers use transformers' attention interface `name`."""
        ...

    def space(self, menu: Menu) -> Space:
        """Return what its children may be."""
        ...

    def layer(self, index: int) -> AbstractContextManager[ChildLayer]:
        """Return a context in which layer `index` is in memory."""
        ...

    def ends(self) -> dict[str, Tensor]:
        """Return the weights outside of layers: "embedding" [V, D], "norm" [D] and, where it is another, "head"."""
        ...

    def fingerprint(self) -> str:
        """Return a hash of every weight."""
        ...


class WholeParent:
    """A model that is in memory as a whole.

    Args:
        model: A causal LM of Llama's make.

    Raises:
        UsageError: As `find_parts`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._parts = find_parts(model)
        self.config, self.generation = model.config, model.generation_config
        self.blocks = Blocks(model.config)
        self.device, self.dtype = model.device, model.dtype
        self.largest_layer_bytes, self.ends_bytes = _sizes(self._parts, model.dtype)

    def resident(self) -> list[Tensor]:
        """Return every weight."""
        return [each.detach() for each in self.model.parameters()]

    def attend_by(self, name: str) -> None:
        """Let layers use transformers' attention interface `name`."""
        self.model.set_attn_implementation(name)
        self.blocks = Blocks(self.model.config)

    def space(self, menu: Menu) -> Space:
        """Return what its children may be."""
        return discover(self.model, menu)

    @contextmanager
    def layer(self, index: int) -> Iterator[ChildLayer]:
        """Give layer `index`; it shares its weights with the model."""
        yield self.blocks.around(index, self._parts.layers[index].layer)

    def ends(self) -> dict[str, Tensor]:
        """Return the weights outside of layers, shared with the model."""
        return {name: self.model.get_parameter(path).detach() for name, path in _end_names(self._parts).items()}

    def fingerprint(self) -> str:
        """Return a hash of every weight's name and bytes."""
        digest = hashlib.sha256()
        for name, tensor in self.model.state_dict().items():
            digest.update(name.encode())
            digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        return digest.hexdigest()


class NotStreamable(UsageError):
    """Weights that transformers changes while it reads them."""


def open_parent(folder: Path, *, device: torch.device, dtype: torch.dtype | None = None) -> "Parent":
    """Return the model of a folder, read layer by layer where its files allow that, else as a whole.

    Args:
        folder: A transformers folder.
        device: Where layers go.
        dtype: Of weights and hidden states; default: as the config says.

    Raises:
        UsageError: As `StreamedParent`, or weights that cannot be read at all.
    """
    try:
        return StreamedParent(folder, device=device, dtype=dtype)
    except NotStreamable:
        try:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype or "auto", local_files_only=True)
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise UsageError(f"`model.from`: the weights in {folder} cannot be loaded ({error}).") from error
        return WholeParent(model.to(device).eval().requires_grad_(requires_grad=False))


class StreamedParent:
    """A model folder whose layers are read one at a time.

    Memory:        the layer that is given, and the pages of one saved tensor.

    Args:
        folder: A transformers folder whose safetensors have the model's own names and shapes. (Those of mixtures often
            have not: transformers joins experts while it reads them.)
        device: Where layers go.
        dtype: Of weights and hidden states; default: as the config says.

    Raises:
        UsageError: As `find_parts`; no weights that can be read, or others than the config's.
    """

    def __init__(self, folder: Path, *, device: torch.device, dtype: torch.dtype | None = None) -> None:
        self.folder = folder
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        self.device, self.dtype = device, dtype or config.dtype or torch.float32
        with torch.device("meta"):
            self._model = AutoModelForCausalLM.from_config(config, dtype=self.dtype)
        self._parts = find_parts(self._model)
        self.config = self._model.config
        self.blocks = Blocks(self.config)
        said = (folder / "generation_config.json").is_file()
        self.generation = GenerationConfig.from_pretrained(folder, local_files_only=True) if said else None
        self.largest_layer_bytes, self.ends_bytes = _sizes(self._parts, self.dtype)
        self._check_weights()

    def resident(self) -> list[Tensor]:
        """Return nothing: layers come and go."""
        return []

    def attend_by(self, name: str) -> None:
        """Let layers use transformers' attention interface `name`."""
        self.blocks.config._attn_implementation = name

    def _check_weights(self) -> None:
        try:
            saved = describe(self.folder)
        except (OSError, ValueError, SafetensorError) as error:
            raise UsageError(f"`model.from`: {self.folder} has no weights that can be read ({error}).") from error
        names = dict.fromkeys(name for name, _ in self._model.named_parameters())
        here = {name: each for name, each in self._model.state_dict().items() if name in names}
        there = {name: each for name, each in saved.items() if name in names}
        as_saved = {
            name: each.to(there[name].properties.dtype) if name in there else each for name, each in here.items()
        }
        wrong = difference(as_saved, there)
        if wrong is not None:
            raise NotStreamable(f"`model.from`: {self.folder} cannot be read layer by layer: {wrong}; save it again.")

    def space(self, menu: Menu) -> Space:
        """Return what its children may be."""
        return discover(self._model, menu)

    @contextmanager
    def layer(self, index: int) -> Iterator[ChildLayer]:
        """Give layer `index`, read from the folder."""
        parts = self._parts.layers[index]
        choice = Choice(attention=parts.parent_attention, ffn=parts.parent_ffn)
        layer = self.blocks.empty(index, choice, device=self.device, dtype=self.dtype)
        load_tensors(
            self.folder, {f"{parts.name}.{name}": each for name, each in layer.state_dict().items()}, alone=True
        )
        yield layer

    def ends(self) -> dict[str, Tensor]:
        """Return the weights outside of layers, read from the folder."""
        found = {}
        for name, path in _end_names(self._parts).items():
            shape = self._model.get_parameter(path).shape
            found[name] = torch.empty(shape, dtype=self.dtype, device=self.device)
            load_tensors(self.folder, {path: found[name]}, alone=True)
        return found

    def fingerprint(self) -> str:
        """Return a hash of the bytes of every file of weights."""
        digest = hashlib.sha256()
        for path in sorted(self.folder.glob("*.safetensors")):
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()


def _sizes(parts: Parts, dtype: torch.dtype) -> tuple[int, int]:
    """Return the bytes of the largest layer, and of what is outside of layers."""
    layers = [sum(each.numel() for each in layer.layer.parameters()) for layer in parts.layers]
    rest = sum(each.numel() for each in parts.model.parameters()) - sum(layers)
    return max(layers) * dtype.itemsize, rest * dtype.itemsize


def _end_names(parts: Parts) -> dict[str, str]:
    """Return the paths of the weights outside of layers; a tied head is the embedding."""
    model: Any = parts.model
    ends = {"embedding": model.get_input_embeddings().weight, "norm": model.get_decoder().norm.weight}
    if parts.anatomy.head.weight is not ends["embedding"]:
        ends["head"] = parts.anatomy.head.weight
    paths = {id(each): path for path, each in model.named_parameters(remove_duplicate=True)}
    return {name: paths[id(each)] for name, each in ends.items()}
