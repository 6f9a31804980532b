"""Far memory for optimizer state, and parameters of every awkward shape."""

import pytest
import torch

SHAPES = [(50, 60), (64,), (3, 40, 50), (), (0, 4), (129, 3), (1,), (7, 9)]


class Drawn:
    """Parameters and gradients by seed: the same numbers again for whoever is compared."""

    shapes = SHAPES

    @staticmethod
    def tensor(shape, seed, dtype=torch.float32):
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)

    @classmethod
    def parameters(cls, dtype=torch.float32):
        return [cls.tensor(shape, seed, dtype).requires_grad_() for seed, shape in enumerate(cls.shapes)]

    @classmethod
    def gradients(cls, step, dtype=torch.float32):
        return [cls.tensor(shape, 1000 * step + seed, dtype) for seed, shape in enumerate(cls.shapes)]


@pytest.fixture
def drawn():
    return Drawn


@pytest.fixture
def far(tmp_path):
    """Return what StreamAdamW needs for each place of its state; chunks are so small that tensors are cut."""
    small = {"chunk_bytes": 2**14, "slots": 2}
    return {
        "host": small,
        "disk": small | {"disk": 2**21, "folder": tmp_path},
        "both": small | {"host": 2**15, "disk": 2**21, "folder": tmp_path},
        "through slots": small | {"engine": "device"},
        "half in place": small | {"engine": "hybrid", "cpu_share": 0.5},
    }
