"""The choice bounds as little as the budget allows, and says why."""

from dataclasses import replace

from planish.methods import Bitmap, Blocked, Checkpoint, Offload, Packed, Plain, Plan, Tiled, keeps_attention
from planish.plan.choose import advise, choose
from planish.plan.offers import activation_methods
from planish.price.config import read_config

GIB = 2**30
TILED = (Tiled(),)
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 64,
}


def price(plan):
    """Return 100 GiB, and what each plain peak adds."""
    added = {"attention": 40, "vocab": 30, "boundary": 20}
    kept = 5 * keeps_attention(plan.boundary)
    return GIB * (100 + kept + sum(size for peak, size in added.items() if isinstance(getattr(plan, peak), Plain)))


def chosen(budget, named=()):
    return choose(price, Plan(), named=frozenset(named), budget_bytes=budget * GIB)


def test_the_plain_way_wins_where_it_fits():
    choice = chosen(190)
    assert choice.plan == Plan.plain()
    assert choice.peak_bytes == 190 * GIB
    assert all("= plain" in reason for reason in choice.reasons)


def test_peaks_are_bounded_until_it_fits_and_no_further():
    assert chosen(189).plan == Plan(vocab=Plain(), boundary=Plain())
    assert chosen(149).plan == Plan(boundary=Plain())
    assert chosen(104).plan == Plan()
    assert isinstance(chosen(104).plan.boundary, Checkpoint)


def test_attention_is_kept_where_that_fits():
    assert chosen(105).plan == Plan(boundary=Checkpoint(keep_attention=True))
    assert "boundary = checkpoint, attention kept: plain needs 120.00 GiB" in chosen(105).reasons[2]
    assert chosen(104).plan == Plan()
    named = frozenset({"attention"})
    assert choose(price, Plan(attention=Plain()), named=named, budget_bytes=145 * GIB).plan == Plan(attention=Plain())


def test_networks_run_in_tiles_where_nothing_else_is_left_and_that_lowers_the_peak():
    def priced(gain):
        return lambda plan: price(plan) - gain * GIB * isinstance(plan.activation, Tiled)

    def pick(gain, budget, offered=TILED):
        return choose(priced(gain), Plan(), named=frozenset(), budget_bytes=budget * GIB, activation=offered)

    assert pick(30, 100).plan == Plan()
    assert pick(30, 100).reasons[3] == "activation = plain: 100.00 GiB fit without bounding it"
    assert pick(30, 99).plan == Plan(activation=Tiled())
    assert "activation = tiled: plain needs 100.00 GiB, 1.00 GiB too much; now 70.00 GiB" in pick(30, 99).reasons
    assert pick(0, 99).plan == Plan()
    assert "activation = plain: no other way lowers the peak" in pick(0, 99).reasons
    assert pick(30, 99, (Bitmap(), Tiled())).plan == Plan(activation=Tiled())
    assert len(pick(30, 99, ()).reasons) == 3


def test_networks_of_the_relu_family_are_offered_packing_first_and_experts_nothing():
    def offers(family, **config):
        return activation_methods(read_config(SIZES | {"model_type": family} | config))

    assert offers("llama", hidden_act="silu") == offers("gemma2") == (Tiled(),)
    assert offers("nemotron", hidden_act="relu2") == offers("opt", activation_function="relu") == (Bitmap(), Tiled())
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "hidden_act": "silu"}
    assert offers("qwen3_moe", **experts) == ()
    assert offers("qwen3_moe", **experts, mlp_only_layers=[0]) == (Tiled(),)
    assert offers("qwen2_moe", **experts, shared_expert_intermediate_size=8) == (Tiled(),)


def test_the_density_that_packing_assumes_is_named():
    assert "at most 55 % of activations" in Plan(activation=Bitmap()).assumptions[0]
    assert Plan(activation=Bitmap(arena_bytes=GIB)).assumptions == Plan(activation=Tiled()).assumptions == ()


def test_far_memory_is_advised_where_it_helps_and_only_there():
    def with_far(gain):
        return lambda plan: 100 * GIB - gain * GIB * isinstance(plan.boundary, Offload)

    offload = Plan(boundary=Offload(disk=GIB))
    assert advise(with_far(0), offload, budget_bytes=None) == (
        "boundary = offload lowers no peak here: 100.00 GiB with it, 100.00 GiB with checkpoint, since the peak lies "
        "elsewhere; choose checkpoint",
    )
    assert advise(with_far(1), offload, budget_bytes=None) == ()
    assert advise(with_far(30), Plan(), budget_bytes=None) == advise(with_far(30), Plan(), budget_bytes=100 * GIB) == ()
    assert "would need 70.00 GiB, which fits" in advise(with_far(30), Plan(), budget_bytes=80 * GIB)[0]
    assert "would need 70.00 GiB, still too much" in advise(with_far(30), Plan(), budget_bytes=60 * GIB)[0]
    assert advise(with_far(30), replace(Plan(), boundary=Plain()), budget_bytes=1) == ()


def test_reasons_name_what_plain_would_need():
    first, second, _ = chosen(149).reasons
    assert first == "attention = packed: plain needs 190.00 GiB, 41.00 GiB too much; now 150.00 GiB"
    assert second == "vocab = blocked: plain needs 150.00 GiB, 1.00 GiB too much; now 120.00 GiB"


def test_what_is_named_is_kept():
    choice = choose(price, Plan(vocab=Plain()), named=frozenset({"vocab"}), budget_bytes=100 * GIB)
    assert choice.plan == Plan(attention=Packed(), vocab=Plain())
    assert choice.peak_bytes == 130 * GIB
    assert len(choice.reasons) == 2
    assert isinstance(chosen(100).plan.vocab, Blocked)
