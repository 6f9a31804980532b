"""Rows of layers that repeat: what is walked of them says what walking all of them would."""

from dataclasses import replace

import pytest

from planish.methods import Checkpoint, Offload, Packed, Pipelined, Plain, Plan
from planish.plan.question import Candidate, Question
from planish.price import step
from planish.price.architectures import find_architecture
from planish.price.config import read_config
from planish.price.hardware import KNOWN
from planish.price.rows import stands_for
from planish.shapes import MeshShape


def test_each_layer_is_walked_or_stood_for():
    pattern = (0, *(1, 1, 2) * 12, 3)
    times = stands_for(pattern, lag=2)
    assert sum(times) == len(pattern)
    assert set(times) == {0, 1, 8}
    assert times[0] == times[-1] == 1
    for kind in (1, 2):
        assert sum(each for each, found in zip(times, pattern, strict=True) if found == kind) == pattern.count(kind)
    assert stands_for((0, 1, 2, 3, 4, 5, 6, 7, 8, 9), lag=0) == [1] * 10
    assert sum(stands_for((*(0,) * 20, *(1,) * 30), lag=0)) == 50


@pytest.mark.parametrize("name", ["gemma-3-4b", "gpt-oss-120b", "qwen3.5-35b-a3b", "deepseek-v3", "llama-3.1-8b"])
@pytest.mark.parametrize(
    "boundary", [Plain(), Checkpoint(), Offload(disk=2**60), Offload(disk=2**60, every=3), Offload(disk=2**30)]
)
def test_no_peak_is_lost(name, boundary, monkeypatch):
    shape = read_config(find_architecture(name))
    question = Question(
        shape=shape, dtype="bf16", context=2**15, rows=None, devices=8, hardware=KNOWN["h100"], disk=2**60
    )
    dispatch = Pipelined() if question.mixed else Plain()
    plan = Plan(attention=Packed(), dispatch=dispatch, boundary=boundary)
    candidate = Candidate(question, MeshShape(dp=8), 1, 2, plan)
    found = candidate.estimate
    monkeypatch.setattr(step, "stands_for", lambda kinds, *, lag: [1] * (len(kinds) + 0 * lag))
    every = replace(candidate).estimate
    assert {phase: each.peak_bytes for phase, each in found.phases.items()} == {
        phase: each.peak_bytes for phase, each in every.phases.items()
    }
    assert {phase: each.categories for phase, each in found.phases.items()} == {
        phase: each.categories for phase, each in every.phases.items()
    }
