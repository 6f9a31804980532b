"""Smaller mixtures of experts: which experts can go, by what tokens lose elsewhere; which channels of each."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import linear

from planish.compress.channels import Channels, Cut
from planish.compress.initialise import Order
from planish.compress.refit import Part
from planish.compress.space import KeepExperts

_GATE, _UP, _DOWN = "mlp.gate.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
Tensors = dict[str, Tensor]
Build = Callable[[KeepExperts, Tensors], nn.Module]


@dataclass(frozen=True, slots=True, kw_only=True)
class Smaller:
    """A mixture with fewer experts, or with fewer channels in each.

    Attributes:
        option: What it is.
        tensors: Of the layer, by name.
        made: How, in words.
        error: Squared error over the parent's square on tokens that judge.
        plain_error: The same as published, without a re-fit.
    """

    option: KeepExperts
    tensors: Tensors
    made: str
    error: float
    plain_error: float


class MixtureFit:
    """Statistics of one layer's mixture.

    An expert's score is what tokens lose where it is gone: those that had met it go where the router sends them among
    the others; where a router's weights do not add up to one, the others' weights grow.

    Memory:        three F x F matrices for each expert where widths are offered; inputs and outputs of the tokens that
        choose and judge.

    Args:
        ffn: With `gate` and `experts`.
        options: Smaller mixtures that are offered.

    References:
        Removal one at a time with re-routing: NVIDIA Model-Optimizer, `RemoveExpertsIndependentHook`.
    """

    def __init__(self, ffn: Any, options: Sequence[KeepExperts]) -> None:
        self._gate, self._experts = ffn.gate, ffn.experts
        down = self._experts.down_proj.detach()
        self._few = [each for each in options if each.experts < len(down)]
        self._narrow = [each for each in options if each.experts == len(down)]
        self.lost = torch.zeros(len(down), dtype=torch.float64, device=down.device)
        self._channels = [Channels(each) for each in down] if self._narrow else []
        self._kept: dict[Part, list[tuple[Tensor, Tensor, Tensor]]] = {"choose": [], "held": []}

    def see(self, normed: Tensor, out: Tensor, weight: Tensor | None, which: Part) -> None:
        """Count a batch.

        Args:
            normed: What enters the mixture [B, S, D].
            out: What comes out of it.
            weight: Of each token [B * S]; default 1.
            which: Part of the text.
        """
        hidden, out = normed.flatten(0, 1), out.flatten(0, 1)
        weight = torch.ones(len(hidden), dtype=torch.float64, device=hidden.device) if weight is None else weight
        if which in self._kept:
            self._kept[which].append((normed, out, weight))
        _, scores, ids = self._gate(hidden)
        if self._few and which != "held":
            self._reroute(hidden, out, weight, scores, ids)
        for expert, channels in enumerate(self._channels):
            token, place = (ids == expert).nonzero(as_tuple=True)
            entered = self._experts._apply_gate(linear(hidden[token], self._experts.gate_up_proj[expert]))
            channels.see(entered, scores[token, place].double().square() * weight[token], which)

    def _reroute(self, hidden: Tensor, out: Tensor, weight: Tensor, scores: Tensor, ids: Tensor) -> None:
        every, squares = torch.arange(len(self.lost), device=hidden.device), out.double().square().sum(1)
        for expert in every:
            others = every[every != expert]
            _, found, chosen = functional_call(self._gate, {"weight": self._gate.weight[others]}, (hidden,))
            lost = (found[:, 0] / scores[:, 0] - 1).double().square() * squares  # of tokens that had not met it
            met = (ids == expert).any(1).nonzero().squeeze(1)
            if len(met):
                elsewhere = self._experts(hidden[met], others[chosen[met]], found[met])
                lost[met] = (elsewhere - out[met]).double().square().sum(1)
            self.lost[expert] += (lost * weight).sum()

    def smaller(
        self, tensors: Mapping[str, Tensor], orders: Sequence[Order], ridges: Sequence[float], build: Build
    ) -> Iterator[Smaller]:
        """Yield every smaller mixture, after the last token; once.

        Fewer experts are re-fitted by one number, the scale of what they add up to; fewer channels by the last matrix
        of each expert, on the tokens that it meets.

        Memory:        the last matrices of all widths, and one mixture twice.

        Args:
            tensors: The parent's of this layer.
            orders: What may rank channels.
            ridges: How strongly a re-fit may be drawn to its start.
            build: Makes a mixture of an option and its tensors.
        """
        wanted = self.lost.argsort(descending=True, stable=True)
        for option in self._few:
            keep = wanted[: option.experts].sort().values
            plain = {**tensors, **{name: tensors[name][keep] for name in (_GATE, _UP, _DOWN)}}
            yield self._scaled(option, plain, build)
        widths, cuts = [each.width for each in self._narrow], []
        while self._channels:  # the sums of one expert after the other are let go of
            cuts.append(list(self._channels.pop(0).cuts(widths, orders, ridges)))
        for option, *mine in zip(self._narrow, *cuts, strict=True):
            yield self._narrowed(option, tensors, mine, build)

    def _scaled(self, option: KeepExperts, plain: Tensors, build: Build) -> Smaller:
        mixture, along, own = build(option, plain), 0.0, 0.0
        for normed, out, weight in self._kept["choose"]:
            found = mixture(normed).flatten(0, 1).double()
            along += float(((found * out).sum(1) * weight).sum())
            own += float((found.square().sum(1) * weight).sum())
        scale, plain_error = along / own if own else 1.0, self._error(mixture)
        scaled = {**plain, _DOWN: (plain[_DOWN].double() * scale).to(plain[_DOWN].dtype)}
        error = self._error(build(option, scaled))
        if not error < plain_error:
            return Smaller(option=option, tensors=plain, made="re-routed", error=plain_error, plain_error=plain_error)
        made = f"re-routed, scale {scale:.3g}"
        return Smaller(option=option, tensors=scaled, made=made, error=error, plain_error=plain_error)

    def _narrowed(self, option: KeepExperts, tensors: Mapping[str, Tensor], cuts: list[Cut], build: Build) -> Smaller:
        def tried(keep: list[Tensor], matrices: Iterable[Tensor]) -> tuple[Tensors, float]:
            narrow = {**tensors, **_kept(tensors, keep, matrices)}
            return narrow, self._error(build(option, narrow))

        published = [each.published for each in cuts]
        plain = (down[:, keep] for down, keep in zip(tensors[_DOWN], published, strict=True))
        _, plain_error = tried(published, plain)
        fitted, error = tried([each.keep for each in cuts], (each.matrix for each in cuts))
        (most, count), *_ = Counter(each.made for each in cuts).most_common(1)
        made = most if count == len(cuts) else f"{most}, for {count} of {len(cuts)} experts"
        return Smaller(option=option, tensors=fitted, made=made, error=error, plain_error=plain_error)

    def _error(self, mixture: nn.Module) -> float:
        lost = whole = 0.0
        for normed, out, weight in self._kept["held"]:
            found = mixture(normed).flatten(0, 1)
            lost += float(((found - out).double().square().sum(1) * weight).sum())
            whole += float((out.double().square().sum(1) * weight).sum())
        return lost / whole if whole else 0.0


def _kept(tensors: Mapping[str, Tensor], keep: Sequence[Tensor], matrices: Iterable[Tensor]) -> Tensors:
    """Return the experts with the channels that each keeps, and these last matrices."""
    halves = tensors[_UP].unflatten(1, (2, -1))  # the gate, and what it lets through
    ups = [each[:, mine].flatten(0, 1) for each, mine in zip(halves, keep, strict=True)]
    return {_UP: torch.stack(ups), _DOWN: torch.stack(list(matrices))}
