"""Where a transformers model keeps its feed-forward networks, and how a plan's method is put in their place."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, assert_never

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import GELUActivation, GELUTanh, ReLUSquaredActivation, SiLUActivation

from planish.errors import UsageError
from planish.kernels.bitmap import codec
from planish.methods import Activation, Bitmap, Plain, Tiled
from planish.peaks.activation.arena import Arena
from planish.peaks.activation.bitmap import Projection, sparse_feed_forward
from planish.peaks.activation.formula import Formula
from planish.peaks.activation.keep import AssumedCodec, Keeper
from planish.peaks.activation.tiled import tiled
from planish.price.activation import tile_tokens, whole_arena_bytes
from planish.shapes import FeedForwardShape, Keeps


class _Names(NamedTuple):
    """What the projections of a network are called: the one that the activation follows, its multiplier, the last."""

    inner: str
    up: str | None
    down: str


_LAYOUTS = (
    _Names("gate_proj", "up_proj", "down_proj"),
    _Names("up_proj", None, "down_proj"),
    _Names("gate_up_proj", None, "down_proj"),
    _Names("fc1", None, "fc2"),
    _Names("wi_0", "wi_1", "wo"),
    _Names("wi", None, "wo"),
    _Names("dense_h_to_4h", None, "dense_4h_to_h"),
    _Names("c_fc", None, "c_proj"),
)
_FORMULAS = {nn.ReLU: Formula(), ReLUSquaredActivation: Formula(squared=True)}
_KEEPS: Mapping[type[nn.Module], Keeps] = {
    nn.SiLU: "input",
    nn.GELU: "input",
    SiLUActivation: "input",
    GELUActivation: "input",
    GELUTanh: "input",
    nn.ReLU: "result",
    ReLUSquaredActivation: "root",
}
_ACTIVATIONS = ("act_fn", "activation_fn", "act")
# A norm between the activation and the last projection (BitNet).
_NORM = "ffn_sub_norm"


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForward:
    """One network of a model.

    Attributes:
        name: Path of the module that holds its projections.
        module: That module: the network itself, or a layer that calls its projections one by one (OPT).
        inner: The projection that the activation follows: the gate where there are two.
        up: The projection that multiplies the activation.
        down: The last projection.
        act: The activation where it is a module of its own.
        norm: The module between the activation and `down`.
        whole: Whether `module` computes nothing else.
    """

    name: str
    module: nn.Module
    inner: nn.Module
    up: nn.Module | None
    down: nn.Module
    act: nn.Module | None
    norm: nn.Module | None
    whole: bool

    @property
    def width(self) -> int:
        """F."""
        return self.down.in_features if isinstance(self.down, nn.Linear) else self.down.weight.shape[0]

    @property
    def formula(self) -> Formula | None:
        """The network's formula if it is one of the ReLU family whose parts are all plain."""
        formula = _FORMULAS.get(type(self.act))
        projections = [each for each in (self.inner, self.up, self.down) if each is not None]
        if formula is None or any(type(each) is not nn.Linear for each in projections):
            return None
        return Formula(squared=formula.squared, gated=self.up is not None)

    @property
    def shape(self) -> FeedForwardShape:
        """Its sizes, where its projections are linear."""
        return FeedForwardShape(
            hidden_size=self.down.out_features,
            width=self.width,
            itemsize=self.down.weight.element_size(),
            gated=self.up is not None,
            biased=self.down.bias is not None,
            keeps=_KEEPS.get(type(self.act), "input"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Replaced:
    """Networks that run another way: a sentence, how to put them back, and what keeps each one's activations."""

    sentence: str
    restore: Callable[[], None]
    keepers: Mapping[str, Keeper]


def find_feed_forwards(model: nn.Module) -> tuple[FeedForward, ...]:
    """Return the dense feed-forward networks of `model`, shared experts included, in the order of its modules."""
    found = []
    for name, module in model.named_modules():
        parts = dict(module.named_children())
        names = next(
            (each for each in _LAYOUTS if {each.inner, each.up or each.inner, each.down} <= parts.keys()), None
        )
        if names is None:
            continue
        inner, up, down = parts[names.inner], parts.get(names.up or ""), parts[names.down]
        act, norm = next((parts[each] for each in _ACTIVATIONS if each in parts), None), parts.get(_NORM)
        known = {inner, up, down, act, norm}
        whole = all(each in known or isinstance(each, nn.Dropout) for each in module.children())
        if whole or ("self_attn" in parts and act is not None):
            network = FeedForward(
                name=name, module=module, inner=inner, up=up, down=down, act=act, norm=norm, whole=whole
            )
            found.append(network)
    return tuple(found)


def replace_feed_forwards(
    model: PreTrainedModel, method: Activation, *, tokens: int | None, waiting: bool, dry: bool
) -> Replaced | None:
    """Put `method` in the place of the model's feed-forward networks; None where it is the plain way.

    Memory:        the arena of `bitmap`; nothing for `tiled`.

    Args:
        model: Any transformers model.
        method: The plan's choice.
        tokens: Rows x context of the largest microbatch, from which `bitmap` sizes an arena that has no size given.
        waiting: Whether all layers' activations wait for backward at once, and not one layer's at a time.
        dry: The model's tensors are fake.

    Raises:
        UsageError: A model without such networks, or with dropout inside them.
    """
    networks = find_feed_forwards(model)
    match method:
        case Plain():
            return None
        case Tiled():
            forwards, keepers = _tiled(model, networks, method), {}
            sentence = f"{len(forwards)} feed-forward networks: in tiles, computed again in backward"
        case Bitmap():
            sparse = tuple(each for each in networks if each.formula is not None)
            keepers = _keepers(model, sparse, method, tokens=tokens, waiting=waiting, dry=dry)
            forwards = [(each, _sparse(each, keepers[each.name], method.tile_bytes)) for each in sparse]
            if not dry:
                _try(forwards)
            sentence = f"{len(forwards)} feed-forward networks: what is not zero waits for backward, packed"
        case _:
            assert_never(method)
    for network, _ in forwards:
        _refuse_dropout(network)
    undo = [each for network, forward in forwards for each in run_as(network, forward)]

    def restore() -> None:
        for module in undo:
            del module.forward
        for keeper in keepers.values():
            keeper.arena = None

    return Replaced(sentence=sentence, restore=restore, keepers=keepers)


Forwards = list[tuple[FeedForward, Callable[[Tensor], Tensor]]]


def _tiled(model: PreTrainedModel, networks: tuple[FeedForward, ...], method: Tiled) -> Forwards:
    if not networks and not method.norms:
        raise UsageError(
            f"`plan.activation` = tiled: {type(model).__name__} has no feed-forward network of known parts."
        )
    forwards: Forwards = []
    for each in networks:
        block, params = _block(each)
        count = tile_tokens(method.tile_bytes, each.width, model.dtype.itemsize)

        def forward(x: Tensor, block: Any = block, params: Any = params, count: int = count) -> Tensor:
            return tiled(block, x, params(), tokens=count)

        forwards.append((each, forward))
    return forwards


def _block(network: FeedForward) -> tuple[Callable[[Tensor], Tensor], Callable[[], list[Tensor]]]:
    """Return what a network computes, by the forwards that its modules have now, and its parameters."""
    if network.whole:
        return network.module.forward, lambda: list(network.module.parameters())
    inner, act, down = network.inner.forward, network.act.forward, network.down.forward
    return (
        lambda x: down(act(inner(x))),
        lambda: [*network.inner.parameters(), *network.down.parameters()],
    )


def _keepers(
    model: PreTrainedModel,
    networks: tuple[FeedForward, ...],
    method: Bitmap,
    *,
    tokens: int | None,
    waiting: bool,
    dry: bool,
) -> dict[str, Keeper]:
    if not networks:
        raise UsageError(
            f"`plan.activation` = bitmap needs networks with relu or relu^2 between plain linear layers, which "
            f"{type(model).__name__} has not; use tiled."
        )
    if method.arena_bytes is None and tokens is None:
        raise UsageError("`plan.activation` = bitmap needs `arena_bytes`, or `tokens` to size the arena by.")
    shapes = [each.shape for each in networks]
    arena = Arena(whole_arena_bytes(shapes, method, tokens or 0, waiting=waiting), model.device)
    kernels = AssumedCodec(0.0) if dry else codec(model.device)
    return {each.name: Keeper(kernels, arena) for each in networks}


def _sparse(network: FeedForward, keeper: Keeper, tile_bytes: int) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        return sparse_feed_forward(
            x,
            network.formula,
            inner=Projection.of(network.inner),
            up=None if network.up is None else Projection.of(network.up),
            down=Projection.of(network.down),
            norm=network.norm,
            tile_bytes=tile_bytes,
            keeper=keeper,
        )

    return forward


@torch.no_grad()
def _try(forwards: Forwards) -> None:
    """Refuse a network that computes something else than its parts say; one of each class is tried on one token."""
    for network, forward in {type(network.module): (network, forward) for network, forward in forwards}.values():
        weight = network.inner.weight
        if not network.whole or type(weight) is not nn.Parameter:  # sharded weights are whole in a real step alone
            continue
        x = torch.linspace(-1, 1, weight.shape[1], device=weight.device).to(weight.dtype).view(1, 1, -1)
        expected, found = network.module(x).double(), forward(x).double()
        if (found - expected).norm() > 0.05 * expected.norm():
            raise UsageError(
                f"`plan.activation` = bitmap: {network.name} ({type(network.module).__name__}) computes something else "
                "than its projections and activation say; use tiled."
            )


def _refuse_dropout(network: FeedForward) -> None:
    rates = [each.p for each in network.module.modules() if isinstance(each, nn.Dropout)]
    rates.append(getattr(network.module, "activation_dropout", 0.0))
    if network.module.training and any(rates):
        raise UsageError(
            f"{network.name} drops activations at random, and would drop others when it runs again; set the model's "
            "dropout to 0, or `plan.activation` = plain."
        )


def run_as(network: FeedForward, forward: Callable[[Tensor], Tensor]) -> list[nn.Module]:
    """Let `forward` be what a network computes; return the modules whose `forward` of their own `del` takes back."""
    if network.whole:
        network.module.forward = forward
        return [network.module]
    network.inner.forward = forward
    network.act.forward = network.down.forward = _same
    return [network.inner, network.act, network.down]


def _same(x: Tensor) -> Tensor:
    return x
