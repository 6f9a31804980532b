"""What is measured runs what is served: sub-blocks with their caches, whole models beside their parent."""

import pytest
import torch

from planish.compress import measure
from planish.compress.costs import Numbers, Scenario, model_parameters, options_of
from planish.compress.journal import Journal
from planish.compress.measure import (
    Rival,
    Timing,
    calibrated,
    choose_anchors,
    complete,
    in_turns,
    keeper,
    measure_costs,
    model_run,
    sizes_of,
)
from planish.compress.realise import assemble
from planish.compress.space import Choice, NoAttention, NoFfn

SCENARIOS = [Scenario(phase="prefill", context=8, batch=2), Scenario(phase="decode", context=12, batch=2)]
QUICK = Timing(rounds=2, copies=2, cold_bytes=1)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def costs(library):
    return measure_costs(library(), SCENARIOS, QUICK)


def test_every_sub_block_is_measured_and_nothing_costs_nothing(library, costs):
    for scenario in SCENARIOS:
        prices = costs.prices[scenario.label]
        assert prices.keys() == options_of(library().space).keys()
        assert {price.source for price in prices.values()} == {"measured"}
        assert prices["attention none"].seconds == prices["ffn none"].seconds == 0
        assert all(price.seconds > 0 for name, price in prices.items() if not name.endswith("none"))
        assert costs.ends_s[scenario.label] > 0


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "qwen3-moe"])
def test_sizes_are_those_of_assembled_children_in_every_family(library, family):
    blocks = library(family)
    sizes = sizes_of(blocks.config, blocks.space)
    first = blocks.space.layers[0]
    for choice in (first.parent, Choice(attention=first.attention[1], ffn=first.ffn[-2])):
        child = blocks.space.parent.with_layer(0, choice)
        counted = sum(each.numel() for each in assemble(blocks, child).parameters())
        assert model_parameters(blocks.space, child, sizes) == counted


def test_a_mixture_is_measured_too(library):
    blocks = library("qwen3-moe")
    found = measure_costs(blocks, SCENARIOS, QUICK)
    assert all(found.prices[each.label]["ffn experts4x16"].seconds > 0 for each in SCENARIOS)
    assert found.model_seconds(blocks.space.parent, SCENARIOS[0].label) > 0


def test_a_model_is_the_sum_of_its_parts_until_it_is_calibrated(library, costs):
    space = library().space
    label = SCENARIOS[1].label
    parts = sum(costs.seconds(choice, label) for choice in space.parent.layers) + costs.ends_s[label]
    assert costs.model_seconds(space.parent, label) == pytest.approx(parts)
    known = calibrated(costs, {label: 3 * parts}, space.parent)
    assert known.model_seconds(space.parent, label) == pytest.approx(3 * parts)
    other = space.parent.with_layer(0, Choice(attention=NoAttention(), ffn=NoFfn()))
    again = calibrated(known, {label: 1.0}, other)
    assert again.model_seconds(other, label) == pytest.approx(1.0)


def test_what_was_measured_is_not_measured_again(library, tmp_path, monkeypatch):
    first = measure_costs(library(), SCENARIOS, QUICK, journal=Journal(tmp_path / "costs.jsonl", "key"))
    monkeypatch.setattr(measure, "_measure_scenario", None)
    seen = []
    again = measure_costs(
        library(),
        SCENARIOS,
        QUICK,
        journal=Journal(tmp_path / "costs.jsonl", "key"),
        progress=lambda *each: seen.append(each),
    )
    assert again == first
    assert seen == [(1, 2), (2, 2)]


def test_what_is_not_an_anchor_is_fitted(library):
    space = library().space
    found = measure_costs(library(), SCENARIOS[:1], Timing(rounds=2, copies=1, cold_bytes=1, anchors=2))
    sources = [price.source for price in found.prices[SCENARIOS[0].label].values()]
    assert sources.count("measured") == 2 + 2 + 2  # two of each kind, and nothing twice
    assert all(price.seconds >= 0 for price in found.prices[SCENARIOS[0].label].values())
    assert len(sources) == len(options_of(space))


def test_a_fit_is_exact_where_the_machine_is_three_constants(library):
    from planish.compress.costs import Rates, work_of

    space, numbers, rates = library().space, Numbers(), Rates(op_s=1e-6, flop_s=1e-11, byte_s=1e-10)
    truth = {
        name: rates.seconds(work_of(space, option, SCENARIOS[0], numbers)) for name, option in options_of(space).items()
    }
    some = {name: truth[name] for name in list(truth)[:4] + list(truth)[-5:]}
    for name, price in complete(space, SCENARIOS[0], numbers, some).items():
        assert price.seconds == pytest.approx(truth[name], rel=1e-6, abs=1e-15)
        assert price.source == ("measured" if name in some else "fitted")


def test_anchors_reach_from_the_first_to_the_last():
    assert choose_anchors(list("abcdefgh"), 3) == ["a", "e", "h"]
    assert choose_anchors(list("ab"), 3) == ["a", "b"]
    assert choose_anchors(list("abc"), None) == ["a", "b", "c"]


@pytest.mark.parametrize("first", ["parent", "none", "window"])
def test_a_decoded_token_is_that_of_the_whole_text(library, first):
    """The measured run computes what serving computes, again and again from the same cache."""
    blocks = library()
    layer = blocks.space.layers[0]
    options = {
        "parent": layer.attention[0],
        "none": layer.attention[-1],
        "window": next(a for a in layer.attention if "window" in a.label),
    }
    child = assemble(blocks, blocks.space.parent.with_layer(0, Choice(attention=options[first], ffn=layer.ffn[1])))
    run = model_run(child, SCENARIOS[1])
    said = [run() for _ in range(3)]
    assert torch.equal(said[0], said[2])
    ids = torch.randint(child.config.vocab_size, (2, 12), generator=torch.Generator().manual_seed(0))
    whole = child(input_ids=torch.cat([ids, ids[:, -1:]], 1), use_cache=False).logits[:, -1:]
    torch.testing.assert_close(said[0], whole)
    prompt = model_run(child, Scenario(phase="prefill", context=12, batch=2))
    torch.testing.assert_close(prompt(), child(input_ids=ids, use_cache=False).logits[:, -1:])


def test_turns_take_every_copy_and_go_both_ways():
    seen = []
    runs = {name: [lambda name=name, copy=copy: seen.append((name, copy)) for copy in range(2)] for name in "ab"}
    best = in_turns(runs, 3, CPU)
    assert seen[4:] == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 0), ("b", 0)]
    assert min(best.values()) >= 0


def test_a_rival_knows_the_parent_beside_itself(library):
    blocks = library()
    parent = assemble(blocks, blocks.space.parent)
    rival = Rival(parent, SCENARIOS, rounds=3)
    found = rival.measure(parent)
    assert found.keys() == rival.parent_s.keys()
    assert all(seconds > 0 for seconds in found.values())


def test_a_kept_cache_comes_back(library):
    blocks = library()
    model = assemble(blocks, blocks.space.parent)
    ids = torch.zeros(1, 5, dtype=torch.long)
    cache = model(input_ids=ids, use_cache=True).cache
    restore = keeper(cache)
    before = cache.layers[0].keys.clone()
    model(input_ids=ids[:, :1], cache=cache, use_cache=True)
    assert cache.get_seq_length() == 6
    restore()
    assert cache.get_seq_length() == 5
    assert torch.equal(cache.layers[0].keys, before)
