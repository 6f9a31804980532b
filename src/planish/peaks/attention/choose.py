"""Which kernel is exact and fastest for the tensors of a call, and which tensors go together."""

import torch
from torch import Tensor

from planish.peaks.attention.flash import FlashKernel
from planish.peaks.attention.kernel import Kernel
from planish.peaks.attention.tiled import TiledKernel
from planish.peaks.attention.varlen import MAX_WIDTH, VarlenKernel


def choose_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    bounds: tuple[int, ...],
    window: int | None,
    softcap: float | None,
    scale: float,
) -> Kernel:
    """Return the fastest kernel that is exact for these inputs."""
    fits_varlen = (
        query.dtype in (torch.float16, torch.bfloat16)
        and max(query.shape[-1], value.shape[-1]) <= MAX_WIDTH
        and query.shape[2] == key.shape[2]
        and query.numel() > 0
    )
    match query.device.type:
        case "cpu" if softcap is None:
            return FlashKernel(bounds=bounds, window=window, scale=scale)
        case "cuda" if softcap is None and fits_varlen:
            return VarlenKernel(bounds=bounds, window=window, scale=scale)
        case _:
            return TiledKernel(bounds=bounds, window=window, softcap=softcap, scale=scale)


def check_operands(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> None:
    """Raise ValueError for tensors that do not fit together, and for a window below 1."""
    shapes = [tuple(each.shape) for each in (query, key, value)]
    (rows, heads, num_queries, width), key_shape, value_shape = shapes
    fits = (
        key_shape[:3] == value_shape[:3]
        and key_shape[0] == rows
        and key_shape[3] == width
        and heads % key_shape[1] == 0
        and key_shape[2] >= num_queries
    )
    if not fits:
        raise ValueError(
            "`query`, `key` and `value` must be [B, H, S, d], [B, Hkv, K, d] and [B, Hkv, K, dv] with Hkv a divisor of "
            f"H and K >= S, got {shapes[0]}, {shapes[1]} and {shapes[2]}."
        )
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(
            f"`query`, `key` and `value` must have one dtype, got {query.dtype}, {key.dtype} and {value.dtype}; "
            "cast them, or run under autocast."
        )
    if window is not None and window < 1:
        raise ValueError(f"`window` must be 1 or more, got {window}; None lets a query see all keys before it.")
