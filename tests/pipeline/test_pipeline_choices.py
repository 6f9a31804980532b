import subprocess
import sys
import xml.etree.ElementTree as ET
from itertools import combinations_with_replacement

import pytest

from planish.errors import UsageError
from planish.pipeline.actions import Head, Kind
from planish.pipeline.choices import Pipeline
from planish.pipeline.costs import Costs
from planish.pipeline.draw import to_svg, to_text
from planish.pipeline.layers import redistribute
from planish.pipeline.memory import Footprint, peak_bytes
from planish.pipeline.one_f_one_b import one_f_one_b
from planish.pipeline.outline import Workload, outcome, outline
from planish.pipeline.simulate import simulate
from planish.pipeline.validate import validate

CHOICES = [
    ("1f1b", "last-stage", 3),
    ("1f1b", "naive", 3),
    ("1f1b", "vocab-1", 3),
    ("1f1b", "vocab-2", 3),
    ("interlaced", "vocab-1", 3),
    ("interleaved", "last-stage", 6),
    ("v-half", "vocab-1", 6),
    ("v-min", "vocab-2", 6),
]


@pytest.mark.parametrize(("schedule", "head", "stages"), CHOICES)
def test_every_choice_becomes_a_schedule_that_runs(schedule, head, stages):
    pipeline = Pipeline(ranks=3, microbatches=6, schedule=schedule, head=head)
    result = outcome(pipeline, Workload(layers=12, head_layers=4))
    validate(result.timeline.lower())
    assert (result.timeline.schedule.name, result.timeline.schedule.head) == (schedule, head)
    assert result.timeline.schedule.num_stages == pipeline.num_stages == stages == len(result.layers)
    assert sum(result.layers) == 12
    # Forward and backward of all layers and of the head, whoever runs them; IF and IB where the head is shared.
    work = 6 * (3 * (12 + 4) + 3 * 2 * 0.15 * Head(head).shared)
    assert sum(result.timeline.busy) == pytest.approx(work)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranks": 0}, "`pipeline.ranks` must be 1 or more, got 0"),
        ({"microbatches": -1}, "`pipeline.microbatches` must be 1 or more, got -1"),
        ({"chunks": 0}, "`pipeline.chunks` must be 1 or more, got 0"),
        (
            {"schedule": "2f2b"},
            "`pipeline.schedule` must be one of 1f1b, interleaved, interlaced, v-half, v-min, got '2f2b'",
        ),
        ({"head": "first"}, "`pipeline.head` must be one of last-stage, naive, vocab-1, vocab-2, got 'first'"),
        (
            {"schedule": "interleaved"},
            '`pipeline.head` must be "last-stage" where `pipeline.schedule` is "interleaved"',
        ),
        ({"schedule": "interlaced"}, '`pipeline.head` must be "vocab-1" where `pipeline.schedule` is "interlaced"'),
    ],
)
def test_a_choice_that_is_none_is_refused(change, message):
    with pytest.raises(UsageError, match=message):
        Pipeline(**{"ranks": 2, "microbatches": 4} | change)


def test_fewer_layers_than_stages_are_refused():
    with pytest.raises(UsageError, match=r"`layers` \(7\) must be at least the number of stages \(8\); try 7 stages"):
        outline(Pipeline(ranks=4, microbatches=4, schedule="v-half"), Workload(layers=7))


def test_microbatches_that_do_not_divide_the_batch_are_refused():
    pipeline = Pipeline(ranks=2, microbatches=6)
    assert pipeline.rows_per_microbatch(24) == 4
    with pytest.raises(
        UsageError, match=r"`pipeline.microbatches` \(6\) must divide the rows of a batch \(16\); try 4"
    ):
        pipeline.rows_per_microbatch(16)


@pytest.mark.parametrize("name", ["head_layers", "embedding", "transfer"])
def test_negative_times_are_refused(name):
    with pytest.raises(UsageError, match=f"`{name}` must be 0 or more, got -1"):
        Workload(**{"layers": 8, name: -1})


