"""Parts of SVG pictures: text, and round numbers along an axis. No torch."""

import math
from html import escape


def text(x: float, y: float, what: str, anchor: str = "start", style: str = "") -> str:
    """Return a line of text at a point.

    Args:
        x: Horizontal position, in pixels.
        y: Vertical position of the base line, in pixels.
        what: Text to show.
        anchor: Part of the text that is at x: `"start"`, `"middle"` or `"end"`.
        style: CSS of the text.
    """
    own = f' style="{style}"' if style else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{own}>{escape(what)}</text>'


def ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Return about `count` multiples of 1, 2 or 5 times a power of ten in [low, high]."""
    wanted = max(high - low, 1e-9) / count
    power = 10.0 ** math.floor(math.log10(wanted))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= wanted)
    return [round(i * step, 10) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
