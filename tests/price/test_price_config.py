"""What a config.json says is what transformers builds from it: every parameter, counted without either library."""

import json
import re
from collections import Counter

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma3TextConfig,
    GptOssConfig,
    GraniteMoeConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    OlmoeConfig,
    Qwen2Config,
)

from planish.errors import UsageError
from planish.price.config import read_config

# Sizes as published, and the number of parameters of the checkpoints.
PUBLIC = {
    "Llama-3.1-8B": (
        {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
        8_030_261_248,
        8_030_261_248,
    ),
    "Llama-3.2-1B": (
        {"model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True},
        1_235_814_400,
        1_235_814_400,
    ),
    "SmolLM2-135M": (
        {"model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
        | {"num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True},
        134_515_008,
        134_515_008,
    ),
    "Mistral-Small-24B": (
        {"model_type": "mistral", "hidden_size": 5120, "intermediate_size": 32768, "num_hidden_layers": 40}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072}
        | {"sliding_window": None},
        23_572_403_200,
        23_572_403_200,
    ),
    "Qwen2.5-7B": (
        {"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28}
        | {"num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064}
        | {"use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 28},
        7_615_616_512,
        7_615_616_512,
    ),
    "Qwen3-32B": (
        {"model_type": "qwen3", "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64}
        | {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
        32_762_123_264,
        32_762_123_264,
    ),
    "Qwen3-30B-A3B": (
        {"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768}
        | {"num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
        | {"vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1},
        30_532_122_624,
        3_353_032_704,
    ),
    "Mixtral-8x7B": (
        {"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000}
        | {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
        46_702_792_704,
        12_879_925_248,
    ),
    "OLMoE-1B-7B": (
        {"model_type": "olmoe", "hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 16}
        | {"num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 50304}
        | {"num_experts": 64, "num_experts_per_tok": 8},
        6_919_161_856,
        1_282_017_280,
    ),
    "DeepSeek-V2-Lite": (
        {"model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944, "num_hidden_layers": 27}
        | {"num_attention_heads": 16, "vocab_size": 102400, "moe_intermediate_size": 1408, "n_routed_experts": 64}
        | {"num_experts_per_tok": 6, "n_shared_experts": 2, "first_k_dense_replace": 1, "q_lora_rank": None}
        | {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
        15_706_484_224,
        2_661_150_208,
    ),
    "DeepSeek-V3": (
        {"model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61}
        | {"num_attention_heads": 128, "vocab_size": 129280, "moe_intermediate_size": 2048, "n_routed_experts": 256}
        | {"num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 3, "q_lora_rank": 1536}
        | {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
        671_026_404_352,
        37_552_282_624,
    ),
    "gpt-oss-20b": (
        {"model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24}
        | {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088}
        | {"num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128},
        20_914_757_184,
        4_187_440_704,
    ),
    "Gemma-2-2B": (  # says neither head_dim nor whether the head is tied as Llama would
        {"model_type": "gemma2", "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26}
        | {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 256000, "sliding_window": 4096}
        | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        2_614_341_888,
        2_614_341_888,
    ),
    "Gemma-3-4B, inside its multimodal config": (
        {
            "model_type": "gemma3",
            "text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240}
            | {"num_hidden_layers": 34, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
            | {"vocab_size": 262208, "sliding_window": 1024, "sliding_window_pattern": 6},
        },
        3_880_263_168,
        3_880_263_168,
    ),
}

SIZES = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "pad_token_id": None}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None}
LATENT = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 6}
ROUTED = {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
BUILT = {
    "llama": LlamaConfig(**SIZES, **HEADS, attention_bias=True, mlp_bias=True, head_dim=8),
    "llama tied": LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=True),
    "mistral": MistralConfig(**SIZES, **HEADS, head_dim=16, sliding_window=8),
    "qwen2": Qwen2Config(**SIZES, **HEADS, use_sliding_window=True, sliding_window=8, max_window_layers=2),
    "mixtral": MixtralConfig(**SIZES, **HEADS, num_local_experts=4),
    "olmoe": OlmoeConfig(**SIZES, **HEADS, num_experts=4),
    "olmo2": Olmo2Config(**SIZES, **HEADS),
    "gemma3": Gemma3TextConfig(**SIZES, **HEADS, head_dim=8, sliding_window=8),
    "cohere": CohereConfig(**SIZES, **HEADS, use_qk_norm=True),
    "granite moe": GraniteMoeConfig(**SIZES, **HEADS, num_local_experts=4, num_experts_per_tok=2),
    "gpt-oss": GptOssConfig(**SIZES, **HEADS, head_dim=8, num_local_experts=4, sliding_window=8),
    "deepseek v2": DeepseekV2Config(**SIZES, **HEADS, **LATENT, **ROUTED, q_lora_rank=None),
    "deepseek v3": DeepseekV3Config(**SIZES, **HEADS, **LATENT, **ROUTED, q_lora_rank=16, n_group=2, topk_group=1),
}


def built_tensors(model):
    return Counter((re.sub(r"\b\d+\b", "*", name), tuple(each.shape)) for name, each in model.named_parameters())


@pytest.mark.parametrize("name", PUBLIC)
def test_published_models_have_their_published_parameters(name):
    config, num_parameters, num_active = PUBLIC[name]
    shape = read_config(config)
    assert shape.num_parameters == num_parameters
    assert shape.num_active_parameters == num_active
    assert shape.assumed == ()


@pytest.mark.parametrize("name", BUILT)
def test_every_tensor_is_the_one_that_transformers_builds(name, tmp_path):
    config = BUILT[name]
    config.save_pretrained(tmp_path)
    shape = read_config(json.loads((tmp_path / "config.json").read_text()))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert Counter({(each.name, each.shape): each.count for each in shape.tensors}) == built_tensors(model)
    kinds = getattr(config, "layer_types", None)
    if kinds:
        windows = [config.sliding_window if "sliding" in kind else None for kind in kinds]
        assert [layer.attention.window for layer in shape.layers] == windows


def test_a_window_follows_the_family():
    gemma2, gemma3, gpt = (read_config(PUBLIC[name][0]) for name in ("Gemma-2-2B", list(PUBLIC)[-1], "gpt-oss-20b"))
    assert [layer.attention.window for layer in gemma2.layers[:4]] == [4096, None, 4096, None]
    assert [layer.attention.window for layer in gemma3.layers[:7]] == [1024] * 5 + [None, 1024]
    assert [layer.attention.window for layer in gpt.layers[:2]] == [128, None]
    assert gpt.layers[0].attention.sinks
    assert gemma2.layers[0].attention.softcapped
    assert {layer.attention.window for layer in read_config(PUBLIC["Qwen2.5-7B"][0]).layers} == {None}


def test_an_unknown_model_type_says_what_was_assumed():
    config = PUBLIC["Llama-3.1-8B"][0] | {"model_type": "llama9"}
    shape = read_config(config)
    assert shape.num_parameters == 8_030_261_248
    assert "'llama9'" in shape.assumed[0]


@pytest.mark.parametrize("value", [0, -3, None, "many", True])
def test_a_size_that_is_none_is_refused_by_name(value):
    with pytest.raises(UsageError, match="`hidden_size` of the model's config must be a positive whole number"):
        read_config(PUBLIC["Llama-3.1-8B"][0] | {"hidden_size": value})
