"""One training step of a shortened model on fake tensors, with every tensor's life and the place where it began.

[Note: what stands in] Attention and the head are left out of the run, since their bytes are arithmetic: in their place
stand operations that allocate their results alone, and note when they begin. What is left runs the same operations
whatever the batch, so that tensors of runs at several lengths correspond one to one.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AttentionInterface, PretrainedConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from planish.comm.world import assume
from planish.data.batch import Batch
from planish.memory.book import Book, Category, Phase, Record
from planish.memory.ledger import Ledger
from planish.methods import Bitmap, Pipelined, Plain, Plan
from planish.models.experts import find_experts, gate_of, weights_of
from planish.models.feed_forward import find_feed_forwards, run_as
from planish.models.load import draw_model
from planish.peaks.dispatch.pipelined import sizes_of
from planish.price.dispatch import Experts
from planish.runfile import RunFile
from planish.sections import DataSection, MeshSection, ModelSection, TrainSection
from planish.shapes import AttentionShape, BatchShape, FeedForwardShape
from planish.train.dry_run import Replay
from planish.train.engine import Engine, build_engine
from planish.train.evaluate import evaluate
from planish.train.facts import AssumedFacts
from planish.train.job import Job
from planish.train.loop import train_step
from planish.train.model_folder import rehearse_write
from planish.train.optimizer import build_optimizer
from planish.train.stand_ins import AttentionStandIn, ExpertsStandIn, FeedForwardStandIn, HeadStandIn

_NAME = "planish-sizes"

Place = tuple[Literal["enter", "forward", "turn", "backward", "leave"], int]
"""Part of a pass (see `price.table.Pass`) and number of the layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Something begins: a phase ("" is none), a part of the pass, or what a stand-in stands for."""

    clock: int
    begins: Literal["phase", "place", "marker"]
    what: str | Place


class Journal(Book):
    """A book that forgets nothing: every record, and notes of what began when."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[Record] = []
        self._began = 0
        self.notes: list[Note] = []

    @property
    def records(self) -> list[Record]:
        """What was born or died since the beginning."""
        return [each for each in self._made if each.born > self._began or self._began < each.died <= self._clock]

    def note(self, begins: Literal["phase", "place", "marker"], what: str | Place) -> None:
        """Write down that something begins now."""
        self.notes.append(Note(clock=self._clock, begins=begins, what=what))

    def begin_anew(self) -> None:
        """Forget what was, and of what is alive all but what will die."""
        self.notes.clear()
        self._began = self._clock

    def events(self) -> list[tuple[int, bool, int]]:
        """Return (clock, whether it is a birth, number of the record) of every birth and death, in order."""
        births = [(record.born, True, index) for index, record in enumerate(self.records)]
        deaths = [(record.died, False, index) for index, record in enumerate(self.records)]
        return sorted(event for event in (*births, *deaths) if self._began < event[0] <= self._clock)

    def _open(self, nbytes: int, category: Category, owner: str, shape: torch.Size, dtype: torch.dtype) -> Record:
        record = super()._open(nbytes, category, owner, shape, dtype)
        self._made.append(record)
        return record


class JournalLedger(Ledger):
    """A ledger that keeps a journal."""

    def __init__(self) -> None:
        super().__init__()
        self.journal = self._book = Journal()

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Count what happens inside as phase `name`, and note where it begins and ends."""
        with super().phase(name):
            self.journal.note("phase", name)
            yield
            self.journal.note("phase", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One run on fakes, as it stood at its end.

    Attributes:
        records: Every storage.
        events: See `Journal.events`.
        notes: What began when.
        attention: What attention was given in each layer; none where it is transformers' own.
        experts: What experts were given in each layer; none where there are none or they are transformers' own.
        feed_forwards: What network each layer has; none where they run the plain way.
        save_bytes: The most that publishing the weights of one layer adds.
        microbatches: Passes of the step.
    """

    records: list[Record]
    events: list[tuple[int, bool, int]]
    notes: list[Note]
    attention: dict[int, AttentionShape]
    experts: dict[int, Experts]
    feed_forwards: dict[int, FeedForwardShape]
    save_bytes: int
    microbatches: int


