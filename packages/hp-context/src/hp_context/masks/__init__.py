"""Masks: the keys that a query may see, as data, and by blocks."""
