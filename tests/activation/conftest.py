"""Feed-forward networks of every kind, small, with drawn weights."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from planish.peaks.activation.bitmap import Projection, sparse_feed_forward
from planish.peaks.activation.formula import Formula
from planish.peaks.activation.reference import feed_forward

FORMULAS = {
    "relu": Formula(),
    "relu2": Formula(squared=True),
    "reglu": Formula(gated=True),
    "relu2-glu": Formula(squared=True, gated=True),
    "drelu": Formula(gated=True, both=True),
}


@dataclass(kw_only=True)
class Network:
    """One network: its input, its weights, and the gradient of its output."""

    formula: Formula
    x: Tensor
    weights: list[Tensor | None]
    biases: list[Tensor | None]
    grad: Tensor

    @property
    def leaves(self) -> list[Tensor]:
        """Everything that has a gradient."""
        return [each for each in (self.x, *self.weights, *self.biases) if each is not None]

    @property
    def width(self) -> int:
        """F."""
        return self.weights[0].shape[0]

    def tile_bytes(self, tokens: int) -> int:
        """Return the setting at which `tokens` pass at a time."""
        return tokens * self.width * self.x.element_size()

    def to(self, dtype: torch.dtype) -> "Network":
        """Return the same numbers in another dtype."""

        def move(each):
            return None if each is None else each.detach().to(dtype).requires_grad_(each.requires_grad)

        return Network(
            formula=self.formula,
            x=move(self.x),
            weights=[move(each) for each in self.weights],
            biases=[move(each) for each in self.biases],
            grad=self.grad.to(dtype),
        )

    def eager(self) -> list[Tensor | None]:
        """Return output and gradients by autograd."""
        y = feed_forward(self.x, self.formula, *self.weights, tuple(self.biases))
        return [y.detach(), *torch.autograd.grad(y, self.leaves, self.grad)]

    def forward(self, x=None, **options) -> Tensor:
        """Return the output by the room's own way."""
        inner, down, up = (
            None if weight is None else Projection(weight=weight, bias=bias)
            for weight, bias in zip(self.weights, self.biases, strict=True)
        )
        return sparse_feed_forward(self.x if x is None else x, self.formula, inner=inner, down=down, up=up, **options)

    def ours(self, **options) -> list[Tensor | None]:
        """Return output and gradients by the room's own way."""
        y = self.forward(**options)
        return [y.detach(), *torch.autograd.grad(y, self.leaves, self.grad)]


def network(kind, *, dtype=torch.float32, shape=(37,), hidden=24, width=40, biased=False, seed=0) -> Network:
    generator = torch.Generator().manual_seed(seed)

    def draw(*sizes):
        each = torch.randn(*sizes, generator=generator, dtype=torch.float64) / sizes[-1] ** 0.5
        return each.to(dtype).requires_grad_()

    formula = FORMULAS[kind]
    return Network(
        formula=formula,
        x=draw(*shape, hidden),
        weights=[draw(width, hidden), draw(hidden, width), draw(width, hidden) if formula.gated else None],
        biases=[draw(width), draw(hidden), draw(width) if formula.gated else None] if biased else [None] * 3,
        grad=torch.randn(*shape, hidden, generator=generator, dtype=torch.float64).to(dtype),
    )


@pytest.fixture(scope="session")
def make_network():
    """`network`, for tests."""
    return network


def relative_errors(found, expected):
    """Return the relative error of each result, in float64."""
    return [
        ((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)).item()
        for a, b in zip(found, expected, strict=True)
    ]


@pytest.fixture(scope="session")
def errors_of():
    """`relative_errors`, for tests."""
    return relative_errors
