"""The training loop: batch -> layers -> head -> backward -> optimizer, one phase of memory after another."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from planish.comm.world import in_step
from planish.data.batch import Batch
from planish.errors import Interrupted
from planish.memory.report import StepMemory
from planish.methods import updates_in_backward
from planish.peaks.optim.apollo import Apollo
from planish.peaks.optim.stream_adamw import StreamAdamW
from planish.train.blame import refuse_non_finite
from planish.train.engine import Engine
from planish.train.job import Job
from planish.train.routing import worst
from planish.train.schedule import learning_rate
from planish.train.spread import clip, total_norm


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one optimizer step did."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    num_tokens: int
    num_valid: int
    step_s: float
    memory: StepMemory
    routing: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """What the loop calls besides training, each with its step.

    Attributes:
        on_step: Takes what a step did.
        evaluate: Evaluates.
        save: Writes a checkpoint.
        stop_requested: Says whether to end.
        keep_within: Returns the job of the next step.
        watch: What a step runs inside.
    """

    on_step: Callable[[StepReport], None]
    evaluate: Callable[[int], None]
    save: Callable[[int], None]
    stop_requested: Callable[[], bool]
    keep_within: Callable[[Job, int], Job] = lambda job, _step: job
    watch: Callable[[int], AbstractContextManager[object]] = lambda _step: nullcontext()


def train(job: Job, *, first_step: int, hooks: Hooks) -> None:
    """Run every step from `first_step` on; evaluate and save when due.

    Raises:
        BudgetExceeded: From whichever operation allocated too much.
        NotFinite: The loss or the gradient norm is NaN or infinite; the weights are those before the step, but for
            gradients that went into weights in backward.
        Interrupted: A stop was requested; a checkpoint was saved first.
    """
    settings = job.run
    for step in range(first_step, settings.train.steps + 1):
        with in_step(step):
            with hooks.watch(step):
                report = train_step(job, step)
            hooks.on_step(report)
            stopping, last = job.engine.world.max(hooks.stop_requested()) > 0, step == settings.train.steps
            if stopping or _due(step, settings.save.every, last=last):
                hooks.save(step)
            if not stopping and _due(step, settings.train.eval_every, last=last):
                hooks.evaluate(step)
            job = hooks.keep_within(job, step)
        if stopping and not last:
            raise Interrupted(f"stopped after step {step}; it is saved, continue with `--resume`.")


def train_step(job: Job, step: int) -> StepReport:
    """Run one optimizer step over `train.grad_accum` microbatches, normalised by their valid tokens together."""
    started, settings, engine = time.perf_counter(), job.run.train, job.engine
    ledger = engine.ledger
    in_backward = updates_in_backward(job.run.plan.optim)
    ledger.start_step(step)
    engine.routing.take()
    lr = learning_rate(settings, step)
    for group in job.optimizer.param_groups:
        group["lr"] = lr
    batches = [engine.take(job.feed.next()) for _ in range(settings.grad_accum)]
    num_valid = engine.world.sum(sum(batch.num_valid for batch in batches))
    losses, norms = _accumulate(job, step, batches, num_valid)
    engine.label_buckets()
    with ledger.phase("optimizer"):
        params = [param for param in engine.anatomy.model.parameters() if param.grad is not None]
        grads = norms if in_backward else [param.grad for param in params]
        norm = engine.world.norm(total_norm(grads))
        mean_loss = _mean(engine, losses, num_valid)
        grad_norm = engine.facts.number(norm)
        refuse_non_finite(engine, step, loss=mean_loss, grad_norm=grad_norm, batches=batches, updated=in_backward)
        if settings.clip:
            clip(params, settings.clip, norm)
        job.optimizer.step()
        job.optimizer.zero_grad(set_to_none=True)
    return StepReport(
        step=step,
        loss=mean_loss,
        grad_norm=grad_norm,
        lr=lr,
        num_tokens=sum(batch.num_tokens for batch in batches) * engine.world.reader[1],
        num_valid=num_valid,
        step_s=time.perf_counter() - started,
        memory=ledger.end_step(),
        routing=worst(engine.world.gather(engine.routing.take())),
    )


def _accumulate(job: Job, step: int, batches: list[Batch], num_valid: int) -> tuple[list[Tensor], list[Tensor]]:
    """Add up the gradients of `batches`; return their summed losses, and of updated weights the gradients' norms."""
    engine, ledger = job.engine, job.engine.ledger
    if engine.staged is not None:
        return [engine.staged.step(batches, upstream=1 / max(1, num_valid))], []
    losses: list[Tensor] = []
    norms: list[Tensor] = []
    for batch in batches:
        loss = engine.loss(batch, last=batch is batches[-1])
        losses.append(loss.detach())
        with ledger.phase("backward"), ExitStack() as scope:
            if updates_in_backward(job.run.plan.optim) and batch is batches[-1]:
                mean_loss = _mean(engine, losses, num_valid)
                refuse_non_finite(engine, step, loss=mean_loss, grad_norm=0.0, batches=batches)
                scope.enter_context(_updates(job, norms))
            (loss / max(1, num_valid)).backward()
            del loss
    return losses, norms


def _mean(engine: Engine, losses: list[Tensor], num_valid: int) -> float:
    """Return the mean loss of the counted tokens of all ranks."""
    return engine.facts.number(engine.world.add(torch.stack(losses).sum())) / max(1, num_valid)


@contextmanager
def _updates(job: Job, norms: list[Tensor]) -> Iterator[None]:
    """Update each weight once its gradient is complete, in the backward pass inside; note the gradients' norms.

    The parameters are the optimizer's: between forward and backward FSDP2 has whole ones of the root in the model.
    """
    params = [param for group in job.optimizer.param_groups for param in group["params"] if param.requires_grad]
    noted: set[Tensor] = set()

    def note(param: Tensor) -> None:
        noted.add(param)
        norms.append(torch.linalg.vector_norm(param.grad).float())

    handles = [param.register_post_accumulate_grad_hook(note) for param in params]
    try:
        assert isinstance(job.optimizer, Apollo | StreamAdamW)
        with job.optimizer.update_in_backward():
            yield
            for param in params:
                if param.grad is not None and param not in noted:  # of an earlier microbatch, and none of this one
                    note(param)
    finally:
        for handle in handles:
            handle.remove()


def _due(step: int, every: int, *, last: bool) -> bool:
    return last or (every > 0 and step % every == 0)
