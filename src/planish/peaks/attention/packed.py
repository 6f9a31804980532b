"""Exact causal attention for packed documents, without a mask, and its adapter to transformers' attention interface."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from planish.comm.ring import Circle
from planish.peaks.attention.choose import check_operands, choose_kernel
from planish.peaks.attention.documents import Shape, document_bounds
from planish.peaks.attention.kernel import Attention
from planish.peaks.attention.sequence import sequence_attention

# Tensors that transformers passes to every attention function and that change nothing here.
_INERT = ("position_ids", "cu_seq_lens_k", "num_items_in_batch", "seq_idx", "max_length_q", "max_length_k")

# Layers whose mask is causal, windowed as `sliding_window` says, and nothing else.
_LAYER_KINDS = ("full_attention", "sliding_attention", "hybrid", "hybrid_sliding")


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cu_seq_lens: Sequence[int] | Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Return each token's attention over the tokens of its document up to itself.

    `out = softmax([softcap * tanh(Q K^T scale / softcap), sinks])[:K] V`, over the last `window` keys.

    Memory:        output and lse, both kept for backward; beyond them blocks of fixed bytes and terms linear in S, see
        the kernels. Never S x S.
    Exactness:     equal to dense attention with the full mask up to the order of summation.

    Args:
        query: `[B, H, S, d]`.
        key: `[B, Hkv, K, d]` where Hkv divides H; K above S means a cache: the last query stands at the last key.
        value: `[B, Hkv, K, dv]`.
        cu_seq_lens: Offsets of the documents among the B x S tokens, from 0 to the end of the last; Python ints are
            never read from memory. Edges of rows always count. None: each row is one document.
        window: Keys that a query sees, its own included; None: all before it.
        softcap: Bound of the scores; None: no bound.
        sinks: `[H]`, one more logit for each head, without a value; None: no sink.
        scale: Factor on query times key; default: `d ** -0.5`.

    Returns:
        `[B, S, H, dv]`.

    Raises:
        ValueError: Shapes, dtypes or offsets that do not fit together, or a window below 1.

    Example:
        >>> query = key = value = torch.ones(1, 2, 8, 4)
        >>> causal_attention(query, key, value, cu_seq_lens=(0, 3, 8)).shape
        torch.Size([1, 8, 2, 4])
    """
    check_operands(query, key, value, window)
    shape = Shape(rows=query.shape[0], queries=query.shape[2], keys=key.shape[2])
    bounds = document_bounds(cu_seq_lens, shape)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    kernel = choose_kernel(query, key, value, bounds=bounds, window=window, softcap=softcap, scale=scale)
    return Attention.apply(kernel, query, key, value, sinks)


def packed_attention(  # noqa: PLR0913 (the signature of transformers' attention functions)
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Sequence[int] | Tensor | None = None,
    position_ids: Tensor | None = None,
    circle: Circle | None = None,
    **seam: Any,
) -> tuple[Tensor, None]:
    """Return `causal_attention` as transformers' attention interface wants it; register it without a mask function.

    [Note: padding] transformers then drops a 2-D `attention_mask` before it reaches this function. Padding on the right
    harms nothing, since no token sees what comes after it and no label stands there. Padding on the left is seen: give
    `cu_seq_lens_q` instead (generation from left-padded prompts is refused at its second token).

    Memory:        as `causal_attention`.
    Exactness:     as `causal_attention`.

    Args:
        module: The attention layer.
        query: `[B, H, S, d]`.
        key: `[B, Hkv, K, d]`.
        value: `[B, Hkv, K, dv]`.
        attention_mask: None.
        scaling: Factor on query times key.
        dropout: 0.
        sliding_window: Keys that a query sees; None or 0: all before it.
        softcap: Bound of the scores.
        s_aux: Sinks.
        is_causal: None or True; None asks the module.
        cu_seq_lens_q: Offsets of the documents: Python ints, or a tensor, which is read in every layer.
        position_ids: Read only behind a cache, to refuse one with keys that a mask would have to hide.
        circle: Ranks that hold a span of each row each; then offsets are those of whole rows. None: rows are here.
        **seam: What else transformers passes.

    Returns:
        `[B, S, H, dv]`, and None for the weights, which are never formed.

    Raises:
        ValueError: What cannot be computed exactly without a mask.
    """
    _refuse_masks(module, attention_mask, is_causal, sliding_window)
    _refuse_extras(dropout, seam)
    if key.shape[2] > query.shape[2] and circle is None:
        _refuse_keys_to_hide(query.shape[2], key.shape[2], sliding_window, position_ids)
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    options = {"window": sliding_window or None, "softcap": softcap, "sinks": s_aux, "scale": scaling}
    if circle is None:
        return causal_attention(query, key, value, cu_seq_lens=cu_seq_lens_q, **options), None
    if not isinstance(cu_seq_lens_q, Sequence):
        raise ValueError("`cu_seq_lens_q` must be Python ints where ranks share rows: the offsets of whole rows.")
    return sequence_attention(query, key, value, circle=circle, cu_seq_lens=cu_seq_lens_q, **options), None


def _refuse_masks(
    module: nn.Module, attention_mask: Tensor | None, is_causal: bool | None, sliding_window: int | None
) -> None:
    """Raise where the layer's mask is another one than causal, windowed as told, within documents."""
    name = type(module).__name__
    if attention_mask is not None:
        raise ValueError(
            f"`attention_mask` must be None for packed attention, {name} was given {tuple(attention_mask.shape)}; mark "
            "documents with `cu_seq_lens_q`, or choose plain attention."
        )
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise ValueError(
            f"packed attention is causal, {name} is not (`is_causal=False`); choose plain attention for it."
        )
    kind = _layer_kind(module)
    if kind not in _LAYER_KINDS:
        raise ValueError(f"packed attention has no {kind!r} layer, {name} is one; choose plain attention for it.")
    if "sliding" in kind and not sliding_window:
        raise ValueError(f"{name} keeps its sliding window in the mask alone; choose plain attention for it.")


def _layer_kind(module: nn.Module) -> str:
    """Return what the configuration calls this layer's attention."""
    config, index = getattr(module, "config", None), getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None)
    if kinds and index is not None:
        return kinds[index]
    return "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"


def _refuse_extras(dropout: float, seam: dict[str, Any]) -> None:
    if dropout > 0.0:
        raise ValueError(f"packed attention has no dropout, got {dropout}; set `attention_dropout` to 0 in the config.")
    if seam.get("output_attentions"):
        raise ValueError("packed attention never forms its weights; set `output_attentions` to False.")
    unknown = [name for name, each in seam.items() if isinstance(each, Tensor) and name not in _INERT]
    if unknown:
        raise ValueError(f"packed attention does not know the tensor `{unknown[0]}`; choose plain attention.")


def _refuse_keys_to_hide(
    num_queries: int, num_keys: int, sliding_window: int | None, position_ids: Tensor | None
) -> None:
    """Raise for a static cache or left-padded prompts, whose keys only a mask could hide.

    A cache holds every position up to the last query's, or what the first query's window still reaches.
    """
    if position_ids is None or position_ids.ndim != 2:
        return
    last = int(position_ids[:, -1].min())
    reach = sliding_window - 1 + num_queries if sliding_window else num_keys
    if num_keys not in (last + 1, min(last + 1, reach)):
        raise ValueError(
            f"packed attention needs the last of {num_keys} keys at the query, which `position_ids` puts at {last}; "
            "generate with a dynamic cache and without padding on the left."
        )
