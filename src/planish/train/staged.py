"""A model that the stages of a pipeline train: built for one rank, asked like a model that is whole."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from planish.comm.world import World
from planish.data.batch import Batch
from planish.errors import UsageError
from planish.memory.book import Phase
from planish.memory.ledger import Ledger
from planish.methods import Blocked, Packed, Pipeline, Plain, Plan
from planish.models.anatomy import Anatomy
from planish.models.load import text_config
from planish.models.low_rank import is_adapted
from planish.models.split import StageView
from planish.peaks.vocab.inputs import Options
from planish.peaks.vocab.shard import Shard, ShardedHead
from planish.pipeline.actions import Action, Kind
from planish.pipeline.costs import Costs
from planish.pipeline.memory import enough_microbatches, in_flight_of_stages
from planish.pipeline.observed import Pass, observed, planned, times_of
from planish.pipeline.run.flow import Flow
from planish.pipeline.run.pace import SPARE, Pace
from planish.pipeline.run.runner import Parts, PipelineRun, StageLayers
from planish.pipeline.schedule import Schedule
from planish.pipeline.simulate import Timeline
from planish.pipeline.workload import Workload
from planish.train.spread import add_up
from planish.train.stages import Cut, FarRows, StageModule, cut
from planish.train.tensor_files import FarTensor
from planish.train.turns import faster_turns

_PHASES: dict[Kind, Phase] = {
    Kind.IF: "forward",
    Kind.F: "forward",
    Kind.S: "head",
    Kind.T: "head",
    Kind.B: "backward",
    Kind.I: "backward",
    Kind.W: "backward",
    Kind.IB: "backward",
}
# The step whose passes are measured, after a first one that is never like the others, and the one that follows.
_MEASURED_STEP, _SHOWN_STEP = 2, 3


class Staged:
    """One rank's stages. All ranks of a pipeline call the same methods with the same batches, all others with theirs.

    Once passes were measured, schedules are made anew, if no rank holds more with them but for `spare`. Each parameter
    adds up its microbatches in their order whatever the schedule, so that a run repeats bit for bit; but a tied weight
    adds what comes from both ends as the schedule has it, and keeps the first one.

    Attributes:
        spare: Hidden states that later steps may hold beyond the first ones.

    Args:
        part: What this rank holds, with the plan's methods in place.
        pace: Makes the schedules.
        plan: One method per peak.
        ledger: Counts, by the phase of each pass.
        world: The ranks of the pipeline.
        end_tape: Called behind the last layer of each forward.
    """

    def __init__(
        self,
        part: Cut,
        pace: Pace,
        plan: Plan,
        ledger: Ledger,
        world: World,
        *,
        end_tape: Sequence[Callable[[], None]] = (),
    ) -> None:
        assert world.pipeline is not None
        assert isinstance(plan.vocab, Blocked)
        self._part, self._pace, self._ledger, self._world = part, pace, ledger, world
        self._passes: list[Pass] = []
        self._steps, self._plan = 0, plan
        self._began_s = self._took_s = 0.0
        self._used: tuple[Schedule, Costs] | None = None
        tied = part.anatomy.weight is part.decoder.embedding.weight
        self._plans_anew = not tied and not world.assumed
        self.spare = 0 if tied else SPARE
        anatomy, decoder = part.anatomy, part.decoder
        packed = isinstance(plan.attention, Packed)
        for stage, layers in zip(part.stages, part.layers, strict=True):
            stage.run = StageView(decoder, layers, packed=packed)
        shape = {"start": min(part.rows.start, part.vocab_size), "vocab_size": part.vocab_size}
        self._flow = Flow(
            width=anatomy.hidden_size,
            dtype=anatomy.model.dtype,
            device=anatomy.model.device,
            watch=self._watch,
            assumed=world.assumed,
        )
        parts = Parts(
            stages=[StageLayers(forward=_taped(each, end_tape), modules=list(each.parts)) for each in part.stages],
            embedding=Shard(weight=decoder.embedding.weight, **shape),
            padding_idx=decoder.embedding.padding_idx,
            head=ShardedHead(
                shard=Shard(weight=anatomy.weight, bias=anatomy.head.bias, **shape),
                options=Options(
                    ignore_index=-100,
                    logit_scale=anatomy.logit_scale,
                    softcap=anatomy.softcap,
                    tile_bytes=plan.vocab.tile_bytes,
                ),
            ),
        )
        self._run = PipelineRun(
            pace.schedule, parts, self._flow, group=world.pipeline.get_group(), vocabulary_group=world.second_group()
        )

    def step(self, batches: Sequence[Batch], *, upstream: float) -> Tensor:
        """Add the gradients of `batches` to this rank's parameters; return each one's summed loss, [m], as all ranks.

        Args:
            batches: From `Engine.take`.
            upstream: One over the tokens that count in the whole step.
        """
        self._passes.clear()
        self._used = self._pace.schedule(len(batches)), self._pace.costs
        if self.shown:
            self._world.barrier()
        self._began_s = time.perf_counter()
        with self._ledger.phase("forward"):
            losses = self._run.step(batches, upstream=upstream)
            self._add_up()
        self._took_s = time.perf_counter() - self._began_s
        for name, param in self._part.anatomy.model.named_parameters():
            if param.grad is not None:
                self._ledger.adopt(param.grad, "gradients", owner=name)
        self._steps += 1
        if self._steps == _MEASURED_STEP and self._plans_anew:
            with self._ledger.phase("forward"):
                passes = self.passes()
            if self._pace.measured(passes, len(batches)):
                self._run.forget_schedules()
        return losses

    def _add_up(self) -> None:
        """Sum the gradients of rows of the vocabulary over the ranks that hold the same ones."""
        for param in self._part.shared.values() if self._world.counts else ():
            if param.grad is not None:
                add_up(param.grad, self._world.together)

    def enough(self, num_microbatches: int) -> int:
        """Return how many microbatches hold at once what so many do."""
        return enough_microbatches(self._pace.schedule, num_microbatches)

    def losses(self, batches: Sequence[Batch]) -> Tensor:
        """Return each batch's summed loss, [m]; the same bits on every rank."""
        return self._run.losses(batches)

    def passes(self) -> list[list[Pass]]:
        """Return what each rank of the first pipeline did in the last step. Communication: one all-gather."""
        return self._world.gather(self._passes)[:: len(self._world.peers)]

    @property
    def shown(self) -> bool:
        """Whether the step that runs, or that ran last, is among those whose passes are shown."""
        return self._steps <= _SHOWN_STEP

    def bubble(self) -> float:
        """Return the share of the ranks' time without a pass in the last step. Communication: one all-gather."""
        busy = sum(end - start for _, start, end in self._passes)
        ranks = self._world.gather([busy, self._took_s])
        return 1 - sum(each for each, _ in ranks) / (len(ranks) * max(took for _, took in ranks))

    def timelines(self) -> tuple[Timeline, Timeline]:
        """Return what was planned of the last step and what was seen, in seconds since the ranks began together.

        Communication: one all-gather.
        """
        assert self._used is not None
        schedule, costs = self._used
        seen = observed(schedule, self.passes())
        return planned(schedule, costs, seen), seen

    def remark(self) -> str | None:
        """Return what the last step that is shown says of another schedule, or None. Communication: one all-gather."""
        if self._steps != _SHOWN_STEP or self._world.counts:  # shards take 1F1B alone
            return None
        assert self._used is not None
        times = times_of([each for rank in self.passes() for each in rank], num_layers=sum(self._pace.layers))
        if times is None:
            return None
        work = replace(self._pace.work, microbatches=self._used[0].num_microbatches).timed(times)
        return faster_turns(self._plan.pipeline or Pipeline(), work, self._world.seat[1])

    def sharded(self, name: str, tensor: Tensor | FarTensor) -> Tensor | FarTensor:
        """Return what belongs to parameter `name`, of a shared one as a part of all ranks' rows."""
        param = self._part.shared.get(name)
        if param is None or param.shape != tensor.shape:
            return tensor
        return self._part.sharded(tensor) if isinstance(tensor, Tensor) else FarRows(tensor, self._part)

    @contextmanager
    def _watch(self, action: Action) -> Iterator[None]:
        """Count a pass in its phase, and note when it ran."""
        self._settle()
        start = time.perf_counter()
        with self._ledger.phase(_PHASES[action.kind]) if self._flow.training else nullcontext():
            yield
        self._settle()
        if self._flow.training:
            end = time.perf_counter()
            self._passes.append((str(action), start - self._began_s, end - self._began_s))

    def _settle(self) -> None:
        """Wait for a GPU in a step that is measured."""
        if self._steps + 1 in (_MEASURED_STEP, _SHOWN_STEP) and self._flow.device.type == "cuda":
            torch.cuda.synchronize()


