"""A layer's experts as one step of autograd: bounded at launch whatever the router does, computed again in backward."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from planish.peaks.dispatch.experts import Buffers, Desk, Rows, Sums, Weights
from planish.peaks.dispatch.gates import Gate, columns
from planish.peaks.dispatch.grouped import GroupedDesk, has_grouped_products
from planish.peaks.dispatch.held import held
from planish.price.dispatch import Experts, backward_buffers, forward_buffers
from planish.price.processor import product_dtype

Read = Callable[[Tensor, int], list[int]]
"""Reads where each expert's routes end, an integer each, of so many routes."""


def read_ends(ends: Tensor, _routes: int) -> list[int]:
    """Return the integers of a tensor."""
    return ends.tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What the router made of one layer.

    Attributes:
        max_over_mean: The most routes of one expert, over the mean.
        spilled: Routes that a rank other than their expert's owner worked on.
        blocks: Blocks that it took.
    """

    max_over_mean: float
    spilled: int
    blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a layer's experts run.

    Attributes:
        gate: What an expert does between its two products.
        tile_rows: Routes of one expert that are at work at once.
        block_rows: Tokens whose sums over experts are formed at once.
        read: Reads integers from a tensor; the one wait for the device in a layer.
        seen: Told of the load when a layer runs forward, and when it runs again.
    """

    gate: Gate
    tile_rows: int
    block_rows: int
    read: Read = read_ends
    seen: Callable[[Load], None] = lambda _: None


def pipelined_experts(hidden: Tensor, ids: Tensor, scores: Tensor, weights: Weights, options: Options) -> Tensor:
    """Return sum_j scores[t, j] * expert_{ids[t, j]}(hidden[t]) for every token t, [T, D].

    Memory:        beyond the result, tiles of fixed size and 16 bytes a route; one block's sums in float32 where the
                   model is narrower. Kept for backward: the arguments alone. In backward also the gradients, and one
                   expert's weight gradients in float32 where the model is narrower. Nothing depends on `ids`.
    Exactness:     equal up to the order of summation; sums over experts and over routes are formed in at least float32.

    Args:
        hidden: [T, D].
        ids: [T, K], experts of each token.
        scores: [T, K].
        weights: Of all experts.
        options: How they run.

    Raises:
        ValueError: Shapes that do not fit one another.
        TypeError: Hidden states of another dtype than the weights.
    """
    check(hidden, ids, scores, weights)
    step = _Alone(transposed=weights.transposed, options=options)
    return held(step, ids, hidden, scores, weights.up, weights.down, weights.up_bias, weights.down_bias)


def products_in(given: torch.dtype, device: torch.device) -> torch.dtype:
    """Return in which dtype products are made; see the note on products in `experts`."""
    if device.type != "cpu":
        return given
    return getattr(torch, product_dtype(str(given).removeprefix("torch.")))


