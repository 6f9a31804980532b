"""planish: bounds every memory peak of training at launch, exactly, and says beforehand whether it fits."""

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "BudgetExceeded": "planish.errors",
    "Plan": "planish.methods",
    "install": "planish.models.install",
    "LinearCrossEntropy": "planish.peaks.vocab.losses",
    "linear_cross_entropy": "planish.peaks.vocab.losses",
    "linear_kl": "planish.peaks.vocab.kl",
    "linear_topk_kl": "planish.peaks.vocab.topk",
    "linear_logprob": "planish.peaks.vocab.losses",
    "ring_linear_cross_entropy": "planish.peaks.vocab.ring",
    "sparse_saved_tensors": "planish.peaks.activation.saved",
}

__all__ = [
    "BudgetExceeded",
    "LinearCrossEntropy",
    "Plan",
    "install",
    "linear_cross_entropy",
    "linear_kl",
    "linear_logprob",
    "linear_topk_kl",
    "ring_linear_cross_entropy",
    "sparse_saved_tensors",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `import planish` stays free of torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'planish' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
