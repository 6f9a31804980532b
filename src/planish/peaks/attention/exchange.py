"""Keys and values of other spans of the sequence come to the queries that see them, one span at a time.

With `O_j, L_j` the output and lse of this rank's queries over the keys of span j alone,

    L = log sum_j exp(L_j),    O = sum_j exp(L_j - L) O_j,

and every kernel's own backward is right for its keys once it is given O and L of all spans.

[Note: steps] At step s each rank sends its keys to the rank s places after it and takes those of the rank s places
before it, in a circle; only what some query there sees, and no step that nobody needs. What arrives next travels while
what is here is computed. In backward the gradients of these keys go back the same way.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from planish.comm.ring import Circle, wait
from planish.peaks.attention.flash import FlashKernel
from planish.peaks.attention.kernel import Kernel, token_parts
from planish.peaks.attention.tiled import TiledKernel
from planish.price.sights import Sight

Seen = dict[tuple[int, int], list[Sight]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeKernel:
    """The products of this rank's queries with its own keys and with those that come.

    Memory:        forward, in room of fixed size: the largest span's keys and values three times; the output in
                   float32. Backward: five times, and the gradients in float32.
    Communication: forward: each rank's keys and values to every rank that sees them; backward: the same, and their
                   gradients back.
    Exactness:     equal to dense attention up to the order of summation.

    Attributes:
        circle: The ranks, in the order of their spans.
        own: The products with this rank's own keys.
        seen: What each rank sees of each other.
        most_keys: Tokens of the largest span of all rows together.
        window: Keys that a query sees; None: all before it.
        softcap: Bound of the scores; None: no bound.
        scale: Factor on query times key.
    """

    circle: Circle
    own: Kernel
    seen: Seen
    most_keys: int
    window: int | None
    softcap: float | None
    scale: float

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output `[B, own tokens, H, dv]` and its lse; all ranks call it together."""
        out, lse = self.own.forward(query, key, value)
        out = out.to(lse.dtype)
        _add_far(self, query, key, value, out, lse)
        return out, lse

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of query, key and value; all ranks call it together."""
        sums = tuple(each.to(lse.dtype) for each in self.own.backward(grad, query, key, value, out, lse))
        _add_far_gradients(self, grad, (query, key, value, out, lse), sums)
        grad_query, grad_key, grad_value = sums
        return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype)

    @property
    def steps(self) -> list[int]:
        """Distances at which some rank sees another."""
        return sorted({(rank - other) % self.circle.size for rank, other in self.seen})

    def from_before(self, step: int) -> list[Sight]:
        """Return what this rank sees of the rank `step` places before it."""
        return self.seen.get((self.circle.rank, (self.circle.rank - step) % self.circle.size), [])

    def by_after(self, step: int) -> list[Sight]:
        """Return what the rank `step` places after this one sees of it."""
        return self.seen.get(((self.circle.rank + step) % self.circle.size, self.circle.rank), [])

    def far(self, sight: Sight, device_type: str) -> Kernel:
        """Return the products with keys that all come before the queries."""
        options = {"bounds": (), "window": self.window, "scale": self.scale, "lead": sight.lead}
        if device_type == "cpu" and self.softcap is None:
            return FlashKernel(**options)
        return TiledKernel(softcap=self.softcap, **options)


def _add_far(plan: ExchangeKernel, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor) -> None:
    """Let `out` and `lse` count the keys of other ranks too."""
    for step, arrived in _arrivals(plan, key, value):
        for sight, far_key, far_value in _unpacked(plan.from_before(step), arrived, key, value):
            at = slice(sight.row, sight.row + 1), sight.queries
            kernel = plan.far(sight, query.device.type)
            far_out, far_lse = kernel.forward(query[at[0], :, at[1]], far_key, far_value)
            _merge(out[at], lse[at], far_out, far_lse)
            del far_out, far_lse


def _merge(out: Tensor, lse: Tensor, far_out: Tensor, far_lse: Tensor) -> None:
    """Let `out` and `lse` count other keys too; `far_out` is used up."""
    total = torch.logaddexp(lse, far_lse)
    for part, part_lse, far, far_part_lse, all_lse in token_parts(out, lse, far_out, far_lse, total):
        part.mul_((part_lse - all_lse).exp_().unsqueeze(-1))
        part.add_(far.to(part.dtype).mul_((far_part_lse - all_lse).exp_().unsqueeze(-1)))
    lse.copy_(total)


def _add_far_gradients(plan: ExchangeKernel, grad: Tensor, saved: tuple[Tensor, ...], sums: tuple[Tensor, ...]) -> None:
    """Add to `sums` what other ranks' keys give this rank's queries, and what its keys are given by others."""
    (query, key, value, out, lse), (grad_query, grad_key, grad_value) = saved, sums
    home = _Home(plan, key, value)
    for step, arrived in _arrivals(plan, key, value):
        home.land(grad_key, grad_value)
        leaving = _unpacked(plan.from_before(step), home.leaving, key, value)
        for (sight, far_key, far_value), (_, *places) in zip(
            _unpacked(plan.from_before(step), arrived, key, value), leaving, strict=True
        ):
            at = slice(sight.row, sight.row + 1), sight.queries
            operands = grad[at], query[at[0], :, at[1]], far_key, far_value, out[at], lse[at]
            parts = plan.far(sight, query.device.type).backward(*operands)
            grad_query[at[0], :, at[1]] += parts[0]
            for place, index in zip(places, (1, 2), strict=True):
                place.copy_(parts[index])
            del parts, operands
        home.send(step)
    home.land(grad_key, grad_value)


class _Home:
    """The way back for the gradients of keys and values that had come from other ranks.

    Attributes:
        leaving: Room for the gradients that this rank makes at a step, packed as what has come.
    """

    def __init__(self, plan: ExchangeKernel, key: Tensor, value: Tensor) -> None:
        self._plan, self._key, self._value = plan, key, value
        self.leaving, self._landing = _room(plan, key, value), _room(plan, key, value)
        self._coming: tuple[list[Sight], list[dist.Work]] | None = None

    def send(self, step: int) -> None:
        """Begin to send what was made at `step`, and to receive what another rank has made for this one."""
        rank, seen = self._plan.circle.rank, self._plan.by_after(step)
        hop = _begin(
            self._plan.circle,
            self.leaving,
            (rank - step, _numel(self._plan.from_before(step), self._key, self._value)),
            self._landing,
            (rank + step, _numel(seen, self._key, self._value)),
        )
        self._coming = seen, hop

    def land(self, grad_key: Tensor, grad_value: Tensor) -> None:
        """Add what has come."""
        if self._coming is None:
            return
        seen, hop = self._coming
        wait(hop)
        for sight, by_key, by_value in _unpacked(seen, self._landing, self._key, self._value):
            at = slice(sight.row, sight.row + 1), slice(None), sight.keys
            grad_key[at] += by_key
            grad_value[at] += by_value
        self._coming = None


def _arrivals(plan: ExchangeKernel, key: Tensor, value: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield each step with what the rank so many spans earlier has sent; the next one's travels meanwhile."""
    leaving, rank = _room(plan, key, value), plan.circle.rank
    slots = (_room(plan, key, value), _room(plan, key, value))

    def begin(step: int, slot: Tensor) -> list[dist.Work]:
        seen = plan.by_after(step)
        for sight, *places in _unpacked(seen, leaving, key, value):
            for place, tensor in zip(places, (key, value), strict=True):
                place.copy_(tensor[sight.row : sight.row + 1, :, sight.keys])
        came = _numel(plan.from_before(step), key, value)
        return _begin(plan.circle, leaving, (rank + step, _numel(seen, key, value)), slot, (rank - step, came))

    steps = plan.steps
    hop = begin(steps[0], slots[0]) if steps else []
    for number, step in enumerate(steps):
        wait(hop)
        if number + 1 < len(steps):
            hop = begin(steps[number + 1], slots[(number + 1) % 2])
        yield step, slots[number % 2]


