"""What experts over ranks weigh on one of them: rows on their way, borrowed experts, sums, whatever the router does.

`peaks.dispatch` allocates exactly the buffers that are listed here, so these numbers are what a ledger measures.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, isqrt, prod

from planish.price.dispatch import Buffers, Experts, Kind, backward_buffers, forward_buffers, grouped_bytes
from planish.price.tally import Tally

Row = dict[str, tuple[int, Kind]]
"""What travels with one token: the columns of each field, and their kind."""

_FEW_ROWS = 4096  # a small batch may take so many, and is one block
_ALIGNED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What is fixed at launch for a layer whose experts are spread over ranks.

    Attributes:
        num_ranks: They share the experts.
        num_experts: Over all ranks.
        max_tokens: The most that any rank brings.
        block_rows: Rows that a rank sends or receives at a time.
        max_foreign: Experts of others that one rank can hold; None: any number.
    """

    num_ranks: int
    num_experts: int
    max_tokens: int
    block_rows: int
    max_foreign: int | None

    @property
    def num_strides(self) -> int:
        """Into how many strides tokens are dealt."""
        return num_strides(self.max_tokens, self.block_rows, self.num_ranks)

    @property
    def num_borrowed(self) -> int:
        """The most experts of others on one rank."""
        most = self.num_experts if self.num_ranks > 1 else 0
        return most if self.max_foreign is None else min(most, self.max_foreign)

    @property
    def num_lent(self) -> int:
        """The most copies of its experts that one rank sends at a time."""
        return min(self.num_ranks - 1, self.num_borrowed)


def block_rows_of(asked: int | None, tokens: int, num_ranks: int) -> int:
    """Return how many rows a rank sends or receives at a time: as `asked`, or a microbatch, and never more than all."""
    return min(asked or max(tokens, _FEW_ROWS), num_ranks * tokens)


