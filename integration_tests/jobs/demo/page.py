"""The page of the demo: HTML that stands alone. No torch."""

import platform
from collections.abc import Iterable, Sequence
from html import escape

from integration_tests.jobs.demo.by_hand import command
from integration_tests.jobs.demo.causes import cause_of
from integration_tests.jobs.demo.cells import (
    DIFFERENT,
    DOUBTED,
    EQUAL,
    FAILED,
    LAYOUTS,
    RED,
    REFUSED,
    Architecture,
    Bred,
    Cell,
)
from integration_tests.models.architectures.kept import told

_CLASSES = {EQUAL: "good", DIFFERENT: "bad", FAILED: "failed", DOUBTED: "failed", REFUSED: "none"}
_STYLE = """
:root{color-scheme:light dark;font:15px/1.45 system-ui,sans-serif}
body{max-width:70em;margin:2em auto;padding:0 1em}
table{border-collapse:collapse;margin:1em 0}
th,td{padding:.2em .6em;border:1px solid #8884;text-align:left;vertical-align:top}
.good{background:#3a35}.bad{background:#d336}.failed{background:#c906}.none{color:#888}
details{margin:.6em 0}pre{overflow-x:auto;background:#8881;padding:.6em;font-size:13px}
"""


def page(zoo: Sequence[Bred], found: Sequence[Architecture], seconds: float) -> str:
    """Draw the page.

    Args:
        zoo: Jobs of the zoo.
        found: Architectures.
        seconds: What all of it took.
    """
    versions = next((one.versions for one in found), {})
    facts = ", ".join(f"{name} {version}" for name, version in versions.items())
    where = f"{platform.machine()}, Python {platform.python_version()}; {seconds:.0f} s"
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>hp-verify: a demo</title>",
        f"<style>{_STYLE}</style><h1>Training jobs beside one process</h1>",
        f"<p>{escape(facts)}; {escape(where)}.</p>",
        "<p>Two ranks over Gloo, each job unchanged, recorded from outside.</p>",
    ]
    if found:
        parts += _architectures(found)
    if zoo:
        parts += _zoo(zoo)
    return "".join(parts) + "</html>\n"


def _architectures(found: Sequence[Architecture]) -> Iterable[str]:
    heads = "".join(f"<th>{escape(layout)}</th>" for layout in LAYOUTS)
    yield "<h2>Architectures of transformers in its own layouts</h2>"
    yield (
        "<p>A tiny random model, two steps of AdamW. Equal: every gradient and weight, with the "
        "largest relative error. Different: with the first difference below.</p>"
    )
    yield f"<table><tr><th>architecture</th>{heads}</tr>"
    for one in found:
        yield f"<tr><th>{escape(one.name)}</th>"
        if not one.cells:
            yield f"<td colspan={len(LAYOUTS)} class=none>{escape(one.reason)}</td>"
        by_layout = {cell.layout: cell for cell in one.cells}
        yield from (_cell(one, by_layout[layout]) for layout in LAYOUTS if layout in by_layout)
        yield "</tr>"
    yield "</table>"
    for one in found:
        yield from (_told(one, cell) for cell in one.cells if cell.state in RED)


def _cell(one: Architecture, cell: Cell) -> str:
    text = f"equal {told(cell.error)}" if cell.state == EQUAL else cell.state
    if cell.num_unaligned:
        text += f", {cell.num_unaligned} not compared"
    if cell.state in RED:
        text = f'<a href="#{_anchor(one, cell)}">{text}</a>'
    return f"<td class={_CLASSES.get(cell.state, 'none')}>{text}</td>"


def _anchor(one: Architecture, cell: Cell) -> str:
    return escape(_file_name(one, cell), quote=True)


def _file_name(one: Architecture, cell: Cell) -> str:
    return f"{one.name}-{cell.layout}".replace(" ", "-")


def _told(one: Architecture, cell: Cell) -> str:
    lines = [cell.first or cell.reason, *(f"likely: {line}" for line in cell.likely)]
    cause = cause_of(one.name, cell.layout, one.versions.get("transformers", ""))
    if cause is not None:
        lines.append(f"cause: {cause.what}. {cause.why}")
    if cell.by_hand:
        lines.append("the same by hand, in transformers and torch alone, relative errors:")
        lines += [f"  {told(error)} {name}" for name, error in cell.by_hand.items()]
    if cell.by_hand_failed:
        lines.append(f"by hand it fails: {cell.by_hand_failed}")
    lines += [f"not compared: {name}: {why}" for name, why in cell.unaligned.items()]
    title = escape(f"{one.name}, {cell.layout}: {cell.state}")
    return (
        f'<details id="{_anchor(one, cell)}"><summary>{title}</summary>'
        f"<pre>{escape(chr(10).join(lines))}</pre>{_reproduction(one, cell)}</details>"
    )


def _reproduction(one: Architecture, cell: Cell) -> str:
    """The program of transformers and torch alone, folded, and how it is run."""
    if not cell.program:
        return ""
    name = _file_name(one, cell)
    told = f"Reproduction: {len(cell.program.splitlines())} lines of transformers and torch"
    return (
        f"<details><summary>{told}</summary>"
        f"<p>As {escape(name)}.py, in an empty folder: <code>{escape(command(name))}</code></p>"
        f"<pre>{escape(cell.program)}</pre></details>"
    )


def _zoo(zoo: Sequence[Bred]) -> Iterable[str]:
    yield "<h2>Bugs of public threads</h2><table><tr><th>layout</th><th>bug</th><th>found</th></tr>"
    for one in zoo:
        told = escape(one.first or "equal")
        likely = "".join(f"<br>likely: {escape(line)}" for line in one.likely)
        style = "good" if one.is_right else "bad"
        bug = escape(one.bug or "none")
        yield f"<tr><td>{one.layout}<td>{bug}<td class={style}>{told}{likely}</tr>"
    yield "</table>"
