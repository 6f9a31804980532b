"""Compressed children: parents bit for bit, caches, causal masks, windows, saved and opened again."""

import shutil
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

import planish
from planish.models.child import child_config, model_class

FAMILIES = ["llama", "mistral", "qwen3", "mixtral", "qwen3-moe"]
MIXED = {
    0: {"skip": ["attention"], "intermediate_size": 16},
    1: {"num_key_value_heads": 1, "sliding_window": 6},
    2: {"replace_with_linear": ["mlp"]},
    3: {"replace_with_linear": ["attention"], "skip": ["mlp"]},
    4: {"num_key_value_heads": 2},
}
IDS = torch.randint(1, 300, (2, 20), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def child(tiny_model):
    def make(family="llama", layers=MIXED, seed=0, **changes):
        parent = tiny_model(family, num_hidden_layers=5, num_key_value_heads=4, **changes)
        torch.manual_seed(seed)
        return model_class(parent.config.model_type)(child_config(parent.config, layers)).eval()

    return make


@pytest.mark.parametrize("family", FAMILIES)
def test_a_child_without_changes_is_its_parent(tiny_model, family):
    parent = tiny_model(family).eval()
    child = model_class(parent.config.model_type)(child_config(parent.config, {})).eval()
    assert child.load_state_dict(parent.state_dict()).missing_keys == []
    assert torch.equal(child(IDS).logits, parent(IDS).logits)
    assert torch.equal(child(IDS, labels=IDS).loss, parent(IDS, labels=IDS).loss)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_generating_with_a_cache_equals_without(child, family, attention):
    model = child(family)
    model.set_attn_implementation(attention)
    found = [model.generate(IDS, max_new_tokens=12, do_sample=False, use_cache=each) for each in (True, False)]
    assert torch.equal(*found)
    assert found[0].shape == (2, 32)
    cache = DynamicCache(config=model.config)
    whole = model(IDS).logits
    parts = [model(ids, cache=cache, use_cache=True).logits for ids in (IDS[:, :9], IDS[:, 9:])]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-6)
    assert cache.get_seq_length() == 20
    assert type(cache.layers[0]).__name__ == "DummyLayer"


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_no_token_sees_a_later_one(child, family, attention):
    model = child(family, {0: {"num_key_value_heads": 2}, 1: {"skip": ["mlp"]}, 2: {"sliding_window": 4}})
    model.set_attn_implementation(attention)
    assert {layer.config._attn_implementation for layer in model.model.layers} <= {attention, "sdpa"}
    later = IDS.clone()
    later[:, 15:] = 7
    before, after = model(IDS).logits, model(later).logits
    torch.testing.assert_close(after[:, :15], before[:, :15], rtol=0, atol=1e-6)
    assert (after[:, 15:] - before[:, 15:]).abs().max() > 1e-3
    assert {layer.config._attn_implementation for layer in model.model.layers} == {attention}


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_window_sees_its_tokens_alone(child, family, attention):
    """Of one layer with a window of 4, the last token sees tokens 16 to 19."""
    rest = {index: {"skip": ["attention"]} for index in range(1, 5)}
    model = child(family, {0: {"sliding_window": 4}} | rest)
    model.set_attn_implementation(attention)
    before = model(IDS).logits[:, -1]
    for index, same in ((15, True), (16, False)):
        other = IDS.clone()
        other[:, index] = 7
        assert torch.allclose(model(other).logits[:, -1], before, rtol=0, atol=1e-6) is same


def test_padding_changes_nothing(child):
    model = child()
    pad = torch.zeros(2, 5, dtype=torch.long)
    mask = torch.cat([pad, torch.ones_like(IDS)], 1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    padded = model(torch.cat([pad, IDS], 1), attention_mask=mask, position_ids=positions).logits[:, 5:]
    torch.testing.assert_close(padded, model(IDS).logits, rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_saved_and_opened_again(child, tmp_path, family):
    layers = MIXED if family == "llama" else {0: {"skip": ["attention"]}, 3: {"replace_with_linear": ["mlp"]}}
    model = child(family, layers)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    assert again.config.per_layer_config[0].skip == ["attention"]
    drawn = AutoModelForCausalLM.from_config(again.config)
    assert [each.shape for each in drawn.parameters()] == [each.shape for each in model.parameters()]


def test_planish_installs_in_a_child(child):
    model = child(layers={0: {"skip": ["attention"]}, 1: {"sliding_window": 6}, 2: {"num_key_value_heads": 1}})
    expected = model(IDS, labels=IDS).loss
    installed = planish.install(model, planish.Plan())
    found = model(IDS, labels=IDS).loss
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    installed.undo()
    assert torch.equal(model(IDS, labels=IDS).loss, expected)


def test_a_copy_of_the_file_opens_a_child_without_planish(child, tmp_path):
    model = child()
    source = sys.modules[type(model).__module__].__file__
    model.config.auto_map = {"AutoConfig": "child.Child", "AutoModelForCausalLM": "child.ChildForCausalLM"}
    model.save_pretrained(tmp_path)
    shutil.copy(source, tmp_path / "child.py")
    code = (
        "import sys, torch; sys.modules['planish'] = None\n"
        "from transformers import AutoModelForCausalLM\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r}, trust_remote_code=True)\n"
        f"print(model(torch.tensor({IDS.tolist()})).logits.double().sum().item().hex())\n"
    )
    environment = {"HF_MODULES_CACHE": str(tmp_path / "modules"), "PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert run.returncode == 0, run.stderr
    assert float.fromhex(run.stdout) == pytest.approx(model(IDS).logits.double().sum().item(), abs=1e-4)
