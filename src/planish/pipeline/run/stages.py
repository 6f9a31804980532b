"""Stages of torch.distributed.pipelining that hold what is in flight and nothing else.

[Note: pseudo-stages] The embedding is stage 0 and the head the last stage, each on the rank of its neighbour, so that
no stage with layers is first or last: each hands on its input's gradient, and torch passes what both need without a
transfer. Stage s of a schedule is torch's stage s + 1.

[Note: lean] torch's own stage allocates a buffer for every microbatch of the step at the first one, and its loop keeps
every send until the end (pytorch#136380). Here a buffer exists from its receive to its use; a stage's output from its
forward to its send; of a forward there stay its input and the node of its output.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from planish.pipeline.actions import Action, Kind
from planish.pipeline.run.deferred import Deferred
from planish.pipeline.run.embedding import SharedEmbedding
from planish.pipeline.run.flow import Flow, StageForward
from planish.pipeline.run.head import SharedHead
from planish.pipeline.run.transfer import Ring, Transfer


class _Stage(PipelineStage):
    """What all three have in common; `index` and `num_stages` count as torch does."""

    def __init__(self, index: int, num_stages: int, group: dist.ProcessGroup, flow: Flow) -> None:
        super().__init__(nn.Identity(), index, num_stages, flow.device, group=group)
        self.flow = flow

    def clear(self) -> None:
        """Forget a step that did not end."""


class LayersStage(_Stage):
    """Some of the layers.

    Memory:        a hidden state for each microbatch between its forward and its backward, with what the layers keep;
                   a send each way; what was received and not used yet. See [Note: lean].
    Communication: a hidden state to the stage after it, its gradient to the stage before.

    Args:
        index: As torch counts.
        num_stages: As torch counts.
        group: The ranks of the pipeline.
        flow: The step.
        forward: The layers.
        later: Where their linear layers leave gradients, if backward has two halves.
    """

    def __init__(
        self,
        index: int,
        num_stages: int,
        group: dist.ProcessGroup,
        flow: Flow,
        forward: StageForward,
        later: Deferred | None,
    ) -> None:
        super().__init__(index, num_stages, group, flow)
        self._forward, self._later = forward, later
        self.dw_builder = None if later is None else later.take
        self._inputs: dict[int, Tensor] = {}
        self._outputs: dict[int, Tensor] = {}
        self._grads: dict[int, Tensor] = {}
        self._input_grads: dict[int, Tensor] = {}
        self._alive: dict[int, tuple[Tensor, Any]] = {}
        self._sends = {Kind.SEND_F: Ring(1), Kind.SEND_B: Ring(1)}

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the receive of a hidden state, into a new buffer."""
        self._inputs[fwd_chunk_id] = self.flow.buffer(fwd_chunk_id)
        return [self._transfer(dist.irecv, self._inputs[fwd_chunk_id], self.stage_index - 1)]

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the receive of a gradient, into a new buffer."""
        self._grads[bwd_chunk_id] = self.flow.buffer(bwd_chunk_id)
        return [self._transfer(dist.irecv, self._grads[bwd_chunk_id], self.stage_index + 1)]

    def send(self, kind: Kind, i: int) -> None:
        """Start to send what a pass has made, once the send before it is done.

        Its receive stands earlier in the one order of all transfers, so the wait ends.
        """
        forward, sends = kind is Kind.SEND_F, self._sends[kind]
        sends.make_room()
        tensor = (self._outputs if forward else self._input_grads).pop(i).contiguous().detach()
        op = self._transfer(dist.isend, tensor, self.stage_index + (1 if forward else -1))
        sends.add(Transfer(op.op(op.tensor, group=op.group, tag=op.tag, group_dst=op.group_peer), tensor))

    def settle(self) -> None:
        """Wait for the sends that are under way."""
        for sends in self._sends.values():
            sends.settle()

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Take a hidden state from the stage before, on this rank."""
        self._inputs[mb_index] = prev_stage_outputs.detach()

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        """Take its gradient from the stage after, on this rank."""
        (self._grads[mb_index],) = next_stage_bwd_outputs

    def get_local_bwd_output(self, mb_index: int) -> tuple[Tensor, ...]:
        """Return the gradient of the hidden state that came in."""
        return (self._input_grads.pop(mb_index),)

    def forward_one_chunk(self, fwd_chunk_id: int, *_: Any, **__: Any) -> Tensor:
        """Run the layers."""
        flow, x = self.flow, self._inputs.pop(fwd_chunk_id)
        with flow.watch(self._action(Kind.F, fwd_chunk_id)), torch.set_grad_enabled(flow.training):
            x.requires_grad_(flow.training)
            out = self._forward(x, flow.batches[fwd_chunk_id])
            if flow.training:
                out = _Handover.apply(out, partial(self._grads.pop, fwd_chunk_id))
                self._alive[fwd_chunk_id] = x, torch.autograd.graph.get_gradient_edge(out)
        out = out.detach()
        if not self._is_same_rank(self.stage_index + 1):
            self._outputs[fwd_chunk_id] = out
        return out

    def backward_one_chunk(self, bwd_chunk_id: int, *_: Any, full_backward: bool = True, **__: Any) -> None:
        """Run the layers backward; of one half, the weights' gradients wait."""
        x, edge = self._alive.pop(bwd_chunk_id)
        with self.flow.watch(self._action(Kind.B if full_backward else Kind.I, bwd_chunk_id)):
            torch.autograd.backward((edge,), (x.detach(),))
            assert x.grad is not None
            self._input_grads[bwd_chunk_id], x.grad = x.grad, None
            if not full_backward:
                assert self._later is not None
                self.dw_runner[bwd_chunk_id] = self._later.take()

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *_: Any, **__: Any) -> None:
        """Add the weights' gradients that wait."""
        with self.flow.watch(self._action(Kind.W, bwd_chunk_id)):
            self.dw_runner.pop(bwd_chunk_id)()

    def clear(self) -> None:
        """Forget a step that did not end."""
        for each in (self._inputs, self._outputs, self._grads, self._input_grads, self._alive, self.dw_runner):
            each.clear()

    def _transfer(self, op: Any, tensor: Tensor, stage: int) -> dist.P2POp:
        return dist.P2POp(op, tensor, self._resolve_peer_global_rank(stage), self.group)

    def _action(self, kind: Kind, i: int) -> Action:
        return Action(self.stage_index - 1, kind, i)


