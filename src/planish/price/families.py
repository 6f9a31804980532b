"""What the class of a model type fixes and no config.json says."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What a model type's class fixes and its config.json does not say.

    Attributes:
        norms: Norms of a layer, each as wide as the hidden state.
        qk_norm: Norms on query and key: one "head" wide, as wide as the whole "projection", or for each of the "heads".
        qkv_bias: Whether query, key and value projections have a bias; None: as `attention_bias` says.
        o_bias: The same of the output projection.
        tied: Whether the head is the embedding where the config does not say.
        head_dim: Width of a head where the config does not say; None: hidden size / heads.
        full_every: Every how many-th layer sees the whole document, the others a window; None: by other rules.
        moe: Name of the feed-forward module of a mixture.
        router: Name of the router in it.
        is_gpt_oss: Experts with biases and transposed weights, sinks.
        norm_bias: Whether norms of hidden states have a bias.
        norm_weight: Whether they have a weight.
        mlp: Names of a dense feed-forward network's projections: all but the last read the hidden state.
        shared: Name of the expert that every token passes.
        linear: Name of the mixer that stands in for attention in some layers.
    """

    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    qk_norm: str = ""
    qkv_bias: bool | None = None
    o_bias: bool | None = None
    tied: bool = False
    head_dim: int | None = None
    full_every: int | None = None
    moe: str = "mlp"
    router: str = "gate"
    is_gpt_oss: bool = False
    norm_bias: bool = False
    norm_weight: bool = True
    mlp: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    shared: str = "shared_experts"
    linear: str = ""


LLAMA = Family()
_AROUND = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_GEMMA3 = Family(norms=_AROUND, qk_norm="head", tied=True, head_dim=256, full_every=6)
FAMILIES = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "mixtral": LLAMA,
    "granite": LLAMA,
    "granitemoe": Family(moe="block_sparse_moe", router="router"),
    "qwen2": Family(qkv_bias=True, o_bias=False),
    "qwen3": Family(qk_norm="head", head_dim=128),
    "qwen3_moe": Family(qk_norm="head"),
    "olmo2": Family(norms=("post_attention_layernorm", "post_feedforward_layernorm"), qk_norm="projection"),
    "olmoe": Family(qk_norm="projection"),
    "deepseek_v2": LLAMA,
    "deepseek_v3": LLAMA,
    "kimi_k2": LLAMA,
    "gpt_oss": Family(qkv_bias=True, o_bias=True, head_dim=64, full_every=2, router="router", is_gpt_oss=True),
    "gemma": Family(tied=True, head_dim=256),
    "gemma2": Family(norms=_AROUND, tied=True, head_dim=256, full_every=2),
    "gemma3_text": _GEMMA3,
    "gemma3": _GEMMA3,
    "nemotron": Family(norm_bias=True, mlp=("up_proj", "down_proj")),
    "nanochat": Family(norm_weight=False, mlp=("fc1", "fc2")),
    "phimoe": Family(norm_bias=True, router="router"),
    "glm4_moe": Family(o_bias=False, qk_norm="asked"),
    "qwen3_next": Family(qk_norm="head", head_dim=256, full_every=4, shared="shared_expert", linear="linear_attn"),
    "qwen3_5_moe_text": Family(
        qk_norm="head", head_dim=256, full_every=4, shared="shared_expert", linear="linear_attn"
    ),
    "nemotron_h": Family(mlp=("up_proj", "down_proj"), linear="mixer"),
    "cohere": Family(norms=("input_layernorm",), qk_norm="heads", tied=True),
}
