"""AdamW with all of its state allocated at construction, and fp32 master weights where parameters are narrower."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw


class AdamW(torch.optim.Optimizer):
    """AdamW whose first step allocates nothing that the second does not.

    With g the gradient, w the fp32 weight (the master where the parameter is narrower), t the step:

        w <- w - lr * weight_decay * w
        exp_avg <- beta1 * exp_avg + (1 - beta1) * g;   exp_avg_sq <- beta2 * exp_avg_sq + (1 - beta2) * g^2
        w <- w - lr * (exp_avg / (1 - beta1^t)) / (sqrt(exp_avg_sq / (1 - beta2^t)) + eps)

    and a narrower parameter becomes w rounded to its dtype.

    Memory:        per fp32 parameter 8 bytes, allocated here; per narrower parameter 12 bytes with `master`, and while
                   a step runs the fp32 gradient of one parameter at a time.
    Exactness:     bitwise equal to `torch.optim.AdamW(fused=True)` on fp32 parameters, and to the same on the fp32
                   master weights with fp32 copies of the gradients.

    Args:
        params: Parameters or parameter groups.
        lr: Learning rate.
        betas: Decay rates of both moments.
        eps: Offset of the denominator.
        weight_decay: Decoupled decay.
        master: Keeps an fp32 master weight for parameters that are not fp32; False updates them in their own dtype.

    References:
        Loshchilov and Hutter, Decoupled Weight Decay Regularization, algorithm 2.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        master: bool = True,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "master": master}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters and allocate their state."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for param in group["params"]:
            if param.requires_grad:
                self.state[param] = new_state(param, master=group["master"])

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy a saved state into the tensors that exist already (torch's own would cast fp32 state to bf16).

        Raises:
            ValueError: Other groups, parameters, shapes or state than this optimizer has.
        """
        params = [param for group in self.param_groups for param in group["params"]]
        saved_groups, saved_state = state_dict["param_groups"], state_dict["state"]
        if [len(group["params"]) for group in saved_groups] != [len(group["params"]) for group in self.param_groups]:
            raise ValueError("the saved optimizer state has other parameter groups than this optimizer.")
        for index, param in enumerate(params):
            state, saved = self.state.get(param, {}), saved_state.get(index, {})
            if {name: t.shape for name, t in state.items()} != {name: t.shape for name, t in saved.items()}:
                raise ValueError(f"the saved state of parameter {index} has other tensors than this optimizer keeps.")
            for name, tensor in state.items():
                tensor.copy_(saved[name])
        for group, saved in zip(self.param_groups, saved_groups, strict=True):
            group.update({name: value for name, value in saved.items() if name != "params"})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient; returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    update(param, self.state[param], group)
        return loss


def new_state(param: Tensor, *, master: bool) -> dict[str, Tensor]:
    """Return AdamW's state of one parameter."""
    dtype = torch.float32 if master else param.dtype
    state = {
        "step": torch.zeros((), dtype=torch.float32),
        "exp_avg": torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format),
        "exp_avg_sq": torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format),
    }
    if dtype != param.dtype:
        state["master"] = param.detach().to(dtype, copy=True)
    return state


def update(param: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
    """Update one parameter and its state in place, by the options of its group."""
    master = state.get("master")
    weight = param if master is None else master
    beta1, beta2 = group["betas"]
    adamw(
        [weight],
        [param.grad.to(weight.dtype)],
        [state["exp_avg"]],
        [state["exp_avg_sq"]],
        [],
        [state["step"]],
        fused=True,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
    if master is not None:
        param.copy_(master)
