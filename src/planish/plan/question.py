"""A question in, what it takes out: the table of any mesh of a model, each rank's bytes and seconds, host and disk."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

from planish.decode import method_name
from planish.methods import Offload, Pipelined, Plain, Plan, StreamAdamW, keeps_attention
from planish.plan.estimate import Estimate, of_moments, walk
from planish.price.boundary import Boundaries, Depth
from planish.price.dispatch_ranks import Launch, block_rows_of
from planish.price.hardware import Hardware
from planish.price.processor import product_dtype
from planish.price.sharding import Gathered
from planish.price.state import deal_bytes, placement
from planish.price.step import Moment
from planish.price.table import LayerTable
from planish.price.template import table_of_shape
from planish.price.times import StepTime, step_time
from planish.shapes import BatchShape, ExpertsShape, MeshShape, ModelShape

IMPORTED_BYTES = 3 * 2**29
"""What Python and its libraries hold on the host for each rank, before the first tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is to be trained, and on what.

    Attributes:
        shape: The model.
        dtype: As in a run file.
        context: Tokens of a row.
        rows: Rows of an optimizer step over all ranks; None: one for each rank, or group of `cp`, that reads.
        devices: All of them are used.
        hardware: What they are, memory included.
        host: Bytes of one node's host memory; None: not limited.
        disk: Bytes of one node's disk; None: there is none.
        fixed: Methods that are not open, by peak.
        degrees: Degrees of the mesh that are not open.
        stages: The price of a candidate whose layers are divided into stages; None: these have none.
    """

    shape: ModelShape
    dtype: str
    context: int
    rows: int | None
    devices: int
    hardware: Hardware
    host: int | None = None
    disk: int | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    degrees: Mapping[str, int] = field(default_factory=dict)
    stages: "Callable[[Candidate], Estimate] | None" = None

    @property
    def itemsize(self) -> int:
        """Bytes of one weight."""
        return 4 if self.dtype == "fp32" else 2

    @property
    def master(self) -> bool:
        """Whether the optimizer keeps fp32 masters."""
        return self.dtype != "bf16-pure"

    @property
    def mixed(self) -> bool:
        """Whether the model has routed experts."""
        return any(isinstance(layer.ffn, ExpertsShape) for layer in self.shape.layers)

    @property
    def num_experts(self) -> int:
        """Routed experts of a layer; 0: none."""
        return max(
            (each.ffn.num_experts for each in self.shape.layers if isinstance(each.ffn, ExpertsShape)), default=0
        )

    @property
    def ranks_per_node(self) -> int:
        """Ranks that share a host."""
        return min(self.devices, self.hardware.devices_per_node)


@dataclass(frozen=True)
class Candidate:
    """A mesh, a batch and a plan for it, priced when asked.

    Attributes:
        question: What is asked.
        mesh: The ranks.
        rows: Rows of one microbatch of a group of `cp`.
        microbatches: Of a step.
        plan: The methods.
    """

    question: Question
    mesh: MeshShape
    rows: int
    microbatches: int
    plan: Plan

    @property
    def batch(self) -> BatchShape:
        """Return what one rank works on: its part of the rows."""
        return BatchShape(
            rows=self.rows,
            context=-(-self.question.context // self.mesh.cp),
            microbatches=self.microbatches,
            sharers=self.mesh.cp,
        )

    @property
    def tokens_per_step(self) -> int:
        """Tokens of an optimizer step over all ranks."""
        return self.question.context * self.rows * self.microbatches * self.mesh.readers

    @cached_property
    def table(self) -> LayerTable:
        """What one rank holds beside the batch's own bytes."""
        question, plan = self.question, self.plan
        boundary = "plain" if isinstance(plan.boundary, Plain) else "checkpoint"
        word = "keep" if keeps_attention(plan.boundary) else boundary
        table = _table(
            question.shape,
            question.dtype,
            word,
            method_name(type(plan.activation)),
            replace(self.mesh, cp=1),  # who reads which rows changes nothing in it
            self._products,
        )
        launch = None
        if self.mesh.ep > 1 and isinstance(plan.dispatch, Pipelined):
            tokens = self.batch.tokens
            launch = Launch(
                num_ranks=self.mesh.ep,
                num_experts=question.num_experts,
                max_tokens=tokens,
                block_rows=block_rows_of(plan.dispatch.block_rows, tokens, self.mesh.ep),
                max_foreign=plan.dispatch.max_borrowed,
            )
        return replace(table, launch=launch, on_host=question.hardware.kind == "cuda")

    @property
    def _products(self) -> int | None:
        """Bytes of what experts multiply: float32 on a CPU, where this one has no products of bf16; else as weights."""
        on_cpu = self.question.hardware.kind == "cpu"
        return 4 if on_cpu and product_dtype("bfloat16") == "float32" else None

    @cached_property
    def estimate(self) -> Estimate:
        """What one rank holds in each phase on its device; of a pipeline, the one that holds most."""
        if self.mesh.pp == 1:
            return of_moments(self.moments, far={})
        assert self.question.stages is not None
        return self.question.stages(self)

    @cached_property
    def moments(self) -> tuple[Moment, ...]:
        """The moments of a step of which each phase's peak is one; of a pipeline those alone."""
        if self.mesh.pp > 1:
            phases = self.estimate.phases.items()
            return tuple(Moment(phase=name, layer=None, doing="", alive=each.alive) for name, each in phases)
        return self._walked.all()

    @cached_property
    def _walked(self) -> "_Walked":
        return _Walked(walk(self.table, self.batch, self.plan, master=self.question.master))

    def exceeds(self, nbytes: int) -> bool:
        """Return whether one rank holds more on its device, looking no further than that shows."""
        return self.estimate.peak_bytes > nbytes if self.mesh.pp > 1 else self._walked.exceeds(nbytes)

    @property
    def peak_bytes(self) -> int:
        """What one rank holds at most on its device."""
        return self.estimate.peak_bytes if self.mesh.pp > 1 else max(each.total_bytes for each in self.moments)

    @cached_property
    def time(self) -> StepTime:
        """How long a step takes."""
        question = self.question
        return step_time(
            question.shape, self.batch, question.context, self.plan, self.mesh, question.hardware, question.dtype
        )

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of all ranks."""
        return self.tokens_per_step / self.time.total_s

    @cached_property
    def far_bytes(self) -> dict[str, int]:
        """Bytes in far memory for one rank, by place and category."""
        found = {"host boundaries": 0, "host optimizer state": 0, "disk boundaries": 0, "disk optimizer state": 0}
        boundary, optim = self.plan.boundary, self.plan.optim
        if isinstance(boundary, Offload):
            depth = self._depth
            limit = (boundary.host or 0) + (boundary.disk or 0)
            away = Boundaries(
                num_boundaries=depth.num_boundaries, num_slots=limit // depth.slot_bytes, every=boundary.every
            ).offloaded
            found[f"{'host' if boundary.host else 'disk'} boundaries"] = len(away) * depth.slot_bytes
        if isinstance(optim, StreamAdamW):
            placed = placement(self.table.tensors, optim, master=self.question.master, on_host=self.table.on_host)
            found["host optimizer state"], found["disk optimizer state"] = placed.host_bytes, placed.disk_bytes
        return found

    @property
    def _depth(self) -> Depth:
        kept = [each.attention for each in self.question.shape.layers] if keeps_attention(self.plan.boundary) else []
        return Depth.of(
            num_boundaries=len(self.question.shape.layers),
            tokens=self.batch.tokens,
            width=self.question.shape.hidden_size,
            itemsize=self.question.itemsize,
            kept=kept,
        )

    def node_bytes(self, place: str) -> int:
        """Return the bytes that one node holds on its "host" or "disk" while steps run."""
        ranks = self.question.ranks_per_node
        own = sum(nbytes for name, nbytes in self.far_bytes.items() if name.startswith(place))
        return ranks * (own + IMPORTED_BYTES * (place == "host"))

    @property
    def loading_bytes(self) -> int:
        """What rank 0 holds while it deals out the weights, which it alone has read."""
        if self.mesh.dp == self.mesh.pp == 1:
            return 0
        whole = [replace(each, itemsize=self.question.itemsize) for each in self.question.shape.tensors]
        return deal_bytes(whole, 1)

    def over(self) -> str | None:
        """Return what of this does not fit, in words; None where all of it does."""
        question = self.question
        if self.exceeds(question.hardware.memory):
            return "memory"
        for place, limit in (("host", question.host), ("disk", question.disk or 0)):
            if limit is not None and self.node_bytes(place) > limit:
                return f"{place} memory" if place == "host" else place
        return None


class _Walked:
    """The moments of a step, as far as anyone has asked for them."""

    def __init__(self, moments: Iterator[Moment]) -> None:
        self._left, self._seen, self._peak_bytes = moments, list[Moment](), 0

    def exceeds(self, nbytes: int) -> bool:
        """Return whether a moment holds more; the walk goes on until one does."""
        while self._peak_bytes <= nbytes and (moment := next(self._left, None)) is not None:
            self._seen.append(moment)
            self._peak_bytes = max(self._peak_bytes, moment.total_bytes)
        return self._peak_bytes > nbytes

    def all(self) -> tuple[Moment, ...]:
        """Return every moment."""
        self._seen += self._left
        self._peak_bytes = max(each.total_bytes for each in self._seen)
        return tuple(self._seen)


@lru_cache(maxsize=256)
def _table(
    shape: ModelShape, dtype: str, boundary: str, activation: str, mesh: MeshShape, products_itemsize: int | None
) -> LayerTable:
    itemsize = 4 if dtype == "fp32" else 2
    table = table_of_shape(
        shape,
        dtype=dtype,
        boundary=boundary,
        activation=activation,
        mesh=mesh,
        products_itemsize=products_itemsize,
    )
    return replace(table, gathered=Gathered.of(shape, mesh, itemsize), vocab_ranks=mesh.vp, num_shards=1)
