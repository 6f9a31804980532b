"""A model as a stack of layers that run from any depth: one block is scored without running what is before it."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import embedding

from planish.compress.blocks import Blocks
from planish.compress.library import ENDS, Library
from planish.compress.space import Architecture, Choice
from planish.models.child import ChildLayer, one_layer


class Stack:
    """The layers of one architecture in memory, from a library.

    Memory:        the model.

    Args:
        library: Of blocks.
        architecture: Default: the parent.
        device: Where it is; default: the CPU.
        dtype: Of layers and hidden states; the ends stay as they are. Default: the library's.

    Attributes:
        layers: First to last.
        head: The vocabulary projection [V, D].
    """

    def __init__(
        self,
        library: Library,
        architecture: Architecture | None = None,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.library = library
        self.dtype = dtype or library.dtype
        self.device = device or torch.device("cpu")
        self.architecture = architecture or library.space.parent
        library.space.check(self.architecture)
        self.config = library.config
        self.blocks = Blocks(library.config)
        ends = {name: each.to(self.device) for name, each in library.read(ENDS).items()}
        self._embedding = ends["embedding"]
        self.head = ends.get("head", self._embedding)
        self._norm = one_layer(library.config).norm
        self._norm.load_state_dict({"weight": ends["norm"].to(self.dtype)}, assign=True)
        self.layers = [self.layer(index, choice) for index, choice in enumerate(self.architecture.layers)]

    def layer(self, index: int, choice: Choice) -> ChildLayer:
        """Return layer `index` made as `choice`; it is not put into the stack.

        Memory:        the layer.
        """
        layer = self.blocks.bare(index, choice, dtype=self.dtype)
        tensors = self.library.layer(index, choice)
        layer.load_state_dict({name: each.to(self.device, self.dtype) for name, each in tensors.items()}, assign=True)
        return layer.requires_grad_(requires_grad=False)

    def embed(self, ids: Tensor) -> Tensor:
        """Return the hidden states [B, S, D] before the first layer of token ids [B, S]."""
        return embedding(ids.to(self.device), self._embedding).to(self.dtype)

    @torch.no_grad()
    def states(self, ids: Tensor) -> Iterator[Tensor]:
        """Yield the hidden states [B, S, D] before each layer, and those after the last one, before the norm."""
        hidden = self.embed(ids)
        for layer in self.layers:
            yield hidden
            hidden = self.blocks.run([layer], hidden)
        yield hidden

    def read(self, ids: Tensor) -> Tensor:
        """Return what the head sees [B, S, D] of token ids [B, S]."""
        *_, last = self.states(ids)
        return self.after(len(self.layers), last)

    @torch.no_grad()
    def after(self, index: int, hidden: Tensor, layer: ChildLayer | None = None) -> Tensor:
        """Return what the head sees [B, S, D] where `hidden` stands before layer `index`.

        Exactness:     bitwise what the whole model gives.

        Args:
            index: Of the first layer that runs.
            hidden: [B, S, D], each row one text from its first token on.
            layer: In the place of layer `index`; default: the stack's own.
        """
        first = [] if index == len(self.layers) else [self.layers[index] if layer is None else layer]
        return self._norm(self.blocks.run([*first, *self.layers[index + 1 :]], hidden))
