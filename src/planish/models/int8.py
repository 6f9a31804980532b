"""A loaded model with the weights that the plan's optimizer keeps in one byte, on the run's device."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from planish.errors import UsageError
from planish.methods import Apollo, Optim
from planish.peaks.optim.int8_weight import quantize_weights
from planish.price.apollo import projected_names


def loads_on_host(optim: Optim) -> bool:
    """Return whether a model is loaded into host memory first, so that a device never holds its wide weights."""
    return isinstance(optim, Apollo) and optim.weights == "int8"


def settle(model: PreTrainedModel, optim: Optim, device: torch.device) -> PreTrainedModel:
    """Return `model` on `device`, its projected matrices as int8 weights where `optim` says so.

    Memory: on `device`, what stays; where the model is, one weight twice.

    Raises:
        UsageError: A projected weight that is not a linear layer's.
    """
    if isinstance(optim, Apollo) and loads_on_host(optim):
        shapes = {name: param.shape for name, param in model.named_parameters() if param.requires_grad}
        names = projected_names(shapes, optim.proj_rank)
        linear = {f"{path}.weight": each for path, each in model.named_modules() if isinstance(each, nn.Linear)}
        for name in names:
            if name not in linear:
                raise UsageError(
                    f"`plan.optim.weights` = int8 takes weights of linear layers, and `{name}` "
                    f"{list(shapes[name])} is none; leave it out for this model."
                )
        quantize_weights([linear[name] for name in names], device=device)
        _move(model, device)
    return model


def _move(model: nn.Module, device: torch.device) -> None:
    """Move what is elsewhere, one tensor at a time; `Module.to` can move neither fakes nor int8 weights."""

    def copy(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device=device, requires_grad=False).copy_(tensor.detach())

    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False):
            if param.device.type != device.type:
                new = nn.Parameter(copy(param), requires_grad=param.requires_grad)
                setattr(module, name, moved.setdefault(id(param), new))
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.device.type != device.type:
                setattr(module, name, copy(buffer))
