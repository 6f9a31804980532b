"""Scores from a layer on are those of the whole model, and what the judge says is what full logits say."""

import json

import pytest
import torch
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from planish import linear_kl
from planish.compress.journal import Journal, key_of
from planish.compress.judge import Judge
from planish.compress.scores import Scoring, score
from planish.compress.space import Choice
from planish.compress.stack import Stack


@pytest.fixture(scope="module")
def scene(library, sentences):
    blocks = library()
    stack = Stack(blocks)
    return blocks, stack, Judge(stack, sentences[:6], batch_rows=4)


def _logits(stack, ids):
    *_, last = stack.states(ids)
    return stack.after(len(stack.layers), last) @ stack.head.T


def _with(blocks, index, choice):
    return Stack(blocks, blocks.space.parent.with_layer(index, choice))


def test_a_child_is_judged_as_full_logits_judge_it(scene, sentences):
    blocks, stack, judge = scene
    layer = blocks.space.layers[1]
    child = _with(blocks, 1, Choice(attention=layer.attention[-1], ffn=layer.ffn[2]))
    ids = sentences[:6]
    *_, last = child.states(ids)
    final = child.after(len(child.layers), last)
    found = judge.judge(final, child.head)
    parent, mine = log_softmax(_logits(stack, ids)[:, :-1], -1), log_softmax(_logits(child, ids)[:, :-1], -1)
    torch.testing.assert_close(found.kl, kl_div(mine, parent, log_target=True, reduction="none").sum(-1))
    nll = cross_entropy(mine.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(6, -1)
    torch.testing.assert_close(found.nll, nll)
    assert torch.equal(found.same, parent.argmax(-1) == mine.argmax(-1))
    *_, parent_last = stack.states(ids)
    teacher = stack.after(len(stack.layers), parent_last)
    told = linear_kl(final[:, :-1], child.head, teacher[:, :-1], stack.head)
    assert found.kl.mean().item() == pytest.approx(told.item(), rel=1e-10)


def test_a_child_with_a_head_of_its_own_is_judged_by_it(scene, sentences):
    """After global distillation the child's head is no longer the parent's; its mean rows would be the wrong ones."""
    _, stack, judge = scene
    ids, noise = sentences[:6], torch.randn(stack.head.shape, generator=torch.Generator().manual_seed(1))
    head = stack.head + 0.1 * noise.to(stack.head)
    *_, last = stack.states(ids)
    final = stack.after(len(stack.layers), last)
    parent, mine = (log_softmax((final @ each.T)[:, :-1], -1) for each in (stack.head, head))
    found = judge.judge(final[:4], head)
    dense = kl_div(mine, parent, log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(found.kl, dense[:4])
    assert torch.equal(found.same, (parent.argmax(-1) == mine.argmax(-1))[:4])
    assert judge.judge(final[:4], stack.head.clone()).kl.max().item() < 1e-12


def test_the_parent_is_no_distance_from_itself(scene, sentences):
    _, stack, judge = scene
    *_, last = stack.states(sentences[:6])
    found = judge.judge(stack.after(len(stack.layers), last), stack.head)
    assert found.kl.max().item() < 1e-12
    assert found.same.all()
    torch.testing.assert_close(found.nll, judge.nll)


def test_fewer_tokens_count_where_every_says_so(scene, sentences):
    _, stack, judge = scene
    some = Judge(stack, sentences[:6], every=5)
    assert some.num_tokens == 6 * 6
    torch.testing.assert_close(some.nll, judge.nll[:, 4::5])


def test_suffix_scores_are_those_of_whole_models(scene, sentences):
    blocks, stack, judge = scene
    scores = score(stack, judge, Scoring(batch_rows=4, joint=0.1))
    parent = log_softmax(_logits(stack, sentences[:6])[:, :-1], -1)
    expected = sum(len(layer.attention) + len(layer.ffn) for layer in blocks.space.layers)
    assert len(scores.parts) == expected
    for index in (0, 2):
        layer = blocks.space.layers[index]
        for choice in (
            Choice(attention=layer.attention[1], ffn=layer.ffn[0]),
            Choice(attention=layer.attention[0], ffn=layer.ffn[-2]),
        ):
            mine = log_softmax(_logits(_with(blocks, index, choice), sentences[:6])[:, :-1], -1)
            kl = kl_div(mine, parent, log_target=True, reduction="none").sum(-1)
            assert scores.value(index, choice, "kl") == pytest.approx(kl.mean().item(), rel=1e-9)
            rows = kl.mean(1)
            name = f"{index} attention {choice.attention.label}"
            if choice.attention != layer.attention[0]:
                assert scores.parts[name].kl_error == pytest.approx((rows.std() / 6**0.5).item(), rel=1e-9)
    assert scores.base.kl == pytest.approx(0, abs=1e-12)
    assert scores.value(0, blocks.space.parent.layers[0], "kl") == 0
    assert scores.joint
    assert scores.additivity().count == len(scores.joint)
    assert 0.5 < scores.additivity().ratio < 2


def test_scores_around_a_child_count_from_the_child(scene, sentences):
    blocks, _, judge = scene
    layer = blocks.space.layers[1]
    around = _with(blocks, 1, Choice(attention=layer.attention[1], ffn=layer.ffn[1]))
    scores = score(around, judge, Scoring(joint=0))
    back = scores.parts[f"1 attention {layer.attention[0].label}"]
    assert scores.base.kl > 0
    assert back.kl < 0
    assert scores.parts[f"1 attention {layer.attention[1].label}"].kl == 0


def test_an_interrupted_scoring_goes_on_where_it_stopped(scene, tmp_path):
    _, stack, judge = scene
    path, key, settings = tmp_path / "scores.jsonl", key_of("test"), Scoring(batch_rows=3, joint=0)
    whole = score(stack, judge, settings, journal=Journal(path, key))
    lines = path.read_text(encoding="utf-8").splitlines()
    cut = "\n".join(lines[:40]) + '\n{"name": "1 atten'
    path.write_text(cut, encoding="utf-8")
    seen = []
    again = score(stack, judge, settings, journal=Journal(path, key), progress=lambda done, total: seen.append(done))
    assert again == whole
    assert len(path.read_text(encoding="utf-8").splitlines()) >= len(lines)
    entries = [json.loads(line) for line in lines[2:] if line]
    assert len(entries) == seen[-1]


def test_results_of_other_inputs_are_begun_anew(tmp_path):
    path = tmp_path / "a.jsonl"
    Journal(path, "one").put("x", 1)
    assert "x" in Journal(path, "one")
    assert "x" not in Journal(path, "two")
    assert "x" not in Journal(path, "one")
