import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from planish.errors import WorldFailed
from planish.report.findings import far_finding, lane_rows, optim_finding
from planish.report.moment import phase_bands
from planish.report.page import draw_page, write_page
from planish.report.read import read_run

VOID = {"meta", "link", "img", "br"}


class Page(HTMLParser):
    """A page's words and elements; it refuses one whose tags do not match."""

    def __init__(self, html):
        super().__init__()
        self.open, self.words, self.tags = [], [], []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self):
        return re.sub(r"\s+", " ", " ".join(self.words))


def page_of(builder):
    return Page(draw_page(read_run(builder.path)))


def drawings(builder):
    """Every SVG of the page, parsed strictly."""
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", draw_page(read_run(builder.path)))]


def texts(svg):
    return [each.text for each in svg.iter("text")]


def test_the_page_needs_nothing_but_itself(finished):
    finished.prediction()
    html = draw_page(read_run(finished.path))
    page = Page(html)
    assert not {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe", "object"}
    assert not any(
        name in ("src", "href") or name.startswith("on") for _, attributes in page.tags for name in attributes
    )
    assert "http" not in html
    assert "@import" not in html
    assert "url(" not in html


def test_a_finished_run_is_told_in_sentences(finished):
    text = page_of(finished).text
    assert "All 4 steps are done, inside the budget of 3.00 GiB" in text
    assert "Memory peaked at 2.16 GiB in backward of step 3, 72% of the budget" in text
    assert "Optimizer state held 70% of the peak" in text
    assert "Nothing was predicted: this folder holds no plan.json." in text
    assert "Peaks of steps differ by 2.0 MiB; step 3 has the highest, 2.16 GiB" in text
    assert re.search(
        r"Loss went from 3\.\d+ to 3\.\d+ in 4 steps; held out it is 3\.\d+ \(1\.\d+ bits per byte\)", text
    )
    assert re.search(r"Half of the steps ran at 1\d\d tokens/s or more", text)
    for setting in ("smollm2-135m", "bf16", "4,096 tokens", "packed", "blocked, tile_bytes 64MiB, strategy auto"):
        assert setting in text


def test_the_peak_is_marked_and_taken_apart(finished):
    run = read_run(finished.path)
    moment = drawings(finished)[0]
    assert "peak 2.16 GiB, backward" in texts(moment)
    assert "budget 3.00 GiB" in texts(moment)
    assert {"forward", "head", "backward", "optimizer"} <= set(texts(moment))
    parts = {rect.find("title").text for rect in moment.iter("rect") if "part" in rect.get("class")}
    assert "optimizer state: 1.50 GiB" in parts
    assert len(parts) == len(run.peak.categories)
    page = page_of(finished)
    assert "model.layers.*.mlp.gate_proj.weight" in page.text
    assert "30 × [1,536 × 576] bfloat16" in page.text


def test_the_column_of_the_peak_is_as_high_as_the_peak(finished):
    moment = drawings(finished)[0]
    parts = [rect for rect in moment.iter("rect") if "part" in rect.get("class")]
    circle = next(moment.iter("circle"))
    top = min(float(rect.get("y")) for rect in parts)
    assert top == pytest.approx(float(circle.get("cy")), abs=0.2)
    live = next(path for path in moment.iter("path") if path.get("class") == "live").get("d")
    heights = [float(height) for height in re.findall(r"V([\d.]+)", live)]
    assert min(heights) == pytest.approx(top, abs=0.2)


def test_a_peak_over_a_budget_that_only_warned_is_said(builder):
    builder.settings(budget="2GiB").steps(4)
    text = page_of(builder).text
    assert "Memory peaked at 2.16 GiB in backward of step 3, 0.16 GiB over the budget" in text
    assert "inside the budget" not in text


def test_a_far_budget_does_not_squash_the_figure(builder):
    builder.settings(budget="64GiB").steps(2)
    assert all("budget" not in " ".join(texts(svg)) for svg in drawings(builder))
    assert "64.00 GiB" in page_of(builder).text


@pytest.mark.parametrize(
    ("over", "said"),
    [
        ({}, "Predicted and measured are equal to the byte in all 5 phases"),
        ({"head": 0.5}, "Head went 1.00 GiB above its prediction (100.00%)"),
        ({"eval": 2.0}, "No phase went above its prediction; eval stayed furthest below, by 1.89 GiB"),
    ],
)
def test_predicted_stands_beside_measured(finished, over, said):
    finished.prediction(**over)
    assert said in page_of(finished).text
    phases = drawings(finished)[1]
    assert sum(text.startswith("predicted ") for text in texts(phases)) == 5
    hints = [rect.find("title").text for rect in phases.iter("rect")]
    assert any(hint.startswith("predicted, optimizer state: ") for hint in hints)
    assert any(hint.startswith("measured, optimizer state: ") for hint in hints)


def test_a_stop_at_the_budget_comes_first(builder):
    builder.settings(budget="2GiB").file("metrics.jsonl", "").file(
        "budget-exceeded.txt", "head: a tensor for `lm_head` goes over.\n\nbytes alive  2.01 GiB\n  <odd> & more\n"
    )
    text = page_of(builder).text
    stop = text.index("head: a tensor for lm_head goes over.")
    assert text.index("The budget stopped the run after 0 of 4 steps") < stop < text.index("Settings")
    assert "bytes alive 2.01 GiB <odd> & more" in text
    assert "No memory was recorded" in text


def test_a_run_without_a_step_still_has_its_init(builder):
    builder.settings().steps(0)
    text = page_of(builder).text
    assert "No step was finished" in text
    assert "Memory peaked at 1.75 GiB in init before the first step" in text
    assert "Loss" not in text


def test_one_step_is_enough_for_every_figure(builder):
    builder.settings(steps=9).steps(1)
    assert "1 of 9 steps is on record" in page_of(builder).text
    assert len(drawings(builder)) == 5


LANES = {"disk-out": (2**30, 8.0, 4.0), "disk-in": (2**30, 8.0, 0.5)}


def far_lines(steps, lanes):
    for step in range(1, steps + 1):
        line = {"step": step, "loss": 1.0}
        for name, (nbytes, busy_s, waited_s) in lanes.items():
            line |= {f"far/{name}/bytes": nbytes, f"far/{name}/busy_s": busy_s, f"far/{name}/waited_s": waited_s}
        yield line


def test_far_memory_says_how_much_of_its_time_is_hidden_and_what_would_hide_more(builder):
    record = read_run(builder.settings().lines("metrics.jsonl", *far_lines(2, LANES)).path)
    assert far_finding(record) == (
        "Far memory carried 2.00 GiB a step, 72% of its time behind the layers; with `plan.boundary.every` = 2 the "
        "link would keep up"
    )
    assert lane_rows(record)[0] == ("disk out", "2.00 GiB in 16.0 s, waited for 8.0 s")
    page = draw_page(record)
    assert "Far memory carried 2.00 GiB a step" in page
    assert "2.00 GiB in 16.0 s, waited for 1.0 s" in page


@pytest.mark.parametrize(
    ("lanes", "said"),
    [
        ({}, ""),
        ({"host-out": (2**20, 0, 0)}, "Far memory carried 1.0 MiB a step"),
        ({"disk-out": (2**20, 1.0, 0.05)}, "Far memory carried 1.0 MiB a step, 95% of its time behind the layers"),
        ({"disk-out": (2**20, 1.0, 1.0)}, "Far memory carried 1.0 MiB a step, 0% of its time behind the layers"),
    ],
)
def test_far_memory_proposes_nothing_where_nothing_would_help(builder, lanes, said):
    assert far_finding(read_run(builder.settings().lines("metrics.jsonl", *far_lines(1, lanes)).path)) == said


OPTIM = {
    "optim-disk-out": (2**30, 4.0, 0.5),
    "optim-disk-in": (2**30, 5.0, 1.3),
    "optim-update": (0, 1.0, 0.0),
}


def test_streamed_state_is_told_apart_from_boundaries(builder):
    record = read_run(builder.settings().lines("metrics.jsonl", *far_lines(2, LANES | OPTIM)).path)
    assert far_finding(record).startswith("Far memory carried 2.00 GiB a step, 72% of its time behind the layers")
    assert optim_finding(record) == (
        "Streamed optimizer state: 2.00 GiB a step, 80% of its time behind other work; `disk in` is the longest lane, "
        "50% of all"
    )
    assert [name for name, _ in lane_rows(record)] == ["disk out", "disk in"]
    assert lane_rows(record, of_optimizer=True)[1:] == [
        ("disk in", "2.00 GiB in 10.0 s, waited for 2.6 s"),
        ("update", "2.0 s"),
    ]
    assert "2.00 GiB in 10.0 s" in draw_page(record)


def test_names_are_escaped(builder):
    builder.settings().file("metrics.jsonl", "")
    odd = '<script>alert("x")</script>&'
    phase = {"peak_bytes": 9, "at_s": 1, "categories": {odd: 9}, "owners": [[odd, odd, [3], odd, 1, 9]]}
    builder.lines("memory.jsonl", {"step": 1, "phases": {"head": phase}, "timeline": [[0, 5, odd], [1, 9, odd]]})
    html = draw_page(read_run(builder.path))
    assert "<script" not in html
    assert odd in Page(html).text
    assert len(drawings(builder)) == 2


def test_a_hundred_thousand_steps_fit_a_page_of_less_than_a_megabyte(builder):
    lines = [
        {"step": step, "loss": 3 + (step * 37 % 101) / 100, "tokens_per_s": 100 + step % 7, "memory/peak_bytes": 2**31}
        for step in range(1, 100_001)
    ]
    lines[77_776]["loss"] = 9.5
    builder.settings(steps=100_000).lines("metrics.jsonl", *lines).file("memory.jsonl", "")
    html = draw_page(read_run(builder.path))
    assert len(html) < 2**20
    loss = drawings(builder)[0]
    band = next(each for each in loss.iter("polygon") if "band" in each.get("class"))
    points = [tuple(map(float, pair.split(","))) for pair in band.get("points").split()]
    line = next(each for each in loss.iter("polyline") if each.get("class") == "train").get("points").split()
    assert len(line) < 900
    highest = min(points, key=lambda point: point[1])
    left, right = float(line[0].split(",")[0]), float(line[-1].split(",")[0])
    assert highest[0] == pytest.approx(left + (right - left) * 77_776 / 99_999, abs=1)


def test_bands_are_the_unbroken_stretches_of_a_phase():
    timeline = ((0.0, 1, "forward"), (1.0, 2, "forward"), (2.0, 3, "head"), (3.0, 1, "forward"), (4.0, 1, "forward"))
    assert list(phase_bands(timeline)) == [(0.0, 2.0, "forward"), (2.0, 3.0, "head"), (3.0, 4.0, "forward")]
    assert list(phase_bands(())) == []


def test_the_page_is_replaced_whole_or_not_at_all(finished, tmp_path):
    run, path = read_run(finished.path), finished.path / "report.html"
    path.write_text("old")
    write_page(run, path)
    assert path.read_text() == draw_page(run)
    target = tmp_path / "missing" / "report.html"
    with pytest.raises(WorldFailed, match=r"missing/report\.html failed: No such file or directory; `--out` takes"):
        write_page(run, target)
    (tmp_path / "taken").mkdir()
    with pytest.raises(WorldFailed, match="taken failed: Is a directory"):
        write_page(run, tmp_path / "taken")
    assert not list(tmp_path.rglob("*.new"))
