"""Attention by the CPU kernel of `scaled_dot_product_attention`, one call a block; the kernel keeps no S x S tensor.

[Note: why the operator is called directly] `scaled_dot_product_attention` hides the lse, which sinks and blocks need;
autograd through slices would make a full-size gradient for every document; and whenever an input does not suit the
kernel it falls to S x S without a word.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from planish.peaks.attention.documents import Block, Shape, far_blocks, hidden, query_blocks
from planish.peaks.attention.kernel import BLOCK_BYTES

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
# Fewer queries a block waste less work beyond the window, more waste less time between blocks; 64 to 256 are close.
_BLOCK_QUERIES = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashKernel:
    """A document is one causal call; queries beyond their window's first length go in blocks with a mask of their own.

    Memory:        one block's output or gradients beside the whole, zero-padded copies of one block where widths
        differ, a mask of at most `BLOCK_BYTES`; grouped heads are read in place.
    Exactness:     equal to dense attention up to the order of summation.

    Attributes:
        bounds: Where documents begin and end.
        window: Keys that a query sees, its own included; None: all before it.
        scale: Factor on query times key.
        lead: Tokens from the first key to the first query, where all keys come before all queries; then there are no
            `bounds`, and each query sees a key.
    """

    bounds: tuple[int, ...]
    window: int | None
    scale: float
    lead: int | None = None

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return output and lse."""
        blocks = self._blocks(query, key)
        if len(blocks) == 1:
            out, lse = self._forward_block(blocks[0], query, key, value)
            return out.contiguous(), lse
        rows, heads, num_queries, _ = query.shape
        out = query.new_empty(rows, num_queries, heads, value.shape[-1])
        lse = query.new_empty(rows, num_queries, heads, dtype=torch.promote_types(query.dtype, torch.float32))
        for block in blocks:
            at = block.rows, block.queries
            out[at], lse[at] = self._forward_block(block, query, key, value)
        return out, lse

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of query, key and value."""
        blocks = self._blocks(query, key)
        saved = grad, query, key, value, out, lse
        if len(blocks) == 1 and blocks[0].keys == slice(0, key.shape[2]):
            return self._backward_block(blocks[0], *saved)
        grad_query, grad_key, grad_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        for block in blocks:
            query_part, key_part, value_part = self._backward_block(block, *saved)
            grad_query[block.rows, :, block.queries] = query_part
            grad_key[block.rows, :, block.keys] += key_part
            grad_value[block.rows, :, block.keys] += value_part
        return grad_query, grad_key, grad_value

    def _blocks(self, query: Tensor, key: Tensor) -> list[Block]:
        shape = Shape(rows=query.shape[0], queries=query.shape[2], keys=key.shape[2])
        reach = min(self.window or shape.keys, shape.keys) + _BLOCK_QUERIES
        num_queries = max(1, min(_BLOCK_QUERIES, BLOCK_BYTES // (query.element_size() * reach)))
        if self.lead is not None:
            most = None if self.window is None else num_queries
            return list(far_blocks(shape, lead=self.lead, window=self.window, num_queries=most))
        return list(query_blocks(self.bounds, shape, window=self.window, num_queries=num_queries, triangle_first=True))

    def _forward_block(self, block: Block, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        operands = _block_operands(block, query, key, value)
        out, lse = _FORWARD(*operands, 0.0, block.is_triangle, attn_mask=self._mask(block, query), scale=self.scale)
        return out[..., : value.shape[-1]].transpose(1, 2), lse.transpose(1, 2)

    def _backward_block(
        self, block: Block, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        operands = _block_operands(block, query, key, value)
        width = operands[0].shape[-1]
        at = block.rows, block.queries
        grad, out = (_operand(each[at].transpose(1, 2), width) for each in (grad, out))
        grads = _BACKWARD(
            grad,
            *operands,
            out,
            lse[at].transpose(1, 2),
            0.0,
            block.is_triangle,
            attn_mask=self._mask(block, query),
            scale=self.scale,
        )
        widths = query.shape[-1], key.shape[-1], value.shape[-1]
        grad_query, grad_key, grad_value = (each[..., :size] for each, size in zip(grads, widths, strict=True))
        return grad_query, grad_key, grad_value

    def _mask(self, block: Block, query: Tensor) -> Tensor | None:
        """Return 0 and -inf for the kernel, which takes no boolean mask; None where `is_triangle` says it all."""
        if block.is_triangle:
            return None
        cells = hidden(block.num_queries, block.num_keys, block.lead, self.window, query.device)
        if cells is None:
            return None
        return torch.zeros(1, 1, *cells.shape, dtype=query.dtype, device=query.device).masked_fill_(cells, -math.inf)


def _block_operands(block: Block, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    width = max(query.shape[-1], value.shape[-1])
    return (
        _operand(query[block.rows, :, block.queries], width),
        _operand(key[block.rows, :, block.keys], width),
        _operand(value[block.rows, :, block.keys], width),
    )


def _operand(tensor: Tensor, width: int) -> Tensor:
    """Return `tensor` as the kernel reads it: equal widths, neighbours in memory; zeros change no product."""
    if tensor.shape[-1] < width:
        tensor = F.pad(tensor, (0, width - tensor.shape[-1]))
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
