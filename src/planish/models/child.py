"""Compressed children as transformers models: layers of different makes in one decoder of the parent's family.

The file imports nothing of planish, so that a copy of it beside the weights loads them with `trust_remote_code=True`.
`config.json` holds the parent's own keys, `parent_type`, and `per_layer_config` with what each layer has otherwise:
`num_key_value_heads`, `intermediate_size`, `sliding_window`, `skip` and `replace_with_linear` ("attention", "mlp").
"""

import copy
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

MODEL_TYPE = "planish"
# What transformers calls a layer that keeps nothing in a cache.
_NO_CACHE = "moe"


class Child(PretrainedConfig):
    """The config of a child whatever its parent; what it opens is a config of the parent's family."""

    model_type = MODEL_TYPE

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Return the config that `config_dict` describes, of a class made for its `parent_type`."""
        return config_class(config_dict["parent_type"]).from_dict(config_dict, **kwargs)


class ChildForCausalLM(PreTrainedModel, GenerationMixin):
    """A child whatever its parent; what it opens is a model of the parent's family."""

    config_class = Child

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the model saved there, of a class made for its `parent_type`."""
        config = kwargs.pop("config", None) or Child.from_pretrained(pretrained_model_name_or_path)
        made = model_class(config.parent_type)
        return made.from_pretrained(pretrained_model_name_or_path, *args, config=config, **kwargs)


class Linear(nn.Module):
    """One matrix in the place of a sub-block."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size, bias=False)

    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
        """Return hidden states [..., D] times the matrix."""
        return self.linear(hidden_states)


class ChildLayer(GradientCheckpointingLayer):
    """x + attention(norm(x)), then + network(norm(.)), where what is not there costs nothing.

    Args:
        template: A layer of the parent's family in this layer's sizes; its parts are taken over.
        config: The layer's own config.
    """

    def __init__(self, template: nn.Module, config: PretrainedConfig) -> None:
        super().__init__()
        skip, linear = getattr(config, "skip", []), config.replace_with_linear
        self.config = config
        self.attends = "attention" not in skip and "attention" not in linear
        self.window = config.sliding_window if self.attends and _slides(config) else None
        # Families that know windows hand on their own; the others hand on what they are given.
        self.hands_on = self.window is not None and not _hands_on(template.self_attn)
        if "attention" not in skip:
            self.input_layernorm = template.input_layernorm
            self.self_attn = template.self_attn if self.attends else Linear(config.hidden_size)
        if "mlp" not in skip:
            self.post_attention_layernorm = template.post_attention_layernorm
            self.mlp = Linear(config.hidden_size) if "mlp" in linear else template.mlp
        self.has_mlp = "mlp" not in skip
        self.has_attention = "attention" not in skip

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """Return hidden states [B, S, D] after the layer; the other arguments are attention's."""
        if self.attends:
            if self.hands_on:
                kwargs["sliding_window"] = self.window
            hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states), **kwargs)[0]
        elif self.has_attention:
            hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states))
        if self.has_mlp:
            hidden_states = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states


def _hands_on(attention: nn.Module) -> bool:
    """Return whether a family's attention names a window itself where it calls an implementation."""
    code = inspect.unwrap(type(attention).forward).__code__
    constants = (each if isinstance(each, tuple) else (each,) for each in code.co_consts)
    return "sliding_window" in {*code.co_names, *itertools.chain.from_iterable(constants)}


def _slides(config: PretrainedConfig) -> bool:
    return getattr(config, "sliding_window", None) is not None


class _Backbone:
    """The decoder; comes before the parent's class among the bases."""

    def __init__(self, config: Any) -> None:
        super().__init__(_uniform(config))
        make = type(self.layers[0])
        config._attn_implementation = self.config._attn_implementation
        config._experts_implementation = self.config._experts_implementation
        self.config = config
        layers = [layer_config(config, index) for index in range(config.num_hidden_layers)]
        self.layers = nn.ModuleList(ChildLayer(make(each, index), each) for index, each in enumerate(layers))
        # Called with a layer's number and what came out of it, outside of what a checkpointed layer runs again.
        self.watch: Callable[[int, Tensor], None] | None = None
        self.post_init()

    def _same_attention(self) -> None:
        """Let every layer attend as the model's config says; layers hold configs of their own."""
        name = self.config._attn_implementation
        for layer in self.layers:
            if layer.config._attn_implementation != name:
                layer.config._attn_implementation = name

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> MoeModelOutputWithPast:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give one of `input_ids` and `inputs_embeds`.")
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        if position_ids is None:
            start = cache.get_seq_length() if cache is not None else 0
            position_ids = (torch.arange(hidden.shape[1], device=hidden.device) + start)[None]
        self._same_attention()
        masks = causal_masks(self.layers, hidden, attention_mask, cache, position_ids)
        position_embeddings = self.rotary_emb(hidden, position_ids)
        for index, layer in enumerate(self.layers):
            hidden = layer(
                hidden,
                attention_mask=masks.get(layer.window),
                position_embeddings=position_embeddings,
                position_ids=position_ids,
                cache=cache,
                use_cache=use_cache,
                **kwargs,
            )
            if self.watch is not None:
                self.watch(index, hidden)
        return MoeModelOutputWithPast(last_hidden_state=self.norm(hidden), cache=cache if use_cache else None)


