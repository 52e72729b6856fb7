"""Report of a dry run as one page of HTML without references. No torch."""

from html import escape

from hp_dry.report.curve import colours, curve_svg
from hp_dry.report.report import about, found_problems, verdict
from hp_dry.report.summary import Summary
from hp_dry.report.tables import Table, tables
from hp_dry.trace import KINDS

_STYLE = """
:root{color-scheme:light dark}
*{box-sizing:border-box}
body{margin:0 auto;max-width:72rem;padding:1.5rem;line-height:1.5;background:#fff;color:#24292f;
font-family:ui-sans-serif,system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif}
h1{font-size:1.6rem;line-height:1.2;margin:0}
h2{font-size:1.15rem;margin:0 0 .4rem}
section{margin:2rem 0;break-inside:avoid}
p{margin:.3rem 0}
.note{color:#57606a;font-size:.9rem}
.good,.bad{display:inline-block;padding:.1rem .6rem;border-radius:.3rem;font-weight:600}
.good{background:#d7f0de;color:#0b4a22}
.bad{background:#fbdcd9;color:#7a130d}
.wide{overflow-x:auto}
.wide:focus-visible,a:focus-visible{outline:2px solid #2456ab;outline-offset:2px}
table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums}
caption{text-align:left;color:#57606a;font-size:.9rem;caption-side:bottom;padding-top:.4rem}
th,td{padding:.25rem .8rem .25rem 0;text-align:right;vertical-align:top;white-space:nowrap}
th.word,td.word{text-align:left;white-space:normal;overflow-wrap:anywhere;min-width:6rem}
thead th{border-bottom:2px solid #d0d7de;font-weight:600}
tbody th{font-weight:400}
tbody tr+tr>*{border-top:1px solid #d0d7de}
.swatch{display:inline-block;width:.8em;height:.8em;margin-right:.5em;border-radius:.15em}
svg{max-width:100%;height:auto}
nav ul{list-style:none;padding:0;display:flex;flex-wrap:wrap;gap:.2rem 1.2rem}
a{color:#0a4da2}
@media (prefers-color-scheme:dark){body{background:#0d1117;color:#e6edf3}
.note,caption{color:#9da7b1}thead th,tbody tr+tr>*{border-color:#30363d}a{color:#79b8ff}
.good{background:#0f3d20;color:#b6f0c8}.bad{background:#571a16;color:#ffd7d3}
.wide:focus-visible,a:focus-visible{outline-color:#79b8ff}}
@media print{body{max-width:none;padding:0}nav{display:none}.wide{overflow:visible}
.swatch,svg{print-color-adjust:exact}}
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(summary: Summary) -> str:
    """Write a page: the verdict, problems, the curve of the largest rank, all tables.

    The page loads and runs nothing: it contains tables and an SVG.
    """
    found = tables(summary)
    body = [
        f"<header><h1>Dry run of {escape(summary.name)}</h1>",
        *_head(summary),
        "</header>",
        *_contents(found),
        "<main>",
        *_problems(summary),
        *_curve(summary),
    ]
    for index, table in enumerate(found):
        body += _section(table, f"table-{index}")
    body.append("</main>")
    return "\n".join(
        (
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>Dry run of {escape(summary.name)}</title>",
            f"<style>{_STYLE}{colours()}</style>",
            "</head>",
            "<body>",
            *body,
            "</body>",
            "</html>\n",
        )
    )


def _head(summary: Summary) -> list[str]:
    fits = bool(summary.ranks) and summary.fits
    return [
        f"<p>{escape(about(summary))}, {escape(summary.gpu)}</p>",
        f'<p><span class="{"good" if fits else "bad"}">{escape(verdict(summary))}</span></p>',
    ]


def _contents(found: list[Table]) -> list[str]:
    links = "".join(
        f'<li><a href="#table-{index}">{escape(table.title)}</a></li>'
        for index, table in enumerate(found)
    )
    return [f'<nav aria-label="Contents"><ul>{links}</ul></nav>']


def _problems(summary: Summary) -> list[str]:
    found = found_problems(summary)
    if not summary.problems:
        return [f'<p><span class="good">{found}</span></p>']
    items = "".join(f"<li>{escape(each)}</li>" for each in summary.problems)
    head = f'<h2 id="problems"><span class="bad">{found}</span></h2>'
    return [f'<section aria-labelledby="problems">{head}<ol>{items}</ol></section>']


def _curve(summary: Summary) -> list[str]:
    if not summary.ranks:
        return []
    worst = summary.worst
    title = f"Rank {worst.rank}, routing {worst.skew}"
    picture = curve_svg(worst.memory, title=title, gpu_bytes=summary.gpu_bytes)
    return [f'<section aria-label="Memory over the run">{picture}</section>']


def _section(table: Table, name: str) -> list[str]:
    note = f"<caption>{escape(table.note)}</caption>" if table.note else ""
    heads = "".join(
        f'<th scope="col"{_word(table, index)}>{escape(column)}</th>'
        for index, column in enumerate(table.columns)
    )
    return [
        f'<section aria-labelledby="{name}">',
        f'<h2 id="{name}">{escape(table.title)}</h2>',
        f'<div class="wide" role="region" aria-labelledby="{name}" tabindex="0"><table>',
        note,
        f"<thead><tr>{heads}</tr></thead>",
        "<tbody>",
        *(_row(table, row) for row in table.rows),
        "</tbody></table></div></section>",
    ]


def _row(table: Table, row: tuple[str, ...]) -> str:
    first, *others = row
    swatch = ""
    if table.columns[0] == "memory" and first in KINDS:
        swatch = f'<span class="swatch kind{KINDS.index(first)}"></span>'
    cells = "".join(
        f"<td{_word(table, index)}>{escape(word)}</td>" for index, word in enumerate(others, 1)
    )
    return f'<tr><th scope="row"{_word(table, 0)}>{swatch}{escape(first)}</th>{cells}</tr>'


def _word(table: Table, index: int) -> str:
    return ' class="word"' if index in table.words else ""
