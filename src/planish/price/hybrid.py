"""Layers that are not attention followed by a feed-forward network: recurrent mixers, and Nemotron-H's single ones."""

from collections.abc import Iterator, Mapping
from typing import Any

from planish.shapes import ExpertsShape, LayerShape

Named = Iterator[tuple[str, tuple[int, ...]]]


def linear(name: str, rows: int, columns: int, *, bias: bool) -> Named:
    """Yield the tensors of a projection."""
    yield f"{name}.weight", (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)


def gated(name: str, parts: tuple[str, ...], width: int, hidden_size: int, *, bias: bool) -> Named:
    """Yield the tensors of a feed-forward network whose last part makes its output."""
    *inner, last = parts
    for part in inner:
        yield from linear(f"{name}.{part}", width, hidden_size, bias=bias)
    yield from linear(f"{name}.{last}", hidden_size, width, bias=bias)


def linear_attention(config: Mapping[str, Any], *, fused: bool) -> Named:
    """Yield the tensors of Qwen's gated delta rule; `fused`: query, key, value and gate come from one projection."""
    hidden_size, heads = config["hidden_size"], config["linear_num_value_heads"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = heads * config["linear_value_head_dim"]
    name = "linear_attn"
    yield f"{name}.dt_bias", (heads,)
    yield f"{name}.A_log", (heads,)
    yield f"{name}.conv1d.weight", (2 * keys + values, 1, config["linear_conv_kernel_dim"])
    if fused:
        parts = {"in_proj_qkvz": 2 * keys + 2 * values, "in_proj_ba": 2 * heads}
    else:
        parts = {"in_proj_qkv": 2 * keys + values, "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
    for part, rows in parts.items():
        yield f"{name}.{part}.weight", (rows, hidden_size)
    yield f"{name}.norm.weight", (config["linear_value_head_dim"],)
    yield f"{name}.out_proj.weight", (hidden_size, values)


def pattern(config: Mapping[str, Any]) -> str:
    """Return Nemotron-H's layers, a letter each: M recurrent, * attention, - feed-forward, E experts."""
    letters = {"mamba": "M", "attention": "*", "mlp": "-", "moe": "E"}
    kinds = config.get("layers_block_type")
    return "".join(letters[each] for each in kinds) if kinds else str(config["hybrid_override_pattern"])


def ffn(config: Mapping[str, Any], index: int) -> int | ExpertsShape:
    """Return the feed-forward network of one of Nemotron-H's layers; width 0 where it is a mixer."""
    match pattern(config)[index]:
        case "-":
            return int(config["intermediate_size"])
        case "E":
            return ExpertsShape(
                num_experts=config["n_routed_experts"],
                top_k=config["num_experts_per_tok"],
                width=config["moe_intermediate_size"],
                shared_width=config.get("moe_shared_expert_intermediate_size", 0),
            )
        case _:
            return 0


def layer(config: Mapping[str, Any], shape: LayerShape) -> Named:
    """Yield the tensors of one of Nemotron-H's layers: a norm, and one of four things."""
    hidden_size, attention = config["hidden_size"], shape.attention
    yield "norm.weight", (hidden_size,)
    if shape.linear:
        yield from _mamba(config)
    elif isinstance(shape.ffn, ExpertsShape):
        experts, width = shape.ffn.num_experts, shape.ffn.width
        yield "mixer.experts.up_proj", (experts, width, hidden_size)
        yield "mixer.experts.down_proj", (experts, hidden_size, width)
        yield "mixer.gate.weight", (experts, hidden_size)
        if shape.ffn.shared_width:
            yield from gated(
                "mixer.shared_experts", ("up_proj", "down_proj"), shape.ffn.shared_width, hidden_size, bias=False
            )
    elif shape.ffn:
        yield from gated("mixer", ("up_proj", "down_proj"), shape.ffn, hidden_size, bias=False)
    else:
        rows = attention.num_heads * attention.qk_width
        for name, width in (("q", rows), ("k", attention.num_kv_heads * attention.qk_width)):
            yield f"mixer.{name}_proj.weight", (width, hidden_size)
        yield "mixer.v_proj.weight", (attention.num_kv_heads * attention.v_width, hidden_size)
        yield "mixer.o_proj.weight", (hidden_size, rows)


def _mamba(config: Mapping[str, Any]) -> Named:
    heads = config["mamba_num_heads"]
    inner = heads * config["mamba_head_dim"]
    states = 2 * config["n_groups"] * config["ssm_state_size"]
    for name in ("dt_bias", "A_log", "D"):
        yield f"mixer.{name}", (heads,)
    yield "mixer.conv1d.weight", (inner + states, 1, config["conv_kernel"])
    yield "mixer.conv1d.bias", (inner + states,)
    yield "mixer.in_proj.weight", (2 * inner + states + heads, config["hidden_size"])
    yield "mixer.norm.weight", (inner,)
    yield "mixer.out_proj.weight", (config["hidden_size"], inner)
