"""Least squares from a stream: the matrix that maps inputs to a parent's outputs best, without keeping a token."""

import torch
from torch import Tensor

_TILE = 512


class Normal:
    """The normal equations of y = W x over tokens that went by.

    gram = sum w x x^T, cross = sum w x y^T, square = sum w |y|^2, with w a token's weight.

    Memory:        inputs^2 + inputs * outputs numbers of float32 (float64 where the tokens are).

    Args:
        inputs: Numbers in x.
        outputs: Numbers in y; None: y is a known matrix times x, and `derived` gives `cross` and `square`.
        like: A tensor of the tokens' dtype and device.
    """

    def __init__(self, inputs: int, outputs: int | None, like: Tensor) -> None:
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        self.gram = torch.zeros(inputs, inputs, dtype=dtype, device=like.device)
        self.cross = None if outputs is None else torch.zeros(inputs, outputs, dtype=dtype, device=like.device)
        self.square = 0.0

    def add(self, x: Tensor, y: Tensor | None = None, weight: Tensor | None = None) -> None:
        """Count tokens.

        Args:
            x: Inputs [T, inputs].
            y: Outputs [T, outputs].
            weight: Of each token [T]; default 1.
        """
        x = x.to(self.gram.dtype)
        weighted = x if weight is None else x * weight[:, None].to(x.dtype)
        for start in range(0, x.shape[1], _TILE):  # the lower half is the upper one's mirror
            end = min(start + _TILE, x.shape[1])
            self.gram[start:end, start:].addmm_(weighted[:, start:end].T, x[:, start:])
        if self.cross is not None and y is not None:
            y = y.to(x.dtype)
            self.cross.addmm_(weighted.T, y)
            squares = y.double().square().sum(1)
            self.square += float((squares if weight is None else squares * weight.double()).sum())

    def close(self) -> None:
        """Complete the gram matrix after the last token."""
        for start in range(0, self.gram.shape[0], _TILE):
            end = min(start + _TILE, self.gram.shape[0])
            self.gram[end:, start:end] = self.gram[start:end, end:].T

    def take(self, other: "Normal") -> None:
        """Add another's tokens, which are closed as these."""
        self.gram.add_(other.gram)
        if self.cross is not None and other.cross is not None:
            self.cross.add_(other.cross)
        self.square += other.square

    def derived(self, known: Tensor) -> "Normal":
        """Return these equations for y = known x, the gram matrix shared.

        Args:
            known: [outputs, inputs].
        """
        found = object.__new__(Normal)
        found.gram = self.gram
        found.cross = self.gram @ known.T.to(self.gram.dtype)
        found.square = float((found.cross.double() * known.T.double()).sum())
        return found

    def solve(self, prior: Tensor, *, ridge: float, keep: Tensor | None = None) -> Tensor:
        """Return the matrix [outputs, kept inputs] of least squares, drawn towards `prior` where tokens say little.

        (gram + L) W^T = cross + L prior^T with L = ridge * diag(gram).

        Memory:        4 * kept^2 * 8 bytes at most.

        Args:
            prior: [outputs, kept inputs].
            ridge: How strongly it is drawn.
            keep: Indices of the inputs that remain; default: all.
        """
        gram, cross = self.gram, self.cross
        if keep is not None:
            gram, cross = gram[keep[:, None], keep], cross[keep]
        gram, cross = gram.double(), cross.double()
        pull = ridge * gram.diagonal() + 1e-12 * gram.diagonal().mean() + 1e-300
        cross = cross + pull[:, None] * prior.T.double()
        gram = gram.clone() if gram is self.gram else gram
        gram.diagonal().add_(pull)
        factor, failed = torch.linalg.cholesky_ex(gram)
        if failed:  # rounding of float32 sums made it indefinite
            gram.diagonal().add_(1e-6 * gram.diagonal().mean())
            factor = torch.linalg.cholesky(gram)
        return torch.cholesky_solve(cross, factor).T.to(prior.dtype)

    def error(self, matrix: Tensor, keep: Tensor | None = None) -> float:
        """Return sum w |y - matrix x|^2 / sum w |y|^2.

        Args:
            matrix: [outputs, kept inputs].
            keep: Indices of the inputs that it takes; default: all.
        """
        gram, cross = self.gram, self.cross
        if keep is not None:
            gram, cross = gram[keep[:, None], keep], cross[keep]
        transposed = matrix.T.to(gram.dtype)
        quadratic = float(((gram @ transposed).double() * transposed.double()).sum())
        linear = float((cross.double() * transposed.double()).sum())
        return max(0.0, (quadratic - 2 * linear + self.square) / self.square) if self.square else 0.0
