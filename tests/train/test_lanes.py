"""The lanes of a step: what ran beside the computation is seen, in order, and the step is as it would have been."""

import json

import pytest
import torch

from planish.memory.lanes import InlineLane
from planish.report.findings import behind
from planish.train.watch import StepWatch, thinned
from train.rank_steps import train_and_save

FAR = [("plan.boundary.method", "offload"), ("plan.boundary.disk", "4MiB")]
BETWEEN_RANKS = {"all-to-all", "all-gather", "reduce-scatter", "all-reduce"}


def test_a_run_shows_its_lanes(run_of, ranks, tmp_path):
    mesh = {"dp": 2, "cp": 2, "ep": 2}
    settings = [*FAR, ("plan.boundary.folder", str(tmp_path)), ("plan.dispatch.method", "pipelined")]
    run = run_of("qwen3-moe", mesh, *settings, ("train.steps", 4))
    ranks(lambda world: train_and_save(run, world), **mesh)
    tree = json.loads((run.save.dir / "lanes.json").read_text())
    assert tree["step"] == 3
    assert set(tree["lanes"]) == {"compute", "disk-out", "disk-in", *BETWEEN_RANKS}
    steps = [json.loads(line) for line in (run.save.dir / "metrics.jsonl").read_text().splitlines()]
    for spans in tree["lanes"].values():
        flat = [each for span in spans for each in span]
        assert flat == sorted(flat)  # in order, and never twice at once
        assert 0 <= flat[0] < steps[2]["step_s"]
    page = (run.save.dir / "report.html").read_text()
    assert "of the time of collectives and copies was behind computation in step 3" in page
    assert all(f">{name}</text>" in page for name in tree["lanes"])


def test_what_computation_covers_counts_once():
    assert behind([(1.0, 2.0), (1.5, 3.0), (5.0, 6.0)], [(0.0, 1.5), (2.5, 5.5)]) == (3.0, 1.5)
    assert behind([], [(0.0, 1.0)]) == (0.0, 0.0)


def test_only_a_watched_step_is_noted():
    lane = InlineLane()
    with StepWatch({"disk-in": lane}) as watch:
        torch.ones(4) + 1
    assert lane.seen is None
    [compute] = watch.spans().values()
    torch.ones(4) + 1
    assert watch.spans() == {"compute": compute}
    assert 0 <= compute[0][0] < compute[-1][1]


@pytest.mark.parametrize("most", [1, 2, 3, 10])
def test_thinned_spans_cover_what_was_seen(most):
    spans = [(0.0, 1.0), (1.1, 2.0), (1.5, 3.0), (7.0, 8.0), (8.5, 9.0)]
    found = thinned(spans, most)
    assert len(found) <= most
    assert all(any(first <= start and end <= last for first, last in found) for start, end in spans)
    assert found == [(0.0, 1.0), (1.1, 3.0), (7.0, 8.0), (8.5, 9.0)] or most < 4