@pytest.mark.parametrize(("layers", "stages"), [(4, 2), (7, 3), (9, 4)])
@pytest.mark.parametrize("head_layers", [0, 0.5, 1.7, 4, 20])
def test_redistribution_is_the_best_of_all_divisions(layers, stages, head_layers):
    """Brute force over every division, the last stage's share as large as the shortest longest stage allows."""

    def longest(parts):
        return max(*parts[:-1], parts[-1] + head_layers)

    every = [
        (*others, layers - sum(others))
        for others in combinations_with_replacement(range(layers + 1), stages - 1)
        if sum(others) <= layers
    ]
    found = redistribute(layers, stages, head_layers)
    assert sum(found) == layers
    assert longest(found) == min(map(longest, every))
    assert found[-1] == max(each[-1] for each in every if longest(each) == longest(found))
    assert list(found[:-1]) == sorted(found[:-1])
    assert found[-2] - found[0] <= 1


def test_peak_bytes_of_two_ranks_by_hand(unit_costs):
    costs = unit_costs(2, 2, Head.LAST_STAGE)
    schedule = one_f_one_b(num_ranks=2, num_microbatches=3, head=Head.LAST_STAGE, costs=costs)
    assert [str(a) for a in schedule.ranks[1]][:6] == ["1RECV_F0", "1F0", "1RECV_F1", "1B0", "1SEND_B0", "1F1"]
    footprint = Footprint(static=[1000, 2000], activation=[100, 70], hidden=7)
    # Rank 0: two microbatches and a gradient just received; rank 1: one and the next one's hidden state.
    assert peak_bytes(schedule, footprint) == (1000 + 2 * 100 + 7, 2000 + 70 + 7)


def test_the_outline_shows_ranks_rivals_and_a_picture():
    text = outline(Pipeline(ranks=2, microbatches=4), Workload(layers=8, head_layers=2), width=60)
    assert text.startswith("1f1b, head vocab-2: 2 ranks, 8 layers, 4 microbatches; time in forwards of a layer\n")
    # p + 1 and p microbatches of four layers.
    assert "   0       4                 12   " in text
    assert "   1       4                  8   " in text
    for rival in ("1f1b         last-stage", "interlaced   vocab-1", "v-half       vocab-2"):
        assert rival in text
    assert text.rstrip().splitlines()[-2].startswith("rank 0 F0")


def test_the_text_drawing_to_the_letter():
    costs = Costs.uniform(num_ranks=2, num_stages=2, passes={Kind.F: 1.0, Kind.B: 2.0})
    schedule = one_f_one_b(num_ranks=2, num_microbatches=2, head=Head.LAST_STAGE, costs=costs)
    assert to_text(simulate(schedule, costs), width=27) == (
        "rank 0 F0-F1-......B0----...B1----\nrank 1 ...F0-B0----F1-B1----......"
    )


def test_the_svg_has_a_bar_for_each_pass(unit_costs):
    costs = unit_costs(3, 3, Head.VOCAB_2, embedding=0.1)
    schedule = one_f_one_b(num_ranks=3, num_microbatches=4, head=Head.VOCAB_2, costs=costs)
    timeline = simulate(schedule, costs)
    root = ET.fromstring(to_svg(timeline, width=800))
    space = "{http://www.w3.org/2000/svg}"
    bars = [bar for bar in root.iter(f"{space}rect") if bar.find(f"{space}title") is not None]
    assert len(bars) == sum(map(len, schedule.passes().ranks))
    right = max(float(bar.get("x")) + float(bar.get("width")) for bar in bars)
    assert right == pytest.approx(800, abs=0.02)
    assert {text.text for text in root.iter(f"{space}text")} >= {"rank 0", "rank 2", "F", "B", "S", "T", "IF", "IB"}


def test_the_room_answers_without_torch_or_numpy():
    code = (
        "import sys; from planish.pipeline.outline import outline; import planish.pipeline.validate; "
        "print([m for m in ('torch', 'transformers', 'numpy', 'scipy') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
