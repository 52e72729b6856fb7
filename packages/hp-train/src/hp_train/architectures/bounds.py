"""Cells whose error may be larger than that of all others, each with the reason. No torch."""

BOUNDS: dict[tuple[str, str], tuple[float, str]] = {}
"""Architecture and kind of cell, or "" for all kinds -> largest error that is equal, and why."""
