"""One pass of text through a parent, layer by layer, that makes every block of the library on its way.

Each layer sees the hidden states that the parent's layers before it gave; what it passes on replaces them. Nothing is
kept of a token but those, so memory is one layer, its statistics and the hidden states of the text.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from planish.compress.blocks import Kind, part
from planish.compress.channels import Channels
from planish.compress.initialise import (
    Order,
    attention_product,
    best_of_groups,
    cut_channels,
    ffn_product,
    head_scores,
    only_own_queries,
    pool_heads,
    select_heads,
)
from planish.compress.library import ENDS, Library, block_name
from planish.compress.mixture import MixtureFit
from planish.compress.parent import Parent
from planish.compress.refit import Part, Start, Sums
from planish.compress.space import (
    AttentionOption,
    Choice,
    KeepExperts,
    KeepHeads,
    LayerSpace,
    LinearAttention,
    LinearFfn,
    NoAttention,
    NoFfn,
    SlidingWindow,
    Width,
)
from planish.errors import UsageError
from planish.models.child import ChildLayer

_PLAIN = 1.0  # the error of nothing in the place of a sub-block


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """How blocks are initialised.

    Attributes:
        heldout: Part of the rows, the last ones, that errors are measured on and nothing is fitted to.
        choosing: Part of the others, their last, that says how strongly to re-fit and from which start; then they are
            fitted to as well.
        batch_rows: Rows that run at once.
        ridges: How strongly a re-fit may be drawn to what it started from, as part of each input's own square: little
            text needs more.
        orders: What may rank channels: the published "contribution", the same "iterative"ly, or by "refit".
        balance: Whether every token counts the same in a re-fit, however large its output is (a first token's is often
            a thousand times that of others).
    """

    heldout: float = 0.25
    choosing: float = 0.25
    batch_rows: int = 2
    ridges: tuple[float, ...] = (1e-3, 1e-2, 1e-1, 1.0, 10.0)
    orders: tuple[Order, ...] = ("contribution", "iterative", "refit")
    balance: bool = True

    def __post_init__(self) -> None:
        for name in ("heldout", "choosing"):
            share = getattr(self, name)
            if not 0 < share < 1:
                raise ValueError(f"`{name}` must be between 0 and 1, got {share}; 0.25 keeps a quarter of the rows.")
        if not self.orders or min(self.ridges, default=1) <= 0:
            raise ValueError(f"`orders` must name one and `ridges` be positive, got {self.orders} and {self.ridges}.")

    def borders(self, rows: int) -> tuple[int, int]:
        """Return the first of `rows` rows that chooses, and the first that is held out.

        Raises:
            UsageError: Too few to have some of each.
        """
        held = rows - max(1, round(rows * self.heldout))
        choose = held - max(1, round(held * self.choosing))
        if choose < 1:
            raise UsageError(
                f"`calibration.rows` = {rows} leaves none to fit beside those that choose and judge; give at least 4."
            )
        return choose, held


def calibrate(
    parent: Parent,
    rows: Tensor,
    library: Library,
    settings: Calibration,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Fill `library` with every block of its space; blocks that are there are kept.

    Memory:        the parent as it gives itself, hidden states [N, S, D], and of one layer: its blocks' weights, two
        Gram matrices for every output matrix that is fitted, and a batch's activations.

    Args:
        parent: The model.
        rows: Token ids [N, S], each row one text from its first token on.
        library: Made for `parent`.
        settings: How.
        progress: Called with the layers done and their number after each.

    Raises:
        UsageError: Too few rows to hold some out.
    """
    borders = settings.borders(len(rows))
    with torch.no_grad():
        ends = parent.ends()
        if ENDS not in library:
            library.write(ENDS, ends, made="parent", error=0.0, plain_error=0.0)
        hidden = torch.nn.functional.embedding(rows.to(parent.device), ends.pop("embedding"))
        ends.clear()
        for index, space in enumerate(library.space.layers):
            with parent.layer(index) as layer:
                fit = _LayerFit(parent, layer, index, space, settings)
                for here, which in _batches(len(rows), settings.batch_rows, borders):
                    hidden[here] = fit.see(hidden[here], which)
                fit.write(library)
            if progress is not None:
                progress(index + 1, len(library.space.layers))


