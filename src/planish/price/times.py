"""How long a step takes on each rank: products, attention, what memory moves, what travels, and what of it hides.

Coarse on purpose: published rates, assumed shares of them, no contention. It ranks plans; it is no promise.

[Note: turns] The m microbatches of a step pass p stages in m + p - 1 turns of the largest stage (1F1B), of which each
rank waits p - 1. Its share of the vocabulary's passes is in every turn. Hidden states travel beside the passes.
"""

from dataclasses import dataclass
from typing import assert_never

from planish.methods import (
    Bitmap,
    Blocked,
    Offload,
    Plain,
    Plan,
    Ring,
    StreamAdamW,
    Tiled,
    keeps_attention,
)
from planish.price.hardware import Hardware
from planish.price.sharding import num_gathered, num_kept, stage_share
from planish.shapes import BatchShape, ExpertsShape, LayerShape, MeshShape, ModelShape

_STATE_NUMBERS = 3
_PASSES_OF_STATE = 2
_ELEMENTWISE = (30, 6)
"""Widths that elementwise operations of a layer read and write forward: of the hidden state, of the network inside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of one optimizer step on a rank.

    Attributes:
        compute: Products, attention and elementwise operations.
        communication: What travels between ranks.
        offload: What travels to and from host or disk.
        optimizer: Updating the parameters.
        hidden_communication: Of `communication`, what hides behind `compute`.
        hidden_offload: The same of `offload`.
        model_flops: Operations that the model's mathematics takes, on this rank: nothing that runs again counts.
        turns: Seconds in which a stage waits for its turn.
    """

    compute: float
    communication: float
    offload: float
    optimizer: float
    hidden_communication: float
    hidden_offload: float
    model_flops: float
    turns: float = 0.0

    @property
    def total_s(self) -> float:
        """Seconds of the step."""
        shown = self.communication + self.offload - self.hidden_communication - self.hidden_offload
        return self.compute + self.turns + self.optimizer + shown

    def mfu(self, hardware: Hardware, dtype: str) -> float:
        """Return the share of the published rate that the model's own operations take."""
        return self.model_flops / (self.total_s * hardware.flops(dtype))


