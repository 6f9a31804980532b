"""The one place where a run reads numbers out of tensors; a dry run on fake tensors assumes them instead."""

from typing import Protocol

from torch import Tensor


class Facts(Protocol):
    """What the loop needs to know about data that only a real run has."""

    def number(self, tensor: Tensor) -> float:
        """Return the value of a tensor with one element."""
        ...


class MeasuredFacts:
    """Facts of a real run: the tensors are read."""

    def number(self, tensor: Tensor) -> float:
        """Return the value of a tensor with one element; waits for the device."""
        return float(tensor)


class AssumedFacts:
    """Facts of a dry run: every number is zero, since nothing was computed."""

    def number(self, tensor: Tensor) -> float:
        """Return 0.0 for a tensor with one element."""
        assert tensor.numel() == 1
        return 0.0
