"""Layers by choice: what a choice is in `per_layer_config`, a layer of that make, and how layers run one by one."""

import copy
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from planish.compress.space import (
    Architecture,
    AttentionOption,
    Choice,
    FfnOption,
    KeepExperts,
    KeepHeads,
    LinearAttention,
    LinearFfn,
    NoAttention,
    NoFfn,
    SlidingWindow,
    Width,
)
from planish.models.child import ChildLayer, causal_masks, child_config, layer_config, one_layer

Kind = Literal["attention", "ffn"]
_PREFIXES: dict[Kind, tuple[str, str]] = {
    "attention": ("input_layernorm.", "self_attn."),
    "ffn": ("post_attention_layernorm.", "mlp."),
}


def expert_keys(config: Any) -> tuple[str, str]:
    """Return what a family's config calls the number of experts, and the width of one."""
    count = config.attribute_map.get("num_experts", "num_experts")
    return count, "moe_intermediate_size" if hasattr(config, "moe_intermediate_size") else "intermediate_size"


def overrides(config: Any, choice: Choice) -> dict[str, Any]:
    """Return what a layer's entry in `per_layer_config` says for `choice`.

    Args:
        config: The parent's.
        choice: What the layer is.
    """
    found: dict[str, Any] = {}
    skip = [
        name
        for name, option in (("attention", choice.attention), ("mlp", choice.ffn))
        if isinstance(option, NoAttention | NoFfn)
    ]
    linear = [
        name
        for name, option in (("attention", choice.attention), ("mlp", choice.ffn))
        if isinstance(option, LinearAttention | LinearFfn)
    ]
    if skip:
        found["skip"] = skip
    if linear:
        found["replace_with_linear"] = linear
    match choice.attention:
        case KeepHeads(kv_heads=count):
            found["num_key_value_heads"] = count
        case SlidingWindow(window=window, kv_heads=count):
            found |= {"num_key_value_heads": count, "sliding_window": window}
    match choice.ffn:
        case Width(width=width):
            found["intermediate_size"] = width
        case KeepExperts(experts=count, width=width):
            found |= dict(zip(expert_keys(config), (count, width), strict=True))
    return found


def config_of(parent: Any, architecture: Architecture) -> Any:
    """Return the transformers config of the child of a model with config `parent`."""
    return child_config(parent, {index: overrides(parent, choice) for index, choice in enumerate(architecture.layers)})


def architecture_of(config: Any) -> Architecture:
    """Return the architecture that a child's transformers config describes."""
    layers = (_choice(layer_config(config, index), index) for index in range(config.num_hidden_layers))
    return Architecture(layers=tuple(layers))


def _mixes(config: Any, index: int) -> bool:
    """Return whether layer `index` has a mixture; some families have dense layers beside them."""
    dense, step = getattr(config, "mlp_only_layers", None) or (), getattr(config, "decoder_sparse_step", 1)
    return bool(getattr(config, "num_experts", None)) and index not in dense and (index + 1) % step == 0


def _choice(config: Any, index: int) -> Choice:
    skip, linear = getattr(config, "skip", []), config.replace_with_linear
    attention: AttentionOption
    ffn: FfnOption
    if "attention" in skip:
        attention = NoAttention()
    elif "attention" in linear:
        attention = LinearAttention()
    elif config.sliding_window is not None:
        attention = SlidingWindow(window=config.sliding_window, kv_heads=config.num_key_value_heads)
    else:
        attention = KeepHeads(kv_heads=config.num_key_value_heads)
    if "mlp" in skip:
        ffn = NoFfn()
    elif "mlp" in linear:
        ffn = LinearFfn()
    elif _mixes(config, index):
        count, width = (getattr(config, name) for name in expert_keys(config))
        ffn = KeepExperts(experts=count, width=width)
    else:
        ffn = Width(width=config.intermediate_size)
    return Choice(attention=attention, ffn=ffn)


def part(tensors: Mapping[str, Tensor], kind: Kind) -> dict[str, Tensor]:
    """Return the tensors of a layer's attention or feed-forward network, each with its norm."""
    return {name: each for name, each in tensors.items() if name.startswith(_PREFIXES[kind])}


class Blocks:
    """Makes and runs layers of a parent's family.

    Args:
        config: The parent's.
    """

    def __init__(self, config: Any) -> None:
        decoder = one_layer(config)
        self.config = copy.deepcopy(config)
        for name in ("_attn_implementation", "_experts_implementation"):  # a config that was read has none yet
            setattr(self.config, name, getattr(config, name) or getattr(decoder.config, name))
        self._make = type(decoder.layers[0])
        self._rotary = type(decoder.rotary_emb)(config=decoder.config)

    def empty(self, index: int, choice: Choice, *, device: torch.device, dtype: torch.dtype) -> ChildLayer:
        """Return layer `index` made as `choice`, its numbers not set."""
        return self.bare(index, choice, dtype=dtype).to_empty(device=device)

    def bare(self, index: int, choice: Choice, *, dtype: torch.dtype) -> ChildLayer:
        """Return layer `index` made as `choice`, without memory until its tensors are assigned."""
        config = layer_config(child_config(self.config, {index: overrides(self.config, choice)}), index)
        with torch.device("meta"):
            layer = ChildLayer(self._make(config, index), config)
        return layer.to(dtype).eval()

    def around(self, index: int, layer: nn.Module) -> ChildLayer:
        """Return a parent's own layer as ours, its modules shared."""
        return ChildLayer(layer, layer_config(child_config(self.config, {}), index)).eval()

    def run(self, layers: Iterable[ChildLayer], hidden: Tensor) -> Tensor:
        """Return hidden states [B, S, D] after `layers`, each row one text from its first token on."""
        for layer in layers:
            hidden = layer(hidden, **self.around_call(layer, hidden))
        return hidden

    def around_call(
        self,
        layer: ChildLayer,
        hidden: Tensor,
        position_ids: Tensor | None = None,
        bounds: tuple[int, ...] | None = None,
        cache: DynamicCache | None = None,
    ) -> dict[str, Any]:
        """Return what `layer` takes beside its hidden states [B, S, D].

        Args:
            layer: Any of the family.
            hidden: Before it.
            position_ids: [B, S] of packed documents; default: each row is one text from its first token on.
            bounds: Of packed documents over all tokens, for planish's own attention.
            cache: What the layer attends to beside them.
        """
        if position_ids is None:
            position_ids = torch.arange(hidden.shape[1], device=hidden.device)[None]
        masks = causal_masks([layer], hidden, None, cache, position_ids)
        found = {
            "attention_mask": masks.get(layer.window),
            "position_ids": position_ids,
            "position_embeddings": self._rotary.to(hidden.device)(hidden, position_ids),
        }
        return found if bounds is None else found | {"cu_seq_lens_q": bounds}