def _batches(rows: int, size: int, borders: tuple[int, int]) -> Iterator[tuple[slice, Part]]:
    """Yield batches of rows, each of one part of the text."""
    parts: tuple[Part, ...] = ("fit", "choose", "held")
    for which, (start, end) in zip(parts, pairwise((0, *borders, rows)), strict=True):
        for first in range(start, end, size):
            yield slice(first, min(first + size, end)), which


@dataclass(slots=True, kw_only=True)
class _Attempt:
    """One way to reduce attention.

    Attributes:
        option: What it is a way to.
        made: How.
        layer: With its weights, without an output matrix and a feed-forward network.
        plain: The output matrix that it would have without a re-fit.
        sums: Of what enters the output matrix, and the parent's output.
    """

    option: AttentionOption
    made: str
    layer: ChildLayer
    plain: Tensor
    sums: Sums


class _LayerFit:
    """Statistics of one layer."""

    def __init__(self, parent: Parent, layer: ChildLayer, index: int, space: LayerSpace, settings: Calibration) -> None:
        self.parent, self.layer, self.index, self.space, self.settings = parent, layer, index, space, settings
        self.attention, self.ffn = layer.self_attn, layer.mlp
        like = next(layer.parameters())
        size = layer.config.hidden_size
        self.attempts: list[_Attempt] | None = None
        self.linear: dict[str, Sums] = {}
        if LinearAttention() in space.attention:
            self.linear["attention"] = Sums(size, size, like)
        if LinearFfn() in space.ffn:
            self.linear["ffn"] = Sums(size, size, like)
        self.channels = Channels(self.ffn.down_proj.weight) if isinstance(space.ffn[0], Width) else None
        smaller = [each for each in space.ffn[1:] if isinstance(each, KeepExperts)]
        self.mixture = MixtureFit(self.ffn, smaller) if smaller else None

    def see(self, hidden: Tensor, which: Part) -> Tensor:
        """Count a batch of hidden states [B, S, D]; return what the layer makes of them."""
        hidden = hidden + self._attended(hidden, which)
        return hidden + self._fed(self.layer.post_attention_layernorm(hidden), which)

    def _attended(self, hidden: Tensor, which: Part) -> Tensor:
        around = self.parent.blocks.around_call(self.layer, hidden)
        normed = self.layer.input_layernorm(hidden)
        with _entering(self.attention.o_proj) as seen:
            attended = self.attention(normed, **around)[0]
        self._see_attention(normed, attended, seen.pop(), which)
        return attended

    def _fed(self, normed: Tensor, which: Part) -> Tensor:
        if self.channels is None:
            out = self.ffn(normed)
            self._see_ffn(normed, out, None, which)
            return out
        with _entering(self.ffn.down_proj) as seen:
            out = self.ffn(normed)
        self._see_ffn(normed, out, seen.pop(), which)
        return out

    def _see_attention(self, normed: Tensor, attended: Tensor, entered: Tensor, which: Part) -> None:
        target = attended if self.attention.o_proj.bias is None else attended - self.attention.o_proj.bias
        target, weight = target.flatten(0, 1), self._weight(target)
        if self.attempts is None:
            self.attempts = list(self._make_attempts(entered))
        for attempt in self.attempts:
            around = self.parent.blocks.around_call(attempt.layer, normed)
            extra = {"sliding_window": attempt.layer.window} if attempt.layer.hands_on else {}
            mixed = attempt.layer.self_attn(normed, **around, **extra)[0]
            attempt.sums.parts[which].add(mixed.flatten(0, 1), target, weight)
        if "attention" in self.linear:
            self.linear["attention"].parts[which].add(normed.flatten(0, 1), target, weight)

    def _see_ffn(self, normed: Tensor, out: Tensor, entered: Tensor | None, which: Part) -> None:
        weight = self._weight(out)
        if "ffn" in self.linear:
            self.linear["ffn"].parts[which].add(normed.flatten(0, 1), out.flatten(0, 1), weight)
        if self.channels is not None and entered is not None:
            self.channels.see(entered.flatten(0, 1), weight, which)
        if self.mixture is not None:
            self.mixture.see(normed, out, weight, which)

    def _weight(self, target: Tensor) -> Tensor | None:
        if not self.settings.balance:
            return None
        squares = target.flatten(0, 1).double().square().sum(1)
        return 1 / (squares + 1e-6 * squares.mean() + 1e-300)

    def _make_attempts(self, entered: Tensor) -> Iterator[_Attempt]:
        parent, heads = self.space.attention[0], self.attention.o_proj.in_features // self.attention.head_dim
        score = head_scores(entered, self.attention.o_proj.weight, parent.kv_heads)
        for option in self.space.attention[1:]:
            if not isinstance(option, KeepHeads | SlidingWindow):
                continue
            if option.kv_heads == parent.kv_heads:
                yield self._attempt(option, "window", lambda each: each, self.attention.o_proj.weight)
                continue
            count = option.kv_heads
            chosen = best_of_groups(score, count)
            output = self.attention.o_proj.weight
            own = only_own_queries(output, heads, parent.kv_heads, chosen)
            yield self._attempt(
                option, "mean heads", lambda each, n=count: pool_heads(each, parent.kv_heads, n), output
            )
            yield self._attempt(
                option, "best heads", lambda each, which=chosen: select_heads(each, parent.kv_heads, which), own
            )

    def _attempt(
        self, option: AttentionOption, made: str, reduce: Callable[[Tensor], Tensor], plain: Tensor
    ) -> _Attempt:
        choice = Choice(attention=option, ffn=NoFfn())
        layer = self.parent.blocks.bare(self.index, choice, dtype=plain.dtype)
        tensors = part({name: each.detach() for name, each in self.layer.state_dict().items()}, "attention")
        rows = self.attention.k_proj.out_features
        for name, each in tensors.items():
            if name.startswith(("self_attn.k_", "self_attn.v_")) and len(each) == rows:  # a norm of single heads stays
                tensors[name] = reduce(each)
        layer.load_state_dict(tensors, assign=True)
        layer.self_attn.o_proj = nn.Identity()  # what enters the output matrix comes out
        sums = Sums(plain.shape[1], plain.shape[0], plain)
        return _Attempt(option=option, made=made, layer=layer, plain=plain, sums=sums)

    def write(self, library: Library) -> None:
        """Solve for every block and write those that are not in `library`."""
        attempts = [attempt.sums for attempt in self.attempts or []]
        for sums in [*self.linear.values(), *attempts]:
            sums.close()
        self._write_attention(library)
        self._write_ffn(library)

    def _write(
        self, library: Library, kind: Kind, option: Any, tensors: dict[str, Tensor], facts: tuple[str, float, float]
    ) -> None:
        name = block_name(self.index, kind, option)
        if name not in library:
            made, error, plain_error = facts
            library.write(name, tensors, made=made, error=error, plain_error=plain_error)

    def _parts(self, kind: Kind) -> dict[str, Tensor]:
        return part({name: each.detach() for name, each in self.layer.state_dict().items()}, kind)

    def _write_attention(self, library: Library) -> None:
        mine = self._parts("attention")
        norm = {name: each for name, each in mine.items() if name.startswith("input_layernorm.")}
        for option in self.space.attention:
            if option == self.space.attention[0]:
                self._write(library, "attention", option, mine, ("parent", 0.0, 0.0))
            elif isinstance(option, NoAttention):
                self._write(library, "attention", option, {}, ("nothing", _PLAIN, _PLAIN))
            elif isinstance(option, LinearAttention):
                heads = self.attention.o_proj.in_features // self.attention.head_dim
                kv_heads = self.space.attention[0].kv_heads
                product = attention_product(self.attention.v_proj.weight, self.attention.o_proj.weight, heads, kv_heads)
                matrix, facts = self._solve_linear("attention", product)
                self._write(library, "attention", option, norm | {"self_attn.linear.weight": matrix}, facts)
            else:
                self._write_reduced(library, option)

    def _write_reduced(self, library: Library, option: AttentionOption) -> None:
        """Write the attempt at `option` that errs least on the tokens that choose."""
        attempts = [each for each in self.attempts or [] if each.option == option]
        found = [
            each.sums.choose([Start(made=each.made, matrix=each.plain)], self.settings.ridges) for each in attempts
        ]
        chosen, attempt = min(zip(found, attempts, strict=True), key=lambda each: each[0].error)
        attempt.sums.settle()
        matrix = attempt.sums.solve(chosen)
        error = attempt.sums.held.error(matrix)
        plain_error = min(each.sums.held.error(each.plain) for each in attempts)
        kept = {name: each for name, each in self._parts("attention").items() if ".o_proj." in name}
        tensors = kept | part(attempt.layer.state_dict(), "attention") | {"self_attn.o_proj.weight": matrix}
        self._write(library, "attention", option, tensors, (chosen.made, error, plain_error))

    def _solve_linear(self, kind: Kind, product: Tensor | None) -> tuple[Tensor, tuple[str, float, float]]:
        sums = self.linear[kind]
        size = sums.held.gram.shape[0]
        nothing = torch.zeros(size, size, dtype=self.parent.dtype, device=self.parent.device)
        chosen = sums.choose([Start(made="one matrix", matrix=nothing)], self.settings.ridges)
        sums.settle()
        matrix = sums.solve(chosen)
        plain = _PLAIN if product is None else sums.held.error(product)
        return matrix, (chosen.made, sums.held.error(matrix), plain)

    def _write_ffn(self, library: Library) -> None:
        mine = self._parts("ffn")
        norm = {name: each for name, each in mine.items() if name.startswith("post_attention_layernorm.")}
        for option in self.space.ffn:
            if option == self.space.ffn[0]:
                self._write(library, "ffn", option, mine, ("parent", 0.0, 0.0))
            elif isinstance(option, NoFfn):
                self._write(library, "ffn", option, {}, ("nothing", _PLAIN, _PLAIN))
            elif isinstance(option, LinearFfn):
                product = (
                    None if self.channels is None else ffn_product(self.ffn.up_proj.weight, self.ffn.down_proj.weight)
                )
                matrix, facts = self._solve_linear("ffn", product)
                self._write(library, "ffn", option, norm | {"mlp.linear.weight": matrix}, facts)
        smaller = [each for each in self.space.ffn[1:] if isinstance(each, Width | KeepExperts)]
        if all(block_name(self.index, "ffn", each) in library for each in smaller):
            return
        if self.mixture is not None:
            self._write_mixtures(library, mine, self.mixture)
        elif self.channels is not None:
            self._write_widths(library, mine, [each for each in smaller if isinstance(each, Width)], self.channels)

    def _write_widths(self, library: Library, mine: dict[str, Tensor], widths: list[Width], channels: Channels) -> None:
        cuts = channels.cuts([each.width for each in widths], self.settings.orders, self.settings.ridges)
        for option, cut in zip(widths, cuts, strict=True):
            tensors = cut_channels(mine, cut.keep) | {"mlp.down_proj.weight": cut.matrix}
            self._write(library, "ffn", option, tensors, (cut.made, cut.error, cut.plain_error))

    def _write_mixtures(self, library: Library, mine: dict[str, Tensor], mixture: MixtureFit) -> None:
        def build(option: KeepExperts, tensors: dict[str, Tensor]) -> nn.Module:
            choice = Choice(attention=NoAttention(), ffn=option)
            layer = self.parent.blocks.bare(self.index, choice, dtype=self.parent.dtype)
            layer.load_state_dict(tensors, assign=True)
            return layer.mlp

        for each in mixture.smaller(mine, self.settings.orders, self.settings.ridges, build):
            facts = each.made, each.error, each.plain_error
            self._write(library, "ffn", each.option, each.tensors, facts)


@contextmanager
def _entering(module: nn.Module) -> Iterator[list[Tensor]]:
    """Collect what enters `module`."""
    seen: list[Tensor] = []
    hook = module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    try:
        yield seen
    finally:
        hook.remove()
