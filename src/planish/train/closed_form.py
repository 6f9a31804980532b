"""Holds the prices of feed-forward networks to a model's own ones, on fake tensors, before they are relied on."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PretrainedConfig

from planish.memory.ledger import Ledger
from planish.methods import Bitmap, Plan, Tiled
from planish.models.feed_forward import FeedForward, find_feed_forwards
from planish.models.install import install
from planish.models.load import draw_model
from planish.price.activation import feed_forward_bytes, tile_tokens
from planish.sections import ModelSection
from planish.shapes import FeedForwardShape


class NotPriced(ValueError):
    """A network that computes something else than its price says, or holds something else meanwhile."""


def check_closed_form(config: PretrainedConfig, section: ModelSection, method: Tiled | Bitmap) -> None:
    """Run each sort of network by `method`, in one tile and in two and a part, and compare with its price.

    Memory:        none for tensors.

    Raises:
        NotPriced: The bytes differ.
        UsageError: A model without such networks.
    """
    with FakeTensorMode(), Ledger() as ledger:
        model = draw_model(config, section).train()
        networks = [each for each in find_feed_forwards(model) if isinstance(method, Tiled) or each.formula is not None]
        seen: dict[FeedForwardShape, FeedForward] = {each.shape: each for each in networks}
        for shape, network in seen.items():
            tile = tile_tokens(method.tile_bytes, shape.width, shape.itemsize)
            for tokens in (min(tile, 8), 2 * tile + 1):
                installed = install(model, replace(Plan.plain(), activation=method), tokens=tokens, dry=True)
                forward = (network.module if network.whole else network.inner).forward
                found = _measure(ledger, forward, network, tokens)
                installed.undo()
                price = feed_forward_bytes(shape, method, tokens)
                if found != (price.forward, price.kept, price.backward):
                    raise NotPriced(f"`{network.name}` ({type(network.module).__name__}) has no price of its own.")


def _measure(
    ledger: Ledger, forward: Callable[[Tensor], Tensor], network: FeedForward, tokens: int
) -> tuple[int, int, int]:
    """Return the bytes of forward, in between, and of backward."""
    parts = (network.inner, network.up, network.down)
    params = [param for part in parts if part is not None for param in part.parameters()]
    x = torch.empty(tokens, network.shape.hidden_size, dtype=params[0].dtype, requires_grad=True)
    grad = torch.empty_like(x)
    before = ledger.live_bytes
    with ledger.phase("forward"):
        y = forward(x)
    forward_bytes = ledger.peak_bytes["forward"] - before
    kept = ledger.live_bytes - before - y.nbytes
    before = ledger.live_bytes
    with ledger.phase("backward"):
        found = torch.autograd.grad(y, [x, *params], grad)
    backward_bytes = ledger.peak_bytes["backward"] - before
    del found
    ledger.end_step()
    return forward_bytes, kept, backward_bytes
