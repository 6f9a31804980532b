"""Attention by `torch.nn.attention.varlen` on CUDA: every document of the batch in one call of the fused kernel.

[Note: why the operators are called directly] `varlen_attn` returns the lse but gives it no gradient, so a sink folded
in behind it would train wrongly; here the operator's backward is handed the lse that counts the sink.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.attention.varlen  # registers the operators
import torch.nn.functional as F
from torch import Tensor

MAX_WIDTH = 256
_WIDTH_UNIT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class VarlenKernel:
    """One call a direction over the flattened batch; float16 and bfloat16, widths up to `MAX_WIDTH`, no cache.

    Memory:        forward: copies of query, key and value where they are not token-major or their widths differ;
        backward: the same, and the gradients.
    Exactness:     equal to dense attention up to the order of summation.

    Attributes:
        bounds: Where documents begin and end.
        window: Keys that a query sees, its own included; None: all before it.
        scale: Factor on query times key.
    """

    bounds: tuple[int, ...]
    window: int | None
    scale: float

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return output and lse."""
        rows, heads, num_queries, _ = query.shape
        width = _common_width(query, value)
        operands = [_flat(each.transpose(1, 2), width) for each in (query, key, value)]
        out, lse, _ = torch.ops.torch_attn._varlen_attn(
            *operands,
            *self._extents(query.device),
            self.window is None,
            self.scale,
            self._window_size(),
            query.shape[1] != key.shape[1],
        )
        out = out[..., : value.shape[-1]].contiguous()
        return out.view(rows, num_queries, heads, -1), lse.T.contiguous().view(rows, num_queries, heads)

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of query, key and value."""
        width = _common_width(query, value)
        operands = [_flat(each, width) for each in (grad, *(each.transpose(1, 2) for each in (query, key, value)), out)]
        grads = torch.ops.torch_attn._varlen_attn_backward(
            *operands,
            lse.flatten(0, 1).T.contiguous(),
            *self._extents(query.device),
            self.window is None,
            torch.zeros(2, dtype=torch.uint64, device=query.device),
            self.scale,
            self._window_size(),
        )
        grad_query, grad_key, grad_value = (
            each.unflatten(0, (query.shape[0], -1))[..., : like.shape[-1]].transpose(1, 2)
            for each, like in zip(grads, (query, key, value), strict=True)
        )
        return grad_query, grad_key, grad_value

    def _extents(self, device: torch.device) -> tuple[Tensor, Tensor, int, int]:
        offsets = torch.tensor(self.bounds, dtype=torch.int32, device=device)
        longest = max(stop - start for start, stop in pairwise(self.bounds))
        return offsets, offsets, longest, longest

    def _window_size(self) -> list[int]:
        """Return how many keys a query sees to its left and right."""
        return [-1 if self.window is None else self.window - 1, 0]


def _common_width(query: Tensor, value: Tensor) -> int:
    width = max(query.shape[-1], value.shape[-1])
    return -(-width // _WIDTH_UNIT) * _WIDTH_UNIT


def _flat(token_major: Tensor, width: int) -> Tensor:
    """Return `[B, S, H, d]` as `[B * S, H, width]`, contiguous; zeros change no product."""
    return F.pad(token_major, (0, width - token_major.shape[-1])).flatten(0, 1).contiguous()
