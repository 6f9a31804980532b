"""The simulator against published measurements; see `benchmarks/pipeline_published.py` for sources and assumptions."""

import importlib.util
import sys
from functools import cache
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "benchmarks" / "pipeline_published.py"
SPEC = importlib.util.spec_from_file_location("pipeline_published", PATH)
published = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = published
SPEC.loader.exec_module(published)

RUNS = published.read_runs()
TABLES = published.read_tables()
IN_FLIGHT = {"1f1b": 8, "redistributed": 8, "vocab-2": 9, "vocab-1": 10}
# 1.18 % too long: in this run a sender that waits is too slow and one that does not (0.998) too fast.
BEYOND = {("vocab-2", 32_000, 4096)}


@cache
def simulated(key, *, overlap=False):
    return published.iteration(RUNS[key], overlap=overlap)


@pytest.mark.parametrize(
    "key",
    [
        pytest.param(key, marks=pytest.mark.xfail(strict=True, reason="1.0118 of the measured time"))
        if key in BEYOND
        else key
        for key in RUNS
        if key[0] in IN_FLIGHT
    ],
    ids=lambda key: "-".join(map(str, key)),
)
def test_an_iteration_takes_as_long_as_it_was_measured(key):
    seconds, flying = simulated(key)
    assert max(flying) == IN_FLIGHT[key[0]]
    assert seconds == pytest.approx(RUNS[key].iteration, rel=0.01)


def test_the_run_beyond_the_limit_lies_between_the_two_ways_to_send():
    for key in BEYOND:
        fast, _ = simulated(key, overlap=True)
        slow, _ = simulated(key)
        assert fast < RUNS[key].iteration < slow < 1.012 * RUNS[key].iteration


@pytest.mark.parametrize("tokens", [2048, 4096])
@pytest.mark.parametrize("vocabulary", published.VOCABULARIES)
@pytest.mark.parametrize("method", ["vocab-1", "vocab-2"])
def test_the_gain_over_redistribution_is_the_published_one(method, vocabulary, tokens):
    """Both times within 1 % leave the ratio of throughputs 2 %; 8 GPUs, whose pass times are known."""
    ours, _ = simulated((method, vocabulary, tokens))
    theirs, _ = simulated(("redistributed", vocabulary, tokens))
    printed = [TABLES["1f1b", 8, tokens, each, vocabulary][0] for each in (method, "redistributed")]
    assert theirs / ours == pytest.approx(printed[0] / printed[1], rel=0.02)
    assert theirs / ours > 1.05


def test_the_printed_range_and_where_the_table_goes_beyond_it():
    """The abstract says 5 % to 51 %; table 5 itself goes to 58 %."""
    gains = {
        (ranks, tokens, vocabulary): TABLES["1f1b", ranks, tokens, "vocab-1", vocabulary][0]
        / TABLES["1f1b", ranks, tokens, "redistributed", vocabulary][0]
        - 1
        for ranks in (8, 16, 32)
        for tokens in (2048, 4096)
        for vocabulary in published.VOCABULARIES
    }
    assert round(min(gains.values()), 2) == 0.05
    assert round(gains[32, 4096, 256_000], 2) == 0.51
    assert max(gains, key=gains.get) == (32, 2048, 256_000)
    assert round(max(gains.values()), 2) == 0.58


@pytest.mark.parametrize(("vocabulary", "on_last"), [(32_000, 4), (64_000, 3), (128_000, 2), (256_000, 0)])
def test_redistribution_leaves_the_last_stage_the_published_layers(vocabulary, on_last):
    head_layers = published._head_layers(vocabulary, 3072)
    assert published.redistribute(32, 8, head_layers)[-1] == on_last


# Counting is the same for all sizes; 1F1B on more than 8 ranks is left to the benchmark for its time.
PEAKS = [key for key in TABLES if key[0] == "v-half" or key[1] == 8]


@pytest.mark.parametrize("key", PEAKS, ids=lambda key: "-".join(map(str, key)))
def test_counted_peaks_are_near_the_published_ones(key):
    """Within a tenth: workspaces, fragmentation, positions and norms are left out. What ran out had 80 GB a device."""
    most, least = published.counted_peaks(*key)
    measured = TABLES[key][1]
    if measured is None:
        assert most > 80e9 / 2**30
    else:
        assert most == pytest.approx(measured, rel=0.1)
    if key[0] == "v-half" and key[3] == "vocab-1":
        assert most / least <= 1.05
