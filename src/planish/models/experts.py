"""Where a transformers model keeps its experts, and how theirs become ours."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn
from transformers import PreTrainedModel, activations
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

from planish.errors import UsageError
from planish.methods import Pipelined
from planish.peaks.dispatch.experts import Weights
from planish.peaks.dispatch.gates import Activation, ClampedGlu, Gate, Glu, Single
from planish.peaks.dispatch.pipelined import Load, Options, pipelined_experts, sizes_of
from planish.peaks.dispatch.replay import replayed
from planish.price.dispatch import tile_rows

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
    """Return the weights of an experts module."""
    up = "gate_up_proj" if experts.has_gate else "up_proj"
    biases = {"up_bias": f"{up}_bias", "down_bias": "down_proj_bias"} if experts.has_bias else {}
    return Weights(
        up=getattr(experts, up),
        down=experts.down_proj,
        transposed=experts.is_transposed,
        **{name: getattr(experts, path) for name, path in biases.items()},
    )


def gate_of(experts: nn.Module) -> Gate:
    """Return what the experts of a module do between their two products.

    Raises:
        UsageError: Something that the pipelined experts do not know.
    """
    name = type(experts).__name__
    if experts.has_post_expert_norm:
        raise _refused(name, "normalises its experts' outputs")
    if name == "GptOssExperts":
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


def install_experts(
    model: PreTrainedModel, found: ExpertsOf, method: Pipelined, *, seen: Seen, dry: bool
) -> Callable[[], None]:
    """Let `model` run its experts by `method`, and return the way back.

    Args:
        model: A model with experts.
        found: They.
        method: How they run.
        seen: Told of the load of each layer that runs forward.
        dry: The model's tensors are fake: nothing can be read from them.

    Raises:
        UsageError: Experts that the method does not know.
    """
    gates = {each: gate_of(each) for each in found.modules.values()}

    def forward(experts: nn.Module, hidden: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
        weights, gate = weights_of(experts), gates[experts]
        sizes = sizes_of(hidden, ids, scores, weights, gate)
        options = Options(
            gate=gate,
            tile_rows=tile_rows(sizes, method.tile_bytes),
            block_rows=method.block_rows or max(1, len(hidden)),
            read=_assumed if dry else Tensor.tolist,
            seen=seen,
        )
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


def _assumed(ends: Tensor) -> list[int]:
    """Return one route, of the first expert: how many there are decides about nothing that is allocated."""
    return [1] * len(ends)
