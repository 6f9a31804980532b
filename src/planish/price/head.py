"""What the head weighs in each phase, by method: full logits, or the tiles that `price.vocab` sizes."""

from dataclasses import dataclass, fields
from functools import lru_cache
from typing import assert_never

from planish.methods import Blocked, Plain, Ring, Vocab
from planish.price.processor import product_dtype
from planish.price.tally import Tally
from planish.price.vocab import Head, choose_tiling, cross_entropy_phases
from planish.price.vocab_ring import Party, ring_phases
from planish.shapes import BatchShape, HeadShape

_WIDE = 4
_DTYPES = {2: "bfloat16", 4: "float32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadBytes:
    """Bytes of the head beside its arguments.

    Attributes:
        forward: The most that the forward pass adds, the loss included.
        kept: What waits for backward beside the loss, hidden states included where they do.
        backward: The most that the backward pass adds to what waits, the gradients of hidden and weight included.
        evaluation: The most that a forward pass without gradients adds.
    """

    forward: int
    kept: int
    backward: int
    evaluation: int


@lru_cache(maxsize=256)
def head_bytes(head: HeadShape, batch: BatchShape, method: Vocab, num_ranks: int = 1) -> HeadBytes:
    """Return what the head weighs for one microbatch by `method`; without `num_valid`, whatever their number.

    Over `num_ranks` ranks that share the vocabulary every token counts.
    """
    match method:
        case Plain():
            return _plain(head, batch.tokens)
        case Blocked():
            counts = (batch.tokens, max(0, batch.tokens - 1)) if batch.num_valid is None else (batch.num_valid,)
            found = [_blocked(head, batch.tokens, count, method) for count in counts]
            most = {each.name: max(getattr(one, each.name) for one in found) for each in fields(HeadBytes)}
            return HeadBytes(**most)
        case Ring() if num_ranks > 1:
            return _ring(head, batch.tokens, method, num_ranks)
        case Ring(tile_bytes=tile_bytes):
            return head_bytes(head, batch, Blocked(tile_bytes=tile_bytes))
        case _:
            assert_never(method)


def _blocked(head: HeadShape, tokens: int, num_valid: int, method: Blocked) -> HeadBytes:
    dtype = _DTYPES[head.itemsize]
    names = ("hidden", "weight", "bias") if head.biased else ("hidden", "weight")
    found = []
    for grads in (frozenset(names), frozenset[str]()):
        sizes = Head(
            tokens=tokens,
            hidden_size=head.hidden_size,
            vocab_size=head.vocab_size,
            hidden_dtype=dtype,
            weight_dtype=dtype,
            compute_dtype=product_dtype(dtype),
            bias_dtype=dtype if head.biased else None,
            capped=head.softcapped,
            grads=grads,
            filtered=method.gradient_filter is not None,
            ordered=method.filter_order,
        )
        tiling = choose_tiling(sizes, tile_bytes=method.tile_bytes, strategy=method.strategy)
        found.append((tiling, cross_entropy_phases(sizes, tiling, num_valid=num_valid)))
    (tiling, trained), (_, evaluated) = found
    hidden = 0 if tiling.keeps_tiles else tokens * head.hidden_size * head.itemsize
    return HeadBytes(
        forward=trained.forward,
        kept=trained.kept - _WIDE + hidden,
        backward=trained.backward - trained.kept,
        evaluation=evaluated.forward,
    )


def _ring(head: HeadShape, tokens: int, method: Ring, num_ranks: int) -> HeadBytes:
    """Return what rank 0 weighs, whose rows are no fewer than any other's."""
    dtype, rows = _DTYPES[head.itemsize], -(-head.vocab_size // num_ranks)
    party = Party(
        head=Head(
            tokens=tokens,
            hidden_size=head.hidden_size,
            vocab_size=rows,
            hidden_dtype=dtype,
            weight_dtype=dtype,
            compute_dtype=product_dtype(dtype),
            bias_dtype=dtype if head.biased else None,
            capped=head.softcapped,
            grads=frozenset({"hidden", "weight", "bias"} if head.biased else {"hidden", "weight"}),
        ),
        rank=0,
        rows=(rows,) * num_ranks,
        valid=(tokens,) * num_ranks,
    )
    found = ring_phases(party, method.mode, tile_bytes=method.tile_bytes)
    return HeadBytes(
        forward=found.forward,
        kept=found.kept - _WIDE + tokens * head.hidden_size * head.itemsize,
        backward=found.backward - found.kept,
        evaluation=found.forward,
    )


def _plain(head: HeadShape, tokens: int) -> HeadBytes:
    """Return what full logits weigh: them, their fp32 copy, its log-softmax, and their gradients."""
    logits, wide = (tokens * head.vocab_size * size for size in (head.itemsize, _WIDE))
    forward, kept = _plain_forward(head, logits, wide, trained=True)
    return HeadBytes(
        forward=forward,
        kept=kept + tokens * head.hidden_size * head.itemsize,
        backward=_plain_backward(head, tokens, logits, wide),
        evaluation=_plain_forward(head, logits, wide, trained=False)[0],
    )


def _plain_forward(head: HeadShape, logits: int, wide: int, *, trained: bool) -> tuple[int, int]:
    """Return the peak, and what stays for backward beside hidden and loss."""
    tally = Tally()
    tally.hold(logits=logits)
    if head.scaled:
        tally.hold(logits=logits)
    if head.softcapped:
        tally.hold(divided=logits, tanh=logits)
        tally.drop("divided")
        tally.hold(logits=logits)
        if not trained:
            tally.drop("tanh")
    if head.itemsize < _WIDE:
        tally.hold(raised=wide)
    tally.hold(log_softmax=wide, loss=_WIDE, total_weight=_WIDE)
    tally.drop("logits", "raised", "loss")
    return tally.peak_bytes, tally.live_bytes


def _plain_backward(head: HeadShape, tokens: int, logits: int, wide: int) -> int:
    """Return the peak beside what waited; the log-softmax and the tanh go on the way."""
    tally = Tally()
    tally.hold(by_loss=wide, by_logits=wide)
    tally.drop("by_loss")
    tally.free(wide)
    if head.itemsize < _WIDE:
        tally.hold(narrow=logits)
        tally.rename(by_logits="narrow")
    if head.softcapped:
        tally.hold(by_tanh=logits)
        tally.rename(by_logits="by_tanh")
        tally.hold(by_quotient=logits)
        tally.rename(by_logits="by_quotient")
        tally.free(logits)
        tally.hold(by_logits=logits)
    if head.scaled:
        tally.hold(by_logits=logits)
    tally.hold(hidden_grad=tokens * head.hidden_size * head.itemsize)
    tally.hold(weight_grad=head.vocab_size * head.hidden_size * head.itemsize)
    if head.biased:
        tally.hold(bias_grad=head.vocab_size * head.itemsize)
    return tally.peak_bytes
