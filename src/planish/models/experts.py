"""Where a transformers model keeps its experts, and how theirs become ours."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, activations
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

from planish.errors import UsageError
from planish.methods import Pipelined
from planish.peaks.dispatch.experts import Weights
from planish.peaks.dispatch.gates import Activation, ClampedGlu, Gate, Glu, Single
from planish.peaks.dispatch.least_loaded import Balance
from planish.peaks.dispatch.pipelined import Load, Options, pipelined_experts, read_ends, sizes_of
from planish.peaks.dispatch.replay import replayed
from planish.peaks.dispatch.spread import spread_experts
from planish.peaks.dispatch.trip import Ranks
from planish.price.dispatch import tile_rows
from planish.price.dispatch_ranks import block_rows_of

_ACTIVATIONS: dict[type[nn.Module], Activation] = {
    nn.SiLU: "silu",
    activations.SiLUActivation: "silu",
    nn.ReLU: "relu",
    activations.GELUActivation: "gelu",
    activations.GELUTanh: "gelu_tanh",
    activations.ReLUSquaredActivation: "relu2",
}
Seen = Callable[[Load], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsOf:
    """The experts modules of a model, and the layers that they are in.

    Attributes:
        modules: By their path.
        layers: The decoder layers that hold one.
    """

    modules: dict[str, nn.Module]
    layers: list[nn.Module]


def find_experts(model: PreTrainedModel, layers: dict[str, nn.Module]) -> ExpertsOf:
    """Return the experts of `model`: modules that transformers' experts interface runs."""
    modules = {
        name: each
        for name, each in model.named_modules()
        if isinstance(getattr(each, "is_transposed", None), bool) and isinstance(getattr(each, "has_gate", None), bool)
    }
    holds = [layer for name, layer in layers.items() if any(path.startswith(f"{name}.") for path in modules)]
    return ExpertsOf(modules=modules, layers=holds)


def weights_of(experts: nn.Module) -> Weights:
    """Return the weights of an experts module, or of those of its experts that are here."""
    up = "gate_up_proj" if experts.has_gate else "up_proj"
    biases = {"up_bias": f"{up}_bias", "down_bias": "down_proj_bias"} if experts.has_bias else {}
    return Weights(
        up=_here(getattr(experts, up)),
        down=_here(experts.down_proj),
        transposed=experts.is_transposed,
        **{name: _here(getattr(experts, path)) for name, path in biases.items()},
    )


def _here(param: Tensor) -> Tensor:
    return param.to_local() if isinstance(param, DTensor) else param


def gate_of(experts: nn.Module) -> Gate:
    """Return what the experts of a module do between their two products.

    Raises:
        UsageError: Something that the pipelined experts do not know.
    """
    name = type(experts).__name__
    if experts.has_post_expert_norm:
        raise _refused(name, "normalises its experts' outputs")
    if any(each.__name__ == "GptOssExperts" for each in type(experts).__mro__):  # FSDP2 derives a class from it
        return ClampedGlu(alpha=experts.alpha, limit=experts.limit)
    if experts.has_gate and (type(experts)._apply_gate is not _default_apply_gate or not experts.is_concatenated):
        raise _refused(name, "has a gate of its own")
    activation = _ACTIVATIONS.get(type(experts.act_fn))
    if activation is None:
        raise _refused(name, f"uses {type(experts.act_fn).__name__}")
    return Glu(activation=activation) if experts.has_gate else Single(activation=activation)


def _refused(name: str, why: str) -> UsageError:
    return UsageError(
        f"`plan.dispatch` = pipelined cannot take {name}, which {why}; set `plan.dispatch` = plain, or batched where "
        "the experts are small."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """The ranks that experts are spread over.

    Attributes:
        group: Of these ranks alone; each holds the experts that a DTensor's `Shard(0)` says.
        tokens: The most that any of them brings at a time.
        dry: Tensors are fake: nothing can be read from them.
    """

    group: dist.ProcessGroup
    tokens: int
    dry: bool = False

    def ranks(self, num_experts: int, method: Pipelined) -> Ranks:
        """Return what is fixed at launch for a layer with `num_experts` experts.

        Raises:
            UsageError: Blocks that are too small for so many ranks.
        """
        rows = block_rows_of(method.block_rows, self.tokens, self.group.size())
        if rows < self.group.size():
            raise UsageError(
                f"`plan.dispatch.block_rows` ({rows}) must be at least `mesh.ep`, {self.group.size()}: each rank may "
                f"send a token to the same one; {self.group.size()} is the smallest that works."
            )
        balance = Balance(max_foreign=method.max_borrowed, min_routes=method.least_borrowed_routes)
        return Ranks(
            group=self.group,
            num_experts=num_experts,
            max_tokens=self.tokens,
            block_rows=rows,
            balance=balance,
            dry=self.dry,
        )


def install_experts(
    model: PreTrainedModel, found: ExpertsOf, method: Pipelined, *, seen: Seen, dry: bool, shared: Shared | None = None
) -> Callable[[], None]:
    """Let `model` run its experts by `method`, and return the way back.

    transformers has a seam for experts over ranks too, which shards them as it loads a model, evenly or not at all, on
    a mesh of its own; here FSDP2 and the data's ranks come first, so that its seam for experts on one rank serves both.

    Args:
        model: A model with experts.
        found: They.
        method: How they run.
        seen: Told of the load of each layer that runs forward.
        dry: The model's tensors are fake: nothing can be read from them.
        shared: The ranks that hold the experts together; None: this one holds all.

    Raises:
        UsageError: Experts that the method does not know, or blocks that are too small for so many ranks.
    """
    gates = {each: gate_of(each) for each in found.modules.values()}
    ranks = {
        each: shared.ranks(each.down_proj.shape[0], method) for each in found.modules.values() if shared is not None
    }

    def forward(experts: nn.Module, hidden: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
        weights, gate = weights_of(experts), gates[experts]
        sizes = sizes_of(hidden, ids, scores, weights, gate)
        rows = tile_rows(sizes, method.tile_bytes)
        options = Options(
            gate=gate,
            tile_rows=rows,
            block_rows=method.block_rows or max(1, len(hidden)),
            read=partial(_assumed, rows) if dry else read_ends,
            seen=seen,
        )
        if experts in ranks:
            return spread_experts(hidden, ids, scores, weights, options, ranks[experts])
        return pipelined_experts(hidden, ids, scores, weights, options)

    before, name = model.get_experts_implementation(), f"planish-{id(model):x}"
    ALL_EXPERTS_FUNCTIONS[name] = forward
    model.set_experts_implementation(name)
    checkpoints = [
        (layer, layer._gradient_checkpointing_func) for layer in found.layers if layer.gradient_checkpointing
    ]
    for layer, checkpoint in checkpoints:
        layer._gradient_checkpointing_func = replayed(checkpoint)

    def restore() -> None:
        for layer, checkpoint in checkpoints:
            layer._gradient_checkpointing_func = checkpoint
        model.set_experts_implementation(before)
        del ALL_EXPERTS_FUNCTIONS[name]

    return restore


def _assumed(tile_rows: int, ends: Tensor, routes: int) -> list[int]:
    """Return one tile of routes, of the first expert: more tiles allocate nothing more."""
    return [min(tile_rows, routes)] * len(ends)
