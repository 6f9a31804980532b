"""Drawings of a timeline: text for a terminal, SVG for a page."""

from html import escape

from planish.pipeline.actions import Kind
from planish.pipeline.simulate import Span, Timeline

_COLORS = (
    (Kind.F, "#4c78a8"),
    (Kind.B, "#54a24b"),
    (Kind.I, "#54a24b"),
    (Kind.W, "#b6d7a8"),
    (Kind.S, "#f58518"),
    (Kind.E, "#ffbf79"),
    (Kind.T, "#e45756"),
    (Kind.IF, "#b279a2"),
    (Kind.IB, "#d6a5c9"),
)


def to_text(timeline: Timeline, *, width: int = 120) -> str:
    """Return a line per rank, `width` cells for the makespan: each pass its kind and microbatch, idle time as dots.

    Kinds are written small on a rank's further stages. A pass shorter than its name is cut, below a cell left out.
    """
    scale = width / timeline.makespan
    rows = [["."] * width for _ in range(timeline.schedule.num_ranks)]
    for span in _passes(timeline):
        action = span.actions[0]
        begin, end = round(span.start * scale), round(span.end * scale)
        kind = action.kind if action.stage < len(rows) else action.kind.lower()
        cells = f"{kind}{action.microbatch}"[: end - begin].ljust(end - begin, "-")
        rows[timeline.schedule.rank_of(action)][begin:end] = cells
    digits = len(str(len(rows) - 1))
    return "\n".join(f"rank {rank:>{digits}} {''.join(row)}" for rank, row in enumerate(rows))


def to_svg(timeline: Timeline, *, width: int = 1200, row_height: int = 24) -> str:
    """Return the timeline as an SVG picture: a bar per pass, its microbatch in it, its name and times on hover.

    Bars of a rank's further stages are paler.
    """
    left, top = 60, 24
    scale = (width - left) / timeline.makespan
    height = top + timeline.schedule.num_ranks * row_height
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">',
        *_legend(timeline, left),
    ]
    parts += [
        f'<text x="4" y="{top + (rank + 0.65) * row_height:g}" font-size="12">rank {rank}</text>'
        for rank in range(timeline.schedule.num_ranks)
    ]
    colors = dict(_COLORS)
    for span in _passes(timeline):
        action = span.actions[0]
        x, bar = left + span.start * scale, (span.end - span.start) * scale
        y = top + timeline.schedule.rank_of(action) * row_height
        name = escape(f"{action}: {span.start:g} to {span.end:g}")
        opacity = 1 if action.stage < timeline.schedule.num_ranks else 0.7
        parts.append(
            f'<rect x="{x:.2f}" y="{y + 1}" width="{bar:.2f}" height="{row_height - 2}" fill="{colors[action.kind]}" '
            f'fill-opacity="{opacity}" stroke="white" stroke-width="0.5"><title>{name}</title></rect>'
        )
        if bar >= 8 * len(str(action.microbatch)):
            parts.append(
                f'<text x="{x + bar / 2:.2f}" y="{y + 0.65 * row_height:g}" font-size="11" fill="white" '
                f'text-anchor="middle" pointer-events="none">{action.microbatch}</text>'
            )
    return "\n".join([*parts, "</svg>", ""])


def _legend(timeline: Timeline, left: int) -> list[str]:
    used = {span.actions[0].kind for span in _passes(timeline)}
    parts = []
    for n, (kind, color) in enumerate(each for each in _COLORS if each[0] in used):
        x = left + 48 * n
        parts.append(f'<rect x="{x}" y="6" width="12" height="12" fill="{color}"/>')
        parts.append(f'<text x="{x + 16}" y="16" font-size="12">{kind}</text>')
    return parts


def _passes(timeline: Timeline) -> list[Span]:
    return [span for span in timeline.spans if span.is_pass]
