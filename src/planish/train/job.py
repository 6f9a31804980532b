"""Run file in, everything that one training run holds out; the loop takes it from there."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from planish.comm.world import ALONE, World
from planish.data.batch import Batch
from planish.data.cursor import FeedPosition
from planish.data.feed import Feed, check_readable, deal, eval_batches, open_feed
from planish.memory.far import Traffic
from planish.memory.lanes import Lane
from planish.memory.ledger import Ledger
from planish.models.int8 import loads_on_host, settle
from planish.models.load import load_model, load_tokenizer, run_device, sketch_model
from planish.peaks.optim.stream_adamw import StreamAdamW
from planish.runfile import RunFile
from planish.sections import DataSection
from planish.shapes import spans
from planish.train.behind import Behind, open_behind, room_for
from planish.train.engine import Engine, build_engine
from planish.train.facts import MeasuredFacts
from planish.train.optimizer import Optimizer, build_optimizer


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
        eval_batches: Opens the held-out batches in their fixed order, this rank's.
        behind: Writes checkpoints while training goes on; None: training waits.
    """

    run: RunFile
    tokenizer: PreTrainedTokenizerBase | None
    engine: Engine
    optimizer: Optimizer
    feed: BatchSource
    eval_batches: Callable[[], Iterable[Batch]]
    behind: Behind | None = None

    @property
    def traffic(self) -> dict[str, Traffic]:
        """What each lane of far memory has carried."""
        lanes = {lane: each for tier in self.engine.tiers for lane, each in tier.traffic.items()}
        return lanes | (self.optimizer.traffic if isinstance(self.optimizer, StreamAdamW) else {})

    @property
    def lanes(self) -> dict[str, Lane]:
        """The lanes of far memory, by name."""
        optim = self.optimizer.tiers if isinstance(self.optimizer, StreamAdamW) else ()
        return {name: lane for tier in (*self.engine.tiers, *optim) for name, lane in tier.lanes.items()}


class RankFeed:
    """A rank's rows of each batch that the ranks read together; the position is the same on all.

    Every rank lays out the whole batch, so that the rows do not depend on how many ranks share them.

    Args:
        feed: The batches of all ranks together.
        rank: Whose rows these are.
        rows: Rows of each rank.
        place: Which span of each row, of so many.
    """

    def __init__(self, feed: Feed, *, rank: int, rows: int, place: tuple[int, int] = (0, 1)) -> None:
        self._feed, self._start, self._stop, self._place = feed, rank * rows, (rank + 1) * rows, place

    @property
    def position(self) -> FeedPosition:
        """Where the next batch begins."""
        return self._feed.position

    def seek(self, position: FeedPosition) -> None:
        """Go on as after the batch that left the feed at `position`."""
        self._feed.seek(position)

    def next(self) -> Batch:
        """Return this rank's rows of the next batch."""
        return span_of(self._feed.next(start=self._start, stop=self._stop), self._place)


def span_of(batch: Batch, place: tuple[int, int]) -> Batch:
    """Return the span of each row that (number, of so many ranks) takes."""
    number, sharers = place
    if sharers == 1:
        return batch
    return batch.cut(spans(batch.input_ids.shape[1], sharers)[number], first=number == 0)


def build(run: RunFile, ledger: Ledger, scope: ExitStack, world: World = ALONE) -> Job:
    """Return the job that `run` describes; everything that lives through training is allocated here.

    All data is read once before, so that a bad file costs a launch and not a run: a gigabyte takes one core about 2 s
    as text, 6 s as JSON lines, 20 s as ids in short documents. Conversations are written out by their template too, and
    with `data.long_documents = "refuse"` what may be too long is tokenised.

    Args:
        run: Every setting.
        ledger: Active already; the bytes of this call count as phase "init".
        scope: Closes what watches the model.
        world: The ranks that train together, each with its rows.

    Raises:
        UsageError: Data, model or tokenizer that cannot be used.
        BudgetExceeded: Weights and optimizer state alone are above the budget.
    """
    tokenizer = load_tokenizer(run.model)
    rows, (reader, readers) = run.rows_per_microbatch, world.reader
    feed = RankFeed(open_run_feed(run, tokenizer, rows=rows * readers), rank=reader, rows=rows, place=world.place)
    if world.leads:
        _check_data(run.data, tokenizer)

    def load() -> PreTrainedModel:
        if (run.mesh.sharded or run.mesh.pp > 1) and not world.leads:
            return sketch_model(run.model, context=run.data.context)
        on_host = loads_on_host(run.plan.optim)
        context, seed = run.data.context, run.train.seed
        model = load_model(run.model, context=context, tokenizer=tokenizer, seed=seed, on_host=on_host)
        return settle(model, run.plan.optim, run_device())

    room = room_for(run.save.host, ledger)
    engine = build_engine(
        load,
        run.plan,
        tokens=run.tokens_per_microbatch,
        ledger=ledger,
        facts=MeasuredFacts(),
        scope=scope,
        world=world,
    )
    torch.manual_seed(run.train.seed + world.rank)  # dropout: each rank its own
    return Job(
        run=run,
        tokenizer=tokenizer,
        engine=engine,
        optimizer=build_optimizer(engine, run, scope),
        feed=feed,
        eval_batches=lambda: held_out_batches(run, tokenizer, world),
        behind=None if room is None else open_behind(room, scope, device_type=engine.device.type),
    )


def held_out_batches(run: RunFile, tokenizer: PreTrainedTokenizerBase, world: World) -> Iterable[Batch]:
    """Return the run's held-out batches in their fixed order, those of this rank."""
    reader, readers = world.reader
    batches = eval_batches(
        run.data.eval,
        tokenizer=tokenizer,
        context=run.data.context,
        rows=run.rows_per_microbatch,
        max_tokens=run.data.eval_tokens,
        loss_on=run.data.loss_on,
    )
    return (span_of(batch, world.place) for batch in deal(batches, rank=reader, num_ranks=readers))


def _check_data(data: DataSection, tokenizer: PreTrainedTokenizerBase) -> None:
    longest = data.context if data.long_documents == "refuse" else None
    check_readable(data.train, tokenizer=tokenizer, loss_on=data.loss_on, longest=longest)
    check_readable(data.eval, tokenizer=tokenizer, loss_on=data.loss_on)


def open_run_feed(run: RunFile, tokenizer: PreTrainedTokenizerBase, *, rows: int) -> Feed:
    """Return the run's training data in batches of `rows`, standing before its first document."""
    data = run.data
    return open_feed(
        data.train,
        tokenizer=tokenizer,
        context=data.context,
        rows=rows,
        seed=data.seed,
        pack=data.pack,
        loss_on=data.loss_on,
        long_documents=data.long_documents,
        weights=data.weights,
        least=run.mesh.cp,
    )
