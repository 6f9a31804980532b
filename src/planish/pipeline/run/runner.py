"""A pipeline whose ranks share embedding and head: microbatches in, losses out, gradients in every parameter's `grad`.

[Note: one process] What comes out is what one process computes with the same microbatches, up to the order of
summation. The loss of a token counts with the factor that the caller gives, which knows the tokens of the whole step;
nothing is divided here, so that several steps add up.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from planish.errors import UsageError
from planish.peaks.vocab.shard import Shard, ShardedHead
from planish.pipeline.actions import Action, Head, Kind
from planish.pipeline.run.channel import Channel
from planish.pipeline.run.deferred import Deferred, defer_linears
from planish.pipeline.run.dispatch import Dispatch, Half, OfMicrobatch, check_torch
from planish.pipeline.run.embedding import SharedEmbedding
from planish.pipeline.run.flow import Flow, Microbatch, StageForward
from planish.pipeline.run.head import SharedHead
from planish.pipeline.run.stages import EmbeddingStage, HeadStage, LayersStage
from planish.pipeline.schedule import Schedule, forward_only
from planish.pipeline.validate import validate


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayers:
    """One stage of a rank.

    Attributes:
        forward: Runs its layers.
        modules: They are in there.
    """

    forward: StageForward
    modules: Sequence[nn.Module]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What one rank holds of the model.

    Attributes:
        stages: Its stages, first ones first.
        embedding: Its rows of the embedding.
        padding_idx: The id whose row gets no gradient.
        head: Its rows of the head; of tied weights the same parameter.
    """

    stages: Sequence[StageLayers]
    embedding: Shard
    head: ShardedHead
    padding_idx: int | None = None


