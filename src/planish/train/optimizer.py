"""The optimizer of a run, by the plan's method, with all of its state allocated."""

from contextlib import ExitStack
from typing import Any, assert_never

from torch import Tensor, nn

from planish import methods
from planish.peaks.optim.adamw import AdamW
from planish.peaks.optim.apollo import Apollo
from planish.peaks.optim.stream_adamw import StreamAdamW
from planish.price.apollo import projected_names
from planish.runfile import RunFile
from planish.sections import TrainSection
from planish.train.engine import Engine

Optimizer = AdamW | StreamAdamW  # Apollo is AdamW for some of its groups


def build_optimizer(engine: Engine, run: RunFile, scope: ExitStack) -> Optimizer:
    """Return the plan's optimizer over the engine's model, weight decay for matrices only.

    Args:
        engine: The model in place.
        run: Every setting.
        scope: Gives far memory back when it closes.

    Raises:
        UsageError: A projection that does not fit the model, far memory that does not hold the state or is not there.
    """
    with engine.ledger.phase("init"), engine.ledger.category("staging"):
        optimizer = _make(engine.anatomy.model, run.plan.optim, run.train, master=run.model.dtype != "bf16-pure")
        owner = type(optimizer).__name__
        if isinstance(optimizer, StreamAdamW):
            scope.callback(optimizer.close)
            state = optimizer.resident
            engine.ledger.adopt(optimizer.staging, "staging", owner=owner)
        else:
            state = [tensor for each in optimizer.state.values() for tensor in each.values()]
        engine.ledger.adopt(state, "optimizer state", owner=owner)
    return optimizer


def _make(model: nn.Module, method: methods.Optim, train: TrainSection, *, master: bool) -> Optimizer:
    named = {name: param for name, param in model.named_parameters() if param.requires_grad}
    beta1, beta2 = train.betas
    common: dict[str, Any] = {"lr": train.lr, "betas": (beta1, beta2), "eps": train.eps, "master": master}
    match method:
        case methods.AdamW():
            return AdamW(_groups(list(named.values()), train.weight_decay), **common)
        case methods.StreamAdamW():
            return StreamAdamW(
                _groups(list(named.values()), train.weight_decay),
                host=method.host,
                disk=method.disk,
                folder=method.folder,
                chunk_bytes=method.chunk_bytes,
                slots=method.slots,
                **common,
            )
        case methods.Apollo():
            names = projected_names({name: param.shape for name, param in named.items()}, method.proj_rank)
            projected = {
                "params": [named[name] for name in names],
                "weight_decay": train.weight_decay,
                "proj_rank": method.proj_rank,
                "granularity": method.granularity,
                "alpha": "auto" if method.alpha is None else method.alpha,
                "limiter": method.limiter,
                "update_gap": method.update_gap,
                "projection": method.projection,
                "refresh": method.refresh,
                "seed": method.seed,
            }
            rest = [param for name, param in named.items() if name not in names]
            return Apollo([*_groups(rest, train.weight_decay), projected], **common)
        case _:
            assert_never(method)


def _groups(params: list[Tensor], weight_decay: float) -> list[dict[str, Any]]:
    matrices = {"params": [param for param in params if param.ndim >= 2], "weight_decay": weight_decay}
    vectors = {"params": [param for param in params if param.ndim < 2], "weight_decay": 0.0}
    return [group for group in (matrices, vectors) if group["params"]]
