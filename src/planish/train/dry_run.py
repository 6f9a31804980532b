"""The step that would train, run on fake tensors: every phase's peak to the byte, without data, weights or memory."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from transformers import PretrainedConfig, PreTrainedModel

from planish.comm.world import assume
from planish.data.batch import Batch
from planish.memory.book import Phase
from planish.memory.ledger import Ledger
from planish.memory.report import PhasePeak, StepMemory
from planish.models.int8 import loads_on_host, settle
from planish.models.load import draw_model, load_config
from planish.runfile import RunFile
from planish.shapes import spans
from planish.train.behind import room_for
from planish.train.collect import Collected
from planish.train.engine import Engine, build_engine
from planish.train.evaluate import evaluate
from planish.train.facts import AssumedFacts
from planish.train.job import Job
from planish.train.loop import train_step
from planish.train.model_folder import rehearse_write, weights_of
from planish.train.optimizer import build_optimizer

_STEPS = 2


class WorstCase:
    """Endless batches of the run's largest shape: full rows, one document each, every token counted."""

    def __init__(self, run: RunFile, device_type: str, place: tuple[int, int] = (0, 1)) -> None:
        rows, context = run.rows_per_microbatch, run.data.context
        ids = torch.zeros((rows, context), dtype=torch.int64, device=device_type)
        whole = Batch(
            input_ids=ids,
            target=torch.zeros_like(ids),
            position_ids=torch.zeros_like(ids),
            cu_seq_lens=tuple(range(0, rows * context + 1, context)),
            num_valid=rows * context,
        )
        columns = spans(context, place[1])[place[0]]
        ids = ids[:, columns].clone()
        self._batch = replace(
            whole, input_ids=ids, target=ids, position_ids=ids, num_valid=rows * (columns.stop - columns.start)
        )

    def next(self) -> Batch:
        """Return a batch with tensors of its own."""
        batch = self._batch
        return replace(
            batch,
            input_ids=batch.input_ids.clone(),
            target=batch.target.clone(),
            position_ids=batch.position_ids.clone(),
        )


