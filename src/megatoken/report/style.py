"""The style sheet of a page: system fonts, light and dark, phone and paper, and what shows which rows are chosen."""

SIGNS = {"good": "✓", "bad": "✕", "warn": "!", "quiet": "?"}
KINDS = ("fail", "warn", "unknown", "note", "pass", "holds", "does-not-hold", "cannot-be-determined")

# Defined once for all charts of a page.
HATCH = (
    '<svg class="unseen" aria-hidden="true" width="0" height="0"><defs><pattern id="hatch" width="5" height="5"'
    ' patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect class="hatchpaper" width="5" height="5"/>'
    '<rect class="hatchline" width="2" height="5"/></pattern></defs></svg>\n'
)

LIGHT = """
    --paper: #ffffff; --card: #f7f8fa; --ink: #1b2330; --quiet: #566173; --line: #dce1e8;
    --first: #0062a3; --second: #b34700; --third: #1a6e3c; --fourth: #7a3fa0; --tint: #0062a31c;
    --good: #1a6e3c; --bad: #b3261e; --warn: #855600; --plain: #0062a3;
"""
DARK = """
    --paper: #11151b; --card: #191f27; --ink: #e4e8ee; --quiet: #9aa6b6; --line: #2d3641;
    --first: #5db4ec; --second: #f09a4e; --third: #62c98a; --fourth: #c79be6; --tint: #5db4ec26;
    --good: #62c98a; --bad: #f2857c; --warn: #e3b04b; --plain: #5db4ec;
"""
PAGE = """
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 62rem; padding: 2rem 1.25rem 3rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; overflow-wrap: break-word;
}
h1 { margin: 0; font-size: 1rem; font-weight: 600; overflow-wrap: anywhere; }
h1.large { font-size: 1.7rem; line-height: 1.25; }
h2 { margin: 2.5rem 0 .75rem; font-size: 1.15rem; font-weight: 600; scroll-margin-top: 1rem; }
p { margin: .25rem 0; }
a { color: var(--plain); }
:focus-visible { outline: 3px solid var(--plain); outline-offset: 2px; }
section > * + * { margin-top: 1.25rem; } section > h2 + * { margin-top: 0; }
p.quiet { font-size: .88rem; } .headline + p.quiet { font-size: 1rem; }
.quiet, .unit { color: var(--quiet); font-weight: 400; }
.unseen { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); white-space: nowrap; }
.headline { margin: 1.25rem 0 .25rem; font-size: clamp(2.2rem, 8vw, 3.4rem); line-height: 1.1; font-weight: 650;
  font-variant-numeric: tabular-nums; letter-spacing: -.02em; }
.headline .unit { font-size: .4em; letter-spacing: 0; white-space: nowrap; }
.verdict { display: flex; flex-wrap: wrap; gap: .35rem .75rem; align-items: baseline; margin: 1rem 0 .5rem; }
.badge { display: inline-block; padding: .02rem .5rem; border: 1.5px solid currentColor; border-radius: .35rem;
  font-weight: 650; font-size: .82rem; white-space: nowrap; color: var(--quiet); }
.verdict .badge { font-size: .9rem; padding: .1rem .6rem; }
.good { color: var(--good); } .bad { color: var(--bad); } .warn { color: var(--warn); } .plain { color: var(--plain); }
ul.points { margin: .25rem 0 0; padding-left: 1.2rem; }
code { font: .85em ui-monospace, "SF Mono", Consolas, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere; }
nav ul { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; margin: 1.5rem 0 0; padding: .6rem 0; list-style: none;
  border: 1px solid var(--line); border-width: 1px 0; font-size: .93rem; }
nav a { display: inline-block; padding: .15rem 0; }
footer { margin-top: 2.5rem; padding-top: .75rem; border-top: 1px solid var(--line); font-size: .85rem;
  color: var(--quiet); }
dl { margin: 0; } dt { margin-top: .6rem; font-weight: 500; } dd { margin: 0; color: var(--quiet); }
details.facts { margin-top: .5rem; border-top: 1px solid var(--line); }
summary { padding: .6rem 0; font-weight: 600; cursor: pointer; }
"""
TABLES = """
.scroll { overflow-x: auto; } .scroll tbody th { min-width: 9rem; }
.scroll caption span { position: sticky; left: 0; display: inline-block; max-width: min(100%, 100vw - 2rem); }
table { width: 100%; border-collapse: collapse; font-size: .93rem; font-variant-numeric: tabular-nums; }
caption { padding: .3rem 0; text-align: left; font-weight: 600; font-size: .93rem; }
th, td { padding: .38rem .6rem; text-align: left; border-bottom: 1px solid var(--line); vertical-align: top; }
th { font-weight: 500; }
thead th { color: var(--quiet); font-size: .82rem; border-bottom-color: var(--quiet); vertical-align: bottom; }
th:first-child, td:first-child { padding-left: 0; }
th .unit { font-size: .88em; white-space: nowrap; }
td:last-child, thead th:last-child { padding-right: 0; }
.number { text-align: right; } td.number { white-space: nowrap; }
.facts td { overflow-wrap: anywhere; } td.long { min-width: 12rem; }
.stacked tbody th { overflow-wrap: anywhere; min-width: 8rem; }
.fixed { table-layout: fixed; } .fixed td { overflow-wrap: anywhere; } .fixed tbody th { min-width: 0; }
td code { display: inline-block; min-width: 14ch; }
 table.facts th { width: 38%; overflow-wrap: anywhere; }
fieldset { display: flex; flex-wrap: wrap; gap: .3rem 1.1rem; align-items: center; margin: .5rem 0 .75rem;
  padding: 0; border: 0; }
legend { float: left; margin-right: .4rem; padding: 0; color: var(--quiet); }
label { display: inline-flex; gap: .4rem; align-items: center; min-height: 1.75rem; cursor: pointer; }
input { width: 1.1rem; height: 1.1rem; margin: 0; accent-color: var(--plain); }
.chosen { counter-reset: shown; } .chosen tbody tr { counter-increment: shown; }
.count::before { content: counter(shown); }
"""
CHARTS = """
.shelf { display: grid; gap: 1.25rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr));
  align-items: start; }
.shelf > * { min-width: 0; }
figure { display: flex; flex-direction: column; max-width: 30rem; min-width: 0; margin: 0; padding: .8rem .8rem .2rem;
  background: var(--card); border: 1px solid var(--line); border-radius: .5rem; break-inside: avoid; }
figcaption { font-weight: 600; font-size: .93rem; }
svg { display: block; width: 100%; height: auto; margin: .3rem 0 auto; }
.grid { stroke: var(--line); stroke-width: 1; }
.tick, .name, .value, .dotname { fill: var(--quiet); font-size: 11px; font-variant-numeric: tabular-nums; }
.name { fill: var(--ink); font-size: 12px; } .value { fill: var(--ink); } .strong { font-weight: 650; }
.end { text-anchor: end; } .middle { text-anchor: middle; }
.curve { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
.curve0 { stroke: var(--first); } .curve1 { stroke: var(--second); stroke-dasharray: 5 3; }
.curve2 { stroke: var(--third); stroke-dasharray: 1.5 2.5; }
.curve3 { stroke: var(--fourth); stroke-dasharray: 9 3 2 3; }
.window, .between { fill: var(--tint); } .between { stroke: var(--first); stroke-width: .6; }
.mark { stroke: var(--ink); stroke-width: 1.2; stroke-dasharray: 2 3; } .mark1 { stroke-dasharray: 7 3; }
.bar { fill: var(--first); stroke: var(--first); } .hatched { fill: url(#hatch); }
.sum { fill: var(--ink); stroke: none; }
.outlined { fill: var(--tint); stroke-dasharray: 3 2; }
.hatchpaper { fill: var(--tint); } .hatchline { fill: var(--first); }
.dot { fill: var(--first); } .apart { fill: var(--card); stroke: var(--second); stroke-width: 2; }
.legend { display: flex; flex-wrap: wrap; gap: .1rem 1rem; margin: .15rem 0 .4rem; padding: 0; list-style: none;
  font-size: .82rem; color: var(--quiet); }
.key { display: inline-block; width: 1.3rem; height: 0; margin-right: .4rem; vertical-align: middle;
  border-top: 2px solid var(--first); }
.key1 { border-top: 2px dashed var(--second); } .key2 { border-top: 2px dotted var(--third); }
.key3 { border-top: 3px double var(--fourth); } .keymark { border-top: 2px dotted var(--ink); }
.keymark1 { border-top-style: dashed; }
.keywindow, .keybetween, .keybar, .keyhatched, .keyoutlined { height: .7rem; border: 0; background: var(--tint);
  outline: 1px solid var(--line); }
.keybar { background: var(--first); } .keyoutlined { outline: 1px dashed var(--first); }
.keyhatched { background: repeating-linear-gradient(45deg, var(--first) 0 2px, var(--tint) 2px 5px);
  outline-color: var(--first); }
.keydot { width: .6rem; height: .6rem; border: 0; border-radius: 50%; background: var(--first); }
.keydot.apart { border: 2px solid var(--second); border-radius: 0; background: none;
  transform: rotate(45deg) scale(.85); }
.data { margin-top: .4rem; } td .data { margin: 0; }
.data summary { padding: .35rem 0; font-weight: 400; font-size: .85rem; color: var(--quiet); }
.data table { font-size: .85rem; }
"""
TABLET = """
@media screen and (max-width: 62rem) {
  .stacked, .stacked tbody, .stacked tr, .stacked th, .stacked td, .stacked caption { display: block; }
  .stacked thead { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
  .stacked tr { padding: .6rem 0; border-bottom: 1px solid var(--quiet); }
  .stacked th, .stacked td { padding: .15rem 0; border: 0; text-align: left; white-space: normal; }
  .stacked td[data-column]::before { content: attr(data-column) " "; color: var(--quiet); font-size: .82rem; }
  .stacked td:empty { display: none; } .stacked td.long { min-width: 0; }
}
"""
PHONE = """
@media (max-width: 40rem) {
  body { padding: 1rem .8rem 2rem; }
  figure { padding: .6rem .6rem .1rem; }
  .tick, .value, .name { font-size: 14px; } .dotname { font-size: 13px; }
  th, td { padding: .38rem .4rem; } .scroll tbody th { min-width: 6rem; }
  nav a { padding: .4rem 0; }
  label { min-height: 2.5rem; }
}
"""
PAPER = """
@media print {
  @page { margin: 14mm 12mm; }
  body { max-width: none; padding: 0; font-size: 10pt; }
  .shelf { grid-template-columns: 1fr 1fr; } table { font-size: 8.5pt; }
  .scroll { overflow: visible; } .scroll th, .scroll td { padding: .25rem .3rem; }
  .facts { font-size: 8pt; } .facts th, .facts td { padding: .15rem .4rem; }
  footer, nav, .data { display: none; }
  h2, summary, caption, thead { break-after: avoid; } tr { break-inside: avoid; } thead { display: table-header-group; }
  details::details-content { display: block; content-visibility: visible; height: auto; }
  * { print-color-adjust: exact; }
}
"""
CHOICE = "\n".join(f".chosen:has(.show-{kind}:not(:checked)) tr.is-{kind} {{ display: none; }}" for kind in KINDS)
STYLE = (
    f"\n:root {{ color-scheme: light dark; {LIGHT} }}\n"
    f"@media (prefers-color-scheme: dark) {{ :root {{ {DARK} }} }}\n"
    f"{PAGE}{TABLES}{CHARTS}{PHONE}{TABLET}{CHOICE}\n"
    f"@media print {{ :root {{ color-scheme: light; {LIGHT} }} }}\n{PAPER}"
)
