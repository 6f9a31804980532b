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
)
from planish.errors import UsageError

Phase = Literal["prefill", "decode"]
Sizes = Mapping[str, int]  # numbers in a sub-block, by "attention kv3"
Source = Literal["measured", "fitted"]

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
            return mixture_of(space).beside + count * (3 * D * width + D)


def mixture_of(space: Space) -> Mixture:
    """Return what the mixtures of a space have in common.

    Raises:
        UsageError: It does not say.
    """
    if space.mixture is None:
        raise UsageError("the space does not say what its mixtures of experts have in common; read it off the model.")
    return space.mixture


def experts_met(space: Space, option: KeepExperts, tokens: int) -> float:
    """Return how many experts `tokens` tokens are expected to meet, were each as likely as any other."""
    return option.experts * (1 - (1 - mixture_of(space).top_k / option.experts) ** tokens)


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
            ops, top_k, one = _OPS["experts"], mixture_of(space).top_k, 3 * D * width
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
