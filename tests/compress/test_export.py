"""Forms that others open: plain transformers, and DeciLM against a textbook forward of its block_configs."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import linear, scaled_dot_product_attention, silu
from transformers import AutoConfig, AutoModelForCausalLM

from planish.compress.export import export_decilm, export_dense
from planish.compress.realise import assemble, write_child
from planish.compress.space import (
    Architecture,
    Choice,
    KeepExperts,
    KeepHeads,
    LinearAttention,
    LinearFfn,
    Menu,
    NoAttention,
    NoFfn,
    SlidingWindow,
    Width,
)
from planish.errors import UsageError


def of(*layers):
    return Architecture(layers=tuple(Choice(attention=attention, ffn=ffn) for attention, ffn in layers))


DENSE = of((NoAttention(), Width(width=16)), (KeepHeads(kv_heads=1), NoFfn()), (KeepHeads(kv_heads=4), Width(width=40)))
DECILM = of(
    (KeepHeads(kv_heads=2), NoFfn()), (NoAttention(), Width(width=24)), (KeepHeads(kv_heads=1), Width(width=48))
)


@pytest.fixture
def written(library, tmp_path):
    def make(architecture, family="llama", **options):
        blocks = library(family, **options)
        write_child(blocks, architecture, tmp_path / "child")
        return tmp_path / "child", assemble(blocks, architecture)

    return make


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_dense_form_is_opened_by_transformers_alone(written, sentences, tmp_path, family):
    folder, child = written(DENSE, family)
    export_dense(folder, tmp_path / "dense")
    config = json.loads((tmp_path / "dense" / "config.json").read_text())
    assert config["model_type"] == family
    assert not {"per_layer_config", "auto_map", "parent_type", "replace_with_linear"} & config.keys()
    assert (config["intermediate_size"], config["num_key_value_heads"]) == (40, 4)
    plain, report = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", output_loading_info=True)
    assert type(plain).__module__.startswith("transformers.models.")
    assert not any(report[each] for each in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    found, expected = plain(sentences[:4]).logits, child(sentences[:4]).logits
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    assert torch.equal(
        plain.generate(sentences[:1], max_new_tokens=8, do_sample=False),
        child.generate(sentences[:1], max_new_tokens=8, do_sample=False),
    )


def test_the_dense_form_is_bit_equal_where_sums_keep_their_order(written, sentences, tmp_path):
    """In float32, where the parent's sizes were: whole networks and heads, and sub-blocks that are not there."""
    architecture = of(
        (NoAttention(), Width(width=48)), (KeepHeads(kv_heads=2), NoFfn()), (KeepHeads(kv_heads=4), Width(width=48))
    )
    folder, child = written(architecture)
    export_dense(folder, tmp_path / "dense")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32)
    assert torch.equal(plain(sentences[:4]).logits, child.float()(sentences[:4]).logits)


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe"])
def test_a_mixture_keeps_its_experts_in_the_dense_form(written, sentences, tmp_path, family):
    whole = KeepExperts(experts=4, width=48 if family == "mixtral" else 16)
    architecture = of((KeepHeads(kv_heads=2), whole), (NoAttention(), whole), (KeepHeads(kv_heads=4), NoFfn()))
    folder, child = written(architecture, family)
    export_dense(folder, tmp_path / "dense")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    torch.testing.assert_close(plain(sentences[:2]).logits, child(sentences[:2]).logits, rtol=1e-4, atol=1e-5)


def test_what_no_plain_class_has_is_refused(written, tmp_path):
    linear_ = of((KeepHeads(kv_heads=2), LinearFfn()), *[(KeepHeads(kv_heads=4), Width(width=48))] * 2)
    folder, _ = written(linear_)
    for export, message in ((export_dense, "no plain class has one matrix"), (export_decilm, "heads, widths and noth")):
        with pytest.raises(UsageError, match=rf"layer 0 is kv2\+linear: .*{message}"):
            export(folder, tmp_path / "out")
    window = of((SlidingWindow(window=4, kv_heads=4), NoFfn()), *[(LinearAttention(), Width(width=48))] * 2)
    folder, _ = written(window)
    with pytest.raises(UsageError, match=r"layer 0 is kv4-window4\+none: the parent's class has no such window"):
        export_dense(folder, tmp_path / "out")
    folder, _ = written(DENSE)
    with pytest.raises(UsageError, match=r"first layer that does anything is none\+width16: vLLM's DeciLM needs att"):
        export_decilm(folder, tmp_path / "out")
    with pytest.raises(UsageError, match=r"holds no (model|compressed child)"):
        export_dense(tmp_path / "nowhere", tmp_path / "out")


