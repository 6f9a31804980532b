"""Where a transformers causal LM keeps its layers and its head, and what it does to its logits."""

from dataclasses import dataclass

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from planish.errors import UsageError
from planish.models.load import text_config
from planish.models.low_rank import is_adapted


@dataclass(frozen=True, slots=True, kw_only=True)
class Anatomy:
    """The parts of one causal LM.

    logits = softcap * tanh(logit_scale * (hidden @ weight.T + bias) / softcap), without the tanh where softcap is None.

    Attributes:
        model: The whole causal LM.
        backbone: Token ids in, hidden states out.
        head: The vocabulary projection, or what peft put around it.
        layers: The decoder layers, named by their path in `model`, in forward order.
        softcap: Bound of the logits (Gemma 2), or None.
        logit_scale: Factor on the logits (Cohere; Granite's divisor inverted).
    """

    model: PreTrainedModel
    backbone: nn.Module
    head: nn.Module
    layers: dict[str, nn.Module]
    softcap: float | None
    logit_scale: float

    @property
    def weight(self) -> Tensor:
        """The vocabulary projection [V, D]; the embedding itself where the two are tied."""
        return self.head.weight

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states."""
        return self.head.in_features

    @property
    def head_name(self) -> str:
        """The head's path in the model."""
        return next(name for name, module in self.model.named_modules() if module is self.head)


def find(model: PreTrainedModel) -> Anatomy:
    """Return the parts of `model`.

    Raises:
        UsageError: A model without a linear head over its decoder or without checkpointable layers, or with a loss
            beyond cross-entropy.
    """
    head, backbone = model.get_output_embeddings(), model.get_decoder()
    if not (isinstance(head, nn.Linear) or is_adapted(head)) or backbone is model:
        raise UsageError(f"{type(model).__name__} has no linear head over a decoder; planish trains causal LMs.")
    layers = {name: each for name, each in model.named_modules() if isinstance(each, GradientCheckpointingLayer)}
    if not layers:
        raise UsageError(f"{type(model).__name__} has no decoder layers that transformers can checkpoint.")
    config = text_config(model.config).to_dict()
    if config.get("output_router_logits"):
        raise UsageError(
            f"{type(model).__name__} adds a router loss of its own (`output_router_logits` in its config), which "
            "planish does not compute; set it to false."
        )
    scale = config.get("logit_scale") or 1.0
    return Anatomy(
        model=model,
        backbone=backbone,
        head=head,
        layers=layers,
        softcap=config.get("final_logit_softcapping"),
        logit_scale=scale / (config.get("logits_scaling") or 1.0),
    )
