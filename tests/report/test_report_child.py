"""The page of a child: a headline in numbers, a map of its layers, its baselines; what is in it is escaped."""

import re
from html.parser import HTMLParser
from xml.dom.minidom import parseString

from planish.report.child import draw_child_page, headline


def _judged(name, factor, loss, layers):
    return {
        "name": name,
        "predicted_s": {"decode 1x64": 0.0102 * factor},
        "measured_s": {"decode 1x64": 0.01 * factor},
        "memory_bytes": {"decode 1x64": int(2**28 * factor)},
        "parameters": int(1e8 * factor),
        "loss": loss,
        "kl": loss - 3,
        "agreement": 0.75,
        "loss_error": 0.01,
        "kl_error": 0.01,
        "layers": layers,
    }


def _outcome(**changes):
    tree = {
        "model": "a <b>",
        "metric": "kl",
        "machine": "a machine",
        "targets": [],
        "parent": _judged("parent", 1, 3.0, ["kv4+width64"] * 3),
        "searched": None,
        "tournament": [],
        "child": _judged("search", 0.6, 3.25, ["kv4+width64", "none+linear", "kv2-window8+width32"]),
        "baselines": [_judged("depth drop", 0.6, 4.0, ["none+none"] * 3)],
        "curve": [[1.0, 0.0], [0.6, 0.3]],
        "harm": [0.0, 0.2, 0.1],
        "additivity": {"tried": 9, "rank_correlation": 0.99, "ratio": 1.01},
    }
    return tree | changes


def test_the_headline_says_what_was_gained_and_lost():
    assert headline(_outcome()) == (
        "A child with 60% of its parent's parameters takes 60% of its time in decode 1x64, and loses 0.250 nats"
    )

    better = _outcome(child=_judged("search", 0.6, 2.9, ["kv4+width64"] * 3))
    assert headline(better).endswith("and gains 0.100 nats")


def test_heights_are_parts_of_the_parent_and_the_curve_goes_over_shares_of_it():
    """Also where no layer is as large as the parent's; experts count with their channels."""
    layers = ["kv2+experts2x16", "kv1+experts4x8", "kv2+none"]
    page = draw_child_page(
        _outcome(parent=_judged("parent", 1, 3.0, ["kv4+experts4x16"] * 3), child=_judged("search", 0.6, 3.25, layers))
    )
    heights = [float(h) for h in re.findall(r'class="c0"[^>]*height="([0-9.]+)"', page)]
    assert heights == [20, 10, 20, 20, 20]
    assert ">% of the parent<" in page
    assert ">step<" not in page


def test_the_page_is_well_formed():
    """Every element is closed where it was opened, and drawings are XML."""
    page = draw_child_page(_outcome())
    parser = _Closed()
    parser.feed(page)
    assert parser.open == []
    for svg in re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL):
        assert parseString(svg).documentElement.tagName == "svg"
    head, *rows = re.findall(r"<tr.*?</tr>", page)
    assert all(row.count("<td") == head.count("<th") for row in rows)


class _Closed(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attrs):
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_every_layer_and_baseline_is_on_the_page():
    page = draw_child_page(_outcome())
    assert "a &lt;b&gt;" in page
    for layer, text in ((0, "kv4"), (1, "none"), (1, "linear"), (2, "kv2-window8"), (2, "width32")):
        assert f"layer {layer}: {text}<" in page
    assert "depth drop" in page
    before = _judged("before lessons", 0.6, 3.5, ["kv4+width64"] * 3)
    row = {"name": "yet other layers", "steps": 12, "before": 0.5, "after": 0.125, "rank_before": 3, "rank_after": 1}
    page = draw_child_page(_outcome(tournament=[row]))
    assert [text in page for text in ("yet other layers", "0.5000", "0.1250")] == [True] * 3
    assert "before lessons" in draw_child_page(_outcome(searched=before))
    assert "+1.0000" in page
    assert "0.990 (Spearman)" in page
    heights = [float(h) for h in re.findall(r'class="c4"[^>]*height="([0-9.]+)"', page)]
    assert heights == [0.0, 40.0, 20.0]


def test_what_is_not_there_is_said_or_left_out():
    page = draw_child_page(
        _outcome(baselines=[], curve=[[1.0, 0.0]], additivity={"tried": 0, "rank_correlation": 0, "ratio": 0})
    )
    assert "None was assembled" in page
    assert "What less costs" not in page
    assert "Whether harms add up" not in page
