"""The head on all ranks, between the last stage's forward and its backward: C0, S, C1, T, and C2 of Vocab-1."""

import torch
from torch import Tensor

from planish.peaks.vocab.shard import ShardedHead, Tokens
from planish.peaks.vocab.sharded import Scan, TokenStatistics, combine_shards, rescale, s_pass, t_pass, to_tokens
from planish.pipeline.run.channel import Channel
from planish.pipeline.run.flow import Flow, grad_of
from planish.pipeline.run.transfer import Transfer, wait


class SharedHead:
    """One rank's part of the head.

    Memory:        of a microbatch the hidden state from C0 to T, K x N x 4 bytes of statistics from S to T and p times
                   that in C1, its share of the gradient, N x D x 4, from S (Vocab-2) or T (Vocab-1) to the barrier; one
                   tile. Two microbatches overlap.
    Communication: C0: T x D in the dtype of hidden states from the last stage's rank to all. C1: K x N x 4 from each to
                   all, in one all-gather; in Vocab-2 N x D x 4 from each to the last stage's rank. C2: the same.
    Exactness:     all ranks know the same bits of every loss; gradients as of `s_pass` and `t_pass`.

    Args:
        head: This rank's rows; gradients are summed in place.
        one_barrier: Vocab-2; else Vocab-1.
        channel: Between the shards.
        root: Rank of the last stage.
        flow: The step.
    """

    def __init__(self, head: ShardedHead, *, one_barrier: bool, channel: Channel, root: int, flow: Flow) -> None:
        self._head, self._one_barrier = head, one_barrier
        self._channel, self._root, self._flow = channel, root, flow
        self._arriving: dict[int, tuple[Tensor, Transfer | None]] = {}
        self._scans: dict[int, Scan] = {}
        self._meeting: dict[int, tuple[Scan, Tensor, Transfer | None]] = {}
        self._known: dict[int, tuple[Tokens, TokenStatistics]] = {}
        self._shares: dict[int, Tensor] = {}
        self._valid: dict[int, Tensor | None] = {}
        self._reduced: dict[int, tuple[Tensor, Transfer | None]] = {}
        self.losses: dict[int, Tensor] = {}
        self.likely: dict[int, Tensor] = {}

    def take(self, i: int, hidden: Tensor) -> None:
        """Take the last hidden state [B, S, D], on the last stage's rank."""
        self._arriving[i] = hidden.contiguous(), None

    def send(self, i: int) -> None:
        """C0: start to bring the hidden state to all ranks."""
        here = self._channel.rank == self._root
        hidden = self._arriving[i][0] if here else self._flow.buffer(i)
        self._arriving[i] = hidden, self._channel.broadcast(hidden, self._root)

    def scan(self, i: int) -> None:
        """S: the shard's statistics, and in Vocab-2 what its share of the gradient is made of."""
        hidden, work = self._arriving.pop(i)
        batch, flow = self._flow.batches[i], self._flow
        wait(work)
        if flow.labelled:
            product = flow.training and self._one_barrier
            self._scans[i] = s_pass(self._head, hidden, batch.target, product=product, num_valid=batch.num_valid)
        else:
            self._scans[i] = s_pass(self._head, hidden)

    def meet(self, i: int) -> None:
        """C1, the first half: start to gather the statistics."""
        scan, channel = self._scans.pop(i), self._channel
        gathered = scan.statistics.new_empty(channel.size, *scan.statistics.shape)
        if channel.size == 1:
            gathered = scan.statistics.unsqueeze(0)
        self._meeting[i] = scan, gathered, channel.gather(gathered, scan.statistics)

    def part(self, i: int) -> None:
        """C1, the second half: what all shards say, and in Vocab-2 the start of the gradient's sum."""
        scan, gathered, work = self._meeting.pop(i)
        wait(work)
        whole, flow = combine_shards(gathered, self._head.statistics(labelled=self._flow.labelled)), self._flow
        if not flow.labelled:
            assert whole.argmax is not None
            self.likely[i] = whole.argmax.view(flow.batches[i].input_ids.shape)
            return
        self.losses[i] = whole.losses(self._head.objective).sum()
        if flow.training:
            self._known[i] = scan.tokens, whole
            if self._channel.rank == self._root:
                self._valid[i] = scan.tokens.index  # T lets go of the hidden states, which the sum does not need
            if self._one_barrier:
                self._reduce(i, rescale(self._head, scan, whole, flow.upstream))

    def add_gradient(self, i: int) -> None:
        """T: add the shard's gradients, and in Vocab-1 make its share of the hidden state's."""
        tokens, whole = self._known.pop(i)
        weight, bias = self._head.shard.weight, self._head.shard.bias
        frozen = not weight.requires_grad and (bias is None or not bias.requires_grad)
        if frozen and self._one_barrier:
            return
        share = t_pass(
            self._head,
            tokens,
            whole,
            self._flow.upstream,
            weight_grad=grad_of(weight) if weight.requires_grad else None,
            bias_grad=None if bias is None or not bias.requires_grad else grad_of(bias),
            hidden_grad=not self._one_barrier,
        )
        if share is not None:
            self._shares[i] = share

    def reduce(self, i: int) -> None:
        """C2: start to sum the shares on the last stage's rank."""
        self._reduce(i, self._shares.pop(i))

    def gradient(self, i: int) -> Tensor:
        """Return the gradient of the hidden state, [B, S, D], on the last stage's rank."""
        share, work = self._reduced.pop(i)
        wait(work)
        ids, flow = self._flow.batches[i].input_ids, self._flow
        spread = to_tokens(share.to(flow.dtype), self._valid.pop(i), num_tokens=ids.numel())
        return spread.view(*ids.shape, flow.width)

    def clear(self) -> None:
        """Forget the step."""
        kept = self._arriving, self._scans, self._meeting, self._known, self._shares, self._valid, self._reduced
        for each in (*kept, self.losses, self.likely):
            each.clear()

    def _reduce(self, i: int, share: Tensor) -> None:
        work = self._channel.reduce(share, self._root)
        if self._channel.rank == self._root:
            self._reduced[i] = share, work

    def total(self, num_microbatches: int) -> Tensor:
        """Return the summed loss of each microbatch, [m], and forget it; the same bits on every rank."""
        return torch.stack([self.losses.pop(i) for i in range(num_microbatches)])
