"""Attention in tiles of fixed bytes with plain products: whatever no fused kernel takes, such as a softcap."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from planish.peaks.attention.documents import Block, Shape, far_blocks, hidden, query_blocks
from planish.peaks.attention.kernel import BLOCK_BYTES

_TILE_QUERIES = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class TiledKernel:
    """Scores `softcap * tanh(query . key * scale / softcap)` of one tile at a time, again in backward.

    The softmax runs over a row's tiles with its largest score and sum so far; all of it in at least float32.

    Memory:        two tiles of `BLOCK_BYTES` forward, three backward, one block of queries; sums of the gradients of
        key and value in float32.
    Exactness:     equal to dense attention up to the order of summation.

    Attributes:
        bounds: Where documents begin and end.
        window: Keys that a query sees, its own included; None: all before it.
        softcap: Bound of the scores; None: no bound.
        scale: Factor on query times key.
        lead: Tokens from the first key to the first query, where all keys come before all queries; then there are no
            `bounds`, and each query sees a key.
    """

    bounds: tuple[int, ...]
    window: int | None
    softcap: float | None
    scale: float
    lead: int | None = None

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return output and lse."""
        rows, heads, num_queries, _ = query.shape
        dtype = torch.promote_types(query.dtype, torch.float32)
        out = query.new_empty(rows, num_queries, heads, value.shape[-1])
        lse = query.new_empty(rows, num_queries, heads, dtype=dtype)
        for row, block in self._query_blocks(query, key):
            at = row, block.queries
            scaled = _grouped(query[row, :, block.queries], key, dtype) * self.scale
            largest = scaled.new_full((*scaled.shape[:2], 1), torch.finfo(dtype).min)
            total = torch.zeros_like(largest)
            mixed = scaled.new_zeros(*scaled.shape[:2], value.shape[-1])
            for keys, cells in self._tiles(block, query):
                scores = self._scores(scaled, key[row, :, keys])
                _fill(scores, cells, -math.inf)
                before, largest = largest, torch.maximum(largest, scores.amax(-1, keepdim=True))
                weights = scores.sub_(largest).exp_()
                decay = (before - largest).exp_()
                total = total.mul_(decay).add_(weights.sum(-1, keepdim=True))
                mixed = mixed.mul_(decay).baddbmm_(weights, value[row, :, keys].to(dtype))
            out[at] = _token_major(mixed.div_(total), block)
            lse[at] = _token_major(largest.add_(total.log_()), block).squeeze(-1)
        return out, lse

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of query, key and value."""
        grad_query = torch.empty_like(query)
        grad_key = torch.zeros_like(key, dtype=lse.dtype)
        grad_value = torch.zeros_like(value, dtype=lse.dtype)
        for row, block in self._query_blocks(query, key):
            scaled = _grouped(query[row, :, block.queries], key, lse.dtype) * self.scale
            grad_mixed, mixed, block_lse = (
                _grouped(each[row, block.queries].transpose(0, 1), key, lse.dtype)
                for each in (grad, out, lse.unsqueeze(-1))
            )
            delta = (grad_mixed * mixed).sum(-1, keepdim=True)
            grad_scaled = torch.zeros_like(scaled)
            for keys, cells in self._tiles(block, query):
                tile_key, tile_value = (each[row, :, keys].to(lse.dtype) for each in (key, value))
                scores = self._scores(scaled, tile_key)
                weights = (scores - block_lse).exp_()
                _fill(weights, cells, 0.0)
                grad_value[row, :, keys] += weights.transpose(1, 2) @ grad_mixed
                grad_scores = torch.bmm(grad_mixed, tile_value.transpose(1, 2)).sub_(delta).mul_(weights)
                if self.softcap is not None:
                    grad_scores.mul_(scores.div_(self.softcap).square_().neg_().add_(1.0))
                grad_key[row, :, keys] += grad_scores.transpose(1, 2) @ scaled
                grad_scaled.baddbmm_(grad_scores, tile_key)
            grad_query[row, :, block.queries] = _token_major(grad_scaled.mul_(self.scale), block).transpose(0, 1)
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype)

    def _query_blocks(self, query: Tensor, key: Tensor) -> Iterator[tuple[int, Block]]:
        shape = Shape(rows=query.shape[0], queries=query.shape[2], keys=key.shape[2])
        for block in self._blocks(shape):
            for row in range(block.rows.start, block.rows.stop):
                yield row, block

    def _blocks(self, shape: Shape) -> Iterator[Block]:
        if self.lead is not None:
            return far_blocks(shape, lead=self.lead, window=self.window, num_queries=_TILE_QUERIES)
        return query_blocks(self.bounds, shape, window=self.window, num_queries=_TILE_QUERIES, triangle_first=False)

    def _tiles(self, block: Block, query: Tensor) -> Iterator[tuple[slice, Tensor | None]]:
        """Yield (keys, hidden cells) along the keys of `block`."""
        num_keys = max(1, BLOCK_BYTES // (query.shape[1] * _TILE_QUERIES * max(4, query.element_size())))
        for start in range(block.keys.start, block.keys.stop, num_keys):
            keys = slice(start, min(start + num_keys, block.keys.stop))
            lead = block.lead - (start - block.keys.start)
            yield keys, hidden(block.num_queries, keys.stop - keys.start, lead, self.window, query.device)

    def _scores(self, scaled: Tensor, key: Tensor) -> Tensor:
        scores = torch.bmm(scaled, key.to(scaled.dtype).transpose(1, 2))
        return scores if self.softcap is None else scores.div_(self.softcap).tanh_().mul_(self.softcap)


def _grouped(heads_first: Tensor, key: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `[H, n, d]` as `[Hkv, H / Hkv * n, d]`, so that each head of `key` is multiplied once."""
    return heads_first.to(dtype).unflatten(0, (key.shape[1], -1)).flatten(1, 2)


def _token_major(grouped: Tensor, block: Block) -> Tensor:
    """Return `[Hkv, H / Hkv * n, d]` as `[n, H, d]`."""
    return grouped.unflatten(1, (-1, block.num_queries)).flatten(0, 1).transpose(0, 1)


def _fill(grouped: Tensor, cells: Tensor | None, fill: float) -> None:
    if cells is not None:
        grouped.unflatten(1, (-1, cells.shape[0])).masked_fill_(cells, fill)
