"""What a dry run found, for people: memory, work, traffic, tables, a page."""