def step_time(
    shape: ModelShape, batch: BatchShape, context: int, plan: Plan, mesh: MeshShape, hardware: Hardware, dtype: str
) -> StepTime:
    """Return how long a step takes.

    Args:
        shape: The model.
        batch: What one rank works on: with `mesh.cp`, its part of the rows.
        context: Tokens of a whole row, each of which attends to those before it.
        plan: The methods.
        mesh: The ranks.
        hardware: Rates.
        dtype: Of products.
    """
    itemsize = 4 if dtype == "fp32" else 2
    tokens = batch.tokens * batch.microbatches
    rate, scores_rate = (hardware.flops(dtype) * share for share in (hardware.product_share, hardware.attention_share))
    passes = _Passes.of(plan)
    inside = tokens * stage_share(shape, mesh)
    dense = inside * sum(_products(shape, layer) for layer in shape.layers)
    scores = inside * sum(_scores(layer, context) for layer in shape.layers)
    experts = inside * sum(_expert_products(shape, layer) for layer in shape.layers)
    head = 2.0 * shape.vocab_size * shape.hidden_size * tokens / mesh.pp
    moved = inside * itemsize * sum(_elementwise(shape, layer) for layer in shape.layers)
    compute = (
        (dense * passes.layers + experts * passes.experts + head * passes.head) / rate
        + scores * passes.scores / scores_rate
        + moved * (passes.layers - 1) / hardware.memory_rate
    )
    model_flops = 3 * (dense + experts + head) + 3 * scores
    exchange, hidden = _exchange(shape, batch, plan, mesh, hardware, itemsize, compute)
    far, hidden_far = _far(shape, batch, plan, mesh, hardware, itemsize, compute)
    optimizer = num_kept(shape, mesh) * (2 * itemsize + _PASSES_OF_STATE * _STATE_NUMBERS * 4) / hardware.memory_rate
    return StepTime(
        compute=compute,
        communication=exchange,
        offload=far,
        optimizer=0.0 if isinstance(plan.optim, StreamAdamW) else optimizer,
        hidden_communication=hidden,
        hidden_offload=hidden_far,
        model_flops=model_flops,
        turns=(compute + exchange - hidden) * (mesh.pp - 1) / batch.microbatches,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Passes:
    """How often each part multiplies, in units of its forward pass."""

    layers: float
    experts: float
    scores: float
    head: float

    @classmethod
    def of(cls, plan: Plan) -> "_Passes":
        again = 0 if isinstance(plan.boundary, Plain) else 1
        again_inside = {Tiled: 0.6, Bitmap: 0.1}.get(type(plan.activation), 0.0)  # packing takes time beside products
        kept = keeps_attention(plan.boundary)
        match plan.vocab:
            case Plain():
                head = 3.0
            case Blocked(strategy="recompute") | Ring():
                head = 4.0
            case Blocked():
                head = 3.02  # tiles lose a little to edges
            case _:
                assert_never(plan.vocab)
        return cls(
            layers=3.0 + again + again_inside,
            experts=4.0 + again,
            scores=3.5 + (0 if kept else again),
            head=head,
        )


def _products(shape: ModelShape, layer: LayerShape) -> float:
    """Return operations of one token's forward products in a layer, but for its routed experts."""
    attention, hidden_size = layer.attention, shape.hidden_size
    queries = attention.num_heads * (attention.qk_width + attention.v_width)
    if shape.latent is None:
        wide = hidden_size * (queries + attention.num_kv_heads * (attention.qk_width + attention.v_width))
    else:
        latent = shape.latent
        rows = attention.num_heads * (attention.qk_width - latent.rope_width + attention.v_width)
        wide = hidden_size * (latent.kv_rank + latent.rope_width) + latent.kv_rank * rows
        wide += attention.num_heads * attention.v_width * hidden_size
        q_rank = latent.q_rank
        made = attention.num_heads * attention.qk_width
        wide += hidden_size * made if not q_rank else q_rank * (hidden_size + made)
    ffn = layer.ffn
    inner = 3 * ffn if not isinstance(ffn, ExpertsShape) else 3 * ffn.shared_width + ffn.num_experts
    return 2.0 * (wide + hidden_size * inner)


def _expert_products(shape: ModelShape, layer: LayerShape) -> float:
    ffn = layer.ffn
    return 0.0 if not isinstance(ffn, ExpertsShape) else 6.0 * ffn.top_k * ffn.width * shape.hidden_size


def _scores(layer: LayerShape, context: int) -> float:
    """Return operations of one token's scores and sums: it attends to half of the context, or to its window."""
    attention = layer.attention
    if layer.linear:
        return 0.0
    keys = context / 2 if attention.window is None else min(attention.window, context / 2)
    return 2.0 * keys * attention.num_heads * (attention.qk_width + attention.v_width)


def _elementwise(shape: ModelShape, layer: LayerShape) -> float:
    ffn, (outer, inner) = layer.ffn, _ELEMENTWISE
    width = ffn if not isinstance(ffn, ExpertsShape) else ffn.top_k * ffn.width + ffn.shared_width
    return outer * shape.hidden_size + inner * width


def _exchange(
    shape: ModelShape,
    batch: BatchShape,
    plan: Plan,
    mesh: MeshShape,
    hardware: Hardware,
    itemsize: int,
    compute: float,
) -> tuple[float, float]:
    """Return seconds of what ranks send, and of what hides behind the layers."""
    tokens, share = batch.tokens * batch.microbatches, stage_share(shape, mesh)
    wide = max(4, itemsize)
    weights = batch.microbatches * (2 * itemsize + wide)
    rate = hardware.exchange_rate(mesh.dp)
    behind = num_gathered(shape, mesh) * share * weights / rate
    if mesh.replicate > 1:
        behind += 2 * num_kept(shape, mesh) * wide / hardware.exchange_rate(mesh.size)
    if mesh.pp > 1:  # to the next stage and back; the head's, as Vocab-2 exchanges them, and the embedding's
        behind += tokens * shape.hidden_size * (5 * itemsize + wide) / hardware.exchange_rate(mesh.size)
    recomputed = 1 if isinstance(plan.boundary, Plain) else 2
    routed = sum(min(layer.ffn.top_k, mesh.ep) for layer in shape.layers if isinstance(layer.ffn, ExpertsShape))
    sent = 0.0
    if mesh.ep > 1:
        rows = (2 * (recomputed + 1) + 1) * (mesh.ep - 1) / mesh.ep
        sent = tokens * routed * shape.hidden_size * itemsize * rows / hardware.exchange_rate(mesh.ep)
    if mesh.cp > 1:
        heads = sum(
            layer.attention.num_heads * (layer.attention.qk_width + layer.attention.v_width)
            + layer.attention.num_kv_heads * (layer.attention.qk_width + layer.attention.v_width)
            for layer in shape.layers
        )
        passes = (recomputed - keeps_attention(plan.boundary)) + 2
        sent += tokens * heads * itemsize * passes * (mesh.cp - 1) / mesh.cp / hardware.exchange_rate(mesh.cp)
    ring = 0.0
    if mesh.vp > 1:
        rows = min(tokens, shape.vocab_size // mesh.vp * batch.microbatches)
        ring = (mesh.vp - 1) * rows * shape.hidden_size * (2 * itemsize + wide) / hardware.exchange_rate(mesh.vp)
    behind += ring
    sent *= share
    return behind + sent, min(behind, 0.9 * compute)


def _far(
    shape: ModelShape,
    batch: BatchShape,
    plan: Plan,
    mesh: MeshShape,
    hardware: Hardware,
    itemsize: int,
    compute: float,
) -> tuple[float, float]:
    """Return seconds of what goes to far memory and back, and of what hides: boundaries behind layers, state not."""
    seconds = hidden = 0.0
    if isinstance(plan.boundary, Offload):
        attention = max(
            (each.attention.num_heads * each.attention.v_width for each in shape.layers), default=0
        ) * keeps_attention(plan.boundary)
        each = batch.tokens * (shape.hidden_size + attention) * itemsize
        away = len(shape.layers) / plan.boundary.every
        rate = hardware.host_rate if plan.boundary.host else hardware.disk_rate / hardware.devices_per_node
        seconds = 2 * each * away * batch.microbatches / rate
        hidden = min(seconds, compute)
    if isinstance(plan.optim, StreamAdamW):
        own = num_kept(shape, mesh)
        rate = hardware.host_rate if plan.optim.host else hardware.disk_rate / hardware.devices_per_node
        seconds += own * _STATE_NUMBERS * 4 / rate  # both ways at once
    return seconds, hidden
