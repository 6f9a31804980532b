"""A model's table prices rows over ranks by arithmetic: what a dry run of such a rank holds, or a little more."""

from dataclasses import replace

import pytest

from forks import run_in_child
from planish.plan.estimate import estimate
from planish.runfile import load
from planish.shapes import BatchShape
from planish.train.predict import by_dry_run, keeps_master, table_of

SPANS = {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 48}


@pytest.mark.parametrize(("config", "boundary"), [({}, "checkpoint"), (SPANS, "plain")], ids=["heads", "spans"])
def test_a_table_says_what_a_rank_with_spans_of_rows_holds(model_folder, config, boundary):
    settings = [("data.train", ["builtin:english"]), ("data.context", 256), ("plan.boundary", boundary)]
    run = load(None, [("model.from", str(model_folder("qwen3", **config))), ("mesh.dp", 2), ("mesh.cp", 2), *settings])

    def answers():
        table = table_of(replace(run, mesh=replace(run.mesh, cp=1)), lambda _: None)
        priced = estimate(table, BatchShape(context=128, sharers=2), run.plan, master=keeps_master(run))
        dry = by_dry_run(run)
        return {phase: (priced.phases[phase].peak_bytes, each.peak_bytes) for phase, each in dry.phases.items()}

    found = run_in_child(answers)
    assert found["backward"][0] == found["backward"][1]
    for phase, (priced, dry) in found.items():
        assert 0 <= priced - dry <= 0.02 * dry, phase