@dataclass(slots=True, kw_only=True)
class _Alone:
    """The experts of one rank as a `Step`."""

    transposed: bool
    options: Options
    grad: Tensor | None = None

    def run(self, ids: Tensor, *operands: Tensor | None) -> Tensor:
        """See `Step`."""
        options = self.options
        hidden, scores, up, down, up_bias, down_bias = operands
        weights = Weights(up=up, down=down, up_bias=up_bias, down_bias=down_bias, transposed=self.transposed)
        sizes = sizes_of(hidden, ids, scores, weights, options.gate)
        buffers = allocate(forward_buffers(sizes, len(hidden), options.tile_rows, options.block_rows), hidden, scores)
        desk = desk_of(sizes, weights, options.gate, buffers)
        result = hidden.new_empty(hidden.shape)
        loads, blocks = np.zeros(weights.num_experts), _blocks(len(hidden), options.block_rows)
        for block in blocks:
            total = _total(result[block], buffers)
            rows = _route(hidden[block], ids[block], scores[block], weights.num_experts, options.read)
            desk.add_outputs(rows, total)
            loads += np.diff(rows.ends, prepend=0)
            del rows
            if total.dtype != result.dtype:
                result[block] = total
        options.seen(Load(max_over_mean=max_over_mean(loads), spilled=0, blocks=len(blocks)))
        return result

    def gradients(
        self, grad: Tensor, needed: tuple[bool, ...], ids: Tensor, *operands: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """See `Step`."""
        hidden, scores, up, down, up_bias, down_bias = operands
        options = self.options
        need_hidden, need_scores, *wanted = needed
        weights = Weights(up=up, down=down, up_bias=up_bias, down_bias=down_bias, transposed=self.transposed)
        sizes = sizes_of(hidden, ids, scores, weights, options.gate)
        listed = backward_buffers(sizes, len(hidden), options.tile_rows, options.block_rows)
        buffers = allocate(listed, hidden, scores)
        desk = desk_of(sizes, weights, options.gate, buffers)
        blocks = _blocks(len(hidden), options.block_rows)
        sums = Sums(weights, tuple(wanted), once=len(blocks) <= 1, buffers=buffers)
        by_hidden = hidden.new_empty(hidden.shape) if need_hidden else None
        by_scores = scores.new_zeros(scores.shape) if need_scores else None
        grad = grad.contiguous()
        for block in blocks:
            total = None if by_hidden is None else _total(by_hidden[block], buffers)
            of_scores = None if by_scores is None else by_scores[block]
            desk.add_gradients(
                _route(hidden[block], ids[block], scores[block], weights.num_experts, options.read),
                grad[block],
                total=total,
                scores=of_scores,
                sums=sums,
            )
            if total is not None and total.dtype != by_hidden.dtype:
                by_hidden[block] = total
        return by_hidden, by_scores, *sums.finish()


def desk_of(sizes: Experts, weights: Weights, gate: Gate, buffers: Buffers) -> Desk:
    """Return experts at work in `buffers`, all together or one after the other."""
    return (GroupedDesk if sizes.grouped else Desk)(weights, gate, buffers)


def max_over_mean(loads: np.ndarray) -> float:
    """Return the largest of `loads` over their mean, 1.0 where there are none."""
    return float(loads.max() / loads.mean()) if loads.any() else 1.0


def sizes_of(hidden: Tensor, ids: Tensor, scores: Tensor, weights: Weights, gate: Gate) -> Experts:
    """Return what a price needs to know of a call."""
    inner = weights.up.shape[2 if weights.transposed else 1]
    return Experts(
        hidden_size=hidden.shape[1],
        width=inner // columns(gate),
        columns=inner,
        num_experts=weights.num_experts,
        top_k=ids.shape[1],
        itemsize=hidden.itemsize,
        product_itemsize=products_in(hidden.dtype, hidden.device).itemsize,
        score_itemsize=scores.itemsize,
        biased=weights.up_bias is not None,
        transposed=weights.transposed,
        grouped=has_grouped_products(hidden, weights),
    )


def _blocks(tokens: int, block_rows: int) -> list[slice]:
    """Return as few ranges of at most `block_rows` tokens as there can be, as even as they can be."""
    number = -(-tokens // block_rows)
    return [slice(tokens * each // number, tokens * (each + 1) // number) for each in range(number)]


def _route(hidden: Tensor, ids: Tensor, scores: Tensor, num_experts: int, read: Read) -> Rows:
    """Return rows with their routes in the order of experts, and of tokens within an expert."""
    chosen, order = torch.sort(ids.flatten(), stable=True)
    experts = torch.arange(num_experts, dtype=chosen.dtype, device=chosen.device)
    ends = tuple(read(torch.searchsorted(chosen, experts, right=True), len(order)))
    del chosen, experts
    return Rows(hidden=hidden, scores=scores, order=order, row=order // ids.shape[1], ends=ends)


def _total(result: Tensor, buffers: Buffers) -> Tensor:
    """Return zeros to add up `result` in: itself, or a wider buffer."""
    total = buffers["total"][: len(result)] if "total" in buffers else result
    return total.zero_()


def allocate(listed: dict[str, tuple[tuple[int, ...], str]], hidden: Tensor, scores: Tensor) -> Buffers:
    """Return the buffers that a price lists."""
    dtypes = dtypes_of(hidden, scores)
    return {name: hidden.new_empty(shape, dtype=dtypes[kind]) for name, (shape, kind) in listed.items()}


def dtypes_of(hidden: Tensor, scores: Tensor) -> dict[str, torch.dtype]:
    """Return the dtype of each kind of buffer."""
    return {
        "given": hidden.dtype,
        "product": products_in(hidden.dtype, hidden.device),
        "wide": torch.promote_types(hidden.dtype, torch.float32),
        "score": scores.dtype,
        "index": torch.int64,
        "code": torch.int32,
        "byte": torch.uint8,
    }


def check(hidden: Tensor, ids: Tensor, scores: Tensor, weights: Weights) -> None:
    """Refuse operands that do not belong together.

    Raises:
        ValueError: Shapes that do not fit one another.
        TypeError: Hidden states of another dtype than the weights.
    """
    if hidden.dtype != weights.up.dtype:
        raise TypeError(
            f"`hidden` must have the experts' dtype, {weights.up.dtype}; got {hidden.dtype}. Cast it, or leave out "
            "autocast around a model whose weights are narrow already."
        )
    if ids.shape != scores.shape or len(ids) != len(hidden):
        raise ValueError(
            f"`ids` and `scores` must be [tokens, top_k] for {len(hidden)} tokens; got {tuple(ids.shape)} and "
            f"{tuple(scores.shape)}."
        )
