"""A transformers decoder cut into stages: each runs transformers' own forward over some of the layers.

[Note: views] A stage is the decoder itself, copied as a Python object without its weights: in its list of layers those
of other stages are replaced by modules that hand on what they get, the one before its first layer by what the stage
received, and the last norm belongs to the last stage alone. Masks, rotary tables and each layer's own arguments are
made as transformers makes them, whatever the family, and layers keep their numbers.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from planish.errors import UsageError
from planish.models.anatomy import Anatomy


class Elsewhere(nn.Module):
    """In the place of a layer that another stage has: hands on its hidden state, or what `arrived` instead.

    It keeps the layer's names and numbers, since a decoder may ask a layer for its kind (Nemotron-H).
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        plain = {name: each for name, each in vars(layer).items() if isinstance(each, str | int | float)}
        vars(self).update(plain, training=True)
        self.arrived: Tensor | None = None

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return the hidden state that the next layer takes."""
        return hidden_states if self.arrived is None else self.arrived


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """Where a decoder keeps what its stages share or divide.

    Attributes:
        backbone: Token ids in, hidden states out.
        embedding: Its embedding.
        layers: The name of its list of layers.
        norm: The name of the norm behind them; None where there is none.
    """

    backbone: nn.Module
    embedding: nn.Embedding
    layers: str
    norm: str | None

    @property
    def list(self) -> nn.ModuleList:
        """The layers."""
        return getattr(self.backbone, self.layers)

    @property
    def scale(self) -> Tensor | None:
        """What the embedding multiplies its rows by (Gemma)."""
        return dict(self.embedding.named_buffers()).get("embed_scale")


def open_decoder(anatomy: Anatomy) -> Decoder:
    """Return where the parts of a model's decoder are.

    Raises:
        UsageError: It has a part that is neither embedding, layer nor last norm, or an embedding of its own kind.
    """
    backbone, embedding = anatomy.backbone, anatomy.model.get_input_embeddings()
    kind = type(anatomy.model).__name__
    layers = list(anatomy.layers.values())
    lists = [name for name, each in backbone.named_children() if layers[0] in list(each.children())]
    if not lists or list(getattr(backbone, lists[0])) != layers:
        raise UsageError(f"{kind} does not keep its layers in one list; `mesh.pp` cannot divide them.")
    children = {name: each for name, each in backbone.named_children() if each is not embedding and name != lists[0]}
    weighty = [name for name, each in children.items() if any(True for _ in each.parameters())]
    if len(weighty) > 1:
        raise UsageError(f"{kind} has `{weighty[0]}` beside its layers, which `mesh.pp` cannot place on a stage.")
    plain = isinstance(embedding, nn.Embedding) and type(embedding).forward is nn.Embedding.forward
    decoder = Decoder(backbone=backbone, embedding=embedding, layers=lists[0], norm=weighty[0] if weighty else None)
    if not plain and decoder.scale is None:
        raise UsageError(f"{kind} has an embedding of its own kind, whose rows `mesh.pp` cannot share.")
    return decoder


def modules_of(decoder: Decoder, layers: range) -> list[nn.Module]:
    """Return what a stage runs: its layers, and the norm behind the last one of all."""
    whole = list(decoder.list)
    last = decoder.norm is not None and layers.stop == len(whole)
    return [whole[i] for i in layers] + ([getattr(decoder.backbone, decoder.norm)] if last else [])


class StageView:
    """One stage of a decoder. See [Note: views].

    Memory: nothing; the layers are the decoder's.

    Args:
        decoder: Of the whole model.
        layers: The stage's.
        packed: Whether attention takes document bounds.
    """

    def __init__(self, decoder: Decoder, layers: range, *, packed: bool) -> None:
        whole, self._packed = list(decoder.list), packed
        entries = [each if i in layers else Elsewhere(each) for i, each in enumerate(whole)]
        before = entries[layers.start - 1] if layers.start else None
        self._entrance = before if isinstance(before, Elsewhere) else None
        self._scale = None if self._entrance else decoder.scale
        self._view = copy.copy(decoder.backbone)
        self._view._modules = {**decoder.backbone._modules, decoder.layers: nn.ModuleList(entries)}
        if decoder.norm is not None and layers.stop < len(whole):
            self._view._modules[decoder.norm] = nn.Identity()

    def __call__(self, hidden: Tensor, batch: Any) -> Tensor:
        """Return hidden states [B, S, D] behind the stage's layers, each document attending to itself.

        Args:
            hidden: Those before them; for the first stage the embedding's rows.
            batch: The microbatch.
        """
        bounds = {"cu_seq_lens_q": batch.cu_seq_lens} if self._packed else {}
        if self._scale is not None:
            hidden = hidden * self._scale.to(hidden.dtype)
        if self._entrance is not None:
            self._entrance.arrived = hidden
        try:
            return self._view(
                inputs_embeds=hidden, position_ids=batch.position_ids, use_cache=False, **bounds
            ).last_hidden_state
        finally:
            if self._entrance is not None:
                self._entrance.arrived = None


def keep_layers(decoder: Decoder, mine: Sequence[int], *, norm: bool) -> None:
    """Drop the layers of other ranks from the model, and the last norm unless it is here; numbers stay as they are."""
    for i in set(range(len(decoder.list))) - set(mine):
        decoder.list[i] = Elsewhere(decoder.list[i])
    if decoder.norm is not None and not norm:
        setattr(decoder.backbone, decoder.norm, nn.Identity())


def keep_rows(anatomy: Anatomy, embedding: nn.Embedding, rows: slice, *, whole: torch.device) -> None:
    """Reduce embedding and head to `rows` of the vocabulary, as new parameters; tied ones stay one parameter.

    Weights on the meta device become empty ones on `whole`, to be filled.
    """
    made: dict[int, nn.Parameter] = {}

    def part(param: nn.Parameter) -> nn.Parameter:
        if id(param) not in made:
            taken = param.detach()[rows]
            data = torch.empty_like(taken, device=whole) if param.device.type == "meta" else taken.clone()
            made[id(param)] = nn.Parameter(data, requires_grad=param.requires_grad)
        return made[id(param)]

    embedding.weight, head = part(embedding.weight), anatomy.head
    head.weight = part(head.weight) if id(head.weight) not in {id(each) for each in made.values()} else head.weight
    if head.bias is not None:
        head.bias = part(head.bias)
