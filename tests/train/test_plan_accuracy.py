"""What a real run's ledger counts is what was said before it began."""

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["dense, default, bf16, two microbatches", "mixture, pipelined, fp32", "dense, inputs on disk"]
)
def test_the_ledger_is_never_above_the_price_and_at_most_1_per_cent_below(monkeypatch, name):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.delitem(sys.modules, "plan_accuracy", raising=False)
    import plan_accuracy

    assert 0 <= plan_accuracy.measure(name)["difference"] <= 0.01
