"""The choices: one frozen dataclass per way to bound a peak, and `Plan`, one choice per peak."""

import math
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self, assert_never

from planish.decode import Bytes, Count, decode, encode

DENSITY_PERCENT = 55
"""Of drawn weights half of all activations are not zero; what an arena has room for is some more."""

_ONLY_HEAD = {"interleaved": "last-stage", "interlaced": "vocab-1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """What PyTorch and transformers do on their own; the peak is not bounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """Attention without a mask: each document of a packed row attends to itself, memory linear in the context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocked:
    """Vocabulary projection and loss in tiles of fixed bytes; logits are never formed (CCE).

    Attributes:
        tile_bytes: Bytes of all working buffers: with what the library holds inside one product, 64 MiB.
        strategy: Bytes for products: "gradients-in-forward" multiplies three times and keeps both gradients from
            forward to backward, "recompute" multiplies four times and keeps 12 bytes a token, "auto" takes the first
            while its buffers are no larger than `tile_bytes` allows.
        gradient_filter: Leaves out of the gradient of hidden states what is below this part of its token's weight in
            the loss, in blocks of 128 tokens and classes: an approximation (CCE takes 2^-12, 0.000244). Default: exact.
        filter_order: Brings the classes that pass together first, so that far fewer are multiplied; more is lost too.
    """

    tile_bytes: Bytes = 60 * 2**20
    strategy: Literal["auto", "gradients-in-forward", "recompute"] = "auto"
    gradient_filter: float | None = None
    filter_order: bool = False

    def __post_init__(self) -> None:
        if self.gradient_filter is not None and not 0 < self.gradient_filter < 1:
            raise ValueError(
                f"`plan.vocab.gradient_filter` must be in (0, 1), got {self.gradient_filter}; leave it out to be exact."
            )
        if self.filter_order and self.gradient_filter is None:
            raise ValueError("`plan.vocab.filter_order` orders what `gradient_filter` lets pass; set that too.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """As `Blocked` and recomputing, on a vocabulary that the ranks of `mesh.vp` share: each holds some of its rows.

    Every rank's tokens meet every rank's rows; what travels goes round behind the products (Ring-DTP). The embedding's
    rows are shared too.

    Attributes:
        tile_bytes: Bytes of tiles and of what travels, together.
        mode: What travels: "weights", "hidden" states, or "auto", whichever of both is fewer bytes in each pass;
            "gather" gathers the whole weight at once.
    """

    tile_bytes: Bytes = 64 * 2**20
    mode: Literal["auto", "weights", "hidden", "gather"] = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Each layer keeps its input alone and runs again in backward.

    Attributes:
        keep_attention: Attention keeps its output and lse too and is not computed again: less time, about twice the
            bytes.
    """

    keep_attention: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Batched:
    """Experts by transformers' batched products: each routed token multiplies a copy of its expert's weights.

    For small experts alone, the copies are routed tokens x expert weights; it runs in every dtype and on fake tensors.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipelined:
    """Experts in tiles of fixed bytes, computed again in backward: memory that no routing changes (PipelinedLLEP).

    Where the model has no experts it changes nothing. With `mesh.ep` tokens travel to the ranks that hold their
    experts, and ranks with little to do borrow experts of those with much.

    Attributes:
        tile_bytes: Of the routes of one expert that are at work at once.
        block_rows: Tokens whose sums over experts are formed at once, in fp32; default: a whole microbatch. With
            `mesh.ep`, tokens that one rank sends or receives at once; default: a microbatch, or 4,096 if that is less.
        borrow: With `mesh.ep`, experts of other ranks that one rank can hold; 0 lends none. Default: 4.
        borrow_routes: With `mesh.ep`, a smaller share of an expert is not lent, unless nothing else of it is left.
            Default: 1,024.
    """

    tile_bytes: Bytes = 32 * 2**20
    block_rows: Count | None = None
    borrow: int | None = None
    borrow_routes: Count | None = None

    def __post_init__(self) -> None:
        if self.borrow is not None and self.borrow < 0:
            raise ValueError(f"`plan.dispatch.borrow` must be 0 or more, got {self.borrow}; 0 lends no expert.")

    @property
    def max_borrowed(self) -> int:
        """Experts of other ranks that one rank can hold."""
        return 4 if self.borrow is None else self.borrow

    @property
    def least_borrowed_routes(self) -> int:
        """The smallest share of an expert that is lent, but for a rest."""
        return 1024 if self.borrow_routes is None else self.borrow_routes


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiled:
    """Feed-forward networks run in tiles of tokens, and again in backward: no tensor is as wide as them for all tokens.

    Attributes:
        tile_bytes: Bytes of one [tokens, width] array of a tile.
        norms: Root-mean-square norms and rotary positions run in tiles too; the copies that they make are the largest
            tensors of a layer that has no wide network.
    """

    tile_bytes: Bytes = 64 * 2**20
    norms: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Bitmap:
    """Networks with relu or relu^2 keep what is not zero of their activations, bit for bit, in tiles (BitSparse).

    Routed experts are left to `plan.dispatch`: pipelined keeps none of their activations, plain all of them.

    Attributes:
        arena_bytes: What holds those values, whatever the data; a layer that does not fit computes its activations
            again. Default: room for 55 % of all that waits for backward at once.
        tile_bytes: Bytes of one [tokens, width] array of a tile; with all tokens in one tile the result is autograd's
            bit for bit.
    """

    arena_bytes: Bytes | None = None
    tile_bytes: Bytes = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """As `Checkpoint`, and the inputs wait in far memory between forward and backward (SCO).

    In forward order every `every`-th input leaves the device while the bytes last; two are back at a time in backward.

    Attributes:
        host: Bytes of host memory, for a model on a CUDA device.
        disk: Bytes of disk.
        folder: Where the disk file lies; it has no name and is gone with the process.
        every: Every how many-th layer's input goes.
        keep_attention: Attention's output and lse go with it, and are not computed again; layers whose input stays
            compute theirs.
    """

    host: Bytes | None = None
    disk: Bytes | None = None
    folder: Path = Path()
    every: Count = 1
    keep_attention: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW:
    """Both moments of every parameter and the fp32 master of a narrower one stay on the device: the plain way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Apollo:
    """Another optimizer, which approximates AdamW: moments of a random projection scale the raw gradient (APOLLO).

    It takes the matrices and experts inside the layers; embedding, head, routers and vectors take AdamW. As it is here
    it is APOLLO-Mini; the paper's APOLLO has a `proj_rank` of a quarter of the width and `granularity` "channel".

    Attributes:
        proj_rank: Rows of the projection.
        granularity: Factors by "channel", or one by "tensor".
        alpha: Scale of the update; default: sqrt(smaller dimension / proj_rank), so that AdamW's learning rate fits.
        limiter: What bounds the growth of the update's norm: "safe", "paper", or "off".
        update_gap: Steps between two projections.
        projection: "rademacher" signs, or the paper's "gaussian".
        refresh: "keep" carries both moments over to a new projection, "reset" begins the first anew.
        seed: Of all projections.
        in_backward: Each weight is updated as soon as its gradient is there, and the gradient freed (layer-wise).
        weights: "int8" keeps the projected matrices in one byte a weight (Q-APOLLO); default: as `model.dtype` says.
    """

    proj_rank: Count = 1
    granularity: Literal["channel", "tensor"] = "tensor"
    alpha: float | None = None
    limiter: Literal["safe", "paper", "off"] = "safe"
    update_gap: Count = 200
    projection: Literal["rademacher", "gaussian"] = "rademacher"
    refresh: Literal["keep", "reset"] = "keep"
    seed: int = 0
    in_backward: bool = False
    weights: Literal["int8"] | None = None

    def __post_init__(self) -> None:
        if self.alpha is not None and not 0 < self.alpha < math.inf:
            raise ValueError(f"`plan.optim.alpha` must be a number above 0, got {self.alpha}; leave it out for auto.")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"`plan.optim.seed` must be in [0, 2^63), got {self.seed}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """How the stages of `mesh.pp` ranks take turns.

    Attributes:
        method: Its schedule.
        head: Where the vocabulary layers live; default: shared by all ranks as in Vocab-2. "interleaved" knows it on
            the last stage only, "interlaced" shared as in Vocab-1 only.
        chunks: Stages of each rank, for "interleaved" alone; default: 2.
    """

    method: Literal["1f1b", "interleaved", "interlaced", "v-half", "v-min"] = "1f1b"
    head: Literal["last-stage", "naive", "vocab-1", "vocab-2"] | None = None
    chunks: int | None = None

    def __post_init__(self) -> None:
        only = _ONLY_HEAD.get(self.method)
        if only is not None and self.head not in (None, only):
            raise ValueError(
                f'`plan.pipeline.head` must be "{only}" where `plan.pipeline.method` is "{self.method}", '
                f"got {self.head!r}; leave it out."
            )
        if self.chunks is not None and self.method != "interleaved":
            raise ValueError(
                '`plan.pipeline.chunks` has no effect unless `plan.pipeline.method` is "interleaved"; leave it out.'
            )
        if self.chunks is not None and self.chunks < 1:
            raise ValueError(f"`plan.pipeline.chunks` must be 1 or more, got {self.chunks}.")

    @property
    def place(self) -> str:
        """Where the vocabulary layers live."""
        return self.head or _ONLY_HEAD.get(self.method, "vocab-2")

    @property
    def stages_per_rank(self) -> int:
        """Stages of each rank."""
        match self.method:
            case "1f1b" | "interlaced":
                return 1
            case "v-half" | "v-min":
                return 2
            case "interleaved":
                return self.chunks or 2
            case _:
                assert_never(self.method)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamAdamW:
    """AdamW bit for bit, its state in far memory and streamed through a few chunks at each step (OffloadStreamAdamW).

    Attributes:
        host: Bytes of each rank's state in host memory, filled first; on a CPU these are the device's own.
        disk: Bytes of each rank's state on the disk.
        folder: Where the disk file lies; it has no name and is gone with the process.
        chunk_bytes: Largest chunk.
        slots: Chunks on their way at once; three keep fetching, updating and writing back busy.
        in_backward: Each chunk is updated as soon as its gradients are there, and the gradients freed (layer-wise).
    """

    host: Bytes | None = None
    disk: Bytes | None = None
    folder: Path = Path()
    chunk_bytes: Bytes = 16 * 2**20
    slots: Count = 3
    in_backward: bool = False

    def __post_init__(self) -> None:
        if self.host is None and self.disk is None:
            raise ValueError(
                '`plan.optim` = stream-adamw needs `host` or `disk`; write for instance `plan.optim.disk = "20GiB"`.'
            )


Attention = Plain | Packed
Vocab = Plain | Blocked | Ring
Dispatch = Plain | Batched | Pipelined
Boundary = Plain | Checkpoint | Offload
Activation = Plain | Tiled | Bitmap
Optim = AdamW | Apollo | StreamAdamW


def keeps_attention(boundary: Boundary) -> bool:
    """Return whether attention is not computed again."""
    return isinstance(boundary, Checkpoint | Offload) and boundary.keep_attention


def updates_in_backward(optim: Optim) -> bool:
    """Return whether weights are updated in their backward pass."""
    return isinstance(optim, Apollo | StreamAdamW) and optim.in_backward


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One method per peak, and how stages take turns; data that is printed, pasted into a run file, and wired.


    Example:
        >>> plan = Plan(vocab=Blocked(tile_bytes=2**25))
        >>> Plan.from_toml(plan.to_toml()) == plan
        True
    """

    attention: Attention = field(default_factory=Packed)
    vocab: Vocab = field(default_factory=Blocked)
    dispatch: Dispatch = field(default_factory=Plain)
    boundary: Boundary = field(default_factory=Checkpoint)
    activation: Activation = field(default_factory=Plain)
    optim: Optim = field(default_factory=AdamW)
    pipeline: Pipeline | None = None

    def __post_init__(self) -> None:
        if keeps_attention(self.boundary) and not isinstance(self.attention, Packed):
            raise ValueError(
                "`plan.boundary.keep_attention` keeps what packed attention computes; set `plan.attention` = packed, "
                "or leave it out."
            )

    @classmethod
    def plain(cls) -> Self:
        """Return the plan in which nothing is bounded: plain PyTorch and transformers."""
        return cls(
            attention=Plain(), vocab=Plain(), dispatch=Plain(), boundary=Plain(), activation=Plain(), optim=AdamW()
        )

    def to_toml(self) -> str:
        """Return the plan as the `[plan.*]` tables of a run file."""
        import tomli_w

        return tomli_w.dumps({"plan": encode(self)})

    @classmethod
    def from_toml(cls, text: str) -> Self:
        """Return the plan in `text`, a run file or a part of one; peaks that it leaves out take their defaults.

        Raises:
            UsageError: Text that is not TOML, an unknown peak, method or setting.
        """
        return decode(cls, tomllib.loads(text).get("plan", {}), "plan")

    @property
    def assumptions(self) -> tuple[str, ...]:
        """A sentence for each method whose bytes or time depend on the data."""
        if isinstance(self.activation, Bitmap) and self.activation.arena_bytes is None:
            return (
                f"activation = bitmap assumes that at most {DENSITY_PERCENT} % of activations are not zero: its arena "
                "has room for that; a layer with more computes its own again, within the same bytes",
            )
        return ()

    @property
    def approximations(self) -> tuple[str, ...]:
        """A sentence for each method that changes what is learned; none in the default plan."""
        found = []
        if isinstance(self.vocab, Blocked) and self.vocab.gradient_filter is not None:
            found.append(
                f"`plan.vocab.gradient_filter` = {self.vocab.gradient_filter:g} leaves small derivatives out: "
                "gradients below the head are approximate."
            )
        if isinstance(self.optim, Apollo):
            found.append("`plan.optim` = apollo is another optimizer than AdamW: its steps approximate AdamW's.")
        return tuple(found)
