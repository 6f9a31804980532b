"""Costs follow what assembled children measure, and rounds around a child only ever lower its divergence."""

import pytest
import torch

from planish.compress.costs import Costs, Numbers, Price, Scenario, options_of, parameters
from planish.compress.judge import Judge, Whole
from planish.compress.realise import assemble
from planish.compress.scores import Scoring, score
from planish.compress.search import Ceiling, search, share_of_parent
from planish.compress.settle import improve, quality, settle
from planish.compress.space import Choice
from planish.compress.stack import Stack
from planish.compress.text import rows_of
from planish.errors import UsageError

DECODE = Scenario(phase="decode", context=16)


@pytest.fixture(scope="module")
def scene(library, sentences):
    blocks = library()
    prices = {
        name: Price(seconds=1e-9 * parameters(blocks.space, option), source="measured")
        for name, option in options_of(blocks.space).items()
    }
    costs = Costs(
        space=blocks.space,
        numbers=Numbers(),
        machine="drawn",
        prices={DECODE.label: prices},
        ends_s={DECODE.label: 1e-6},
        scenarios={DECODE.label: DECODE},
        factors={},
    )
    stack = Stack(blocks)
    judge = Judge(stack, sentences[:8])
    return blocks, costs, stack, judge, score(stack, judge, Scoring(joint=0)).table(blocks.space)


def _target(costs, share):
    return share_of_parent(Ceiling(kind="latency", at_most=0, scenario=DECODE.label), share, costs)


@pytest.mark.parametrize("truth", [0.8, 1.0, 1.3])
def test_a_child_settles_where_prediction_is_measurement(scene, truth):
    """The machine takes `truth` times what the costs say, and a constant more."""
    blocks, costs, _, _, harm = scene
    ceiling = _target(costs, 0.7)
    settled = settle(
        lambda now: search(blocks.space, harm, [ceiling], now).architecture,
        [ceiling],
        costs,
        lambda child: {DECODE.label: truth * costs.model_seconds(child, DECODE.label) + 5e-7},
    )
    assert settled.measured[DECODE.label] <= 1.02 * ceiling.at_most
    assert settled.agrees
    assert settled.predicted[DECODE.label] == pytest.approx(settled.measured[DECODE.label], rel=0.02)
    corrected = settled.costs.model_seconds(settled.architecture, DECODE.label)
    assert corrected == pytest.approx(settled.measured[DECODE.label], rel=1e-12)


@pytest.mark.parametrize(
    "order", [("small", "large", "medium"), ("medium", "large", "small"), ("large", "small", "medium")]
)
def test_of_children_within_the_limit_the_nearest_to_it_is_taken(scene, order):
    blocks, costs, _, _, _ = scene
    space = blocks.space
    children = {
        "small": space.parent.with_layer(
            0, Choice(attention=space.layers[0].attention[-1], ffn=space.layers[0].ffn[-1])
        ),
        "medium": space.parent.with_layer(
            0, Choice(attention=space.layers[0].attention[0], ffn=space.layers[0].ffn[-1])
        ),
        "large": space.parent,
    }
    seconds = {children["small"]: 0.5, children["medium"]: 0.9, children["large"]: 1.2}
    turns = iter(order)
    settled = settle(
        lambda now: children[next(turns)],
        [Ceiling(kind="latency", at_most=1.0, scenario=DECODE.label)],
        costs,
        lambda child: {DECODE.label: seconds[child]},
        rounds=3,
    )
    assert settled.architecture == children["medium"]


def test_where_nothing_is_found_nothing_settles(scene):
    _, costs, _, _, _ = scene
    assert settle(lambda now: None, [], costs, lambda child: {}) is None


def test_the_parent_is_of_its_own_quality(scene, sentences):
    _, _, stack, judge, _ = scene
    found = quality(stack, judge, batch_rows=3)
    assert found.kl == pytest.approx(0, abs=1e-12)
    assert (found.agreement, found.loss_error) == (1.0, pytest.approx(0, abs=1e-12))
    assert found.loss == pytest.approx(judge.nll.mean().item())


def test_a_written_child_is_judged_as_its_stack(scene):
    blocks, _, _, judge, _ = scene
    layer = blocks.space.layers[1]
    child = blocks.space.parent.with_layer(1, Choice(attention=layer.attention[-1], ffn=layer.ffn[-2]))
    stack, whole = quality(Stack(blocks, child), judge), quality(Whole(assemble(blocks, child)), judge)
    assert whole.kl == pytest.approx(stack.kl, rel=1e-9)
    assert whole.loss == pytest.approx(stack.loss, rel=1e-9)
    assert whole.agreement == stack.agreement


def test_rounds_lower_the_divergence_and_keep_to_the_limits(scene):
    blocks, costs, _, judge, harm = scene
    ceiling = _target(costs, 0.6)
    first = search(blocks.space, harm, [ceiling], costs).architecture
    child, told = improve(blocks, first, judge, [ceiling], costs, Scoring(joint=0), radius=2, rounds=3)
    before, after = (quality(Stack(blocks, each), judge).kl for each in (first, child))
    assert costs.model_seconds(child, DECODE.label) <= ceiling.at_most
    assert after <= before
    assert told[0].kl_before == pytest.approx(before)
    assert all(each.changed <= 2 for each in told)
    assert all(each.accepted == (each.kl_after < each.kl_before) for each in told)
    assert (after < before) == any(each.accepted for each in told)


def test_a_stack_in_bf16_is_near_the_one_in_full(scene):
    blocks, _, _, judge, _ = scene
    found = quality(Stack(blocks, dtype=torch.bfloat16), judge)
    assert 0 < found.kl < 0.01


def test_rows_follow_one_another_and_too_few_are_said(tiny_tokenizer, tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one two three four five six seven\n" * 20, encoding="utf-8")
    rows = rows_of([str(path)], tiny_tokenizer, context=8, count=4)
    assert rows.shape == (4, 8)
    assert torch.equal(rows_of([str(path)], tiny_tokenizer, context=8, count=2, skip=2), rows[2:])
    with pytest.raises(UsageError, match="name more text"):
        rows_of([str(path)], tiny_tokenizer, context=8, count=4000)
