"""Which schedule a pipeline takes where the run file leaves it open: by what fits, told by what its passes take."""

import json

import pytest

from planish.methods import Pipeline, Plan
from planish.pipeline.observed import times_of
from planish.pipeline.workload import Workload
from planish.plan.estimate import Estimate, PhasePrice
from planish.train import fit
from planish.train.predict import Prediction
from planish.train.turns import faster_turns, measured_times, take_turns

MIB = 2**20


def held(nbytes):
    price = PhasePrice(peak_bytes=nbytes, categories={}, owners=(), where="")
    return Prediction(estimate=Estimate(phases={"backward": price}), table=None, plan=Plan())


def prices(usual, half):
    """Return what says so of 1F1B and of V-Half, and whom it was asked about."""
    asked = []

    def predict(run, _say=None):
        method = "1f1b" if run.plan.pipeline is None else run.plan.pipeline.method
        asked.append(method)
        return held({"1f1b": usual, "v-half": half}[method])

    return predict, asked


@pytest.mark.parametrize(
    ("usual", "half", "chosen", "words"),
    [
        (9, 5, None, "pipeline = 1f1b: 9.0 MiB fit"),
        (12, 9, "v-half", "pipeline = v-half: 1f1b needs 12.0 MiB, 2.0 MiB too much; now 9.0 MiB, and a step takes"),
        (12, 11, None, "pipeline = 1f1b: 1f1b needs 12.0 MiB, 2.0 MiB too much, and v-half needs 11.0 MiB"),
    ],
)
def test_v_half_is_taken_where_it_alone_fits(run_of, usual, half, chosen, words):
    run = run_of("llama", {"pp": 2}, ("memory.budget", "10MiB"), num_hidden_layers=4)
    predict, asked = prices(usual * MIB, half * MIB)
    turns = take_turns(run, predict)
    assert (turns.run.plan.pipeline and turns.run.plan.pipeline.method) == chosen
    assert turns.prediction == held((half if chosen else usual) * MIB)
    assert turns.reasons[0].startswith(words)
    assert asked == (["1f1b"] if usual <= 10 else ["1f1b", "v-half"])


def test_it_is_not_where_ranks_share_stages(run_of):
    run = run_of("llama", {"pp": 2, "dp": 2}, ("memory.budget", "10MiB"), num_hidden_layers=4)
    predict, asked = prices(12 * MIB, 9 * MIB)
    turns = take_turns(run, predict)
    assert turns.run == run
    assert asked == ["1f1b"]
    assert turns.reasons[0].endswith("v-half takes stages of one rank each, and 2 share each of these")


def test_it_is_told_how_long_its_passes_are(run_of):
    run = run_of("llama", {"pp": 2}, ("memory.budget", "10MiB"), num_hidden_layers=4)
    predict, _ = prices(12 * MIB, 9 * MIB)
    [by_products] = take_turns(run, predict).reasons
    assert "(forward : input half : weight half of a layer = 1 : 2.0 : 1, by products)" in by_products
    run.save.dir.mkdir()
    passes = [[f"{stage}F0", 0.0, 0.5] for stage in range(2)] + [[f"{stage}B0", 1.0, 2.25] for stage in range(2)]
    (run.save.dir / "pipeline.json").write_text(json.dumps({"passes": passes}))
    [as_measured] = take_turns(run, predict).reasons
    assert "= 1 : 1.5 : 1, as measured)" in as_measured


def test_what_is_named_or_has_no_budget_is_left_alone(run_of):
    predict, asked = prices(12 * MIB, 9 * MIB)
    named = run_of("llama", {"pp": 2}, ("memory.budget", "10MiB"), ("plan.pipeline", "1f1b"), num_hidden_layers=4)
    for run in (named, run_of("llama", {"pp": 2}, num_hidden_layers=4)):
        turns = take_turns(run, predict)
        assert (turns.run, turns.reasons) == (run, ())
    assert asked == ["1f1b", "1f1b"]


def test_too_few_layers_for_a_v_are_said(run_of):
    run = run_of("llama", {"pp": 2}, ("memory.budget", "10MiB"), num_hidden_layers=3)
    [reason] = take_turns(run, prices(12 * MIB, 9 * MIB)[0]).reasons
    assert reason.endswith("v-half takes two layers a rank, 4 in all, and the model has 3")


def test_the_verdict_is_of_what_was_chosen(run_of, monkeypatch):
    run = run_of("llama", {"pp": 2}, ("memory.budget", "10MiB"), num_hidden_layers=4)
    monkeypatch.setattr(fit, "predict", prices(12 * MIB, 9 * MIB)[0])
    verdict = fit.judge(run)
    assert verdict.run.plan.pipeline == Pipeline(method="v-half")
    assert verdict.tell(lambda _: None) == held(9 * MIB)
    assert verdict.said[0].startswith("pipeline = v-half")
    monkeypatch.setattr(fit, "predict", prices(12 * MIB, 11 * MIB)[0])
    verdict = fit.judge(run)
    assert (verdict.run, verdict.refused.exit_code) == (run, 3)


def test_a_run_tells_when_the_other_schedule_would_be_faster():
    work = {"layers": 8, "microbatches": 8, "head": 0.5}
    even, uneven = (Workload(layer_backward=each, **work) for each in (2.0, 9.0))
    assert faster_turns(Pipeline(method="1f1b"), even, 4) is not None  # no bubbles but at both ends
    assert '= "v-half" would take' in faster_turns(Pipeline(method="1f1b"), even, 4)
    assert faster_turns(Pipeline(method="v-half"), even, 4) is None
    assert '= "1f1b" would take' in faster_turns(Pipeline(method="v-half"), uneven, 4)
    assert faster_turns(Pipeline(method="1f1b"), even, 8) is None  # eight layers are no V of sixteen stages


def test_times_are_those_of_the_passes(run_of, tmp_path):
    passes = [("0F0", 0.0, 2.0), ("1F0", 2.0, 5.0), ("0S0", 5.0, 6.0), ("1S0", 5.0, 6.0), ("0T0", 6.0, 6.5)]
    passes += [("1I0", 7.0, 9.0), ("1W0", 9.0, 10.0), ("0I0", 9.0, 12.0), ("0W0", 12.0, 14.0)]
    passes += [(f"{rank}{kind}0", 0.0, 0.25) for rank in range(2) for kind in ("IF", "IB")]
    times = times_of(passes, num_layers=2)
    assert (times.layer_s, times.layer_backward_s, times.embedding_s) == (2.5, 4.0, 0.25)
    assert times.head_s == pytest.approx(2.5 / 3)
    assert times_of([], num_layers=2) is None
    assert measured_times(tmp_path, run_of("llama", {"pp": 2})) is None
