"""Small real models and text for every room's tests: drawn weights, a trained byte-level tokenizer, no network."""

from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from planish.train import predict

transformers.utils.logging.disable_progress_bar()

ENGLISH = Path(__file__).parents[1] / "src" / "planish" / "data" / "english.txt"
WIDTHS = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
SIGMOID = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "head_dim": 4,
    "v_head_dim": 8,
}
HYBRID = {
    "layers_block_type": ["attention", "moe"],
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "n_group": 2,
    "topk_group": 1,
    "mamba_num_heads": 2,
    "mamba_head_dim": 8,
}
FAMILIES = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {"sliding_window": 8}),
    "qwen3": ("Qwen3Config", {}),
    "qwen3-moe": ("Qwen3MoeConfig", EXPERTS),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2-moe": ("Qwen2MoeConfig", EXPERTS | {"shared_expert_intermediate_size": 24}),
    "olmoe": ("OlmoeConfig", {"num_experts": 4, "num_experts_per_tok": 2}),
    "deepseek-v3": ("DeepseekV3Config", LATENT | SIGMOID),
    "glm4-moe": ("Glm4MoeConfig", SIGMOID),
    "gpt-oss": ("GptOssConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "nemotron-h": ("NemotronHConfig", HYBRID),
    "gemma2": ("Gemma2Config", {"sliding_window": 8, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 8}),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": 8, "query_pre_attn_scalar": 8}),
    "granite": ("GraniteConfig", {"logits_scaling": 4.0}),
    "cohere": ("CohereConfig", {"logit_scale": 0.25}),
    "nemotron": ("NemotronConfig", {}),
}


@pytest.fixture(autouse=True, scope="session")
def tables_of_the_tests(tmp_path_factory):
    """Keep the tables of bytes that tests fit out of the user's cache, once for all tests of a session."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(predict, "cache_folder", lambda: folder)
        yield folder


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of 300 tokens over English."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([ENGLISH.read_text(encoding="utf-8")[:20000]], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")


@pytest.fixture(scope="session")
def tiny_model(tiny_tokenizer):
    """Return (family, **config) -> a tiny random causal LM of that family in float32."""

    def make(family: str = "llama", *, dtype=torch.float32, seed: int = 0, **changes):
        name, extra = FAMILIES[family]
        config = getattr(transformers, name)(**{"vocab_size": len(tiny_tokenizer), **WIDTHS, **extra, **changes})
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=dtype)

    return make


@pytest.fixture
def model_folder(tmp_path, tiny_model, tiny_tokenizer):
    """Return (family, **config) -> a folder with a tiny model and its tokenizer."""

    def make(family: str = "llama", **changes) -> Path:
        folder = tmp_path / f"model-{family}"
        tiny_model(family, **changes).save_pretrained(folder)
        tiny_tokenizer.save_pretrained(folder)
        return folder

    return make


@pytest.fixture
def text_file(tmp_path) -> Path:
    """Some English."""
    path = tmp_path / "text.txt"
    path.write_text(ENGLISH.read_text(encoding="utf-8")[20000:40000], encoding="utf-8")
    return path
