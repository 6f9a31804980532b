"""Sizes as pure data: what a price needs to know about a model and a batch."""

from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Literal

Keeps = Literal["input", "result", "root"]
"""What an activation keeps for its derivative."""


def shard_axis(sizes: tuple[int, ...], num_shards: int) -> int:
    """Return the first axis that the shards divide, for few experts on many ranks would be padded; else the first."""
    return next((axis for axis, size in enumerate(sizes) if size % num_shards == 0), 0)


def shard_of(sizes: tuple[int, ...], num_shards: int) -> tuple[int, ...]:
    """Return the sizes of the first shard, which is no smaller than any other."""
    axis = shard_axis(sizes, num_shards)
    return (*sizes[:axis], -(-sizes[axis] // num_shards), *sizes[axis + 1 :])


def spans(width: int, num_ranks: int) -> tuple[slice, ...]:
    """Return the part of a row of `width` tokens that each rank takes, in order; the last is no shorter than any."""
    edges = [rank * width // num_ranks for rank in range(num_ranks + 1)]
    return tuple(slice(start, stop) for start, stop in pairwise(edges))


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShape:
    """Parameters alike: one in each of several layers.

    Attributes:
        name: Path in the model, `*` for the layer's number.
        shape: Sizes of each.
        count: How many there are.
        itemsize: Bytes of one number; 0 where that is not known yet.
    """

    name: str
    shape: tuple[int, ...]
    count: int = 1
    itemsize: int = 0

    @property
    def numel(self) -> int:
        """Numbers in each."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """What one attention call is given.

    Attributes:
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        qk_width: Width of a query or key head.
        v_width: Width of a value head.
        window: Keys that a query sees, its own included; None: all before it.
        softcapped: Whether scores are bounded by a tanh.
        sinks: Whether each head has a sink.
    """

    num_heads: int
    num_kv_heads: int
    qk_width: int
    v_width: int
    window: int | None = None
    softcapped: bool = False
    sinks: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape:
    """Multi-head latent attention: queries and keys are made from narrow latents.

    Attributes:
        q_rank: Width of the query's latent; None: queries come from the hidden state.
        kv_rank: Width of the latent of keys and values.
        rope_width: Part of `qk_width` that carries positions.
    """

    q_rank: int | None
    kv_rank: int
    rope_width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsShape:
    """A mixture of experts.

    Attributes:
        num_experts: Routed experts.
        top_k: Experts of one token.
        width: Width of a routed expert.
        shared_width: Width of the expert that every token passes; 0: none.
    """

    num_experts: int
    top_k: int
    width: int
    shared_width: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForwardShape:
    """A dense feed-forward network.

    Attributes:
        hidden_size: Width of its input and output.
        width: Width inside.
        itemsize: Bytes of one number.
        gated: Whether a second projection multiplies the activation.
        both: Whether that one passes the activation too (dReLU).
        biased: Whether projections have biases.
        keeps: What the activation keeps for its derivative: its "input" (silu, gelu), its "result" (relu), or the
            "root" of it (relu^2).
    """

    hidden_size: int
    width: int
    itemsize: int
    gated: bool = False
    both: bool = False
    biased: bool = False
    keeps: Keeps = "input"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """The vocabulary projection.

    Attributes:
        vocab_size: Rows of its weight.
        hidden_size: Columns.
        itemsize: Bytes of one number of weight and hidden states.
        biased: Whether it has a bias.
        softcapped: Whether logits are bounded by a tanh.
        scaled: Whether logits are multiplied by a constant.
    """

    vocab_size: int
    hidden_size: int
    itemsize: int
    biased: bool = False
    softcapped: bool = False
    scaled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """One decoder layer.

    Attributes:
        attention: Its attention.
        ffn: A dense feed-forward width, or a mixture of experts.
        linear: Whether a recurrent mixer stands in attention's place.
    """

    attention: AttentionShape
    ffn: int | ExpertsShape
    linear: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a causal LM.

    Attributes:
        model_type: As transformers calls it.
        hidden_size: Width of a hidden state.
        vocab_size: Rows of the embedding.
        layers: The decoder layers in forward order.
        tied: Whether the head is the embedding.
        latent: The latents of attention, where it has them.
        logit_softcap: Bound of the logits; None: none.
        hidden_act: The activation of its feed-forward networks; None where the config does not say.
        max_positions: The longest context it was made for; None where the config does not say.
        tensors: Every parameter, shared ones once.
        assumed: What the config does not say and was taken for granted, a sentence each.
    """

    model_type: str
    hidden_size: int
    vocab_size: int
    layers: tuple[LayerShape, ...]
    tied: bool
    latent: LatentShape | None
    logit_softcap: float | None
    max_positions: int | None
    tensors: tuple[TensorShape, ...]
    assumed: tuple[str, ...]
    hidden_act: str | None = None

    def __hash__(self) -> int:
        """Return a number from a few sizes: caches ask for it thousands of times, and the layers are many."""
        return hash((self.model_type, self.hidden_size, self.vocab_size, len(self.layers), len(self.tensors)))

    @property
    def num_parameters(self) -> int:
        """All parameters, shared ones once."""
        return sum(each.numel * each.count for each in self.tensors)

    @property
    def num_active_parameters(self) -> int:
        """The parameters that one token meets: of the routed experts, only its own."""
        idle = 0
        for layer in self.layers:
            if isinstance(layer.ffn, ExpertsShape):
                routed = sum(
                    each.numel
                    for each in self.tensors
                    if ".experts." in each.name and each.shape[0] == layer.ffn.num_experts
                )
                idle += routed * (layer.ffn.num_experts - layer.ffn.top_k) // layer.ffn.num_experts
        return self.num_parameters - idle


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshShape:
    """How many ranks share what.

    Attributes:
        dp: Ranks over which weights, gradients and optimizer state are sharded.
        replicate: Groups of such ranks.
        cp: Ranks of `dp` that share rows.
        ep: Ranks of `dp` over which experts are spread.
        vp: Ranks of `dp` that share the vocabulary.
        pp: Ranks over which layers are divided.
    """

    dp: int = 1
    replicate: int = 1
    cp: int = 1
    ep: int = 1
    vp: int = 1
    pp: int = 1

    @property
    def size(self) -> int:
        """All ranks."""
        return self.dp * self.replicate * self.pp

    @property
    def readers(self) -> int:
        """Ranks, or groups of `cp`, that take rows of their own."""
        return max(1, self.dp * self.replicate // self.cp)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """One optimizer step's input.

    Attributes:
        rows: Rows of one microbatch.
        context: Tokens of a row.
        microbatches: Microbatches of a step.
        num_valid: Targets that count in one microbatch; None: whatever number holds most.
        split: Whether rows may hold several documents; then the documents are those that hold most.
        sharers: Ranks that share each row; `context` is then what one of them holds of it.
    """

    rows: int = 1
    context: int
    microbatches: int = 1
    num_valid: int | None = None
    split: bool = True
    sharers: int = 1

    @property
    def tokens(self) -> int:
        """Tokens of one microbatch."""
        return self.rows * self.context
