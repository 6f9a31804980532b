"""APOLLO: the raw gradient, scaled per channel or per matrix by what AdamW would do to a random projection of it."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from planish.peaks.optim import adamw, apollo_update
from planish.peaks.optim.apollo_options import (
    ApolloOptions,
    Granularity,
    Limiter,
    Refresh,
    alpha_of_scale,
    translate_names,
)
from planish.peaks.optim.apollo_random import Projection
from planish.peaks.optim.apollo_workspace import Workspace
from planish.peaks.optim.int8_weight import Int8Weight
from planish.price.apollo import Side

_FIXED = ("proj_rank", "granularity", "side", "projection", "refresh", "update_gap", "seed")


class Apollo(adamw.AdamW):
    """APOLLO for the groups with a `proj_rank`, AdamW for the others, in one step.

    With G the gradient [A, B] of a weight whose smaller dimension is A (where it is B, everything is transposed),
    P [proj_rank, A] of random signs, drawn anew every `update_gap` steps, and t the number of updates:

        R <- P G / sqrt(proj_rank)
        exp_avg <- beta1 * exp_avg + (1 - beta1) * R;   exp_avg_sq <- beta2 * exp_avg_sq + (1 - beta2) * R^2
        D <- (exp_avg / (1 - beta1^t)) / (sqrt(exp_avg_sq / (1 - beta2^t)) + eps)
        s_j <- |D_j| / |R_j| for each column j, or s <- |D| / |R| for the whole matrix (`granularity` "tensor")
        U <- G diag(s);   U <- U * min(1, growth * norm / |U|);   norm <- max(|U|, norm / growth)
        W <- W - lr * weight_decay * W - lr * alpha * U

    APOLLO-Mini is `proj_rank=1, granularity="tensor"`. P is generated when it is needed and never stored: parameters of
    equal smaller dimension share it within a step. A parameter [E, A, B] is E such matrices, each with its own factors
    and norm; one of fewer than two dimensions always takes AdamW. An `Int8Weight` stays int8: Q-APOLLO.

    Memory:    state of a projected parameter: 8 * proj_rank * B + 8 bytes (12 with `refresh="reset"`) a matrix and 4,
        and an fp32 master where it is narrower, as AdamW's; all of it allocated here. While a step runs: 4 * proj_rank
        * A bytes for each distinct A, 8 * proj_rank * B of the matrix at work, and at most two blocks of 1 MiB (one row
        where a row is larger; on an accelerator 64 MiB).
    Exactness: AdamW's parameters bitwise as `AdamW`; `update_in_backward` bitwise as `step`; state that was saved and
        loaded continues bit for bit. Signs are equal on every device.

    Args:
        params: Parameters, or groups that may override everything below; transformers' names (`rank`, `scale_type`,
            `scale`, `update_proj_gap`, `proj`, `proj_type`) are understood in groups.
        lr: Learning rate.
        betas: Decay rates of both moments.
        eps: Offset of the denominator.
        weight_decay: Decoupled decay.
        master: Keeps an fp32 master weight for parameters that are not fp32; False updates them in their own dtype.
        proj_rank: Rows of P; None leaves a group to AdamW.
        granularity: Factors by "channel", or one by "tensor".
        alpha: Scale of the update; "auto" is sqrt(A / proj_rank), which makes up for the projection.
        scale: The square of `alpha`, as transformers has it; give one of the two.
        limiter: "safe" as above, and a matrix whose gradient is zero or not finite is left as it is, state included;
            "paper" limits before bias correction, with eps outside of it, against the last norm whatever it was;
            "off" does not limit.
        growth: Largest growth of the update's norm from one step to the next.
        update_gap: Steps between two projections.
        side: The dimension that is projected: "auto" the smaller one, "left" rows, "right" columns.
        projection: "rademacher"; "gaussian" is the paper's; "identity" projects nothing (structured AdamW).
        refresh: "keep" carries both moments over to a new projection, "reset" begins `exp_avg` anew.
        seed: Of all projections.

    Raises:
        ValueError: An option or parameter that does not fit; the message says which and what would.

    References:
        Zhu et al., APOLLO: SGD-like Memory, AdamW-level Performance (arXiv 2412.05270), algorithm 1, theorem A.4.
    """

    def __init__(  # noqa: PLR0913  the options of an optimizer, by keyword
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        master: bool = True,
        proj_rank: int | None = None,
        granularity: Granularity = "channel",
        alpha: float | Literal["auto"] | None = None,
        scale: float | None = None,
        limiter: Limiter = "safe",
        growth: float = 1.01,
        update_gap: int = 200,
        side: Side = "auto",
        projection: Projection = "rademacher",
        refresh: Refresh = "keep",
        seed: int = 0,
    ) -> None:
        if alpha is not None and scale is not None:
            raise ValueError("`scale` and `alpha` are two names of one option; give one of them.")
        if alpha is None:
            alpha = "auto" if scale is None else alpha_of_scale(scale)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "master": master,
            "proj_rank": proj_rank,
            "granularity": granularity,
            "alpha": alpha,
            "limiter": limiter,
            "growth": growth,
            "update_gap": update_gap,
            "side": side,
            "projection": projection,
            "refresh": refresh,
            "seed": seed,
        }
        torch.optim.Optimizer.__init__(self, params, defaults)
        if all(group["proj_rank"] is None for group in self.param_groups):
            raise ValueError(
                "`proj_rank` must be given, to the optimizer or to a group; where nothing is projected, take AdamW."
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters and allocate their state."""
        torch.optim.Optimizer.add_param_group(self, translate_names(param_group))
        group = self.param_groups[-1]
        try:
            states = {param: _state_of(param, group) for param in group["params"] if param.requires_grad}
        except ValueError:
            self.param_groups.pop()
            raise
        self.state.update(states)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy a saved state into the tensors that exist already.

        Raises:
            ValueError: It is of other groups, parameters, shapes or projections than this optimizer has.
        """
        for index, (group, saved) in enumerate(zip(self.param_groups, state_dict["param_groups"], strict=False)):
            for name in _FIXED:
                if saved.get(name) != group[name]:
                    raise ValueError(
                        f"`{name}` of parameter group {index} is {group[name]!r} here and {saved.get(name)!r} in the "
                        "saved state, whose moments would mean nothing; set it as it was, or start anew."
                    )
        super().load_state_dict(state_dict)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient; returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update_all(Workspace())
        return loss

    @contextmanager
    def update_in_backward(self) -> Iterator[None]:
        """Update each parameter as soon as the backward pass inside is done with its gradient, and free the gradient.

        Take the last microbatch's backward pass inside; gradients of earlier ones are added as always. What had a
        gradient before and gets none inside is updated at the end. Clipping by the global norm is not possible: no
        gradient waits for it.

        Memory: one gradient at a time where there is one microbatch.

        Example:
            >>> weight = torch.ones(4, 2, requires_grad=True)
            >>> optimizer = Apollo([weight], proj_rank=1)
            >>> with optimizer.update_in_backward():
            ...     weight.square().sum().backward()
            >>> weight.grad is None
            True
        """
        work = Workspace()
        handles = [
            param.register_post_accumulate_grad_hook(
                partial(self._update_and_free, group=group, options=_options_of(group), work=work)
            )
            for group in self.param_groups
            for param in group["params"]
            if param.requires_grad
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        with torch.no_grad():
            self._update_all(work)
        self.zero_grad(set_to_none=True)

    def _update_all(self, work: Workspace) -> None:
        for group in self.param_groups:
            options = _options_of(group)
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group, options, work)

    @torch.no_grad()
    def _update_and_free(
        self, param: Tensor, *, group: dict[str, Any], options: ApolloOptions | None, work: Workspace
    ) -> None:
        self._update(param, group, options, work)
        param.grad = None

    def _update(self, param: Tensor, group: dict[str, Any], options: ApolloOptions | None, work: Workspace) -> None:
        if options is not None and param.ndim >= 2:
            apollo_update.update(param, param.grad, self.state[param], options, work)
        else:
            adamw.update(param, self.state[param], group)


def _options_of(group: dict[str, Any]) -> ApolloOptions | None:
    """Return the checked options of a group, None for one that AdamW takes."""
    return None if group["proj_rank"] is None else ApolloOptions.of(group)


def _state_of(param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
    options = _options_of(group)
    if options is not None and param.ndim >= 2:
        return apollo_update.new_state(param, options, master=group["master"])
    if isinstance(param, Int8Weight):
        raise ValueError(
            "an int8 weight needs a group with a `proj_rank`: AdamW's state alone would be eight times it."
        )
    return adamw.new_state(param, master=group["master"])
