"""Fused networks: which runs there are, and the fused child against networks side by side written out."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from planish.compress.blocks import architecture_of
from planish.compress.fuse import Fusion, find_fusions, fuse_child, fused
from planish.compress.realise import assemble, write_child
from planish.compress.space import (
    Architecture,
    Choice,
    KeepHeads,
    LinearAttention,
    LinearFfn,
    NoAttention,
    NoFfn,
    Width,
)
from planish.errors import UsageError


def of(*layers):
    return Architecture(layers=tuple(Choice(attention=attention, ffn=ffn) for attention, ffn in layers))


HEADS, NONE = KeepHeads(kv_heads=4), NoAttention()


def test_runs_end_at_attention_and_leave_their_last_network():
    architecture = of(
        (NONE, Width(width=8)),
        (NONE, Width(width=16)),
        (NONE, NoFfn()),
        (NONE, Width(width=24)),  # the last before attention stays
        (HEADS, Width(width=32)),
        (NONE, Width(width=8)),
        (LinearAttention(), Width(width=8)),  # sees what came before: a new run
        (NONE, Width(width=8)),
        (NONE, LinearFfn()),
        (NONE, Width(width=8)),
    )
    fusions = find_fusions(architecture)
    assert fusions == [Fusion(layers=(0, 1), width=24)]
    assert (
        fused(architecture, fusions).layers[:4]
        == of((NONE, Width(width=24)), (NONE, NoFfn()), (NONE, NoFfn()), (NONE, Width(width=24))).layers
    )
    assert find_fusions(of((HEADS, Width(width=8)), (NONE, Width(width=8)))) == []


def test_a_fused_child_is_its_networks_side_by_side(library, sentences, tmp_path):
    blocks = library("llama", num_hidden_layers=5)
    architecture = of(
        (HEADS, Width(width=48)),
        (NONE, Width(width=16)),
        (NONE, Width(width=40)),
        (NONE, Width(width=24)),
        (HEADS, NoFfn()),
    )
    child = assemble(blocks, architecture)
    with torch.no_grad():
        for layer in child.model.layers[:4]:
            layer.post_attention_layernorm.weight.mul_(torch.linspace(0.5, 2.0, 32, dtype=torch.float64))
        child.model.layers[2].post_attention_layernorm.weight.mul_(1.5)
    write_child(blocks, architecture, tmp_path / "child")
    child.save_pretrained(tmp_path / "child")
    fusions = fuse_child(tmp_path / "child", tmp_path / "fused")
    assert fusions == [Fusion(layers=(0, 1, 2), width=104)]
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "fused")
    assert architecture_of(found.config) == fused(architecture, fusions)

    first, second, third, fourth, last = child.model.layers
    hidden = child.model.embed_tokens(sentences[:2])
    around = blocks_around(blocks, first, hidden)
    hidden = hidden + first.self_attn(first.input_layernorm(hidden), **around)[0]
    hidden = hidden + sum(each.mlp(each.post_attention_layernorm(hidden)) for each in (first, second, third))
    hidden = fourth(hidden)
    hidden = last(hidden, **blocks_around(blocks, last, hidden))
    expected = torch.nn.functional.linear(child.model.norm(hidden), child.lm_head.weight)
    torch.testing.assert_close(found(sentences[:2]).logits, expected, rtol=1e-9, atol=1e-10)
    assert (expected - child(sentences[:2]).logits).abs().max() > 1e-3


def blocks_around(blocks, layer, hidden):
    from planish.compress.blocks import Blocks

    return Blocks(blocks.config).around_call(layer, hidden)


def test_where_there_is_nothing_to_fuse(library, tmp_path):
    blocks = library()
    write_child(blocks, blocks.space.parent, tmp_path / "child")
    with pytest.raises(UsageError, match="has no three networks in a row without attention between them"):
        fuse_child(tmp_path / "child", tmp_path / "fused")
    assert not (tmp_path / "fused").exists()
