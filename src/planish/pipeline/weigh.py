"""What a rank of a pipeline holds over a step, by arithmetic: its list, and what each action brings to life and ends.

[Note: as it runs] The walk does with numbers what `pipeline.run` does with tensors: the same buffers come and go at the
same actions, a transfer holds its own until somebody has waited for it, and rings of transfers make room as they do
there. What passes hold for a moment is given. All tokens count as the rank's own rows of the vocabulary, the most there
can be. A test holds the walk to dry runs.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from planish.pipeline.actions import Action, Head, Kind
from planish.pipeline.schedule import Schedule
from planish.price.moment import Alive, Moment, Sizes
from planish.price.table import Holder

_WIDE = 4
_AHEAD = 2
_STATISTICS = 2
# Actions between which the second half of C1 may wait, as in `pipeline.run.dispatch`.
_FREE = frozenset({Kind.RECV_F, Kind.RECV_B, Kind.IF, Kind.W})

_HIDDEN = Holder("layer working set", "hidden states between stages")
_KEPT = Holder("boundaries", "layers")
_ROWS = Holder("layer working set", "the embedding")
_HEAD = Holder("head tiles", "the head")
_GRADIENTS = Holder("gradients", "layers")
_SHARED = Holder("gradients", "embedding and head")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBytes:
    """What the passes of one stage add for a moment, and what stays.

    Attributes:
        forward: The most of its forward, its input counted.
        kept: What the forward leaves for the backward, its input counted and its output not.
        first_backward: The most of the first backward, which makes the gradients.
        backward: The most of a later one.
        gradients: Bytes of those.
    """

    forward: Moment
    kept: int
    first_backward: Moment
    backward: Moment
    gradients: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBytes:
    """What the parts of a rank take.

    Attributes:
        stages: By number.
        tokens: Of a microbatch.
        num_valid: Of them, those that count.
        width: D of hidden states.
        itemsize: Of a hidden state's numbers.
        scan: The most of S beside the hidden state.
        sweep: The most of T beside that and what S left.
        rescale: The most of making the share from the product.
        head_gradients: Bytes of the head's, and of the embedding's where it is not tied.
        embedding_gradients: Bytes of the embedding's; 0 where it is tied.
        training: Whether there is a backward.
    """

    stages: Mapping[int, StageBytes]
    tokens: int
    num_valid: int
    width: int
    itemsize: int
    scan: int
    sweep: int
    rescale: int
    head_gradients: int
    embedding_gradients: int
    training: bool = True

    @property
    def hidden(self) -> int:
        """Bytes of a hidden state."""
        return self.tokens * self.width * self.itemsize

    @property
    def wide_hidden(self) -> int:
        """Bytes of a hidden state in fp32."""
        return self.tokens * self.width * _WIDE

    @property
    def share(self) -> int:
        """Bytes of the gradient of the tokens that count, in fp32."""
        return self.num_valid * self.width * _WIDE

    @property
    def positions(self) -> int:
        """Bytes of the positions of the tokens that count."""
        return 8 * self.num_valid if self.num_valid < self.tokens else 0


class _Buffer:
    """Bytes that several may hold."""

    def __init__(self, holder: Holder, nbytes: int) -> None:
        self.holder, self.nbytes, self.holders = holder, nbytes, 1


class _Ring:
    """Transfers under way, each a list of buffers that is empty once somebody has waited."""

    def __init__(self, walk: "RankWalk", size: int) -> None:
        self._walk, self._size = walk, size
        self._under_way: deque[list[_Buffer]] = deque()

    def make_room(self) -> None:
        while self._under_way and (not self._under_way[0] or len(self._under_way) >= self._size):
            self._walk.wait(self._under_way.popleft())

    def settle(self) -> None:
        while self._under_way:
            self._walk.wait(self._under_way.popleft())

    def add(self, *buffers: _Buffer) -> list[_Buffer]:
        for each in buffers:
            each.holders += 1
        self._under_way.append(list(buffers))
        return self._under_way[-1]


class RankWalk:
    """Goes through the list of one rank. See [Note: as it runs].

    Attributes:
        worst: The worst moment of each phase.

    Args:
        schedule: With its communication.
        rank: Whose list.
        sizes: Of its parts.
        base: What is alive from the start to the end of the step.
    """

    def __init__(self, schedule: Schedule, rank: int, sizes: RankBytes, base: Sizes) -> None:
        self.worst: dict[str, Moment] = {}
        self._schedule, self._rank, self._sizes = schedule, rank, sizes
        self._live, self._total = dict(base), sum(base.values())
        self._named: dict[tuple[str, int, int], _Buffer] = {}
        self._works: dict[tuple[str, int], list[_Buffer]] = {}
        self._channel = _Ring(self, _AHEAD)
        self._sends: dict[tuple[Kind, int], _Ring] = {}
        self._trained: set[int] = set()
        self._shared_gradients: set[str] = set()
        self._halves: list[int] = []
        self._ends = schedule.stage_ranks[0] == rank, schedule.stage_ranks[-1] == rank

    def run(self) -> dict[str, Moment]:
        """Return the worst moments of forward, head and backward."""
        for action in self._schedule.ranks[self._rank]:
            if action.kind not in _FREE:
                self._part()
            self._do(action)
        self._part()
        self._channel.settle()
        for sends in self._sends.values():
            sends.settle()
        losses = {_HEAD: _WIDE * self._schedule.num_microbatches}
        self._note("forward", losses, "bringing the losses together")
        return self.worst

    def wait(self, transfer: list[_Buffer]) -> None:
        """Let go of what a transfer holds."""
        while transfer:
            self._let_go(transfer.pop())

    def _do(self, action: Action) -> None:
        stage, kind, i = action
        match kind:
            case Kind.RECV_F | Kind.RECV_B:
                self._hold("input" if kind is Kind.RECV_F else "gradient", stage, i, _HIDDEN, self._sizes.hidden)
            case Kind.SEND_F | Kind.SEND_B:
                self._send(kind, stage, i)
            case Kind.F:
                self._forward(stage, i)
            case Kind.B:
                self._backward(stage, i)
            case Kind.IF | Kind.CIF | Kind.CIB | Kind.IB:
                self._embedding(kind, i)
            case _:
                self._head(kind, i)

    def _send(self, kind: Kind, stage: int, i: int) -> None:
        ring = self._sends.setdefault((kind, stage), _Ring(self, 1))
        ring.make_room()
        tensor = self._named.pop(("output" if kind is Kind.SEND_F else "input gradient", stage, i))
        ring.add(tensor)
        self._let_go(tensor)

    def _forward(self, stage: int, i: int) -> None:
        sizes, part = self._sizes, self._sizes.stages[stage]
        if stage == 0:
            self._arrived("rows", i)
            self._hold("input", 0, i, _HIDDEN, sizes.hidden)
            self._drop("rows", 0, i)
            if not sizes.training:
                self._drop("order", 0, i)
        self._drop("input", stage, i)
        self._add(part.forward)
        self._hold("kept", stage, i, _KEPT, part.kept)
        after = stage + 1
        if after == self._schedule.num_stages:
            self._hold("last hidden", 0, i, _HEAD, sizes.hidden)
        elif self._schedule.stage_ranks[after] == self._rank:
            self._hold("input", after, i, _HIDDEN, sizes.hidden)
        else:
            self._hold("output", stage, i, _HIDDEN, sizes.hidden)

    def _backward(self, stage: int, i: int) -> None:
        sizes, part = self._sizes, self._sizes.stages[stage]
        if stage + 1 == self._schedule.num_stages:
            self._whole_gradient(i)
        first = stage not in self._trained
        self._add(part.first_backward if first else part.backward)
        if first:
            self._trained.add(stage)
            self._grow(_GRADIENTS, part.gradients)
        self._drop("kept", stage, i)
        self._drop("gradient", stage, i)
        if stage == 0:
            self._grow(_HIDDEN, sizes.hidden)
            self._hold("embedding gradient", 0, i, _ROWS, sizes.hidden)
            self._note("forward", {}, "sorting the embedding's gradients by owner")
            self._grow(_HIDDEN, -sizes.hidden)
        elif self._schedule.stage_ranks[stage - 1] == self._rank:
            self._hold("gradient", stage - 1, i, _HIDDEN, sizes.hidden)
        else:
            self._hold("input gradient", stage, i, _HIDDEN, sizes.hidden)

    def _embedding(self, kind: Kind, i: int) -> None:
        """Do with sizes what `pipeline.run.embedding.SharedEmbedding` does."""
        sizes, owns_first = self._sizes, self._ends[0]
        ids = 8 * sizes.tokens
        match kind:
            case Kind.IF:
                self._hold("order", 0, i, _ROWS, ids)
                self._note("forward", {_ROWS: 3 * ids + sizes.hidden}, "taking the embedding's rows")
                self._hold("sent rows", 0, i, _ROWS, sizes.hidden)
            case Kind.CIF:
                received = self._hold("rows", 0, i, _ROWS, sizes.hidden if owns_first else 0)
                sent = self._named.pop(("sent rows", 0, i))
                self._works["rows", i] = self._collective(sent, received)
                self._let_go(sent)
                if not owns_first:
                    self._drop("rows", 0, i)
            case Kind.CIB:
                received = self._hold("returned", 0, i, _ROWS, sizes.hidden)
                sent = [self._named.pop(("embedding gradient", 0, i))] if owns_first else []
                self._works["returned", i] = self._collective(*sent, received)
                for each in sent:
                    self._let_go(each)
            case _:
                self._arrived("returned", i)
                name = "embedding" if sizes.embedding_gradients else "head"
                self._make_gradients(name, sizes.embedding_gradients or sizes.head_gradients)
                wide, narrow = sizes.wide_hidden, sizes.itemsize < _WIDE
                summing = wide * (1 + narrow) + 2 * ids
                adding = wide + narrow * (wide + sizes.hidden) + ids
                self._note("backward", {_ROWS: max(summing, adding)}, "adding the embedding's gradients")
                self._drop("returned", 0, i)
                self._drop("order", 0, i)

    def _head(self, kind: Kind, i: int) -> None:
        """Do with sizes what `pipeline.run.head.SharedHead` does."""
        sizes = self._sizes
        one_barrier = self._schedule.head is Head.VOCAB_2
        match kind:
            case Kind.C0:
                owns_last = self._ends[1]
                hidden = self._named["last hidden", 0, i] if owns_last else None
                hidden = hidden or self._hold("last hidden", 0, i, _HEAD, sizes.hidden)
                self._works["last hidden", i] = self._collective(hidden)
            case Kind.S:
                self._arrived("last hidden", i)
                self._note("head", {_HEAD: sizes.scan}, "the head's statistics")
                self._hold("statistics", 0, i, _HEAD, _STATISTICS * sizes.num_valid * _WIDE)
                self._hold("positions", 0, i, _HEAD, sizes.positions)
                if one_barrier and sizes.training:
                    self._hold("product", 0, i, _HEAD, sizes.share)
            case Kind.C1:
                nbytes = self._schedule.num_ranks * _STATISTICS * sizes.num_valid * _WIDE
                gathered = self._hold("gathered", 0, i, _HEAD, nbytes)
                self._works["gathered", i] = self._collective(self._named["statistics", 0, i], gathered)
                self._halves.append(i)
            case Kind.T:
                self._make_gradients("head", sizes.head_gradients)
                self._note("head", {_HEAD: sizes.sweep}, "the head's gradients")
                if not one_barrier:
                    self._hold("product", 0, i, _HEAD, sizes.share)
                for name in ("last hidden", "known", "positions"):
                    self._drop(name, 0, i)
            case _:
                self._reduce(i)

    def _part(self) -> None:
        """Do the second halves of C1."""
        sizes = self._sizes
        for i in self._halves:
            self._arrived("gathered", i)
            self._hold("known", 0, i, _HEAD, _STATISTICS * sizes.num_valid * _WIDE)
            self._grow(_HEAD, _WIDE)  # the loss
            combining = self._named["gathered", 0, i].nbytes
            if self._ends[1] and sizes.training:  # the sum is spread by them
                positions = self._named["root positions", 0, i] = self._named["positions", 0, i]
                positions.holders += 1
            if self._schedule.head is Head.VOCAB_2 and sizes.training:
                self._note("forward", {_HEAD: max(combining, sizes.rescale)}, "the hidden states' gradients")
                self._reduce(i)
            else:
                self._note("forward", {_HEAD: combining}, "the shards' statistics")
            self._drop("gathered", 0, i)
            self._drop("statistics", 0, i)
        self._halves.clear()

    def _reduce(self, i: int) -> None:
        share = self._named["product", 0, i]
        self._works["product", i] = self._collective(share)
        if not self._ends[1]:
            self._drop("product", 0, i)

    def _whole_gradient(self, i: int) -> None:
        """Bring the last hidden state's gradient, for all tokens and in its dtype."""
        sizes = self._sizes
        self._arrived("product", i)
        narrow = sizes.num_valid * sizes.width * sizes.itemsize if sizes.itemsize < _WIDE else 0
        spread = sizes.hidden if sizes.positions else 0
        self._note("forward", {_HEAD: narrow + spread}, "the last hidden state's gradient")
        self._drop("product", 0, i)
        self._drop("root positions", 0, i)
        self._hold("gradient", self._schedule.num_stages - 1, i, _HIDDEN, sizes.hidden)

    def _collective(self, *buffers: _Buffer) -> list[_Buffer]:
        self._channel.make_room()
        return self._channel.add(*buffers)

    def _arrived(self, name: str, i: int) -> None:
        self.wait(self._works.pop((name, i), []))

    def _make_gradients(self, name: str, nbytes: int) -> None:
        if name not in self._shared_gradients:
            self._shared_gradients.add(name)
            self._grow(_SHARED, nbytes)

    def _hold(self, name: str, stage: int, i: int, holder: Holder, nbytes: int) -> _Buffer:
        """Bring a buffer to life, which is the worst moment of the transfers' phase if it is."""
        buffer = self._named[name, stage, i] = _Buffer(holder, nbytes)
        self._grow(holder, nbytes)
        self._note("forward", {}, "transfers")
        return buffer

    def _drop(self, name: str, stage: int, i: int) -> None:
        self._let_go(self._named.pop((name, stage, i)))

    def _let_go(self, buffer: _Buffer) -> None:
        buffer.holders -= 1
        if not buffer.holders:
            self._grow(buffer.holder, -buffer.nbytes)

    def _grow(self, holder: Holder, nbytes: int) -> None:
        self._live[holder] = self._live.get(holder, 0) + nbytes
        self._total += nbytes

    def _add(self, moment: Moment) -> None:
        self._note(moment.phase, moment.sizes, moment.doing, moment.layer)

    def _note(self, phase: str, sizes: Sizes, doing: str, layer: int | None = None) -> None:
        before = self.worst.get(phase)
        if before is None or self._total + sum(sizes.values()) > before.total_bytes:
            alive = Alive.of(dict(self._live)).plus(Alive.of(sizes))
            self.worst[phase] = Moment(phase=phase, layer=layer, doing=doing, alive=alive)
