"""Random heads, and how far a result is from what it should be."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import ranks
from planish.price import processor


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnHead:
    """The operands of a head, leaves that need gradients unless they are frozen."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.hidden, self.weight, self.target

    @property
    def leaves(self) -> list[Tensor]:
        return [each for each in (self.hidden, self.weight, self.bias) if each is not None and each.requires_grad]

    @property
    def num_valid(self) -> int:
        return int((self.target != -100).sum())

    def gradients(self, value: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of `value` by the leaves; the graph stays."""
        return torch.autograd.grad(value, self.leaves, retain_graph=True)


@pytest.fixture(scope="session")
def draw_head():
    """Return (tokens, width, vocab, ...) -> operands of such a head; `ignored` is the share of ignored tokens."""

    def draw(
        tokens,
        width,
        vocab,
        *,
        dtype=torch.float64,
        weight_dtype=None,
        bias=False,
        ignored=0.0,
        frozen=(),
        scale=1.0,
        seed=0,
    ):
        generator = torch.Generator().manual_seed(seed)

        def normal(name, *shape, dtype):
            values = torch.randn(*shape, generator=generator, dtype=torch.float64) * scale
            return values.to(dtype).requires_grad_(name not in frozen)

        target = torch.randint(0, vocab, (tokens,), generator=generator)
        target[torch.rand(tokens, generator=generator) < ignored] = -100
        weight_dtype = dtype if weight_dtype is None else weight_dtype
        return DrawnHead(
            hidden=normal("hidden", tokens, width, dtype=dtype),
            weight=normal("weight", vocab, width, dtype=weight_dtype),
            bias=normal("bias", vocab, dtype=weight_dtype) if bias else None,
            target=target,
        )

    return draw


@pytest.fixture
def with_instructions(monkeypatch):
    """Return (own): the processor has, or has not, instructions for bf16 and fp16; torch multiplies both anyhow."""
    narrow = frozenset({"avx512bw", "avx512dq", "avx512vl", "avx512_fp16"})
    return lambda own: monkeypatch.setattr(processor, "instruction_sets", lambda: narrow if own else frozenset())


@pytest.fixture(scope="session")
def assert_all_close():
    """Return (ours, theirs, tolerance): each tensor within `tolerance`, absolute and relative."""

    def check(ours, theirs, tolerance):
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)

    return check


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    """Four live processes; see `ranks.Ranks`."""
    found = ranks.Ranks(tmp_path_factory.mktemp("ranks"))
    yield found
    found.close()
