import json
import random
import subprocess
import sys
import xml.etree.ElementTree as ET
from itertools import accumulate, combinations, combinations_with_replacement, pairwise

import pytest

from planish.errors import UsageError
from planish.methods import Pipeline
from planish.pipeline.actions import Head, Kind
from planish.pipeline.costs import Costs
from planish.pipeline.draw import to_svg, to_text
from planish.pipeline.layers import balance, redistribute
from planish.pipeline.one_f_one_b import one_f_one_b
from planish.pipeline.outline import outcome, outcome_of, outline, rivals
from planish.pipeline.schedule import Schedule
from planish.pipeline.simulate import simulate
from planish.pipeline.v_blocks import v_half
from planish.pipeline.validate import validate
from planish.pipeline.workload import Workload

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
    result = outcome(Pipeline(method=schedule, head=head), Workload(layers=12, microbatches=6, head=4), 3)
    validate(result.schedule)
    assert (result.schedule.name, result.schedule.head) == (schedule, head)
    assert result.schedule.num_stages == stages == len(result.layers)
    assert sum(result.layers) == 12
    # Forward and backward of all layers and of the head, whoever runs them; IF and IB where the head is shared.
    work = 6 * (3 * (12 + 4) + 3 * 2 * 0.15 * Head(head).shared)
    assert sum(result.timeline.busy) == pytest.approx(work)


def test_the_head_is_shared_unless_the_schedule_knows_one_place_only():
    places = {schedule: Pipeline(method=schedule).place for schedule, *_ in CHOICES}
    assert places == {
        "1f1b": Head.VOCAB_2,
        "interlaced": Head.VOCAB_1,
        "interleaved": Head.LAST_STAGE,
        "v-half": Head.VOCAB_2,
        "v-min": Head.VOCAB_2,
    }
    assert Pipeline(method="interleaved", chunks=3).stages_per_rank == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "interleaved", "chunks": 0}, "`plan.pipeline.chunks` must be 1 or more, got 0"),
        ({"chunks": 2}, '`plan.pipeline.chunks` has no effect unless `plan.pipeline.method` is "interleaved"'),
        (
            {"method": "interleaved", "head": "vocab-2"},
            '`plan.pipeline.head` must be "last-stage" where `plan.pipeline.method` is "interleaved"',
        ),
        (
            {"method": "interlaced", "head": "vocab-2"},
            '`plan.pipeline.head` must be "vocab-1" where `plan.pipeline.method` is "interlaced"',
        ),
    ],
)
def test_a_choice_that_is_none_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Pipeline(**change)


def test_fewer_layers_than_stages_are_refused():
    with pytest.raises(
        UsageError, match=r"`mesh.pp` \(4\) takes 8 layers, 2 a rank by v-half, .* has 7; set `mesh.pp` to 3"
    ):
        outcome(Pipeline(method="v-half"), Workload(layers=7, microbatches=4), 4)


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


@pytest.fixture
def small():
    """Return (1F1B on two ranks, its work): p + 1 and p microbatches of four layers."""
    work = Workload(layers=8, microbatches=4, head=2)
    return outcome(Pipeline(), work, 2), work


def test_the_outline_shows_ranks_rivals_and_a_picture(small):
    chosen, work = small
    text = outline(chosen, rivals(chosen, work), work, width=60)
    head = "1f1b, head vocab-2: 2 ranks, 8 layers, 4 microbatches; times in forwards of a layer\n"
    assert text.startswith(head)
    rows = [line.split() for line in text.splitlines()]
    assert ["0", "4", "3", "12"] in [row[:4] for row in rows]
    assert ["1", "4", "2", "8"] in [row[:4] for row in rows]
    shown = [row[:2] for row in rows if len(row) == 6]
    assert shown[0] == ["1f1b", "vocab-2"]
    assert shown.count(["1f1b", "vocab-2"]) == 1
    assert [
        each for each in (["1f1b", "last-stage"], ["interlaced", "vocab-1"], ["v-half", "vocab-2"]) if each in shown
    ]
    assert text.rstrip().splitlines()[-2].startswith("rank 0 F0-F1-S0F2-")


def test_the_numbers_as_plain_data(small):
    chosen, _ = small
    tree = json.loads(json.dumps(chosen.to_dict()))
    assert tree["layers"] == [[4], [4]]
    assert (tree["in_flight"], tree["activations"]) == ([3, 2], [12, 8])
    assert tree["step"] * 2 * (1 - tree["bubble"]) == pytest.approx(sum(tree["busy"]) * tree["step"])


