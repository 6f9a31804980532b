"""What serving a child holds: weights, keys and values, and temporaries at the worst moment; pure data."""

from collections.abc import Iterable

from planish.compress.costs import (
    Numbers,
    Scenario,
    Sizes,
    cache_numbers,
    choice_parameters,
    ends_parameters,
    mixture_of,
)
from planish.compress.space import (
    Architecture,
    Choice,
    KeepExperts,
    KeepHeads,
    SlidingWindow,
    Space,
    Width,
    attends,
)

_INDEX_BYTES = 8


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
    D, rows = space.hidden_size, tokens * mixture_of(space).top_k
    order = 4 * _INDEX_BYTES + 3 * 4  # by expert, back, and the chosen ones; weights in float32
    return rows * (max(4 * D, D + 4 * option.width) * wide + order) + (tokens + 2) * option.experts * 4


def model_bytes(
    space: Space, architecture: Architecture, scenario: Scenario, numbers: Numbers, sizes: Sizes | None = None
) -> float:
    """Return the bytes that serving a child holds at most: weights, keys and values, temporaries."""
    layers = sum(choice_bytes(space, choice, scenario, numbers, sizes) for choice in architecture.layers)
    ends = ends_parameters(space) * numbers.weight_bytes
    return layers + ends + workspace_bytes(space, architecture.layers, scenario, numbers)
