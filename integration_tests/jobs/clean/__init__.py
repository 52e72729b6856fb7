"""Clean pairs of jobs that must not be accused, and bugs seeded in them that must be named."""