def test_a_schedule_written_by_hand_is_played_as_it_stands(small):
    chosen, work = small
    again = outcome_of(Schedule.from_text(chosen.schedule.to_text()), work)
    assert again == chosen


def test_the_text_drawing_to_the_letter():
    costs = Costs.uniform(num_ranks=2, num_stages=2, passes={Kind.F: 1.0, Kind.B: 2.0})
    schedule = one_f_one_b(num_ranks=2, num_microbatches=2, head=Head.LAST_STAGE, costs=costs)
    assert to_text(simulate(schedule, costs), width=34) == (
        "rank 0 F0-F1-......B0----...B1----\nrank 1 ...F0-B0----F1-B1----......"
    )
    schedule = one_f_one_b(num_ranks=2, num_microbatches=12, head=Head.LAST_STAGE, costs=costs)
    assert to_text(simulate(schedule, costs), width=45) == (
        "rank 0 F0-F1-......B0----F2- ~ 10---...B11---\nrank 1 ...F0-B0----F1-B1---- ~ 11B11---......"
    )


def test_the_text_drawing_cuts_no_name():
    """A pass that is too short for its number shows its kind, one that is too short for that shows that it is there."""
    passes = {Kind.F: 1.0, Kind.B: 2.0, Kind.S: 0.4, Kind.T: 0.7, Kind.IF: 0.35, Kind.IB: 0.1}
    costs = Costs.uniform(num_ranks=1, num_stages=1, passes=passes)
    schedule = one_f_one_b(num_ranks=1, num_microbatches=2, head=Head.VOCAB_1, costs=costs)
    assert to_text(simulate(schedule, costs), width=34) == "rank 0 ==F0-F1-SST0-T ~ ---B1----."


def test_the_svg_has_a_bar_for_each_pass(unit_costs):
    costs = unit_costs(3, 6, Head.VOCAB_2, embedding=0.1)
    schedule = v_half(num_ranks=3, num_microbatches=4, head=Head.VOCAB_2, costs=costs)
    timeline = simulate(schedule, costs)
    root = ET.fromstring(to_svg(timeline, unit="fortnights"))
    space = "{http://www.w3.org/2000/svg}"
    bars = [bar for bar in root.iter(f"{space}rect") if bar.find(f"{space}title") is not None]
    assert len(bars) == sum(map(len, schedule.passes().ranks))
    tracks = [bar for bar in root.iter(f"{space}rect") if bar.get("class") == "track"]
    left, right = float(tracks[0].get("x")), float(tracks[0].get("x")) + float(tracks[0].get("width"))
    assert all(left <= float(bar.get("x")) and float(bar.get("x")) + float(bar.get("width")) <= right for bar in bars)
    assert len([bar for bar in bars if bar.get("class").endswith(" later")]) == len(
        [action for rank in schedule.passes().ranks for action in rank if action.stage >= 3]
    )
    texts = {text.text for text in root.iter(f"{space}text")}
    assert texts >= {"rank 0", "rank 2", "forward", "backward, weights", "head: S", "embedding", "fortnights"}
    assert "v-half, head vocab-2" in texts


def test_the_room_answers_without_torch_or_numpy():
    code = (
        "import sys; from planish.pipeline.outline import outline; import planish.pipeline.validate; "
        "print([m for m in ('torch', 'transformers', 'numpy', 'scipy') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_layers_of_different_weight_are_balanced():
    assert balance([1, 1, 1, 1, 4, 4], 3) == (4, 1, 1)
    assert balance([1.0] * 7, 3) == (2, 2, 3)
    for seed in range(20):
        drawn = random.Random(seed)
        shares = [drawn.choice([0.3, 1.0, 2.5]) for _ in range(9)]
        cuts = ((0, *cut, 9) for cut in combinations(range(1, 9), 3))
        best = min(max(sum(shares[a:b]) for a, b in pairwise(cut)) for cut in cuts)
        counts = balance(shares, 4)
        stages = pairwise(accumulate(counts, initial=0))
        assert max(sum(shares[a:b]) for a, b in stages) == pytest.approx(best)
        assert min(counts) > 0


def test_a_workload_of_uneven_layers_costs_what_its_stages_hold():
    work = Workload(layers=4, microbatches=2, shares=(0.5, 0.5, 1.0, 2.0))
    assert work.spread(2, Head.VOCAB_2) == (3, 1)
    assert list(work.costs((3, 1), Head.VOCAB_2, 2).row(Kind.F)) == [2.0, 2.0]
