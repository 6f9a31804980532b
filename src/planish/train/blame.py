"""When a number is not finite: which module or parameter it came from."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from planish.data.batch import Batch
from planish.errors import NotFinite
from planish.memory.tensors import plain_tensors_in
from planish.train.engine import Engine


def refuse_non_finite(
    engine: Engine, step: int, *, loss: float, grad_norm: float, batches: list[Batch], updated: bool = False
) -> None:
    """Raise NotFinite when the loss or the gradient norm is NaN or infinite, naming where it began."""
    if math.isfinite(loss) and math.isfinite(grad_norm):
        return
    if not math.isfinite(loss):
        place = first_bad_module(engine, batches)
        what = f"the loss is {loss}"
    else:
        grads = ((name, p.grad) for name, p in engine.anatomy.model.named_parameters() if p.grad is not None)
        place = _anywhere(engine, next((name for name, grad in grads if not _finite(grad)), None))
        place = place or "the sum of all gradients"
        what = f"the gradient norm is {grad_norm}"
    # Before the first update no learning rate can be at fault.
    remedy = "lower `train.lr`, or look at this step's data" if step > 1 else "look at the model's weights and the data"
    weights = "some weights were updated" if updated else "the weights were not updated"
    raise NotFinite(f"step {step}: {what}, first in {place}; {weights}; {remedy}.")


def refuse_non_finite_weights(engine: Engine, step: int) -> None:
    """Raise NotFinite when the update left a weight that is NaN or infinite, before it is saved."""
    params = engine.anatomy.model.named_parameters()
    name = _anywhere(engine, next((name for name, param in params if not _finite(param)), None))
    if name is not None:
        raise NotFinite(f"step {step}: `{name}` is not finite after the update, so it is not saved; lower `train.lr`.")


def first_bad_module(engine: Engine, batches: list[Batch]) -> str:
    """Return the name of the first module whose output is not finite, running the forward pass once more."""
    found: list[str] = []

    def look(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: object, output: object) -> None:
            tensors = output if isinstance(output, tuple) else (output,)
            if not found and any(isinstance(each, Tensor) and not _finite(each) for each in tensors):
                found.append(name)

        return hook

    leaves = [(name, each) for name, each in engine.anatomy.model.named_modules() if not list(each.children())]
    handles = [module.register_forward_hook(look(name)) for name, module in leaves]
    try:
        with torch.no_grad():
            for batch in batches:
                engine.loss(batch)
    finally:
        for handle in handles:
            handle.remove()
    return _anywhere(engine, found[0] if found else None) or engine.anatomy.head_name


def _anywhere(engine: Engine, name: str | None) -> str | None:
    """Return the name that the first rank with one has found."""
    return next((each for each in engine.world.gather(name) if each is not None), None)


def _finite(tensor: Tensor) -> bool:
    return all(bool(torch.isfinite(each).all()) for each in plain_tensors_in(tensor))
