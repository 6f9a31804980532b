"""Weights of one byte: codes in groups of 128 between an exact minimum and maximum, updated tile by tile."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

GROUP = 128
_LEVELS = 255
_TILE = 2**18


class Int8Weight(torch.Tensor):
    """A matrix [A, B] that is stored as codes and looks like a tensor of `dtype`; linear and embedding layers take it.

    With low and high the extremes of each group of `GROUP` neighbours in a row, and code in 0 ... 255:

        w = low + (high - low) * code / 255

    which is exactly low and high at both ends. `write` rounds at random, floor(255 (w - low) / (high - low) + u) with u
    uniform in [0, 1), whose expectation is w; a group's extremes stay as they are until a weight passes them, so that
    weights that do not move keep their levels. Gradients are plain tensors [A, B] of `dtype`.

    Memory:    A B bytes and 8 a group; layers and updates dequantize tiles of at most 2^18 elements, one row at least.
    Exactness: a group's extremes exactly; other weights within half a level when made, unbiased when updated.
    """

    codes: Tensor
    low: Tensor
    high: Tensor

    @staticmethod
    def __new__(cls: type[Self], codes: Tensor, low: Tensor, high: Tensor, dtype: torch.dtype) -> Self:
        """Wrap what is stored."""
        weight = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)
        weight.codes, weight.low, weight.high = codes, low, high
        return weight

    @classmethod
    def quantize(cls, weight: Tensor, *, device: torch.device | None = None) -> "Int8Weight":
        """Return `weight` [A, B] as codes on `device` (its own by default), each to the nearest level.

        Raises:
            ValueError: Not a floating-point matrix.
        """
        if weight.ndim != 2 or not weight.is_floating_point():
            raise ValueError(
                f"an int8 weight must be made of a matrix of floats, got {list(weight.shape)} {weight.dtype}."
            )
        rows, cols = weight.shape
        groups, device = -(-cols // GROUP), device or weight.device
        low, high = (torch.empty(rows, groups, device=device) for _ in range(2))
        new = cls(torch.empty(rows, cols, dtype=torch.uint8, device=device), low, high, weight.dtype)
        for tile in new.tiles():
            part = weight.detach()[tile]
            wide = torch.empty(part.shape, device=device).copy_(part)
            low[tile], high[tile] = _extremes(wide)
            new._encode(tile, wide, 0.5)
        return new

    def tiles(self) -> list[slice]:
        """Return the rows in tiles that may be dequantized at a time."""
        rows, cols = self.shape
        step = max(1, _TILE // cols)
        return [slice(first, min(rows, first + step)) for first in range(0, rows, step)]

    def read(self, rows: slice | Tensor, out: Tensor | None = None) -> Tensor:
        """Return some rows in fp32."""
        codes = self.codes[rows]
        wide = codes.to(torch.float32) if out is None else out.copy_(codes)
        return _lerp(self.low[rows], self.high[rows], wide.div_(_LEVELS))

    def write(self, rows: slice, wide: Tensor, generator: torch.Generator | None) -> None:
        """Store fp32 rows, rounded at random; `wide` is overwritten."""
        low, high = _extremes(wide)
        torch.minimum(self.low[rows], low, out=self.low[rows])
        torch.maximum(self.high[rows], high, out=self.high[rows])
        self._encode(rows, wide, torch.rand(wide.shape, generator=generator, device=wide.device))

    def dequantize(self) -> Tensor:
        """Return the whole weight as a plain tensor of its dtype."""
        return torch.cat([self.read(tile).to(self.dtype) for tile in self.tiles()])

    def _encode(self, rows: slice, wide: Tensor, shift: Tensor | float) -> None:
        low, high = (_spread(each[rows], wide.shape[1]) for each in (self.low, self.high))
        position = wide.sub_(low).div_(high - low).mul_(_LEVELS).nan_to_num_(0)  # a constant group divides by 0
        self.codes[rows] = position.add_(shift).floor_().clamp_(0, _LEVELS).to(torch.uint8)

    def __repr__(self) -> str:
        return f"Int8Weight(shape={list(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["codes", "low", "high"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], dtype: torch.dtype, *_: Any) -> "Int8Weight":
        return Int8Weight(inner["codes"], inner["low"], inner["high"], dtype)

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Give linear and embedding layers their own forms; the rest goes to `__torch_dispatch__`."""
        if func is F.linear:
            return _linear(*args, **(kwargs or {}))
        if func is F.embedding:
            return _embedding(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Allow what holds a weight without computing with it."""
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            weight = args[0]
            return Int8Weight(weight.codes, weight.low, weight.high, weight.dtype)
        raise TypeError(
            f"an int8 weight cannot take part in {func}; call `dequantize()` first, or keep this weight wide."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Step:
    """An int8 weight and the number of the step that updates it, from which its rounding follows."""

    weight: Int8Weight
    number: int

    def noise(self, seed: int, row: int) -> torch.Generator | None:
        """Return the generator of a tile's rounding: a pure function of seed, step and first row; fakes need none."""
        if isinstance(self.weight.codes, FakeTensor):
            return None
        mixed = (seed * 0x9E3779B97F4A7C15 + self.number * 0xBF58476D1CE4E5B9 + row * 0x94D049BB133111EB) % 2**63
        return torch.Generator(self.weight.device).manual_seed(mixed)


def quantize_weights(
    modules: list[nn.Linear | nn.Embedding], *, device: torch.device | None = None
) -> list[nn.Parameter]:
    """Replace the weights of `modules` by int8 ones and return these; a weight that modules share stays shared.

    Memory: one weight twice, while it is replaced.

    Args:
        modules: Their weights are replaced.
        device: Where the new weights go; default: where the old ones are.

    Raises:
        ValueError: An embedding with `max_norm` or `sparse` gradients.
    """
    sharing: dict[int, list[nn.Linear | nn.Embedding]] = {}
    for module in modules:
        if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.sparse):
            raise ValueError("an embedding with `max_norm` or `sparse` cannot have an int8 weight; keep it wide.")
        sharing.setdefault(id(module.weight), []).append(module)
    made = []
    for together in sharing.values():
        wide = together[0].weight
        made.append(nn.Parameter(Int8Weight.quantize(wide, device=device), requires_grad=wide.requires_grad))
        for module in together:
            module.weight = made[-1]
    return made


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Int8Weight, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        out = x.new_empty(*x.shape[:-1], weight.shape[0])
        for tile in weight.tiles():
            part = None if bias is None else bias[tile]
            out[..., tile] = F.linear(x, weight.read(tile).to(x.dtype), part)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad_x = grad_weight = grad_bias = None
        flat = grad.flatten(0, -2)
        if ctx.needs_input_grad[0]:
            sums = torch.zeros(flat.shape[0], x.shape[-1], dtype=torch.float32, device=x.device)
            for tile in weight.tiles():
                sums += flat[:, tile] @ weight.read(tile).to(grad.dtype)
            grad_x = sums.to(x.dtype).view(x.shape)
        if ctx.needs_input_grad[1]:
            grad_weight = (flat.t() @ x.flatten(0, -2)).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = flat.sum(0)
        return grad_x, grad_weight, grad_bias


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Int8Weight, padding_idx: int) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.like = (weight.shape[0], padding_idx, weight.dtype)
        return weight.read(ids.flatten()).to(weight.dtype).view(*ids.shape, -1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        (ids,) = ctx.saved_tensors
        num_rows, padding_idx, dtype = ctx.like
        return None, torch.ops.aten.embedding_dense_backward(grad, ids, num_rows, padding_idx, False).to(dtype), None


def _linear(input: Tensor, weight: Int8Weight, bias: Tensor | None = None) -> Tensor:
    return _Linear.apply(input, weight, bias)


def _embedding(
    input: Tensor,
    weight: Int8Weight,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,  # noqa: ARG001  torch passes it, `max_norm` alone gives it a meaning
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    if max_norm is not None or scale_grad_by_freq or sparse:
        raise ValueError("an int8 embedding takes neither `max_norm`, `scale_grad_by_freq` nor `sparse`.")
    return _Embedding.apply(input, weight, -1 if padding_idx is None else padding_idx)


def _extremes(wide: Tensor) -> tuple[Tensor, Tensor]:
    """Return minimum and maximum of each group, [A, groups]; the last group may be short."""
    whole = wide.shape[1] // GROUP * GROUP
    parts = [wide[:, :whole].unflatten(1, (-1, GROUP)).aminmax(dim=-1)] if whole else []
    if whole < wide.shape[1]:
        parts.append(tuple(each.unsqueeze(1) for each in wide[:, whole:].aminmax(dim=-1)))
    low, high = zip(*parts, strict=True)
    return torch.cat(low, dim=1), torch.cat(high, dim=1)


def _spread(per_group: Tensor, cols: int) -> Tensor:
    return per_group.repeat_interleave(GROUP, dim=1)[:, :cols]


def _lerp(low: Tensor, high: Tensor, weight: Tensor) -> Tensor:
    cols = weight.shape[1]
    return torch.lerp(_spread(low, cols), _spread(high, cols), weight)
