"""The sub-blocks of a parent's layers, found in its module tree and tried on numbers."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, PreTrainedModel

from planish.compress.space import (
    Beside,
    KeepExperts,
    KeepHeads,
    LayerSpace,
    Menu,
    Mixture,
    SlidingWindow,
    Space,
    Width,
    attention_options,
    ffn_options,
)
from planish.errors import UsageError
from planish.models.anatomy import Anatomy, find
from planish.models.load import text_config

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_FFN = ("gate_proj", "up_proj", "down_proj")
_MIXTURE = {"gate.weight", "experts.gate_up_proj", "experts.down_proj"}
_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParts:
    """One layer of a parent.

    Attributes:
        name: The layer's path in the model.
        layer: The layer.
        attention: With q_proj, k_proj, v_proj and o_proj.
        ffn: With gate_proj, up_proj and down_proj, or a mixture of experts.
        norm_attention: Before attention.
        norm_ffn: Before the feed-forward network.
        num_heads: Query heads.
        kv_heads: Heads of keys and values.
        head_dim: Width of one head.
        window: Tokens that attention sees; None: all before.
        parent_ffn: The network or mixture as an option.
        top_k: Experts that a mixture sends a token to, where planish can cut it, else None.
    """

    name: str
    layer: nn.Module
    attention: nn.Module
    ffn: nn.Module
    norm_attention: nn.Module
    norm_ffn: nn.Module
    num_heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    parent_ffn: Width | KeepExperts
    top_k: int | None

    @property
    def parent_attention(self) -> KeepHeads | SlidingWindow:
        """Its attention as an option."""
        if self.window is None:
            return KeepHeads(kv_heads=self.kv_heads)
        return SlidingWindow(window=self.window, kv_heads=self.kv_heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A parent and its layers."""

    anatomy: Anatomy
    layers: tuple[LayerParts, ...]

    @property
    def model(self) -> PreTrainedModel:
        """The parent."""
        return self.anatomy.model


def find_parts(model: PreTrainedModel) -> Parts:
    """Return the sub-blocks of every layer of `model`.

    Raises:
        UsageError: Layers of another make than norm, attention, norm, network on a plain residual stream.
    """
    anatomy = find(model)
    windows = layer_windows(model, len(anatomy.layers))
    pairs = zip(anatomy.layers.items(), windows, strict=True)
    layers = tuple(_layer_parts(name, layer, window) for (name, layer), window in pairs)
    _try(text_config(model.config))
    return Parts(anatomy=anatomy, layers=layers)


def discover(model: PreTrainedModel, menu: Menu | None = None) -> Space:
    """Return what the children of `model` may be, read off its module tree.

    Args:
        model: A transformers causal LM of Llama's make (Mistral, Qwen, Mixtral, ...). Mixtures of anything but a router
            and gated experts without biases stay whole.
        menu: The options; default: `Menu()`.

    Raises:
        UsageError: As `find_parts`; options that the model cannot have.
    """
    parts, menu = find_parts(model), menu or Menu()
    layers = tuple(
        LayerSpace(
            attention=attention_options(each.parent_attention, menu),
            ffn=ffn_options(each.parent_ffn, menu, top_k=each.top_k),
        )
        for each in parts.layers
    )
    head = parts.anatomy.head
    return Space(
        layers=layers,
        hidden_size=parts.anatomy.hidden_size,
        num_heads=parts.layers[0].num_heads,
        head_dim=parts.layers[0].head_dim,
        vocab_size=head.weight.shape[0],
        tied=head.weight is model.get_input_embeddings().weight,
        mixture=_mixture(parts),
        beside=_beside(parts),
    )


def _mixture(parts: Parts) -> Mixture | None:
    """Return what mixtures have in common, None where layers have none."""
    for layer in parts.layers:
        if isinstance(layer.parent_ffn, KeepExperts):
            config = text_config(parts.model.config)
            D, option = parts.anatomy.hidden_size, layer.parent_ffn
            routed = option.experts * (3 * D * option.width + D)
            return Mixture(top_k=config.num_experts_per_tok, beside=_numbers(layer.ffn, layer.norm_ffn) - routed)
    return None


def _numbers(*modules: nn.Module) -> int:
    return sum(param.numel() for module in modules for param in module.parameters())


def _beside(parts: Parts) -> Beside | None:
    """Return the numbers beside the matrices of Llama's make, None where there are none."""
    first = parts.layers[0]
    shared = first.kv_heads * first.head_dim
    kv_head = attention = ffn = channel = 0
    for name, param in first.attention.named_parameters():
        if name.removesuffix(".weight") in _ATTENTION:
            continue
        each_head = name.startswith(("k_", "v_")) and param.numel() == shared and first.kv_heads > 1
        kv_head += first.head_dim if each_head else 0
        attention += 0 if each_head else param.numel()
    for layer in parts.layers:
        if isinstance(layer.parent_ffn, Width):
            biases = {name: param for name, param in layer.ffn.named_parameters() if name.endswith(".bias")}
            channel = sum(not name.startswith("down") for name in biases)
            ffn = sum(param.numel() for name, param in biases.items() if name.startswith("down"))
            break
    found = Beside(attention=attention, kv_head=kv_head, ffn=ffn, channel=channel)
    return None if found == Beside() else found


