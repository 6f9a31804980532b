"""Exact causal attention where ranks share each row of the batch: each holds a span of its tokens.

[Note: two ways] Where heads can be dealt out evenly, ranks exchange heads for tokens: each then works on whole rows of
some heads, and all have as much to do. Otherwise keys and values of earlier spans come to the queries that see them;
then a rank has the more to do the later its span.
"""

from collections.abc import Sequence

from torch import Tensor

from planish.comm.ring import Circle
from planish.peaks.attention.choose import check_operands, choose_kernel
from planish.peaks.attention.documents import Shape, document_bounds
from planish.peaks.attention.exchange import ExchangeKernel
from planish.peaks.attention.heads import ToHeads, ToTokens, head_ranges
from planish.peaks.attention.kernel import Attention
from planish.price.sights import own_bounds, sights
from planish.shapes import spans


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
                   while they are exchanged, a copy of one. By spans: see `ExchangeKernel`. Never S x S.
    Communication: by heads: query, key, value and output once in each pass. By spans: keys and values to each rank
                   that sees them, their gradients back.
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
        own = spans(width, circle.size)[circle.rank]
        options = {"window": window, "softcap": softcap, "scale": scale}
        held = own_bounds(bounds, rows=rows, width=width, own=own)
        exchange = ExchangeKernel(
            circle=circle,
            own=choose_kernel(query, key, value, bounds=held, **options),
            seen=sights(bounds, rows=rows, width=width, num_ranks=circle.size, window=window),
            most_keys=rows * -(-width // circle.size),
            **options,
        )
        return Attention.apply(exchange, query, key, value, sinks)
    heads, kv_heads = dealt
    query, key, value = ToHeads.apply(circle, width, (heads, kv_heads, kv_heads), query, key, value)
    kernel = choose_kernel(query, key, value, bounds=bounds, window=window, softcap=softcap, scale=scale)
    sinks = None if sinks is None else sinks[heads[circle.rank]]
    return ToTokens.apply(circle, heads, Attention.apply(kernel, query, key, value, sinks))


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
