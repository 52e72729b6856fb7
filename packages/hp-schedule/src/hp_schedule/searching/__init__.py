"""Search for short schedules, with a proof of how much shorter one could be."""
