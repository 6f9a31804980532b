"""One block in training: attention, a network or both learn what the parent's layer does (BLD)."""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, assert_never

import torch
from torch import Tensor, nn

from planish.compress.blocks import Kind
from planish.compress.frontier import Frontier
from planish.compress.library import Library
from planish.compress.parent import Parent
from planish.compress.space import Choice
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
        folder: Where hidden states of all rows lie meanwhile; None keeps them in memory.
    """

    steps: int = 60
    batch_rows: int = 2
    lr: float = 3e-3
    loss: Loss = "vectorwise"
    heldout: float = 0.25
    seed: int = 0
    folder: Path | None = field(default=None, compare=False)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """What the parent layer makes of all rows [N, S, D]: before it, between its sub-blocks, after it."""

    teacher: ChildLayer
    before: Frontier
    between: Frontier
    after: Frontier


class Pupil:
    """One block in training: attention, a network, or both.

    Args:
        parent: The model.
        index: Of the layer.
        kind: What of it.
        choice: The layer with nothing but what is trained.
        tensors: Its start.
        lesson: What the parent's layer does.
        settings: How.
    """

    def __init__(
        self,
        parent: Parent,
        index: int,
        kind: Kind | Literal["pair"],
        choice: Choice,
        tensors: dict[str, Tensor],
        lesson: Lesson,
        settings: Distillation,
    ) -> None:
        self.parent, self.kind, self.lesson, self.settings = parent, kind, lesson, settings
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
        start = self.lesson.between if self.kind == "ffn" else self.lesson.before
        hidden = self.parent.blocks.run([self.layer], start[rows])
        if self.kind != "attention":
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

    def learn(self, name: str) -> Trained:
        """Train on the other rows; go back to the beginning where that was better."""
        before, kept = self.judge(), {key: each.clone() for key, each in self.layer.state_dict().items()}
        for _ in self.steps(name):
            pass
        after = self.judge()
        if not after < before:
            self.layer.load_state_dict(kept)
        return Trained(name=name, before=before, after=min(before, after))

    @torch.enable_grad()
    def _step(self, optimizer: torch.optim.Optimizer, step: int, rows: Tensor) -> None:
        optimizer.param_groups[0]["lr"] = self.settings.lr * _schedule(step, self.settings.steps)
        block_loss(self.forward(rows), self.lesson.after[rows], self.settings.loss).backward()
        nn.utils.clip_grad_norm_(self.layer.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def steps(self, name: str) -> Iterator[int]:
        """Train by one step at a time, and give its number; others may train in between."""
        optimizer = torch.optim.AdamW(self.layer.parameters(), lr=self.settings.lr, betas=(0.9, 0.95), weight_decay=0.0)
        for step, rows in enumerate(self._order(name)):
            self._step(optimizer, step, rows)
            yield step

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
        start = self.lesson.between if self.kind == "ffn" else self.lesson.before
        end = self.lesson.between if self.kind == "attention" else self.lesson.after
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

    def write(self, name: str, trained: Library, *, made: str, plain_error: float) -> None:
        """Write the block."""
        tensors = {key: each.detach().to(self.parent.dtype) for key, each in self.layer.state_dict().items()}
        trained.write(name, tensors, made=made, error=self.error(), plain_error=plain_error)


def _schedule(step: int, steps: int) -> float:
    """Return the part of the learning rate: up in a twentieth of the steps, then down to nothing."""
    rise = max(1, steps // 20)
    return min((step + 1) / rise, (steps - step) / max(1, steps - rise))
