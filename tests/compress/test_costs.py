"""Sizes are those of assembled children, fits recover a machine, and nothing negative comes out of them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planish.compress.costs import (
    Numbers,
    Rates,
    Scenario,
    Work,
    cache_numbers,
    fit_rates,
    model_parameters,
    options_of,
    work_of,
)
from planish.compress.parent import WholeParent
from planish.compress.realise import assemble
from planish.compress.serving import model_bytes, workspace_bytes
from planish.compress.space import (
    Architecture,
    Choice,
    KeepExperts,
    KeepHeads,
    LinearFfn,
    Menu,
    NoAttention,
    SlidingWindow,
    Width,
)
from planish.compress.verify import served_bytes
from planish.errors import UsageError

PREFILL = Scenario(phase="prefill", context=64, batch=2)
DECODE = Scenario(phase="decode", context=64, batch=2)
NUMBERS = Numbers(weight_bytes=2, cache_bytes=1)


@pytest.mark.parametrize("pick", [0, 1, -1])
def test_a_child_has_the_parameters_that_it_is_priced_at(library, pick):
    blocks = library()
    layers = [Choice(attention=layer.attention[pick], ffn=layer.ffn[pick]) for layer in blocks.space.layers]
    child = Architecture(layers=(blocks.space.layers[0].parent, *layers[1:]))
    model = assemble(blocks, child)
    assert model_parameters(blocks.space, child) == sum(each.numel() for each in model.parameters())


def test_the_cache_is_by_the_true_head_size_and_no_longer_than_the_window(library):
    space = library().space
    assert cache_numbers(space, KeepHeads(kv_heads=2), 64) == 2 * 2 * space.head_dim * 64
    assert cache_numbers(space, SlidingWindow(window=4, kv_heads=4), 64) == 2 * 4 * space.head_dim * 4
    assert cache_numbers(space, NoAttention(), 64) == 0


def test_memory_is_weights_cache_and_temporaries(library):
    space = library().space
    parent = space.parent
    temporary = workspace_bytes(space, parent.layers, DECODE, NUMBERS)
    cached = 2 * sum(cache_numbers(space, choice.attention, 65) for choice in parent.layers)
    assert model_bytes(space, parent, DECODE, NUMBERS) == model_parameters(space, parent) * 2 + cached + temporary
    assert workspace_bytes(space, parent.layers, PREFILL, NUMBERS) > temporary


@pytest.mark.parametrize("scenario", [PREFILL, DECODE], ids=lambda each: each.phase)
@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("llama", {}),
        ("llama", {"intermediate_size": 16}),
        ("mistral", {}),
        ("qwen3-moe", {}),
        ("qwen3-moe", {"num_experts": 16, "num_experts_per_tok": 3}),
        ("mixtral", {}),
    ],
)
def test_what_serving_holds_is_never_more_than_its_price_and_little_less(parent, family, config, scenario):
    model = parent(family, **config).float()
    space = WholeParent(model).space(Menu())
    found = model_bytes(space, space.parent, scenario, Numbers())
    held = served_bytes(model, scenario)
    weights = sum(each.nbytes for each in model.parameters())
    assert held <= found <= held + 0.02 * (held - weights)


def test_more_of_anything_is_more_work(library):
    space = library().space
    for scenario in (PREFILL, DECODE):
        wide, narrow = (work_of(space, Width(width=width), scenario, NUMBERS) for width in (48, 24))
        many, few = (work_of(space, KeepHeads(kv_heads=count), scenario, NUMBERS) for count in (4, 1))
        window = work_of(space, SlidingWindow(window=4, kv_heads=4), scenario, NUMBERS)
        assert wide.flops > narrow.flops
        assert wide.moved_bytes > narrow.moved_bytes
        assert many.flops > few.flops
        assert many.moved_bytes > few.moved_bytes
        assert window.flops < many.flops
        assert work_of(space, NoAttention(), scenario, NUMBERS) == Work()


def test_a_token_of_a_prompt_meets_those_before_it(library):
    space = library().space
    wide = Scenario(phase="prefill", context=64, batch=1)
    own = work_of(space, KeepHeads(kv_heads=4), wide, NUMBERS)
    heads = space.num_heads * space.head_dim
    projections = 2.0 * 64 * (4 * space.hidden_size * heads + space.hidden_size)
    assert own.flops == projections + 4 * 64 * 32 * heads


@settings(max_examples=50, deadline=None)
@given(st.tuples(*[st.floats(1e-12, 1e-3)] * 3), st.integers(0, 1000))
def test_a_fit_recovers_the_machine(rates, seed):
    import numpy as np

    random = np.random.default_rng(seed)
    machine = Rates(op_s=rates[0], flop_s=rates[1], byte_s=rates[2])
    works = [Work(ops=o, flops=f, moved_bytes=b) for o, f, b in random.uniform(1, 100, (6, 3))]
    found = fit_rates((work, machine.seconds(work)) for work in works)
    for work in works:
        assert found.seconds(work) == pytest.approx(machine.seconds(work), rel=1e-6)
    assert min(found.op_s, found.flop_s, found.byte_s) >= 0


def test_a_fit_needs_three_points():
    with pytest.raises(UsageError, match="got 1"):
        fit_rates([(Work(ops=1, flops=1, moved_bytes=1), 1.0), (Work(), 0.0)])


def test_every_option_has_one_name(library):
    space = library().space
    names = options_of(space)
    assert len(names) == len({option.label for option in space.layers[0].attention}) + len(space.layers[0].ffn)
    assert names["ffn linear"] == LinearFfn()


def test_what_has_no_price_is_refused(library):
    with pytest.raises(UsageError, match="mixture"):
        work_of(library().space, KeepExperts(experts=4, width=8), PREFILL, NUMBERS)
    with pytest.raises(ValueError, match="positive"):
        Scenario(phase="decode", context=0)
