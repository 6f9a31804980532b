"""Where a transformers model keeps its norms, and how they run in tiles."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.func import functional_call
from transformers import PreTrainedModel

from planish.models.part import Part, of_forwards
from planish.peaks.activation.norms import Form, Norm, tiled_norm

# Larger buffers gain nothing: one must only be long enough to hide the steps of Python between tiles.
MOST_TILE_BYTES = 4 * 2**20
_EPS = ("variance_epsilon", "eps")


def tile_norms(model: PreTrainedModel, tile_bytes: int) -> Part | None:
    """Run every root-mean-square norm whose formula is known in tiles; None where there is none.

    A norm is known by what it computes: a few vectors must come out bit for bit, in float32 and in bfloat16. One that
    is not known stays as it is.
    """
    known: dict[type[nn.Module], Form | None] = {}
    done: list[nn.Module] = []
    for module in model.modules():
        eps = next((getattr(module, name) for name in _EPS if isinstance(getattr(module, name, None), float)), None)
        names = [name for name, _ in module.named_parameters(recurse=False)]
        if eps is None or names != ["weight"] or list(module.children()) or module.weight.dim() != 1:
            continue
        if type(module) not in known:
            known[type(module)] = _form(module, eps)
        form = known[type(module)]
        if form is not None:
            module.forward = _forward(module, Norm(form=form, eps=eps, tile_bytes=min(tile_bytes, MOST_TILE_BYTES)))
            done.append(module)
    return of_forwards(done, f"{len(done)} norms: in tiles, their input alone waits for backward")


def _forward(module: nn.Module, norm: Norm) -> Callable[[Tensor], Tensor]:
    return lambda x: tiled_norm(x, module.weight, norm)


def _form(module: nn.Module, eps: float) -> Form | None:
    """Return the formula that gives what `module` gives."""
    width = module.weight.shape[0]
    with unset_fake_temporarily(), torch.no_grad(), torch.device("cpu"):
        generator = torch.Generator().manual_seed(0)
        x, weight = (torch.randn(size, width, generator=generator) for size in (5, 1))
        for form in ("rounded", "wide", "shifted"):
            norm = Norm(form=form, eps=eps, tile_bytes=1)
            if all(_gives(module, x.to(dtype), weight[0].to(dtype), norm) for dtype in (torch.float32, torch.bfloat16)):
                return form
    return None


def _gives(module: nn.Module, x: Tensor, weight: Tensor, norm: Norm) -> bool:
    return torch.equal(functional_call(module, {"weight": weight}, (x,)), tiled_norm(x, weight, norm))
