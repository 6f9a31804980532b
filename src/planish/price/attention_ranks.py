"""What attention weighs where ranks share rows: the allocations of `peaks.attention.sequence`, replayed.

Counted from the moment attention is called, for the rank with the last span: of the ranks in a window its queries see
the most keys, and where spans are turned it has the most queries beside any keys.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from planish.price.attention import (
    Call,
    Document,
    backward_bytes,
    fold_sinks,
    forward_bytes,
    part_tokens,
    replay_backward,
    replay_forward,
    sink_gradient,
)
from planish.price.sights import Sight, sights, turned_sights
from planish.price.tally import Tally
from planish.shapes import AttentionShape, BatchShape

_WIDE = 4
_NAMES = ("query", "key", "value")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBytes:
    """Bytes of one call beside its operands.

    Attributes:
        forward: The most that the forward pass adds, the output included.
        kept: What stays until backward, the output included.
        backward: The most that the backward pass adds to that and the output's gradient, its gradients included.
        more: What of that is not there where rows are not shared: beside query, key, value, output and lse.
    """

    forward: int
    kept: int
    backward: int
    more: int


def by_heads(attention: AttentionShape, num_ranks: int) -> bool:
    """Return whether heads can be dealt out evenly, so that each rank works on whole rows of some."""
    heads, kv_heads = attention.num_heads, attention.num_kv_heads
    return heads % num_ranks == 0 and (kv_heads % num_ranks == 0 or num_ranks % kv_heads == 0)


@lru_cache(maxsize=256)
def sequence_bytes(attention: AttentionShape, batch: BatchShape, itemsize: int) -> AttentionBytes:
    """Return the bytes of one call of attention whose rows several ranks share.

    Exactness: the ledger's, to the byte, where each row is one document and a multiple of the ranks; no less than those
        of any other documents.

    Args:
        attention: What the layer's attention is given, for all heads.
        batch: The spans of one rank, and how many share their rows.
        itemsize: Bytes of one number.
    """
    whole = replace(batch, context=batch.context * batch.sharers)
    dealt = by_heads(attention, batch.sharers)
    replay = _by_heads if dealt else _by_spans if attention.window else _by_turns
    found = replay(attention, whole, itemsize, batch.sharers)
    operands = sum(_sizes(attention, batch.tokens, itemsize).values()) + batch.tokens * attention.num_heads * _WIDE
    if dealt or not attention.window:  # the operands themselves go once they are sent
        return replace(found, more=found.kept - operands)
    return found


def _sizes(attention: AttentionShape, tokens: int, itemsize: int) -> dict[str, int]:
    heads, kv_heads = attention.num_heads, attention.num_kv_heads
    columns = {
        "query": heads * attention.qk_width,
        "key": kv_heads * attention.qk_width,
        "value": kv_heads * attention.v_width,
        "out": heads * attention.v_width,
    }
    return {name: tokens * each * itemsize for name, each in columns.items()}


def _by_heads(attention: AttentionShape, batch: BatchShape, itemsize: int, num_ranks: int) -> AttentionBytes:
    """Replay the attention of whole rows between `ToHeads` and `ToTokens`."""
    own = replace(
        attention,
        num_heads=attention.num_heads // num_ranks,
        num_kv_heads=max(1, attention.num_kv_heads // num_ranks),
    )
    span = batch.rows * -(-batch.context // num_ranks)
    here, there = (_sizes(each, tokens, itemsize) for each, tokens in ((attention, span), (own, batch.tokens)))
    copies = own.num_kv_heads * num_ranks // attention.num_kv_heads  # of each key head, that travel
    lse = batch.tokens * own.num_heads * _WIDE
    between = _Between(
        forward=forward_bytes(own, batch, itemsize),
        kept=there["out"] + lse,
        backward=backward_bytes(own, batch, itemsize),
    )
    return _there_and_back(here, there, between, copies=copies, several=batch.rows > 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Between:
    """Bytes of attention itself: at most in forward, kept with the output, and at most in backward."""

    forward: int
    kept: int
    backward: int


def _there_and_back(
    here: dict[str, int], there: dict[str, int], between: _Between, *, copies: int, several: bool
) -> AttentionBytes:
    """Replay attention between two exchanges.

    Args:
        here: Bytes of the operands as they are given.
        there: As attention takes them.
        between: Of attention.
        copies: How often keys and values travel.
        several: There are several rows.
    """
    tally = Tally()
    for name in _NAMES:
        tally.hold(sent=here[name] * (1 if name == "query" else copies), arrived=there[name])
        tally.drop("sent")
        if several:
            tally.hold(**{name: there[name]})
            tally.drop("arrived")
        else:
            tally.rename(**{name: "arrived"})
    tally.spike(between.forward)
    tally.hold(whole=between.kept)
    tally.hold(sent=there["out"], arrived=here["out"])
    tally.drop("sent")
    tally.hold(out=here["out"])
    tally.drop("arrived")

    back = Tally()
    back.hold(sent=here["out"], arrived=there["out"])
    back.drop("sent")
    if several:
        back.hold(grad=there["out"])
        back.drop("arrived")
    back.spike(between.backward)
    back.drop("grad", "arrived")
    back.free(sum(there[name] for name in _NAMES) + between.kept)
    back.hold(grads=sum(there[name] for name in _NAMES))
    for name in _NAMES:
        back.hold(sent=there[name], arrived=here[name] * (1 if name == "query" else copies))
        back.drop("sent")
        back.hold(**{name: here[name]})
        back.drop("arrived")
    return AttentionBytes(forward=tally.peak_bytes, kept=tally.live_bytes, backward=back.peak_bytes, more=0)


def _by_spans(attention: AttentionShape, batch: BatchShape, itemsize: int, num_ranks: int) -> AttentionBytes:
    """Replay attention by an `ExchangeKernel`."""
    row = {"rows": 1, "width": batch.context, "num_ranks": num_ranks, "window": attention.window}  # all are alike
    found = _exchange(attention, batch, itemsize, num_ranks, sights((0, batch.context), **row, last_alone=True))
    return AttentionBytes(forward=found.forward, kept=found.kept, backward=found.backward, more=0)


def _by_turns(attention: AttentionShape, batch: BatchShape, itemsize: int, num_ranks: int) -> AttentionBytes:
    """Replay attention by an `ExchangeKernel` between two `Turn`."""
    row = {"rows": 1, "width": batch.context, "num_ranks": num_ranks}
    seen = turned_sights((0, batch.context), **row, last_alone=True)
    sizes = _sizes(attention, batch.tokens // num_ranks, itemsize)
    between = _exchange(attention, batch, itemsize, num_ranks, seen)
    return _there_and_back(sizes, sizes, between, copies=1, several=batch.rows > 1)


def _exchange(
    attention: AttentionShape,
    batch: BatchShape,
    itemsize: int,
    num_ranks: int,
    seen: Mapping[tuple[int, int], Sequence[Sight]],
) -> _Between:
    """Replay an `ExchangeKernel` of the last rank."""
    context = batch.context // num_ranks
    call = Call(attention=attention, rows=batch.rows, context=context, itemsize=itemsize)
    far = _unlike([_far_call(call, sight) for [sight] in seen.values()])
    sizes = _sizes(attention, batch.rows * context, itemsize)
    forward, kept = _spans_forward(call, far, sizes)
    return _Between(forward=forward, kept=kept, backward=_spans_backward(call, far, sizes))


def _spans_forward(call: Call, far: list[Call], sizes: dict[str, int]) -> tuple[int, int]:
    """Return the most bytes, and what stays."""
    room, narrow = sizes["key"] + sizes["value"], call.itemsize < _WIDE
    tally = Tally()
    tally.spike(_peak(replay_forward, call))
    tally.hold(out=sizes["out"], lse=call.lse_bytes(call.rows, call.context))
    if narrow:
        tally.hold(wide=sizes["out"] // call.itemsize * _WIDE)
        tally.drop("out")
    tally.hold(leaving=room, slot=room, other=room)
    for one in far:
        tally.spike(_peak(replay_forward, one))
        _merge(tally, one)
    tally.drop("leaving", "slot", "other")
    if call.attention.sinks:
        fold_sinks(tally, call)
        tally.drop("sinks", "lse")
    if narrow:
        tally.hold(out=sizes["out"])
        tally.drop("wide")
    return tally.peak_bytes, tally.live_bytes


def _spans_backward(call: Call, far: list[Call], sizes: dict[str, int]) -> int:
    """Return the most bytes."""
    room, narrow = sizes["key"] + sizes["value"], call.itemsize < _WIDE
    tally = Tally()
    if call.attention.sinks:
        sink_gradient(tally, call)
    tally.spike(_peak(replay_backward, call))
    tally.hold(**_made(call, sizes))
    if narrow:
        tally.hold(**{f"wide {name}": sizes[name] // call.itemsize * _WIDE for name in _NAMES})
        tally.drop(*_NAMES)
    tally.hold(home=room, landing=room, leaving=room, slot=room, other=room)
    for one in far:
        tally.spike(_peak(replay_backward, one))
    tally.drop("home", "landing", "leaving", "slot", "other")
    if narrow:
        tally.hold(**{name: sizes[name] for name in _NAMES})
    return tally.peak_bytes


def _made(call: Call, sizes: dict[str, int]) -> dict[str, int]:
    """Return the bytes of the gradients that the kernel gives: of a single block, parts of what was as wide as it."""
    attention = call.attention
    if attention.softcapped or (attention.window or call.context) < call.context:
        return {name: sizes[name] for name in _NAMES}
    keys = call.key_bytes(call.rows, call.context, call.width, call.itemsize)
    return {"query": call.query_bytes(call.rows, call.context, call.width, call.itemsize), "key": keys, "value": keys}


def _unlike(calls: list[Call]) -> list[Call]:
    """Return each call once: without a window it does not matter how far the keys are."""
    same = {(each.context, each.num_keys, each.attention.window and each.far): each for each in calls}
    return list(same.values())


def _far_call(call: Call, sight: Sight) -> Call:
    return replace(call, rows=1, context=sight.num_queries, far=(sight.num_keys, sight.lead))


def _peak(replay: Callable[[Tally, Call, list[Document]], None], call: Call) -> int:
    """Return the most bytes of one call: over whole rows of the span, or over keys that came."""
    tally = Tally()
    replay(tally, call, [Document(rows=call.rows, tokens=call.context)] if call.far is None else [])
    return tally.peak_bytes


def _merge(tally: Tally, one: Call) -> None:
    """Hold what `_merge` holds beside the far output and lse."""
    lse = one.lse_bytes(1, one.context)
    out = one.query_bytes(1, one.context, one.attention.v_width, one.itemsize)
    tally.hold(far=out, far_lse=lse, total=lse)
    part = one.lse_bytes(1, part_tokens(one))
    wide = one.query_bytes(1, part_tokens(one), one.attention.v_width, _WIDE) if one.itemsize < _WIDE else 0
    tally.spike(part + wide)
    tally.drop("far", "far_lse", "total")