def trace(config: PretrainedConfig, section: ModelSection, plan: Plan, shape: BatchShape, mesh: MeshSection) -> Trace:
    """Run a step of two microbatches of `shape`, an evaluation and a checkpoint's conversions on fakes.

    Over shards it is the second of two steps: the first one also holds what sharding propagation makes. Copies take
    one microbatch: after it DDP sorts its buckets anew, which needs data.

    Memory:        none for tensors but the token ids.
    """
    microbatches = 1 if mesh.size > 1 and not mesh.sharded else 2
    run = RunFile(
        model=section,
        data=DataSection(train=("none",), context=shape.context),
        train=TrainSection(steps=1, grad_accum=microbatches, global_tokens=microbatches * shape.tokens * mesh.size),
        mesh=mesh,
        plan=plan,
    )
    with ExitStack() as scope:
        world = scope.enter_context(assume(mesh, device_type="cpu"))
        mode = scope.enter_context(FakeTensorMode())
        ledger = scope.enter_context(JournalLedger())
        journal = ledger.journal
        engine = build_engine(
            lambda: draw_model(config, section),
            plan,
            tokens=shape.tokens,
            ledger=ledger,
            facts=AssumedFacts(),
            scope=scope,
            dry=True,
            world=world,
        )
        _note_places(engine, journal)
        attention = _replace_attention(engine, journal) if engine.packed else {}
        experts = _replace_experts(engine, journal) if isinstance(plan.dispatch, Pipelined) else {}
        feed_forwards = _replace_feed_forwards(engine, plan, journal)
        engine = replace(engine, head=_head(engine, journal))
        if engine.spread is not None:
            engine.spread.bind(engine.local_loss)
        feed = Replay([full_batch(shape), full_batch(shape), full_batch(shape)], mode)
        job = Job(
            run=run,
            tokenizer=None,
            engine=engine,
            optimizer=build_optimizer(engine, run, scope),
            feed=feed,
            eval_batches=lambda: [feed.next()],
        )
        if mesh.sharded:
            once = replace(run.train, grad_accum=1, global_tokens=shape.tokens * mesh.size)
            train_step(replace(job, run=replace(run, train=once)), 1)
            journal.begin_anew()
        train_step(job, 1)
        evaluate(engine, job.eval_batches())
        save_bytes = _save(engine)
        return Trace(
            save_bytes=save_bytes,
            microbatches=microbatches,
            records=list(journal.records),
            events=journal.events(),
            notes=list(journal.notes),
            attention=attention,
            experts=experts,
            feed_forwards=feed_forwards,
        )


def full_batch(shape: BatchShape, *, first_document: int | None = None, num_valid: int | None = None) -> Batch:
    """Return a batch of full rows, each one document, or the first row cut after `first_document` tokens."""
    ids = torch.zeros((shape.rows, shape.context), dtype=torch.int64)
    bounds = {*range(0, shape.tokens + 1, shape.context), first_document or 0}
    return Batch(
        input_ids=ids,
        target=ids.clone(),
        position_ids=ids.clone(),
        cu_seq_lens=tuple(sorted(bounds)),
        num_valid=shape.tokens if num_valid is None else num_valid,
    )


def _head(engine: Engine, journal: Journal) -> Callable[[Tensor, Tensor, int], Tensor]:
    head = engine.anatomy.head

    def loss(hidden: Tensor, _target: Tensor, _num_valid: int) -> Tensor:
        return HeadStandIn.apply(hidden, head.weight, head.bias, lambda marker: journal.note("marker", marker))

    return loss


