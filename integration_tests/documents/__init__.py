"""Pages, pins and tools of this repository beside what they speak of."""
