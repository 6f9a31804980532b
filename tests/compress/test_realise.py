"""Children out of a library: the parent bit for bit, prefix slices, folders, suffixes."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from planish.compress.blocks import architecture_of, config_of
from planish.compress.parent import StreamedParent, WholeParent, open_parent
from planish.compress.realise import assemble, write_child
from planish.compress.space import (
    Architecture,
    Choice,
    KeepHeads,
    LinearAttention,
    LinearFfn,
    NoAttention,
    NoFfn,
    SlidingWindow,
    Width,
)
from planish.compress.stack import Stack
from planish.errors import UsageError

MIXED = Architecture(
    layers=(
        Choice(attention=NoAttention(), ffn=Width(width=16)),
        Choice(attention=KeepHeads(kv_heads=1), ffn=LinearFfn()),
        Choice(attention=SlidingWindow(window=4, kv_heads=4), ffn=NoFfn()),
    )
)
LINEAR = Architecture(
    layers=(
        Choice(attention=LinearAttention(), ffn=NoFfn()),
        Choice(attention=NoAttention(), ffn=NoFfn()),
        Choice(attention=KeepHeads(kv_heads=2), ffn=Width(width=48)),
    )
)
FAMILIES = ["llama", "qwen3", "mistral", "mixtral", "qwen3-moe"]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_parent_out_of_its_own_library_is_the_parent(library, parent, sentences, family):
    blocks, model = library(family), parent(family)
    child = assemble(blocks, blocks.space.parent)
    expected = model(sentences[:4]).logits
    assert torch.equal(child(sentences[:4]).logits, expected)
    assert not child.training
    stack = Stack(blocks)
    assert torch.equal(torch.nn.functional.linear(stack.after(0, stack.embed(sentences[:4])), stack.head), expected)


@pytest.mark.parametrize("architecture", [MIXED, LINEAR])
def test_a_written_child_is_the_assembled_one(library, sentences, tmp_path, architecture):
    blocks = library()
    child = assemble(blocks, architecture)
    write_child(blocks, architecture, tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(sentences[:2]).logits, child(sentences[:2]).logits)
    assert again.dtype == torch.float64
    assert architecture_of(again.config) == architecture
    assert (tmp_path / "child.py").exists()
    found = [again.generate(sentences[:2], max_new_tokens=8, do_sample=False, use_cache=each) for each in (True, False)]
    assert torch.equal(*found)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_says_its_architecture(library, family):
    blocks = library(family)
    parent = blocks.space.parent
    assert architecture_of(config_of(blocks.config, parent)) == parent
    for choice in blocks.space.layers[1].choices:
        architecture = parent.with_layer(1, choice)
        assert architecture_of(config_of(blocks.config, architecture)) == architecture


def test_a_prefix_of_sorted_channels_is_a_physical_slice(library, parent):
    """A width's gate and up are the first rows of any wider one's in the same order, and rows of the parent's own."""
    blocks, model = library(), parent()
    names = {width: f"layer-001-ffn-width{width}" for width in (8, 16, 24, 32, 40)}
    read = {width: blocks.read(name) for width, name in names.items()}
    orders = {width: blocks.info(name).made.partition(",")[0] for width, name in names.items()}
    pairs = [(one, other) for one in names for other in names if one < other and orders[one] == orders[other]]
    assert len(pairs) >= 3
    for narrow, wide in pairs:
        for name in ("mlp.gate_proj.weight", "mlp.up_proj.weight"):
            assert torch.equal(read[narrow][name], read[wide][name][:narrow])
    mlp = model.model.layers[1].mlp
    rows = [(mlp.gate_proj.weight == row).all(1).nonzero().item() for row in read[40]["mlp.gate_proj.weight"]]
    assert len(set(rows)) == 40
    assert torch.equal(read[40]["mlp.up_proj.weight"], mlp.up_proj.weight[rows])


@pytest.mark.parametrize("architecture", [None, MIXED])
def test_a_suffix_with_one_block_replaced_is_the_whole_model(library, sentences, architecture):
    blocks, ids = library(), sentences[:3]
    stack = Stack(blocks, architecture)
    states = list(stack.states(ids))
    assert len(states) == 4
    for index, choice in ((0, MIXED.layers[0]), (1, LINEAR.layers[0]), (2, MIXED.layers[1])):
        whole = assemble(blocks, stack.architecture.with_layer(index, choice)).model(ids).last_hidden_state
        assert torch.equal(stack.after(index, states[index], stack.layer(index, choice)), whole)
        assert torch.equal(stack.after(index, states[index]), stack.after(3, states[3]))


def test_what_the_library_has_not_is_refused(library):
    blocks = library()
    wide = blocks.space.parent.with_layer(0, Choice(attention=KeepHeads(kv_heads=3), ffn=Width(width=48)))
    with pytest.raises(UsageError, match="`attention` of layer 0 cannot be kv3; its library has kv4, kv2, kv1"):
        assemble(blocks, wide)
    nothing = Architecture(layers=(Choice(attention=NoAttention(), ffn=NoFfn()),) * 3)
    with pytest.raises(UsageError, match="no layer that attends"):
        assemble(blocks, nothing)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_streamed_parent_is_the_whole_one(parent, sentences, tmp_path, family):
    model = parent(family)
    model.save_pretrained(tmp_path)
    whole, streamed = WholeParent(model), StreamedParent(tmp_path, device=torch.device("cpu"))
    assert streamed.space is not None
    assert whole.ends().keys() == streamed.ends().keys()
    assert all(torch.equal(whole.ends()[name], each) for name, each in streamed.ends().items())
    for index in range(3):
        with whole.layer(index) as mine, streamed.layer(index) as read:
            assert mine.state_dict().keys() == read.state_dict().keys()
            assert all(torch.equal(mine.state_dict()[name], each) for name, each in read.state_dict().items())
            assert read.state_dict()["mlp.up_proj.weight"].dtype == torch.float64


def test_a_parent_that_cannot_be_streamed_is_refused(parent, tmp_path):
    parent("mixtral").save_pretrained(tmp_path)
    with pytest.raises(
        UsageError, match=r"cannot be read layer by layer: `model.layers.0.mlp.experts.down_proj` is abse"
    ):
        StreamedParent(tmp_path, device=torch.device("cpu"))
    whole, model = open_parent(tmp_path, device=torch.device("cpu")), parent("mixtral")
    assert isinstance(whole, WholeParent)
    with whole.layer(1) as layer:
        gate = layer.state_dict()["mlp.gate.weight"]
        assert torch.equal(gate, model.model.layers[1].mlp.gate.weight)
    assert len(whole.resident()) == len(list(model.parameters()))
