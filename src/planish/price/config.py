"""Reads a transformers config.json without transformers: the sizes of every layer and the shape of every parameter."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from planish.errors import UsageError
from planish.price import hybrid
from planish.price.families import FAMILIES, LLAMA
from planish.price.hybrid import Named, gated, linear
from planish.shapes import AttentionShape, ExpertsShape, LatentShape, LayerShape, ModelShape, TensorShape

_GATED = ("gate_proj", "up_proj", "down_proj")


def read_config(config: Mapping[str, Any]) -> ModelShape:
    """Return the sizes that the tree of a config.json names.

    Raises:
        UsageError: A size that is missing or not a positive whole number.
    """
    reader = _Reader(config)
    latent = reader.latent()
    layers = tuple(reader.layer(index, latent) for index in range(reader.size("num_hidden_layers")))
    tied = bool(reader.get("tie_word_embeddings", reader.family.tied))
    return ModelShape(
        model_type=reader.model_type,
        hidden_size=reader.size("hidden_size"),
        vocab_size=reader.size("vocab_size"),
        layers=layers,
        tied=tied,
        latent=latent,
        logit_softcap=reader.get("final_logit_softcapping"),
        max_positions=reader.get("max_position_embeddings"),
        tensors=tuple(_merge(reader.tensors(layers, latent, tied=tied))),
        assumed=tuple(reader.assumed),
        hidden_act=next(filter(None, map(reader.get, _ACTIVATIONS)), None),
    )


_ACTIVATIONS = ("hidden_act", "mlp_hidden_act", "activation_function", "hidden_activation")


class _Reader:
    """Reads one config; notes what it had to assume."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        text = config.get("text_config")
        self._config = text if isinstance(text, Mapping) and "hidden_size" not in config else config
        self.model_type = str(self._config.get("model_type", config.get("model_type", "unknown")))
        self.assumed: list[str] = []
        self.family = FAMILIES.get(self.model_type, LLAMA)
        if self.model_type not in FAMILIES:
            self.assumed.append(f"model type {self.model_type!r} is not known; its layers are taken to be Llama's.")

    def get(self, key: str, default: Any = None) -> Any:
        """Return what the config says; `default` where it is silent (null is an answer)."""
        return self._config.get(key, default)

    def size(self, key: str, default: int | None = None) -> int:
        value = self._config.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UsageError(f"`{key}` of the model's config must be a positive whole number, got {value!r}.")
        return value

    def first(self, *keys: str) -> int:
        """Return the first of `keys` that is there, 0 where none is."""
        return next((self.size(key) for key in keys if self._config.get(key)), 0)

    def latent(self) -> LatentShape | None:
        if self.model_type not in ("deepseek_v2", "deepseek_v3") and self.get("kv_lora_rank") is None:
            return None
        return LatentShape(
            q_rank=self.get("q_lora_rank", 1536),
            kv_rank=self.size("kv_lora_rank", 512),
            rope_width=self.size("qk_rope_head_dim", 64),
        )

    def layer(self, index: int, latent: LatentShape | None) -> LayerShape:
        heads = self.size("num_attention_heads")
        if latent is None:
            kv_heads = self.size("num_key_value_heads", heads)
            width = self.size("head_dim", self.family.head_dim or max(1, self.size("hidden_size") // heads))
            qk_width, v_width = width, width
        else:
            kv_heads = heads
            qk_width = self.size("qk_nope_head_dim", 128) + latent.rope_width
            v_width = self.size("v_head_dim", 128)
        attention = AttentionShape(
            num_heads=heads,
            num_kv_heads=kv_heads,
            qk_width=qk_width,
            v_width=v_width,
            window=self.window(index),
            softcapped=self.get("attn_logit_softcapping") is not None,
            sinks=self.family.is_gpt_oss,
        )
        return LayerShape(attention=attention, ffn=self.ffn(index), linear=self.is_linear(index))

    def is_linear(self, index: int) -> bool:
        """Return whether a recurrent mixer stands where other layers have attention."""
        if self.model_type == "nemotron_h":
            return hybrid.pattern(self._config)[index] == "M"
        kinds, every = self.get("layer_types"), self.get("full_attention_interval", self.family.full_every or 1)
        return bool(self.family.linear) and (
            "linear" in kinds[index] if kinds is not None else (index + 1) % every != 0
        )

    def window(self, index: int) -> int | None:
        """Return a layer's window, as `layer_types`, the family's pattern, Qwen's switch or Mistral's rule says."""
        window, kinds = self.get("sliding_window"), self.get("layer_types")
        every = self.get("sliding_window_pattern", self.family.full_every)
        if kinds is not None:
            slides = "sliding" in kinds[index]
        elif every is not None:
            slides = (index + 1) % every != 0
        elif "use_sliding_window" in self._config:
            slides = bool(self.get("use_sliding_window")) and index >= self.get("max_window_layers", 0)
        else:
            slides = True
        return window if slides else None

    def ffn(self, index: int) -> int | ExpertsShape:
        if self.model_type == "nemotron_h":
            return hybrid.ffn(self._config, index)
        experts = self.first("num_experts", "num_local_experts", "n_routed_experts")
        dense = (
            index < (self.get("first_k_dense_replace") or 0)
            or index in (self.get("mlp_only_layers") or ())
            or (index + 1) % (self.get("decoder_sparse_step") or 1) != 0
        )
        if not experts or dense:
            return self.size("intermediate_size")
        width = self.first("moe_intermediate_size", "intermediate_size")
        return ExpertsShape(
            num_experts=experts,
            top_k=self.first("num_experts_per_tok"),
            width=width,
            shared_width=self.first("n_shared_experts") * width or self.first("shared_expert_intermediate_size"),
        )

    def tensors(
        self, layers: tuple[LayerShape, ...], latent: LatentShape | None, *, tied: bool
    ) -> Iterator[TensorShape]:
        """Yield every parameter, those of each layer under the same names."""
        vocab_size, hidden_size = self.size("vocab_size"), self.size("hidden_size")
        yield TensorShape(name="model.embed_tokens.weight", shape=(vocab_size, hidden_size))
        for layer in layers:
            named = hybrid.layer(self._config, layer) if self.model_type == "nemotron_h" else self._layer(layer, latent)
            for name, shape in named:
                yield TensorShape(name=f"model.layers.*.{name}", shape=shape)
        yield from (TensorShape(name=f"model.{name}", shape=shape) for name, shape in self._norm("norm"))
        if not tied:
            yield TensorShape(name="lm_head.weight", shape=(vocab_size, hidden_size))
            if self.get("lm_head_bias"):
                yield TensorShape(name="lm_head.bias", shape=(vocab_size,))

    def _layer(self, layer: LayerShape, latent: LatentShape | None) -> Named:
        if layer.linear:
            yield from hybrid.linear_attention(self._config, fused=self.model_type == "qwen3_next")
        else:
            yield from self._attention(layer.attention, latent)
        yield from self._ffn(layer.ffn)
        for norm in self.family.norms:
            yield from self._norm(norm)

    def _norm(self, name: str) -> Named:
        for part, there in (("weight", self.family.norm_weight), ("bias", self.family.norm_bias)):
            if there:
                yield f"{name}.{part}", (self.size("hidden_size"),)

    def _attention(self, attention: AttentionShape, latent: LatentShape | None) -> Named:
        hidden_size, heads, kv_heads = self.size("hidden_size"), attention.num_heads, attention.num_kv_heads
        config_bias = bool(self.get("attention_bias", False))
        o_bias = config_bias if self.family.o_bias is None else self.family.o_bias
        if latent is not None:
            yield from self._latent_attention(attention, latent, bias=config_bias)
        else:
            width = attention.qk_width
            gated = 2 if self.family.linear else 1  # the query's projection makes its gate too
            bias = config_bias if self.family.qkv_bias is None else self.family.qkv_bias
            for name, rows in (
                ("q_proj", heads * width * gated),
                ("k_proj", kv_heads * width),
                ("v_proj", kv_heads * width),
            ):
                yield from linear(f"self_attn.{name}", rows, hidden_size, bias=bias)
            norms = {"head": ((width,), (width,)), "projection": ((heads * width,), (kv_heads * width,))}
            asked = bool(self.get("use_qk_norm", False))
            norms["heads"] = ((heads, width), (kv_heads, width)) if asked else ()
            norms["asked"] = norms["head"] if asked else ()
            for name, shape in zip(("q_norm", "k_norm"), norms.get(self.family.qk_norm, ()), strict=False):
                yield f"self_attn.{name}.weight", shape
        if attention.sinks:
            yield "self_attn.sinks", (heads,)
        yield from linear("self_attn.o_proj", hidden_size, heads * attention.v_width, bias=o_bias)

    def _latent_attention(self, attention: AttentionShape, latent: LatentShape, *, bias: bool) -> Named:
        hidden_size, heads, width = self.size("hidden_size"), attention.num_heads, attention.qk_width
        if latent.q_rank is None:
            yield "self_attn.q_proj.weight", (heads * width, hidden_size)
        else:
            yield from linear("self_attn.q_a_proj", latent.q_rank, hidden_size, bias=bias)
            yield "self_attn.q_a_layernorm.weight", (latent.q_rank,)
            yield "self_attn.q_b_proj.weight", (heads * width, latent.q_rank)
        yield from linear("self_attn.kv_a_proj_with_mqa", latent.kv_rank + latent.rope_width, hidden_size, bias=bias)
        yield "self_attn.kv_a_layernorm.weight", (latent.kv_rank,)
        rows = heads * (width - latent.rope_width + attention.v_width)
        yield "self_attn.kv_b_proj.weight", (rows, latent.kv_rank)

    def _ffn(self, ffn: int | ExpertsShape) -> Named:
        hidden_size = self.size("hidden_size")
        if isinstance(ffn, int):
            yield from gated("mlp", self.family.mlp, ffn, hidden_size, bias=bool(self.get("mlp_bias", False)))
            return
        moe, experts, width = self.family.moe, ffn.num_experts, ffn.width
        yield from linear(f"{moe}.{self.family.router}", experts, hidden_size, bias=self.family.is_gpt_oss)
        if self.family.is_gpt_oss:
            yield f"{moe}.experts.gate_up_proj", (experts, hidden_size, 2 * width)
            yield f"{moe}.experts.gate_up_proj_bias", (experts, 2 * width)
            yield f"{moe}.experts.down_proj", (experts, width, hidden_size)
            yield f"{moe}.experts.down_proj_bias", (experts, hidden_size)
        else:
            yield f"{moe}.experts.gate_up_proj", (experts, 2 * width, hidden_size)
            yield f"{moe}.experts.down_proj", (experts, hidden_size, width)
        if ffn.shared_width:
            yield from gated(f"{moe}.{self.family.shared}", _GATED, ffn.shared_width, hidden_size, bias=False)
            if self.family.linear:
                yield f"{moe}.{self.family.shared}_gate.weight", (1, hidden_size)


def _merge(tensors: Iterator[TensorShape]) -> Iterator[TensorShape]:
    """Yield `tensors` with those of the same name and shape counted together."""
    counts: dict[TensorShape, int] = {}
    for each in tensors:
        counts[each] = counts.get(each, 0) + each.count
    return (replace(each, count=count) for each, count in counts.items())