class PipelineRun:
    """One rank's part of a pipeline; all ranks call the same methods with the same microbatches.

    Memory:        what the schedule's counts say (`planish.pipeline.memory`), whatever the number of microbatches.
    Communication: hidden states between stages on `group`; the vocabulary's on `vocabulary_group`. A schedule's hash is
                   compared before it runs first: 32 bytes.
    Exactness:     see [Note: one process].

    Args:
        plan: Microbatches in, schedule with its communication out; the same on all ranks.
        parts: What this rank holds.
        flow: Sizes and dtype of hidden states, and who watches.
        group: The ranks of the pipeline.
        vocabulary_group: The same ranks, in another group.

    Raises:
        UsageError: Another torch, a schedule without a shared head, or schedules that differ between ranks.
    """

    def __init__(
        self,
        plan: Callable[[int], Schedule],
        parts: Parts,
        flow: Flow,
        *,
        group: dist.ProcessGroup,
        vocabulary_group: dist.ProcessGroup,
    ) -> None:
        check_torch()
        self._plan, self._flow, self._group = plan, flow, group
        self._dispatches: dict[tuple[int, bool], Dispatch] = {}
        schedule = plan(1)
        if schedule.head not in (Head.VOCAB_1, Head.VOCAB_2):
            raise UsageError(f'`plan.pipeline.head` must be "vocab-1" or "vocab-2" to run, got "{schedule.head}".')
        ranks = schedule.stage_ranks
        self._channel = Channel(vocabulary_group)
        if schedule.num_ranks != self._channel.size:
            raise UsageError(f"the schedule has {schedule.num_ranks} ranks, and the pipeline {self._channel.size}.")
        self._embedding = SharedEmbedding(parts.embedding, parts.padding_idx, self._channel, ranks[0], flow)
        self._head = SharedHead(
            parts.head, one_barrier=schedule.head is Head.VOCAB_2, channel=self._channel, root=ranks[-1], flow=flow
        )
        self._stages = self._make_stages(schedule, parts)

    def step(self, batches: Sequence[Microbatch], *, upstream: float) -> Tensor:
        """Add the gradients of all microbatches to every parameter; return each one's loss, summed over tokens, [m].

        Args:
            batches: The same on every rank.
            upstream: Derivative of what is minimised by the loss of each counted token, such as 1 / all of them.
        """
        self._run(batches, upstream=upstream, training=True, labelled=True)
        return self._head.total(len(batches))

    def losses(self, batches: Sequence[Microbatch]) -> Tensor:
        """Return the loss of each microbatch, summed over tokens, [m]; nothing is kept for a backward."""
        self._run(batches, upstream=0.0, training=False, labelled=True)
        return self._head.total(len(batches))

    def most_likely(self, batches: Sequence[Microbatch]) -> list[Tensor]:
        """Return for each microbatch the most likely next token after each token, [B, S] each."""
        self._run(batches, upstream=0.0, training=False, labelled=False)
        return [self._head.likely.pop(i) for i in range(len(batches))]

    def forget_schedules(self) -> None:
        """Plan anew from the next step on."""
        self._dispatches.clear()

    @torch.no_grad()
    def _run(self, batches: Sequence[Microbatch], *, upstream: float, training: bool, labelled: bool) -> None:
        dispatch = self._dispatch(len(batches), training=training)
        flow = self._flow
        flow.batches, flow.upstream, flow.training, flow.labelled = batches, upstream, training, labelled
        self._embedding.clear()
        self._head.clear()
        for stage in self._stages:
            stage.clear()
        dispatch.run()
        self._channel.settle()
        for stage in self._stages:
            if isinstance(stage, LayersStage):
                stage.settle()
        flow.batches = ()

    def _dispatch(self, size: int, *, training: bool) -> Dispatch:
        """Return the loop over a step of `size` microbatches."""
        if (size, training) not in self._dispatches:
            schedule = self._plan(size)
            if not self._flow.assumed:
                agree(schedule, self._group)
            validate(schedule)
            schedule = schedule if training else forward_only(schedule)
            self._dispatches[size, training] = Dispatch(schedule, self._stages, self._functions())
        return self._dispatches[size, training]

    def _functions(self) -> dict[Kind | Half, OfMicrobatch]:
        embedding, head = self._embedding, self._head
        passes = {
            Kind.IF: embedding.look_up,
            Kind.IB: embedding.add_gradient,
            Kind.S: head.scan,
            Kind.T: head.add_gradient,
        }
        transfers = {
            Kind.CIF: embedding.send,
            Kind.CIB: embedding.send_back,
            Kind.C0: head.send,
            Kind.C1: head.meet,
            Half.C1: head.part,
            Kind.C2: head.reduce,
        }
        return {kind: partial(self._watched, kind, does) for kind, does in passes.items()} | transfers

    def _watched(self, kind: Kind, does: OfMicrobatch, i: int) -> None:
        with self._flow.watch(Action(self._channel.rank, kind, i)):
            does(i)

    def _make_stages(self, schedule: Schedule, parts: Parts) -> list[LayersStage | EmbeddingStage | HeadStage]:
        ranks, num_stages = schedule.stage_ranks, schedule.num_stages + 2
        mine = [stage for stage, rank in enumerate(ranks) if rank == self._channel.rank]
        later = Deferred() if schedule.split_backward else None
        stages: list[LayersStage | EmbeddingStage | HeadStage] = []
        for index, each in zip(mine, parts.stages, strict=True):
            if later is not None:
                defer_linears(each.modules, later)
            stages.append(LayersStage(index + 1, num_stages, self._group, self._flow, each.forward, later))
        if ranks[0] == self._channel.rank:
            stages.insert(0, EmbeddingStage(num_stages, self._group, self._flow, self._embedding))
        if ranks[-1] == self._channel.rank:
            stages.append(HeadStage(num_stages, self._group, self._flow, self._head))
        return stages


def agree(schedule: Schedule, group: dist.ProcessGroup) -> None:
    """Refuse, on every rank alike, ranks whose schedules differ. Communication: 32 bytes from each to all.

    Raises:
        UsageError: The ranks that differ from rank 0.
    """
    digest = torch.tensor(list(hashlib.sha256(schedule.to_text().encode()).digest()), dtype=torch.uint8)
    backend = dist.get_backend(group)
    digest = digest.cuda() if backend == "nccl" else digest
    found = [torch.empty_like(digest) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, digest, group=group)
    others = [str(rank) for rank, each in enumerate(found) if not torch.equal(each, found[0])]
    if others:
        ranks = f"rank{'s' if len(others) > 1 else ''} {', '.join(others)}"
        raise UsageError(
            f"{ranks} and rank 0 have different schedules of {schedule.num_microbatches} microbatches; start every "
            "rank with the same settings, files and versions."
        )
