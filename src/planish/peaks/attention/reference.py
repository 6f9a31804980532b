"""Textbook attention with the whole S x S matrix: in float64 what every kernel of this room must equal."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def reference_attention(  # noqa: PLR0913 (keyword-only options)
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cu_seq_lens: Sequence[int] | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Return attention over `[B, H, S, d]`, `[B, Hkv, K, d]` and `[B, Hkv, K, dv]` as `[B, S, H, dv]`, in `dtype`.

    `out = softmax([c * tanh(Q K^T scale / c), sink])[:K] V`, where a query sees the keys of its document that are not
    after it and less than `window` before it; the last query stands at the last key.

    Memory:        B x H x S x K, several times.
    Exactness:     the definition; in a low precision, the error that plain attention makes.
    """
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    rows, heads, num_queries, _ = query.shape
    num_keys, past = key.shape[2], key.shape[2] - num_queries
    group = heads // key.shape[1]
    scores = query @ key.repeat_interleave(group, 1).transpose(2, 3) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    position = torch.arange(num_keys, device=query.device)
    distance = position[past:, None] - position
    visible = (distance >= 0) & (distance < (num_keys if window is None else window))
    visible = visible.expand(rows, 1, num_queries, num_keys)
    if cu_seq_lens is not None:
        tokens = torch.arange(rows * num_queries, device=query.device)
        document = torch.bucketize(tokens, tokens.new_tensor(cu_seq_lens), right=True).view(rows, 1, num_queries)
        visible = visible & (document[..., :, None] == document[..., None, :])
    scores = scores.masked_fill(~visible, -math.inf)
    if sinks is not None:
        sink = sinks.to(dtype).view(1, heads, 1, 1).expand(rows, heads, num_queries, 1)
        scores = torch.cat([scores, sink], -1)
    weights = scores.softmax(-1)[..., :num_keys]
    return (weights @ value.repeat_interleave(group, 1)).transpose(1, 2)
