"""Random layers of experts, and what they should compute."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from planish.peaks.dispatch.experts import Weights
from planish.peaks.dispatch.gates import ClampedGlu, Gate, Glu, Single, columns
from planish.peaks.dispatch.pipelined import Options, pipelined_experts
from planish.peaks.dispatch.reference import experts_reference

GATES = {
    "swiglu": Glu(activation="silu"),
    "geglu": Glu(activation="gelu"),
    "geglu_tanh": Glu(activation="gelu_tanh"),
    "reglu": Glu(activation="relu"),
    "clamped": ClampedGlu(alpha=1.702, limit=1.0),
    "relu2": Single(activation="relu2"),
    "silu": Single(activation="silu"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The operands of one call; leaves need gradients unless they are frozen."""

    hidden: Tensor
    ids: Tensor
    scores: Tensor
    weights: Weights
    gate: Gate

    @property
    def leaves(self) -> list[Tensor]:
        held = (self.hidden, self.scores, *self.parameters)
        return [each for each in held if each.requires_grad]

    @property
    def parameters(self) -> list[Tensor]:
        weights = self.weights
        held = (weights.up, weights.down, weights.up_bias, weights.down_bias)
        return [each for each in held if each is not None]

    def run(self, *, tile_rows: int = 7, block_rows: int = 1000) -> Tensor:
        options = Options(gate=self.gate, tile_rows=tile_rows, block_rows=block_rows)
        return pipelined_experts(self.hidden, self.ids, self.scores, self.weights, options)

    def reference(self) -> Tensor:
        return experts_reference(self.hidden, self.ids, self.scores, self.weights, self.gate)

    def gradients(self, result: Tensor, upstream: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(result, self.leaves, upstream.to(result.dtype))


@pytest.fixture(scope="session")
def draw_layer():
    """Return (tokens, experts, top_k, ...) -> a layer; `ids` overrides the drawn routing."""

    def draw(
        tokens,
        num_experts,
        top_k,
        *,
        gate="swiglu",
        width=6,
        hidden_size=5,
        bias=False,
        transposed=False,
        dtype=torch.float64,
        score_dtype=None,
        frozen=(),
        ids=None,
        seed=0,
    ):
        generator = torch.Generator().manual_seed(seed)
        inner = width * columns(GATES[gate])

        def normal(name, *shape, to=dtype):
            drawn = torch.randn(*shape, generator=generator, dtype=torch.float64) * shape[-1] ** -0.5
            return drawn.to(to).requires_grad_(name not in frozen)

        keys = torch.rand(tokens, num_experts, generator=generator)
        weights = Weights(
            up=normal("up", num_experts, *((hidden_size, inner) if transposed else (inner, hidden_size))),
            down=normal("down", num_experts, *((width, hidden_size) if transposed else (hidden_size, width))),
            up_bias=normal("up_bias", num_experts, inner) if bias else None,
            down_bias=normal("down_bias", num_experts, hidden_size) if bias else None,
            transposed=transposed,
        )
        hidden = normal("hidden", tokens, hidden_size)
        scores = torch.rand(tokens, top_k, generator=generator, dtype=torch.float64).to(score_dtype or dtype)
        return Layer(
            hidden=hidden,
            ids=keys.argsort(1)[:, :top_k].contiguous() if ids is None else ids,
            scores=scores.requires_grad_("scores" not in frozen),
            weights=weights,
            gate=GATES[gate],
        )

    return draw


@pytest.fixture(scope="session")
def assert_matches():
    """Return (layer, ...) -> checks value and gradients of the node against the reference."""

    def check(layer, *, seed=1, **how):
        result, expected = layer.run(**how), layer.reference()
        upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
        if result.requires_grad and expected.requires_grad:
            ours = layer.gradients(result, upstream)
            theirs = torch.autograd.grad(expected, layer.leaves, upstream, materialize_grads=True)
            for mine, other in zip(ours, theirs, strict=True):
                torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10)

    return check