class _Handover(torch.autograd.Function):
    """y = x, whose gradient is what `take` returns: any tensor of y's shape may stand for it where backward begins.

    Whoever calls backward holds what it gives until all of it is done; this gradient goes when it was used.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, take: Callable[[], Tensor]) -> Tensor:
        ctx.take = take
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.take(), None


class EmbeddingStage(_Stage):
    """The end of the pipeline that hidden states come from. See [Note: pseudo-stages]."""

    def __init__(self, num_stages: int, group: dist.ProcessGroup, flow: Flow, embedding: SharedEmbedding) -> None:
        super().__init__(0, num_stages, group, flow)
        self._embedding = embedding
        self._grads: dict[int, Tensor] = {}

    def forward_one_chunk(self, fwd_chunk_id: int, *_: Any, **__: Any) -> Tensor:
        """Return the embedding that all ranks have brought."""
        return self._embedding.take(fwd_chunk_id)

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        """Take its gradient from the first layers."""
        (self._grads[mb_index],) = next_stage_bwd_outputs

    def backward_one_chunk(self, bwd_chunk_id: int, *_: Any, **__: Any) -> None:
        """Give the gradient to all ranks."""
        self._embedding.give(bwd_chunk_id, self._grads.pop(bwd_chunk_id))

    def clear(self) -> None:
        """Forget a step that did not end."""
        self._grads.clear()


class HeadStage(_Stage):
    """The end of the pipeline that gradients come from. See [Note: pseudo-stages]."""

    def __init__(self, num_stages: int, group: dist.ProcessGroup, flow: Flow, head: SharedHead) -> None:
        super().__init__(num_stages - 1, num_stages, group, flow)
        self._head = head

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Give the last hidden state to all ranks."""
        self._head.take(mb_index, prev_stage_outputs)

    def forward_one_chunk(self, fwd_chunk_id: int, *_: Any, **__: Any) -> None:
        """Do nothing: S is a pass of all ranks."""

    def backward_one_chunk(self, bwd_chunk_id: int, *_: Any, **__: Any) -> None:
        """Do nothing: all ranks have made the gradient."""

    def get_local_bwd_output(self, mb_index: int) -> tuple[Tensor, ...]:
        """Return the gradient of the last hidden state."""
        return (self._head.gradient(mb_index),)
