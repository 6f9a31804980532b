"""Random projections that nobody stores: each element is a pure function of seed, dimension, epoch and position."""

import math
from dataclasses import dataclass
from typing import Literal, assert_never

import torch
from torch import Tensor

Projection = Literal["rademacher", "gaussian", "identity"]

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_BITS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectionKey:
    """What a projection P [proj_rank, dim] is a function of.

    Attributes:
        kind: "rademacher": +1 or -1; "gaussian": standard normal; "identity": no projection, `proj_rank` is `dim`.
        proj_rank: Rows; the rows of a smaller rank are the first of a larger one.
        dim: Columns: the dimension that is projected away.
        seed: 64 bits.
        epoch: Number of refreshes before.
    """

    kind: Projection
    proj_rank: int
    dim: int
    seed: int
    epoch: int


def make_projection(
    key: ProjectionKey, device: torch.device, dtype: torch.dtype, *, start: int = 0, stop: int | None = None
) -> Tensor:
    """Return columns `start` to `stop` of the projection, [proj_rank, stop - start].

    Element (i, j) comes from Philox4x32-10 at counter (j, i // elements per counter, epoch, dim) under the key `seed`:
    128 signs a counter, or 4 normals by Box and Muller.

    Memory:    beyond the result, at most `price.apollo.making_bytes`: words and bits, or normals in float64.
    Exactness: signs are the same bits on every device and for every slice; normals are computed in float64, so
        devices differ in the last bit of float32 at most.
    """
    stop = key.dim if stop is None else stop
    match key.kind:
        case "rademacher":
            return _signs(_words(key, device, start, stop, per_counter=4 * _BITS), key.proj_rank, dtype)
        case "gaussian":
            return _normals(_words(key, device, start, stop, per_counter=4))[: key.proj_rank].to(dtype)
        case "identity":
            return torch.eye(key.dim, dtype=dtype, device=device)[:, start:stop]
        case _:
            assert_never(key.kind)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: int) -> Tensor:
    """Return the four 32-bit words of Philox4x32-10 at each counter, int64 [4, ...].

    References:
        Salmon, Moraes, Dror and Shaw, Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011), section 3.
    """
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    k0, k1 = key & _MASK, (key >> 32) & _MASK
    for _ in range(_ROUNDS):
        # A product of two 32-bit words wraps in int64, which leaves its 64 bits right.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = (p1 >> 32) & _MASK ^ c1 ^ k0, (p0 >> 32) & _MASK ^ c3 ^ k1
        c1, c3 = p1 & _MASK, p0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return torch.stack([c0, c1, c2, c3])


def _words(key: ProjectionKey, device: torch.device, start: int, stop: int, *, per_counter: int) -> Tensor:
    """Return the words of all counters in the order of their rows, int64 [4 * counters of a column, columns]."""
    column = torch.arange(start, stop, device=device)
    block = torch.arange(-(-key.proj_rank // per_counter), device=device).unsqueeze(1)
    epoch, dim = column.new_tensor(key.epoch), column.new_tensor(key.dim)
    return philox((column, block, epoch, dim), key.seed).transpose(0, 1).flatten(0, 1)


def _signs(words: Tensor, proj_rank: int, dtype: torch.dtype) -> Tensor:
    signs = torch.empty(proj_rank, words.shape[1], dtype=dtype, device=words.device)
    shift = torch.arange(_BITS, device=words.device, dtype=torch.int32).unsqueeze(1)
    for word, first in zip(words.to(torch.int32), range(0, proj_rank, _BITS), strict=False):
        rows = signs[first : first + _BITS]
        rows.copy_((word >> shift[: len(rows)]).bitwise_and_(1))
    return signs.mul_(2).sub_(1)


def _normals(words: Tensor) -> Tensor:
    uniform = words.double().add_(0.5).mul_(2.0**-32)
    radius, angle = uniform[0::2].log().mul_(-2).sqrt_(), uniform[1::2].mul(2 * math.pi)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1).flatten(0, 1)
