"""What each rank of a pipeline will hold, from its model's table: in milliseconds, without torch where that is kept."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise

from planish.methods import Blocked, Pipeline, Plain, Plan
from planish.pipeline.memory import enough_microbatches
from planish.pipeline.run.pace import SPARE, Pace
from planish.pipeline.schedule import Schedule, forward_only
from planish.pipeline.weigh import RankBytes, RankWalk, StageBytes
from planish.pipeline.workload import Workload
from planish.plan.estimate import Estimate, PhasePrice, of_moments
from planish.price import state
from planish.price.moment import Alive, Moment, Sizes
from planish.price.processor import product_dtype
from planish.price.sharding import is_of_layer
from planish.price.step import stretch
from planish.price.table import Holder, LayerTable, Leg, Part
from planish.price.vocab import Head
from planish.price.vocab_sharded import rescale_peak_bytes, scan_pass, scan_peak_bytes, sweep_pass, sweep_peak_bytes
from planish.shapes import BatchShape, TensorShape

_DTYPES = {2: "bfloat16", 4: "float32"}
_SPARE = Holder("spare", "another schedule")
_CAME = Holder("layer working set", "what came from another stage")
_ARRIVING = Holder("gathered weights", "layers")
_NORM = Holder("gradients", "the last norm")
Legs = list[tuple[Part | None, int | None, Leg]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    """What one rank has.

    Attributes:
        layers: Of each of its stages, by the stage's number.
        tensors: Parameters.
        head: Its rows of the vocabulary, as the head's passes see them.
        shared_bytes: Gradients of its rows of the head, and of the embedding where it is not tied.
    """

    layers: Mapping[int, range]
    tensors: tuple[TensorShape, ...]
    head: Head
    shared_bytes: tuple[int, int]


def estimate_stages(
    table: LayerTable,
    shape: BatchShape,
    plan: Plan,
    *,
    num_ranks: int,
    top_k: int,
    master: bool,
    num_shards: int = 1,
    deals: bool = True,
) -> Estimate:
    """Return the peaks of the rank that holds most in each phase, and each rank's own.

    Exactness: from the first forward to the last backward equal to a dry run of the rank that holds most, for the
        others hardly above it. Where several ranks share a stage's layers, what they gather is bounded.

    Args:
        table: Of the whole model, as one of the ranks holds it that share each layer; see `stage_plan`.
        shape: One step's input.
        plan: One method per peak.
        num_ranks: Ranks of the pipeline.
        top_k: Experts that a token meets.
        master: Whether the optimizer keeps fp32 masters of narrower parameters.
        num_shards: Ranks that share each layer.
        deals: Whether to count what rank 0 holds while it deals out the weights; for ranks that share nothing.

    Raises:
        UsageError: Fewer layers than stages.
    """
    work = _work(table, plan, top_k, num_shards)
    turns = _turns(plan.pipeline or Pipeline(), work, num_ranks, shape.microbatches)
    sharing = _Sharing(num_shards=num_shards, deals=deals)
    ranks = [_Pricing(table, shape, plan, turns, rank, sharing, master=master).phases() for rank in range(num_ranks)]
    return of_ranks(dict(enumerate(ranks)))


def of_ranks(ranks: Mapping[int, Mapping[str, PhasePrice]]) -> Estimate:
    """Return the peaks of the rank that holds most in each phase, which is named, and each rank's own."""
    phases: dict[str, PhasePrice] = {}
    for phase in next(iter(ranks.values())):
        rank = max(ranks, key=lambda each: ranks[each][phase].peak_bytes)
        found = ranks[rank][phase]
        phases[phase] = replace(found, where=f"{found.where} on rank {rank}")
    peaks = tuple(max(each.peak_bytes for each in found.values()) for found in ranks.values())
    return Estimate(phases=phases, ranks=peaks)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turns:
    """The order of a step's passes, no longer than it must be to hold the most, and that of an evaluation's."""

    layers: tuple[int, ...]
    step: Schedule
    evaluation: Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sharing:
    """See `estimate_stages`."""

    num_shards: int
    deals: bool


@lru_cache(maxsize=16)
def _turns(pipeline: Pipeline, work: Workload, num_ranks: int, num_microbatches: int) -> _Turns:
    pace = Pace(pipeline, work, num_ranks)
    size = enough_microbatches(pace.schedule, num_microbatches)
    return _Turns(layers=pace.layers, step=pace.schedule(size), evaluation=forward_only(pace.schedule(1)))