def _begin(circle: Circle, leaving: Tensor, to: tuple[int, int], into: Tensor, of: tuple[int, int]) -> list[dist.Work]:
    """Begin to send so many numbers `to` a rank and to receive so many `of` another; all ranks call it together."""
    sent, received = [0] * circle.size, [0] * circle.size
    for counts, (rank, numel) in ((sent, to), (received, of)):
        if numel:
            counts[rank % circle.size] = numel
    return circle.begin_swap(into[: sum(received)], leaving[: sum(sent)], received, sent)


def _room(plan: ExchangeKernel, key: Tensor, value: Tensor) -> Tensor:
    """Return room for the keys and values of the largest span, whatever is seen of it."""
    return key.new_empty(plan.most_keys * key.shape[1] * (key.shape[-1] + value.shape[-1]))


def _numel(seen: Sequence[Sight], key: Tensor, value: Tensor) -> int:
    return sum(each.num_keys for each in seen) * key.shape[1] * (key.shape[-1] + value.shape[-1])


def _unpacked(
    seen: Sequence[Sight], packed: Tensor, key: Tensor, value: Tensor
) -> Iterator[tuple[Sight, Tensor, Tensor]]:
    """Yield each sight with its keys `[1, Hkv, K, d]` and values, views of where they are packed."""
    start, heads = 0, key.shape[1]
    for sight in seen:
        views = []
        for width in (key.shape[-1], value.shape[-1]):
            stop = start + sight.num_keys * heads * width
            views.append(packed[start:stop].view(1, sight.num_keys, heads, width).transpose(1, 2))
            start = stop
        yield sight, *views