def num_strides(max_tokens: int, block_rows: int, num_ranks: int) -> int:
    """Return into how many strides tokens are dealt so that one stride never fills a block: 1 or a prime.

    Args:
        max_tokens: The most tokens that any rank can have.
        block_rows: Rows that a rank may receive at a time.
        num_ranks: Ranks that share the experts.

    Raises:
        ValueError: Fewer rows than ranks.
    """
    if block_rows < num_ranks:
        raise ValueError(
            f"`block_rows` must be at least the number of ranks, {num_ranks}: each of them may send a token to the "
            f"same one; got {block_rows}, {num_ranks} is the smallest that works."
        )
    needed = ceil(max_tokens / (block_rows // num_ranks))
    return 1 if needed <= 1 else next(each for each in range(needed, 2 * needed + 1) if _is_prime(each))


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % each for each in range(2, isqrt(number) + 1))


def sent_row(experts: Experts, *, backward: bool) -> Row:
    """Return what travels to an expert's rank with one token: codes name a rank and an expert of it for each route."""
    D, K = experts.hidden_size, experts.top_k
    grad: Row = {"grad": (D, "given")} if backward else {}
    return {"hidden": (D, "given"), **grad, "scores": (K, "score"), "codes": (K, "code")}


def returned_row(experts: Experts, *, backward: bool) -> Row:
    """Return what travels back with one token."""
    scores: Row = {"scores": (experts.top_k, "score")} if backward else {}
    return {"hidden": (experts.hidden_size, "given"), **scores}


def offsets(row: Row, experts: Experts) -> tuple[dict[str, int], int]:
    """Return the byte at which each field of a row begins, and the bytes of the row."""
    found, end = {}, 0
    for name, (columns, kind) in row.items():
        found[name] = end
        end = ceil((end + columns * experts.sizeof(kind)) / _ALIGNED) * _ALIGNED
    return found, end


def rank_buffers(experts: Experts, launch: Launch, tile_rows: int, *, backward: bool) -> Buffers:
    """Return what one pass works in on one rank, whatever the routing."""
    B, K = launch.block_rows, experts.top_k
    sent, returned = (offsets(each(experts, backward=backward), experts)[1] for each in (sent_row, returned_row))
    numbers = sum(map(prod, experts.weight_shapes))
    return {
        **(backward_buffers if backward else forward_buffers)(experts, B, tile_rows, B),
        "total": ((B, experts.hidden_size), "wide"),
        **{f"{way} {slot}": ((B, sent), "byte") for way in ("send", "take") for slot in range(2)},
        **{f"{way} {slot}": ((B, returned), "byte") for way in ("result", "back") for slot in range(2)},
        **{f"tokens {slot}": ((B,), "index") for slot in range(3)},
        "scores of rows": ((B, K), "score"),
        **({"gradients of scores": ((B, K), "score")} if backward else {}),
        "routes": ((B * K,), "code"),
        "sorted routes": ((B * K,), "code"),
        "order": ((B * K,), "index"),
        "row of route": ((B * K,), "index"),
        "borrowed": ((launch.num_borrowed, numbers), "given"),
        "lent": ((launch.num_lent, numbers), "given"),
    }


def return_buffers(experts: Experts, launch: Launch) -> Buffers:
    """Return what the gradients of borrowed experts travel home in."""
    numbers = sum(map(prod, experts.weight_shapes))
    return {"leaving": ((min(1, launch.num_borrowed), numbers), "wide"), "coming": ((launch.num_lent, numbers), "wide")}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBytes:
    """Bytes of the experts on one rank beside their arguments.

    Attributes:
        forward: The most that the forward pass adds, the result included.
        kept: From forward to backward.
        backward: The most that the backward pass adds to what was kept, all gradients included.
    """

    forward: int
    kept: int
    backward: int


@lru_cache(maxsize=256)
def rank_bytes(experts: Experts, launch: Launch, tokens: int, tile_rows: int) -> RankBytes:
    """Return what `tokens` tokens of a rank and its `experts` weigh, all arguments needing gradients."""
    size = experts.nbytes
    exchanged = 4 * launch.num_strides * ((launch.num_ranks + 1) * launch.num_experts + 2 * launch.num_ranks)
    rows = tokens * min(experts.top_k, launch.num_ranks)
    kept = 4 * (tokens * experts.top_k + rows + launch.num_ranks * launch.num_experts)
    wide = tokens * experts.hidden_size * experts.wide_itemsize
    narrow = tokens * experts.hidden_size * experts.itemsize
    is_narrow = experts.wide_itemsize > experts.itemsize
    forward = Tally()
    forward.hold(kept=kept, exchanged=exchanged, result=wide)
    forward.hold(buffers=size(rank_buffers(experts, launch, tile_rows, backward=False)))
    routes = launch.block_rows * experts.top_k
    forward.spike(grouped_bytes(experts, routes, tile_rows, backward=False))
    forward.drop("buffers", "exchanged")
    forward.spike(narrow * is_narrow)
    backward = Tally()
    buffers = rank_buffers(experts, launch, tile_rows, backward=True)
    borrowed = {"borrowed": buffers.pop("borrowed")}
    numbers = sum(map(prod, experts.weight_shapes))
    backward.hold(buffers=size(buffers), borrowed=size(borrowed))
    backward.hold(own=experts.num_experts * numbers * experts.wide_itemsize)
    backward.hold(sums=launch.num_borrowed * numbers * experts.wide_itemsize)
    backward.hold(by_hidden=wide, by_scores=tokens * experts.top_k * experts.score_itemsize)
    backward.spike(grouped_bytes(experts, routes, tile_rows, backward=True))
    backward.drop("buffers")
    backward.spike(size(return_buffers(experts, launch)))
    backward.drop("sums", "borrowed")
    if is_narrow:
        backward.hold(result=narrow)
        backward.drop("by_hidden")
        backward.spike(experts.num_experts * numbers * experts.itemsize)
    return RankBytes(forward=forward.peak_bytes, kept=kept, backward=backward.peak_bytes)
