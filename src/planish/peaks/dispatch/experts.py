"""The experts' arithmetic on rows that lie here: one expert after the other, a tile of its routes at a time.

Shape letters: `R` rows, `K` top-k, `E` experts, `D` model width, `F` an expert's width, `C` columns of its first
product (F, or 2F with a gate), `N` routes of a tile.

[Note: products] The weighted sum of a row's experts, and the sums over routes that make the gradients, are formed in
float32 where the model is narrower. So are the products on a CPU without instructions for narrow ones, tens of times
faster than those; each expert's weights are raised when its turn comes.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from planish.peaks.dispatch.gates import Gate, gate_backward, gate_forward

Buffers = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The weights of some experts, as a model holds them.

    Attributes:
        up: [E, C, D], or [E, D, C] if transposed.
        down: [E, D, F], or [E, F, D] if transposed.
        up_bias: [E, C].
        down_bias: [E, D].
        transposed: Whether a row multiplies the weights as they are.
    """

    up: Tensor
    down: Tensor
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    transposed: bool = False

    @property
    def num_experts(self) -> int:
        """How many experts."""
        return self.up.shape[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows that lie here, and the routes that they take.

    Attributes:
        hidden: [R, D].
        scores: [R, K].
        order: The places in `scores`, flat, of all routes, expert by expert.
        row: The row of each of them.
        ends: Where each expert's routes end in `order`.
    """

    hidden: Tensor
    scores: Tensor
    order: Tensor
    row: Tensor
    ends: tuple[int, ...]

    def tiles(self, size: int) -> Iterator[tuple[int, slice]]:
        """Yield (expert, its next at most `size` routes), an expert's tiles as even as they can be."""
        begin = 0
        for expert, end in enumerate(self.ends):
            num_tiles = -(-(end - begin) // size)
            for index in range(num_tiles):
                first, last = ((end - begin) * each // num_tiles for each in (index, index + 1))
                yield expert, slice(begin + first, begin + last)
            begin = end


class Sum:
    """The gradient of one stacked parameter, formed expert by expert, in float32 where the parameter is narrower.

    Args:
        like: The parameter [E, ...].
        once: Whether an expert's parts come one after the other; else sums of all experts are kept at once.
    """

    def __init__(self, like: Tensor, *, once: bool) -> None:
        wide = torch.promote_types(like.dtype, torch.float32)
        self._like, self._expert = like, -1
        self._fresh = set(range(len(like)))
        direct = like.dtype == wide
        self._grad = torch.empty_like(like) if direct or once else None
        self._wide = None if direct else like.new_empty(like.shape[1:] if once else like.shape, dtype=wide)

    def is_fresh(self, expert: int) -> bool:
        """Return whether nothing has been added to an expert's gradient yet."""
        return expert in self._fresh

    def at(self, expert: int, *, overwrite: bool = False) -> Tensor:
        """Return where to add the next part of an expert's gradient, or to write the first one."""
        if self._wide is None or self._grad is None:
            target = (self._grad if self._wide is None else self._wide)[expert]
        else:
            target = self._wide
            if expert != self._expert:
                self._flush()
                self._expert = expert
        if expert in self._fresh:
            self._fresh.remove(expert)
            if not overwrite:
                target.zero_()
        return target

    def finish(self) -> Tensor:
        """Return the gradient in the parameter's dtype."""
        total = self._wide if self._grad is None else self._grad
        for expert in self._fresh:
            total[expert].zero_()
        if self._grad is None:
            return total.to(self._like.dtype)
        self._flush()
        return total

    def _flush(self) -> None:
        if self._expert >= 0:
            self._grad[self._expert].copy_(self._wide)


class Sums:
    """The gradients of all weights that need one.

    Args:
        weights: Of the experts.
        wanted: Whether up, down, up_bias, down_bias need a gradient.
        once: See `Sum`.
        buffers: Hold "up_part" and "down_part" where products are narrower than sums.
    """

    def __init__(
        self, weights: Weights, wanted: tuple[bool, bool, bool, bool], *, once: bool, buffers: Buffers
    ) -> None:
        held = (weights.up, weights.down, weights.up_bias, weights.down_bias)
        self._sums = [
            Sum(each, once=once) if need and each is not None else None for each, need in zip(held, wanted, strict=True)
        ]
        self._transposed, self._buffers = weights.transposed, buffers

    def add(self, index: int, expert: int, given: Tensor, made: Tensor) -> None:
        """Add a product's part: `given` [N, in] were its rows, `made` [N, out] is the gradient of its result."""
        weight, bias = self._sums[index], self._sums[index + 2]
        if weight is not None:
            left, right = (given, made) if self._transposed else (made, given)
            fresh = weight.is_fresh(expert)
            target = weight.at(expert, overwrite=fresh)
            if target.dtype != left.dtype:
                part = torch.mm(left.t(), right, out=self._buffers[("up_part", "down_part")[index]])
                target.copy_(part) if fresh else target.add_(part)
            elif fresh:
                torch.mm(left.t(), right, out=target)
            else:
                target.addmm_(left.t(), right)
        if bias is not None:
            target = bias.at(expert)
            summed = self._buffers[("up_sum", "down_sum")[index]]
            target.add_(torch.sum(made, 0, dtype=summed.dtype, out=summed))

    def targets(self, expert: int) -> list[Tensor | None]:
        """Return where one expert's gradients are summed."""
        return [None if each is None else each.at(expert) for each in self._sums]

    def finish(self) -> tuple[Tensor | None, ...]:
        """Return the gradients of up, down, up_bias, down_bias."""
        return tuple(None if each is None else each.finish() for each in self._sums)


class Desk:
    """One expert at work: its weights as its products take them, and a tile's buffers.

    Args:
        weights: Of the experts.
        gate: Between their products.
        buffers: By the names that `planish.price.dispatch` gives them.
    """

    def __init__(self, weights: Weights, gate: Gate, buffers: Buffers) -> None:
        self._weights, self._gate, self._buffers = weights, gate, buffers
        self._raised = buffers["outer"].dtype != weights.up.dtype
        self._expert = -1

    @property
    def size(self) -> int:
        """Routes of a tile."""
        return self._buffers["outer"].shape[0]

    def add_outputs(self, rows: Rows, total: Tensor) -> None:
        """Add to `total` [R, D] each row's experts, weighted."""
        buffers, flat, self._expert = self._buffers, rows.scores.flatten(), -1
        for expert, tile in rows.tiles(self.size):
            self._take(expert)
            num, row = tile.stop - tile.start, rows.row[tile]
            inner, outer, scratch, score = (buffers[name][:num] for name in ("inner", "outer", "scratch", "score"))
            out = self._gather(rows.hidden, row, "row")
            self._multiply(out, self._up, self._up_bias, inner)
            gate_forward(self._gate, inner, outer, scratch)
            self._multiply(outer, self._down, self._down_bias, out)
            torch.index_select(flat, 0, rows.order[tile], out=score)
            self._add(total, row, out, score)

    def add_gradients(
        self, rows: Rows, grad: Tensor, *, total: Tensor | None, scores: Tensor | None, sums: Sums
    ) -> None:
        """Add to `total` [R, D], `scores` [R, K] and `sums` the gradients by rows, scores and weights.

        With g a row's gradient, a what the gate made of u = x @ up: score's gradient is <g @ down.T, a>, so that the
        second product is not computed again; the others follow from score * g as in any feed-forward network.

        Args:
            rows: As they went forward.
            grad: [R, D], of the rows' weighted sums.
            total: None: rows need no gradient.
            scores: None: scores need no gradient.
            sums: Of the weights.

        References:
            SonicMoE (arXiv 2512.14080), section 4: the gradient of the scores from the inner product.
        """
        buffers, flat, self._expert = self._buffers, rows.scores.flatten(), -1
        for expert, tile in rows.tiles(self.size):
            self._take(expert)
            num, row, place = tile.stop - tile.start, rows.row[tile], rows.order[tile]
            inner, outer, scratch, score = (buffers[name][:num] for name in ("inner", "outer", "scratch", "score"))
            given, by_out = self._gather(rows.hidden, row, "row"), self._gather(grad, row, "grad")
            self._multiply(given, self._up, self._up_bias, inner)
            gate_forward(self._gate, inner, outer, scratch)
            by_outer = torch.mm(by_out, self._down.t(), out=scratch)
            by_score = None
            if scores is not None and self._down_bias is not None:
                by_score = torch.mv(by_out, self._down_bias, out=buffers["by_score"][:num])
            torch.index_select(flat, 0, place, out=score)
            column = buffers["column"][:num].copy_(score).unsqueeze(1)
            sums.add(1, expert, outer, by_out.mul_(column))
            if scores is not None:
                self._score(scores, place, outer.mul_(by_outer), by_score)
            gate_backward(self._gate, inner, by_outer.mul_(column), outer)
            sums.add(0, expert, given, inner)
            if total is not None:
                self._add(total, row, torch.mm(inner, self._up.t(), out=given), None)

    def _take(self, expert: int) -> None:
        """Let the next tiles be of `expert`."""
        if expert == self._expert:
            return
        self._expert, weights = expert, self._weights
        found = [
            None if each is None else self._raise(name, each[expert])
            for name, each in (
                ("up", weights.up),
                ("down", weights.down),
                ("up_bias", weights.up_bias),
                ("down_bias", weights.down_bias),
            )
        ]
        up, down, self._up_bias, self._down_bias = found
        self._up, self._down = (up, down) if weights.transposed else (up.t(), down.t())

    def _raise(self, name: str, tensor: Tensor) -> Tensor:
        return self._buffers[name].copy_(tensor) if self._raised else tensor

    def _gather(self, source: Tensor, row: Tensor, name: str) -> Tensor:
        """Return rows of `source` as the products take them."""
        if not self._raised:
            return torch.index_select(source, 0, row, out=self._buffers[name][: len(row)])
        given = torch.index_select(source, 0, row, out=self._buffers["given"][: len(row)])
        return self._buffers[name][: len(row)].copy_(given)

    def _multiply(self, rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        if bias is None:
            torch.mm(rows, weight, out=out)
        else:
            torch.addmm(bias, rows, weight, out=out)

    def _score(self, scores: Tensor, place: Tensor, parts: Tensor, more: Tensor | None) -> None:
        """Write the sums of `parts` [N, F], and `more`, where a tile's scores have their gradients."""
        buffers, num = self._buffers, len(place)
        summed = torch.sum(parts, 1, dtype=buffers["sum"].dtype, out=buffers["sum"][:num])
        if more is not None:
            summed.add_(more)
        scores.view(-1).index_copy_(0, place, buffers["score"][:num].copy_(summed))

    def _add(self, total: Tensor, row: Tensor, out: Tensor, score: Tensor | None) -> None:
        """Add rows to `total`, times their scores if there are any, in its own dtype."""
        if out.dtype != total.dtype:
            out = self._buffers["wide"][: len(row)].copy_(out)
        if score is not None:
            out.mul_(score.unsqueeze(1))
        total.index_add_(0, row, out)
