"""The HTML of reports: page, sections, tables, galleries."""

import base64
import html
from collections.abc import Sequence

from trainyard.report.figures import Plot
from trainyard.text import make_printable

PAGE_TEMPLATE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>@TITLE@</title>
<style>
:root { color-scheme: light dark; --page: #fff; --ink: #111827; --soft: #4b5563; --line: #e5e7eb; --panel: #f9fafb;
  --grey: #1f2937; --grey-back: #e5e7eb; --good: #065f46; --good-back: #d1fae5; --bad: #7c2d12; --bad-back: #ffedd5;
  --note-back: #fffbeb; --link: #0059a0; }
@media (prefers-color-scheme: dark) { :root { --page: #111418; --ink: #e5e7eb; --soft: #a3adba; --line: #374151;
  --panel: #1b2027; --grey: #e5e7eb; --grey-back: #374151; --good: #a7f3d0; --good-back: #064e3b; --bad: #fed7aa;
  --bad-back: #7c2d12; --note-back: #2c2410; --link: #7cc4ff; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 2rem 1.25rem 4rem; color: var(--ink); background: var(--page);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { margin: 0; font-size: 1.75rem; line-height: 1.2; overflow-wrap: anywhere; }
h2 { margin: 2.5rem 0 .75rem; padding-bottom: .3rem; font-size: 1.15rem;
  border-bottom: 1px solid var(--line); }
h3 { margin: 1.25rem 0 .4rem; font-size: .95rem; }
p { margin: .25rem 0; }
.soft { color: var(--soft); }
.pill { display: inline-block; max-width: 100%; overflow-wrap: anywhere; margin-top: .6rem; padding: .1rem .7rem;
  border-radius: 1rem; font-size: .85rem; font-weight: 600; color: var(--grey); background: var(--grey-back); }
.pill.done { color: var(--good); background: var(--good-back); }
.pill.failed { color: var(--bad); background: var(--bad-back); }
.note { padding: .6rem .9rem; margin-top: 1rem; border-left: 3px solid #E69F00; background: var(--note-back);
  overflow-wrap: anywhere; }
a { color: var(--link); }
.headline { padding: 1rem 1.25rem; margin-top: 1rem; border: 1px solid var(--line); border-radius: .5rem;
  background: var(--panel); overflow-wrap: anywhere; }
.score { font-size: 2.5rem; font-weight: 700; line-height: 1.2; font-variant-numeric: tabular-nums; }
.interval { display: inline-block; font-size: 1rem; font-weight: 400; color: var(--soft); }
.verdict { font-weight: 600; }
.facts { display: grid; grid-template-columns: repeat(4, 1fr); gap: .75rem; margin: 0; }
.facts div { padding: .7rem .9rem; border: 1px solid var(--line); border-radius: .5rem;
  background: var(--panel); }
.facts dt { font-size: .8rem; color: var(--soft); }
.facts dd { margin: 0; font-size: 1.1rem; font-weight: 600; overflow-wrap: anywhere; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(24rem, 100%), 1fr)); gap: 1rem; }
figure { margin: 0; padding: .5rem; border: 1px solid var(--line); border-radius: .5rem;
  max-width: 40rem; background: #fff; }
img { display: block; width: 100%; height: auto; }
.facts + .plots { margin-top: .75rem; }
summary { margin-top: 1rem; cursor: pointer; color: var(--soft); }
.scroll { overflow-x: auto; margin-top: 1rem; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem 1.25rem .3rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; }
td { white-space: nowrap; }
td.number, th.number { text-align: right; }
td.number { white-space: pre; }
td.text { white-space: normal; overflow-wrap: anywhere; min-width: 12rem; }
pre { margin: 0; padding: 1rem; overflow-x: auto; font: .8rem/1.45 ui-monospace, Menlo, Consolas, monospace;
  background: var(--panel); border: 1px solid var(--line); border-radius: .5rem; }
@media (max-width: 40rem) { .facts { grid-template-columns: repeat(2, 1fr); } }
@media print {
  body { max-width: none; padding: 0; font-size: 11px; }
  pre { white-space: pre-wrap; overflow-wrap: anywhere; }
  .plots { grid-template-columns: 1fr 1fr; }
  .scroll { overflow: visible; }
  td { white-space: normal; }
  figure, tr, .facts div { break-inside: avoid; }
  h2, h3 { break-after: avoid; }
}
</style>
</head>
<body>
@BODY@
</body>
</html>
"""


def escape(text: str) -> str:
    """Return a text as HTML that shows it: the only way into a page, because it may be a stranger's."""
    return html.escape(make_printable(text))


def render_page(title: str, *sections: str) -> str:
    """Render a page that needs no network and no other file; `title` is escaped here, an empty section left out."""
    body = "\n".join(filter(None, sections))
    return PAGE_TEMPLATE.replace("@TITLE@", escape(title)).replace("@BODY@", body)


def render_section(title: str, *parts: str, optional: bool = False) -> str:
    """Render a section; if all its parts are empty, a note, or nothing if it is optional."""
    if optional and not any(parts):
        return ""
    inner = "\n".join(part for part in parts if part) or '<p class="soft">Not recorded.</p>'
    return f"<section>\n<h2>{escape(title)}</h2>\n{inner}\n</section>"


def render_gallery(plots: Sequence[Plot]) -> str:
    figures = [
        f'<figure><img alt="{escape(plot.title)}" '
        f'src="data:image/png;base64,{base64.b64encode(plot.png).decode()}"></figure>'
        for plot in plots
    ]
    return f'<div class="plots">{"".join(figures)}</div>' if figures else ""


def render_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool = True) -> str:
    """Render a table with escaped text, "" without rows; `numbers` aligns all but the first column to the right."""

    def cells(tag: str, row: Sequence[str]) -> str:
        kinds = ["number" if numbers and i > 0 else "text" if i == len(row) - 1 else "" for i in range(len(row))]
        return "".join(f'<{tag} class="{k}">{escape(t)}</{tag}>' for k, t in zip(kinds, row, strict=True))

    if not rows:
        return ""
    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    head = f"<thead><tr>{cells('th', header)}</tr></thead>"
    return f'<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>'
