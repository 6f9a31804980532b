"""The embedding on all ranks: each sends the rows that it owns to the first stage, and gets their gradients back.

Every rank knows all ids, so all know how many rows each sends: one exchange with uneven parts, in which every token's
row travels once. (The paper has every rank write a whole [T, D], mostly zeros, and all-reduces those: appendix C.)
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from planish.peaks.vocab.shard import Rows, Shard, embed, embed_backward
from planish.pipeline.run.channel import Channel
from planish.pipeline.run.flow import Flow, grad_of
from planish.pipeline.run.transfer import Transfer, wait


@dataclass(frozen=True, slots=True, kw_only=True)
class _Owners:
    """Whose the tokens of a microbatch are: their positions by owner, [T], and how many each rank owns."""

    order: Tensor
    counts: list[int]

    def owned(self, rank: int) -> Tensor:
        """Return the positions of the tokens that `rank` owns."""
        start = sum(self.counts[:rank])
        return self.order[start : start + self.counts[rank]]


class SharedEmbedding:
    """One rank's part of the embedding.

    Memory:        of two microbatches each row owned, [R, D]; on the first stage's rank of two all rows, [T, D], twice
                   while they are put in order; 8 bytes for each token from IF to IB.
    Communication: CIF: R x D sent by each rank to the first stage's; CIB: as much back.
    Exactness:     rows bitwise; gradients as `embed_backward` sums them.

    Args:
        shard: This rank's rows; its weight's gradient is summed in place.
        padding_idx: The id whose row gets no gradient.
        channel: Between the shards.
        root: Rank of the first stage.
        flow: The step.
    """

    def __init__(self, shard: Shard, padding_idx: int | None, channel: Channel, root: int, flow: Flow) -> None:
        self._shard, self._padding_idx = shard, padding_idx
        self._channel, self._root, self._flow = channel, root, flow
        self._rows_each = max(1, -(-shard.vocab_size // channel.size))
        self._owners: dict[int, _Owners] = {}
        self._rows: dict[int, Tensor] = {}
        self._grads: dict[int, Tensor] = {}
        self._arriving: dict[int, tuple[Tensor, Transfer | None]] = {}
        self._returning: dict[int, tuple[Tensor, Transfer | None]] = {}

    def look_up(self, i: int) -> None:
        """IF: take the rows that are here."""
        ids = self._flow.batches[i].input_ids
        owner = ids.reshape(-1).div(self._rows_each, rounding_mode="floor").clamp_(0, self._channel.size - 1)
        sorted_, order = owner.sort(stable=True)
        ends = torch.searchsorted(sorted_, torch.arange(self._channel.size, device=ids.device), right=True)
        owners = self._owners[i] = _Owners(order=order, counts=self._counts(i, ends))
        self._rows[i] = embed(self._shard, ids, owned=owners.owned(self._channel.rank)).values

    def send(self, i: int) -> None:
        """CIF: start to bring the rows to the first stage's rank."""
        rows, counts, channel = self._rows.pop(i), self._owners[i].counts, self._channel
        if channel.size == 1:
            self._arriving[i] = rows, None
            return
        here = channel.rank == self._root
        received = rows.new_empty(sum(counts) if here else 0, rows.shape[1])
        work = channel.exchange(received, rows, counts if here else [0] * channel.size, self._only_root(len(rows)))
        if here:
            self._arriving[i] = received, work

    def take(self, i: int) -> Tensor:
        """Return the embedding [B, S, D], on the first stage's rank."""
        rows, work = self._arriving.pop(i)
        wait(work)
        whole = self._flow.buffer(i)
        whole.view(-1, self._flow.width).index_copy_(0, self._owners[i].order, rows)
        if not self._flow.training:
            del self._owners[i]
        return whole

    def give(self, i: int, grad: Tensor) -> None:
        """Take the gradient of the embedding [B, S, D], on the first stage's rank."""
        self._grads[i] = grad.reshape(-1, self._flow.width).index_select(0, self._owners[i].order)

    def send_back(self, i: int) -> None:
        """CIB: start to bring each row's gradient to its owner."""
        counts, channel, flow = self._owners[i].counts, self._channel, self._flow
        if channel.size == 1:
            self._returning[i] = self._grads.pop(i), None
            return
        here = channel.rank == self._root
        empty = torch.empty(0, flow.width, dtype=flow.dtype, device=flow.device)
        grads = self._grads.pop(i) if here else empty
        received = empty.new_empty(counts[channel.rank], flow.width)
        work = channel.exchange(received, grads, self._only_root(len(received)), counts if here else [0] * channel.size)
        self._returning[i] = received, work

    def add_gradient(self, i: int) -> None:
        """IB: add the gradients of the rows that are here."""
        grads, work = self._returning.pop(i)
        owners = self._owners.pop(i)
        wait(work)
        if self._shard.weight.requires_grad:
            rows = Rows(index=owners.owned(self._channel.rank), values=grads)
            ids = self._flow.batches[i].input_ids
            found = embed_backward(self._shard, ids, rows, padding_idx=self._padding_idx)
            found.add_to(grad_of(self._shard.weight))

    def clear(self) -> None:
        """Forget a step that did not end."""
        for each in (self._owners, self._rows, self._grads, self._arriving, self._returning):
            each.clear()

    def _counts(self, i: int, ends: Tensor) -> list[int]:
        """Return how many tokens each rank owns; where there is no data this rank owns all of them, the most it can."""
        if self._flow.assumed:
            size = self._flow.batches[i].input_ids.numel()
            return [size if rank == self._channel.rank else 0 for rank in range(self._channel.size)]
        return [stop - start for start, stop in pairwise((0, *ends.tolist()))]

    def _only_root(self, rows: int) -> list[int]:
        return [rows if rank == self._root else 0 for rank in range(self._channel.size)]