def causal_masks(
    layers: Iterable[ChildLayer], hidden: Tensor, attention_mask: Any, cache: Any, position_ids: Tensor
) -> dict[int | None, Any]:
    """Return the causal mask for each window that `layers` have, None for no window."""
    if isinstance(attention_mask, dict):
        raise ValueError("a child makes its masks itself; give a 2-D `attention_mask`.")
    masks: dict[int | None, Any] = {}
    for index, layer in enumerate(layers):
        if layer.config._attn_implementation is None:
            raise ValueError(f"layer {index} does not say how it attends, and would see later tokens.")
        if layer.attends and layer.window not in masks:
            create = create_causal_mask if layer.window is None else create_sliding_window_causal_mask
            masks[layer.window] = create(
                config=layer.config,
                inputs_embeds=hidden,
                attention_mask=attention_mask,
                cache=cache,
                position_ids=position_ids,
                layer_idx=index,
            )
    return masks


class _CausalLM:
    """The decoder with its head; comes before the parent's class among the bases."""

    def __init__(self, config: Any) -> None:
        super().__init__(_uniform(config))
        self.model = backbone_class(config.parent_type)(config)
        self.config = config
        self.post_init()


def layer_config(config: Any, index: int) -> Any:
    """Return the config of layer `index`, with the attention of the whole (a copy alone would lose its causal mask)."""
    layer = copy.copy(config.per_layer_config[index])
    layer._attn_implementation_internal = config._attn_implementation
    layer._experts_implementation_internal = config._experts_implementation
    return layer


def one_layer(config: Any) -> Any:
    """Return a decoder of `config`'s family (a parent's config) with one layer, which holds no memory."""
    with torch.device("meta"):
        return MODEL_MAPPING[type(config)](_uniform(config))


def _uniform(config: Any) -> Any:
    """Return a config of one layer without differences, by which the parent's classes make everything else."""
    uniform = copy.deepcopy(config)
    uniform.per_layer_config = None
    uniform.num_hidden_layers = 1
    uniform.layer_types = ["full_attention"]
    return uniform


@functools.cache
def config_class(parent_type: str) -> Any:
    """Return the config class of children of `parent_type`, known to transformers from then on."""
    base = CONFIG_MAPPING[parent_type]
    body = {"model_type": MODEL_TYPE, "__module__": __name__, "__doc__": f"The config of a child of a {parent_type}."}
    made = type(f"Child{base.__name__}", (base,), body)
    AutoModelForCausalLM.register(made, _model_class(parent_type, made), exist_ok=True)
    AutoModel.register(made, _backbone_class(parent_type, made), exist_ok=True)
    return made


def model_class(parent_type: str) -> Any:
    """Return the class of children of `parent_type` with a head."""
    return MODEL_FOR_CAUSAL_LM_MAPPING[config_class(parent_type)]


def backbone_class(parent_type: str) -> Any:
    """Return the class of children of `parent_type` without a head."""
    return MODEL_MAPPING[config_class(parent_type)]


def _model_class(parent_type: str, config: Any) -> Any:
    base = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[parent_type]]
    return _made(base, _CausalLM, config)


def _backbone_class(parent_type: str, config: Any) -> Any:
    base = MODEL_MAPPING[CONFIG_MAPPING[parent_type]]
    recorded = {**(base._can_record_outputs or {}), "hidden_states": ChildLayer}
    return _made(base, _Backbone, config, _can_record_outputs=recorded)


def _made(base: Any, mixin: type, config: Any, **body: Any) -> Any:
    body |= {
        "config_class": config,
        "__module__": __name__,
        "__doc__": f"A child of a {base.__name__}.",
        "_no_split_modules": ["ChildLayer"],
    }
    made = type(f"Child{base.__name__}", (mixin, base), body)
    setattr(sys.modules[__name__], made.__name__, made)
    return made


def child_config(parent: Any, layers: dict[int, dict[str, Any]]) -> Any:
    """Return the config of a child of a model with config `parent`.

    Args:
        parent: Of a decoder alone.
        layers: By index, what each layer has otherwise than the parent, as `per_layer_config`.
    """
    tree = parent.to_dict()
    for name in ("model_type", "architectures", "per_layer_config", "transformers_version", "auto_map"):
        tree.pop(name, None)
    if tree.get("sliding_window") is None:
        tree["sliding_window"] = None
    tree["parent_layer_types"] = tree.get("layer_types")
    merged = {index: dict(layers.get(index, {})) for index in range(parent.num_hidden_layers)}
    tree["layer_types"] = [_layer_type(parent, index, each) for index, each in merged.items()]
    config = config_class(parent.model_type)(**tree, parent_type=parent.model_type, replace_with_linear=[])
    config.per_layer_config = {index: each for index, each in merged.items() if each}
    config._attn_implementation = parent._attn_implementation
    config._experts_implementation = parent._experts_implementation
    return config


def parent_config(config: Any) -> Any:
    """Return the config of the parent of a child with config `config`."""
    tree, base = config.to_dict(), CONFIG_MAPPING[config.parent_type]
    tree["layer_types"] = tree.pop("parent_layer_types")
    ours = ("model_type", "architectures", "per_layer_config", "auto_map", "parent_type", "replace_with_linear")
    for name in (*ours, *(each for each in ("layer_types", "sliding_window") if not hasattr(base, each))):
        tree.pop(name, None)
    return base(**tree)


def _layer_type(parent: Any, index: int, layer: dict[str, Any]) -> str:
    if "attention" in layer.get("skip", []) or "attention" in layer.get("replace_with_linear", []):
        return _NO_CACHE
    window = layer.get("sliding_window", getattr(parent, "sliding_window", None))
    kinds = getattr(parent, "layer_types", None)
    if "sliding_window" not in layer and kinds is not None and "sliding" not in kinds[index]:
        window = None
    return "full_attention" if window is None else "sliding_attention"


def register() -> None:
    """Let transformers' Auto classes open children."""
    AutoConfig.register(MODEL_TYPE, Child, exist_ok=True)


register()