def layer_windows(model: PreTrainedModel, count: int) -> list[int | None]:
    """Return the tokens that each layer's attention sees, None for all before."""
    config = text_config(model.config)
    found: list[int | None] = []
    for index in range(count):
        layer: Any = config.per_layer_config[index]
        kinds = getattr(layer, "layer_types", None)
        slides = kinds is None or "sliding" in kinds[index]
        found.append(getattr(layer, "sliding_window", None) if slides else None)
    return found


def _layer_parts(name: str, layer: nn.Module, window: int | None) -> LayerParts:
    parts = dict(layer.named_children())
    kind = type(layer).__name__
    if set(parts) != _LAYER:
        raise UsageError(
            f"`model.from`: {kind} has {', '.join(sorted(parts))}; planish compresses layers made of "
            f"{', '.join(sorted(_LAYER))} (Llama, Mistral, Qwen, Mixtral)."
        )
    attention, ffn = parts["self_attn"], parts["mlp"]
    missing = [each for each in _ATTENTION if not isinstance(getattr(attention, each, None), nn.Linear)]
    if missing:
        raise UsageError(f"`model.from`: {type(attention).__name__} has no linear {missing[0]}; it cannot be cut.")
    dense = all(isinstance(getattr(ffn, each, None), nn.Linear) for each in _FFN)
    if not dense and "experts" not in dict(ffn.named_children()):
        raise UsageError(
            f"`model.from`: {type(ffn).__name__} is no gated network and no mixture of experts; planish cannot cut it."
        )
    head_dim = attention.head_dim
    return LayerParts(
        name=name,
        layer=layer,
        attention=attention,
        ffn=ffn,
        norm_attention=parts["input_layernorm"],
        norm_ffn=parts["post_attention_layernorm"],
        num_heads=attention.q_proj.out_features // head_dim,
        kv_heads=attention.k_proj.out_features // head_dim,
        head_dim=head_dim,
        window=window,
        parent_ffn=Width(width=ffn.down_proj.in_features) if dense else _experts_of(ffn),
        top_k=None if dense else _top_k(ffn),
    )


def _experts_of(mixture: Any) -> KeepExperts:
    experts = mixture.experts
    width = experts.down_proj.shape[1 if experts.is_transposed else 2]
    return KeepExperts(experts=experts.down_proj.shape[0], width=width)


def _top_k(mixture: Any) -> int | None:
    """Return the experts that a token is sent to, where a router and gated experts are all there is, else None."""
    experts = mixture.experts
    known = {name for name, _ in mixture.named_parameters()} == _MIXTURE
    return mixture.gate.top_k if known and experts.is_concatenated and not experts.is_transposed else None


@torch.no_grad()
def _try(config: Any) -> None:
    """Refuse a family that computes something else than its parts say, on a model of one small layer."""
    config = copy.deepcopy(config)
    config.update({"num_hidden_layers": 1, "vocab_size": 8, "pad_token_id": None, "intermediate_size": 8})
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = config.layer_types[:1]
    with torch.random.fork_rng(devices=[]):
        backbone: Any = AutoModel.from_config(config, dtype=torch.float32).eval()
    layer, seen = backbone.layers[0], {}
    hooks = [
        layer.register_forward_pre_hook(lambda _, args, kwargs: seen.update(kwargs, first=args[0]), with_kwargs=True),
        layer.register_forward_hook(lambda _, __, output: seen.update(last=output)),
    ]
    ids = torch.arange(4)[None]
    output = backbone(input_ids=ids, use_cache=False).last_hidden_state
    for hook in hooks:
        hook.remove()
    x, expected = seen.pop("first"), seen.pop("last")
    if not torch.equal(x, backbone.embed_tokens(ids)) or not torch.equal(output, backbone.norm(expected)):
        raise UsageError(
            f"`model.from`: {type(backbone).__name__} does more than embedding, layers and norm (multipliers); planish "
            "cannot cut it."
        )
    parts = _layer_parts("", layer, None)
    h = x + parts.attention(hidden_states=parts.norm_attention(x), **seen)[0]
    if not torch.equal(expected, h + parts.ffn(parts.norm_ffn(h))):
        raise UsageError(
            f"`model.from`: {type(layer).__name__} does not add attention and network to a plain residual stream "
            "(multipliers, norms elsewhere); planish cannot cut it."
        )
    ffn: Any = parts.ffn
    if parts.top_k is not None:
        _, scores, ids = ffn.gate(x[0])
        if not torch.equal(ffn(x)[0], ffn.experts(x[0], ids, scores)):
            raise UsageError(
                f"`model.from`: {type(ffn).__name__} is more than a router and experts; planish cannot cut it."
            )
    if isinstance(parts.parent_ffn, Width) and not torch.equal(
        ffn(x), ffn.down_proj(ffn.act_fn(ffn.gate_proj(x)) * ffn.up_proj(x))
    ):
        raise UsageError(
            f"`model.from`: {type(ffn).__name__} is no gated network, down(act(gate) * up); planish cannot cut it."
        )
