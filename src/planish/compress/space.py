"""What a compressed model may be: for each layer one way to attend and one feed-forward network; pure data."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from planish.decode import decode, encode
from planish.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepHeads:
    """Attention to everything before, with `kv_heads` heads of keys and values; the parent's count is the parent.

    Attributes:
        kv_heads: Divides the parent's count, so that whole groups of its query heads share one.
    """

    kv_heads: int

    @property
    def label(self) -> str:
        """A short name, unique within a layer."""
        return f"kv{self.kv_heads}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindow:
    """Attention to the last `window` tokens alone, the token itself among them.

    Attributes:
        window: Tokens.
        kv_heads: As `KeepHeads`.
    """

    window: int
    kv_heads: int

    @property
    def label(self) -> str:
        """A short name, unique within a layer."""
        return f"kv{self.kv_heads}-window{self.window}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttention:
    """One D x D matrix in the place of attention: each token sees itself alone."""

    @property
    def label(self) -> str:
        """A short name, unique within a layer."""
        return "linear"


@dataclass(frozen=True, slots=True, kw_only=True)
class NoAttention:
    """Nothing in the place of attention, its norm included."""

    @property
    def label(self) -> str:
        """A short name, unique within a layer."""
        return "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Width:
    """A gated feed-forward network with `width` channels; the parent's width is the parent.

    Attributes:
        width: Channels (`intermediate_size`).
    """

    width: int

    @property
    def label(self) -> str:
        """A short name, unique within a layer."""
        return f"width{self.width}"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepExperts:
    """A mixture with `experts` of the parent's, each of `width` channels; the parent's numbers are the parent.

    Attributes:
        experts: Not fewer than a token is sent to, so that routers choose as ever, among those that are left.
        width: Channels of each.
    """

    experts: int
    width: int

    @property
    def label(self) -> str:
        """A short name, unique within a layer."""
        return f"experts{self.experts}x{self.width}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearFfn:
    """One D x D matrix in the place of the feed-forward network."""

    @property
    def label(self) -> str:
        """A short name, unique within a layer."""
        return "linear"


@dataclass(frozen=True, slots=True, kw_only=True)
class NoFfn:
    """Nothing in the place of the feed-forward network, its norm included."""

    @property
    def label(self) -> str:
        """A short name, unique within a layer."""
        return "none"


AttentionOption = KeepHeads | SlidingWindow | LinearAttention | NoAttention
FfnOption = Width | KeepExperts | LinearFfn | NoFfn
Option = AttentionOption | FfnOption


def attends(option: AttentionOption) -> bool:
    """Return whether a layer with `option` keeps keys and values, in a cache too."""
    return isinstance(option, KeepHeads | SlidingWindow)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What one layer is."""

    attention: AttentionOption
    ffn: FfnOption

    @property
    def label(self) -> str:
        """A short name, such as "kv1+width512"."""
        return f"{self.attention.label}+{self.ffn.label}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A whole model: the choice for each layer, first to last. Hashable, and JSON both ways."""

    layers: tuple[Choice, ...]

    def to_json(self) -> str:
        """Return the text that `from_json` reads back to an equal value."""
        return json.dumps(self.to_tree())

    def to_tree(self) -> dict[str, Any]:
        """Return it as what JSON and TOML hold."""
        return encode(self)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the architecture that `text` describes.

        Raises:
            UsageError: No JSON, or a layer that is not one of the options.
        """
        try:
            tree = json.loads(text)
        except json.JSONDecodeError as error:
            raise UsageError(f"an architecture must be JSON, got {text[:60]!r} ({error}).") from error
        return decode(cls, tree, "architecture")

    def with_layer(self, index: int, choice: Choice) -> Self:
        """Return this one with `choice` in the place of layer `index`."""
        return type(self)(layers=(*self.layers[:index], choice, *self.layers[index + 1 :]))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpace:
    """What one layer may be.

    Attributes:
        attention: Options, the parent's first.
        ffn: Options, the parent's first.
    """

    attention: tuple[AttentionOption, ...]
    ffn: tuple[FfnOption, ...]

    @property
    def parent(self) -> Choice:
        """The layer as it is."""
        return Choice(attention=self.attention[0], ffn=self.ffn[0])

    @property
    def choices(self) -> tuple[Choice, ...]:
        """Every pair, the parent's first."""
        return tuple(Choice(attention=attention, ffn=ffn) for attention in self.attention for ffn in self.ffn)


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Numbers that a family's sub-blocks have beside the matrices of Llama's: biases, norms of queries and keys.

    Attributes:
        attention: Of a layer's attention, whatever its heads of keys and values.
        kv_head: Of each of those.
        ffn: Of a dense network, whatever its width.
        channel: Of each of its channels.
    """

    attention: int = 0
    kv_head: int = 0
    ffn: int = 0
    channel: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """What every mixture of a model has, however many experts.

    Attributes:
        top_k: Experts that a token is sent to.
        beside: Numbers beside router and experts: the norm before them, experts that all tokens share.
    """

    top_k: int
    beside: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What a parent's children may be, and the parent's sizes.

    Attributes:
        layers: First to last.
        hidden_size: D.
        num_heads: Query heads of every layer that attends.
        head_dim: Width of a head.
        vocab_size: V.
        tied: Whether the head is the embedding.
        mixture: What its mixtures of experts have in common; None without any.
        beside: Numbers beside Llama's matrices; None without any.
    """

    layers: tuple[LayerSpace, ...]
    hidden_size: int
    num_heads: int
    head_dim: int
    vocab_size: int
    tied: bool
    mixture: Mixture | None = None
    beside: Beside | None = None

    @property
    def parent(self) -> Architecture:
        """The model as it is."""
        return Architecture(layers=tuple(layer.parent for layer in self.layers))

    def check(self, architecture: Architecture) -> None:
        """Refuse an architecture that is not in this space, or that cannot generate.

        Raises:
            UsageError: Another number of layers, an option that its layer does not offer, or no layer that attends.
        """
        if len(architecture.layers) != len(self.layers):
            raise UsageError(
                f"`architecture` has {len(architecture.layers)} layers, the parent {len(self.layers)}; give each one."
            )
        for index, (choice, layer) in enumerate(zip(architecture.layers, self.layers, strict=True)):
            for kind, option, offered in (
                ("attention", choice.attention, layer.attention),
                ("ffn", choice.ffn, layer.ffn),
            ):
                if option not in offered:
                    known = ", ".join(each.label for each in offered)
                    raise UsageError(f"`{kind}` of layer {index} cannot be {option.label}; its library has {known}.")
        if not any(attends(choice.attention) for choice in architecture.layers):
            raise UsageError("`architecture` has no layer that attends, so no token would see another; keep one.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Menu:
    """Which options a space offers beside the parent's own.

    Attributes:
        kv_heads: Counts of heads of keys and values; default: every one that divides the parent's.
        windows: Tokens that a sliding window sees, for each of the `kv_heads`' parent count.
        widths: Parts of the parent's feed-forward width, or of each expert's, rounded to `width_multiple`.
        width_multiple: Channels are a multiple of this, as engines ask for (vLLM's DeciLM without
            `intermediate_size`: 256).
        linear: Whether one matrix may stand for attention or the feed-forward network.
        skip: Whether nothing may.
        experts: Parts of a mixture's experts, of which no fewer stay than a token is sent to.
    """

    kv_heads: tuple[int, ...] | None = None
    windows: tuple[int, ...] = ()
    widths: tuple[float, ...] = (0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125)
    width_multiple: int = 64
    linear: bool = True
    skip: bool = True
    experts: tuple[float, ...] = (0.75, 0.5, 0.25)

    def __post_init__(self) -> None:
        for name, parts, of in (("widths", self.widths, "channels"), ("experts", self.experts, "experts")):
            wrong = [part for part in parts if not 0 < part < 1]
            if wrong:
                raise ValueError(
                    f"`{name}` must be parts between 0 and 1, got {wrong[0]}; write 0.5 for half the {of}."
                )
        if self.width_multiple < 1:
            raise ValueError(f"`width_multiple` must be positive, got {self.width_multiple}; 64 suits most engines.")
        if any(window < 1 for window in self.windows):
            raise ValueError(f"`windows` must be positive, got {min(self.windows)}; 512 is a usual one.")


def attention_options(parent: KeepHeads | SlidingWindow, menu: Menu) -> tuple[AttentionOption, ...]:
    """Return what may stand for `parent`, itself first, then from large to small.

    Raises:
        UsageError: A count of heads that does not divide the parent's.
    """
    counts = _kv_counts(parent.kv_heads, menu.kv_heads)
    window = parent.window if isinstance(parent, SlidingWindow) else math.inf
    reduced: list[AttentionOption] = [_with_heads(parent, count) for count in counts]
    reduced += [
        SlidingWindow(window=each, kv_heads=parent.kv_heads)
        for each in sorted(menu.windows, reverse=True)
        if each < window
    ]
    return (parent, *reduced, *([LinearAttention()] if menu.linear else []), *([NoAttention()] if menu.skip else []))


def _with_heads(parent: KeepHeads | SlidingWindow, count: int) -> AttentionOption:
    if isinstance(parent, SlidingWindow):
        return SlidingWindow(window=parent.window, kv_heads=count)
    return KeepHeads(kv_heads=count)


def _kv_counts(parent: int, asked: Sequence[int] | None) -> list[int]:
    legal = [count for count in range(parent - 1, 0, -1) if parent % count == 0]
    wrong = [count for count in asked or () if count not in (parent, *legal)]
    if wrong:
        known = ", ".join(str(count) for count in [parent, *legal])
        raise UsageError(
            f"`kv_heads` = {wrong[0]} does not divide the parent's {parent}, so its query heads would not share heads "
            f"of keys and values evenly; take of {known}."
        )
    return legal if asked is None else sorted({count for count in asked if count != parent}, reverse=True)


def ffn_options(parent: Width | KeepExperts, menu: Menu, *, top_k: int | None = None) -> tuple[FfnOption, ...]:
    """Return what may stand for `parent`, itself first, then from large to small.

    Args:
        parent: A network or a mixture.
        menu: What is offered.
        top_k: Experts that a mixture sends a token to; None for one that stays whole.
    """
    widths = sorted({_legal(parent.width * part, menu.width_multiple) for part in menu.widths}, reverse=True)
    widths = [width for width in widths if width < parent.width]
    reduced: list[FfnOption] = []
    if isinstance(parent, Width):
        reduced += [Width(width=width) for width in widths]
    elif top_k is not None:
        counts = {max(top_k, round(parent.experts * part)) for part in menu.experts} - {parent.experts}
        reduced += [KeepExperts(experts=count, width=parent.width) for count in sorted(counts, reverse=True)]
        reduced += [KeepExperts(experts=parent.experts, width=width) for width in widths]
    return (parent, *reduced, *([LinearFfn()] if menu.linear else []), *([NoFfn()] if menu.skip else []))


def _legal(width: float, multiple: int) -> int:
    return max(multiple, round(width / multiple) * multiple)
