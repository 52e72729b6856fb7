"""What was found as one JSON file and one page that stands alone, both fit to be sent. No torch."""

import json
from collections import Counter
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import msgspec

from hp_base.atomic_write import replace_file
from integration_tests.acceptance.clean import cleaned, cleaner
from integration_tests.acceptance.outcome import BAD, Outcome

FORMAT = 1


def write_result(folder: Path, facts: dict[str, Any], outcomes: Sequence[Outcome]) -> None:
    """Write result.json and result.html.

    Args:
        folder: Folder of the two files.
        facts: Versions and hardware of the machine.
        outcomes: Outcomes of all cases, in their order.
    """
    result = cleaned(
        {
            "format": FORMAT,
            "machine": facts,
            "counts": dict(Counter(outcome.status for outcome in outcomes)),
            "cases": [msgspec.to_builtins(outcome) for outcome in outcomes],
        },
        cleaner(),
    )
    replace_file(folder / "result.json", json.dumps(result, indent=1).encode())
    replace_file(folder / "result.html", page(result).encode())


def page(result: dict[str, Any]) -> str:
    """The page of a cleaned result."""
    counts = ", ".join(f"{count} {status}" for status, count in result["counts"].items())
    machine = "".join(
        f"<tr><th>{escape(name)}</th><td>{_value(value)}</td></tr>"
        for name, value in result["machine"].items()
        if value not in (None, "")
    )
    rows = "".join(map(_row, result["cases"]))
    return _PAGE.format(counts=escape(counts), machine=machine, rows=rows)


def _row(case: dict[str, Any]) -> str:
    seconds = f"{case['seconds']:.0f} s" if case["seconds"] else ""
    figures = "".join(
        f"<tr><th>{escape(name)}</th><td>{_value(value)}</td></tr>"
        for name, value in case["figures"].items()
    )
    log = f"<pre>{escape(case['log'])}</pre>" if case["log"] else ""
    more = f"<table>{figures}</table>{log}" if figures or log else ""
    if more:
        is_open = " open" if case["status"] in BAD else ""
        more = f"<details{is_open}><summary>more</summary>{more}</details>"
    kind = "bad" if case["status"] in BAD else case["status"].replace(" ", "-")
    return (
        f'<tr class="{kind}"><td>{escape(case["status"])}</td><td>{escape(case["name"])}'
        f"<small>{escape(case['what'])}</small></td><td>{escape(case['summary'])}{more}</td>"
        f"<td>{seconds}</td></tr>\n"
    )


def _value(value: Any) -> str:
    if isinstance(value, dict):
        items = "".join(f"<li>{escape(key)}: {_value(item)}</li>" for key, item in value.items())
        return f"<ul>{items}</ul>"
    if isinstance(value, list):
        return "<br>".join(map(_value, value))
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1e6 else f"{value:,.0f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    text = escape(str(value))
    return f"<pre>{text}</pre>" if "\n" in text else text


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>hp-train acceptance</title>
<style>
:root {{ color-scheme: light dark }}
body {{ font: 15px/1.4 system-ui, sans-serif; margin: 2em auto; max-width: 70em; padding: 0 1em }}
table {{ border-collapse: collapse }} .cases {{ width: 100% }}
th, td {{ text-align: left; vertical-align: top; padding: .3em .8em .3em 0 }}
.cases > tbody > tr > td {{ border-top: 1px solid #8884 }}
td:last-child {{ white-space: nowrap }} td td:last-child {{ white-space: normal }}
small {{ display: block; opacity: .7 }} ul {{ margin: 0; padding-left: 1em }}
pre {{ overflow-x: auto; font-size: 12px; background: #8881; padding: .5em; max-width: 55em }}
.passed > td:first-child {{ color: #2a7d2a }}
.bad > td:first-child {{ color: #d32f2f; font-weight: bold }}
.left-out, .not-run {{ opacity: .65 }}
</style></head><body>
<h1>hp-train on this machine</h1>
<p>{counts}</p>
<table>{machine}</table>
<h2>Cases</h2>
<table class="cases"><tbody>
{rows}</tbody></table>
</body></html>
"""
