"""Plain and planned step on the user's own batch, both held to the same step in the next higher precision."""

import re
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from planish.data.batch import Batch
from planish.memory.ledger import Ledger
from planish.methods import Batched, Blocked, Plan
from planish.models.load import load_model, load_tokenizer
from planish.runfile import RunFile
from planish.train.engine import build_engine
from planish.train.facts import MeasuredFacts
from planish.train.job import open_run_feed

_HIGHER = {torch.bfloat16: torch.float32, torch.float32: torch.float64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How far one quantity is from the reference and from the other way, relative to the reference's norm.

    Attributes:
        name: "loss", or the gradient of a group of parameters; `*` stands for the layer's number.
        plain: Error of the plain way.
        planned: Error of the plan.
        between: Distance between the two.
        allowed: Largest error that the plan may have: twice the plain way's own, and one unit of the dtype.
    """

    name: str
    plain: float
    planned: float
    between: float
    allowed: float

    @property
    def holds(self) -> bool:
        """Whether the plan is as exact as the plain way."""
        return self.planned <= self.allowed


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    loss: Tensor
    grads: dict[str, Tensor]


def verify(run: RunFile) -> list[Difference]:
    """Return the differences in loss and gradients between plain and planned step on the run's first batch.

    The yardstick is the plain step with the same weights in float32 for bf16 runs and in float64 for float32 runs.

    Memory:        the gradients three times, once of them in the higher precision, and the plain step's activations
                   in the higher precision.
    Exactness:     errors are relative norms over each group of parameters, taken in float64.

    Raises:
        UsageError: A model or data that cannot be used.
    """
    tokenizer = load_tokenizer(run.model)
    batch = open_run_feed(run, tokenizer, rows=run.rows_per_microbatch).next()
    model = load_model(run.model, context=run.data.context, tokenizer=tokenizer, seed=run.train.seed)
    planned = _step(model, _compared(run.plan), batch)
    plain = _step(model, Plan.plain(), batch)
    dtype = model.dtype
    higher = model.to(_HIGHER[dtype])
    reference = _step(higher, _reference_plan(higher), batch)
    return _compare(reference, plain, planned, unit=torch.finfo(dtype).eps)


def _compared(plan: Plan) -> Plan:
    """Return the plan without what leaves part of the gradients out on purpose."""
    if not isinstance(plan.vocab, Blocked):
        return plan
    return replace(plan, vocab=replace(plan.vocab, gradient_filter=None, filter_order=False))


def _reference_plan(model: PreTrainedModel) -> Plan:
    """Return the plain plan; in float64 experts take the products that have it."""
    if model.dtype == torch.float64 and model._can_set_experts_implementation():
        return replace(Plan.plain(), dispatch=Batched())
    return Plan.plain()


def _step(model: PreTrainedModel, plan: Plan, batch: Batch) -> _Step:
    """Return loss and gradients of one forward and backward, leaving the model as it was."""
    with ExitStack() as scope:
        engine = build_engine(
            lambda: model, plan, tokens=batch.input_ids.numel(), ledger=Ledger(), facts=MeasuredFacts(), scope=scope
        )
        moved = engine.take(batch)
        loss = engine.loss(moved) / max(1, batch.num_valid)
        loss.backward()
    grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    model.zero_grad(set_to_none=True)
    return _Step(loss=loss.detach(), grads=grads)


def _compare(reference: _Step, plain: _Step, planned: _Step, *, unit: float) -> list[Difference]:
    groups: dict[str, list[str]] = {}
    for name in reference.grads:
        groups.setdefault(re.sub(r"\b\d+\b", "*", name), []).append(name)
    differences = [_difference("loss", [reference.loss], [plain.loss], [planned.loss], unit)]
    for group, names in groups.items():
        columns = ([step.grads[name] for name in names] for step in (reference, plain, planned))
        differences.append(_difference(group, *columns, unit))
    return differences


def _difference(
    name: str, reference: list[Tensor], plain: list[Tensor], planned: list[Tensor], unit: float
) -> Difference:
    norm = _norm(reference, [torch.zeros_like(each) for each in reference]) or 1.0
    error = _norm(plain, reference) / norm
    return Difference(
        name=name,
        plain=error,
        planned=_norm(planned, reference) / norm,
        between=_norm(planned, plain) / norm,
        allowed=2 * error + unit,
    )


def _norm(left: list[Tensor], right: list[Tensor]) -> float:
    """Return the Euclidean norm of the difference of two lists of tensors."""
    return sum((a.double() - b.double()).square().sum().item() for a, b in zip(left, right, strict=True)) ** 0.5
