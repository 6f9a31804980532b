"""Options of a layer, architectures as JSON, and spaces read off real module trees."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planish.compress.parts import discover, find_parts
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

MENU = Menu(width_multiple=8, windows=(4,))
ATTENTION = st.one_of(
    st.builds(KeepHeads, kv_heads=st.integers(1, 64)),
    st.builds(SlidingWindow, window=st.integers(1, 4096), kv_heads=st.integers(1, 64)),
    st.just(LinearAttention()),
    st.just(NoAttention()),
)
FFN = st.one_of(
    st.builds(Width, width=st.integers(1, 9999)),
    st.builds(KeepExperts, experts=st.integers(1, 512), width=st.integers(1, 9999)),
    st.sampled_from([LinearFfn(), NoFfn()]),
)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.builds(Choice, attention=ATTENTION, ffn=FFN), max_size=5))
def test_an_architecture_survives_json_and_is_a_key(layers):
    architecture = Architecture(layers=tuple(layers))
    again = Architecture.from_json(architecture.to_json())
    assert again == architecture
    assert {architecture: 1}[again] == 1


def test_a_mistake_in_json_is_named():
    with pytest.raises(UsageError, match=r"architecture.layers.attention.kv_head`; did you mean `kv_heads`"):
        Architecture.from_json('{"layers": [{"attention": {"method": "keep-heads", "kv_head": 2}, "ffn": "no-ffn"}]}')
    with pytest.raises(UsageError, match=r"must be JSON"):
        Architecture.from_json("layers")


def test_the_space_of_a_llama(tiny_model):
    space = discover(tiny_model("llama", num_key_value_heads=4), MENU)
    assert (space.hidden_size, space.num_heads, space.head_dim, space.tied) == (32, 4, 8, True)
    layer = space.layers[0]
    assert layer.attention == (
        KeepHeads(kv_heads=4),
        KeepHeads(kv_heads=2),
        KeepHeads(kv_heads=1),
        SlidingWindow(window=4, kv_heads=4),
        LinearAttention(),
        NoAttention(),
    )
    assert [each.label for each in layer.ffn] == [
        *(f"width{width}" for width in (48, 40, 32, 24, 16, 8)),
        "linear",
        "none",
    ]
    assert len({choice.label for choice in layer.choices}) == 6 * 8
    assert space.parent.layers == (Choice(attention=KeepHeads(kv_heads=4), ffn=Width(width=48)),) * 2


@pytest.mark.parametrize("family", ["mistral", "qwen3"])
def test_other_families_are_read_the_same_way(tiny_model, family):
    layer = discover(tiny_model(family), MENU).layers[0]
    parent = SlidingWindow(window=8, kv_heads=2) if family == "mistral" else KeepHeads(kv_heads=2)
    assert layer.attention[0] == parent
    assert SlidingWindow(window=4, kv_heads=2) in layer.attention
    assert len(layer.ffn) == 8


@pytest.mark.parametrize(("family", "width", "least"), [("mixtral", 48, 2), ("qwen3-moe", 16, 2), ("olmoe", 48, 2)])
def test_mixtures_keep_fewer_experts_or_narrower_ones(tiny_model, family, width, least):
    ffn = discover(tiny_model(family), MENU).layers[0].ffn
    assert ffn[:3] == tuple(KeepExperts(experts=count, width=width) for count in (4, 3, least))
    assert ffn[3:-2] == tuple(KeepExperts(experts=4, width=each) for each in range(width - 8, 0, -8))
    assert ffn[-2:] == (LinearFfn(), NoFfn())


def test_mixtures_of_another_make_stay_whole(tiny_model):
    space = discover(tiny_model("qwen2-moe"), MENU)
    assert {layer.ffn for layer in space.layers} == {(KeepExperts(experts=4, width=16), LinearFfn(), NoFfn())}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gemma2", {}),
        ("granite", {"residual_multiplier": 0.5}),
        ("granite", {"embedding_multiplier": 0.5}),
        ("cohere", {}),
        ("deepseek-v3", {}),
        ("nemotron", {}),
    ],
)
def test_layers_of_another_make_are_refused(tiny_model, family, changes):
    with pytest.raises(UsageError, match=r"`model.from`: .*(planish (compresses|cannot cut)|cannot be cut)"):
        find_parts(tiny_model(family, **changes))


def test_heads_that_do_not_divide_are_refused(tiny_model):
    model = tiny_model("llama", num_key_value_heads=4)
    with pytest.raises(UsageError, match=r"`kv_heads` = 3 does not divide the parent's 4.*take of 4, 2, 1"):
        discover(model, Menu(kv_heads=(3,)))
    assert [each.label for each in discover(model, Menu(kv_heads=(4, 1), skip=False)).layers[0].attention] == [
        "kv4",
        "kv1",
        "linear",
    ]


def test_menus_refuse_what_no_model_has():
    with pytest.raises(ValueError, match=r"`widths` must be parts between 0 and 1, got 1.5"):
        Menu(widths=(1.5,))
    with pytest.raises(ValueError, match=r"`windows` must be positive, got 0"):
        Menu(windows=(0,))


def test_a_space_refuses_what_it_does_not_hold(tiny_model):
    space = discover(tiny_model(), MENU)
    space.check(space.parent)
    wide = space.parent.with_layer(1, Choice(attention=NoAttention(), ffn=Width(width=44)))
    with pytest.raises(UsageError, match=r"`ffn` of layer 1 cannot be width44; its library has width48, width40"):
        space.check(wide)
    with pytest.raises(UsageError, match=r"has 1 layers, the parent 2"):
        space.check(Architecture(layers=space.parent.layers[:1]))
    blind = Architecture(layers=(Choice(attention=LinearAttention(), ffn=NoFfn()),) * 2)
    with pytest.raises(UsageError, match=r"no layer that attends"):
        space.check(blind)
