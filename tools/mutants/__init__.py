"""Measure what tests find: `python tools/mutants`."""
