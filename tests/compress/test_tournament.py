"""Successive halving: its budget, who stays, ranks before and after; candidates that are not the same child twice."""

import pytest

from planish.compress.baselines import Task
from planish.compress.candidates import candidates
from planish.compress.costs import Costs, Numbers, Price, Scenario
from planish.compress.judge import Judge
from planish.compress.measure import sizes_of
from planish.compress.scores import Scoring, score
from planish.compress.search import Ceiling, search
from planish.compress.settle import settle
from planish.compress.space import Architecture, Choice, KeepHeads, NoAttention, NoFfn, Width
from planish.compress.stack import Stack
from planish.compress.tournament import compete, least_steps, rounds_of

DECODE = Scenario(phase="decode", context=24)


def _child(width):
    return Architecture(layers=(Choice(attention=KeepHeads(kv_heads=1), ffn=Width(width=width)),))


@pytest.mark.parametrize(("count", "steps"), [(1, 5), (2, 9), (4, 24), (5, 100), (8, 24)])
def test_rounds_share_the_budget(count, steps):
    rounds = rounds_of(count, steps)
    assert rounds[0][0] == count
    had, spent = 0, 0
    for alive, done in rounds:
        spent += alive * (done - had)
        assert done > had
        had = done
    assert spent <= steps
    assert -(-rounds[-1][0] // 2) == 1
    assert all(done >= 1 for _, done in rounds_of(count, least_steps(count)))


def test_the_best_learner_wins_whoever_led_before():
    """Divergence start - rate * steps: the leader learns nothing, the last one most."""
    starts, rates = {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0}, {"a": 0.0, "b": 0.1, "c": 0.3, "d": 0.5}
    children = {name: _child(8 * place) for place, name in enumerate(starts, 1)}
    names = {each: name for name, each in children.items()}
    had = dict.fromkeys(starts, 0)

    def teach(child, steps):
        name = names[child]
        assert steps >= had[name]
        had[name] = steps
        return starts[name] - rates[name] * steps

    found = compete(children, teach, 48)
    # 6 steps each leave 1.0, 1.4, 1.2 and 1.0; a and d have 12 more.
    assert [each.name for each in found] == ["d", "a", "c", "b"]
    assert [each.rank_before for each in found] == [4, 1, 3, 2]
    assert [each.rank_after for each in found] == [1, 2, 3, 4]
    assert sum(had.values()) <= 48
    assert {each.name: each.steps for each in found} == had
    assert found[0].after == starts["d"] - rates["d"] * had["d"]
    assert found[1].before == found[1].after == 1.0


def test_candidates_are_unlike_keep_to_the_limit_and_hold_depth_drop(library, sentences):
    blocks = library()
    scores = score(Stack(blocks), Judge(Stack(blocks), sentences[:6]), Scoring(joint=0))
    sizes = sizes_of(blocks.config, blocks.space)
    costs = Costs(
        space=blocks.space,
        numbers=Numbers(),
        machine="",
        prices={DECODE.label: {name: Price(seconds=float(each), source="measured") for name, each in sizes.items()}},
        ends_s={DECODE.label: 0.0},
        scenarios={DECODE.label: DECODE},
        factors={},
        sizes=sizes,
    )
    whole = costs.model_seconds(blocks.space.parent, DECODE.label)
    ceilings = [Ceiling(kind="latency", at_most=0.7 * whole, scenario=DECODE.label)]
    harm = scores.table(blocks.space)

    def measured(child):
        return {DECODE.label: costs.model_seconds(child, DECODE.label)}

    first = settle(lambda now: search(blocks.space, harm, ceilings, now).architecture, ceilings, costs, measured)
    task = Task(space=blocks.space, harm=harm, ceilings=ceilings, costs=costs, influence=[0.3, 0.1, 0.2])
    found = candidates({"search": first, "again": first}, scores, task, measured, metric="kl")
    assert next(iter(found)) == "search"
    assert "again" not in found
    assert found["depth drop"].architecture.layers[1] == Choice(attention=NoAttention(), ffn=NoFfn())
    children = [each.architecture for each in found.values()]
    assert len(set(children)) == len(children) >= 4
    assert all(measured(each)[DECODE.label] <= 1.03 * 0.7 * whole for each in children)
    for name in {"other layers", "yet other layers"} & set(found):
        same = sum(a == b for a, b in zip(found[name].architecture.layers, children[0].layers, strict=True))
        assert same <= 2
