"""Every architecture that planish knows by name has the parameters that were published for it."""

import pytest

from planish.price.architectures import architectures, find_architecture
from planish.price.config import read_config
from planish.shapes import ExpertsShape

# All parameters, shared ones once; those that one token meets. From cards and checkpoints; where a checkpoint also
# holds layers for predicting further tokens, or a head stored twice, what transformers builds for training.
PUBLISHED = {
    "deepseek-v2-lite": (15_706_484_224, 2_661_150_208),
    "deepseek-v3": (671_026_404_352, 37_552_282_624),
    "glm-4.5": (352_797_814_784, 33_632_251_904),
    "glm-4.5-air": (106_852_245_504, 13_424_123_904),
    "gemma-2-2b": (2_614_341_888, 2_614_341_888),
    "gemma-2-9b": (9_241_705_984, 9_241_705_984),
    "gemma-3-4b": (3_880_263_168, 3_880_263_168),
    "granite-3.0-1b-a400m": (1_334_628_352, 428_658_688),
    "granite-3.1-3b-a800m": (3_298_793_472, 882_874_368),
    "kimi-k2-instruct": (1_026_408_209_408, 32_861_477_888),
    "llama-3.1-70b": (70_553_706_496, 70_553_706_496),
    "llama-3.1-8b": (8_030_261_248, 8_030_261_248),
    "llama-3.2-1b": (1_235_814_400, 1_235_814_400),
    "llama-3.2-3b": (3_212_749_824, 3_212_749_824),
    "minitron-4b-base": (4_190_509_056, 4_190_509_056),
    "mistral-7b-v0.1": (7_241_732_096, 7_241_732_096),
    "mistral-7b-v0.3": (7_248_023_552, 7_248_023_552),
    "mistral-small-24b-base-2501": (23_572_403_200, 23_572_403_200),
    "mixtral-8x22b-v0.1": (140_620_634_112, 39_152_031_744),
    "mixtral-8x7b-v0.1": (46_702_792_704, 12_879_925_248),
    "nemotron-3-nano-30b-a3b": (31_577_937_344, 3_580_073_408),
    "nemotron-h-8b-base-8k": (8_100_852_736, 8_100_852_736),
    "olmo-2-1124-7b": (7_298_617_344, 7_298_617_344),
    "olmoe-1b-7b-0924": (6_919_161_856, 1_282_017_280),
    "phi-3.5-moe": (41_873_153_344, 6_640_999_744),
    "qwen2.5-7b": (7_615_616_512, 7_615_616_512),
    "qwen3-0.6b": (596_049_920, 596_049_920),
    "qwen3-235b-a22b": (235_093_634_560, 22_190_763_520),
    "qwen3-30b-a3b": (30_532_122_624, 3_353_032_704),
    "qwen3-32b": (32_762_123_264, 32_762_123_264),
    "qwen3-8b": (8_190_735_360, 8_190_735_360),
    "qwen3-next-80b-a3b": (79_674_391_296, 3_874_929_408),
    "qwen3.5-35b-a3b": (34_660_610_688, 3_454_988_928),
    "smollm2-1.7b": (1_711_376_384, 1_711_376_384),
    "smollm2-135m": (134_515_008, 134_515_008),
    "smollm2-360m": (361_821_120, 361_821_120),
    "gpt-oss-120b": (116_829_156_672, 5_711_982_912),
    "gpt-oss-20b": (20_914_757_184, 4_187_440_704),
    "nanochat-d20": (560_988_160, 560_988_160),
}


def test_every_architecture_is_checked():
    assert set(PUBLISHED) == set(architectures())


@pytest.mark.parametrize("name", PUBLISHED)
def test_it_has_its_published_parameters(name):
    shape = read_config(find_architecture(name))
    assert (shape.num_parameters, shape.num_active_parameters) == PUBLISHED[name]
    assert shape.assumed == ()


def test_names_are_found_as_people_write_them():
    config = find_architecture("qwen3-30b-a3b")
    assert find_architecture("Qwen/Qwen3-30B-A3B") is config
    assert find_architecture("Qwen/Qwen3-30B-A3B-Base") is config
    assert find_architecture("moonshotai/Kimi-K2") is find_architecture("kimi-k2-instruct")
    assert find_architecture("meta-llama/Meta-Llama-3.1-8B") is find_architecture("llama-3.1-8b")
    assert find_architecture("llama-9") is None


def test_the_traps_of_their_configs():
    shapes = {name: read_config(config) for name, config in architectures().items()}
    assert shapes["qwen3-32b"].layers[0].attention.qk_width == 128 != 5120 // 64
    assert shapes["gemma-2-2b"].tied
    assert not shapes["llama-3.1-8b"].tied
    first = [isinstance(layer.ffn, ExpertsShape) for layer in shapes["glm-4.5"].layers[:4]]
    assert first == [False, False, False, True]
    assert shapes["deepseek-v2-lite"].latent.q_rank is None
    assert shapes["qwen3-next-80b-a3b"].layers[0].ffn.shared_width == 512
    assert [layer.linear for layer in shapes["qwen3.5-35b-a3b"].layers[:4]] == [True, True, True, False]
    assert sum(layer.linear for layer in shapes["nemotron-h-8b-base-8k"].layers) == 24


def test_a_nested_config_is_read_too():
    config = find_architecture("qwen3.5-35b-a3b")
    nested = {"model_type": "qwen3_5_moe", "text_config": dict(config)}
    assert read_config(nested).num_parameters == PUBLISHED["qwen3.5-35b-a3b"][0]
