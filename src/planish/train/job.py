"""Run file in, everything that one training run holds out; the loop takes it from there."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from planish.data.batch import Batch
from planish.data.feed import Feed, check_readable, eval_batches, open_feed
from planish.memory.ledger import Ledger
from planish.models.int8 import loads_on_host, settle
from planish.models.load import load_model, load_tokenizer, run_device
from planish.peaks.optim.adamw import AdamW
from planish.runfile import RunFile
from planish.train.engine import Engine, build_engine
from planish.train.facts import MeasuredFacts
from planish.train.optimizer import build_optimizer


class BatchSource(Protocol):
    """Where batches come from: `planish.data.feed.Feed`, or a dry run's worst case."""

    def next(self) -> Batch:
        """Return the next batch."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The parts of one training run.

    Attributes:
        run: Every setting.
        tokenizer: What the data is tokenised with, saved beside the weights; None in a dry run.
        engine: The model with the plan's methods in place.
        optimizer: Holds its state from the start.
        feed: Endless batches.
        eval_batches: Opens the held-out batches in their fixed order.
    """

    run: RunFile
    tokenizer: PreTrainedTokenizerBase | None
    engine: Engine
    optimizer: AdamW
    feed: BatchSource
    eval_batches: Callable[[], Iterable[Batch]]


def build(run: RunFile, ledger: Ledger, scope: ExitStack) -> Job:
    """Return the job that `run` describes; everything that lives through training is allocated here.

    All data is read once before (a gigabyte takes a second or two as text, ten as JSON lines), so that a bad file costs
    a launch and not a run.

    Args:
        run: Every setting.
        ledger: Active already; the bytes of this call count as phase "init".
        scope: Closes what watches the model.

    Raises:
        UsageError: Data, model or tokenizer that cannot be used.
        BudgetExceeded: Weights and optimizer state alone are above the budget.
    """
    tokenizer = load_tokenizer(run.model)
    feed = open_run_feed(run, tokenizer)
    data, rows = run.data, run.rows_per_microbatch
    check_readable((*data.train, *data.eval), tokenizer=tokenizer, loss_on=data.loss_on)

    def held_out() -> Iterable[Batch]:
        return eval_batches(
            data.eval,
            tokenizer=tokenizer,
            context=data.context,
            rows=rows,
            max_tokens=data.eval_tokens,
            loss_on=data.loss_on,
        )

    def load() -> PreTrainedModel:
        on_host = loads_on_host(run.plan.optim)
        model = load_model(run.model, context=data.context, tokenizer=tokenizer, seed=run.train.seed, on_host=on_host)
        return settle(model, run.plan.optim, run_device())

    engine = build_engine(
        load, run.plan, tokens=run.tokens_per_microbatch, ledger=ledger, facts=MeasuredFacts(), scope=scope
    )
    optimizer = build_optimizer(engine, run)
    return Job(run=run, tokenizer=tokenizer, engine=engine, optimizer=optimizer, feed=feed, eval_batches=held_out)


def open_run_feed(run: RunFile, tokenizer: PreTrainedTokenizerBase) -> Feed:
    """Return the run's training data, standing before its first document."""
    data = run.data
    return open_feed(
        data.train,
        tokenizer=tokenizer,
        context=data.context,
        rows=run.rows_per_microbatch,
        seed=data.seed,
        pack=data.pack,
        loss_on=data.loss_on,
        long_documents=data.long_documents,
        weights=data.weights,
    )
