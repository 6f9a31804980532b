"""The input embedding of a model whose vocabulary ranks share: rows are looked up where they are."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from transformers import PreTrainedModel

from planish.comm.ring import Circle
from planish.errors import UsageError
from planish.peaks.vocab.lookup import shared_embedding


def share_embedding(model: PreTrainedModel, circle: Circle, *, tile_bytes: int) -> Callable[[], None]:
    """Look up the rows of `model`'s embedding on the ranks that hold them, from now on; return the way back.

    What a model's own kind of embedding does to its rows (Gemma scales them) it does to those that have come.

    Raises:
        UsageError: An embedding that is none, or whose rows are not shared.
    """
    module = model.get_input_embeddings()
    if not isinstance(module, nn.Embedding) or not isinstance(module.weight, DTensor):
        raise UsageError(
            f"{type(model).__name__} has no embedding that is a DTensor over the ranks of `mesh.vp`, which "
            "`plan.vocab` = ring looks up."
        )
    padding_idx, plain = module.padding_idx, type(module) is nn.Embedding

    def forward(ids: Tensor) -> Tensor:
        rows = shared_embedding(
            ids,
            module.weight.to_local(),
            circle=circle,
            vocab_size=module.num_embeddings,
            padding_idx=padding_idx,
            tile_bytes=tile_bytes,
        )
        if plain:
            return rows
        del module.forward  # its own, on the rows that have come, each under its own number
        try:
            places = torch.arange(ids.numel(), device=ids.device).view(ids.shape)
            return functional_call(module, {"weight": rows.flatten(0, -2)}, (places,))
        finally:
            module.forward = forward

    module.forward = forward
    module.padding_idx = None

    def restore() -> None:
        del module.forward
        module.padding_idx = padding_idx

    return restore
