"""What a child costs to serve: seconds by scenario and bytes, summed over its sub-blocks; pure data."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from scipy.optimize import nnls

from planish.compress.runs import joins
from planish.compress.space import (
    Architecture,
    AttentionOption,
    Beside,
    Choice,
    FfnOption,
    KeepExperts,
    KeepHeads,
    LinearAttention,
    LinearFfn,
    Mixture,
    NoAttention,
    NoFfn,
    Option,
    SlidingWindow,
    Space,
    Width,
    attends,
)
from planish.errors import UsageError

Phase = Literal["prefill", "decode"]
Sizes = Mapping[str, int]  # numbers in a sub-block, by "attention kv3"
Source = Literal["measured", "fitted"]

_INDEX_BYTES = 8

# Kernels that transformers launches for each sub-block: norm, projections, rotation, attention, routing, sums.
_OPS = {"attention": 16, "ffn": 8, "experts": 24, "linear": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What is served.

    Attributes:
        phase: "prefill" runs `context` tokens of each row at once, "decode" one token of each after `context` others.
        context: Tokens of a row.
        batch: Rows at once.
    """

    phase: Phase
    context: int
    batch: int = 1

    def __post_init__(self) -> None:
        if self.context < 1 or self.batch < 1:
            raise ValueError(f"a scenario needs a positive context and batch, got {self.context} and {self.batch}.")

    @property
    def label(self) -> str:
        """Such as "decode 1x1024"."""
        return f"{self.phase} {self.batch}x{self.context}"

    @property
    def tokens(self) -> int:
        """Tokens that run at once."""
        return self.batch * (self.context if self.phase == "prefill" else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a sub-block does in a scenario.

    Attributes:
        ops: Kernels launched.
        flops: Multiplications and additions.
        moved_bytes: Weights, keys, values and activations read or written.
    """

    ops: float = 0.0
    flops: float = 0.0
    moved_bytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """A machine in three numbers: seconds = ops * op_s + flops * flop_s + moved_bytes * byte_s."""

    op_s: float
    flop_s: float
    byte_s: float

    def seconds(self, work: Work) -> float:
        """Return how long `work` takes."""
        return work.ops * self.op_s + work.flops * self.flop_s + work.moved_bytes * self.byte_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What joins devices that serve one model: an all-reduce over n is a ring's, and what follows waits for it.

    seconds = base_s + 2 (n - 1) (step_s + bytes / n * byte_s)
    """

    base_s: float
    step_s: float
    byte_s: float

    def all_reduce_s(self, size_bytes: float, devices: int) -> float:
        """Return the seconds until each of `devices` has the sum of what all had."""
        steps = 2 * (devices - 1)
        return self.base_s + steps * (self.step_s + size_bytes * self.byte_s / devices) if steps else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """Bytes of one number.

    Attributes:
        weight_bytes: Of weights and activations.
        cache_bytes: Of keys and values.
    """

    weight_bytes: float = 4.0
    cache_bytes: float = 4.0


def parameters(space: Space, option: Option) -> int:
    """Return the numbers in a sub-block, its norms and biases included.

    Raises:
        UsageError: A mixture of experts, where the space does not say what mixtures have in common.
    """
    D, heads, beside = space.hidden_size, space.num_heads * space.head_dim, space.beside or Beside()
    match option:
        case KeepHeads(kv_heads=count) | SlidingWindow(kv_heads=count):
            return 2 * D * heads + D + beside.attention + count * (2 * D * space.head_dim + beside.kv_head)
        case Width(width=width):
            return (3 * D + beside.channel) * width + D + beside.ffn
        case LinearAttention() | LinearFfn():
            return D * D + D
        case NoAttention() | NoFfn():
            return 0
        case KeepExperts(experts=count, width=width):
            return _mixture(space).beside + count * (3 * D * width + D)


def _mixture(space: Space) -> Mixture:
    if space.mixture is None:
        raise UsageError("the space does not say what its mixtures of experts have in common; read it off the model.")
    return space.mixture


def experts_met(space: Space, option: KeepExperts, tokens: int) -> float:
    """Return how many experts `tokens` tokens are expected to meet, were each as likely as any other."""
    return option.experts * (1 - (1 - _mixture(space).top_k / option.experts) ** tokens)


def cache_numbers(space: Space, option: Option, context: int) -> int:
    """Return the numbers of keys and values that a sub-block keeps of `context` tokens, by the true head size."""
    match option:
        case KeepHeads(kv_heads=count):
            return 2 * count * space.head_dim * context
        case SlidingWindow(kv_heads=count, window=window):
            return 2 * count * space.head_dim * min(context, window)
    return 0


def work_of(space: Space, option: Option, scenario: Scenario, numbers: Numbers) -> Work:
    """Return what a sub-block does in `scenario`; a prompt's token meets half of the others, a decoded one all."""
    if isinstance(option, NoAttention | NoFfn):
        return Work()
    T, D, heads = scenario.tokens, space.hidden_size, space.num_heads * space.head_dim
    weights = parameters(space, option)
    flops, moved, ops = 2.0 * T * weights, weights * numbers.weight_bytes, _OPS["linear"]
    match option:
        case KeepHeads() | SlidingWindow():
            ops = _OPS["attention"]
            kept = cache_numbers(space, option, scenario.context)
            seen = kept / (2 * option.kv_heads * space.head_dim)
            mean = seen if scenario.phase == "decode" else seen * (1 - seen / (2 * scenario.context))
            flops += 4.0 * T * mean * heads
            moved += scenario.batch * kept * numbers.cache_bytes + 4 * T * (D + heads) * numbers.weight_bytes
        case Width(width=width):
            ops = _OPS["ffn"]
            moved += T * (4 * D + 5 * width) * numbers.weight_bytes
        case KeepExperts(experts=count, width=width):
            ops, top_k, one = _OPS["experts"], _mixture(space).top_k, 3 * D * width
            flops -= 2.0 * T * (count - top_k) * one
            moved -= (count - experts_met(space, option, T)) * one * numbers.weight_bytes
            moved += T * (4 * D + top_k * (4 * D + 5 * width)) * numbers.weight_bytes
        case LinearAttention() | LinearFfn():
            moved += 4 * T * D * numbers.weight_bytes
    return Work(ops=ops, flops=flops, moved_bytes=moved)


def tensor_parallel_seconds(works: Iterable[Work], sum_bytes: float, rates: Rates, link: Link, devices: int) -> float:
    """Return the seconds of sub-blocks whose matrices are divided among devices, each followed by an all-reduce.

    Args:
        works: Of one device that has all; those without any cost nothing.
        sum_bytes: Of a sub-block's output.
        rates: Of each device.
        link: Between them.
        devices: Their number.
    """
    each = [
        Work(ops=work.ops, flops=work.flops / devices, moved_bytes=work.moved_bytes / devices)
        for work in works
        if work.ops
    ]
    return sum(rates.seconds(work) for work in each) + len(each) * link.all_reduce_s(sum_bytes, devices)


def fit_rates(points: Iterable[tuple[Work, float]]) -> Rates:
    """Return the machine that explains measured (work, seconds) best, by relative error; no constant is negative.

    Raises:
        UsageError: Fewer than three points with work in them.
    """
    known = [(work, seconds) for work, seconds in points if work.ops and seconds > 0]
    if len(known) < 3:
        raise UsageError(f"three constants need at least three measured sub-blocks, got {len(known)}.")
    table = np.array([[work.ops / s, work.flops / s, work.moved_bytes / s] for work, s in known])
    scale = table.max(0)
    scale[scale == 0] = 1.0
    op_s, flop_s, byte_s = nnls(table / scale, np.ones(len(known)))[0] / scale
    return Rates(op_s=float(op_s), flop_s=float(flop_s), byte_s=float(byte_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Seconds of one sub-block in one scenario, and where they come from."""

    seconds: float
    source: Source


def launch_seconds(prices: Mapping[str, Price]) -> float:
    """Return what a dense network takes whatever its width: networks that become one take it once.

    It is what the line through prices over widths has at none, not below nothing and not above the cheapest.
    """
    points = {
        int(name.removeprefix("ffn width")): each for name, each in prices.items() if name.startswith("ffn width")
    }
    if len(points) < 2:
        return 0.0
    seconds = [each.seconds for each in points.values()]
    _, constant = np.polyfit(list(points), seconds, 1)
    return float(min(max(constant, 0.0), *seconds))


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What children of one space cost on one machine.

    Attributes:
        space: The options.
        numbers: Bytes of a number.
        machine: Where it was measured, in words.
        prices: By scenario's label, then by sub-block ("attention kv3"); every layer's are the same.
        ends_s: By scenario's label: embedding, last norm, head, and what the model does around its layers.
        scenarios: By label.
        factors: By scenario's label: measured over predicted on an assembled child.
        joined_s: By scenario's label: what a network costs less that stands beside another one, as one with it; empty
            where children are not fused.
        sizes: Numbers in each sub-block, by the names of `prices`; where empty, as `parameters` says of Llama's make.
    """

    space: Space
    numbers: Numbers
    machine: str
    prices: Mapping[str, Mapping[str, Price]]
    ends_s: Mapping[str, float]
    scenarios: Mapping[str, Scenario]
    factors: Mapping[str, float]
    sizes: Sizes = field(default_factory=dict)
    joined_s: Mapping[str, float] = field(default_factory=dict)

    def seconds(self, choice: Choice, label: str) -> float:
        """Return the seconds of one layer in the scenario called `label`."""
        prices = self.prices[label]
        return prices[f"attention {choice.attention.label}"].seconds + prices[f"ffn {choice.ffn.label}"].seconds

    def model_seconds(self, architecture: Architecture, label: str) -> float:
        """Return the seconds of a child in the scenario called `label`, calibrated."""
        layers = sum(self.seconds(choice, label) for choice in architecture.layers)
        if self.joined_s:
            layers -= joins(architecture) * self.joined_s[label]
        return (layers + self.ends_s[label]) * self.factors.get(label, 1.0)


def choice_parameters(space: Space, choice: Choice, sizes: Sizes | None = None) -> int:
    """Return the numbers in one layer, as counted in `sizes` or else of Llama's make."""
    if sizes:
        return sizes[f"attention {choice.attention.label}"] + sizes[f"ffn {choice.ffn.label}"]
    return parameters(space, choice.attention) + parameters(space, choice.ffn)


def ends_parameters(space: Space) -> int:
    """Return the numbers outside of layers; a tied embedding counts once."""
    return space.vocab_size * space.hidden_size * (1 if space.tied else 2) + space.hidden_size


def model_parameters(space: Space, architecture: Architecture, sizes: Sizes | None = None) -> int:
    """Return the numbers in a child."""
    return ends_parameters(space) + sum(choice_parameters(space, choice, sizes) for choice in architecture.layers)


def choice_bytes(
    space: Space, choice: Choice, scenario: Scenario, numbers: Numbers, sizes: Sizes | None = None
) -> float:
    """Return the bytes that one layer adds to a server's memory: weights, and keys and values of every row.

    After a prompt a window keeps what its last tokens see as a part of what all of them had, which stays until the
    next token.
    """
    context, attention = scenario.context + (scenario.phase == "decode"), choice.attention
    if isinstance(attention, SlidingWindow) and scenario.phase == "prefill":
        attention = KeepHeads(kv_heads=attention.kv_heads)
    cached = cache_numbers(space, attention, context) * scenario.batch * numbers.cache_bytes
    return choice_parameters(space, choice, sizes) * numbers.weight_bytes + cached


def workspace_bytes(space: Space, layers: Iterable[Choice], scenario: Scenario, numbers: Numbers) -> float:
    """Return the bytes of temporaries at the worst moment of serving: in one layer, or at the logits of last tokens.

    A layer holds its input, the model's and the normed one; in the network also the sum with attention and its three
    widest, in a mixture four of each row that goes to an expert, the rows' order and the router's word; in attention
    queries and keys as they are rotated. A window that is shorter than a prompt takes a mask, and keys and values for
    every head. As one token is decoded the layer's grown cache stands beside the old one.
    Positions, rotary tables and their frequencies are there all the time.
    """
    T, D, wide = scenario.tokens, space.hidden_size, numbers.weight_bytes
    layers = tuple(layers)
    positions = scenario.context if scenario.phase == "prefill" else 1
    always = positions * (2 * space.head_dim * wide + _INDEX_BYTES) + 4 * space.head_dim
    worst = (scenario.batch * space.vocab_size + T * D) * wide
    for choice in layers:
        match choice.ffn:
            case Width(width=width):
                worst = max(worst, T * (4 * D + 3 * width) * wide)
            case KeepExperts() as experts:
                worst = max(worst, 4 * T * D * wide + _routed_bytes(space, experts, T, wide))
        if attends(choice.attention):
            worst = max(worst, _attention_bytes(space, choice.attention, scenario, numbers))
    return always + _window_bytes(layers, scenario) + worst


def _attention_bytes(space: Space, option: KeepHeads | SlidingWindow, scenario: Scenario, numbers: Numbers) -> float:
    """Return the bytes of temporaries in one attention: as positions are rotated, the cache grows, or in products."""
    T, D, wide = scenario.tokens, space.hidden_size, numbers.weight_bytes
    heads, keys = space.num_heads * space.head_dim, option.kv_heads * space.head_dim
    rotated = T * (3 * D + max(4 * heads + 2 * keys, 2 * heads + 5 * keys)) * wide
    if scenario.phase == "decode":
        grown = cache_numbers(space, option, scenario.context)
        grown //= 1 if isinstance(option, SlidingWindow) else 2  # values of a window grow before its keys are replaced
        return max(rotated, T * (3 * D + heads + 2 * keys) * wide + scenario.batch * grown * numbers.cache_bytes)
    rotated -= T * 2 * keys * wide  # of this layer's cache there is nothing yet
    if not isinstance(option, SlidingWindow) or option.window >= scenario.context:
        return rotated
    repeated = 2 * heads if option.kv_heads < space.num_heads else 0
    return max(rotated, T * ((3 * D + 2 * heads + repeated + scenario.context) * wide + 4 * space.num_heads))


def _window_bytes(layers: Iterable[Choice], scenario: Scenario) -> int:
    """Return the bytes of the mask that windows share, and of how far each has come."""
    windows = [each.attention.window for each in layers if isinstance(each.attention, SlidingWindow)]
    if not windows:
        return 0
    shorter = min(windows) < scenario.context
    mask = scenario.context**2 * shorter if scenario.phase == "prefill" else max(windows)
    return mask + _INDEX_BYTES * len(windows)


def _routed_bytes(space: Space, option: KeepExperts, tokens: int, wide: float) -> float:
    """Return the bytes of the rows that go to experts, of their order, and of the router's word on each token."""
    D, rows = space.hidden_size, tokens * _mixture(space).top_k
    order = 4 * _INDEX_BYTES + 3 * 4  # by expert, back, and the chosen ones; weights in float32
    return rows * (max(4 * D, D + 4 * option.width) * wide + order) + (tokens + 2) * option.experts * 4


def model_bytes(
    space: Space, architecture: Architecture, scenario: Scenario, numbers: Numbers, sizes: Sizes | None = None
) -> float:
    """Return the bytes that serving a child holds at most: weights, keys and values, temporaries."""
    layers = sum(choice_bytes(space, choice, scenario, numbers, sizes) for choice in architecture.layers)
    ends = ends_parameters(space) * numbers.weight_bytes
    return layers + ends + workspace_bytes(space, architecture.layers, scenario, numbers)


def options_of(space: Space) -> dict[str, AttentionOption | FfnOption]:
    """Return every distinct sub-block of a space under its name in `Costs.prices`."""
    found: dict[str, AttentionOption | FfnOption] = {}
    for layer in space.layers:
        found |= {f"attention {option.label}": option for option in layer.attention}
        found |= {f"ffn {option.label}": option for option in layer.ffn}
    return found


def home_of(space: Space, option: Option) -> int:
    """Return the first layer that may be `option`; a family's dense layers and its mixtures are of different makes."""
    return next(index for index, layer in enumerate(space.layers) if option in (*layer.attention, *layer.ffn))
