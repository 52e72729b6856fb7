"""Cells whose error may be larger than that of all others, each with the reason. No torch."""

_CPMANT = (
    "a step amplifies rounding by up to 100: plain transformers with its sequences one by one "
    "differs from itself by 2e-12 in the third step, and by 1e-15 in the first"
)
BOUNDS: dict[tuple[str, str], tuple[float, str]] = {
    ("cpmant", ""): (1e-9, _CPMANT),
}
"""Architecture and kind of cell, or "" for all kinds -> largest error that is equal, and why."""