def _work(table: LayerTable, plan: Plan, top_k: int, num_shards: int) -> Workload:
    """Return what `planish.train.staged` says of the model itself."""
    num_layers = len(table.layers)
    layers = [each for each in table.tensors if is_of_layer(each.name)]
    met = sum(each.numel * each.count * (top_k / each.shape[0] if len(each.shape) == 3 else 1) for each in layers)
    return Workload(
        layers=num_layers,
        microbatches=1,
        layer_backward=2.0 if isinstance(plan.boundary, Plain) else 3.0,
        head=table.head.vocab_size * table.head.hidden_size * num_layers / (num_shards * met),
    )


class _Pricing:
    """The prices of one rank."""

    def __init__(
        self,
        table: LayerTable,
        shape: BatchShape,
        plan: Plan,
        turns: _Turns,
        rank: int,
        sharing: _Sharing,
        *,
        master: bool,
    ) -> None:
        self._table, self._shape, self._plan, self._master = table, shape, plan, master
        self._turns, self._schedule, self._rank, self._sharing = turns, turns.step, rank, sharing
        self._own = self._parts()
        head = table.head
        self._hidden = shape.tokens * head.hidden_size * head.itemsize

    def phases(self) -> dict[str, PhasePrice]:
        """Return the worst moment of each phase."""
        table, shape, plan, own = self._table, self._shape, self._plan, self._own
        tensors = own.tensors
        base: Sizes = {Holder("parameters", each.name): state.parameter_bytes([each]) for each in tensors}
        held = state.optimizer_bytes(tensors, plan.optim, master=self._master)
        base[Holder("optimizer state", type(plan.optim).__name__)] = held
        base[Holder("other", "buffers")] = table.buffers_bytes
        without_batch = base
        batch = shape.microbatches * state.batch_bytes(shape.tokens)
        losses = 8 * max(0, shape.microbatches - self._schedule.num_microbatches)
        base = base | {Holder("other", "batch"): batch, Holder("head tiles", "losses"): losses}
        found = [Moment(phase="init", layer=None, doing="taking the batch", alive=Alive.of(base))]
        if self._rank == 0 and self._sharing.deals:
            found.append(self._dealing())
        counts = (shape.tokens, max(0, shape.tokens - 1)) if shape.num_valid is None else (shape.num_valid,)
        spare = 0 if self._is_tied else SPARE * self._hidden
        for count in counts:
            step = RankWalk(self._schedule, self._rank, self._bytes(count, training=True), base).run()
            found += [each.beside({_SPARE: spare}) for each in step.values()]
            evaluated = without_batch | {Holder("other", "batch"): state.batch_bytes(shape.tokens)}
            seen = RankWalk(self._turns.evaluation, self._rank, self._bytes(count, training=False), evaluated).run()
            found.append(max(seen.values(), key=lambda each: each.total_bytes)._replace(phase="eval"))
        gradients = {Holder("gradients", "all"): state.parameter_bytes(tensors)}
        update = state.update_bytes(
            tensors,
            plan.optim,
            master=self._master,
            microbatches=2 * shape.microbatches,
            num_shards=self._sharing.num_shards,
        )
        optimizer = gradients | {Holder("staging", "gradients"): update}
        read = state.resume_bytes(tensors, master=self._master)
        for phase, doing, more in (
            ("optimizer", "updating the parameters", optimizer),
            ("save", "writing weights", {Holder("staging", "collected weights"): self._saved_bytes()}),
            ("resume", "reading tensors", {Holder("staging", "checkpoint"): read}),
        ):
            kept = base if phase == "optimizer" else without_batch
            found.append(Moment(phase=phase, layer=None, doing=doing, alive=Alive.of(kept | more)))
        return of_moments(found, far={}).phases

    def _dealing(self) -> Moment:
        """Return the moment in which the first rank has loaded the model, and holds its own rows beside it."""
        head = self._table.head
        loaded = state.parameter_bytes(self._table.tensors) + self._table.buffers_bytes
        drawn = head.vocab_size * head.hidden_size * head.itemsize
        rows = drawn if self._is_tied else sum(self._own.shared_bytes)
        sizes = {Holder("other", "the whole model"): loaded, Holder("parameters", "its rows"): rows}
        return Moment(phase="init", layer=None, doing="dealing out the weights", alive=Alive.of(sizes))

    @property
    def _norm_bytes(self) -> int:
        vocab_size = self._table.head.vocab_size
        return state.parameter_bytes(
            [each for each in self._table.tensors if not is_of_layer(each.name) and each.shape[0] != vocab_size]
        )

    @property
    def _is_tied(self) -> bool:
        return not self._own.shared_bytes[1]

    def _parts(self) -> _Rank:
        """Return this rank's layers, and its part of every tensor."""
        table, schedule, rank = self._table, self._schedule, self._rank
        ranges = [range(*each) for each in pairwise(accumulate(self._turns.layers, initial=0))]
        mine = {stage: ranges[stage] for stage, owner in enumerate(schedule.stage_ranks) if owner == rank}
        num_layers, vocab_size = sum(map(len, mine.values())), table.head.vocab_size
        step = -(-vocab_size // schedule.num_ranks)
        rows = max(0, min(vocab_size, step * (rank + 1)) - step * rank)
        tensors, shared = [], []
        for each in table.tensors:
            if is_of_layer(each.name):
                tensors.append(replace(each, count=each.count // len(table.layers) * num_layers))
            elif each.shape[0] == vocab_size:
                shared.append(replace(each, shape=(rows, *each.shape[1:])))
            elif schedule.stage_ranks[-1] == rank:
                tensors.append(each)
        matrices = [each for each in shared if len(each.shape) == 2]
        last = matrices[-1]
        beside = sum(state.parameter_bytes([each]) for each in shared if len(each.shape) == 1)
        dtype = _DTYPES[table.head.itemsize]
        return _Rank(
            layers=mine,
            tensors=(*tensors, *shared),
            head=Head(
                tokens=self._shape.tokens,
                hidden_size=table.head.hidden_size,
                vocab_size=rows,
                hidden_dtype=dtype,
                weight_dtype=dtype,
                compute_dtype=product_dtype(dtype),
                bias_dtype=dtype if table.head.biased else None,
                capped=table.head.softcapped,
                wanted=frozenset({"lse"}),
            ),
            shared_bytes=(
                state.parameter_bytes([last]) + beside,
                state.parameter_bytes(matrices[:1]) if len(matrices) > 1 else 0,
            ),
        )

    def _bytes(self, num_valid: int, *, training: bool) -> RankBytes:
        """Return what the walk asks for."""
        own, plan, table = self._own, self._plan, self._table
        head, rows = own.head, own.head.vocab_size
        assert isinstance(plan.vocab, Blocked)
        one_barrier = self._schedule.head == "vocab-2"
        scan = sweep = rescale = 0
        if rows and num_valid:
            scanned = scan_pass(head, product=one_barrier and training, tile_bytes=plan.vocab.tile_bytes)
            scan = scan_peak_bytes(scanned, num_valid=num_valid)
            swept = sweep_pass(
                head, narrow=table.head.itemsize < 4, bias=table.head.biased, tile_bytes=plan.vocab.tile_bytes
            )
            sweep = sweep_peak_bytes(swept, num_valid=num_valid, hidden_grad=not one_barrier, z_loss=False)
            rescale = rescale_peak_bytes(head, num_valid=num_valid) if one_barrier and training else 0
        stages = {stage: self._stage(layers, training=training) for stage, layers in own.layers.items()}
        return RankBytes(
            stages=stages,
            training=training,
            tokens=self._shape.tokens,
            num_valid=num_valid,
            width=table.head.hidden_size,
            itemsize=table.head.itemsize,
            scan=scan,
            sweep=sweep,
            rescale=rescale,
            head_gradients=own.shared_bytes[0],
            embedding_gradients=own.shared_bytes[1],
        )

    def _stage(self, layers: range, *, training: bool) -> StageBytes:
        """Return what a stage's passes hold."""
        table = self._table
        last = layers.stop == len(table.layers)
        trained = table.first if training else table.evaluation
        part: Part | None = "forward" if training else None
        into: Legs = [(part, None, _without_batch(leg)) for leg in trained.enter]
        inside: Legs = [(part, i, leg) for i in layers for leg in trained.forward[table.layers[i]]]
        turn = trained.turn[: next(n for n, leg in enumerate(trained.turn) if leg.then == "head")] if last else ()
        out: Legs = [(part, None, leg) for leg in turn]
        first_ones = len(trained.forward[table.layers[layers.start]])
        forward, left = self._stretch(into + inside[:first_ones], {})
        if layers.start and not training:  # what came in is held, and counted as another layer's output
            left = left | {_CAME: self._hidden}
        if inside[first_ones:] + out:
            rest, left = self._stretch(inside[first_ones:] + out, left)
            forward = max(forward, rest, key=lambda each: each.total_bytes)
        if table.gathered is not None and len(layers) > 1:  # between layers a third one's pieces arrive
            arriving = left | {_ARRIVING: table.gathered.at("forward", in_layer=False)}
            between = forward._replace(layer=None, doing="between layers", alive=Alive.of(arriving))
            forward = max(forward, between, key=lambda each: each.total_bytes)
        kept = sum(left.values()) - self._hidden if training else 0
        if not training:
            return StageBytes(forward=forward, kept=kept, first_backward=forward, backward=forward, gradients=0)
        first, made = self._back(layers, table.first.backward, last=last)
        later, _ = self._back(layers, table.later.backward, last=last)
        return StageBytes(forward=forward, kept=kept, first_backward=first, backward=later, gradients=made)

    def _back(self, layers: range, legs: tuple[tuple[Leg, ...], ...], *, last: bool) -> tuple[Moment, int]:
        """Return the most of a stage's backward, and the gradients that it makes."""
        table = self._table
        found: list[Moment] = []
        live: Sizes = {}
        if last:
            moment, live = self._norm()
            found.append(moment)
            if legs is table.first.backward:
                live = live | {_NORM: self._norm_bytes}
        back: Legs = [("backward", i, leg) for i in reversed(layers) for leg in legs[table.layers[i]]]
        moment, live = self._stretch(back, live)
        found.append(moment)
        made = sum(size for holder, size in live.items() if holder.category == "gradients")
        return max(found, key=lambda each: each.total_bytes), made

    def _norm(self) -> tuple[Moment, Sizes]:
        """Return the most of the last norm's backward, and what it leaves behind, beside the gradient it was given."""
        table, shape = self._table, self._shape
        legs = table.later.turn
        leg = legs[1 + next(n for n, each in enumerate(legs) if each.then == "head backward")]
        own = [{holder: line._replace(fixed=0) for holder, line in peak.items()} for peak in leg.peaks]
        most = max(sum(line.at(shape) for line in each.values()) for each in own) - self._hidden
        left = sum(line._replace(fixed=0).at(shape) for line in leg.change.values()) - self._hidden
        holder = Holder("layer working set", "the last norm")
        moment = Moment(phase="backward", layer=None, doing="around the layers", alive=Alive.of({holder: most}))
        return moment, {holder: left}

    def _stretch(self, legs: Legs, live: Sizes) -> tuple[Moment, Sizes]:
        return stretch(self._table, self._shape, self._plan, legs, live)

    def _saved_bytes(self) -> int:
        """Return the most that a checkpoint adds: a shared matrix from its parts, on rank 0 two groups of weights."""
        table = self._table
        shared = [each for each in table.tensors if each.shape[0] == table.head.vocab_size]
        largest = max(map(state.parameter_bytes, ([each] for each in shared)))
        layers = [replace(each, count=1) for each in table.tensors if is_of_layer(each.name)]
        num_shards = self._sharing.num_shards
        if self._rank:
            head, ranks = table.head, self._schedule.num_ranks
            part = -(-head.vocab_size // ranks) * head.hidden_size * head.itemsize
            short = self._own.head.vocab_size * ranks < head.vocab_size
            own = (2 * ranks + short) * part + 8 * self._shape.tokens  # whose rows the last evaluation's tokens were
            return max(own, 2 * num_shards * max(map(state.parameter_bytes, ([each] for each in layers))))
        layer = num_shards * state.parameter_bytes(layers)
        arrives = (
            0 if num_shards == 1 else num_shards * state.parameter_bytes([max(layers, key=lambda each: each.name)])
        )
        return max(largest + state.parameter_bytes(shared), 2 * layer + arrives, layer + table.save_bytes)


def _without_batch(leg: Leg) -> Leg:
    """Return a leg whose batch is counted elsewhere: an evaluation takes it on the way in."""
    peaks = tuple({holder: line for holder, line in each.items() if holder.category != "other"} for each in leg.peaks)
    change = {holder: line for holder, line in leg.change.items() if holder.category != "other"}
    return replace(leg, peaks=peaks, change=change)
