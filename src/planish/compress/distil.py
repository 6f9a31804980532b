"""Blockwise distillation: each block of a library learns its parent layer's output from its parent layer's input (BLD).

No gradient crosses a layer, so layers may be trained in any order and in any company with the same result. Here it is
one after the other: a layer is in memory with one of its blocks, and with what its text looks like before and after it.
"""

import copy
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, assert_never

import torch
from torch import Tensor, nn

from planish.compress.blocks import Kind
from planish.compress.library import ENDS, Library, block_name
from planish.compress.parent import Parent
from planish.compress.space import (
    AttentionOption,
    Choice,
    FfnOption,
    KeepHeads,
    NoAttention,
    NoFfn,
    Option,
    SlidingWindow,
    Space,
    Width,
)
from planish.models.child import ChildLayer

Loss = Literal["plain", "normalised", "batched", "vectorwise"]
_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Distillation:
    """How blocks are trained.

    Attributes:
        steps: Of the optimizer, for each block.
        batch_rows: Rows of a step.
        lr: AdamW's, reached after a twentieth of the steps and falling to nothing.
        loss: The mean squared error, as it is ("plain") or over the parent's square: of all ("normalised"), of each row
            ("batched"), or of each token ("vectorwise", which lets no first token outweigh the others).
        heldout: Part of the rows, the last ones, that a trained block must be better on to be taken.
        seed: Order of the rows.
    """

    steps: int = 60
    batch_rows: int = 2
    lr: float = 3e-3
    loss: Loss = "vectorwise"
    heldout: float = 0.25
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What training did to one block: its loss on held-out rows."""

    name: str
    before: float
    after: float


def block_loss(found: Tensor, expected: Tensor, kind: Loss) -> Tensor:
    """Return how far a block's output is from its parent's, both [B, S, D].

    References:
        Bercovich et al., Puzzle (2025), section 3: MSE(o_p, o_c) / MSE(o_p, 0), here "normalised".
    """
    lost, whole = (found - expected).square(), expected.square()
    match kind:
        case "plain":
            return lost.mean()
        case "normalised":
            return lost.sum() / (whole.sum() + _EPS)
        case "batched":
            return (lost.sum((1, 2)) / (whole.sum((1, 2)) + _EPS)).mean()
        case "vectorwise":
            return (lost.sum(2) / (whole.sum(2) + _EPS)).mean()
    assert_never(kind)


def distil_bytes(space: Space, rows: int, context: int, settings: Distillation, sizes: tuple[int, int, int]) -> int:
    """Return the bytes that tensors hold at most while `distil` runs on a parent that is read layer by layer.

    Args:
        space: What layers may be.
        rows: Of text.
        context: Tokens of a row.
        settings: How blocks are trained.
        sizes: Bytes of the largest layer, of what is outside of layers, and of one number.
    """
    layer_bytes, ends_bytes, number_bytes = sizes
    wide = max(4, number_bytes)
    d, q = space.hidden_size, space.num_heads * space.head_dim
    layers = [layer for layer in space.layers if isinstance(layer.ffn[0], Width)]
    width = max((layer.ffn[0].width for layer in layers), default=0)
    pupil = max((each.width for layer in layers for each in layer.ffn[1:] if isinstance(each, Width)), default=0)
    hidden = 3 * rows * context * d * wide
    block = max(3 * d * pupil, 4 * d * q) * wide  # its weights, their start, gradients, moments and steps: seven times
    batch = settings.batch_rows * context * (14 * d + 10 * q + 8 * width) * wide
    held = layer_bytes * (1 if number_bytes >= 4 else 1 + wide // number_bytes)
    return 8 * rows * context + max(2 * ends_bytes + hidden // 3, hidden + held + 7 * block + batch)


def worth_training(option: Option, parent: Option) -> bool:
    """Return whether training moves a block: least squares has found the best single matrix already."""
    return option != parent and isinstance(option, KeepHeads | SlidingWindow | Width)


def distil(  # noqa: PLR0913 - keyword-only options of a public function
    parent: Parent,
    rows: Tensor,
    library: Library,
    trained: Library,
    settings: Distillation,
    *,
    chosen: Callable[[str], bool] = lambda _: True,
    rank: int = 0,
    ranks: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> list[Trained]:
    """Fill `trained` with `library`'s blocks, those that gain from it trained; what is in `trained` is kept.

    Memory:        the parent as it gives itself, three hidden states of all rows, and one block four times (weights,
        gradients, moments) with a batch's activations.
    Communication: none; layers are dealt to ranks, each of which runs the parent and writes its own.
    Exactness:     bitwise the same for any number of ranks, and for each block whatever others are trained.

    Args:
        parent: The model.
        rows: Token ids [N, S].
        library: Of initialised blocks.
        trained: A library of the same space.
        settings: How.
        chosen: Which blocks, by name, are trained; others are taken as they are.
        rank: Of this process.
        ranks: Processes that share the layers.
        progress: Called with the layers done and their number after each.
    """
    results: list[Trained] = []
    ends = parent.ends()
    if rank == 0 and ENDS not in trained:
        trained.take(library, ENDS)
    hidden = nn.functional.embedding(rows.to(parent.device), ends.pop("embedding")).to(_wide(parent.dtype))
    ends.clear()
    for index in range(len(library.space.layers)):
        with parent.layer(index) as layer, _frozen(layer, hidden.dtype) as teacher:
            lesson = _lesson(parent, teacher, hidden, settings)
            if index % ranks == rank:
                results += _train_layer(parent, index, lesson, library, trained, settings, chosen)
            hidden = lesson.after
        if progress is not None:
            progress(index + 1, len(library.space.layers))
    return results


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lesson:
    """What the parent layer makes of all rows [N, S, D]: before it, between its sub-blocks, after it."""

    teacher: ChildLayer
    before: Tensor
    between: Tensor
    after: Tensor


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@contextmanager
def _frozen(layer: ChildLayer, dtype: torch.dtype) -> Iterator[ChildLayer]:
    """Give a layer whose weights take no gradient, in `dtype`; they do as before afterwards."""
    wanted = [each for each in layer.parameters() if each.requires_grad]
    given = {each.dtype for each in layer.parameters()}
    try:
        layer.requires_grad_(requires_grad=False)
        yield layer if given == {dtype} else _copied(layer, dtype)
    finally:
        for each in wanted:
            each.requires_grad_(requires_grad=True)


def _copied(layer: ChildLayer, dtype: torch.dtype) -> ChildLayer:
    return copy.deepcopy(layer).to(dtype)


@torch.no_grad()
def _lesson(parent: Parent, teacher: ChildLayer, hidden: Tensor, settings: Distillation) -> _Lesson:
    between, after = torch.empty_like(hidden), torch.empty_like(hidden)
    for start in range(0, len(hidden), settings.batch_rows):
        here = slice(start, start + settings.batch_rows)
        around = parent.blocks.around_call(teacher, hidden[here])
        between[here] = hidden[here] + teacher.self_attn(teacher.input_layernorm(hidden[here]), **around)[0]
        after[here] = between[here] + teacher.mlp(teacher.post_attention_layernorm(between[here]))
    return _Lesson(teacher=teacher, before=hidden, between=between, after=after)


def _train_layer(
    parent: Parent,
    index: int,
    lesson: _Lesson,
    library: Library,
    trained: Library,
    settings: Distillation,
    chosen: Callable[[str], bool],
) -> list[Trained]:
    results = []
    space = library.space.layers[index]
    for kind, options in (("attention", space.attention), ("ffn", space.ffn)):
        for option in options:
            name = block_name(index, kind, option)
            if name in trained:
                continue
            if not (worth_training(option, options[0]) and chosen(name)):
                trained.take(library, name)
                continue
            block = _Pupil(parent, index, kind, option, library.read(name), lesson, settings)
            results.append(block.learn(name))
            block.write(name, library, trained, results[-1])
    return results


class _Pupil:
    """One block in training."""

    def __init__(
        self,
        parent: Parent,
        index: int,
        kind: Kind,
        option: AttentionOption | FfnOption,
        tensors: dict[str, Tensor],
        lesson: _Lesson,
        settings: Distillation,
    ) -> None:
        self.parent, self.kind, self.lesson, self.settings = parent, kind, lesson, settings
        choice = (
            Choice(attention=option, ffn=NoFfn())
            if kind == "attention"
            else Choice(attention=NoAttention(), ffn=option)
        )
        dtype = lesson.before.dtype
        self.layer = parent.blocks.bare(index, choice, dtype=dtype)
        self.layer.load_state_dict(
            {name: each.to(parent.device, dtype, copy=True) for name, each in tensors.items()}, assign=True
        )
        self.layer.requires_grad_(requires_grad=True)
        rows = len(lesson.before)
        self.border = rows - max(1, int(rows * settings.heldout))

    def forward(self, rows: Tensor | slice) -> Tensor:
        """Return what the parent's layer gives with this block in it."""
        start = self.lesson.before if self.kind == "attention" else self.lesson.between
        hidden = self.parent.blocks.run([self.layer], start[rows])
        if self.kind == "ffn":
            return hidden
        teacher = self.lesson.teacher
        return hidden + teacher.mlp(teacher.post_attention_layernorm(hidden))

    @torch.no_grad()
    def judge(self) -> float:
        """Return the loss on held-out rows."""
        total = 0.0
        for row in range(self.border, len(self.lesson.before)):
            here = slice(row, row + 1)
            total += float(block_loss(self.forward(here), self.lesson.after[here], self.settings.loss))
        return total / (len(self.lesson.before) - self.border)

    @torch.enable_grad()
    def learn(self, name: str) -> Trained:
        """Train on the other rows; go back to the beginning where that was better."""
        before, kept = self.judge(), {key: each.clone() for key, each in self.layer.state_dict().items()}
        optimizer = torch.optim.AdamW(self.layer.parameters(), lr=self.settings.lr, betas=(0.9, 0.95), weight_decay=0.0)
        for step, rows in enumerate(self._order(name)):
            optimizer.param_groups[0]["lr"] = self.settings.lr * _schedule(step, self.settings.steps)
            loss = block_loss(self.forward(rows), self.lesson.after[rows], self.settings.loss)
            loss.backward()
            nn.utils.clip_grad_norm_(self.layer.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        after = self.judge()
        if not after < before:
            self.layer.load_state_dict(kept)
        return Trained(name=name, before=before, after=min(before, after))

    def _order(self, name: str) -> Iterator[Tensor]:
        """Yield the rows of each step, in an order of the block's own."""
        generator = torch.Generator().manual_seed(self.settings.seed + zlib.crc32(name.encode()))
        rows: list[int] = []
        for _ in range(self.settings.steps):
            while len(rows) < self.settings.batch_rows:
                rows += torch.randperm(self.border, generator=generator).tolist()
            taken, rows = rows[: self.settings.batch_rows], rows[self.settings.batch_rows :]
            yield torch.tensor(taken)

    @torch.no_grad()
    def error(self) -> float:
        """Return the sub-block's squared error on held-out rows as libraries have it: tokens count alike."""
        start, end = (
            (self.lesson.before, self.lesson.between)
            if self.kind == "attention"
            else (self.lesson.between, self.lesson.after)
        )
        lost = whole = 0.0
        for row in range(self.border, len(start)):
            here = slice(row, row + 1)
            found = self.parent.blocks.run([self.layer], start[here]).double()
            expected, came = end[here].double(), start[here].double()
            squares = (expected - came).square().sum(-1)
            weight = 1 / (squares + 1e-6 * squares.mean() + 1e-300)
            lost += float(((found - expected).square().sum(-1) * weight).sum())
            whole += float((squares * weight).sum())
        return lost / whole

    def write(self, name: str, library: Library, trained: Library, result: Trained) -> None:
        """Write the block, or take the old one where training was no gain."""
        if not result.after < result.before:
            trained.take(library, name)
            return
        info = library.info(name)
        dtype = self.parent.dtype
        tensors = {key: each.detach().to(dtype) for key, each in self.layer.state_dict().items()}
        trained.write(name, tensors, made=f"{info.made}, distilled", error=self.error(), plain_error=info.plain_error)


def _schedule(step: int, steps: int) -> float:
    """Return the part of the learning rate: up in a twentieth of the steps, then down to nothing."""
    rise = max(1, steps // 20)
    return min((step + 1) / rise, (steps - step) / max(1, steps - rise))