def _note_places(engine: Engine, journal: Journal) -> None:
    """Note where each layer begins, forward and backward, and where the last one ends."""
    layers = list(engine.anatomy.layers.values())

    def begin(index: int, hidden: Tensor) -> None:
        journal.note("place", ("forward", index))
        before: Place = ("backward", index - 1) if index else ("leave", 0)
        if hidden.requires_grad:
            hidden.register_hook(lambda _: journal.note("place", before))

    def end(output: Any) -> None:
        journal.note("place", ("turn", 0))
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            hidden.register_hook(lambda _: journal.note("place", ("backward", len(layers) - 1)))

    for index, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda _, args, index=index: begin(index, args[0]))
    layers[-1].register_forward_hook(lambda _module, _args, output: end(output))


def _replace_attention(engine: Engine, journal: Journal) -> dict[int, AttentionShape]:
    """Put the stand-in in the place of packed attention; return what it is given in each layer, once it has run."""
    seen: dict[int, AttentionShape] = {}

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        _mask: Tensor | None,
        *,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_seam: Any,
    ) -> tuple[Tensor, None]:
        seen[module.layer_idx] = AttentionShape(
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            qk_width=query.shape[-1],
            v_width=value.shape[-1],
            window=sliding_window or None,
            softcapped=softcap is not None,
            sinks=s_aux is not None,
        )
        out = AttentionStandIn.apply(query, key, value, s_aux, lambda marker: journal.note("marker", marker))
        return out, None

    AttentionInterface.register(_NAME, attend)
    engine.anatomy.model.set_attn_implementation(_NAME)
    return seen


def _replace_experts(engine: Engine, journal: Journal) -> dict[int, Experts]:
    """Put the stand-in in the place of pipelined experts; return what it is given in each layer, once it has run."""
    anatomy, seen = engine.anatomy, {}
    layers = list(anatomy.layers)
    found = find_experts(anatomy.model, anatomy.layers).modules
    number = {
        each: next(i for i, name in enumerate(layers) if path.startswith(f"{name}.")) for path, each in found.items()
    }

    def run(experts: nn.Module, hidden: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
        weights = weights_of(experts)
        seen[number[experts]] = sizes_of(hidden, ids, scores, weights, gate_of(experts))
        operands = (weights.up, weights.down, weights.up_bias, weights.down_bias)
        return ExpertsStandIn.apply(ids, lambda marker: journal.note("marker", marker), hidden, scores, *operands)

    if found:
        ALL_EXPERTS_FUNCTIONS.register(_NAME, run)
        anatomy.model.set_experts_implementation(_NAME)
    return seen


def _replace_feed_forwards(engine: Engine, plan: Plan, journal: Journal) -> dict[int, FeedForwardShape]:
    """Put the stand-in in the place of networks that the plan's method runs; return the network of each layer."""
    if isinstance(plan.activation, Plain):
        return {}
    anatomy, found = engine.anatomy, {}
    for network in find_feed_forwards(anatomy.model):
        if isinstance(plan.activation, Bitmap) and network.formula is None:
            continue
        index = next((i for i, name in enumerate(anatomy.layers) if network.name.startswith(f"{name}.")), None)
        index = list(anatomy.layers).index(network.name) if network.name in anatomy.layers else index
        if index is None or index in found:
            raise ValueError(f"`{network.name}` is not the one feed-forward network of its layer.")
        found[index] = network.shape
        parts = [each for each in (network.inner, network.up, network.down) if each is not None]

        def run(x: Tensor, parts: list[nn.Module] = parts) -> Tensor:
            params = [param for part in parts for param in part.parameters()]
            flat = x.reshape(-1, x.shape[-1])
            y = FeedForwardStandIn.apply(lambda marker: journal.note("marker", marker), flat, *params)
            return y.view(x.shape)

        run_as(network, run)
    return found


def _save(engine: Engine) -> int:
    ledger = engine.ledger
    with ledger.phase("save"):
        rehearse_write(engine.anatomy.model)  # what an evaluation has left gathered goes at once
    return ledger.peak_bytes["save"] - ledger.live_bytes
