"""What the parts of a model take on one microbatch: by products from its sizes, or as somebody measured them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Self

from planish.errors import UsageError
from planish.pipeline.actions import COLLECTIVES, Head, Kind
from planish.pipeline.costs import Costs
from planish.pipeline.layers import balance, redistribute
from planish.price.sharding import is_of_layer
from planish.shapes import AttentionShape, ModelShape

# In forwards of a layer, as on 8 GPUs for a layer of D = 3,072 at 2,048 tokens (arXiv 2411.05288, its published runs):
# 0.4 ms for the embedding and 0.35 for a transfer where a layer took 2.65.
_EMBEDDING, _TRANSFER = 0.15, 0.13


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds on one microbatch; what is left out follows from `layer_s`.

    Attributes:
        layer_s: Forward of one layer.
        layer_backward_s: Its backward, with the forward that checkpointing repeats.
        head_s: Logits of the whole vocabulary.
        embedding_s: The embedding's rows, and as much their gradient.
        transfer_s: A hidden state from rank to rank, and as much a collective.
    """

    layer_s: float
    layer_backward_s: float | None = None
    head_s: float | None = None
    embedding_s: float | None = None
    transfer_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One step: what the parts of a model take on each of its microbatches.

    Attributes:
        layers: Layers of the model.
        microbatches: Microbatches of a step.
        layer: Forward of one layer.
        layer_backward: Its backward.
        head: Logits of the whole vocabulary; the gradients take twice that.
        embedding: IF, and as much IB.
        transfer: A send, and as much a collective.
        unit: Of these times.
        shares: What each layer takes, by their mean; left out where all take the same.
    """

    layers: int
    microbatches: int
    layer: float = 1.0
    layer_backward: float = 2.0
    head: float = 1.0
    embedding: float = _EMBEDDING
    transfer: float = _TRANSFER
    unit: str = "forwards of a layer"
    shares: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.layer <= 0:
            raise UsageError(f"`layer` must be above 0, got {self.layer}.")
        for name in ("head", "embedding", "transfer"):
            if getattr(self, name) < 0:
                raise UsageError(f"`{name}` must be 0 or more, got {getattr(self, name)}.")
        if self.layer_backward < self.layer:
            raise UsageError(
                f"`layer_backward` ({self.layer_backward:g}) must be at least `layer` ({self.layer:g}): the gradient "
                "of the weights alone takes as many products."
            )

    def timed(self, times: Times) -> Self:
        """Return the workload in seconds; what `times` leave out keeps its share of a layer's forward."""
        factor = times.layer_s / self.layer
        return replace(
            self,
            layer=times.layer_s,
            layer_backward=times.layer_backward_s or factor * self.layer_backward,
            head=times.head_s or factor * self.head,
            embedding=times.embedding_s or factor * self.embedding,
            transfer=times.transfer_s or factor * self.transfer,
            unit="seconds",
        )

    def spread(self, num_stages: int, head: Head) -> tuple[int, ...]:
        """Return the layers of each stage; a head on the last stage pushes layers off it.

        Raises:
            UsageError: Fewer layers than stages.
        """
        if head.shared and len(set(self.shares)) > 1:
            return balance(self.shares, num_stages)
        in_layers = 3 * self.head / (self.layer + self.layer_backward)
        return redistribute(self.layers, num_stages, 0.0 if head.shared else in_layers)

    def costs(self, layers: Sequence[int], head: Head, num_ranks: int) -> Costs:
        """Return what the passes take with `layers` on the stages."""
        on_stage = [0.0] * (len(layers) - 1) + [0.0 if head.shared else self.head]
        weights = self._weights(layers)
        forward = [self.layer * n + own for n, own in zip(weights, on_stage, strict=True)]
        backward = [self.layer_backward * n + 2 * own for n, own in zip(weights, on_stage, strict=True)]
        passes: dict[Kind, Sequence[float]] = {Kind.F: forward, Kind.B: backward, Kind.W: forward}
        passes[Kind.I] = [whole - half for whole, half in zip(backward, forward, strict=True)]
        if head.shared:
            for kind, share in _head_shares(head).items():
                passes[kind] = [3 * self.head * share / num_ranks] * num_ranks
            passes[Kind.IF] = passes[Kind.IB] = [self.embedding] * num_ranks
        return Costs(passes=passes, send=self.transfer, collectives=dict.fromkeys(COLLECTIVES, self.transfer))

    def _weights(self, layers: Sequence[int]) -> Sequence[float]:
        """Return what the layers of each stage take, in mean layers."""
        if not self.shares:
            return layers
        return [sum(self.shares[start:stop]) for start, stop in pairwise(accumulate(layers, initial=0))]


def workload(
    shape: ModelShape,
    *,
    context: int,
    microbatches: int,
    recompute: bool,
    experts_per_token: int = 1,
    times: Times | None = None,
) -> Workload:
    """Return the step of a model, in seconds where `times` says what a layer takes, else in forwards of a layer.

    A layer and the head are compared by their products: weights that a token meets, and half of the scores that an
    unmasked attention would make. Layers count as their mean.

    Args:
        shape: Sizes of the model.
        context: Tokens of a row; documents are taken to be as long.
        microbatches: Microbatches of a step.
        recompute: Whether checkpointing repeats the forward in backward.
        experts_per_token: Feed-forward networks that a token passes where a dense model becomes a mixture.
        times: What was measured.

    Raises:
        UsageError: Times that are none.
    """
    head = shape.vocab_size * shape.hidden_size / _layer_products(shape, context, experts_per_token)
    backward = 3.0 if recompute else 2.0
    work = Workload(layers=len(shape.layers), microbatches=microbatches, layer_backward=backward, head=head)
    if times is None:
        return work
    for name in Times.__dataclass_fields__:
        seconds = getattr(times, name)
        if seconds is not None and not seconds > 0:
            raise UsageError(f"`plan.pipeline.times.{name}` must be above 0, got {seconds}.")
    return work.timed(times)


def _layer_products(shape: ModelShape, context: int, experts_per_token: int) -> float:
    """Return the multiplications of a token in one layer's forward, the mean over layers."""
    of_layers = [each for each in shape.tensors if is_of_layer(each.name)]
    weights = sum(each.numel * each.count for each in of_layers) - (shape.num_parameters - shape.num_active_parameters)
    dense = sum(each.numel * each.count for each in of_layers if ".mlp." in each.name)
    scores = sum(_score_products(layer.attention, context) for layer in shape.layers)
    return (weights + (experts_per_token - 1) * dense + scores) / len(shape.layers)


def _score_products(attention: AttentionShape, context: int) -> float:
    window = min(context, attention.window or context)
    keys = window - window * (window - 1) / (2 * context)
    return attention.num_heads * (attention.qk_width + attention.v_width) * keys


def _head_shares(head: Head) -> dict[Kind, float]:
    """Return the share of the head's three products (logits, their gradient, the weight's) that each pass computes."""
    if head is Head.VOCAB_2:
        return {Kind.S: 2 / 3, Kind.T: 1 / 3}
    return {Kind.S: 1 / 3, Kind.E: 0.0, Kind.T: 2 / 3}
