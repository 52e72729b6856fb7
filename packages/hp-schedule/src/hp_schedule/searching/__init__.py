"""Search for short schedules, with a proof of how much shorter one could be."""

from hp_schedule.searching.search import SearchResult, search
from hp_schedule.searching.shortening import shorten

__all__ = ["SearchResult", "search", "shorten"]
