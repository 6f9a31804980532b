"""Fused networks: which runs there are, and the fused child against networks side by side written out."""

import itertools
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from planish.compress.blocks import architecture_of
from planish.compress.costs import Costs, Numbers, Price, Scenario, launch_seconds, options_of, parameters
from planish.compress.fuse import assemble_fused, fuse_child
from planish.compress.measure import Timing, measure_costs
from planish.compress.realise import assemble, write_child
from planish.compress.runs import Fusion, find_fusions, fused, joins
from planish.compress.search import Ceiling, meets, search, share_of_parent
from planish.compress.space import (
    Architecture,
    Choice,
    KeepHeads,
    LayerSpace,
    LinearAttention,
    LinearFfn,
    NoAttention,
    NoFfn,
    Space,
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


def test_a_child_fused_in_memory_is_the_one_that_is_written(library, sentences, tmp_path):
    blocks = library("llama", num_hidden_layers=5)
    architecture = of((HEADS, Width(width=48)), *[(NONE, Width(width=16))] * 3, (HEADS, NoFfn()))
    write_child(blocks, architecture, tmp_path / "child")
    fuse_child(tmp_path / "child", tmp_path / "fused")
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "fused")
    found = assemble_fused(blocks, architecture)
    assert torch.equal(found(sentences[:2]).logits, written(sentences[:2]).logits)
    alone = of(*[(HEADS, Width(width=48))] * 5)
    same = (each(blocks, alone)(sentences[:2]).logits for each in (assemble_fused, assemble))
    assert torch.equal(*same)


DECODE = Scenario(phase="decode", context=16)


def _costs(space, joined_s):
    """A network costs 3 us and more by its width, so that fusing one saves those."""
    prices = {
        name: Price(seconds=3e-6 * isinstance(option, Width) + 1e-9 * parameters(space, option), source="measured")
        for name, option in options_of(space).items()
    }
    return Costs(
        space=space,
        numbers=Numbers(),
        machine="drawn",
        prices={DECODE.label: prices},
        ends_s={DECODE.label: 1e-6},
        scenarios={DECODE.label: DECODE},
        factors={},
        joined_s={DECODE.label: joined_s} if joined_s else {},
    )


def _space(layers):
    layer = LayerSpace(attention=(HEADS, NONE), ffn=(Width(width=64), Width(width=32), NoFfn()))
    return Space(layers=(layer,) * layers, hidden_size=32, num_heads=4, head_dim=8, vocab_size=100, tied=True)


def test_what_joining_saves_is_what_a_network_takes_whatever_its_width():
    space = _space(2)
    prices = _costs(space, 0).prices[DECODE.label]
    assert launch_seconds(prices) == pytest.approx(3e-6 + 1e-9 * 32)
    assert launch_seconds({"ffn none": Price(seconds=0, source="fitted")}) == 0
    falling = {"ffn width8": Price(seconds=2, source="fitted"), "ffn width16": Price(seconds=1, source="fitted")}
    assert launch_seconds(falling) == 1


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("share", [0.35, 0.55])
def test_the_search_counts_on_fusion_and_finds_the_best_child(seed, share):
    """Against all children of five layers, each priced as it is once its runs are one."""
    import numpy as np

    space = _space(5)
    costs = _costs(space, 3e-6)
    ceiling = share_of_parent(Ceiling(kind="latency", at_most=0, scenario=DECODE.label), share, costs)
    random = np.random.default_rng(seed)
    harm = [[0.0, *random.uniform(0.1, 1, 5)] for _ in space.layers]
    every = [Architecture(layers=each) for each in itertools.product(*(layer.choices for layer in space.layers))]
    allowed = [
        child
        for child in every
        if meets(child, [ceiling], costs) and any(choice.attention == HEADS for choice in child.layers)
    ]

    def told(child):
        pairs = zip(harm, space.layers, child.layers, strict=True)
        return math.fsum(row[layer.choices.index(choice)] for row, layer, choice in pairs)

    found = search(space, harm, [ceiling], costs)
    assert meets(found.architecture, [ceiling], costs)
    assert told(found.architecture) == pytest.approx(min(told(child) for child in allowed), rel=1e-9)
    apart = search(space, harm, [ceiling], _costs(space, 0))
    assert found.harm <= apart.harm


def test_a_child_costs_less_by_each_network_that_joins():
    space = _space(5)
    child = of((HEADS, Width(width=64)), *[(NONE, Width(width=32))] * 3, (HEADS, NoFfn()))
    assert joins(child) == 2
    apart, joined = (_costs(space, each).model_seconds(child, DECODE.label) for each in (0, 3e-6))
    assert apart - joined == pytest.approx(6e-6)


def test_measured_costs_know_what_joining_saves(library):
    quick = Timing(rounds=2, copies=1, cold_bytes=1)
    found = measure_costs(library(), [DECODE], quick, fuse=True)
    cheapest = min(each.seconds for name, each in found.prices[DECODE.label].items() if "ffn width" in name)
    assert 0 <= found.joined_s[DECODE.label] <= cheapest
    assert measure_costs(library(), [DECODE], quick).joined_s == {}


def blocks_around(blocks, layer, hidden):
    from planish.compress.blocks import Blocks

    return Blocks(blocks.config).around_call(layer, hidden)


def test_where_there_is_nothing_to_fuse(library, tmp_path):
    blocks = library()
    write_child(blocks, blocks.space.parent, tmp_path / "child")
    with pytest.raises(UsageError, match="has no three networks in a row without attention between them"):
        fuse_child(tmp_path / "child", tmp_path / "fused")
    assert not (tmp_path / "fused").exists()
