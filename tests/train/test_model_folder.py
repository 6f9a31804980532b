import errno
import json

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DeepseekV3Config,
    GemmaConfig,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
)

from planish.train.model_folder import config_difference, weights_of, write_model

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "llama tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "gemma tied": GemmaConfig(**SIZES),
    "qwen3 moe": Qwen3MoeConfig(**SIZES, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4),
    "gpt-oss": GptOssConfig(**SIZES, num_local_experts=4, layer_types=["full_attention"] * 3),
    "deepseek v3": DeepseekV3Config(
        **(SIZES | {"num_key_value_heads": 4}),
        **LATENT,
        moe_intermediate_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
    ),
}


def build(name, dtype=torch.float32):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=dtype)
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_floating_point():
            tensor.data.normal_()  # biases and norms too, so that no two tensors are alike
    return model


def build_tokenizer(size=48):
    words = models.WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), unk_token="w0")


def saved_tensors(folder):
    return {name: each for path in folder.glob("*.safetensors") for name, each in load_file(path).items()}


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype, name
        assert torch.equal(left[name], right[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_from_pretrained_opens_the_same_bits(tmp_path, name, dtype):
    model = build(name, dtype)
    write_model(tmp_path / "ours", model, build_tokenizer())
    model.save_pretrained(tmp_path / "theirs")
    assert_same(saved_tensors(tmp_path / "ours"), saved_tensors(tmp_path / "theirs"))
    for file in ("config.json", "generation_config.json"):
        assert (tmp_path / "ours" / file).read_text() == (tmp_path / "theirs" / file).read_text()
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert type(opened) is type(model)
    assert_same(opened.state_dict(), model.state_dict())
    assert config_difference(opened, tmp_path / "ours") is None
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert tokenizer.get_vocab() == build_tokenizer().get_vocab()


@pytest.mark.parametrize("name", ["llama", "qwen3 moe"])
def test_a_model_that_was_opened_is_written_the_same(tmp_path, name):
    write_model(tmp_path / "first", build(name), None)
    write_model(tmp_path / "second", AutoModelForCausalLM.from_pretrained(tmp_path / "first"), None)
    assert_same(saved_tensors(tmp_path / "first"), saved_tensors(tmp_path / "second"))


def test_weights_that_are_not_converted_are_named(tmp_path):
    model = build("llama tied")
    assert write_model(tmp_path, model, None) == {name: name for name in weights_of(model)}
    assert "lm_head.weight" not in weights_of(model)
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["model.safetensors"]


def test_converted_weights_are_not_named_and_layers_are_files(tmp_path):
    model = build("qwen3 moe")
    stored = write_model(tmp_path, model, None)
    converted = weights_of(model).keys() - stored.keys()
    assert converted == {
        f"model.layers.{i}.mlp.experts.{each}" for i in range(3) for each in ("gate_up_proj", "down_proj")
    }
    weight_map = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(weight_map.values())) == 4
    for name, file in weight_map.items():
        assert name in load_file(tmp_path / file)
    saved = saved_tensors(tmp_path)
    assert all(torch.equal(saved[there], weights_of(model)[here]) for here, there in stored.items())


def test_parameters_in_one_buffer_are_written_and_not_copied(tmp_path):
    model = build("llama tied")
    weights = weights_of(model)
    buffer = torch.empty(sum(each.numel() for each in weights.values()))
    place = 0
    for param in model.parameters():
        part = buffer[place : place + param.numel()].view(param.shape)
        place += param.numel()
        part.copy_(param.data)
        param.data = part
    assert {each.untyped_storage().data_ptr() for each in weights_of(model).values()} == {buffer.data_ptr()}
    write_model(tmp_path, model, None)
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path).state_dict(), model.state_dict())


def test_saving_leaves_the_model_as_it_was(tmp_path):
    model = build("llama")
    before = model.config.to_dict()
    write_model(tmp_path, model, None)
    assert model.config.to_dict() == before


def test_a_config_that_differs_is_named(tmp_path):
    write_model(tmp_path, build("llama"), None)
    config = AutoConfig.from_pretrained(tmp_path)
    config.rms_norm_eps = 0.5
    other = AutoModelForCausalLM.from_config(config)
    assert config_difference(other, tmp_path) == "`rms_norm_eps` of its config is 1e-06 in the checkpoint and 0.5 here"


def test_saving_holds_one_layer_of_converted_weights(tmp_path, peak_above_bytes):
    experts = {"num_experts": 16, "moe_intermediate_size": 256, "num_experts_per_tok": 2}
    config = Qwen3MoeConfig(**(SIZES | experts | {"hidden_size": 512, "num_hidden_layers": 6}))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    small = build("qwen3 moe")
    layer_bytes = sum(each.nbytes for each in model.model.layers[0].parameters())  # 24 MiB
    ours = peak_above_bytes(
        lambda: write_model(tmp_path / "ours", model, None), lambda: write_model(tmp_path / "small", small, None)
    )
    theirs = peak_above_bytes(
        lambda: model.save_pretrained(tmp_path / "theirs"), lambda: small.save_pretrained(tmp_path / "little")
    )
    assert ours < layer_bytes
    assert theirs > 3 * layer_bytes  # why `save_pretrained` is not used


class FullDisk:
    """A tokenizer whose library reports the disk as the tokenizers package does."""

    def save_pretrained(self, folder):
        raise Exception("No space left on device (os error 28)")


def test_the_tokenizers_full_disk_is_an_os_error(tmp_path):
    with pytest.raises(OSError, match="No space left") as caught:
        write_model(tmp_path, build("llama"), FullDisk())
    assert caught.value.errno == errno.ENOSPC
