"""How the page looks: light, dark and printed; colours that readers with any colour vision can tell apart."""

# The nine categories differ by at least 12 in CIELAB, neighbours in a stack by 22, also as seen with protanopia,
# deuteranopia and tritanopia; dark mode has lighter ones of its own.
STYLE = """
:root {
  color-scheme: light dark;
  --page: #fff; --ink: #1b1f24; --soft: #59626d; --faint: #e4e7eb; --card: #f6f7f9; --halo: #fff;
  --tint1: #eef1f5; --tint2: #dfe5ed;
  --live: #2f6db5; --fill: #cfe0f3; --alarm: #c2410c; --alarm-page: #fff4ed;
  --train: #2f6db5; --held-out: #d55e00; --process: #6b7280;
  --c0: #4a6fa5; --c1: #d1495b; --c2: #3b1f7a; --c3: #2bb3a0; --c4: #f0a030; --c5: #8c2f5e; --c6: #2b6e1a;
  --c7: #84b4f6; --c8: #c6c0cf;
}
@media screen and (prefers-color-scheme: dark) {
  :root {
    --page: #14171c; --ink: #e6e9ed; --soft: #9aa4b0; --faint: #2a3038; --card: #1b2027; --halo: #14171c;
    --tint1: #1c222a; --tint2: #262e38;
    --live: #7fb0f0; --fill: #26405f; --alarm: #ff9a5c; --alarm-page: #2c1c12;
    --train: #7fb0f0; --held-out: #ff9a5c; --process: #9aa4b0;
    --c0: #7fb0f0; --c1: #e8707f; --c2: #9a70ee; --c3: #36cfbf; --c4: #e3c93f; --c5: #b84290; --c6: #4ba851;
    --c7: #b4e8ff; --c8: #5e6068;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", "Liberation Sans", Arial, sans-serif;
  font-variant-numeric: tabular-nums; -webkit-print-color-adjust: exact; print-color-adjust: exact;
}
main { max-width: 960px; margin: 0 auto; padding: 40px 28px 64px; }
h1 { font-size: 30px; line-height: 1.2; letter-spacing: -0.015em; margin: 4px 0 0; text-wrap: balance; }
h2 { font-size: 19px; line-height: 1.3; letter-spacing: -0.005em; margin: 0 0 2px; text-wrap: balance; }
p { margin: 0; }
.over, .sub { color: var(--soft); font-size: 14px; overflow-wrap: anywhere; }
.sub { margin-bottom: 12px; }
section { margin-top: 52px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(160px, 1fr)); gap: 12px; margin: 24px 0 20px; }
.tiles div { background: var(--card); border-radius: 8px; padding: 12px 16px; }
.tiles dt { color: var(--soft); font-size: 13px; }
.tiles dd { margin: 0; font-size: 22px; letter-spacing: -0.01em; line-height: 1.3; }
.tiles small { display: block; color: var(--soft); font-size: 13px; letter-spacing: 0; }
.lists { display: grid; grid-template-columns: repeat(auto-fit, minmax(300px, 1fr)); gap: 16px 40px; font-size: 14px; }
.lists h2 { font-size: 14px; margin: 0 0 4px; }
.lists dl { display: grid; grid-template-columns: 104px 1fr; gap: 3px 12px; margin: 0; align-content: start; }
.lists dt { color: var(--soft); }
.lists dd { margin: 0; overflow-wrap: anywhere; }
.alarm { background: var(--alarm-page); border-left: 4px solid var(--alarm); border-radius: 0 8px 8px 0;
  padding: 16px 20px; margin-top: 24px; }
.alarm p { font-weight: 600; overflow-wrap: anywhere; }
.alarm pre { margin: 12px 0 0; overflow-x: auto; white-space: pre; }
pre, code { font: 12.5px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "Liberation Mono", monospace; }
p code { font-size: 0.92em; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(400px, 100%), 1fr)); gap: 0 36px; }
.wide { overflow-x: auto; }
.wide table, .wide svg { min-width: 640px; }
.pair .wide svg { min-width: 380px; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; margin-top: 14px; }
th { color: var(--soft); font-weight: 400; text-align: left; vertical-align: bottom; }
th, td { padding: 4px 10px 4px 0; border-bottom: 1px solid var(--faint); }
.n { text-align: right; white-space: nowrap; padding-right: 4px; padding-left: 10px; }
td.empty { color: var(--soft); }
tr.total td { font-weight: 600; }
td code { overflow-wrap: anywhere; }
.share { width: 104px; padding-left: 10px; }
.share i { display: block; height: 9px; min-width: 1px; border-radius: 1px; }
.swatch { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 7px; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 18px; list-style: none; margin: 0 0 6px; padding: 0; font-size: 13px;
  color: var(--soft); }
footer { margin-top: 52px; padding-top: 16px; border-top: 1px solid var(--faint); color: var(--soft); font-size: 13px; }
footer ul { margin: 0 0 10px; padding-left: 18px; }

svg { display: block; width: 100%; height: auto; overflow: visible; font-size: 12px; }
svg text { fill: var(--ink); }
svg .tick, svg .unit, svg .phase, svg .peak-owner { fill: var(--soft); }
svg .unit { font-size: 11px; }
svg line, svg polyline, svg path { fill: none; }
svg .grid { stroke: var(--faint); }
svg .axis { stroke: var(--soft); stroke-width: 0.75; }
svg .tint1 { fill: var(--tint1); } svg .tint2 { fill: var(--tint2); }
svg .fill { fill: var(--fill); fill-opacity: 0.75; stroke: none; }
svg .live { stroke: var(--live); stroke-width: 1.25; }
svg .leader { stroke: var(--soft); stroke-width: 0.75; }
svg .lead { stroke: var(--ink); stroke-width: 1; stroke-dasharray: 2 3; }
svg .budget { stroke: var(--alarm); stroke-width: 1.5; stroke-dasharray: 7 4; }
svg .budget-name { fill: var(--alarm); }
svg .peak { fill: var(--page); stroke: var(--ink); stroke-width: 2; }
svg .peak-name { font-size: 13px; font-weight: 600; }
svg .halo { paint-order: stroke; stroke: var(--halo); stroke-width: 4px; stroke-linejoin: round; stroke-opacity: 0.85; }
svg .value { font-variant-numeric: tabular-nums; }
svg .part { stroke: var(--page); stroke-width: 0.75; }
svg .predicted { fill-opacity: 0.6; }
svg .unclaimed { fill: var(--card); }
svg .train, svg .held-out, svg .process { stroke-width: 1.75; stroke-linejoin: round; }
svg .train { stroke: var(--train); } svg .train-name, svg .train.dot, svg .train.band { fill: var(--train); }
svg .held-out { stroke: var(--held-out); stroke-dasharray: 5 3; }
svg .held-out-name, svg .held-out.dot, svg .held-out.band { fill: var(--held-out); }
svg .process { stroke: var(--process); stroke-dasharray: 2 3; }
svg .process-name, svg .process.dot, svg .process.band { fill: var(--process); }
svg .dot { stroke: none; }
svg .band { stroke: none; fill-opacity: 0.22; }

@page { margin: 14mm; }
@media print {
  body { font-size: 13px; }
  main { max-width: none; padding: 0; }
  h1 { font-size: 24px; }
  h2 { font-size: 16px; }
  h2, .sub, .legend { break-after: avoid; }
  svg, tr, .tiles div { break-inside: avoid; }
  section, footer { margin-top: 30px; }
  table { font-size: 11px; }
  td code { font-size: 10px; }
  .wide, .alarm pre { overflow: visible; }
  .alarm pre { white-space: pre-wrap; }
  .wide table, .wide svg, .pair .wide svg { min-width: 0; }
  .tiles { grid-template-columns: repeat(5, 1fr); }
  .pair { grid-template-columns: 1fr 1fr; }
}
""" + "\n".join(
    f"svg .c{index} {{ fill: var(--c{index}); }} .swatch.c{index}, .share .c{index} {{ background: var(--c{index}); }}"
    for index in range(9)
)
