"""Exact causal attention where ranks share each row of the batch: each holds a span of its tokens.

[Note: two ways] Where heads can be dealt out evenly, ranks exchange heads for tokens: each then works on whole rows of
some heads, and all have as much to do. Otherwise keys and values of other spans come to the queries that see them;
without a window each rank then takes a part from the front and one from the back, so that again all have as much to do.
"""

from collections.abc import Sequence
from typing import Any, TypedDict

from torch import Tensor

from planish.comm.ring import Circle
from planish.peaks.attention.choose import check_operands, choose_kernel
from planish.peaks.attention.documents import Shape, document_bounds
from planish.peaks.attention.exchange import ExchangeKernel
from planish.peaks.attention.heads import ToHeads, ToTokens, head_ranges
from planish.peaks.attention.kernel import Attention
from planish.peaks.attention.turn import Turn
from planish.price.sights import own_bounds, sights, turned, turned_bounds, turned_sights
from planish.shapes import spans


class Options(TypedDict):
    """How queries meet keys, whatever the way."""

    window: int | None
    softcap: float | None
    scale: float


def sequence_attention(  # noqa: PLR0913 (keyword-only options)
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    circle: Circle,
    cu_seq_lens: Sequence[int],
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Return `causal_attention` of whole rows, of which each rank gives and receives a span.

    Every rank of `circle` calls it with the same settings; rank r holds `shapes.spans(S, ranks)[r]` of each row.

    Memory:        by heads: the three tensors, their output and lse as if all tokens were here and H / ranks heads;
                   while they are exchanged, a copy of one. By spans: see `ExchangeKernel`; without a window a copy of
                   the three tensors and of the output too. Never S x S.
    Communication: by heads: query, key, value and output once in each pass. By spans: keys and values to each rank
                   that sees them, their gradients back; without a window query, key, value and output once too.
    Exactness:     equal to dense attention with the full mask up to the order of summation.

    Args:
        query: `[B, H, own tokens, d]`.
        key: `[B, Hkv, own tokens, d]`.
        value: `[B, Hkv, own tokens, dv]`.
        circle: The ranks that share rows; tensors without data may have one without a group.
        cu_seq_lens: Offsets of the documents among the B x S tokens of whole rows; edges of rows always count.
        window: Keys that a query sees, its own included; None: all before it.
        softcap: Bound of the scores; None: no bound.
        sinks: `[H]`, one more logit for each head; None: no sink.
        scale: Factor on query times key; default: `d ** -0.5`.

    Returns:
        `[B, own tokens, H, dv]`.

    Raises:
        ValueError: Shapes, dtypes or offsets that do not fit together.
        RuntimeError: A rank that is gone, or late by the group's time-out.
    """
    check_operands(query, key, value, window)
    rows, num_heads = query.shape[:2]
    width = _width(cu_seq_lens, query, key, circle)
    bounds = document_bounds(cu_seq_lens, Shape(rows=rows, queries=width, keys=width))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    circle = circle.beside(query)
    dealt = head_ranges(num_heads, key.shape[1], circle.size)
    if dealt is None:
        options = Options(window=window, softcap=softcap, scale=scale)
        return _by_spans(query, key, value, sinks, circle, bounds, width, options)
    heads, kv_heads = dealt
    query, key, value = ToHeads.apply(circle, width, (heads, kv_heads, kv_heads), query, key, value)
    kernel = choose_kernel(query, key, value, bounds=bounds, window=window, softcap=softcap, scale=scale)
    sinks = None if sinks is None else sinks[heads[circle.rank]]
    return ToTokens.apply(circle, heads, Attention.apply(kernel, query, key, value, sinks))


def _by_spans(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    circle: Circle,
    bounds: Sequence[int],
    width: int,
    options: Options,
) -> Tensor:
    """Return attention by keys that come, over spans as they are or turned."""
    place: dict[str, Any] = {"rows": query.shape[0], "width": width}
    turns = options["window"] is None
    if turns:
        own_two = turned(width, circle.size)[circle.rank]
        held = turned_bounds(bounds, **place, own=own_two)
        seen = turned_sights(bounds, **place, num_ranks=circle.size)
        moved = Turn.apply(circle, width, True, *(each.transpose(1, 2) for each in (query, key, value)))
        query, key, value = (each.transpose(1, 2) for each in moved)
    else:
        held = own_bounds(bounds, **place, own=spans(width, circle.size)[circle.rank])
        seen = sights(bounds, **place, num_ranks=circle.size, window=options["window"])
    exchange = ExchangeKernel(
        circle=circle,
        own=choose_kernel(query, key, value, bounds=held, **options),
        seen=seen,
        most_keys=query.shape[0] * -(-width // circle.size),
        **options,
    )
    out = Attention.apply(exchange, query, key, value, sinks)
    return Turn.apply(circle, width, False, out)[0] if turns else out


def _width(cu_seq_lens: Sequence[int], query: Tensor, key: Tensor, circle: Circle) -> int:
    """Return the tokens of a whole row."""
    rows, _, num_own, _ = query.shape
    width, rest = divmod(cu_seq_lens[-1], rows)
    own = spans(width, circle.size)[circle.rank]
    if rest or own.stop - own.start != num_own or key.shape[2] != num_own:
        raise ValueError(
            f"rank {circle.rank} of {circle.size} must hold its span of each of {rows} rows, which `cu_seq_lens` ends "
            f"at {cu_seq_lens[-1]} tokens; it was given {num_own} queries and {key.shape[2]} keys a row."
        )
    return width