class Replay:
    """Endless batches with the sizes of given ones."""

    def __init__(self, batches: Sequence[Batch], mode: FakeTensorMode) -> None:
        self._batches, self._mode = _endless(batches), mode

    def next(self) -> Batch:
        """Return the next batch, fake."""
        batch = next(self._batches)
        return replace(
            batch,
            input_ids=self._mode.from_tensor(batch.input_ids),
            target=self._mode.from_tensor(batch.target),
            position_ids=self._mode.from_tensor(batch.position_ids),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """What the run will hold: the worst moment of each phase over two steps, an evaluation and a checkpoint.

    Attributes:
        phases: Those moments.
        spare_bytes: What forward, head and backward may hold on top in later steps, where a pipeline's schedule is made
            anew once its passes were measured.
    """

    phases: dict[Phase, PhasePeak]
    spare_bytes: int = 0

    @property
    def peak_phase(self) -> Phase:
        """The phase of the run's peak."""
        return max(self.phases, key=lambda phase: self.phases[phase].peak_bytes)

    @property
    def peak_bytes(self) -> int:
        """The run's peak."""
        return self.phases[self.peak_phase].peak_bytes


def dry_run(
    run: RunFile,
    *,
    batches: Sequence[Batch] = (),
    device_type: Literal["cpu", "cuda"] = "cpu",
    rank: int = 0,
    adapt: Callable[[Engine], Engine] | None = None,
) -> DryRun:
    """Return the peaks of `run`, executing the very code that will train on tensors without data.

    Over several ranks they are those of one with the first shards and the last span of its rows, which holds at least
    as much as any other; of a pipeline those of the rank that is asked about. No rank needs to be there, and this
    process must not be one of several yet.

    Memory:        none for tensors.
    Exactness:     equal to the ledger of the real run on these batches, to the byte, from the first forward on;
                   without batches, for rows that are full and counted.

    Args:
        run: Every setting.
        batches: Sizes to assume, in order and again from the first, as a rank takes them; none: the largest that the
            run can meet.
        device_type: The device whose memory is asked about; a CUDA device need not be there.
        rank: Of a pipeline, the rank that is asked about, the first of those that hold its layers; the rows of the
            vocabulary that a batch needs are taken to be all its own, and all different, the most that they can be.
        adapt: Changes the engine before its first step.

    Raises:
        UsageError: A model that cannot be built.
    """
    config = load_config(run.model, context=run.data.context)
    with ExitStack() as scope:
        world = scope.enter_context(assume(run.mesh, device_type=device_type, rank=rank))
        mode = scope.enter_context(FakeTensorMode())
        ledger = scope.enter_context(Ledger(device_type=device_type))
        whole: dict[str, Tensor] = {}

        def load() -> PreTrainedModel:
            model = _draw(config, run, device_type) if world.leads else _sketch(config, run)
            if world.pipeline is not None:
                whole.update({name: torch.empty_like(each, device="meta") for name, each in weights_of(model).items()})
            return model

        with torch.device(device_type):
            room = room_for(run.save.host, ledger)  # noqa: F841 - held
            engine = build_engine(
                load,
                run.plan,
                tokens=run.tokens_per_microbatch,
                ledger=ledger,
                facts=AssumedFacts(),
                scope=scope,
                dry=True,
                world=world,
            )
            engine = engine if adapt is None else adapt(engine)
            feed = Replay(batches, mode) if batches else WorstCase(run, device_type, world.place)
            job = Job(
                run=run,
                tokenizer=None,
                engine=engine,
                optimizer=build_optimizer(engine, run, scope),
                feed=feed,
                eval_batches=lambda: [feed.next()],
            )
            records = [ledger.end_step()]
            job, waiting = _fewer(job)
            records += _steps(job)
            del waiting
            ledger.start_step(_STEPS)
            if run.data.eval:
                evaluate(engine, job.eval_batches())
            with ledger.phase("save"):
                model = engine.anatomy.model
                groups = None if world.pipeline is None else Collected(weights_of(model), world, whole)
                rehearse_write(model, groups)
            records.append(ledger.end_step())
    phases: dict[Phase, PhasePeak] = {}
    for record in records:
        for phase, peak in record.phases.items():
            if phase not in phases or peak.peak_bytes > phases[phase].peak_bytes:
                phases[phase] = peak
    spare = 0 if engine.staged is None else engine.staged.spare
    width = engine.anatomy.hidden_size * engine.anatomy.model.dtype.itemsize
    return DryRun(phases=phases, spare_bytes=spare * run.tokens_per_microbatch * width)


def _fewer(job: Job) -> tuple[Job, list[Any]]:
    """Return a job of no more microbatches than hold what those of a pipeline do, and the tensors of all others.

    Batches are taken to be alike.
    """
    engine, train = job.engine, job.run.train
    size = train.grad_accum if engine.staged is None else engine.staged.enough(train.grad_accum)
    others = train.grad_accum - size
    if not others:
        return job, []
    waiting: list[Any] = [engine.take(job.feed.next()) for _ in range(others)]
    waiting.append(torch.zeros(2 * others))  # their losses, alone and together
    engine.ledger.adopt(waiting[-1], "head tiles", owner="the head")
    tokens = None if train.global_tokens is None else train.global_tokens // train.grad_accum * size
    return replace(job, run=replace(job.run, train=replace(train, grad_accum=size, global_tokens=tokens))), waiting


def _steps(job: Job) -> list[StepMemory]:
    """Return what the steps of the run hold; in a pipeline all are alike, and one runs.

    The first one over shards also counts what sharding propagation makes for later ones; after the first one over
    copies DDP sorts its buckets anew, which needs data.
    """
    mesh = job.run.mesh
    shards = mesh.sharded or (mesh.pp > 1 and mesh.peers > 1)
    one = mesh.size > 1 and not shards
    taken = [train_step(job, step).memory for step in range(1, 1 + (1 if one else _STEPS))]
    return taken[1:] if shards else taken


def _draw(config: PretrainedConfig, run: RunFile, device_type: str) -> PreTrainedModel:
    with torch.device("cpu" if loads_on_host(run.plan.optim) else device_type):
        model = draw_model(config, run.model)
    return settle(model, run.plan.optim, torch.device(device_type))


def _sketch(config: PretrainedConfig, run: RunFile) -> PreTrainedModel:
    """Return the model on the meta device, where torch makes some tensors that are not fake: all become so after."""
    with unset_fake_temporarily(), torch.device("meta"):
        model = draw_model(config, run.model)
    made: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            if id(param) not in made:
                empty = torch.empty(param.shape, dtype=param.dtype, device="meta")
                made[id(param)] = torch.nn.Parameter(empty, requires_grad=param.requires_grad)
            module._parameters[name] = made[id(param)]
        for name, buffer in list(module.named_buffers(recurse=False)):
            module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="meta")
    return model


def _endless(batches: Sequence[Batch]) -> Iterator[Batch]:
    while True:
        yield from batches
