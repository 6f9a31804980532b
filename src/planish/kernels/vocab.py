"""Which kernels make the head's statistics and derivatives without writing a tile of logits; chosen in one place."""

import importlib
from importlib.util import find_spec
from types import ModuleType

import torch


def head_kernels(device: torch.device) -> ModuleType | None:
    """Return `planish.kernels.vocab_triton` for a CUDA device where Triton is installed, else None.

    Without it the head multiplies by torch and makes the rest in passes over each tile.
    """
    if device.type != "cuda" or find_spec("triton") is None:
        return None
    return importlib.import_module("planish.kernels.vocab_triton")
