"""Tiny random models of every family, and packed attention under a name of its own in transformers' interface."""

import pytest
import torch
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

import ranks
from planish.peaks.attention.packed import packed_attention

VOCAB = 64
WINDOW = 4
TOKENS = {"vocab_size": VOCAB, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6}
ROUTED = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
FAMILIES = {
    "llama": lambda: LlamaConfig(**TOKENS, **SIZES, **GROUPED),
    "qwen3": lambda: Qwen3Config(**TOKENS, **SIZES, **GROUPED),
    "qwen3-moe": lambda: Qwen3MoeConfig(**TOKENS, **SIZES, **GROUPED, **ROUTED, num_experts=4),
    "deepseek-v3": lambda: DeepseekV3Config(
        **TOKENS,
        **SIZES,
        **LATENT,
        **ROUTED,
        num_key_value_heads=4,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
    ),
    "gpt-oss": lambda: GptOssConfig(**TOKENS, **SIZES, **GROUPED, **LAYERS, num_local_experts=4, num_experts_per_tok=2),
    "gemma-2": lambda: Gemma2Config(
        **TOKENS, **SIZES, **GROUPED, **LAYERS, query_pre_attn_scalar=8, attn_logit_softcapping=2.0
    ),
    "gemma-3": lambda: Gemma3TextConfig(**TOKENS, **SIZES, **GROUPED, **LAYERS, query_pre_attn_scalar=8),
}


@pytest.fixture(scope="session")
def packed_name():
    """The name under which `packed_attention` stands in transformers' attention interface; it has no mask function."""
    AttentionInterface.register("planish-under-test", packed_attention)
    return "planish-under-test"


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="session")
def make_model(packed_name):
    """Return a tiny model of `family` with packed attention; weights are large enough for every part to matter."""

    def make(family, dtype=torch.float32, experts="eager"):
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(
            FAMILIES[family](), dtype=dtype, attn_implementation=packed_name, experts_implementation=experts
        )
        with torch.no_grad():
            for each in model.parameters():
                each.copy_(torch.randn(each.shape) * 0.2)
        return model.train()

    return make


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    """Four live processes; see `ranks.Ranks`."""
    found = ranks.Ranks(tmp_path_factory.mktemp("ranks"))
    yield found
    found.close()