@pytest.mark.parametrize("wide", [False, True])
def test_decilm_against_a_textbook_forward(written, sentences, tmp_path, wide):
    """Its config.json and weights alone, read as engines do, give the child's logits."""
    architecture, options = DECILM, {}
    if wide:
        architecture = of(
            (KeepHeads(kv_heads=2), NoFfn()),
            (NoAttention(), Width(width=256)),
            (KeepHeads(kv_heads=1), Width(width=512)),
        )
        options = {"intermediate_size": 512, "menu": Menu(width_multiple=256, linear=False)}
    folder, child = written(architecture, **options)
    export_decilm(folder, tmp_path / "decilm")
    tree = json.loads((tmp_path / "decilm" / "config.json").read_text())
    assert (tree["model_type"], tree["architectures"]) == ("nemotron-nas", ["DeciLMForCausalLM"])
    assert all(("ffn_mult" in each["ffn"]) is (wide or each["ffn"]["no_op"]) for each in tree["block_configs"])
    weights = load_file(tmp_path / "decilm" / "model.safetensors")
    found = decilm_forward(tree, weights, sentences[:2])
    torch.testing.assert_close(found, child(sentences[:2]).logits, rtol=1e-10, atol=1e-11)


def test_the_decilm_config_opens_by_itself(written, tmp_path, monkeypatch):
    folder, _ = written(DECILM)
    export_decilm(folder, tmp_path / "decilm")
    config = AutoConfig.from_pretrained(tmp_path / "decilm", trust_remote_code=True)
    first, second, _ = config.block_configs
    assert first.attention.n_heads_in_group == 2
    assert first.ffn.intermediate_size == 256
    assert second.attention.no_op
    assert not hasattr(first.ffn, "ffn_mult")
    config.save_pretrained(tmp_path / "again")
    again = json.loads((tmp_path / "again" / "config.json").read_text())
    assert again["block_configs"] == json.loads((tmp_path / "decilm" / "config.json").read_text())["block_configs"]


def decilm_forward(tree, weights, ids):
    """Textbook DeciLM in float64: RMSNorm, rotary positions, grouped heads, SwiGLU; widths as engines make them."""
    heads, width, eps = tree["num_attention_heads"], tree["head_dim"], tree["rms_norm_eps"]
    theta = tree["rope_parameters"]["rope_theta"]
    length = ids.shape[1]
    angles = torch.outer(torch.arange(length), 1 / theta ** (torch.arange(0, width, 2).float() / width))
    cos, sin = (torch.cat([each(angles), each(angles)], -1).double() for each in (torch.cos, torch.sin))

    def norm(x, weight):
        return (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)).double() * weight

    def rotate(x):
        half = torch.cat([-x[..., width // 2 :], x[..., : width // 2]], -1)
        return x * cos + half * sin

    hidden = weights["model.embed_tokens.weight"][ids]
    for index, block in enumerate(tree["block_configs"]):
        of_layer = {
            name.removeprefix(f"model.layers.{index}."): each
            for name, each in weights.items()
            if name.startswith(f"model.layers.{index}.")
        }
        if not block["attention"]["no_op"]:
            group = block["attention"]["n_heads_in_group"]
            x = norm(hidden, of_layer["input_layernorm.weight"])
            q, k, v = (
                linear(x, of_layer[f"self_attn.{name}_proj.weight"]).unflatten(-1, (-1, width)).transpose(1, 2)
                for name in "qkv"
            )
            assert q.shape[1] == heads
            assert k.shape[1] == heads // group
            k, v = (each.repeat_interleave(group, 1) for each in (rotate(k), v))
            mixed = scaled_dot_product_attention(rotate(q), k, v, is_causal=True).transpose(1, 2).flatten(2)
            hidden = hidden + linear(mixed, of_layer["self_attn.o_proj.weight"])
        else:
            assert not [name for name in of_layer if "attn" in name or "input" in name]
        ffn = block["ffn"]
        if not ffn["no_op"]:
            x = norm(hidden, of_layer["post_attention_layernorm.weight"])
            size = ffn.get("intermediate_size")
            if "ffn_mult" in ffn:
                size = -(-int(2 * ffn["ffn_mult"] * tree["hidden_size"] / 3) // 256) * 256
            assert of_layer["mlp.gate_proj.weight"].shape[0] == size
            gated = silu(linear(x, of_layer["mlp.gate_proj.weight"])) * linear(x, of_layer["mlp.up_proj.weight"])
            hidden = hidden + linear(gated, of_layer["mlp.down_proj.weight"])
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return linear(norm(hidden, weights["model.norm.weight"]), head)