def _taped(view: StageModule, end_tape: Sequence[Callable[[], None]]) -> Callable[[Tensor, Any], Tensor]:
    """Return a stage's forward that ends its tape: what lives until its backward is of one microbatch."""

    def forward(hidden: Tensor, batch: Any) -> Tensor:
        out = view(hidden, batch)
        for each in end_tape:
            each()
        return out

    return forward


def most_in_flight(pace: Pace, world: World) -> int:
    """Return the most microbatches that a stage of this rank has between forward and backward, however many there are.

    Args:
        pace: Makes the schedules.
        world: The ranks of the pipeline.
    """
    seat, seats = world.seat
    schedule = pace.schedule(4 * seats + 9)
    flying = in_flight_of_stages(schedule)
    return max(flying[stage] for stage, owner in enumerate(schedule.stage_ranks) if owner == seat)


def divide(anatomy: Anatomy, plan: Plan, world: World) -> tuple[Cut, Pace]:
    """Return this rank's part of a model, and the pace at which its stages run.

    Layers go to stages such that the largest stage multiplies least, counted by the weights that a token meets.

    Args:
        anatomy: Of the whole model; only rank 0 needs to hold its weights.
        plan: One method per peak.
        world: The ranks of the pipeline.

    Raises:
        UsageError: Fewer layers than stages, a model that stages cannot divide, or an adapter on its head.
    """
    if is_adapted(anatomy.head):
        raise UsageError(
            "`mesh.pp` shares the head's rows between ranks and takes no adapter on it; leave the head out of "
            "`model.adapter.targets`."
        )
    pipeline = plan.pipeline or Pipeline()
    pace = Pace(pipeline, _work(anatomy, plan), world.seat[1])
    return cut(anatomy, pace.layers, pace.schedule(1).stage_ranks, world), pace


def _work(anatomy: Anatomy, plan: Plan) -> Workload:
    """Return what layers and head multiply, by the weights that a token meets."""
    config = text_config(anatomy.model.config)
    top_k = getattr(config, "num_experts_per_tok", None) or 1
    numbers = [
        sum(each.numel() * (top_k / len(each) if each.ndim == 3 else 1) for each in layer.parameters())
        for layer in anatomy.layers.values()
    ]
    mean = sum(numbers) / len(numbers)
    return Workload(
        layers=len(numbers),
        microbatches=1,
        layer_backward=2.0 if isinstance(plan.boundary, Plain) else 3.0,
        head=anatomy.weight.numel() / mean,
        shares=tuple(each / mean for each in numbers),
    )
