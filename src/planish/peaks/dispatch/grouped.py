"""Experts at work by grouped products: a tile spans experts, and each product is one launch.

[Note: sizes] A tile's products have exactly as many rows as it has routes, so that there is no tail behind the last
expert, which `grouped_mm` would leave as it found it (pytorch#193633). The gradients of weights are formed expert by
expert into their places: one grouped product would need room for all experts' at once.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from planish.peaks.dispatch.experts import Buffers, Desk, Rows, Sums, Weights
from planish.peaks.dispatch.gates import Gate, gate_backward, gate_forward

_ALIGNED = 16  # bytes of a stride that the kernels want a multiple of


def has_grouped_products(hidden: Tensor, weights: Weights) -> bool:
    """Return whether a device forms all experts' products in one launch: bf16 on CUDA, with aligned rows."""
    strides = (hidden.shape[1], *weights.up.shape[1:], *weights.down.shape[1:])
    aligned = all(each * hidden.itemsize % _ALIGNED == 0 for each in strides)
    return hidden.device.type == "cuda" and hidden.dtype == torch.bfloat16 and aligned


class GroupedDesk(Desk):
    """All of a rank's experts at work together; see `Desk`.

    Memory: beside the buffers, what the products of a tile return: as `planish.price.dispatch` has it.
    """

    def __init__(self, weights: Weights, gate: Gate, buffers: Buffers) -> None:
        super().__init__(weights, gate, buffers)
        turned = weights.transposed
        self._ups, self._downs = (each if turned else each.transpose(1, 2) for each in (weights.up, weights.down))

    def add_outputs(self, rows: Rows, total: Tensor) -> None:
        """See `Desk`."""
        buffers, flat = self._buffers, rows.scores.flatten()
        for tile, ends in _spans(rows, self.size):
            num, row = tile.stop - tile.start, rows.row[tile]
            outer, scratch, score = (buffers[name][:num] for name in ("outer", "scratch", "score"))
            groups = torch.tensor(ends, dtype=torch.int32, device=row.device)
            inner = self._first(self._gather(rows.hidden, row, "row"), groups, ends)
            gate_forward(self._gate, inner, outer, scratch)
            del inner
            out = F.grouped_mm(outer, self._downs, offs=groups)
            _add_biases(out, self._weights.down_bias, ends)
            torch.index_select(flat, 0, rows.order[tile], out=score)
            self._add(total, row, out, score)
            del out, groups

    def add_gradients(
        self, rows: Rows, grad: Tensor, *, total: Tensor | None, scores: Tensor | None, sums: Sums
    ) -> None:
        """See `Desk`."""
        buffers, flat = self._buffers, rows.scores.flatten()
        for tile, ends in _spans(rows, self.size):
            num, row, place = tile.stop - tile.start, rows.row[tile], rows.order[tile]
            outer, scratch, score = (buffers[name][:num] for name in ("outer", "scratch", "score"))
            groups = torch.tensor(ends, dtype=torch.int32, device=row.device)
            given, by_out = self._gather(rows.hidden, row, "row"), self._gather(grad, row, "grad")
            inner = self._first(given, groups, ends)
            gate_forward(self._gate, inner, outer, scratch)
            by_outer = F.grouped_mm(by_out, self._downs.transpose(1, 2), offs=groups)
            by_score = None if scores is None else self._by_bias(by_out, ends)
            torch.index_select(flat, 0, place, out=score)
            column = buffers["column"][:num].copy_(score).unsqueeze(1)
            by_out.mul_(column)
            _add_products(sums, 1, outer, by_out, ends)
            if scores is not None:
                self._score(scores, place, outer.mul_(by_outer), by_score)
            gate_backward(self._gate, inner, by_outer.mul_(column), outer)
            del by_outer
            _add_products(sums, 0, given, inner, ends)
            if total is not None:
                out = F.grouped_mm(inner, self._ups.transpose(1, 2), offs=groups)
                self._add(total, row, out, None)
                del out
            del inner, groups

    def _first(self, given: Tensor, groups: Tensor, ends: tuple[int, ...]) -> Tensor:
        inner = F.grouped_mm(given, self._ups, offs=groups)
        _add_biases(inner, self._weights.up_bias, ends)
        return inner

    def _by_bias(self, by_out: Tensor, ends: tuple[int, ...]) -> Tensor | None:
        """Return what the second product's bias adds to the gradients of the scores."""
        bias = self._weights.down_bias
        if bias is None:
            return None
        found = self._buffers["by_score"][: len(by_out)]
        for expert, part in _parts(ends):
            torch.mv(by_out[part], bias[expert], out=found[part])
        return found


def _spans(rows: Rows, size: int) -> Iterator[tuple[slice, tuple[int, ...]]]:
    """Yield the next at most `size` routes, and where each expert's end among them; as even as they can be."""
    num_routes = rows.ends[-1] if rows.ends else 0
    num_tiles = -(-num_routes // size)
    for index in range(num_tiles):
        first, last = (num_routes * each // num_tiles for each in (index, index + 1))
        yield slice(first, last), tuple(min(max(end, first), last) - first for end in rows.ends)


def _parts(ends: tuple[int, ...]) -> Iterator[tuple[int, slice]]:
    """Yield each expert that has routes in a tile, with them."""
    begin = 0
    for expert, end in enumerate(ends):
        if end > begin:
            yield expert, slice(begin, end)
        begin = end


def _add_biases(out: Tensor, bias: Tensor | None, ends: tuple[int, ...]) -> None:
    if bias is not None:
        for expert, part in _parts(ends):
            out[part].add_(bias[expert])


def _add_products(sums: Sums, index: int, given: Tensor, made: Tensor, ends: tuple[int, ...]) -> None:
    for expert, part in _parts(ends):
        sums.add(index, expert, given[part], made[part])
