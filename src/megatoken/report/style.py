"""The style sheet of the report: system fonts, one accent, light and dark, phone and paper."""

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #ffffff; --card: #f7f8fa; --ink: #1b2330; --quiet: #5a6678; --line: #dce1e8;
  --first: #0062a3; --second: #c2500a; --band: #0062a318;
  --good: #1a6e3c; --bad: #b3261e; --warn: #8a5a00; --plain: #0062a3;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #11151b; --card: #191f27; --ink: #e4e8ee; --quiet: #9aa6b6; --line: #2d3641;
    --first: #5db4ec; --second: #f09a4e; --band: #5db4ec22;
    --good: #62c98a; --bad: #f2857c; --warn: #e3b04b; --plain: #5db4ec;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 62rem; padding: 2rem 1.25rem 3rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
}
h1 { margin: 0; font-size: 1rem; font-weight: 600; overflow-wrap: anywhere; }
h2 { margin: 2.5rem 0 .75rem; font-size: 1.15rem; font-weight: 600; }
p { margin: .25rem 0; }
.quiet, .unit { color: var(--quiet); font-weight: 400; }
.headline { margin: 1.25rem 0 .25rem; font-size: clamp(2.2rem, 8vw, 3.4rem); line-height: 1.1; font-weight: 650;
  font-variant-numeric: tabular-nums; letter-spacing: -.02em; }
.headline .unit { font-size: .4em; letter-spacing: 0; white-space: nowrap; }
.verdict { display: flex; flex-wrap: wrap; gap: .35rem .75rem; align-items: baseline; margin: 1rem 0 .5rem; }
.badge { padding: .1rem .6rem; border: 1.5px solid currentColor; border-radius: .35rem; font-weight: 650;
  font-size: .9rem; letter-spacing: .04em; color: var(--warn); }
.badge.MEASURED { color: var(--plain); } .badge.VALID { color: var(--good); } .badge.INVALID { color: var(--bad); }
ul.findings { margin: .25rem 0 0; padding-left: 1.2rem; }
code { font: .85em ui-monospace, "SF Mono", Consolas, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere; }
.tables { display: grid; gap: 1.25rem 3rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); }
table { width: 100%; border-collapse: collapse; font-size: .93rem; font-variant-numeric: tabular-nums; }
th, td { padding: .38rem .6rem; text-align: left; border-bottom: 1px solid var(--line); vertical-align: top; }
th { font-weight: 500; }
thead th { color: var(--quiet); font-size: .82rem; border-bottom-color: var(--quiet); }
th:first-child, td:first-child { padding-left: 0; }
th .unit { font-size: .88em; white-space: nowrap; }
td:last-child, thead th:last-child { padding-right: 0; }
.number { text-align: right; white-space: nowrap; }
.facts td { overflow-wrap: anywhere; } .facts th { width: 38%; overflow-wrap: anywhere; }
.charts { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); }
figure { display: flex; flex-direction: column; margin: 0; padding: .8rem .8rem .4rem; background: var(--card);
  border: 1px solid var(--line); border-radius: .5rem; break-inside: avoid; }
figcaption { font-weight: 600; font-size: .93rem; }
svg { display: block; width: 100%; height: auto; margin-top: auto; }
.grid { stroke: var(--line); stroke-width: 1; }
.tick { fill: var(--quiet); font-size: 11px; font-variant-numeric: tabular-nums; }
.end { text-anchor: end; } .middle { text-anchor: middle; }
.curve { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
.curve0 { stroke: var(--first); } .curve1 { stroke: var(--second); stroke-dasharray: 5 3; }
.band { fill: var(--band); } .mark { stroke: var(--ink); stroke-width: 1.2; stroke-dasharray: 2 3; }
.legend { display: flex; flex-wrap: wrap; gap: .1rem 1rem; margin: .15rem 0 0; padding: 0; list-style: none;
  font-size: .82rem; color: var(--quiet); }
.key { display: inline-block; width: 1.3rem; height: 0; margin-right: .4rem; vertical-align: middle;
  border-top: 2px solid var(--first); }
.key1 { border-top: 2px dashed var(--second); } .keymark { border-top: 2px dotted var(--ink); }
.keyband { height: .7rem; border: 0; background: var(--band); outline: 1px solid var(--line); }
dl { margin: 0; } dt { margin-top: .6rem; font-weight: 500; } dd { margin: 0; color: var(--quiet); }
details { margin-top: .5rem; border-top: 1px solid var(--line); }
summary { padding: .6rem 0; font-weight: 600; cursor: pointer; }
footer { margin-top: 2.5rem; padding-top: .75rem; border-top: 1px solid var(--line); font-size: .85rem;
  color: var(--quiet); }
@media print {
  :root {
    color-scheme: light;
    --paper: #fff; --card: #fff; --ink: #000; --quiet: #444; --line: #ccc; --first: #0062a3; --second: #c2500a;
    --band: #0062a318; --good: #1a6e3c; --bad: #b3261e; --warn: #8a5a00; --plain: #0062a3;
  }
  body { max-width: none; padding: 0; font-size: 10pt; }
  .tables, .charts { grid-template-columns: 1fr 1fr; }
  .tables { gap: 2rem; } table { font-size: 9pt; }
  .facts { font-size: 8pt; } .facts th, .facts td { padding: .15rem .4rem; }
  footer { display: none; }
  h2, summary { break-after: avoid; } tr { break-inside: avoid; }
  details::details-content { display: block; content-visibility: visible; height: auto; }
  * { print-color-adjust: exact; }
}
"""
